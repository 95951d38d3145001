"""Collectives of variable length: ``all_gather_v`` and ``all_to_all_v``, and their parts ``_prepare`` and ``_trigger``.

The tensors are flat buffers of elements, in HBM. Counts and offsets are elements, known only when the collective runs.
They are in ``metadata_tensor``, contiguous uint32 of shape (rows, n) in HBM or (1, rows, n) in SBUF, with one column
for each of the n ranks of the group, in the order of its list:

- row 0: the number of elements sent to each rank; row 1: where they begin in src. For ``all_gather_v``, only the first
  column is read, and the same elements go to every rank;
- row 2: the numbers of elements received, which the collective writes unless ``recv_counts_known``. It is never read;
- row 3, only with ``has_rdispls``: where the elements from each rank are written in dst. Without it, the elements from
  rank r begin at r * dst.size / n. There are 3 rows or 4.

Elements of dst that nothing was received for keep their values.

A prepare reads the metadata, a trigger the source. Each prepare is followed by exactly one trigger in the same iteration
of the same device loops, with no other prepare in between. NeuronSwitch instances (trn3) refuse both.

The documentation leaves the following open. Where there is a stricter reading, it was chosen:

- ``all_gather_v`` keeps the limits of the page of 2.32: LNC 2, groups of 4 ranks, no ``has_rdispls``. Those of 2.33
  could not be read. ``all_to_all_v`` follows the page of 2.33: without NeuronSwitch, ``has_rdispls`` needs ranks with
  the same number on different nodes, which are groups (i, i + m, i + 2m, ...), for all i < m. With NeuronSwitch, groups
  consist of whole devices, which are 4 ranks (0 to 3, 4 to 7, ...) in order.
- What a rank sends to itself is moved, too, although rows 0 to 2 of ``all_to_all_v`` are defined for "other" ranks.
- A count that exceeds its part of dst, dst.size not divisible by n, and received parts that overlap are errors.
- A collective of variable length without parts, between a prepare and its trigger, is an error, because it needs the
  same setup.
- The metadata are an operand: neither a kernel input nor private HBM with LNC 2. Both cores must have the same ones.

Sources: https://awsdocs-neuron.readthedocs-hosted.com/en/v2.32.0/nki/api/generated/nki.collectives.all_gather_v.html,
https://awsdocs-neuron.readthedocs-hosted.com/en/v2.33.0/nki/api/generated/nki.collectives.all_to_all_v.html,
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/generated/nki.collectives.all_gather_v_prepare.html,
and nki.collectives.all_to_all_v_prepare.html and all_to_all_v_trigger.html in the same folder
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nki_impl.sim.errors import CollectiveError, TargetError, kernel_line
from nki_impl.sim.exchange.counts import (
    check_metadata,
    check_sent,
    chunk,
    places,
    received_row,
    values_of,
)
from nki_impl.sim.exchange.groups import ReplicaGroup, Rings, ring_of, rings_of
from nki_impl.sim.exchange.meeting import Call, begin, check, issue
from nki_impl.sim.exchange.operands import agree, check_hbm, taken, tensors
from nki_impl.sim.machine.core import Core, NkiInstruction, issued, refuse_other_nest
from nki_impl.sim.machine.turns import Machine, Worker
from nki_impl.sim.tensor.access import write
from nki_impl.sim.tensor.views import NkiTensor

Tensors = list[NkiTensor]
DEVICE = 4
"""Ranks on one device with LNC 2."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A prepare without its trigger: what the trigger will issue, the handle that it needs, and the kernel's line."""

    call: Call
    instruction: NkiInstruction
    line: str

    @property
    def operation(self) -> str:
        """The name of the prepare."""
        return self.call.operation.replace("_trigger", "_prepare")

    def not_triggered(self, before: str, operation: str | None = None) -> CollectiveError:
        """Return the error for a prepare whose trigger was not issued before something else."""
        return CollectiveError(
            "sequence",
            "exactly one trigger after each prepare, and no other prepare in between",
            f"{before} before the trigger of {self.operation} ({self.line})",
            f"issue ncc.{self.call.operation} first",
            operation=operation or self.operation,
        )


def all_gather_v(
    srcs: Tensors,
    dsts: Tensors,
    replica_group: ReplicaGroup,
    metadata_tensor: NkiTensor,
    recv_counts_known: bool = False,
    has_rdispls: bool = False,
    priority: int | None = None,
    name: str | None = None,
) -> NkiInstruction:
    """Send a part of src, whose length the metadata give, to every rank of the group; each rank has its part of dst."""
    at = begin("all_gather_v", priority)
    return _whole(at, srcs, dsts, replica_group, metadata_tensor, recv_counts_known, has_rdispls)


