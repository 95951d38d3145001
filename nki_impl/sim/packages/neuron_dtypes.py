"""The package ``neuron_dtypes``: number formats for arrays on the host, and conversion between them.

A packed array (a dtype ``_x4``) of shape (..., n) holds (..., 4 n) numbers; number i of an element is in its bits
i * w to (i + 1) * w - 1, where w is the width of a number.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nki_impl.sim.tensor import dtypes as _dtypes
from nki_impl.sim.tensor.dtypes import (
    ALL,
    DType,
    bfloat16,
    float4_e2m1fn_x4,
    float8_e4m3,
    float8_e4m3fn,
    float8_e4m3fn_x4,
    float8_e5m2,
    float8_e5m2_x4,
    float8_e8m0fnu,
    float16,
    float32,
    int8,
    int16,
    int32,
    tfloat32,
    uint8,
    uint16,
    uint32,
)
from nki_impl.sim.tensor.packed import pack, unpack

Array = NDArray[Any]


def static_cast(array: Array, dtype: Any) -> Array:
    """Return ``array`` in ``dtype``: packed if ``dtype`` is an x4 format, unpacked if the array is in one.

    Numbers go through float32, and are rounded to nearest even.

    >>> x = static_cast(np.float32([[0.5, 1.0, -6.0, 2.0]]), float4_e2m1fn_x4)
    >>> x.shape, static_cast(x, np.float32)
    ((1, 1), array([[ 0.5,  1. , -6. ,  2. ]], dtype=float32))
    """
    array = np.asarray(array)
    held = _known(array.dtype)
    wanted = _known(dtype)
    if held is not None and held.is_packed and held.storage.names:
        if wanted is held:
            return array
        array = unpack(array, held)
    if wanted is not None and wanted.is_packed and wanted.storage.names:
        return pack(array.astype(np.float32), wanted)
    target = np.dtype(dtype)
    if target.kind == "V" and array.dtype == np.float64:
        array = array.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(target)


def _known(dtype: Any) -> DType | None:
    if isinstance(dtype, DType):
        return dtype
    try:
        return _dtypes._BY_STORAGE.get(np.dtype(dtype))
    except TypeError:
        return None


def sizeinbytes(dtype: Any) -> int:
    """Return the number of bytes of one element."""
    return int(np.dtype(dtype).itemsize)


def is_float_type(dtype: Any) -> bool:
    """Return whether ``dtype`` is a floating-point format."""
    known = _known(dtype)
    return (
        known.is_float if known is not None else bool(np.issubdtype(np.dtype(dtype), np.floating))
    )


def finfo(dtype: Any) -> Any:
    """Return the limits of a floating-point format, as np.finfo does."""
    return _dtypes.limits(np.dtype(dtype))


__all__ = [
    "ALL", "bfloat16", "finfo", "float16", "float32", "float4_e2m1fn_x4", "float8_e4m3", "float8_e4m3fn",
    "float8_e4m3fn_x4", "float8_e5m2", "float8_e5m2_x4", "float8_e8m0fnu", "int16", "int32", "int8",
    "is_float_type", "sizeinbytes", "static_cast", "tfloat32", "uint16", "uint32", "uint8",
]  # fmt: skip

for _dtype in ALL:
    setattr(sys.modules[__name__], _dtype.name, _dtype)
