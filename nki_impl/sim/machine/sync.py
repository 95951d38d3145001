"""``nki.isa.core_barrier`` and ``nki.isa.sendrecv``, which synchronise the two cores of one rank.

Both operations require NeuronCore-v3 or later, and a kernel launched on two cores.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/generated/nki.isa.core_barrier.html
and nki.isa.sendrecv.html in the same folder.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from nki_impl.sim.errors import (
    CollectiveError,
    DtypeError,
    LaunchError,
    PlacementError,
    ShapeError,
    SimulatorWarning,
    kernel_line,
)
from nki_impl.sim.isa.enums import dma_engine as _dma_engine
from nki_impl.sim.isa.enums import engine as _engine
from nki_impl.sim.machine.core import Core, current, instruction_from
from nki_impl.sim.machine.races import note_meeting
from nki_impl.sim.machine.turns import Machine, Meeting, Worker
from nki_impl.sim.memory.storage import MemoryRegion
from nki_impl.sim.tensor.access import check_read, keep_holes, unwritten, write
from nki_impl.sim.tensor.views import NkiTensor


@instruction_from(3)
def core_barrier(
    data: NkiTensor, cores: Any, engine: _engine = _engine.gpsimd, name: str | None = None
) -> None:
    """Wait until both cores of the rank have reached this point.

    ``data`` is a tensor in shared HBM, the same one on both cores; ``cores`` is (0, 1). Accesses to ``data`` before the
    barrier, by either core, are ordered before all accesses to ``data`` after it. Accesses to other tensors are not
    ordered: pass each tensor that the cores share to its own barrier. A tile in SBUF, which both cores must pass then,
    is accepted with a :class:`SimulatorWarning`, and no access is ordered: the cores do not share the tile.

    Raises :class:`LaunchError` in a kernel that runs on one core, :class:`PlacementError` if ``data`` is not in shared
    HBM, and :class:`CollectiveError` if ``cores`` is not (0, 1) or the cores name different tensors.
    """
    core = current()
    worker, machine = _pair_of(core, "core_barrier")
    if tuple(cores) != (0, 1):
        raise CollectiveError("cores", "(0, 1)", cores, "name both cores")
    if isinstance(data, NkiTensor) and data.buffer is MemoryRegion.sbuf:
        _warn_of_tile(data)
    elif not isinstance(data, NkiTensor) or data.buffer is not MemoryRegion.shared_hbm:
        raise PlacementError(
            "data", "a tensor in nl.shared_hbm", data, "name the shared tensor that the cores wrote"
        )
    core.count("sync", 0)
    key = ("core_barrier", worker.rank)
    number = worker.issued[key]
    worker.issued[key] += 1
    place = None if data.buffer is MemoryRegion.sbuf else data.storage
    machine.meet(
        worker, (key, number), "core_barrier", machine.cores_of([worker.rank]), place, _pass
    )


def _warn_of_tile(data: NkiTensor) -> None:
    warnings.warn(
        f"core_barrier: the documentation requires data in shared HBM, and data is {data!r}. AWS's library passes such "
        "a tile (core/moe/moe_cte/bwmm_shard_on_I.py), so it is accepted; it orders no accesses to shared memory "
        f"(at {kernel_line()})",
        SimulatorWarning,
        stacklevel=2,
    )


def _pass(meeting: Meeting) -> None:
    """Tell the race detector that both cores have reached a barrier, which orders the accesses to its tensor."""
    storages = [meeting.arrived[worker].payload for worker in meeting.members]
    if any(storage is not storages[0] for storage in storages):
        raise CollectiveError(
            "data",
            "both cores name the same tensor",
            _both(
                meeting,
                [
                    "a tile in SBUF" if s is None else s.name or "an unnamed tensor"
                    for s in storages
                ],
            ),
            "give the tensor a name, so that both cores use one allocation",
            operation="core_barrier",
        )
    detector = meeting.members[0].races
    if detector is not None and storages[0] is not None:
        note_meeting(meeting.members, storages[0])
        detector.order((storages[0],))


@instruction_from(3)
def sendrecv(
    src: NkiTensor,
    dst: NkiTensor,
    send_to_rank: int,
    recv_from_rank: int,
    pipe_id: int,
    dma_engine: _dma_engine = _dma_engine.dma,
    name: str | None = None,
) -> None:
    """Send ``src`` to core ``send_to_rank`` and receive ``dst`` from core ``recv_from_rank``.

    ``src`` and ``dst`` are tiles in SBUF of equal shape and dtype. The "ranks" in the argument names are the core
    numbers 0 and 1 of this rank. Exchanges with the same ``pipe_id`` are matched in program order. Only accesses to the
    two tiles are ordered; accesses to shared HBM still need a ``core_barrier``. Elements of ``src`` that were never
    written count as unwritten in ``dst``, as in tensor_copy: AWS's router_topk sends such a tile.

    Raises :class:`LaunchError`, :class:`PlacementError`, :class:`ShapeError`, :class:`DtypeError`, and
    :class:`CollectiveError` if one core does not name the other.
    """
    core = current()
    worker, machine = _pair_of(core, "sendrecv")
    for operand, tensor in (("src", src), ("dst", dst)):
        if not isinstance(tensor, NkiTensor) or tensor.buffer is not MemoryRegion.sbuf:
            raise PlacementError(operand, "a tile in SBUF", tensor, "copy it to SBUF first")
    for operand, value in (("send_to_rank", send_to_rank), ("recv_from_rank", recv_from_rank)):
        if value not in (0, 1):
            raise CollectiveError(
                operand, "0 or 1, a core of this rank", value, "use 1 - nl.program_id(0)"
            )
    if src.dtype is not dst.dtype:
        raise DtypeError(
            "dst", f"the dtype of src, {src.dtype}", dst.dtype, "convert before or after"
        )
    if src.shape != dst.shape:
        raise ShapeError(
            "dst", f"the shape of src, {src.shape}", dst.shape, "allocate dst like src"
        )
    holes = unwritten(src)
    if holes is not None and holes.all():
        check_read(src, "src")
    core.count("dma", src.size, 0, src.size * src.dtype.itemsize)
    key = ("sendrecv", worker.rank, pipe_id)
    number = worker.issued[key]
    worker.issued[key] += 1
    part = (src, dst, send_to_rank, recv_from_rank)
    machine.meet(
        worker,
        (key, number),
        f"sendrecv with pipe_id {pipe_id}",
        machine.cores_of([worker.rank]),
        part,
        _exchange,
    )


def _exchange(meeting: Meeting) -> None:
    """Move the tiles of both cores at once."""
    parts = [meeting.arrived[worker].payload for worker in meeting.members]
    for here, (_, _, send_to, _) in enumerate(parts):
        if parts[send_to][3] != here:
            raise CollectiveError(
                "recv_from_rank",
                "each core receives from the core that sends to it",
                _both(meeting, [f"sends to {to} and receives from {by}" for _, _, to, by in parts]),
                "pass 1 - nl.program_id(0) for both",
                operation="sendrecv",
            )
    note_meeting(meeting.members)
    sent = [(src.array.copy(), unwritten(src)) for src, _, _, _ in parts]
    for _, dst, _, source in parts:
        src = parts[source][0]
        if dst.shape != src.shape or dst.dtype is not src.dtype:
            raise ShapeError(
                "dst",
                "tiles of one shape and dtype on both cores",
                _both(meeting, [f"{tile.shape} {tile.dtype}" for tile, _, _, _ in parts]),
                "exchange equal tiles",
                operation="sendrecv",
            )
        values, holes = sent[source]
        write(dst, values)
        if holes is not None:
            keep_holes(dst, holes.copy())


def _pair_of(core: Core, operation: str) -> tuple[Worker, Machine]:
    """Return the core's worker (thread) and the machine of the run; raise LaunchError unless the rank has two cores."""
    worker = core.worker
    if worker is None or worker.machine is None or core.lnc != 2:
        raise LaunchError(
            "launch",
            f"{operation} needs a kernel that runs on two cores",
            f"{core.lnc} core",
            "launch with kernel[2](...) or lnc=2, or call it only if nl.num_programs(0) == 2",
        )
    return worker, worker.machine


def _both(meeting: Meeting, what: Sequence[str]) -> str:
    """Describe what each core passed, and on which line of the kernel."""
    parts = zip(meeting.members, what, strict=True)
    return " but ".join(
        f"{worker}: {text} ({meeting.arrived[worker].line})" for worker, text in parts
    )
