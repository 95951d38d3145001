"""Mistakes with the last tile of a block, which is short if the size of the tiles does not divide the block.

A kernel computes the visible part of a block in *tiles* of some queries and some keys. It may skip the short last tile,
count the zeros or the copies of the last key that fill it up, or begin it earlier, so that it is full and some tokens are in two tiles.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.readout.faults.kinds import GRADIENTS, Kind, at_counts, listing
from ringspec.conformance.readout.faults.tile_rules import LARGEST_TILE, needs_mask, sizes_in
from ringspec.conformance.readout.problem.geometry import Geometry
from ringspec.problem.model import Array, Booleans

UNMASKED = " where no mask hides them"
PADDED = (
    "the zeros that fill up the last tile of {} keys of a block are counted as keys with score 0"
)


def short_tiles(right: Booleans) -> Iterator[tuple[str, Booleans]]:
    """Yield what is visible if the short last tile of the visible part of each block is skipped."""
    for side, axis in (("queries", 3), ("keys", 4)):
        part = right.any(axis=7 - axis, keepdims=True)
        last = part.sum(axis=axis, keepdims=True)
        number = np.cumsum(part, axis=axis)
        for size in range(2, LARGEST_TILE + 1):
            shown = right & (number <= last - last % size)
            words = (
                f"the short last tile of {size} {side} of the visible part of each block is skipped"
            )
            yield words, shown


def padded_kinds(geometry: Geometry, visible: Booleans, distinct: bool) -> Iterator[Kind]:
    """Yield the mistake of counting the zeros that fill up the last tile of keys; ``visible``: the correct mask.

    With padding slots there is none: what they show by mistake looks the same.
    """
    if geometry.padding:
        return
    run, own = geometry.run, geometry.own_blocks[..., 0]

    def padded(masked: bool, across: int, size: int) -> Array:
        found = padded_keys(visible, run, masked, size, across)
        if geometry.own_run == run:
            return found
        return np.where(own, padded_keys(visible, geometry.own_run, masked, size, across), found)

    for where, masked in ((UNMASKED, True), ("", False)):
        for sizes, table in by_sizes(partial(padded, masked, 0), sizes_in(run), distinct):
            words = f"{PADDED.format(sizes)}{where}"
            yield Kind(words, (("padded", table),), 1.1 if masked else 1.2)
    # Tiles without a visible pair are skipped, so only some queries of a block get to the last one.
    for across in sizes_in(run) if not (geometry.sees_all and distinct) else ():
        for sizes, table in by_sizes(partial(padded, False, across), sizes_in(run), distinct):
            words = f"{PADDED.format(sizes)}, in tiles of {across} queries"
            yield Kind(words, (("padded", table),), 1.25)


def copied_kinds(geometry: Geometry, distinct: bool) -> Iterator[Kind]:
    """Yield the mistake of a last tile of keys that copies of its last key fill up, which a mask shows as it shows this key."""
    run, n = geometry.run, geometry.slots

    def copies(size: int) -> Array:
        found = np.zeros((1, 1, 1, 1, n))
        found[..., run - 1 :: run] = -run % size
        return found

    for sizes, table in by_sizes(copies, sizes_in(run), distinct):
        words = f"the last tile of {sizes} keys of a block is filled up with copies of its last key"
        yield Kind(words, (("count", 1.0 + table),), 1.15)


def by_sizes(
    made: Callable[[int], NDArray[Any]], sizes: Iterable[int], distinct: bool
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the sizes of tiles, in words, with the table that ``made`` gives for them.

    ``distinct``: sizes with equal tables come together, and those whose table is 0 are left out.
    """
    found: dict[tuple[bytes, int], tuple[list[int], NDArray[Any]]] = {}
    for size in sizes:
        table = made(size)
        if table.any() or not distinct:
            alike = table.tobytes(), 0 if distinct else size
            found.setdefault(alike, ([], table))[0].append(size)
    for several, table in found.values():
        yield " or ".join(map(str, several)), table


def padded_keys(visible: Booleans, run: int, masked: bool, size: int, across: int = 0) -> Array:
    """Return how many keys fill up the last tile of ``size`` keys for each row of a block, [a, b, 1, i].

    A kernel computes the visible part of each range of ``run`` slots. ``masked``: parts with hidden pairs have a mask,
    which hides these keys. ``across``: the size of the tiles of queries, of which only those that see a key of the last
    tile compute it; 0: all compute it.
    """
    added = np.zeros(visible.shape[:4])
    slots = range(0, visible.shape[3], run)
    for top, left in itertools.product(slots, slots):
        part = visible[..., top : top + run, left : left + run]
        rows, keys = part.any(axis=4), part.any(axis=3).sum(axis=-1)
        if across:
            number = part.any(axis=3).cumsum(axis=-1)
            last = number > (keys - keys % size)[..., None]
            seen = (part & last[..., None, :]).any(axis=4)
            tiles = np.arange(seen.shape[3]) // across
            rows = rows & np.stack([seen[..., tiles == x].any(axis=3) for x in tiles], axis=3)
        counted = -keys % size * ~(needs_mask(part)[..., 0, 0] & masked)
        added[..., top : top + run] += rows * counted[..., None]
    return added


def clamped_kinds(
    geometry: Geometry, visible: Booleans, phase: str, distinct: bool
) -> Iterator[Kind]:
    """Yield the mistake of a last tile that begins earlier, so that its first tokens count twice; ``visible``: the correct mask.

    In o, lse and dq, keys count twice; in dk and dv, queries do.
    """
    of: list[tuple[str, tuple[str, ...]]] = [("keys", ("dq",))]
    if phase == "backward":
        of += [("queries", names) for names in GRADIENTS[1:4]]
    for side, names in of:
        some, unmasked = (partial(in_two_tiles, visible, visible, side, x) for x in (False, True))
        whole = partial(in_whole_blocks, visible, side, distinct)
        for where, made, cost in (
            (" in blocks that need no mask", unmasked, 1.2),
            ("", some, 1.3),
            (f", in tiles over all {side} of a block, also hidden ones", whole, 1.4),
        ):
            for sizes, again in by_sizes(made, sizes_in(geometry.slots), distinct):
                what = f" (for {listing(names)})" if phase == "backward" else ""
                words = f"the last tile of {sizes} {side} begins inside the one before, whose last {side} count twice{where}{what}"
                table = 1.0 + again
                changes = at_counts(names, table) if phase == "backward" else (("count", table),)
                yield Kind(words, changes, cost)


def in_two_tiles(
    visible: Booleans, computed: Booleans, side: str, masked: bool, size: int
) -> Booleans:
    """Return the pairs [a, b, 1, i, j] that count twice if the last tile of a block is moved back until it is full.

    ``computed``: the pairs that the tiles of a block contain. ``masked``: blocks that need a mask are computed by other
    code, without this mistake.
    """
    axis = 4 if side == "keys" else 3
    part = computed.any(axis=7 - axis, keepdims=True)
    count, number = part.sum(axis=axis, keepdims=True), np.cumsum(part, axis=axis)
    again = (number > count - size) & (number <= count - count % size) & (count % size > 0)
    return np.asarray(again & (count > size) & part & visible & ~(needs_mask(visible) & masked))


def in_whole_blocks(visible: Booleans, side: str, distinct: bool, size: int) -> Booleans:
    """Return the same for tiles over whole blocks; if ``distinct``, no pairs where tiles of the visible part have the same."""
    whole = in_two_tiles(visible, np.ones_like(visible), side, False, size)
    same = distinct and np.array_equal(whole, in_two_tiles(visible, visible, side, False, size))
    return np.zeros_like(whole) if same else whole
