"""Rules about the tiles of queries and keys inside a block, by which kernels decide what they skip and what they mask.

A *pattern* [a, b, 1, i, j] is True for visible pairs of query i of worker a and key j of worker b; i and j are slots, the
places of tokens on a worker. A kernel divides a block into *tiles* of some queries and some keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ringspec.problem.model import Booleans, Integers

LARGEST_TILE = 8
OF_ODD_TILES = 1.9  # the cost of such a rule: a short list of pairs is simpler
Rule = tuple[str, Booleans, float]  # words, what is visible, and the cost


def visible_part(pattern: Booleans) -> Booleans:
    """Return the pairs [a, b, 1, i, j] of the queries that see a key of a block with the keys that they see."""
    return np.asarray(pattern.any(axis=4, keepdims=True) & pattern.any(axis=3, keepdims=True))


def needs_mask(pattern: Booleans) -> Booleans:
    """Return the blocks [a, b, 1, 1, 1] whose visible part has a hidden pair."""
    return np.asarray((visible_part(pattern) & ~pattern).any(axis=(3, 4), keepdims=True))


@dataclass(frozen=True)
class Tiling:
    """Tiles of ``rows`` queries and ``keys`` keys that begin anew in each range of ``run`` of a worker's ``slots``."""

    slots: int
    run: int
    rows: int
    keys: int

    @cached_property
    def ends_of_rows(self) -> tuple[Integers, Integers]:
        """The first and the last slot of the tile of each query."""
        return self.ends(self.rows)

    @cached_property
    def ends_of_keys(self) -> tuple[Integers, Integers]:
        """The first and the last slot of the tile of each key."""
        return self.ends(self.keys)

    def ends(self, size: int) -> tuple[Integers, Integers]:
        i = np.arange(self.slots)
        start = i - i % self.run
        first = i - i % self.run % size
        return first, np.minimum(first + size, start + self.run) - 1

    def some_and_all(self, pattern: Booleans) -> tuple[Booleans, Booleans]:
        """Return, for each pair, whether the pattern is True for some pair of its tile, and whether it is for all."""
        (top, bottom), (left, right) = self.ends_of_rows, self.ends_of_keys
        # The number of pairs in a tile, from sums over all pairs before each corner.
        sums = pattern.astype(np.int32).cumsum(axis=3).cumsum(axis=4)
        total = np.pad(sums, ((0, 0),) * 3 + ((1, 0),) * 2)
        top, left, bottom, right = top[:, None], left, bottom[:, None] + 1, right + 1
        count = (
            total[..., bottom, right] - total[..., top, right]
            - total[..., bottom, left] + total[..., top, left]
        )  # fmt: skip
        return count > 0, count == (bottom - top) * (right - left)


def rules_of_tiles(right: Booleans, run: int, causal: bool, slots: int = 0) -> tuple[Rule, ...]:
    """Return what is visible under each wrong rule; ``right`` is the correct pattern.

    ``run``: how many slots of a worker a kernel handles as one range. ``causal``: whether the mask is only causal.
    ``slots``: of a worker, if the pattern is only a part of its blocks.
    """
    return kept_rules(right.tobytes(), right.shape, run, causal, slots or right.shape[3])


@lru_cache(maxsize=16)
def kept_rules(
    right: bytes, shape: tuple[int, ...], run: int, causal: bool, slots: int
) -> tuple[Rule, ...]:
    """Return the same for a pattern with these bytes and this shape. They are needed several times for each problem."""
    pattern = np.frombuffer(right, bool).reshape(shape)
    return (*simple_tiles(pattern, slots), *odd_tiles(pattern, slots, run, causal))


def sizes_in(run: int) -> list[int]:
    """Return the sizes of tiles that are tried in ranges of ``run`` slots."""
    return sorted({*range(2, min(run, LARGEST_TILE) + 1), run} - {1})