def all_gather_v_prepare(
    srcs: Tensors,
    dsts: Tensors,
    replica_group: ReplicaGroup,
    metadata_tensor: NkiTensor,
    recv_counts_known: bool = False,
    has_rdispls: bool = False,
    priority: int | None = None,
    name: str | None = None,
) -> NkiInstruction:
    """Read the metadata of an ``all_gather_v``; src may be written later, before the trigger."""
    at = begin("all_gather_v_prepare", priority)
    return _prepare(at, srcs, dsts, replica_group, metadata_tensor, recv_counts_known, has_rdispls)


def all_gather_v_trigger(prepare_instr: NkiInstruction, name: str | None = None) -> NkiInstruction:
    """Run the ``all_gather_v`` that ``prepare_instr`` prepared."""
    return _trigger(begin("all_gather_v_trigger"), prepare_instr)


def all_to_all_v(
    srcs: Tensors,
    dsts: Tensors,
    replica_group: ReplicaGroup,
    metadata_tensor: NkiTensor,
    recv_counts_known: bool = False,
    has_rdispls: bool = False,
    priority: int | None = None,
    name: str | None = None,
) -> NkiInstruction:
    """Send a part of src to each rank of the group; the metadata say how many elements, and where they begin."""
    at = begin("all_to_all_v", priority)
    return _whole(at, srcs, dsts, replica_group, metadata_tensor, recv_counts_known, has_rdispls)


def all_to_all_v_prepare(
    srcs: Tensors,
    dsts: Tensors,
    replica_group: ReplicaGroup,
    metadata_tensor: NkiTensor,
    recv_counts_known: bool = False,
    has_rdispls: bool = False,
    priority: int | None = None,
    name: str | None = None,
) -> NkiInstruction:
    """Read the metadata of an ``all_to_all_v``; src may be written later, before the trigger."""
    at = begin("all_to_all_v_prepare", priority)
    return _prepare(at, srcs, dsts, replica_group, metadata_tensor, recv_counts_known, has_rdispls)


def all_to_all_v_trigger(prepare_instr: NkiInstruction, name: str | None = None) -> NkiInstruction:
    """Run the ``all_to_all_v`` that ``prepare_instr`` prepared."""
    return _trigger(begin("all_to_all_v_trigger"), prepare_instr)


At = tuple[Core, Worker, Machine]


def _whole(at: At, *arguments: Any) -> NkiInstruction:
    """Issue a collective of variable length that is not split."""
    core, worker, _ = at
    operation = core.operation
    if worker.prepared is not None:
        raise worker.prepared.not_triggered(f"{operation} was issued", operation)
    return _run(at, _call(at, operation, *arguments))


def _prepare(at: At, *arguments: Any) -> NkiInstruction:
    """Read the metadata, and occupy the one slot for prepares."""
    core, worker, _ = at
    operation = core.operation
    if core.generation >= 4:
        raise TargetError(
            "target",
            "an instance without NeuronSwitch for the prepare/trigger split",
            core.target,
            f"use {operation.replace('_prepare', '')}",
            operation,
        )
    if worker.prepared is not None:
        raise worker.prepared.not_triggered(f"{operation} was issued", operation)
    call = _call(at, operation.replace("_prepare", "_trigger"), *arguments)
    check(core, call)
    core.count("collective", 0)
    out = issued(core)
    worker.prepared = Prepared(call, out, kernel_line())
    return out


def _trigger(at: At, prepare_instr: object) -> NkiInstruction:
    """Issue the collective of the prepare that returned ``prepare_instr``, and free the slot."""
    core, worker, _ = at
    held: Prepared | None = worker.prepared
    operation = core.operation
    if held is None or held.instruction is not prepare_instr or held.call.operation != operation:
        what = "no prepare" if held is None else f"{held.operation} ({held.line})"
        raise CollectiveError(
            "prepare_instr",
            f"the instruction that {operation.replace('_trigger', '_prepare')} returned, triggered once",
            f"{prepare_instr!r}; {what} waits for a trigger",
            "pass what the prepare returned, and issue one trigger for it",
            operation=operation,
        )
    nest = issued(core)._nest
    refuse_other_nest(held.instruction, nest, operation)
    if held.instruction._nest != nest:
        raise held.not_triggered("a device loop began", operation)
    worker.prepared = None
    return _run(at, held.call)


