"""The number c relative to which a kernel rounds P = exp(s - c), and the error of that rounding.

c is, for example, the largest score of the row. It determines the binade of each P, and which P are exactly 1. Every
choice of c is correct, but the variance of the rounding errors of single elements differs between choices by up to a
factor of 4. A recipe (the declaration of where a kernel rounds) names the choice in ``p_relative_to``. If it says
'any', P is taken as log-uniform in its binade; the predicted variance is then within a factor of 1.9 of every choice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringspec.compare.noise.problem import Array, Head, Integers
from ringspec.compare.noise.rounding import (
    RELATIVE,
    Error,
    rounding,
    spacing,
    truncated_to,
    truncation,
)
from ringspec.formats import format_of, round_to, unit_roundoff
from ringspec.recipes import Recipe

STALE_BY = 8.0 * math.log(2.0)  # FlashAttention-4 rescales when exp(s - m) could exceed 256
FURTHEST = 80.0  # distance of c from a tile's maximum beyond which P is 0 in any format narrower than float32


class Reference:
    """Computes c for some query rows of a head, tile by tile, in the order in which a ring visits the keys."""

    def __init__(self, kind: str | None, head: Head, queries: Integers) -> None:
        self.kind, self.head, self.queries = kind, head, queries
        self.seen = np.full((head.o.shape[0], queries.size), -np.inf)  # for 'running' and 'stale'
        self.of_block = self.seen
        if kind == "row":
            self.of_row = self.largest(np.arange(head.s.shape[2]))
        elif kind == "lse":
            self.of_row = head.lse[:, queries]

    def scores(self, keys: Integers) -> Array:
        """Return the scores [G, n, len(keys)] of the rows and ``keys``, with -inf where the key is hidden."""
        index = np.ix_(np.arange(self.head.s.shape[0]), self.queries, keys)
        return np.where(self.head.seen[index], self.head.s[index], -np.inf)

    def largest(self, keys: Integers) -> Array:
        return np.asarray(self.scores(keys).max(axis=2, initial=-np.inf))

    def begin(self, tiles: list[Integers]) -> None:
        """Start the next block of keys; ``tiles``: the indices of its keys, tile by tile."""
        if self.kind != "block_lse":
            return
        keys = np.concatenate(tiles) if tiles else np.zeros(0, dtype=np.int64)
        m = self.largest(keys)
        shift = finite(m)
        total = np.exp(self.scores(keys) - shift[..., None]).sum(axis=2)
        self.of_block = np.where(total > 0, shift + np.log(np.where(total > 0, total, 1.0)), m)

    def next(self, m: Array) -> Array:
        """Return c for the next tile; ``m`` [G, n]: the largest score of each row in the block up to this tile."""
        if self.kind in (None, "block", "any"):
            return m
        if self.kind == "block_lse":
            return near(self.of_block, m)
        if self.kind in ("row", "lse"):
            return near(self.of_row, m)
        if self.kind == "stale":
            with np.errstate(invalid="ignore"):  # -inf - -inf in a row that has seen no key
                rises = ~(m - self.seen <= STALE_BY)
            self.seen = np.where(rises, m, self.seen)
        else:
            self.seen = np.maximum(self.seen, m)
        return near(self.seen, m)


def finite(m: Array) -> Array:
    """Return m with 0 in place of -inf (rows without keys)."""
    return np.where(np.isneginf(m), 0.0, m)


def near(c: Array, m: Array) -> Array:
    """Return c, moved to within :data:`FURTHEST` of ``m``; where m or c is -inf (no visible key so far), return m."""
    nothing = np.isneginf(m) | np.isneginf(c)
    safe = np.where(nothing, 0.0, m)
    return np.where(
        nothing, m, np.clip(np.where(nothing, 0.0, c), safe - FURTHEST, safe + FURTHEST)
    )


@dataclass(frozen=True)
class POperand:
    """P before it is rounded to the format of the product P v.

    ``e`` [G, n, keys]: the exponential exp(s - c). ``x``: e times the dropout factor. ``kept``: whether there is a
    dropout factor. ``top``: True where e is exactly 1 or the pair is hidden. ``reach``: a bound of the error of ``x``
    before the rounding.
    """

    x: Array
    e: Array
    kept: bool
    top: NDArray[np.bool_]
    reach: Array


def p_rounding(p: POperand, recipe: Recipe, truncated: bool) -> tuple[Error, Array]:
    """Return the error of rounding P, whose binade is known, and the mean of that error.

    Where e is exactly 1, only the dropout factor is rounded, so the error is known exactly.
    """
    grid = 0.0 if p.kept else spacing(p.e, recipe.statistics)
    made, known = rounding(p.x, recipe.p, grid, reach=p.reach), np.zeros(p.x.shape)
    if truncated:
        made, known = truncation(p.x, recipe.p, grid)
    certain: Array | float = 0.0
    if p.kept:
        certain = (truncated_to if truncated else round_to)(p.x, recipe.p) - p.x
    known = np.where(p.top, certain, known)
    variance = np.where(p.top, 0.0, made.variance)
    return Error(variance, np.where(p.top, np.abs(certain), made.bound)), known


def p_rounding_somewhere(
    x: Array, weight: Array, recipe: Recipe, truncated: bool
) -> tuple[Error, Array]:
    """Return the error of rounding P = ``x``, whose binade is unknown, and the mean of that error.

    ``weight``: the factor that converts x to the final probability p. For subnormal numbers, the spacing is taken
    relative to p, the smallest value that P may have. A truncation loses half a spacing on average.
    """
    if unit_roundoff(recipe.p) <= unit_roundoff(recipe.statistics):  # P is already in this format
        return rounding(x, recipe.p, spacing(x, recipe.statistics)), np.zeros(x.shape)
    r, target = unit_roundoff(recipe.p), format_of(recipe.p)
    least = 2.0 ** (target.min_exponent + 1 - target.precision)
    floor = np.where(weight > 0, least / np.where(weight > 0, weight, 1.0), 0.0)
    floor = np.where(x > 0, np.minimum(floor, 2.0 * x), 0.0)
    variance = np.maximum(RELATIVE * (r * x) ** 2, floor * floor / 12)
    known = -x * r / (2.0 * math.log(2.0)) if truncated else np.zeros(x.shape)
    return Error(variance, np.maximum(r * x, floor / 2)), known
