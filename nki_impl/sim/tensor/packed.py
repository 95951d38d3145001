"""The packed (x4) number formats of the MX instructions: four numbers in one element.

Number i of an element is in its bits i * w to (i + 1) * w - 1, where w is 8 or 4.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/deep-dives/mxfp-matmul.html
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nki_impl.sim.tensor.dtypes import (
    BYTES,
    FLOAT4,
    DType,
    float4_e2m1fn_x4,
    float8_e4m3fn,
    float8_e4m3fn_x4,
    float8_e5m2,
    float8_e5m2_x4,
)

Array = NDArray[Any]
NUMBERS: dict[DType, np.dtype[Any]] = {
    float8_e4m3fn_x4: float8_e4m3fn.storage,
    float8_e5m2_x4: float8_e5m2.storage,
    float4_e2m1fn_x4: FLOAT4,
}
"""The NumPy dtype of one number."""
LARGEST = {
    float8_e4m3fn_x4: (8, 448.0),
    float8_e5m2_x4: (15, 57344.0),
    float4_e2m1fn_x4: (2, 6.0),
}
"""The exponent of the largest number, and this number (OCP Microscaling Formats, version 1.0)."""


def unpack(array: Array, dtype: DType) -> NDArray[np.float32]:
    """Return the numbers of a packed array (..., n) as float32 (..., 4 n)."""
    octets: Array = np.ascontiguousarray(array).view(np.uint8)
    if dtype is float4_e2m1fn_x4:
        octets = np.stack([octets & 15, octets >> 4], axis=-1).reshape(*octets.shape[:-1], -1)
    return BYTES[NUMBERS[dtype]].take(octets)


def unpack_planes(array: Array, dtype: DType) -> NDArray[np.float32]:
    """Return the numbers of a packed array (m, n) as float32 (m, 4, n): number i of all elements in plane i."""
    octets = np.ascontiguousarray(array).view(np.uint8).reshape(*array.shape, -1)
    planes: Array = octets.transpose(0, 2, 1)
    if dtype is float4_e2m1fn_x4:
        planes = np.stack([planes & 15, planes >> 4], axis=2).reshape(len(array), 4, -1)
    out = np.empty(planes.shape, np.float32)
    numbers = BYTES[NUMBERS[dtype]]
    for row, octets in zip(out, planes, strict=True):
        # Row by row, because NumPy converts the indices to 8 bytes each.
        numbers.take(octets, out=row, mode="clip")
    return out


def pack(values: NDArray[np.float32], dtype: DType) -> Array:
    """Round numbers (..., 4 n) to the format of ``dtype``, and return the packed array (..., n)."""
    if values.shape[-1] % 4:
        raise ValueError(
            f"{dtype} holds four numbers in an element; got a last dimension of {values.shape[-1]}"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        octets: Array = np.ascontiguousarray(values.astype(NUMBERS[dtype])).view(np.uint8)
    if dtype is float4_e2m1fn_x4:
        octets = octets[..., 0::2] | octets[..., 1::2] << 4
    return np.ascontiguousarray(octets).view(dtype.storage)
