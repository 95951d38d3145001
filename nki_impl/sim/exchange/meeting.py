"""The execution of a collective: operands are checked, all cores meet, and the last core to arrive moves the data.

A collective is a meeting of all cores of all ranks of a group. When all cores have arrived, the sources are copied, and
then the destinations are written, so the order in which the ranks run does not matter. Collectives are counted
separately for each group: the n-th collective that a core issues is matched with the n-th collective of every other
core of the group. All of them must be the same operation with the same number of operands, of the same shapes, dtypes
and names.

If a rank has two cores (LNC 2), both cores issue every collective. Operands in shared HBM must be the same tensors on
both cores, and are moved once. Operands in SBUF belong to one core; they move between cores of different ranks with the
same core number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nki_impl.sim.errors import CollectiveError, LaunchError, PlacementError, TargetError
from nki_impl.sim.exchange.groups import Rings, ring_of
from nki_impl.sim.machine.core import Core, current
from nki_impl.sim.machine.races import note_meeting
from nki_impl.sim.machine.turns import Arrival, Machine, Meeting, Worker
from nki_impl.sim.memory.storage import MemoryRegion
from nki_impl.sim.tensor.patterns import over
from nki_impl.sim.tensor.views import NkiTensor


@dataclass(frozen=True, eq=False)
class Call:
    """One core's call of a collective: the tensors that it reads and writes, and what must be equal in all calls.

    ``options``: (name, value) pairs that must be equal. ``move``: a function that takes the calls of one group, in the
    order of ranks, and moves the data. ``sent_bytes``, ``hops`` and ``flops``: the bytes that this rank sends, the
    number of transfers, and the number of additions or comparisons. ``who``: the core, as text.

    Collectives of variable length also have ``metadata``, a tensor with counts, ``table``, the values that this core
    read from it, and ``received``, the part of it that the collective writes, or None.
    """

    who: str
    operation: str
    reads: tuple[NkiTensor, ...]
    writes: tuple[NkiTensor, ...]
    rings: Rings
    options: tuple[tuple[str, object], ...]
    move: Callable[[Sequence[Call]], Any]
    sent_bytes: int = 0
    hops: int = 0
    flops: int = 0
    metadata: NkiTensor | None = None
    table: NDArray[np.int64] | None = None
    received: NkiTensor | None = None

    @property
    def on_chip(self) -> bool:
        """Whether the operands are in SBUF."""
        return self.reads[0].storage.on_chip

    @property
    def operands(self) -> tuple[NkiTensor, ...]:
        """Every tensor of the call, metadata included."""
        return (*self.reads, *self.writes, *(() if self.metadata is None else (self.metadata,)))

    @property
    def changes(self) -> tuple[NkiTensor, ...]:
        """The tensors that move() writes: the destinations, and received counts in HBM."""
        received = self.received
        return (
            self.writes
            if received is None or received.storage.on_chip
            else (*self.writes, received)
        )


def begin(operation: str, priority: int | None = None) -> tuple[Core, Worker, Machine]:
    """Begin the collective ``operation``, and return the current core, its worker (thread), and the machine of the run.

    The scheduler may switch to another core first. Raises :class:`TargetError` if ``priority`` is given on a target
    before NeuronCore-v4, and :class:`LaunchError` outside a launch.
    """
    core = current()
    core.begin(operation)
    if priority is not None and core.generation < 4:
        raise TargetError(
            "priority", "None before NeuronCore-v4", f"{priority} on {core.target}", "leave it out"
        )
    if priority is not None and priority not in (0, 1, 2, 3):
        raise CollectiveError(
            "priority", "0, 1, 2 or 3", priority, "pass one of these; 0 is the highest"
        )
    if core.worker is None or core.worker.machine is None:
        raise LaunchError(
            "kernel", "a collective inside a launch", "no launch", "use run_ranks(kernel, ...)"
        )
    return core, core.worker, core.worker.machine


def check(core: Core, call: Call) -> None:
    """Check where the operands are and that they do not overlap, and record the call in the device loop around it."""
    if core.loops is not None:
        core.loops.enter(call.operation, call.operands)
    _check_memory(core, call)
    _check_alias(call)


def issue(core: Core, worker: Worker, machine: Machine, call: Call) -> Any:
    """Check the operands and wait for the other cores of the group; the last core to arrive moves the data.

    Returns what ``call.move`` returned.
    """
    check(core, call)
    ring = ring_of(call.rings, worker.rank)
    number = worker.issued[ring]
    worker.issued[ring] += 1
    meeting = machine.meetings.get((ring, number))
    if meeting is not None:
        _compare(worker, call, meeting)
    if core.on_operands is not None:
        read, written = (*call.reads, call.metadata), (*call.writes, call.received)
        core.on_operands(core.core, core.index, ("srcs", "dsts"), (read, written), {})
    if worker.races is not None:
        worker.races.on_collective(core, call.reads, call.changes)
    for tensor in call.operands:
        if not tensor.storage.on_chip:
            worker.exchanged[tensor.storage] = call.operation
    elements = sum(tensor.size for tensor in call.writes)
    if worker.core == 0 or call.on_chip:
        core.count("collective", elements, call.flops, call.sent_bytes)
        worker.hops += call.hops
    else:
        core.count("collective", 0)

    def act(complete: Meeting) -> Any:
        return _move(complete, machine.lnc, core)

    members = machine.cores_of(ring)
    return machine.meet(worker, (ring, number), call.operation, members, call, act)


def _move(meeting: Meeting, lnc: int, core: Core) -> Any:
    """Move the data of one group, and tell the race detectors that the collective orders its operands.

    Operands in SBUF are moved separately for each core number. Returns what the function of the first move returned.
    """
    calls: list[Call] = [meeting.arrived[worker].payload for worker in meeting.members]
    lanes = range(lnc) if calls[0].on_chip else range(1)
    # Data of other ranks are written here, which are not accesses of this core.
    watching, core.on_access = core.on_access, None
    try:
        results = [calls[0].move(calls[lane::lnc]) for lane in lanes]
    finally:
        core.on_access = watching
    for lane in lanes:
        note_meeting(meeting.members[lane :: len(lanes)])
    for worker, call in zip(meeting.members[::lnc], calls[::lnc], strict=True):
        if worker.races is not None:
            worker.races.order(tensor.storage for tensor in call.operands)
    return results[0]


def _check_memory(core: Core, call: Call) -> None:
    """Raise an error for operands in PSUM or in different memories, for kernel inputs, and for tensors without a name.

    With two cores per rank, operands in private HBM are errors, too.
    """
    for operand, tensor in [("src", t) for t in call.reads] + [("dst", t) for t in call.writes]:
        _check_operand(core, operand, tensor)
        if tensor.storage.on_chip != call.on_chip:
            name = tensor.name or "an unnamed tensor"
            raise PlacementError(
                operand,
                "all operands in HBM or all in SBUF",
                f"{name} in {tensor.storage.buffer.value}, but srcs[0] in {call.reads[0].storage.buffer.value}",
                "dma_copy one of them to the memory of the other",
            )
    if call.metadata is not None:
        _check_operand(core, "metadata_tensor", call.metadata)


def _check_operand(core: Core, operand: str, tensor: NkiTensor) -> None:
    storage = tensor.storage
    name = storage.name or "an unnamed tensor"
    if storage.buffer is MemoryRegion.psum:
        raise PlacementError(
            operand, "a tensor in HBM or SBUF", f"{name} in PSUM", "copy it out first"
        )
    if tensor.dynamic is not None:
        raise CollectiveError(
            operand, "a static tensor", "a dynamic access pattern", "copy it first"
        )
    if storage.is_input:
        raise CollectiveError(
            operand,
            "a tensor that is neither a kernel input nor an output: collectives cannot use those",
            f"the kernel input {name}",
            "dma_copy it into nl.ndarray(..., buffer=nl.shared_hbm, name=...) first",
        )
    if storage.on_chip:
        return
    if core.lnc > 1 and storage.buffer is not MemoryRegion.shared_hbm:
        raise CollectiveError(
            operand,
            "shared HBM, which both cores can access",
            f"{name} in private HBM",
            "use nl.shared_hbm",
        )
    if not storage.name:
        raise CollectiveError(
            operand,
            "a tensor with a name (without one the compiler fails with NCC_IBIR440)",
            "an unnamed tensor",
            "allocate it with nl.ndarray(..., name='...')",
        )


def _check_alias(call: Call) -> None:
    """Raise CollectiveError if a destination overlaps a source, the metadata or another destination."""
    sources = call.reads if call.metadata is None else (*call.reads, call.metadata)
    for index, dst in enumerate(call.writes):
        for other in (*sources, *call.writes[:index]):
            if overlap(dst, other):
                raise CollectiveError(
                    "dst",
                    "destinations that share no element with a source or another destination",
                    f"{dst.name or 'the tensor'} {dst.shape} and {other.name or 'the tensor'} {other.shape}",
                    "use two buffers and swap their roles after each step",
                )


def overlap(a: NkiTensor, b: NkiTensor) -> bool:
    """Return whether two static tensors share an element. The answer is exact for any strides."""
    if a.storage is not b.storage:
        return False
    if a.whole or b.whole:
        return True
    unit = min(a.dtype.itemsize, b.dtype.itemsize)
    painted = np.zeros(a.storage.raw.size // unit, np.bool_)
    over(a, painted, unit)[...] = True
    return bool(over(b, painted, unit).any())


def _compare(worker: Worker, call: Call, meeting: Meeting) -> None:
    """Raise CollectiveError if ``call`` does not match the calls of the other cores in the group."""
    other, first = next(iter(meeting.arrived.items()))
    mine, theirs = _describe(call), _describe(first.payload)
    if mine != theirs:
        raise _mismatch(worker, ", ".join(mine), other, ", ".join(theirs), first)
    for partner, arrival in meeting.arrived.items():
        if partner.rank == worker.rank and not call.on_chip:
            _compare_cores(worker, call, partner, arrival)


def _compare_cores(worker: Worker, call: Call, partner: Worker, arrival: Arrival) -> None:
    """Raise CollectiveError unless the HBM operands of both cores of a rank are the same tensors.

    Metadata in SBUF must hold the same values on both cores.
    """
    theirs: Call = arrival.payload
    if not np.array_equal(call.table, theirs.table):  # type: ignore[arg-type]
        raise _mismatch(worker, f"metadata {call.table}", partner, f"{theirs.table}", arrival)
    for mine, other in zip(call.operands, theirs.operands, strict=True):
        if mine.storage.on_chip:
            continue
        same = mine.storage is other.storage and mine.byte_offset == other.byte_offset
        if not same or mine.array.strides != other.array.strides:
            text = f"{mine.name} from element {mine.offset} on, strides {mine.strides}"
            partners = f"{other.name} from element {other.offset} on, strides {other.strides}"
            raise _mismatch(worker, text, partner, f"{partners} or another allocation", arrival)


def _mismatch(
    worker: Worker, mine: str, other: Worker, theirs: str, first: Arrival
) -> CollectiveError:
    return CollectiveError(
        "sequence",
        "every core of every rank of the group issues the same collective on the same operands",
        f"{worker} issues {mine} where {other} issued {theirs} ({first.line})",
        "make the program the same on all ranks and cores; only data may depend on the rank",
        operation=first.operation,
    )


def _describe(call: Call) -> list[str]:
    """Return the properties of a call that must be equal in all calls of the group, as text."""
    parts = [call.operation, f"groups {call.rings}"]
    parts += [f"{name}={value}" for name, value in call.options]
    metadata = () if call.metadata is None else (call.metadata,)
    for operand, group in (("src", call.reads), ("dst", call.writes), ("metadata", metadata)):
        for tensor in group:
            parts.append(
                f"{operand} {tensor.name} {tensor.shape} {tensor.dtype} {tensor.buffer.value}"
            )
    return parts
