"""The number relative to which a kernel rounds P: ``p_relative_to`` of a recipe.

P = exp(s - c) is rounded when it is computed, so c determines the binade of each P, and which P is exactly 1.
All choices of c are correct, but the variance of single elements differs between them by up to a factor of 4. If
the choice is 'any', P is taken as log-uniform in its binade (RELATIVE of :mod:`~ringspec.compare.noise.rounding`); this
is within a factor of 1.9 of the variance of any choice.
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
    """The numbers c of some rows of a head, for one tile after another in the order of the ring."""

    def __init__(self, kind: str | None, head: Head, queries: Integers) -> None:
        self.kind, self.head, self.queries = kind, head, queries
        self.seen = np.full((head.o.shape[0], queries.size), -np.inf)  # by 'running' and 'stale'
        self.of_block = self.seen
        if kind == "row":
            self.of_row = self.largest(np.arange(head.s.shape[2]))
        elif kind == "lse":
            self.of_row = head.lse[:, queries]

    def scores(self, keys: Integers) -> Array:
        """Return s [G, n, keys], with -inf at hidden pairs."""
        index = np.ix_(np.arange(self.head.s.shape[0]), self.queries, keys)
        return np.where(self.head.seen[index], self.head.s[index], -np.inf)

    def largest(self, keys: Integers) -> Array:
        return np.asarray(self.scores(keys).max(axis=2, initial=-np.inf))

    def begin(self, tiles: list[Integers]) -> None:
        """Start a block of keys, given its tiles."""
        if self.kind != "block_lse":
            return
        keys = np.concatenate(tiles) if tiles else np.zeros(0, dtype=np.int64)
        m = self.largest(keys)
        shift = finite(m)
        total = np.exp(self.scores(keys) - shift[..., None]).sum(axis=2)
        self.of_block = np.where(total > 0, shift + np.log(np.where(total > 0, total, 1.0)), m)

    def next(self, m: Array) -> Array:
        """Return c of the next tile, where ``m`` [G, n] is the maximum of its block so far."""
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
    """Return m, and 0 for a row without keys."""
    return np.where(np.isneginf(m), 0.0, m)


def near(c: Array, m: Array) -> Array:
    """Return c, limited to within FURTHEST of m; m itself for rows that have seen no key."""
    nothing = np.isneginf(m) | np.isneginf(c)
    safe = np.where(nothing, 0.0, m)
    return np.where(
        nothing, m, np.clip(np.where(nothing, 0.0, c), safe - FURTHEST, safe + FURTHEST)
    )


@dataclass(frozen=True)
class POperand:
    """P = ``x`` = e * keep [G, n, keys] before it is rounded; ``kept``: whether there is a dropout factor.

    ``top``: where e is exactly 1 or the pair is hidden; ``reach``: a bound on the earlier error of P.
    """

    x: Array
    e: Array
    kept: bool
    top: NDArray[np.bool_]
    reach: Array


def p_rounding(p: POperand, recipe: Recipe, truncated: bool) -> tuple[Error, Array]:
    """Return the error of rounding P in a known binade, and its mean; if e is 1, the dropout factor is what is rounded."""
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
    """Return the error of rounding P = ``x`` in an unknown binade, and its mean; ``weight`` times x is p of the row.

    Subnormal numbers of a format have one spacing, which is largest relative to p if P is p itself.
    A truncation loses half a spacing, averaged over mantissas.
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