def simple_tiles(right: Booleans, n: int) -> Iterator[Rule]:
    """Yield what kernels show that skip tiles, or leave them unmasked, because of a wrong test; for tiles of simple sizes."""
    there = right.shape[3]
    for rows, keys in tile_sizes(n):
        tile, of = tile_words(n, rows, keys), Tiling(there, there, rows, keys)
        # A rule about tiles that are not square is given only if no list of pairs is as simple.
        cost = 1.1 if rows == keys else 1.8
        some, whole = of.some_and_all(right)
        yield f"{tile} that are masked in part are skipped", whole, cost
        yield f"{tile} that should be masked in part are not masked", some, cost
        if rows == keys and 2 * rows >= n:
            yield from by_corners(right, of, tile, 1.1)


def odd_tiles(right: Booleans, n: int, run: int, causal: bool) -> Iterator[Rule]:
    """Yield the same for tiles of other sizes, which begin anew in each range of ``run`` slots; and wrong masks in tiles."""
    there = right.shape[3]
    for rows, keys in itertools.product(sizes_in(run), repeat=2):
        if rows == keys == run == n:
            continue
        of, tile = (
            Tiling(there, min(run, there), rows, keys),
            f"tiles of {rows} queries and {keys} keys",
        )
        some, whole = of.some_and_all(right)
        if (rows, keys) not in tile_sizes(n) or run < n:
            words = f"{tile} that should be masked in part are not masked"
            yield words, some, OF_ODD_TILES
            words = f"{tile} that are masked in part are skipped"
            yield words, whole, OF_ODD_TILES
            yield from by_corners(right, of, tile, OF_ODD_TILES)
        for words, pattern in wrong_in_tiles(right, of) if causal else ():
            words = f"{tile} that are masked in part {words}"
            yield words, np.where(some & ~whole, pattern, right), OF_ODD_TILES


def by_corners(right: Booleans, of: Tiling, tile: str, cost: float) -> Iterator[Rule]:
    """Yield what kernels show that test only one pair of a tile to see whether they skip it, or leave it unmasked."""
    for query, i in zip(("first", "last"), of.ends_of_rows, strict=True):
        for key, j in zip(("first", "last"), of.ends_of_keys, strict=True):
            pair = right[..., i[:, None], j]
            words = f"{tile} whose {query} query does not see their {key} key are skipped"
            yield words, right & pair, cost
            words = f"{tile} whose {query} query sees their {key} key are not masked"
            yield words, right | pair, cost


def wrong_in_tiles(right: Booleans, of: Tiling) -> Iterator[tuple[str, Booleans]]:
    """Yield wrong causal masks of kernels that compare slot numbers in each tile, with words."""
    i = np.arange(right.shape[3])
    inside = i % of.run
    row, key = (i - inside + i - first for first in (of.ends_of_rows[0], of.ends_of_keys[0]))
    yield "count queries from the tile's first", right[..., row, :]
    yield "count keys from the tile's first", right[..., key]
    yield "count queries and keys from the tile's first", right[..., row[:, None], key]
    yield (
        "hide one key too many in each row",
        right & np.where(inside + 1 < of.run, right[..., np.minimum(i + 1, len(i) - 1)], False),
    )
    yield (
        "show one key too many in each row",
        right | np.where(inside > 0, right[..., np.maximum(i - 1, 0)], False),
    )


def tile_sizes(n: int) -> list[tuple[int, int]]:
    """Return the tile sizes (queries, keys) that are tried, the largest first.

    Each side is all, half or a quarter of a block's ``n`` tokens.
    """
    sizes = [n // x for x in (1, 2, 4) if n % x == 0 and n // x > 1]
    return sorted(((i, j) for i in sizes for j in sizes), key=lambda x: -x[0] * x[1])


def tile_words(n: int, rows: int, keys: int) -> str:
    """Describe tiles of ``rows`` queries and ``keys`` keys in blocks of ``n`` queries and ``n`` keys."""
    if rows == keys == n:
        return "blocks"
    part = {n: "all", n // 2: "half", n // 4: "a quarter"}
    return f"tiles of {part[rows]} of a block's queries and {part[keys]} of its keys"
