"""The GpSimd engine: affine patterns, masks and reduction over partitions. It can access only SBUF.

The *free size* of a tile is the number of elements in one partition.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/nki.isa.html
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nki_impl.sim.errors import DtypeError, ShapeError
from nki_impl.sim.isa.common import (
    flat,
    free_limit,
    free_size,
    immediate,
    integer_tiles,
    raw_flat,
    read_flat,
    same_size,
    selected,
)
from nki_impl.sim.isa.reduce import reduction
from nki_impl.sim.machine.core import current, instruction
from nki_impl.sim.operators.ops import find
from nki_impl.sim.operators.tokens import equal
from nki_impl.sim.tensor.access import read_raw, result_array, tile, write
from nki_impl.sim.tensor.dtypes import round_once
from nki_impl.sim.tensor.views import NkiTensor


def _checked_int(value: object, operand: str) -> int:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, np.integer))
        or not -(2**31) <= value < 2**31
    ):
        raise DtypeError(
            operand, "an int32 known when the kernel is traced", repr(value), "pass an int"
        )
    return int(value)


def _free_values(pattern: Sequence[Sequence[int]], size: int, offset: object) -> NDArray[np.int64]:
    """Return offset + sum(index_i * step_i) for the free elements in row-major order."""
    if not 1 <= len(pattern) <= 4 or any(len(pair) != 2 for pair in pattern):
        raise ShapeError("pattern", "one to four [step, count] pairs", pattern, "merge dimensions")
    values = np.array([_checked_int(offset, "offset")], np.int64)
    for step, count in pattern:
        steps = np.arange(_checked_int(count, "pattern"), dtype=np.int64) * _checked_int(
            step, "pattern"
        )
        values = (values[:, None] + steps).ravel()
    if values.size != size:
        raise ShapeError(
            "pattern", f"counts whose product is the free size {size}", pattern, "match the tile"
        )
    return values


@instruction
def iota(
    dst: NkiTensor,
    pattern: Sequence[Sequence[int]],
    offset: Any = 0,
    channel_multiplier: Any = 0,
    name: str | None = None,
) -> None:
    """Write offset + partition * channel_multiplier + sum(index_i * step_i), computed in int32 and then cast.

    ``pattern`` is a list of at most four pairs [step, count], the outermost first; index_i counts from 0 to count - 1.
    The product of the counts is the free size of dst. Partitions are counted from the first partition of dst.
    """
    dst = tile(dst, "dst", psum=False)
    free_limit(dst, "dst")
    free = _free_values(pattern, free_size(dst), offset)
    lanes = np.arange(dst._array.shape[0], dtype=np.int64) * _checked_int(
        channel_multiplier, "channel_multiplier"
    )
    values = (lanes[:, None] + free).astype(np.int32)
    write(dst, values if dst.dtype.is_integer else values.astype(np.float32))
    current().count("gpsimd", dst._array.size)


@instruction
def affine_select(
    dst: NkiTensor,
    pattern: Sequence[Sequence[int]],
    channel_multiplier: Any,
    on_true_tile: NkiTensor,
    on_false_value: Any,
    cmp_op: Any = equal,
    offset: Any = 0,
    name: str | None = None,
) -> None:
    """Copy the elements of ``on_true_tile`` for which cmp_op(x, 0) is true; elsewhere write ``on_false_value`` to dst.

    x = offset + partition * channel_multiplier + sum(index_i * step_i), with ``pattern`` as in :func:`iota`.
    ``on_false_value`` is a float32, rounded to dst's dtype. dst and on_true_tile are in SBUF.
    """
    dst, on_true = tile(dst, "dst", psum=False), tile(on_true_tile, "on_true_tile", psum=False)
    same_size(on_true, "on_true_tile", dst, "dst")
    free_limit(dst, "dst")
    meaning = find(cmp_op, "cmp_op", "compare")
    free = _free_values(pattern, free_size(dst), offset).astype(np.int32)
    step = _checked_int(channel_multiplier, "channel_multiplier")
    lanes = (np.arange(dst._array.shape[0], dtype=np.int64) * -step).astype(np.int32)
    # a + b cmp 0 is a cmp -b: no tile of integers is built.
    kept = meaning.apply(free[None, :], lanes[:, None])
    fill = np.array(immediate(on_false_value, "on_false_value"))
    if dst.dtype is on_true.dtype:
        values, fill = flat(read_raw(on_true, "on_true_tile")), round_once(fill, dst.dtype)
    else:
        values = read_flat(on_true, "on_true_tile")
    write(dst, selected(kept, values, fill, result_array(dst, values.shape)))
    current().count("gpsimd", dst._array.size)


@instruction
def tensor_partition_reduce(
    dst: NkiTensor, op: Any, data: NkiTensor, name: str | None = None
) -> None:
    """Reduce ``data`` over its partitions with ``op``, and write the result to dst (1, free size).

    ``op`` is add, maximum, bitwise_or or bitwise_and; both tiles are in SBUF.
    """
    dst, data = tile(dst, "dst", psum=False), tile(data, "data", psum=False)
    meaning = reduction(op, "op", {"add", "maximum", "bitwise_or", "bitwise_and"})
    if dst.shape[0] != 1 or free_size(dst) != free_size(data):
        raise ShapeError("dst", f"(1, {free_size(data)})", dst.shape, "allocate one partition")
    assert meaning.reduce is not None
    if meaning.kind == "bit":
        integer_tiles((dst, "dst"), (data, "data"))
        write(dst, meaning.reduce(raw_flat(data, "data").T))
    else:
        write(dst, meaning.reduce(read_flat(data, "data").T))
    current().count("gpsimd", data._array.size)
