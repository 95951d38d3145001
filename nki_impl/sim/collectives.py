"""``nki.collectives``: the operations by which ranks exchange data.

In the simulator, each collective blocks until every core of every rank of the group has issued it
(:mod:`nki_impl.sim.exchange.meeting`). On the device, a collective runs in parallel with the computation, and
instructions that read the result wait for it. Accesses whose order the device would not define are reported
(:mod:`nki_impl.sim.machine.races`). Reductions are computed in the order of the group's list. Floating-point numbers
are reduced in float32 and rounded once to the destination's dtype; integers are reduced in their own dtype.

A ring follows the order of the group's list: each rank sends to the next entry of the list and receives from the
previous entry. Traffic (hops, and the bytes that one rank sends) is counted as if every collective used a ring
algorithm.

The collectives of variable length are in :mod:`nki_impl.sim.exchange.variable`.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/nki.collectives.html
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nki_impl.sim.errors import CollectiveError
from nki_impl.sim.exchange.groups import (
    ReplicaGroup,
    rg_partition_op,
    ring_of,
    rings_of,
    targets_of,
)
from nki_impl.sim.exchange.meeting import Call, begin, issue
from nki_impl.sim.exchange.operands import (
    agree,
    by_channel,
    bytes_in,
    channels_of,
    check_dim,
    check_hbm,
    check_split,
    fit,
    op_option,
    paired_lists,
    part_of,
    reduced,
    reduction,
    size_of,
    taken,
    tensors,
    times,
)
from nki_impl.sim.exchange.variable import (
    all_gather_v,
    all_gather_v_prepare,
    all_gather_v_trigger,
    all_to_all_v,
    all_to_all_v_prepare,
    all_to_all_v_trigger,
)
from nki_impl.sim.memory.registers import VirtualRegister
from nki_impl.sim.tensor.access import write
from nki_impl.sim.tensor.views import NkiTensor

Tensors = list[NkiTensor]

__all__ = [
    "ReplicaGroup", "all_gather", "all_gather_v", "all_gather_v_prepare", "all_gather_v_trigger", "all_reduce",
    "all_to_all", "all_to_all_v", "all_to_all_v_prepare", "all_to_all_v_trigger", "collective_permute",
    "collective_permute_implicit", "collective_permute_implicit_current_processing_rank_id",
    "collective_permute_implicit_reduce", "rank_id", "reduce_scatter", "rg_partition_op",
]  # fmt: skip


def all_reduce(
    srcs: Tensors,
    dsts: Tensors,
    replica_group: ReplicaGroup,
    op: Any,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Reduce src over all ranks with op (nl.add, nl.minimum or nl.maximum); every rank gets the result in dst.

    Tensors are in HBM or SBUF. One call may take several tensors, but only in HBM.
    """
    core, worker, machine = begin("all_reduce", priority)
    reads, writes = paired_lists(srcs, dsts)
    rings = rings_of(replica_group, machine.world)
    for src, dst in zip(reads, writes, strict=True):
        fit("dsts", dst, src.shape, "that of the source")
    n = len(ring_of(rings, worker.rank))
    apply = reduction(op)

    def move(calls: Sequence[Call]) -> None:
        for index in range(len(reads)):
            total = reduced([taken(call.who, call.reads[index]) for call in calls], apply)
            for call in calls:
                write(call.writes[index], total)

    call = Call(
        str(worker), "all_reduce", reads, writes, rings, (op_option(op),), move,
        2 * (n - 1) * bytes_in(reads) // n, 2 * (n - 1), (n - 1) * size_of(reads) // n,
    )  # fmt: skip
    issue(core, worker, machine, call)


