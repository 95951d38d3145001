"""float32 arithmetic of a merge: NumPy float32 arrays, one rounding to the storage type, fused multiply-add.

A number of a 16-bit format is held as the float32 number of the same value, as a kernel holds it in a register. A product
or sum of float32 arrays in NumPy is one float32 operation, with one rounding to nearest even.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ringspec.formats import round_to
from ringspec.merges.intervals import monotone

__all__ = ["Float32", "fma", "minus", "quiet", "stored"]

Float32 = NDArray[np.float32]


def quiet() -> np.errstate:
    """Return a context without NumPy's warnings: the special values of a merge (NaN, exp(-inf)) are results here."""
    return np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore")


def stored(x: Float32, name: str) -> Float32:
    """Round float32 values once to the format ``name`` and return them as float32; float32 itself returns ``x``."""
    if name == "float32":
        return x
    rounded: Float32 = monotone(lambda one: round_to(one, name).astype(np.float32), x)
    return rounded


def minus(a: Float32, b: Float32) -> Float32:
    """Return a - b in memory laid out as ``a``, as torch does; NumPy prefers C order if either operand has it.

    An elementary function of a library may depend on the order of the elements in memory, so this order matters.
    """
    return np.subtract(a, b, out=np.empty_like(a))


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """Return a * b + c with one rounding to float32, as a fused multiply-add does.

    a * b is exact in float64. The float64 sum is rounded to odd (Boldo and Melquiond), so that the rounding to float32
    that follows is the only one that counts.

    >>> x = np.float32(1 + 2.0**-23)
    >>> float(fma(x, x, np.float32(-1 - 2.0**-22))) == 2.0**-46, float(x * x - np.float32(1 + 2.0**-22))
    (True, 0.0)
    """
    result: Float32 = monotone(_fma, a, b, c)
    return result


def _fma(a: Float32, b: Float32, c: Float32) -> Float32:
    with quiet():
        product, addend = np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64)
        total = product + addend
        part = total - product
        error = (product - (total - part)) + (addend - part)
        even = np.atleast_1d(total).view(np.int64) % 2 == 0
        inexact = np.isfinite(total) & (error != 0) & even.reshape(np.shape(total))
        towards = np.where(error > 0, np.inf, -np.inf)
        odd = np.where(inexact, np.nextafter(total, towards), total)
        return odd.astype(np.float32)
