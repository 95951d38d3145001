"""o and the gradients of some rows of one head: exact integer products with the probabilities P.

Every number is an integer times a power of two. Let ``keep`` be the dropout mask (0 or 1), A = 1 - dropout_p and
g' = keep * <dy, v>, so that dp = g'/A. All results are computed times A, and divided by A once, at the end
(:func:`divide`), because a division is not exact. t is the tanh of a soft cap, and dz the gradient of the scores before
the soft cap:

    A o = P' v with P' = P keep          A dv = P'^T dy
    N_i = sum_j P_ij g'_ij = A delta_i   (delta = <dy, o>)
    D_ij = g'_ij - c_i, c_i = N_i - A dlse_i
    T_ij = P_ij D_ij = A ds_ij           A dz = T (1 - t**2) with a soft cap
    A dq = scale dz k                    A dk = scale dz^T q      A dsink = - sum_i P_sink c_i

The computation has F bits, and errors are in units of 2**-F. Let e_i be the error of P in row i, err(x) the error of
another number x, and x^ the computed value of x. Sums run over visible pairs:

1. Products of P with exact numbers add no error. So A o is off by e_i sum_j keep |v|, A dv by
   sum_i keep e_i |dy|, and N_i by e_i sum_j |g'|. In a row without sinks in which all g' are equal to one number g,
   N_i = g exactly.
2. T: |P^ D^ - P D| <= |P^ - P| |D^| + P |D^ - D| <= e_i max_j |D^_ij| + err(c_i), because P <= 1. If the caller gives
   lse and delta, P may be larger, but c_i is exact. Cutting T to F bits adds less than 1, and so does cutting the
   bound; so 2 is added. Nothing is added in a row where e_i and err(c_i) are 0 and nothing was cut.
3. dz, with w = 1 - t**2: |T^ w^ - T w| <= err(T) w^ + |T| |w^ - w| <= err(T) + 2 (max_j |T^| + err(T)) units, because
   w <= 1 is off by at most 2. Again 2 is added for the cuts. Without a soft cap, dz = T.
4. dq, dk, dbias and dsinks as in 1. For dq, dk and dbias, the error of dz is multiplied by |k|, |q| or 1, and summed.
   For dsinks, e_i |c_i| + err(c_i) is summed, because P_sink <= 1 (or c_i is exact).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringspec.exact.integers import (
    Digits,
    Fixed,
    Units,
    at_bits,
    digits_of,
    masked_sums,
    matmul,
    multiply,
    transposed,
    where,
    zeros,
)
from ringspec.exact.logits import Logits, Prepared, per_row
from ringspec.exact.rounding import Ball
from ringspec.exact.softmax import Weights


@dataclass(frozen=True)
class Shares:
    """The contribution of some rows of one head to the gradients, times A, as balls (intervals).

    ``dq`` [n, D], ``dk`` [Sk, D], ``dv`` [Sk, Dv]; ``dz``: one number for each visible pair; ``dsinks`` [n, N]: the
    contribution of each row.
    """

    dq: Ball
    dk: Ball
    dv: Ball
    dz: Ball
    dsinks: Ball


@dataclass(frozen=True)
class Subtracted:
    """The numbers c_i = A (delta_i - dlse_i) [n] with their errors, and g' for each visible pair."""

    c: Ball
    g: Fixed


def dense(values: Units, pairs: Logits, shape: tuple[int, ...]) -> Units:
    """Return the values of the visible pairs as a matrix [n, Sk] that is 0 at hidden pairs."""
    matrix = zeros(shape)
    matrix[pairs.i, pairs.j] = values
    return matrix


def visible(pairs: Logits, shape: tuple[int, ...], kept: NDArray | None) -> NDArray[np.bool_]:
    """Return [n, Sk], True at visible pairs that dropout keeps."""
    mask = np.zeros(shape, dtype=np.bool_)
    mask[pairs.i, pairs.j] = True
    return mask if kept is None else mask & kept


def dropped(values: Units, pairs: Logits, kept: NDArray | None) -> Units:
    """Return the values of the visible pairs, with 0 where dropout drops the pair."""
    return values if kept is None else where(kept[pairs.i, pairs.j], values, 0)


def kept_digits(weights: Weights, kept: NDArray | None, shape: tuple[int, int]) -> Digits:
    """Return P' = P keep as a matrix [n, Sk], in 16-bit digits; o and dv are products with this matrix."""
    pairs = weights.logits
    return digits_of(dense(dropped(weights.p, pairs, kept), pairs, shape))


def output(prepared: Prepared, weights: Weights, v: Units, kept: NDArray | None, p: Digits) -> Ball:
    """Compute A o [n, Dv] of some rows, from v [Sk, Dv] and P' (:func:`kept_digits`)."""
    mask = visible(weights.logits, p.shape[1:], kept)
    radius = weights.error[:, None] * masked_sums(mask, abs(v))
    return Ball(multiply(p, digits_of(v)), radius, weights.bits + prepared.v.bits)


def subtracted(
    prepared: Prepared, weights: Weights, v: Units, dy: Fixed, a_dlse: Fixed, kept: NDArray | None
) -> Subtracted:
    """Compute c = N - A dlse of some rows, from their P, dy [n, Dv] and ``a_dlse`` = A dlse [n]."""
    pairs = weights.logits
    g = products(prepared, pairs, v, dy, kept)
    n = per_row(np.add, weights.p * g.units, pairs, 0)
    error = weights.error * per_row(np.add, abs(g.units), pairs, 0)
    low, high = (per_row(f, g.units, pairs, 0) for f in (np.minimum, np.maximum))
    equal = low == high
    if prepared.sinks is not None:
        equal = equal & (low == 0)
    n = where(equal, low << weights.bits, n)
    error = where(equal, 0, error)
    n_bits = weights.bits + g.bits
    bits = max(n_bits, a_dlse.bits)
    c = at_bits(Fixed(n, n_bits), bits) - at_bits(a_dlse, bits)
    c[weights.empty] = 0
    return Subtracted(Ball(c, error << (bits - n_bits), bits), g)


