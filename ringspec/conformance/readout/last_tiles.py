"""Mistakes with the last tile of a block, which is short if the size of the tiles does not divide the block.

A kernel computes the visible part of a block in *tiles* of some queries and some keys. It may skip the short last tile,
count the zeros that fill it up, or begin it earlier, so that it is full and some tokens are in two tiles.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from ringspec.conformance.readout.geometry import Geometry
from ringspec.conformance.readout.kinds import GRADIENTS, Kind, at_counts, listing
from ringspec.conformance.readout.tile_rules import LARGEST_TILE, sizes_in
from ringspec.problem.model import Array, Booleans

UNMASKED = " where no mask hides them"


def short_tiles(right: Booleans) -> Iterator[tuple[str, Booleans]]:
    """Yield what is visible if the short last tile of the visible part of each block is skipped."""
    for side, axis in (("queries", 3), ("keys", 4)):
        part = right.any(axis=7 - axis, keepdims=True)
        last = part.sum(axis=axis, keepdims=True)
        number = np.cumsum(part, axis=axis)
        for size in range(2, LARGEST_TILE + 1):
            shown = right & (number <= last - last % size)
            yield f"the short last tile of {size} {side} of each block is skipped", shown


def padded_kinds(geometry: Geometry, visible: Booleans, distinct: bool) -> Iterator[Kind]:
    """Yield the mistake of counting the zeros that fill up the last tile of keys; ``visible``: the correct mask."""
    for where, masked in ((UNMASKED, True), ("", False)):
        of_sizes: dict[tuple[bytes, int], list[int]] = {}
        for size in sizes_in(geometry.run):
            table = padded_keys(visible, geometry.run, size, masked)
            alike = table.tobytes(), 0 if distinct else size
            if table.any() or not distinct:
                of_sizes.setdefault(alike, []).append(size)
        for sizes in of_sizes.values():
            table = padded_keys(visible, geometry.run, sizes[0], masked)
            tile = f"the last tile of {' or '.join(map(str, sizes))} keys of a block"
            words = f"the zeros that fill up {tile} are counted as keys with score 0{where}"
            yield Kind(words, (("padded", table),), 1.1 if masked else 1.2)


def padded_keys(visible: Booleans, run: int, size: int, masked: bool) -> Array:
    """Return how many keys fill up the last tile of ``size`` keys for each row of a block, [a, b, 1, i].

    A kernel computes the visible part of each range of ``run`` slots. ``masked``: parts with hidden pairs have a mask,
    which hides these keys.
    """
    added = np.zeros(visible.shape[:4])
    slots = range(0, visible.shape[3], run)
    for top, left in itertools.product(slots, slots):
        part = visible[..., top : top + run, left : left + run]
        rows, keys = part.any(axis=4), part.any(axis=3).sum(axis=-1)
        whole = part.sum(axis=(3, 4)) == keys * rows.sum(axis=-1)
        counted = -keys % size * (whole | (not masked))
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
        for where, everywhere in ((" in blocks that need no mask", False), ("", True)):
            of_sizes: dict[tuple[bytes, int], list[int]] = {}
            for size in sizes_in(geometry.slots):
                table = tokens_in_two_tiles(visible, size, side, everywhere)
                if (table > 1).any() or not distinct:
                    alike = table.tobytes(), 0 if distinct else size
                    of_sizes.setdefault(alike, []).append(size)
            for sizes in of_sizes.values():
                table = tokens_in_two_tiles(visible, sizes[0], side, everywhere)
                tile = f"the last tile of {' or '.join(map(str, sizes))} {side}"
                what = f" (for {listing(names)})" if phase == "backward" else ""
                words = f"{tile} begins inside the one before, whose last {side} count twice{where}{what}"
                changes = at_counts(names, table) if phase == "backward" else (("count", table),)
                yield Kind(words, changes, 1.2 + 0.1 * everywhere)


def tokens_in_two_tiles(visible: Booleans, size: int, side: str, everywhere: bool) -> Array:
    """Return how often each pair [a, b, 1, i, j] counts if the last tile of a block is moved back until it is full.

    ``everywhere``: in every block; otherwise only in those in which the visible pairs are all pairs of some rows and keys.
    """
    rows, keys = visible.any(axis=4, keepdims=True), visible.any(axis=3, keepdims=True)
    part, axis = (keys, 4) if side == "keys" else (rows, 3)
    count, number = part.sum(axis=axis, keepdims=True), np.cumsum(part, axis=axis)
    whole = (visible == (rows & keys)).all(axis=(3, 4), keepdims=True)
    again = (number > count - size) & (number <= count - count % size) & (count % size > 0)
    return 1.0 + (again & (count > size) & part & (whole | everywhere))
