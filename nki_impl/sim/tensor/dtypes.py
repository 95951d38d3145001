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
    """A number format: ``name``, ``itemsize`` in bytes, ``kind`` ("float", "int", "uint", "bool", "packed", "wide").

    ``storage`` is the NumPy dtype that stores it. The only instances are the members of ``nki.language``
    (``nl.float32``...), so that they can be compared by identity. Each also equals its own name, as in
    ``tensor.dtype == "float32"``, and its NumPy dtype, and NumPy accepts it as a dtype, as in ``x.astype(nl.bfloat16)``
    (both from AWS's tests).

    "packed" formats are bits that only the MX instructions interpret: four numbers in one element (the formats ``_x4``),
    or a scale. All other instructions may move them, but not compute with them. "wide": int64, which only DMA and
    scalars use.

    >>> float32, float32.itemsize, bfloat16.kind
    (float32, 4, 'float')
    >>> float32 == "float32", float32 == bfloat16, np.dtype(float32) == float32
    (True, False, True)
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
        if kind in ("int", "uint", "wide"):
            info = np.iinfo(self.storage)
            self.low, self.high = int(info.min), int(info.max)

    def __repr__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, str):
            return other == self.name
        return isinstance(other, np.dtype) and _BY_STORAGE.get(other) is self

    def __hash__(self) -> int:
        # A name and a NumPy dtype have different hashes, so a dictionary can find this object only by one of them. AWS's
        # tests look up packed formats by the dtype of an array, and all others by this object or its name.
        return hash(self.storage) if self.is_packed else hash(self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, which dataclasses.asdict makes, is the same object.
        return as_dtype, (self.name,)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype, by which NumPy recognises this object as a dtype."""
        return self.storage

    @property
    def is_float(self) -> bool:
        """Whether this is a floating-point format."""
        return self.kind == "float"

    @property
    def is_integer(self) -> bool:
        """Whether this is a signed or unsigned integer format, or bool."""
        return self.kind in ("int", "uint", "bool")

    @property
    def is_packed(self) -> bool:
        """Whether only the MX instructions can interpret the bits."""
        return self.kind == "packed"


bool_ = DType("bool", "bool", np.bool_)
int8 = DType("int8", "int", np.int8)
int16 = DType("int16", "int", np.int16)
int32 = DType("int32", "int", np.int32)
int64 = DType("int64", "wide", np.int64)
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

# NumPy has no number of this kind: a structure with one field keeps the name and refuses arithmetic.
float8_e4m3fn_x4 = DType("float8_e4m3fn_x4", "packed", [("float8_e4m3fn_x4", "<u4")])
float8_e5m2_x4 = DType("float8_e5m2_x4", "packed", [("float8_e5m2_x4", "<u4")])
float4_e2m1fn_x4 = DType("float4_e2m1fn_x4", "packed", [("float4_e2m1fn_x4", "<u2")])
float8_e8m0fnu = DType("float8_e8m0fnu", "packed", ml_dtypes.float8_e8m0fnu)
FLOAT4 = np.dtype(ml_dtypes.float4_e2m1fn)
"""The format of the numbers in float4_e2m1fn_x4, in the lower half of a byte."""

ALL = (
    bool_, int8, int16, int32, int64, uint8, uint16, uint32, float16, float32, bfloat16, tfloat32,
    float8_e4m3, float8_e4m3fn, float8_e5m2,
    float8_e4m3fn_x4, float8_e5m2_x4, float4_e2m1fn_x4, float8_e8m0fnu,
)  # fmt: skip
for _dtype in ALL:
    # The class is also nki.dtype, and AWS's tests write nki.dtype.float8_e4m3.
    setattr(DType, _dtype.name, _dtype)
_BY_NAME = {dtype.name: dtype for dtype in ALL}
_BY_STORAGE = {dtype.storage: dtype for dtype in ALL if dtype is not tfloat32}
_PACKED = {dtype.storage: dtype for dtype in ALL if dtype.is_packed}
_MOVED = {**_PACKED, int64.storage: int64}
_FLOAT32, _BFLOAT16 = np.dtype(np.float32), bfloat16.storage
BYTES = {
    kind: np.arange(256, dtype=np.uint8).view(kind).astype(np.float32)
    for kind in (float8_e4m3.storage, float8_e4m3fn.storage, float8_e5m2.storage)
}
"""The number that each byte means, by NumPy dtype: to look it up takes a seventh of the time of ml_dtypes' conversion."""
BYTES[FLOAT4] = (np.arange(256, dtype=np.uint8) & 15).view(FLOAT4).astype(np.float32)


def limits(dtype: np.dtype[Any]) -> Any:
    """Return the limits of a floating-point format, as np.finfo does, for the formats of ml_dtypes as well."""
    return ml_dtypes.finfo(dtype)


def as_dtype(given: Any, operand: str = "dtype") -> DType:
    """Return the DType that ``given`` means: a DType, the name of a DType, or a NumPy dtype.

    Raises :class:`DtypeError` for float64 and all other formats that the device does not have.

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
            "cast the array before the launch",
        ) from None


def to_float32(array: NDArray) -> NDArray[np.float32]:
    """Return ``array`` as float32; if it already is float32, return the array itself.

    >>> to_float32(np.array([1.5], ml_dtypes.bfloat16))
    array([1.5], dtype=float32)
    """
    kind = array.dtype
    # Identity is the usual case, and takes a third of the time of NumPy's comparison.
    if kind is _FLOAT32 or kind == _FLOAT32:
        return array
    if kind is _BFLOAT16:
        return array.astype(np.float32)
    if kind in _MOVED:
        raise _no_number(_MOVED[kind], "a tile of this dtype")
    if kind in BYTES:
        return np.asarray(BYTES[kind].take(array.view(np.uint8)))
    return array.astype(np.float32)


def _no_number(dtype: DType, got: str) -> DtypeError:
    if dtype is int64:
        uses, fix = (
            "scalar_load, scalar_store and copies by DMA to int64",
            "pass the array as int32",
        )
        return DtypeError("dtype", f"nl.int64 only in {uses}", got, fix)
    return DtypeError(
        "dtype",
        f"nl.{dtype.name} only in nc_matmul_mx, quantize_mx and copies to the same dtype",
        got,
        "compute in another dtype, or reinterpret the bytes with .view(nl.uint8)",
    )


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
    if dtype.is_packed or dtype is int64:
        raise _no_number(dtype, f"numbers of {values.dtype} to convert")
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
    if kind is _FLOAT32 or kind == _FLOAT32:
        return dtype.is_16_bit_float or dtype is float32
    return kind == dtype.storage


def _to_tfloat32(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round to 10 fraction bits, ties to even; non-finite values stay as they are."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & ~np.uint32(
        0x1FFF
    )
    return np.where(np.isfinite(values), rounded.view(np.float32), values)
