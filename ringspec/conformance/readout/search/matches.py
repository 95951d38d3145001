"""Compare what a ring with some faults computes with what was read from results, matrix by matrix.

A *pair* [a, b, h, i, j] is query i of worker a with key j of worker b in head h. A *block* [a, b] contains all pairs of
two workers, and a *row* [a, h, i] all pairs of one query in one head.

The *matrices* of the forward pass are 'A', the weights, and 'V', the products of the weights with G; lse is
compared in the same way. Those of the backward pass are 'P', the weights, and dS as used for dq, dk and dbias; dsinks is
compared in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ringspec.conformance.readout.faults.kinds import Fault
from ringspec.problem.model import Array, Booleans

ZERO = 1e-6  # smaller weights count as 0


@dataclass(frozen=True)
class Match:
    """How far a prediction agrees with what was read, by matrix.

    ``equal``: which elements agree. ``predicted`` and ``compared``: the functions that compute ``ours`` and ``alike``,
    which most predictions do not need.
    """

    equal: dict[str, Booleans]
    predicted: Callable[[], dict[str, Array]]
    compared: Callable[[], dict[str, Booleans]]

    @cached_property
    def ours(self) -> dict[str, Array]:
        """The prediction, by matrix."""
        return self.predicted()

    @cached_property
    def alike(self) -> dict[str, Booleans]:
        """By matrix, which halves of a block's rows agree up to a factor, [a, b, h, i, 2]."""
        return self.compared()

    @cached_property
    def whole(self) -> bool:
        return not any(number_wrong(x) for x in self.equal.values())

    @cached_property
    def blocks(self) -> dict[str, Booleans]:
        """By matrix, the blocks [a, b] in which every element agrees; for lse and V, the workers [a]."""
        return {name: in_blocks(x, np.all) for name, x in self.equal.items()}

    @cached_property
    def wrong(self) -> dict[str, int]:
        """The number of elements that disagree, by matrix; under 'shape of ...', of halves of rows that are not ``alike``."""
        return {name: number_wrong(x) for name, x in self.equal.items()} | {
            f"shape of {name}": number_wrong(x) for name, x in self.alike.items()
        }

    @cached_property
    def score(self) -> float:
        """The fraction of each matrix that agrees, summed over the matrices."""
        return sum(float(x.mean()) for x in self.equal.values())

    def gain(self, plain: Match) -> float:
        """Return the fraction of the wrong elements in ``plain`` that are right here, summed over the matrices."""
        total = 0.0
        for name, wrong in plain.wrong.items():
            weight = 0.5 if name.startswith("shape") else 1.0
            total += weight * max(0, wrong - self.wrong[name]) / max(wrong, 0.01 * plain.ours_size)
        return total

    @cached_property
    def ours_size(self) -> int:
        return max(x.size for x in self.ours.values())


@dataclass(frozen=True)
class Explanation:
    """The faults of a pass. ``whole``: they account for everything that was read.

    ``others``: other sets of faults that account for everything. ``base``: what the backward pass computes apart from
    the faults; '' if it is the gradient of attention.
    """

    faults: tuple[Fault, ...]
    whole: bool
    match: Match
    others: tuple[tuple[Fault, ...], ...] = ()
    base: str = ""


def number_wrong(equal: Booleans) -> int:
    return int(equal.size - np.count_nonzero(equal))


def in_blocks(x: Booleans, which: Callable[..., Booleans]) -> Booleans:
    """Reduce pairs [a, b, h, i, j] to blocks [a, b], or rows [a, h, i] to workers [a]; ``which`` is np.any or np.all."""
    return which(x, axis=tuple(range(2 if x.ndim == 5 else 1, x.ndim)))


def near(seen: Array, ours: Array, size: Array, tolerance: float) -> Booleans:
    """Return where two arrays differ by at most ``tolerance`` times ``size``. NaN never agrees; equal infinities do."""
    with np.errstate(invalid="ignore"):
        difference, most = np.asarray(seen - ours), np.asarray(tolerance * size)
        np.abs(difference, out=difference)
        most += ZERO
        close = np.asarray(difference <= most)
        close &= np.isfinite(ours)
        close |= seen == ours
        return close


def alike(seen: Array, ours: Array, tolerance: float) -> Booleans:
    """Return which halves of rows, [a, b, h, i, 2], have the same zeros and otherwise differ by one positive factor."""
    halves = (*seen.shape[:4], 2, -1) if seen.shape[4] % 2 == 0 else (*seen.shape[:4], 1, -1)
    return ratio_steady(seen.reshape(halves), ours.reshape(halves), tolerance)


def ratio_steady(seen: Array, ours: Array, tolerance: float) -> Booleans:
    """Return where two arrays, along the last axis, have the same zeros and otherwise differ by one positive factor.

    What the factor of the others makes smaller than ZERO may be 0.
    """
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        nothing, hidden = np.abs(ours) <= ZERO, np.abs(seen) <= ZERO
        left_out = nothing | hidden
        ratio = seen / np.where(nothing, 1.0, ours)
        low = np.where(left_out, np.inf, ratio).min(axis=-1)
        high = np.where(left_out, -np.inf, ratio).max(axis=-1)
        zeros = np.where(hidden, nothing | (np.abs(ours) * high[..., None] <= 2 * ZERO), ~nothing)
        steady = (high <= low * (1 + 2 * tolerance)) & (low > 0) & (high > 0)
        steady |= nothing.all(axis=-1)
    return zeros.all(axis=-1) & steady


def in_halves(pairs: Booleans) -> Booleans:
    """Return in which halves of rows, [a, b, h, i, 2], there are some of the ``pairs``; whole rows if they have no halves."""
    n = pairs.shape[4]
    return np.asarray(pairs.reshape(*pairs.shape[:4], 2 - n % 2, -1).any(axis=5))


def of_pairs(halves: Booleans, slots: int) -> Booleans:
    """Repeat the value of each half of a row, so that every pair [a, b, h, i, j] has one."""
    return np.repeat(halves, slots // halves.shape[4], axis=4)


def in_tiles(inside: Booleans, outside: Booleans, either: Booleans) -> Booleans:
    """Complete the pairs ``inside`` [a, b, h, i, j] to whole tiles by adding pairs of ``either``.

    ``either``: pairs that may be inside or outside. A tile is a rectangular part of a block whose sides are those of
    the block divided by powers of 2. The largest tiles that never contain pairs of both ``inside`` and ``outside`` are
    used.
    """
    n = inside.shape[3]
    sizes = [n >> x for x in range(n.bit_length()) if n % (1 << x) == 0]
    for rows, keys in sorted(((i, j) for i in sizes for j in sizes), key=lambda x: -x[0] * x[1]):
        shape = (*inside.shape[:3], n // rows, rows, n // keys, keys)
        some, others = (x.reshape(shape).any(axis=(4, 6), keepdims=True) for x in (inside, outside))
        if not (some & others).any():
            return inside | (either & np.broadcast_to(some, shape).reshape(inside.shape))
    return inside


def changes(before: Match, after: Match, name: str) -> bool:
    return bool((before.equal[name] != after.equal[name]).any())


def finite_size(x: Array) -> Array:
    return np.where(np.isfinite(x), np.abs(x), 0.0)
