"""Evaluate a merge whose lse are logarithms to base 2: weights 2**x instead of exp(x).

Let x_n be the lse of the parts that a row has, m the largest, d_n = x_n - m <= 0, which is exact, e_n = 2**d_n and z their
sum, so that z >= 1. Errors are in units of 2**-F, and ln 2 has w = F + 64 bits:

1. Terms. e_n = exp(d_n ln 2). If e_n is not below 2**-F, then |d_n| < 2**13, and d_n ln 2 is off by less than
   1.01 * 2**13 * 2**-w. With the error 2 of exp, e_n is off by less than eps = 3; a term below 2**-F may be 0. Where
   d_n = 0, e_n is exactly 1. If all d_n are 0, eps = 0.
2. o = sum e_n o_n / z is a weighted mean of the o_n, so it is off by at most eps (sum |o_n| + N max |o_n|), in units of o_n
   times 2**-F; rounding the quotient down adds 1 unless it has no remainder.
3. lse = m + log z / ln 2: log z is off by at most LOG_ERROR + N eps, because log has a slope of at most 1 here. The quotient is
   off by less than twice this, and 2 more. If eps = 0 and N is a power of two, log2 z is an integer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ringspec.exact.elementary import EXP_ERROR, LOG_ERROR, exp, ln2, log
from ringspec.exact.integers import Fixed, at_bits, objects, zeros
from ringspec.exact.rounding import Ball

GUARD = 64
Row = tuple[list[int], list[int], int, int]


def merge_balls(o: Fixed, lse: Fixed, there: NDArray[np.bool_], bits: int) -> dict[str, Ball]:
    """Evaluate o [R, D] and lse [R] of R rows from parts o [R, N, D] and lse [R, N]; ``there`` [R, N]: parts with keys.

    A row without any part has o = 0 and lse = 0.
    """
    rows, _, width = o.units.shape
    unit = max(lse.bits, bits)
    middle, radius, lse_middle, lse_radius = (
        zeros(shape) for shape in ((rows, width), (rows, width), (rows,), (rows,))
    )
    at = at_bits(lse, unit)
    for row in range(rows):
        have = there[row]
        if have.any():
            found = merged_row(o.units[row, have].tolist(), at[row, have].tolist(), unit, bits)
            middle[row], radius[row] = objects(found[0], (width,)), objects(found[1], (width,))
            lse_middle[row], lse_radius[row] = found[2:]
    return {
        "o": Ball(middle, radius, o.bits + bits),
        "lse": Ball(lse_middle, lse_radius, unit),
    }


def merged_row(o: Sequence[Sequence[int]], x: list[int], unit: int, bits: int) -> Row:
    """Return the middles and radii of o, in units of o times 2**-bits, and middle and radius of lse, in 2**-``unit``."""
    m, work = max(x), bits + GUARD
    log_2 = ln2(work)
    e = exp([(one - m) * log_2 for one in x], unit + work, bits)
    eps = 0 if min(x) == m else EXP_ERROR + 1
    total = sum(e)
    middle, radius = [], []
    for column in zip(*o, strict=True):
        sizes = [abs(value) for value in column]
        mean, rest = divmod(sum(a * b for a, b in zip(e, column, strict=True)) << bits, total)
        middle.append(mean)
        radius.append(eps * (sum(sizes) + len(x) * max(sizes)) + (1 if rest or eps else 0))
    count = len(x)
    if eps == 0 and count & (count - 1) == 0:
        return middle, radius, m + ((count.bit_length() - 1) << unit), 0
    quotient = (log([total], bits)[0] << work) // log_2
    error = 2 * (LOG_ERROR + count * eps) + 2
    return middle, radius, m + (quotient << (unit - bits)), error << (unit - bits)


def merge_scale_balls(o: Fixed, lse: Fixed, there: NDArray[np.bool_], bits: int) -> dict[str, Ball]:
    """Evaluate the row scales [R] of o and lse: kappa max_d sum_n 2**(x_n - lse) abs(o_n) and kappa + abs(lse).

    kappa = 1 + max abs(x_n) is that of natural lse (:mod:`ringspec.exact.row_scale`) in units of base 2, and exact.
    """
    balls = merge_balls(Fixed(abs(o.units), o.bits), lse, there, bits)
    sizes = np.where(there, abs(lse.units), 0).max(axis=1, initial=0)
    kappa = sizes + (1 << lse.bits)
    scaled = balls["o"]
    low = (scaled.middle - scaled.radius).max(axis=1)
    high = (scaled.middle + scaled.radius).max(axis=1)
    # The middle of an interval of odd length is not an integer of this unit; twice the unit holds it.
    o_ball = Ball((low + high) * kappa, (high - low) * kappa, scaled.bits + lse.bits + 1)
    whole = balls["lse"]
    up = whole.bits - lse.bits
    return {"o": o_ball, "lse": Ball(abs(whole.middle) + (kappa << up), whole.radius, whole.bits)}
