"""Logits of the visible pairs of one head, for some rows at a time; exact without a soft cap."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ringspec.exact.elementary import GUARD, tanh
from ringspec.exact.integers import Fixed, Units, at_bits, fixed, matmul, objects
from ringspec.exact.problem import Problem

Indices = NDArray[np.intp]


@dataclass(frozen=True)
class Prepared:
    """A problem whose numbers are converted to integers times powers of two.

    ``softcap`` and ``kept`` = 1 - dropout_p are pairs (units, bits), each the number units * 2**-bits.
    """

    problem: Problem
    q: Fixed
    k: Fixed
    v: Fixed
    scale: Fixed
    bias: Fixed | None
    sinks: Fixed | None
    softcap: tuple[int, int] | None
    kept: tuple[int, int]

    @property
    def factor(self) -> int:
        """The scale as an integer, in units of 2**-scale.bits."""
        return int(self.scale.units.item())


def prepare(problem: Problem) -> Prepared:
    """Convert every number of the problem to an integer times a power of two, exactly."""
    bias = problem.bias
    return Prepared(
        problem,
        fixed(problem.q),
        fixed(problem.k),
        fixed(problem.v),
        fixed(np.array([problem.scale])),
        None if bias is None else fixed(np.where(np.isneginf(bias), 0.0, bias)),
        None if problem.sinks is None else fixed(problem.sinks),
        None if problem.softcap is None else dyadic(Fraction(problem.softcap)),
        dyadic(1 - Fraction(problem.dropout_p)),
    )


def dyadic(x: Fraction) -> tuple[int, int]:
    """Return (units, bits) with x = units * 2**-bits; the denominator of x must be a power of two.

    >>> dyadic(1 - Fraction(0.25))
    (3, 2)
    """
    return x.numerator, x.denominator.bit_length() - 1


@dataclass(frozen=True)
class Logits:
    """The visible pairs (i, j) of some rows in row order, and their logits, computed with F bits.

    One number for each pair: ``z``, the logit before the soft cap c, exact, as an integer in a common unit; ``s``, the
    logit in units of 2**-s_bits, off by at most ``error`` units of 2**-F (0 without a soft cap); ``slope``,
    1 - tanh(z / c)**2 in units of 2**-F, off by at most 2 units, or None without a soft cap.

    ``filled``: the rows with a visible key; ``starts``: the index of the first pair of each of these rows. ``count``
    [n]: the number of visible keys of every row.
    """

    i: Indices
    j: Indices
    z: Units
    s: Units
    s_bits: int
    error: int
    slope: Units | None
    starts: Indices
    filled: Indices
    count: NDArray[np.int64]


def logits(prepared: Prepared, b: int, h: int, rows: slice, bits: int) -> Logits:
    """Compute the logits of the visible pairs of ``rows`` of query head h in batch b, for F = ``bits``."""
    problem = prepared.problem
    mask = problem.mask(b, h, rows)
    i, j = np.nonzero(mask)
    keys = prepared.k.units[b, h // problem.group]
    products = matmul(prepared.q.units[b, h, rows], keys.T)[i, j] * prepared.factor
    z = Fixed(products, prepared.q.bits + prepared.k.bits + prepared.scale.bits)
    if prepared.bias is not None:
        whole = np.broadcast_to(prepared.bias.units, problem.pairs)
        z = plus(z, Fixed(whole[b, h, rows][i, j], prepared.bias.bits))
    count = mask.sum(axis=1, dtype=np.int64)
    filled = np.flatnonzero(count)
    starts = (np.cumsum(count) - count)[filled]
    if prepared.softcap is None:
        return Logits(i, j, z.units, z.units, z.bits, 0, None, starts, filled, count)
    s, s_bits, slope = capped(z, prepared.softcap, bits)
    return Logits(i, j, z.units, s, s_bits, 1, slope, starts, filled, count)


def plus(a: Fixed, b: Fixed) -> Fixed:
    """Return the exact sum of two numbers."""
    bits = max(a.bits, b.bits)
    return Fixed(at_bits(a, bits) + at_bits(b, bits), bits)


def capped(z: Fixed, softcap: tuple[int, int], bits: int) -> tuple[Units, int, Units]:
    """Compute s = c * tanh(z / c), and the slope 1 - tanh(z / c)**2.

    s is in units of 2**-(bits + 8), and is off by less than 2**-bits. Proof: tanh is computed in units of 2**-w with
    w = bits + 32 + log2 c, and is off by at most 7 such units. Times c, this error is at most 7 * 2**-32 * 2**-bits.
    The cut to bits + 8 binary places adds 2**-8 * 2**-bits. The slope is in units of 2**-bits. It is off by 13 units of
    2**-w and by the cut, together by less than 2 units of 2**-bits.
    """
    cap, cap_bits = softcap
    work = bits + GUARD + max(0, cap.bit_length() - cap_bits)
    t = tanh(z.units.tolist(), z.bits, cap, cap_bits, work)
    down = work + cap_bits - (bits + 8)
    s = [(cap * size) >> down for size in t.t]
    slope = [size >> (work - bits) for size in t.slope]
    return objects(s, z.units.shape), bits + 8, objects(slope, z.units.shape)


def per_row(function: np.ufunc, x: Units, logits: Logits, otherwise: int) -> Units:
    """Reduce the numbers ``x`` of each row's pairs with ``function``; rows without pairs get ``otherwise``."""
    result = np.full(logits.count.shape, otherwise, dtype=object)
    if logits.filled.size:
        result[logits.filled] = function.reduceat(x, logits.starts)
    return result
