"""The dtypes of ``nki.language``, and the only function that rounds numbers.

Every engine computes in float32 and rounds once when it writes, to nearest, ties to even; integers also
saturate. The 16-bit and 8-bit formats come from ml_dtypes and are only used for storage: nothing is computed in them.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/nki.api.shared.html
(supported data types).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from nki_impl.sim.errors import DtypeError

FLOAT32_MIN = float(np.finfo(np.float32).min)


class DType:
    """A number format: ``name``, ``itemsize`` in bytes, ``kind`` ("float", "int", "uint", "bool").

    ``storage`` is the NumPy dtype that stores it. The only instances are the members of ``nki.language``
    (``nl.float32``...), so that they can be compared by identity. Each also equals its own name, as in
    ``tensor.dtype == "float32"``.

    >>> float32, float32.itemsize, bfloat16.kind
    (float32, 4, 'float')
    >>> float32 == "float32", float32 == bfloat16
    (True, False)
    """

    __slots__ = ("name", "kind", "storage", "itemsize", "low", "high", "is_16_bit_float")

    def __init__(self, name: str, kind: str, storage: Any) -> None:
        self.name = name
        self.kind = kind
        self.storage: np.dtype[Any] = np.dtype(storage)
        self.itemsize = self.storage.itemsize
        self.is_16_bit_float = kind == "float" and self.itemsize == 2
        self.low = 0
        self.high = 1
        if kind in ("int", "uint"):
            info = np.iinfo(self.storage)
            self.low, self.high = int(info.min), int(info.max)

    def __repr__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, str) and other == self.name)

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def is_float(self) -> bool:
        """Whether this is a floating-point format."""
        return self.kind == "float"

    @property
    def is_integer(self) -> bool:
        """Whether this is a signed or unsigned integer format, or bool."""
        return self.kind != "float"


bool_ = DType("bool", "bool", np.bool_)
int8 = DType("int8", "int", np.int8)
int16 = DType("int16", "int", np.int16)
int32 = DType("int32", "int", np.int32)
uint8 = DType("uint8", "uint", np.uint8)
uint16 = DType("uint16", "uint", np.uint16)
uint32 = DType("uint32", "uint", np.uint32)
float16 = DType("float16", "float", np.float16)
float32 = DType("float32", "float", np.float32)
bfloat16 = DType("bfloat16", "float", ml_dtypes.bfloat16)
# Stored as float32; its values have 10 fraction bits (see round_once).
tfloat32 = DType("tfloat32", "float", np.float32)
float8_e4m3 = DType("float8_e4m3", "float", ml_dtypes.float8_e4m3)
float8_e4m3fn = DType("float8_e4m3fn", "float", ml_dtypes.float8_e4m3fn)
float8_e5m2 = DType("float8_e5m2", "float", ml_dtypes.float8_e5m2)

ALL = (
    bool_, int8, int16, int32, uint8, uint16, uint32, float16, float32, bfloat16, tfloat32,
    float8_e4m3, float8_e4m3fn, float8_e5m2,
)  # fmt: skip
_BY_NAME = {dtype.name: dtype for dtype in ALL}
_BY_STORAGE = {dtype.storage: dtype for dtype in ALL if dtype is not tfloat32}


def as_dtype(given: Any, operand: str = "dtype") -> DType:
    """Return the DType that ``given`` means: a DType, the name of a DType, or a NumPy dtype.

    Raises :class:`DtypeError` for float64, int64 and all other formats that the device does not have.

    >>> as_dtype(np.float16), as_dtype("bfloat16")
    (float16, bfloat16)
    """
    if isinstance(given, DType):
        return given
    if isinstance(given, str) and given in _BY_NAME:
        return _BY_NAME[given]
    try:
        return _BY_STORAGE[np.dtype(given)]
    except (KeyError, TypeError):
        raise DtypeError(
            operand,
            "one of nl." + ", nl.".join(dtype.name for dtype in ALL),
            repr(given),
            "cast the array before the launch; the device has no 64-bit numbers",
        ) from None


def to_float32(array: NDArray) -> NDArray[np.float32]:
    """Return ``array`` as float32; if it already is float32, return the array itself.

    >>> to_float32(np.array([1.5], ml_dtypes.bfloat16))
    array([1.5], dtype=float32)
    """
    return array if array.dtype == np.float32 else array.astype(np.float32)


def round_once(values: NDArray, dtype: DType) -> NDArray:
    """Return ``values`` (float32, or exact integers) in ``dtype``'s storage format, rounded once.

    Floats: nearest, ties to even. Integers: nearest, ties to even, then saturation; NaN becomes 0.
    bool: everything except 0 is True.

    >>> round_once(np.float32([2.5, 3.5, 300.0, -1.0]), uint8)
    array([  2,   4, 255,   0], dtype=uint8)
    """
    if dtype is tfloat32:
        return _to_tfloat32(values.astype(np.float32))
    if values.dtype == dtype.storage:
        return values
    if dtype.kind == "float":
        with np.errstate(over="ignore"):
            if values.dtype == np.float32 or dtype.itemsize == 4:
                return values.astype(dtype.storage)
            return values.astype(np.float32).astype(dtype.storage)
    if dtype.kind == "bool":
        return values != 0
    if values.dtype.kind == "f":
        # float64 represents every 32-bit integer and every float32 exactly.
        wide = np.rint(np.nan_to_num(values.astype(np.float64), nan=0.0))
        return np.clip(wide, dtype.low, dtype.high).astype(dtype.storage)
    return np.clip(values.astype(np.int64), dtype.low, dtype.high).astype(dtype.storage)


def rounds_on_store(values: NDArray, dtype: DType) -> bool:
    """Return whether storing ``values`` in an array of ``dtype`` gives the same bits as :func:`round_once`, sooner."""
    kind = values.dtype
    if kind == np.float32:
        return dtype.is_16_bit_float or dtype is float32
    return kind == dtype.storage


def _to_tfloat32(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round to 10 fraction bits, ties to even; non-finite values stay as they are."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & ~np.uint32(
        0x1FFF
    )
    return np.where(np.isfinite(values), rounded.view(np.float32), values)
