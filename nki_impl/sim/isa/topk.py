"""``topk``: the largest values of each group of 16 partitions, and their indices, on the GpSimd engine.

A group holds one list of numbers in the *snake layout*: element i is in partition i % 16 of the group, at position
i // 16 of that partition. The results are in the same layout.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/v2.33.0/nki/api/generated/nki.isa.topk.html. The page of release
2.32 describes the layout of the source in the same way, and adds that the results ascend.
"""

from __future__ import annotations

import numpy as np

from nki_impl.sim.errors import DtypeError, ShapeError, UnsupportedError
from nki_impl.sim.isa.common import Array, free_size
from nki_impl.sim.machine.core import current, instruction_from
from nki_impl.sim.tensor.access import check_read_where, keep_holes, tile, write_where
from nki_impl.sim.tensor.dtypes import to_float32
from nki_impl.sim.tensor.views import NkiTensor

GROUP = 16


@instruction_from(3)
def topk(
    val_dst: NkiTensor, idx_dst: NkiTensor, src: NkiTensor, n: int, name: str | None = None
) -> None:
    """Write the k largest of the first ``n`` elements of each group, and their indices, in the snake layout.

    ``src``, ``val_dst`` (bfloat16) and ``idx_dst`` (uint32) are tiles in SBUF of [P, any], [P, k] and [P, k], where P is
    a multiple of 16. 8 <= n < 65536, and 1 <= k <= n, below 32768. Result j of a group is in its partition j % 16, at
    position j // 16; later positions are not written. If 16 does not divide k, the last position of the other partitions
    counts as never written, because the documentation does not say what the device writes there.

    The results ascend, as documented in release 2.32. Release 2.33 has an argument ``sorted`` with the default False,
    so kernels should not rely on their order. Of equal values, the one with the smaller index counts as the larger; the
    documentation does not say which. Raises :class:`UnsupportedError` for NaN, whose rank is not documented either.
    """
    partitions, k = _check(val_dst, idx_dst, src, n)
    active = _snake(n, free_size(src), partitions)
    check_read_where(src, active.reshape(src._array.shape), "src")
    values = to_float32(src._array.reshape(partitions, -1)[:, : -(-n // GROUP)])
    lists = values.reshape(partitions // GROUP, GROUP, -1).transpose(0, 2, 1)
    lists = lists.reshape(partitions // GROUP, -1)[:, :n]
    if np.isnan(lists).any():
        raise UnsupportedError(
            "src", "numbers, because the rank of NaN is not documented", "NaN", "replace NaN first"
        )
    largest = np.argsort(-lists, axis=1, kind="stable")[:, :k][:, ::-1]
    _store(val_dst, np.take_along_axis(lists, largest, axis=1), k, "val_dst")
    _store(idx_dst, largest, k, "idx_dst")
    current().count("gpsimd", src._array.size)


def _check(val_dst: NkiTensor, idx_dst: NkiTensor, src: NkiTensor, n: int) -> tuple[int, int]:
    """Return the number of partitions and k, or raise an error."""
    for given, operand, dtype in (
        (val_dst, "val_dst", "bfloat16"),
        (idx_dst, "idx_dst", "uint32"),
        (src, "src", "bfloat16"),
    ):
        if tile(given, operand, psum=False).dtype.name != dtype:
            raise DtypeError(operand, dtype, given.dtype, f"allocate it with nl.{dtype}")
    partitions, k = src.shape[0], free_size(val_dst)
    if partitions % GROUP:
        raise ShapeError("src", "a multiple of 16 partitions", src.shape, "pad the tile")
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or not 8 <= n < 65536:
        raise ShapeError("n", "an int from 8 to 65535", n, "split or pad the list")
    if free_size(src) * GROUP < n:
        raise ShapeError(
            "src", f"{-(-n // GROUP)} elements per partition for n = {n}", src.shape, "pad the tile"
        )
    if not 1 <= k <= min(n, 32767):
        raise ShapeError(
            "val_dst", f"1 to {min(n, 32767)} elements per partition", k, "ask for fewer values"
        )
    for given, operand in ((val_dst, "val_dst"), (idx_dst, "idx_dst")):
        if given.shape != (partitions, k):
            raise ShapeError(operand, f"{partitions} x {k}", given.shape, "allocate both alike")
    return partitions, k


def _snake(count: int, width: int, partitions: int) -> Array:
    """Return a bool array [partitions, width]: True where a list of ``count`` elements is stored."""
    group = np.arange(width) * GROUP + np.arange(GROUP)[:, None] < count
    return np.tile(group, (partitions // GROUP, 1))


def _store(dst: NkiTensor, lists: Array, k: int, operand: str) -> None:
    """Write a list of k results for each group."""
    partitions, columns = dst.shape[0], -(-k // GROUP)
    padded = np.zeros((len(lists), columns * GROUP), dst.dtype.storage)
    padded[:, :k] = lists
    values = np.zeros((partitions, k), dst.dtype.storage)
    snake = padded.reshape(-1, columns, GROUP).transpose(0, 2, 1)
    values[:, :columns] = snake.reshape(partitions, columns)
    written = np.zeros((partitions, k), np.bool_)
    written[:, :columns] = True
    write_where(dst, values, written, operand)
    if k % GROUP:
        keep_holes(dst, written & ~_snake(k, k, partitions))
