"""Rounding of float32 values to the 16-bit formats of a matrix unit, to nearest even, with integers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]


def narrowed(x: Array, format: str) -> Array:
    """x, whose values are rounded to ``format``, in the dtype of x.

    ``format``: 'bfloat16', 'float16', 'float32' or 'float64'. The 16-bit formats take float32 alone,
    so that a value is rounded once. Raises TypeError for another dtype.

    >>> narrowed(np.array([1.00390625, 1.01171875], np.float32), "bfloat16").tolist()
    [1.0, 1.015625]
    """
    if format in ("float32", "float64"):
        return x
    if x.dtype != np.float32:
        raise TypeError(f"expected float32, got {x.dtype}. Fix: round to float32 first")
    if format == "float16":  # NumPy rounds float32 to float16 once, to nearest even
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    if format != "bfloat16":
        raise TypeError(f"expected a format of inputs, got {format!r}. Fix: pass 'bfloat16'")
    return bfloat16_values(x)


def bfloat16_values(x: Array) -> Array:
    """Add half a unit in the last place (a little less where the result is even) and cut 16 bits."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits + half) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(x), x, rounded)
