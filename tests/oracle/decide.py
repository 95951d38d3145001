"""Correct rounding of a number that is known to lie in a small interval: try more digits, then see.

`rounded` asks for value and radius at 500 digits and, while the ends of the interval round apart, at
1100 digits. An interval that is still torn then surrounds one breakpoint of the format with a radius
of some 1e-1000 of the row scale: the value is taken to be that breakpoint, a proper tie.
Nothing here comes from ringspec.
"""

from collections.abc import Callable
from fractions import Fraction
from math import inf, isinf

from oracle.round_exact import LAYOUTS, largest, round_exact

DIGITS = (500, 1100)
KEPT_BITS = 66


class Torn(AssertionError):
    """The interval holds more than one breakpoint."""


def to_odd(x) -> Fraction:
    """A rational that rounds to every format as the mpf x does: 66 bits, the last one sticky.

    Every format has at most 53 bits, so all its numbers and midpoints are even in these 66 bits, and
    an odd last bit says on which side of them x lies. What is beyond all formats is brought near.

    >>> import mpmath
    >>> to_odd(mpmath.mpf(2) ** -5000) == Fraction(2) ** -1300, float(to_odd(mpmath.mpf(-1.5)))
    (True, -1.5)
    """
    sign, size, exponent = -1 if x < 0 else 1, int(abs(x.man)), int(x.exp)
    if size == 0:
        return Fraction(0)
    extra = size.bit_length() - KEPT_BITS
    if extra > 0:
        sticky = size & ((1 << extra) - 1)
        size, exponent = (size >> extra) | bool(sticky), exponent + extra
    top = size.bit_length() + exponent
    if top < -1300:
        return sign * Fraction(1, 1 << 1300)
    if top > 1100:
        return Fraction(sign << 1100)
    return sign * (Fraction(size << exponent) if exponent >= 0 else Fraction(size, 1 << -exponent))


def nearest(x: Fraction, name: str) -> float:
    """x rounded once to nearest even; zeros are +0, too large is infinite.

    >>> nearest(Fraction(-1, 2**2000), "float64"), nearest(Fraction(2)**3000, "bfloat16")
    (0.0, inf)
    """
    if abs(x) >= 2**1024 - 2**970:  # the midpoint behind the greatest float64
        return inf if x > 0 else -inf
    return round_exact(x, name) + 0.0


def breakpoint_of(low: float, high: float, name: str) -> Fraction:
    """The number between two neighbours of a format at which rounding changes sides."""
    finite = low if isinf(high) else high
    if isinf(low) or isinf(high):
        top = largest(name)
        below = Fraction(2) ** (LAYOUTS[name].bias - LAYOUTS[name].fraction_bits)  # its spacing
        if abs(Fraction(finite)) != top:
            raise Torn(f"{low!r} and {high!r} are no neighbours")
        return (top + below / 2) * (1 if finite > 0 else -1)
    middle = (Fraction(low) + Fraction(high)) / 2
    if nearest(middle, name) not in (low, high):
        raise Torn(f"{low!r} and {high!r} are no neighbours")
    return middle


def rounded(evaluate: Callable[[int], tuple], name: str, counter: dict | None = None) -> float:
    """The value of `evaluate(digits) -> (value, radius)`, both mpf, rounded once to a format.

    `counter["more digits"]` and `counter["ties"]` count what 500 digits did not decide.

    >>> import mpmath
    >>> rounded(lambda digits: (mpmath.mpf(1) / 3, mpmath.mpf("1e-14")), "float16")
    0.333251953125
    """
    for digits in DIGITS:
        value, radius = evaluate(digits)
        if value == -inf:
            return -inf
        ends = [nearest(to_odd(x), name) for x in (value - radius, value + radius)]
        if ends[0] == ends[1]:
            return ends[0]
        if counter is not None and digits == DIGITS[0]:
            counter["more digits"] = counter.get("more digits", 0) + 1
    if counter is not None:
        counter["ties"] = counter.get("ties", 0) + 1
    return nearest(breakpoint_of(*ends, name), name)
