"""Enclosures of elementary functions: every float32 value that a function of stated accuracy can return.

A function is *within n ulp* if its result y differs from the correctly rounded result v by at most n ulp(v), and

- it is exact where the result is: exp(0) = 1, log(1) = 0, log1p(0) = 0, sigmoid(0) = 1/2, and at infinities and NaN;
- it may return 0 for a subnormal result, and does not return a number of the wrong sign.

A quotient is within n ulp too, because a GPU's division may not be correctly rounded, and exact if the divisor is a power of two.
sigmoid and logsigmoid may also be composed, as 1 / (1 + exp(-x)) and min(x, 0) - log1p(exp(-abs(x))), of functions within
n ulp. The correctly rounded result comes from NumPy's float64 functions, whose error is taken as at most 4 ulp of float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.merges.functions import NUMPY, Functions
from ringspec.merges.intervals import Interval, hull, monotone, same_bits
from ringspec.merges.numbers import Float32

__all__ = ["ROUNDED", "within"]

Float64 = NDArray[np.float64]
Wide = Callable[[Float64], Float64]
Narrow = Callable[[Float32], Float32]
SLACK = 16 * 2.0**-52  # of sigmoid and logsigmoid too, which are composed
LEAST_NORMAL, LARGEST = np.finfo(np.float32).tiny, np.finfo(np.float32).max


def _sigmoid(x: Float64) -> Float64:
    return 1 / (1 + np.exp(-x))


def _logsigmoid(x: Float64) -> Float64:
    return np.minimum(x, 0.0) - np.log1p(np.exp(-np.abs(x)))


WIDE: dict[str, Wide] = {
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "exp2": np.exp2,
    "log2": np.log2,
    "sigmoid": _sigmoid,
    "logsigmoid": _logsigmoid,
}
# Where the result is exact, besides infinities and NaN.
EXACT_AT = {"exp": 0.0, "log": 1.0, "log1p": 0.0, "exp2": 0.0, "log2": 1.0, "sigmoid": 0.0}


def _rounded(name: str) -> Narrow:
    return lambda x: WIDE[name](x.astype(np.float64)).astype(np.float32)


ROUNDED = Functions(name="float64, rounded", **{name: _rounded(name) for name in WIDE})


def within(ulps: int) -> Functions:
    """Return functions of arrays or intervals that return all values which functions within ``ulps`` ulp can have."""
    given: dict[str, Any] = {name: _enclosure(name, ulps) for name in WIDE}
    exp, direct, one = given["exp"], given["sigmoid"], np.float32(1)
    given["sigmoid"] = lambda x: hull(direct(x), one / (one + exp(-x)))
    # The relative error of the composed function is at most 2 ulps + 1.5 times 2**-23: exp and log1p, whose condition is
    # at most 1, contribute ulps + 0.5 each, the sum of two negative numbers 0.5. An ulp is at least 2**-24 of its number.
    given["logsigmoid"] = _enclosure("logsigmoid", 4 * ulps + 4)
    given["divide"] = _quotient(ulps)
    return Functions(name=f"within {ulps} ulp", **given)


def _quotient(ulps: int) -> Callable[[Any, Any], Interval]:
    def enclosed(a: Any, b: Any) -> Interval:
        found = monotone(np.divide, a, b)
        low, high = (found.low, found.high) if isinstance(found, Interval) else (found, found)
        first, last = (b.low, b.high) if isinstance(b, Interval) else (b, b)
        exact = (first == last) & (np.abs(np.frexp(first)[0]) == 0.5)
        exact = exact | ((low == 0) & (high == 0))
        # Within one interval the ulp may double, so both ends move by that of the larger one.
        most = np.where(np.isfinite(low) & np.isfinite(high), np.maximum(_ulp(low), _ulp(high)), 0)
        moved_low, moved_high = _moved(low, -ulps * most), _moved(high, ulps * most)
        zero = np.float32(0)
        moved_low = np.where(low >= 0, np.maximum(moved_low, zero), moved_low)
        moved_high = np.where(high <= 0, np.minimum(moved_high, zero), moved_high)
        return Interval(np.where(exact, low, moved_low), np.where(exact, high, moved_high))

    return enclosed


def _enclosure(name: str, ulps: int) -> Callable[[Any], Interval]:
    def enclosed(x: Any) -> Interval:
        if not isinstance(x, Interval):
            x = Interval(x, x)
        low, high = _ends(name, x, ulps)
        # Of an interval, the exact value at an end says nothing about the values beside it.
        known = same_bits(x.low, x.high) & _exact(name, x.low)
        value = getattr(NUMPY, name)(x.low)
        low, high = np.where(known, value, low), np.where(known, value, high)
        unknown = x.unknown | (np.isnan(low) != np.isnan(high))
        infinity = np.float32(np.inf)
        return Interval(np.where(unknown, -infinity, low), np.where(unknown, infinity, high))

    return enclosed


def _exact(name: str, x: Float32) -> NDArray[np.bool_]:
    """Tell where every function within some ulp returns the same: at infinities, NaN, logarithms of 0, and EXACT_AT."""
    exact = ~np.isfinite(x) | (x == EXACT_AT.get(name, np.nan))
    return exact | (x <= 0) if name in ("log", "log2") else exact


def _ends(name: str, x: Interval, ulps: int) -> tuple[Float32, Float32]:
    """Return the least and the largest value that the function may have on an interval, apart from exact values."""
    below, above = _rounded_towards(name, x.low, -1), _rounded_towards(name, x.high, 1)
    # The ulp doubles at a power of two. Where the results reach the next one, its ulp counts: from there, a function may
    # come closer to 0 than from the end itself.
    crossed = np.where(np.frexp(below)[1] == np.frexp(above)[1], 1, 2)
    # Instead of a result that overflows, a function may return one of the largest numbers.
    start = np.where(np.isposinf(below), LARGEST, below)
    low = _moved(start, -ulps * _ulp(start) * np.where(below > 0, crossed, 1))
    high = _moved(above, ulps * _ulp(above) * np.where(above < 0, crossed, 1))
    # Towards zero, no further than 0, which may also replace a subnormal. A result of 0 is one that underflows.
    positive = below > 0 if name == "logsigmoid" else below >= 0
    negative = above <= 0 if name == "logsigmoid" else above < 0
    zero = np.float32(0)
    low = np.where(positive & (low < LEAST_NORMAL), zero, low)
    return low, np.where(negative & (high > -LEAST_NORMAL), zero, high)


def _rounded_towards(name: str, x: Float32, sign: int) -> Float32:
    """Return the correctly rounded result or, where float64 leaves it open, its lower (``sign`` -1) or upper neighbour."""
    value = WIDE[name](x.astype(np.float64))
    slack = np.where(np.isfinite(value), SLACK * np.abs(value), 0.0)
    rounded: Float32 = (value + sign * slack).astype(np.float32)
    return rounded


def _moved(start: Float32, by: Float64) -> Float32:
    moved: Float32 = np.where(np.isinf(start), start, (start + by).astype(np.float32))
    return moved


def _ulp(x: Float32) -> Float64:
    """Return one unit in the last place; ``numpy.spacing`` of the largest number is infinite."""
    exponents = np.where(x == 0, -149, np.maximum(np.frexp(x)[1] - 24, -149))
    return np.ldexp(1.0, exponents)