def _call(
    at: At,
    operation: str,
    srcs: Any,
    dsts: Any,
    group: Any,
    metadata: Any,
    known: bool,
    has_rdispls: bool,
) -> Call:
    """Check the arguments, read the metadata, and return the call of the collective."""
    core, worker, machine = at
    gather = operation.startswith("all_gather")
    reads, writes = tensors("srcs", srcs, 1), tensors("dsts", dsts, 1)
    agree(reads, writes)
    check_hbm(reads)
    check_hbm(writes, operand="dsts")
    rings = rings_of(group, machine.world)
    _check_limits(core, gather, rings, has_rdispls)
    n = len(ring_of(rings, worker.rank))
    check_metadata(reads[0], writes[0], metadata, n, has_rdispls)
    table = values_of(metadata, n, gather, has_rdispls)
    check_sent(table, reads[0])
    others = np.delete(table[0], ring_of(rings, worker.rank).index(worker.rank)).sum()
    options = (("recv_counts_known", bool(known)), ("has_rdispls", bool(has_rdispls)))
    return Call(
        str(worker), operation, reads, writes, rings, options, _move,
        int(others) * reads[0].dtype.itemsize, n - 1,
        metadata=metadata, table=table, received=None if known else received_row(metadata),
    )  # fmt: skip


def _run(at: At, call: Call) -> NkiInstruction:
    """Issue the call; received counts in SBUF are written by the core that they belong to."""
    core, worker, machine = at
    counts: NDArray[np.int64] = issue(core, worker, machine, call)
    if call.received is not None and call.received.storage.on_chip:
        place = ring_of(call.rings, worker.rank).index(worker.rank)
        write(call.received, counts[place])
    return issued(core)


def _move(calls: Sequence[Call]) -> NDArray[np.int64]:
    """Move the data; return the received counts, with a row for each rank."""
    tables = [call.table for call in calls if call.table is not None]
    sent = [
        [chunk(call.reads[0], start, count) for count, start in zip(*table[:2], strict=True)]
        for call, table in zip(calls, tables, strict=True)
    ]
    data = [
        [None if part is None else taken(call.who, part) for part in parts]
        for call, parts in zip(calls, sent, strict=True)
    ]
    counts = np.stack([table[0] for table in tables]).T
    for rank, call in enumerate(calls):
        starts = places(call.who, tables[rank], counts[rank], call.writes[0])
        for sender, start in enumerate(starts):
            values = data[sender][rank]
            target = chunk(call.writes[0], start, counts[rank][sender])
            if target is not None and values is not None:
                write(target, values)
        if call.received is not None and not call.received.storage.on_chip:
            write(call.received, counts[rank])
    return counts


def _check_limits(core: Core, gather: bool, rings: Rings, has_rdispls: bool) -> None:
    """Raise an error if the target, the number of cores or the groups do not allow the collective."""
    if core.generation < 3:
        raise TargetError("target", "trn2 or trn3", core.target, "launch for one of these")
    if has_rdispls and gather:
        raise CollectiveError("has_rdispls", "False: not supported yet", True, "leave it out")
    switch = core.generation >= 4
    if (gather or switch) and core.lnc != 2:
        raise CollectiveError(
            "lnc", f"LNC 2 on {core.target}", core.lnc, "launch two cores per rank"
        )
    if gather:
        allowed, limit = all(len(ring) == DEVICE for ring in rings), "groups of exactly 4 ranks"
    elif switch:
        allowed = sum(map(len, rings)) > DEVICE and all(map(_whole_devices, rings))
        limit = "groups of whole devices (4 ranks each, in order), and more than one device"
    else:
        allowed = not has_rdispls or _across_nodes(rings)
        limit = "with has_rdispls, ranks of one number on different nodes: (i, i + m, i + 2m, ...)"
    if not allowed:
        raise CollectiveError("replica_group", limit, rings, "choose such groups")


def _whole_devices(ring: tuple[int, ...]) -> bool:
    first = ring[0]
    return ring == tuple(range(first, first + len(ring))) and not (
        first % DEVICE or len(ring) % DEVICE
    )


def _across_nodes(rings: Rings) -> bool:
    world = sum(map(len, rings))
    return sorted(rings) == [tuple(range(i, world, len(rings))) for i in range(len(rings))]
