"""Round an interval to the correctly rounded number, or report that the interval does not decide it.

Rounding to nearest even is monotone: if both ends of an interval around the true value round to
the same number, the true value does too (Ziv's test). Zero is always +0, so an interval whose ends are both closer to 0
than half the least subnormal number is decided as well.

Each end is rounded directly from its integer, of which 64 leading bits are kept. The last of these bits is sticky: it
is 1 if any lower bit was set ("rounding to odd"). The 64 bits then decide rounding to nearest even in every format of
at most 61 significant bits, also for subnormal numbers. The code merges the two lowest bits, which leaves 63 bits, and
a midpoint of such a format has at most 62.

Source: S. Boldo and G. Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms
using rounding to odd" (IEEE Transactions on Computers 57, 2008), https://doi.org/10.1109/TC.2007.70819.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringspec.errors import ShapeError
from ringspec.exact.integers import Units
from ringspec.formats import Format, format_of

Array = NDArray[np.float64]
Booleans = NDArray[np.bool_]


@dataclass(frozen=True)
class Ball:
    """Intervals: each true value is within ``radius`` >= 0 of ``middle``, both in units of 2**-bits."""

    middle: Units
    radius: Units
    bits: int

    def __post_init__(self) -> None:
        if self.middle.shape != self.radius.shape:
            raise ShapeError(
                "a radius for each number",
                f"shapes {self.middle.shape} and {self.radius.shape}",
                "pass middle and radius of one shape",
            )


@dataclass(frozen=True)
class Leading:
    """Numbers as a sign, a ``word`` of 64 leading bits (the last bit is sticky) and an exponent.

    The absolute value is about word * 2**(exponent - 63).
    """

    negative: Booleans
    word: NDArray[np.uint64]
    exponent: NDArray[np.int64]


def leading_bits(x: int) -> tuple[int, int]:
    """Return the 64 leading bits of x > 0, the last of which is sticky, and the number of bits of x."""
    length = x.bit_length()
    if length <= 64:
        return x << (64 - length), length
    cut = length - 64
    top = x >> cut
    return (top if top << cut == x else top | 1), length


def leading(units: Units, bits: int) -> Leading:
    """Return the leading bits of each integer times 2**-bits; a zero has word 0."""
    flat = units.ravel().tolist()
    pairs = [leading_bits(abs(x)) for x in flat]
    word = np.array([top for top, _ in pairs], dtype=np.uint64)
    lengths = np.array([length for _, length in pairs], dtype=np.int64)
    negative = np.array([x < 0 for x in flat], dtype=np.bool_)
    return Leading(negative, word, lengths - (bits + 1))


def nearest_even(x: Leading, target: Format) -> Array:
    """Round x to the nearest number of a format, ties to even, and return it as float64; zeros are +0.

    >>> one_and_a_bit = objects_of(2**40 + 2**32 + 1)  # 1 + 2**-8 + 2**-40
    >>> float(nearest_even(leading(one_and_a_bit, 40), format_of("bfloat16"))[0])
    1.0078125
    """
    quantum = np.maximum(x.exponent, target.min_exponent) - (target.precision - 1)
    # Number of the 64 bits that lie below the quantum; with 65 or more, the value is less than half a quantum.
    below = np.minimum(quantum - (x.exponent - 63), 65)
    # The lowest bit is sticky already, so the two lowest bits can be merged; this keeps shifts below 64.
    word = (x.word >> np.uint64(1)) | (x.word & np.uint64(1))
    shift = np.minimum(below - 1, 63).astype(np.uint64)
    kept = word >> shift
    rest = word & ((np.uint64(1) << shift) - np.uint64(1))
    half = np.uint64(1) << (shift - np.uint64(1))
    kept = kept + ((rest > half) | ((rest == half) & (kept & np.uint64(1) == 1)))
    size = kept.astype(np.float64)
    size[(x.word == 0) | (below >= 65)] = 0.0
    with np.errstate(over="ignore"):
        # 2**2000 is beyond every format.
        value = np.ldexp(size, np.minimum(quantum, 2000).astype(np.int32))
    value = np.where(value > target.largest, np.inf if target.has_infinity else np.nan, value)
    return np.where(x.negative & (value != 0), -value, value)


def objects_of(*values: int) -> Units:
    """Return integers as an object array, for examples and single numbers."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


@dataclass(frozen=True)
class Rounded:
    """Rounded numbers of a format, as float64 ``values``; NaN where the rounding is not ``decided``."""

    values: Array
    decided: Booleans


def round_ball(ball: Ball, names: tuple[str, ...]) -> dict[str, Rounded]:
    """Round a ball to each of the named formats.

    >>> ball = Ball(objects_of(3 << 60, (3 << 60) + 1), objects_of(0, 2), 61)
    >>> rounded = round_ball(ball, ("float64",))["float64"]
    >>> rounded.values.tolist(), rounded.decided.tolist()
    ([1.5, 1.5], [True, True])
    """
    shape = ball.middle.shape
    low = leading(ball.middle - ball.radius, ball.bits)
    high = low if not ball.radius.any() else leading(ball.middle + ball.radius, ball.bits)
    result = {}
    for name in names:
        target = format_of(name)
        values = nearest_even(low, target)
        decided = np.ones(values.shape, dtype=np.bool_)
        if high is not low:
            # Compare as bits: no mode of the processor can then treat a subnormal number as zero.
            decided = values.view(np.uint64) == nearest_even(high, target).view(np.uint64)
        values = np.where(decided, values, np.nan)
        result[name] = Rounded(values.reshape(shape), decided.reshape(shape))
    return result
