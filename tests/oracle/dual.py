"""Forward-mode dual numbers over mpf: a second, mechanical way to a derivative.

A Dual is value + slope * e with e^2 = 0; each elementary operation carries the textbook rule for
its slope. The finite differences of `mp_attention` are held to these in the tests.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mpmath
from mpmath import mpf


@dataclass(frozen=True, eq=False)
class Dual:
    """value + slope * e, both mpf.

    >>> x = Dual(mpf(3), mpf(1))
    >>> (x * x).slope
    mpf('6.0')
    """

    value: mpf
    slope: mpf

    def __add__(self, other):
        return Dual(self.value + value_of(other), self.slope + slope_of(other))

    __radd__ = __add__

    def __mul__(self, other):
        slope = self.slope * value_of(other) + self.value * slope_of(other)
        return Dual(self.value * value_of(other), slope)

    __rmul__ = __mul__

    def __truediv__(self, other):
        quotient = self.value / value_of(other)
        return Dual(quotient, (self.slope - quotient * slope_of(other)) / value_of(other))

    def __rtruediv__(self, other):
        quotient = value_of(other) / self.value
        return Dual(quotient, -quotient * self.slope / self.value)


def value_of(x):
    return x.value if isinstance(x, Dual) else x


def slope_of(x):
    return x.slope if isinstance(x, Dual) else mpf(0)


def exp(x):
    """Return e^x of an mpf or a Dual."""
    if not isinstance(x, Dual):
        return mpmath.exp(x)
    value = mpmath.exp(x.value)
    return Dual(value, value * x.slope)


def log(x):
    """Return the natural logarithm of an mpf or a Dual."""
    if not isinstance(x, Dual):
        return mpmath.log(x)
    return Dual(mpmath.log(x.value), x.slope / x.value)


def tanh(x):
    """Return the hyperbolic tangent of an mpf or a Dual: its slope is 1 / cosh^2."""
    if not isinstance(x, Dual):
        return mpmath.tanh(x)
    return Dual(mpmath.tanh(x.value), x.slope / mpmath.cosh(x.value) ** 2)


def dual_derivative(row, loss: Callable, values: list, index: int, step: mpf) -> mpf:
    """Return d loss / d values[index] of one row; takes the place of `mp_attention.difference`."""
    x = values[index]
    values[index] = Dual(x, mpf(1))
    slope = slope_of(loss(row))
    values[index] = x
    return slope
