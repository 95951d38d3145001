"""Arrays of intervals: all float32 results that an operation can have when its operands are not known exactly.

One float32 operation with rounding to nearest is monotone in each operand, and so is a rounding to another format. Its
results on intervals therefore lie between those at the ends, and the ends are computed with the same rounding: no outward
rounding is needed. The forms of merges run on :class:`Interval` as they run on arrays, through NumPy's protocols
``__array_ufunc__`` and ``__array_function__``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

__all__ = ["Interval", "endwise", "hull", "monotone", "same_bits"]

MONOTONE = (np.add, np.subtract, np.multiply, np.divide, np.maximum, np.minimum, np.negative)


class Interval(NDArrayOperatorsMixin):
    """An array whose elements lie between those of ``low`` and ``high``, two arrays of one shape and dtype.

    An element is certain if both ends have the same bits, or are both NaN. The ends -inf and inf mean that nothing is
    known: the element may also be NaN. In an array of truth values, False and True mean the same.
    """

    def __init__(self, low: NDArray[Any], high: NDArray[Any]) -> None:
        self.low, self.high = low, high

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of both ends."""
        return self.low.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Data type of both ends."""
        return self.low.dtype

    @property
    def unknown(self) -> NDArray[np.bool_]:
        """Elements of which nothing is known."""
        return np.isneginf(self.low) & np.isposinf(self.high)

    def __getitem__(self, rows: Any) -> Interval:
        return Interval(self.low[rows], self.high[rows])

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        # ``out`` is only a hint about the order in memory, see ``numbers.minus``; the result is always a new object.
        if method != "__call__" or set(options) - {"out"}:
            return NotImplemented
        if ufunc is np.equal:
            return _equal(*inputs)
        return monotone(ufunc, *inputs) if ufunc in MONOTONE else NotImplemented

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        if function is np.where and not options:
            return _where(*args)
        if function is np.zeros_like:
            return np.zeros_like(args[0].low)
        if function is np.empty_like:
            return np.empty_like(args[0].low)
        if function is np.isneginf:
            low, high = (np.isneginf(end) for end in (self.low, self.high))
            return Interval(low & high, low | high)
        return NotImplemented


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    """Tell for each element whether two arrays of one dtype have the same bits there; every NaN equals every NaN."""
    if a.dtype == bool:
        return a == b
    pattern = f"u{a.dtype.itemsize}"
    # x != x is true for NaN in every format.
    same: NDArray[np.bool_] = (a.view(pattern) == b.view(pattern)) | ((a != a) & (b != b))
    return same


def monotone(function: Callable[..., Any], *operands: Any) -> Any:
    """Apply a function of arrays, which is monotone in each operand, to arrays or intervals.

    Without an interval among the operands, this is ``function(*operands)``.
    """
    intervals = [x for x in operands if isinstance(x, Interval)]
    if not intervals:
        return function(*operands)
    corners = itertools.product(*[_both(x) for x in operands])
    with np.errstate(all="ignore"):
        low, high = _span([np.asarray(function(*corner)) for corner in corners])
    certain = reduce(np.logical_and, [same_bits(*_both(x)) for x in operands])
    nan = reduce(np.logical_or, [np.isnan(a) & np.isnan(b) for a, b in map(_both, operands)])
    unknown = reduce(np.logical_or, [x.unknown for x in intervals]) | (~certain & np.isnan(low))
    if function is np.divide:
        a, b = _both(operands[1])
        unknown = unknown | (~same_bits(a, b) & (a <= 0) & (b >= 0))
    low, high = _marked(low, high, unknown)
    return Interval(np.where(nan, np.float32(np.nan), low), np.where(nan, np.float32(np.nan), high))


def endwise(function: Callable[..., Any], *operands: Any) -> Any:
    """Apply a function that only moves or copies elements to arrays, or to the low and the high ends of intervals."""
    if not any(isinstance(x, Interval) for x in operands):
        return function(*operands)
    low, high = zip(*[_both(x) for x in operands], strict=True)
    return Interval(function(*low), function(*high))


def hull(a: Interval, b: Interval) -> Interval:
    """Return the smallest intervals that contain those of ``a`` and ``b``."""
    return Interval(*_span([a.low, a.high, b.low, b.high]))


def _both(x: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    return (x.low, x.high) if isinstance(x, Interval) else (np.asarray(x), np.asarray(x))


def _equal(a: Any, b: Any) -> Interval:
    (a_low, a_high), (b_low, b_high) = _both(a), _both(b)
    certainly = (a_low == a_high) & (b_low == b_high) & (a_low == b_low)
    return Interval(certainly, (a_low <= b_high) & (b_low <= a_high))


def _where(condition: Any, chosen: Any, otherwise: Any) -> Interval:
    certainly, possibly = _both(condition)
    a, b = _both(chosen), _both(otherwise)
    both = _span(np.broadcast_arrays(*a, *b))
    undecided = ~certainly & possibly
    low, high = (np.where(undecided, both[n], np.where(certainly, a[n], b[n])) for n in range(2))
    return Interval(low, high)


def _span(corners: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the ends of the smallest interval that has all ``corners``; unknown where only some are NaN."""
    low, high = reduce(np.minimum, corners), reduce(np.maximum, corners)
    # 0 and -0 are equal, and minimum may return either: a zero has a sign only if all corners share it, and between two
    # different ends lie zeros of both signs.
    negative = [np.signbit(corner) for corner in corners]
    mixed = (low != high) | (np.any(negative, axis=0) & ~np.all(negative, axis=0))
    low = np.where(mixed & (low == 0), np.float32(-0.0), low)
    high = np.where(mixed & (high == 0), np.float32(0.0), high)
    numbers = reduce(np.logical_or, [~np.isnan(corner) for corner in corners])
    return _marked(low, high, np.isnan(low) & numbers)


def _marked(
    low: NDArray[Any], high: NDArray[Any], unknown: NDArray[np.bool_]
) -> tuple[NDArray[Any], NDArray[Any]]:
    return np.where(unknown, np.float32(-np.inf), low), np.where(unknown, np.float32(np.inf), high)
