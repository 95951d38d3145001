"""Rounding to a number format with rational numbers, from the bit layouts of the formats.

Sources: IEEE 754-2019 sections 3.4 and 4.3.1 (roundTiesToEven); OCP 8-bit floating point
specification 1.0, section 5 (E4M3 has no infinity and one NaN pattern per sign, E5M2 follows
IEEE 754). Nothing here comes from ringspec.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import copysign, inf, isinf, isnan, nan


@dataclass(frozen=True)
class Layout:
    """Sizes of the fields of a format and whether its top exponent means infinity and NaN."""

    exponent_bits: int
    fraction_bits: int
    ieee: bool = True

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def width(self) -> int:
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def precision(self) -> int:
        return self.fraction_bits + 1


LAYOUTS = {
    "float64": Layout(11, 52),
    "float32": Layout(8, 23),
    "bfloat16": Layout(8, 7),
    "float16": Layout(5, 10),
    "float8_e4m3fn": Layout(4, 3, ieee=False),
    "float8_e5m2": Layout(5, 2),
}


def decode(pattern: int, name: str) -> float:
    """Return the value of a bit pattern (exact: every value is a float64).

    >>> decode(0x3C00, "float16"), decode(0x7E, "float8_e4m3fn"), decode(0x80, "float8_e5m2")
    (1.0, 448.0, -0.0)
    """
    layout = LAYOUTS[name]
    fraction = pattern & (2**layout.fraction_bits - 1)
    exponent = (pattern >> layout.fraction_bits) & (2**layout.exponent_bits - 1)
    sign = -1.0 if pattern >> (layout.width - 1) else 1.0
    top = 2**layout.exponent_bits - 1
    if exponent == top and layout.ieee:
        return nan if fraction else sign * inf
    if exponent == top and fraction == 2**layout.fraction_bits - 1:
        return nan
    if exponent == 0:  # subnormal: no hidden bit, exponent of the least normal
        return sign * float(fraction * Fraction(2) ** (1 - layout.bias - layout.fraction_bits))
    significand = 2**layout.fraction_bits + fraction
    return sign * float(
        significand * Fraction(2) ** (exponent - layout.bias - layout.fraction_bits)
    )


def largest(name: str) -> Fraction:
    """Return the greatest finite value.

    >>> largest("float16"), largest("float8_e4m3fn"), largest("float8_e5m2")
    (Fraction(65504, 1), Fraction(448, 1), Fraction(57344, 1))
    """
    layout = LAYOUTS[name]
    if layout.ieee:
        pattern = ((2**layout.exponent_bits - 1) << layout.fraction_bits) - 1
    else:
        pattern = 2 ** (layout.width - 1) - 2  # below the NaN, which is all ones
    return Fraction(decode(pattern, name))


def floor_log2(x: Fraction) -> int:
    """Return e with 2^e <= x < 2^(e+1), for x > 0.

    >>> floor_log2(Fraction(3, 4)), floor_log2(Fraction(4))
    (-1, 2)
    """
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if Fraction(2) ** e <= x else e - 1


def round_half_even(x: Fraction) -> int:
    """Return the nearest integer, the even one of two."""
    below = x.numerator // x.denominator
    rest = x - below
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and below % 2 == 1):
        return below + 1
    return below


def round_exact(x: float, name: str) -> float:
    """Return x rounded once, ties to even; too large becomes infinity, or NaN in E4M3.

    >>> round_exact(1 + 2.0**-8 + 2.0**-40, "bfloat16")
    1.0078125
    >>> round_exact(464.0, "float8_e4m3fn"), round_exact(465.0, "float8_e4m3fn")
    (448.0, nan)
    """
    layout = LAYOUTS[name]
    if isnan(x) or x == 0.0:
        return x
    overflow = copysign(inf, x) if layout.ieee else nan
    if isinf(x):
        return overflow
    size = Fraction(abs(x))
    exponent = max(floor_log2(size), 1 - layout.bias)  # subnormals keep the least exponent
    spacing = Fraction(2) ** (exponent - layout.fraction_bits)
    rounded = round_half_even(size / spacing) * spacing
    if rounded > largest(name):
        return overflow
    return copysign(float(rounded), x)