def all_gather(
    srcs: Tensors,
    dsts: Tensors,
    replica_group: ReplicaGroup,
    collective_dim: int,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Concatenate the src of all ranks along ``collective_dim``; every rank gets the result in dst.

    ``collective_dim`` is 0 in HBM; 0 or 1 for 2-D tensors in SBUF. One call may take several tensors, but only in HBM.
    """
    core, worker, machine = begin("all_gather", priority)
    reads, writes = paired_lists(srcs, dsts)
    check_dim(collective_dim, reads, (0, 1))
    rings = rings_of(replica_group, machine.world)
    n = len(ring_of(rings, worker.rank))
    for src, dst in zip(reads, writes, strict=True):
        fit("dsts", dst, times(src.shape, collective_dim, n), f"{n} sources along {collective_dim}")

    def move(calls: Sequence[Call]) -> None:
        for index in range(len(reads)):
            parts = [taken(call.who, call.reads[index]) for call in calls]
            for call in calls:
                for place, part in enumerate(parts):
                    write(part_of(call.writes[index], collective_dim, place, n), part)

    call = Call(
        str(worker), "all_gather", reads, writes, rings, (("collective_dim", collective_dim),), move,
        (n - 1) * bytes_in(reads), n - 1,
    )  # fmt: skip
    issue(core, worker, machine, call)


def reduce_scatter(
    srcs: Tensors,
    dsts: Tensors,
    replica_group: ReplicaGroup,
    collective_dim: int,
    op: Any,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Reduce src over all ranks with op, and cut the result along dimension 0; the i-th rank gets part i in dst."""
    core, worker, machine = begin("reduce_scatter", priority)
    reads, writes = paired_lists(srcs, dsts)
    check_dim(collective_dim, reads, (0,))
    rings = rings_of(replica_group, machine.world)
    n = len(ring_of(rings, worker.rank))
    for src, dst in zip(reads, writes, strict=True):
        check_split(src, n)
        fit("dsts", dst, (src.shape[0] // n, *src.shape[1:]), f"one of {n} parts of the source")
    apply = reduction(op)

    def move(calls: Sequence[Call]) -> None:
        for index in range(len(reads)):
            total = reduced([taken(call.who, call.reads[index]) for call in calls], apply)
            for call, part in zip(calls, np.split(total, n), strict=True):
                write(call.writes[index], part)

    call = Call(
        str(worker), "reduce_scatter", reads, writes, rings, (("collective_dim", collective_dim), op_option(op)), move,
        (n - 1) * bytes_in(reads) // n, n - 1, (n - 1) * size_of(reads) // n,
    )  # fmt: skip
    issue(core, worker, machine, call)


def all_to_all(
    srcs: Tensors,
    dsts: Tensors,
    replica_group: ReplicaGroup,
    collective_dim: int,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Copy part i of src on the j-th rank to part j of dst on the i-th rank.

    Parts are cut along dimension 0. Tensors are in HBM.
    """
    core, worker, machine = begin("all_to_all", priority)
    reads, writes = paired_lists(srcs, dsts)
    check_hbm(reads)
    check_dim(collective_dim, reads, (0,))
    rings = rings_of(replica_group, machine.world)
    n = len(ring_of(rings, worker.rank))
    for src, dst in zip(reads, writes, strict=True):
        check_split(src, n)
        fit("dsts", dst, src.shape, "that of the source")

    def move(calls: Sequence[Call]) -> None:
        for index in range(len(reads)):
            sent = [taken(call.who, call.reads[index]) for call in calls]
            for i, call in enumerate(calls):
                for j in range(n):
                    write(part_of(call.writes[index], 0, j, n), np.split(sent[j], n)[i])

    call = Call(
        str(worker), "all_to_all", reads, writes, rings, (("collective_dim", collective_dim),), move,
        (n - 1) * bytes_in(reads) // n, n - 1,
    )  # fmt: skip
    issue(core, worker, machine, call)


def collective_permute(
    srcs: Tensors,
    dsts: Tensors,
    source_target_pairs: list[tuple[int, int]],
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """For each pair (source, target) of ranks, copy src of the source to dst of the target; the pairs must form cycles.

    src and dst are lists of one tensor, in HBM. Every rank of the run must issue the operation. A rank that is in no
    pair sends nothing, and its dst does not change.
    """
    core, worker, machine = begin("collective_permute", priority)
    reads, writes = tensors("srcs", srcs, 1), tensors("dsts", dsts, 1)
    agree(reads, writes)
    check_hbm(reads)
    fit("dsts", writes[0], reads[0].shape, "that of the source")
    targets = targets_of(source_target_pairs, machine.world)

    def move(calls: Sequence[Call]) -> None:
        sent = {rank: taken(calls[rank].who, calls[rank].reads[0]) for rank in targets}
        for source, target in targets.items():
            write(calls[target].writes[0], sent[source])

    moves = worker.rank in targets and targets[worker.rank] != worker.rank
    call = Call(
        str(worker), "collective_permute", reads, writes, (tuple(range(machine.world)),),
        (("source_target_pairs", tuple(targets.items())),), move,
        bytes_in(reads) if moves else 0, int(moves),
    )  # fmt: skip
    issue(core, worker, machine, call)


def collective_permute_implicit(
    srcs_by_channel: list[Tensors],
    dsts_by_channel: list[Tensors],
    replica_group: ReplicaGroup,
    channel_ids: list[int] = [0],  # noqa: B006
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Copy src of each rank to dst of the rank's successor in the ring, for each channel.

    ``channel_ids`` is 0, 1, ..., and each channel has a list with one tensor, in HBM or SBUF. At most 4 channels are
    allowed if all ranks of the run form one group (the run then represents a node), else 2.
    """
    core, worker, machine = begin("collective_permute_implicit", priority)
    rings = rings_of(replica_group, machine.world)
    channels = channels_of(channel_ids, rings)
    reads = by_channel("srcs_by_channel", srcs_by_channel, channels)
    writes = by_channel("dsts_by_channel", dsts_by_channel, channels)
    agree(reads, writes)
    for src, dst in zip(reads, writes, strict=True):
        fit("dsts_by_channel", dst, src.shape, "that of the source")

    def move(calls: Sequence[Call]) -> None:
        sent = [[taken(call.who, src) for src in call.reads] for call in calls]
        for index, call in enumerate(calls):
            for dst, part in zip(call.writes, sent[index - 1], strict=True):
                write(dst, part)

    travels = len(ring_of(rings, worker.rank)) > 1
    call = Call(
        str(worker), "collective_permute_implicit", reads, writes, rings, (("channel_ids", channels),), move,
        bytes_in(reads) * travels, len(channels) * travels,
    )  # fmt: skip
    issue(core, worker, machine, call)


def collective_permute_implicit_reduce(
    srcs0_by_channel: list[Tensors],
    srcs1_by_channel: list[Tensors],
    dsts_by_channel: list[Tensors],
    replica_group: ReplicaGroup,
    op: Any,
    channel_ids: list[int] = [0],  # noqa: B006
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Compute op(src0, src1) on each rank, and write the result to dst of the rank's successor in the ring."""
    core, worker, machine = begin("collective_permute_implicit_reduce", priority)
    rings = rings_of(replica_group, machine.world)
    channels = channels_of(channel_ids, rings)
    left = by_channel("srcs0_by_channel", srcs0_by_channel, channels)
    right = by_channel("srcs1_by_channel", srcs1_by_channel, channels)
    writes = by_channel("dsts_by_channel", dsts_by_channel, channels)
    for reads in (left, right):
        agree(reads, writes)
        for src, dst in zip(reads, writes, strict=True):
            fit("dsts_by_channel", dst, src.shape, "that of the sources")
    apply = reduction(op)

    def move(calls: Sequence[Call]) -> None:
        k = len(channels)
        sent = [
            [
                reduced([taken(c.who, c.reads[i]), taken(c.who, c.reads[k + i])], apply)
                for i in range(k)
            ]
            for c in calls
        ]
        for index, call in enumerate(calls):
            for dst, values in zip(call.writes, sent[index - 1], strict=True):
                write(dst, values)

    travels = len(ring_of(rings, worker.rank)) > 1
    call = Call(
        str(worker), "collective_permute_implicit_reduce", left + right, writes, rings,
        (("channel_ids", channels), op_option(op)), move,
        bytes_in(left) * travels, len(channels) * travels, size_of(left),
    )  # fmt: skip
    issue(core, worker, machine, call)


def collective_permute_implicit_current_processing_rank_id(
    iteration_id: int, replica_group: ReplicaGroup, channel_id: int = 0, name: str | None = None
) -> VirtualRegister:
    """Return, in a register, the owner of the data that this rank holds after ``iteration_id`` implicit permutes.

    The owner is the rank ``iteration_id`` places before this rank in the group's list; for 0 it is this rank itself.
    The register holds the owner's number in the run or, with ``run_ranks(..., ring_ids="position")``, the owner's
    position in the list. The official documentation does not say which of them the device gives; for a group 0..n-1
    they are equal.
    """
    _, worker, machine = begin("collective_permute_implicit_current_processing_rank_id")
    ring = ring_of(rings_of(replica_group, machine.world), worker.rank)
    if isinstance(iteration_id, bool) or not isinstance(iteration_id, int) or iteration_id < 0:
        raise CollectiveError(
            "iteration_id", "an integer >= 0", repr(iteration_id), "pass the loop counter"
        )
    if channel_id not in range(4):
        raise CollectiveError(
            "channel_id", "a channel 0..3", repr(channel_id), "pass a channel in use"
        )
    position = (ring.index(worker.rank) - iteration_id) % len(ring)
    return VirtualRegister(position if machine.ring_ids == "position" else ring[position], True)


def rank_id(name: str | None = None) -> VirtualRegister:
    """Return this rank's number in the run, 0 .. W-1, in a register."""
    _, worker, _ = begin("rank_id")
    return VirtualRegister(worker.rank, True)
