"""Check indices and slices of tensors, and convert them to NumPy indices."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from nki_impl.sim.errors import DynamicValueError, EmptyViewError, PartitionError, ViewError

_INTS = (int, np.integer)
_ALL = slice(None)


def numpy_key(shape: tuple[int, ...], on_chip: bool, key: Any) -> tuple[int | slice, ...]:
    """Return the NumPy index for ``key``; an int whose dimension must be kept becomes a slice of length 1.

    On chip, an int on dimension 0 keeps the dimension. The result of indexing has a rank of at least 2 on chip, and of
    at least 1 in HBM. If the ints would reduce the rank below that, the last int keeps its dimension.

    >>> numpy_key((128, 64), True, (3, slice(0, 8)))
    (slice(3, 4, None), slice(0, 8, None))
    >>> numpy_key((128, 64), True, (slice(None), 5))
    (slice(None, None, None), slice(5, 6, None))
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    for at, one in enumerate(keys):
        if one is Ellipsis:
            keys[at : at + 1] = [slice(None)] * (len(shape) - len(keys) + 1)
            break
    if len(keys) > len(shape):
        raise ViewError("index", f"at most {len(shape)} indices", len(keys), "drop some")
    out: list[int | slice] = []
    integers, last = 0, 0
    for dim, one in enumerate(keys):
        if type(one) is slice:
            if one != _ALL:
                one = checked_slice(shape[dim], on_chip, dim, one.start, one.stop, one.step)
            out.append(one)
            continue
        index = checked_index(shape[dim], dim, one)
        if on_chip and dim == 0:
            out.append(slice(index, index + 1))
        else:
            out.append(index)
            integers, last = integers + 1, dim
    if integers and len(shape) - integers < (2 if on_chip else 1):
        index = keys[last]
        out[last] = slice(index, index + 1)
    return tuple(out)


def plain_offset(array: NDArray, on_chip: bool, key: Any) -> int | None:
    """Return the bytes that ``array[key]`` leaves out at the start, if NumPy's indexing is also that of NKI.

    That is the usual case: a tuple of slices without a step, and of ints that drop a free dimension, all of them valid.
    Returns None for any other key, for which :func:`numpy_key` has the rules.

    >>> array = np.zeros((128, 64), np.float32)
    >>> plain_offset(array, True, (slice(1, 5), slice(None, 8)))
    256
    >>> plain_offset(array, True, (slice(None), 5)), plain_offset(array, True, (0, slice(3, 3)))
    (None, None)
    """
    if type(key) is not tuple or not 0 < len(key) <= array.ndim:
        return None
    if on_chip and type(key[0]) is not slice:
        return None
    shape, strides = array.shape, array.strides
    offset, rank = 0, len(shape)
    for dim, one in enumerate(key):
        if type(one) is slice:
            first, last = one.start, one.stop
            if one.step is not None:
                return None
            if first is None:
                if last is None:
                    continue
                first = 0
            elif last is None:
                last = shape[dim]
            if type(first) is not int or type(last) is not int:
                return None
            if not 0 <= first < last <= shape[dim]:
                return None
            offset += first * strides[dim]
        elif type(one) is int and 0 <= one < shape[dim]:
            offset += one * strides[dim]
            rank -= 1
        else:
            return None
    return offset if rank >= (2 if on_chip else 1) else None


def checked_index(size: int, dim: int, index: Any) -> int:
    """Return ``index`` if it is an int in 0 <= index < size; else raise ViewError or DynamicValueError."""
    if not isinstance(index, _INTS):
        _refuse_index(dim, index)
    if not 0 <= index < size:
        raise ViewError(f"dimension {dim}", f"0 <= index < {size}", index, "stay inside")
    return int(index)


def _refuse_index(dim: int, index: object) -> NoReturn:
    raise DynamicValueError(
        f"dimension {dim}",
        "an int or a slice of ints that is known when the kernel is traced",
        type(index).__name__,
        "use .ap(..., scalar_offset=...) or .select(dim, index) for an index held on the device",
    )


def checked_slice(size: int, on_chip: bool, dim: int, start: Any, stop: Any, step: Any) -> slice:
    """Return the slice if 0 <= start < stop <= size and step >= 1; on the partition dimension step must be 1.

    Otherwise raise :class:`ViewError` or a subclass of it; for start == stop, :class:`EmptyViewError`.
    """
    first = 0 if start is None else start
    last = size if stop is None else stop
    if not isinstance(first, _INTS) or not isinstance(last, _INTS):
        _refuse_index(dim, last if isinstance(first, _INTS) else first)
    if not 0 <= first < last <= size:
        kind = EmptyViewError if 0 <= first == last <= size else ViewError
        raise kind(
            f"dimension {dim}",
            f"a slice with 0 <= start < end <= {size}",
            f"{start}:{stop}",
            "stay inside; an empty slice cannot be expressed",
        )
    if step is None or step == 1:
        return slice(first, last)
    if dim == 0 and on_chip:
        raise PartitionError("dimension 0", "no step over partitions", step, "use step 1")
    if not isinstance(step, _INTS) or step < 1:
        raise ViewError(
            f"dimension {dim}",
            "a step of at least 1",
            step,
            "use a positive step; a view cannot be reversed",
        )
    return slice(first, last, step)