def products(prepared: Prepared, pairs: Logits, v: Units, dy: Fixed, kept: NDArray | None) -> Fixed:
    """Compute g' = keep <dy, v> exactly, one number for each visible pair."""
    g = matmul(dy.units, v.T)[pairs.i, pairs.j]
    return Fixed(dropped(g, pairs, kept), dy.bits + prepared.v.bits)


def shares(prepared: Prepared, weights: Weights, by: Subtracted, operands: Operands) -> Shares:
    """Compute the contribution of the rows to every gradient, times A."""
    dz = score_gradient(weights, by)
    dq, dk, dv = gradient_products(prepared, weights, dz, operands, prepared.factor)
    return Shares(dq, dk, dv, dz.flat(weights.logits), sink_shares(weights, by.c))


def gradient_products(
    prepared: Prepared, weights: Weights, dz: RowBall, operands: Operands, scale: int
) -> tuple[Ball, Ball, Ball]:
    """Compute scale dz k, scale dz^T q and P'^T dy (steps 1 and 4); ``scale`` is the integer of the softmax scale."""
    pairs, q, k, dy = weights.logits, operands.q, operands.k, operands.dy
    shape = (weights.error.size, len(k))
    mask = visible(pairs, shape, None)
    matrix, bits = digits_of(dense(dz.middle, pairs, shape)), dz.bits + prepared.scale.bits
    dq = Ball(
        multiply(matrix, digits_of(k)) * scale,
        dz.radius[:, None] * masked_sums(mask, abs(k)) * abs(scale),
        bits + prepared.k.bits,
    )
    dk = Ball(
        multiply(transposed(matrix), digits_of(q)) * scale,
        masked_sums(mask.T, dz.radius[:, None] * abs(q)) * abs(scale),
        bits + prepared.q.bits,
    )
    dv = Ball(
        multiply(transposed(operands.p), digits_of(dy.units)),
        masked_sums(visible(pairs, shape, operands.kept).T, weights.error[:, None] * abs(dy.units)),
        weights.bits + dy.bits,
    )
    return dq, dk, dv


@dataclass(frozen=True)
class Operands:
    """The operands of the gradients of some rows.

    ``q`` [n, D], ``dy`` [n, Dv], ``k`` [Sk, D], ``kept``: dropout mask [n, Sk] or None, ``p``: P' [n, Sk] in digits.
    """

    q: Units
    k: Units
    dy: Fixed
    kept: NDArray | None
    p: Digits


@dataclass(frozen=True)
class RowBall:
    """Intervals for all visible pairs: a middle for each pair and a radius for each row, in units of 2**-bits."""

    middle: Units
    radius: Units
    bits: int

    def flat(self, pairs: Logits) -> Ball:
        """Return a ball with one radius for each pair instead of each row."""
        return Ball(self.middle, self.radius[pairs.i], self.bits)


def score_gradient(weights: Weights, by: Subtracted) -> RowBall:
    """Compute A dz of the visible pairs in units of 2**-F (steps 2 and 3)."""
    pairs, bits = weights.logits, weights.bits
    t = times_p(weights, at_bits(by.g, by.c.bits) - by.c.middle[pairs.i], by.c.radius, by.c.bits)
    if pairs.slope is None:
        return t
    largest_t = per_row(np.maximum, abs(t.middle), pairs, 0) + t.radius
    lost = ((2 * largest_t) >> bits) + 3  # includes the cut of the bound itself
    radius = where(largest_t == 0, 0, t.radius + lost)
    return RowBall((t.middle * pairs.slope) >> bits, radius, bits)


def times_p(weights: Weights, d: Units, radius: Units, bits: int) -> RowBall:
    """Multiply P of each visible pair by ``d``, and round the product down to units of 2**-F (step 2).

    ``d``: one number for each pair; ``radius``: its error for each row; both are in units of 2**-bits.
    """
    pairs = weights.logits
    uncut = weights.p * d
    t = uncut >> bits
    bound = weights.error * per_row(np.maximum, abs(d), pairs, 0) + (radius << weights.bits)
    cut = per_row(np.maximum, uncut - (t << bits), pairs, 0)
    return RowBall(t, where((bound == 0) & (cut == 0), 0, (bound >> bits) + 2), weights.bits)


def sink_shares(weights: Weights, c: Ball) -> Ball:
    """Compute - P_sink c of each row, [n, N]."""
    radius = weights.error * abs(c.middle) + (c.radius << weights.bits)
    middle = -weights.sinks * c.middle[:, None]
    return Ball(middle, radius[:, None] + 0 * weights.sinks, weights.bits + c.bits)


def divide(ball: Ball, kept: tuple[int, int]) -> Ball:
    """Divide a ball by A, given as (units, bits) with A = units * 2**-bits; exact if A is a power of two."""
    units, bits = kept
    if units == 1 << bits:  # A = 1
        return ball
    if units & (units - 1) == 0:
        up = bits - (units.bit_length() - 1)  # 1/A = 2**up
        return Ball(ball.middle << up, ball.radius << up, ball.bits)
    more = units.bit_length()  # the unit of the quotient is at least as fine as before
    up = bits + more
    raised = ball.middle << up
    middle = raised // units
    exact = (ball.radius == 0) & (middle * units == raised)
    radius = where(exact, 0, (ball.radius << up) // units + 2)
    return Ball(middle, radius, ball.bits + more)
