"""Instructions of the vector engine that select elements or partitions: predicated copy, shuffle, largest 8 elements.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/nki.isa.html
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nki_impl.sim.errors import DtypeError, ShapeError
from nki_impl.sim.isa.common import (
    Array,
    free_size,
    immediate,
    not_both_psum,
    read_flat,
    same_size,
)
from nki_impl.sim.machine.core import current, instruction
from nki_impl.sim.tensor.access import (
    check_read,
    check_read_where,
    keep_holes,
    read_raw,
    tile,
    unwritten,
    write,
    write_where,
)
from nki_impl.sim.tensor.dtypes import round_once
from nki_impl.sim.tensor.views import NkiTensor


@instruction
def tensor_copy_predicated(
    dst: NkiTensor,
    src: float | NkiTensor,
    predicate: NkiTensor,
    reverse_pred: bool = False,
    name: str | None = None,
) -> None:
    """Copy ``src`` (a tile of dst's dtype, or a number) to ``dst`` where ``predicate`` is not 0.

    Other elements of dst do not change, even if they were never written. ``predicate`` is uint8, uint16 or uint32.
    predicate and src must not both be in PSUM.
    """
    dst, predicate = tile(dst, "dst"), tile(predicate, "predicate")
    same_size(dst, "dst", predicate, "predicate")
    if predicate.dtype.kind != "uint":
        raise DtypeError("predicate", "uint8, uint16 or uint32", predicate.dtype, "cast it")
    chosen = (read_raw(predicate, "predicate") != 0).reshape(dst._array.shape)
    if reverse_pred:
        chosen = ~chosen
    if isinstance(src, NkiTensor):
        src = tile(src, "src")
        same_size(dst, "dst", src, "src")
        not_both_psum(src, "src", predicate, "predicate")
        if src.dtype is not dst.dtype:
            raise DtypeError("src", f"{dst.dtype} as dst has", src.dtype, "tensor_copy it first")
        check_read_where(src, chosen.reshape(src._array.shape), "src")
        values: Array = src._array.reshape(dst._array.shape)
    else:
        values = np.broadcast_to(
            round_once(np.array([immediate(src, "src")]), dst.dtype), dst._array.shape
        )
    write_where(dst, values, chosen)
    current().count("vector", dst._array.size)


@instruction
def nc_stream_shuffle(
    dst: NkiTensor, src: NkiTensor, shuffle_mask: Any, name: str | None = None
) -> None:
    """Copy partitions within each quadrant of 32 partitions: dst[q + i] = src[q + shuffle_mask[i]], q = 0, 32, 64, 96.

    A mask entry of 255 leaves dst[q + i] unchanged. ``dst`` and ``src`` have the same dtype and the same number of
    elements per partition; they may be the same tensor. ``src`` may have fewer partitions than ``dst`` if the mask
    names only partitions that exist. Only partitions that the mask names are read. Elements that were never written
    count as unwritten in ``dst``, as in tensor_copy: AWS's find_nonzero_indices shuffles such a tile.
    """
    dst, src = tile(dst, "dst"), tile(src, "src")
    if src.dtype is not dst.dtype:
        raise DtypeError("dst", f"{src.dtype} as src has", dst.dtype, "allocate dst with src.dtype")
    if free_size(src) != free_size(dst):
        raise ShapeError(
            "dst", f"{free_size(src)} elements per partition", free_size(dst), "slice dst"
        )
    mask = list(shuffle_mask)
    if len(mask) != 32 or any(
        not isinstance(m, (int, np.integer)) or not (0 <= m < 32 or m == 255) for m in mask
    ):
        raise DtypeError(
            "shuffle_mask",
            "32 ints, each 0..31 or 255",
            shuffle_mask,
            "name a partition of the quadrant",
        )
    lanes = np.arange(dst._array.shape[0])
    wanted = np.array(mask)[lanes % 32]
    lanes, wanted = lanes[wanted != 255], (lanes - lanes % 32 + wanted)[wanted != 255]
    if len(wanted) and wanted.max() >= src._array.shape[0]:
        raise ShapeError(
            "src", f"partition {wanted.max()} that shuffle_mask names", f"{src._array.shape[0]} partitions",
            "shuffle quadrant by quadrant, or name partitions that src has",
        )  # fmt: skip
    holes = unwritten(src)
    if holes is not None and holes[wanted].all():
        check_read(src, "src")
    values = np.zeros(dst._array.shape, dst.dtype.storage)
    values[lanes] = src._array[wanted].reshape(values[lanes].shape)
    changed = np.zeros(dst._array.shape, np.bool_)
    changed[lanes] = True
    missing = changed.copy()
    if holes is not None:
        missing[lanes] = holes[wanted].reshape(values[lanes].shape)
    write_where(dst, values, changed)
    if holes is not None:
        keep_holes(dst, missing)
    current().count("vector", dst._array.size)


@instruction
def max8(dst: NkiTensor, src: NkiTensor, name: str | None = None) -> None:
    """Write the 8 largest elements of each partition, in descending order; ``src`` has 8 to 16384 in a partition."""
    dst, src = tile(dst, "dst"), tile(src, "src")
    if not 8 <= free_size(src) <= 16384:
        raise ShapeError(
            "src", "8 to 16384 elements per partition", free_size(src), "split or pad the tile"
        )
    if free_size(dst) != 8 or dst._array.shape[0] != src._array.shape[0]:
        raise ShapeError("dst", f"({src._array.shape[0]}, 8)", dst.shape, "allocate (P, 8)")
    write(dst, -np.sort(-read_flat(src, "src"), axis=1)[:, :8])
    current().count("vector", src._array.size)
