"""The ring as a kernel sees it: its cores, its buffers that travel, and whose data is at hand.

A rank runs on one physical core or on two (LNC 2). Whatever travels lies in a pair of buffers: at
step t the kernel computes with ``pair[t % 2]`` while the permute fills the other one from the
predecessor. A permute is issued before the computation of the step, and the two only read what they
share, so they may run at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nki_impl.kernels.tiles import ROWS, DType, Tensor
from nki_impl.lang import ncc, nisa, nl

Pair = tuple[Tensor, Tensor]


@dataclass
class Ring(nl.NKIObject):  # type: ignore[name-defined]
    """``workers`` ranks in each group; this program is core ``core`` of ``cores`` of its rank."""

    workers: int
    group: Any
    ranks: Any
    core: int
    cores: int


def open_ring(replica_groups: Any, num_workers: int) -> Ring:
    """The ring of ``replica_groups``, or of ranks 0 .. num_workers-1 where none are given."""
    ranks = replica_groups
    if replica_groups is None or len(replica_groups) == 0:
        ranks = (tuple(range(num_workers)),)
    core, cores = 0, 1
    if nl.program_ndim() > 0:
        core, cores = nl.program_id(0), nl.num_programs(0)
    return Ring(num_workers, ncc.ReplicaGroup(ranks), ranks, core, cores)


def travelling_memory(ring: Ring) -> Any:
    """The HBM for operands of collectives: both cores of a rank must see them."""
    if ring.cores > 1:
        return nl.shared_hbm
    return nl.private_hbm


def travelling_pair(ring: Ring, shape: Any, dtype: DType, name: str) -> Pair:
    """Two buffers between which a permute moves data; what a rank starts with goes into the first."""
    memory = travelling_memory(ring)
    first = nl.ndarray(shape, dtype=dtype, buffer=memory, name=name + "_even")
    second = nl.ndarray(shape, dtype=dtype, buffer=memory, name=name + "_odd")
    return (first, second)


def held(pair: Pair, step: int) -> Tensor:
    """The buffer of a pair that holds the data of step ``step``."""
    return pair[step % 2]


def pass_on(ring: Ring, pair: Pair, step: int) -> None:
    """Send the data of this step to the successor, whose data of the next step it is."""
    if step > 0:
        # The other core has done with the data of the step before, which what comes in replaces.
        wait_for_both_cores(ring, (held(pair, step + 1),))
    ncc.collective_permute_implicit(
        srcs_by_channel=[[held(pair, step)]],
        dsts_by_channel=[[held(pair, step + 1)]],
        replica_group=ring.group,
        channel_ids=[0],
    )


def wait_for_both_cores(ring: Ring, tensors: Any) -> None:
    """What either core did to these tensors is done for the other core and for collectives."""
    if ring.cores > 1:
        for tensor in tensors:
            nisa.core_barrier(data=tensor, cores=(0, 1))


def position_table(ring: Ring) -> Tensor:
    """A table in HBM [ranks, 1]: the ring position of each rank id, in float32.

    The device tells whose data is at hand as a rank id in a register, with which neither Python nor an
    engine computes. As the index of a load from this table it becomes a number in a tile. With
    groups (0..n-1), (n..2n-1), ... the table also serves where the id counts within the group.
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
    """[128, 1] float32: the ring position of the owner of the data of this step; step 0: one's own."""
    owner = ncc.collective_permute_implicit_current_processing_rank_id(
        iteration_id=step, replica_group=ring.group
    )
    position = nl.ndarray((ROWS, 1), dtype=nl.float32, buffer=nl.sbuf)
    row = table.ap(pattern=[[0, ROWS], [1, 1]], offset=0, scalar_offset=owner, indirect_dim=0)
    nisa.dma_copy(dst=position, src=row)
    return position
