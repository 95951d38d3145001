"""The ring as a kernel uses it: its cores, its travelling buffers, and the owner of the current data.

A rank runs on one physical core or on two (LNC 2). Data that travel around the ring are held in a pair of buffers. At
step t the kernel computes with ``pair[t % 2]`` while a permute fills the other buffer with data from the predecessor.
The permute is issued before the computation of the step. Permute and computation only read ``pair[t % 2]``, so they may
run at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nki_impl.kernels.tiles import ROWS, DType, Tensor
from nki_impl.lang import ncc, nisa, nl

Pair = tuple[Tensor, Tensor]


@dataclass
class Ring(nl.NKIObject):  # type: ignore[name-defined]
    """The ring of a launch: ``workers`` ranks per group, ``cores`` cores per rank, of which ``core`` is this one."""

    workers: int
    group: Any
    ranks: Any
    core: int
    cores: int


def open_ring(replica_groups: Any, num_workers: int) -> Ring:
    """Make the ring of ``replica_groups``; None means one ring of ranks 0 .. num_workers-1."""
    ranks = replica_groups
    if replica_groups is None or len(replica_groups) == 0:
        ranks = (tuple(range(num_workers)),)
    core, cores = 0, 1
    if nl.program_ndim() > 0:
        core, cores = nl.program_id(0), nl.num_programs(0)
    return Ring(num_workers, ncc.ReplicaGroup(ranks), ranks, core, cores)


def travelling_memory(ring: Ring) -> Any:
    """Return the memory for the operands of collectives; all cores of a rank can access it."""
    if ring.cores > 1:
        return nl.shared_hbm
    return nl.private_hbm


def travelling_pair(ring: Ring, shape: Any, dtype: DType, name: str) -> Pair:
    """Allocate two buffers for travelling data. The first one receives the rank's own data."""
    memory = travelling_memory(ring)
    first = nl.ndarray(shape, dtype=dtype, buffer=memory, name=name + "_even")
    second = nl.ndarray(shape, dtype=dtype, buffer=memory, name=name + "_odd")
    return (first, second)


def held(pair: Pair, step: int) -> Tensor:
    """Return the buffer of a pair that holds the data of this step."""
    return pair[step % 2]


def pass_on(ring: Ring, pair: Pair, step: int) -> None:
    """Send the data of this step to the successor, which uses them in the next step."""
    if step > 0:
        # Incoming data overwrite those of the previous step, so the other core must be done with them.
        wait_for_both_cores(ring, (held(pair, step + 1),))
    ncc.collective_permute_implicit(
        srcs_by_channel=[[held(pair, step)]],
        dsts_by_channel=[[held(pair, step + 1)]],
        replica_group=ring.group,
        channel_ids=[0],
    )


def wait_for_both_cores(ring: Ring, tensors: Any) -> None:
    """Wait for both cores of the rank; each core and later collectives then see all earlier writes to ``tensors``."""
    if ring.cores > 1:
        for tensor in tensors:
            nisa.core_barrier(data=tensor, cores=(0, 1))


def owner_of(ring: Ring, step: int) -> Any:
    """Return a register with the rank id of the owner of this step's data; at step 0, that of this rank."""
    return ncc.collective_permute_implicit_current_processing_rank_id(
        iteration_id=step, replica_group=ring.group
    )


def position_table(ring: Ring) -> Tensor:
    """Make a table in HBM [ranks, 1] with the ring position of each rank id, in float32.

    The device gives the owner of the current data as a rank id in a register. Neither Python nor an engine can compute
    with a register. But a load from this table can use the register as its index, and puts the ring position into a
    tile. For groups (0..n-1), (n..2n-1), ... the table also works if the register holds the rank's number within its
    group.
    """
    size = len(ring.ranks) * ring.workers
    row = nl.ndarray((1, size), dtype=nl.float32, buffer=nl.sbuf)
    for group in ring.ranks:
        for position in range(ring.workers):
            rank = group[position]
            nisa.memset(dst=row[:, rank : rank + 1], value=float(position))
    table = nl.ndarray((size, 1), dtype=nl.float32, buffer=nl.private_hbm)
    nisa.dma_copy(dst=table, src=row)
    return table


def position_at(ring: Ring, table: Tensor, step: int) -> Tensor:
    """Load the ring position [128, 1] float32 of the owner of this step's data.

    At step 0 this is the position of this rank.
    """
    position = nl.ndarray((ROWS, 1), dtype=nl.float32, buffer=nl.sbuf)
    row = table.ap(
        pattern=[[0, ROWS], [1, 1]], offset=0, scalar_offset=owner_of(ring, step), indirect_dim=0
    )
    nisa.dma_copy(dst=position, src=row)
    return position
