"""Arrays into tiles and back, for tests of single instructions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nki_impl.sim import language as nl

Array = NDArray[Any]


def tile(array: Any, dtype: Any = None, buffer: Any = nl.sbuf) -> nl.NkiTensor:
    """Return a written tensor with the values of ``array`` (rounded to ``dtype`` by NumPy)."""
    values = np.asarray(array)
    out = nl.ndarray(values.shape, nl.float32 if dtype is None else dtype, buffer)
    out.array[...] = values.astype(out.dtype.storage)
    out.storage.set_all_written()
    return out


def empty(shape: tuple[int, ...], dtype: Any = nl.float32, buffer: Any = nl.sbuf) -> nl.NkiTensor:
    """Return a tensor that nobody has written."""
    return nl.ndarray(shape, dtype, buffer)


def values(tensor: nl.NkiTensor) -> Array:
    """Return the elements as float32 or int64; every one must have been written."""
    from nki_impl.sim.tensor.access import to_numpy

    array = to_numpy(tensor)
    return array.astype(np.float32 if tensor.dtype.is_float else np.int64)


def normal(*shape: int, seed: int = 0) -> Array:
    """Return standard normal float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bf16(array: Array) -> Array:
    """Return float32 ``array`` rounded to bfloat16, to nearest even, by integer arithmetic alone."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32).astype(np.uint64)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return kept.astype(np.uint32).view(np.float32)
