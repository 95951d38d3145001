"""Bounds: for each query row, a range of local key indices that the caller gives, bound_min <= j < bound_max.

They express packed documents, windows, and the causal mask of layouts that the kernels do not know. A pair of bounds
has one of three shapes:

- [b, s]: one range for each row, which holds for the keys of every rank;
- [b * h, s, 1]: the same, for each query head by itself;
- [W, b, s, 1]: one range for the keys of each ring position. A row that sees a range of tokens sees a range of keys on
  every rank, in each layout that keeps the order of the tokens on a rank; but it is another range on another rank.

On the device, bounds are tables in HBM, [owners, entries, 128, tiles] in float32; an entry is a batch entry or a query
head. A forward pass reads them by the owner of the keys, a backward pass by the owner of the queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nki_impl.kernels.ring import Ring, owner_of, travelling_memory, wait_for_both_cores
from nki_impl.kernels.tiles import ROWS, Tensor, tile_count
from nki_impl.lang import ncc, nisa, nl


@dataclass
class Bounds(nl.NKIObject):  # type: ignore[name-defined]
    """The tables ``low`` and ``high`` [owners, entries, 128, tiles].

    ``has_owners``: the first index is a rank id; otherwise its length is 1. ``per_head``: an entry is a query head.
    """

    low: Tensor
    high: Tensor
    has_owners: bool
    per_head: bool


def forward_bounds(ring: Ring, bound_min: Tensor, bound_max: Tensor) -> Bounds | None:
    """Make the tables of a forward pass; None without bounds."""
    if bound_min is None:
        return None
    has_owners, per_head = len(bound_min.shape) == 4, len(bound_min.shape) == 3
    low = table_of(ring, planes_of(bound_min, nl.private_hbm, "own_low", 0, 1), has_owners)
    high = table_of(ring, planes_of(bound_max, nl.private_hbm, "own_high", 0, 1), has_owners)
    return Bounds(low, high, has_owners, per_head)


def backward_bounds(ring: Ring, bound_min: Tensor, bound_max: Tensor) -> Bounds | None:
    """Make the tables of a backward pass, for the keys of this rank and the rows of every rank; None without bounds."""
    if bound_min is None:
        return None
    low, high = exchanged(ring, bound_min, "ring_low"), exchanged(ring, bound_max, "ring_high")
    per_head = len(bound_min.shape) == 3
    return Bounds(table_of(ring, low, True), table_of(ring, high, True), True, per_head)


def exchanged(ring: Ring, bound: Tensor, name: str) -> Tensor:
    """Return the bounds of the rows of each ring position for the keys of this rank, [W, entries, 128, tiles]."""
    sent = planes_of(bound, travelling_memory(ring), name + "_sent", ring.core, ring.cores)
    wait_for_both_cores(ring, (sent,))
    shape = (ring.workers, sent.shape[1], ROWS, sent.shape[3])
    arrived = nl.ndarray(shape, dtype=nl.float32, buffer=travelling_memory(ring), name=name)
    if len(bound.shape) == 4:
        ncc.all_to_all(srcs=[sent], dsts=[arrived], replica_group=ring.group, collective_dim=0)
    else:
        ncc.all_gather(srcs=[sent], dsts=[arrived], replica_group=ring.group, collective_dim=0)
    return arrived


def planes_of(bound: Tensor, memory: Any, name: str, core: int, cores: int) -> Tensor:
    """Copy bounds of any of the three shapes to a tensor [W or 1, entries, 128, tiles] in ``memory``.

    Row t is at [t % 128, t // 128]; the padding is 0, so it sees no key. Each core copies its share of the planes.
    """
    owners = bound.shape[0] if len(bound.shape) == 4 else 1
    entries = bound.shape[1] if len(bound.shape) == 4 else bound.shape[0]
    length = bound.shape[1] if len(bound.shape) < 4 else bound.shape[2]
    shape = (owners, entries, ROWS, tile_count(length))
    planes = nl.ndarray(shape, dtype=nl.float32, buffer=memory, name=name)
    for index in range(core, owners * entries, cores):
        owner, entry = index // entries, index % entries
        rows = bound[owner, entry] if len(bound.shape) == 4 else bound[entry]
        if len(bound.shape) > 2:
            rows = rows[:, 0]
        nisa.dma_copy(dst=planes[owner, entry], src=load_bound(rows))
    return planes


def load_bound(rows: Tensor) -> Tensor:
    """Load the bounds [s] from HBM as [128, tiles] float32: row t at [t % 128, t // 128], 0 in the padding."""
    length = rows.shape[0]
    whole, rest = length // ROWS, length % ROWS
    tile = nl.ndarray((ROWS, tile_count(length)), dtype=nl.float32, buffer=nl.sbuf)
    if whole > 0:
        by_tile = rows[: whole * ROWS].reshape_dim(0, (-1, ROWS)).permute((1, 0))
        nisa.dma_copy(dst=tile[:, :whole], src=by_tile)
    if rest > 0:
        nisa.memset(dst=tile[:, whole:], value=0.0)
        nisa.dma_copy(dst=tile[:rest, whole:], src=rows[whole * ROWS :].reshape_dim(0, (-1, 1)))
    return tile


def table_of(ring: Ring, planes: Tensor, has_owners: bool) -> Tensor:
    """Sort planes [W, ..] by rank id, because the device gives the owner of data as a rank id."""
    if not has_owners:
        return planes
    shape = (len(ring.ranks) * ring.workers,) + tuple(planes.shape[1:])
    table = nl.ndarray(shape, dtype=nl.float32, buffer=nl.private_hbm)
    for group in ring.ranks:
        for position in range(ring.workers):
            nisa.dma_copy(dst=table[group[position]], src=planes[position])
    return table


def bounds_at(ring: Ring, bounds: Bounds | None, step: int, i: int, head: int, heads: int) -> Any:
    """Load ``low`` and ``high`` [128, tiles] of query head ``head`` of batch entry ``i`` at one step.

    Both are None without bounds. ``heads`` is the number of query heads of a batch entry.
    """
    if bounds is None:
        return None, None
    entry = i * heads + head if bounds.per_head else i
    low, high = bounds.low[:, entry], bounds.high[:, entry]
    if not bounds.has_owners:
        return load_plane(low[0]), load_plane(high[0])
    owner = owner_of(ring, step)
    return load_plane(low.select(0, owner)), load_plane(high.select(0, owner))


def load_plane(plane: Tensor) -> Tensor:
    """Load one number for each row, [128, tiles] in HBM; all of them have been written."""
    tile = nl.ndarray(plane.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=plane)
    return tile
