"""Instructions that find elements and gather them: index and replacement of 8 values, gathers, indices of nonzeros.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/generated/nki.isa.nc_find_index8.html, and the
pages of nc_match_replace8, nonzero_with_count, nc_n_gather and local_gather in the same folder.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nki_impl.sim.errors import DtypeError, OutOfBoundsError, ShapeError, UnsupportedError
from nki_impl.sim.isa.common import Array, free_size, immediate, raw_flat, read_flat, same_size
from nki_impl.sim.machine.core import current, instruction, instruction_from
from nki_impl.sim.tensor.access import (
    check_read_where,
    keep_holes,
    tile,
    unwritten,
    write,
    write_where,
)
from nki_impl.sim.tensor.dtypes import round_once, to_float32
from nki_impl.sim.tensor.views import NkiTensor

LANES = 16
"""Each of the eight GpSimd cores works on this many partitions."""


def _eight(tensor: NkiTensor, operand: str, partitions: int) -> NkiTensor:
    tensor = tile(tensor, operand)
    if tensor._array.shape[0] != partitions or free_size(tensor) != 8:
        raise ShapeError(
            operand, f"{partitions} partitions of 8 elements", tensor.shape, "slice it, or pad it"
        )
    return tensor


def _searched(data: NkiTensor) -> NkiTensor:
    data = tile(data, "data")
    if not 8 <= free_size(data) <= 16384:
        raise ShapeError(
            "data", "8 to 16384 elements per partition", free_size(data), "search it in parts"
        )
    return data


def _indices(found: NDArray[np.int64], dst: NkiTensor, operand: str) -> Array:
    """Return indices in the dtype of ``dst``; -1 becomes a value with all bits set."""
    if dst.dtype.name not in ("uint16", "uint32"):
        raise DtypeError(operand, "uint16 or uint32", dst.dtype, "allocate it with nl.uint32")
    return found.astype(dst.dtype.storage).reshape(dst._array.shape)


@instruction
def nc_find_index8(
    dst: NkiTensor, data: NkiTensor, vals: NkiTensor, name: str | None = None
) -> None:
    """Write the index of the first occurrence of each of 8 values in each partition of ``data``.

    If two of the values are equal, the second one has the index of the second occurrence, as in nc_match_replace8. The
    documentation does not mention this case; AWS's topk_reduce passes the same value 8 times to find all its
    occurrences. The index of a value that does not occur (again) has all bits set, as documented from release 2.32 on;
    before that it was undefined. ``dst`` is uint16 or uint32.
    """
    data = _searched(data)
    partitions = data._array.shape[0]
    dst, vals = _eight(dst, "dst", partitions), _eight(vals, "vals", partitions)
    wanted = read_flat(vals, "vals")
    equal = wanted[:, :, None] == read_flat(data, "data")[:, None, :]
    for column in range(1, 8):
        earlier = np.count_nonzero(wanted[:, :column] == wanted[:, column, None], axis=1)
        if earlier.any():
            equal[:, column] &= equal[:, column].cumsum(axis=1) > earlier[:, None]
    found = np.where(equal.any(axis=2), equal.argmax(axis=2), -1)
    write(dst, _indices(found, dst, "dst"))
    current().count("vector", data._array.size)


@instruction
def nc_match_replace8(
    dst: NkiTensor,
    data: NkiTensor,
    vals: NkiTensor,
    imm: float,
    dst_idx: NkiTensor | None = None,
    name: str | None = None,
) -> None:
    """Copy ``data`` to ``dst``, and replace the first occurrence of each of 8 values in each partition by ``imm``.

    The values are replaced one after the other: if two are equal, the second replaces the next occurrence. ``dst_idx``
    receives the indices, with all bits set for a value that does not occur.
    """
    data = _searched(data)
    dst = tile(dst, "dst")
    same_size(data, "data", dst, "dst")
    partitions = data._array.shape[0]
    wanted = read_flat(_eight(vals, "vals", partitions), "vals")
    values = read_flat(data, "data").copy()
    fill = immediate(imm, "imm")
    found = np.full((partitions, 8), -1, np.int64)
    rows = np.arange(partitions)
    for column in range(8):
        equal = values == wanted[:, column, None]
        hit = equal.any(axis=1)
        found[hit, column] = equal.argmax(axis=1)[hit]
        values[rows[hit], found[hit, column]] = fill
    if dst_idx is not None:
        dst_idx = _eight(dst_idx, "dst_idx", partitions)
        write(dst_idx, _indices(found, dst_idx, "dst_idx"), "dst_idx")
    write(dst, values)
    current().count("vector", data._array.size)


@instruction_from(3)
def nonzero_with_count(
    dst: NkiTensor,
    src: NkiTensor,
    index_offset: Any = 0,
    padding_val: Any = -1,
    name: str | None = None,
) -> None:
    """Write the indices of nonzero elements of a partition, then ``padding_val``, and last their number.

    Only the partitions 0, 16, 32, ... 112 are read and written. ``dst`` is int32 and has one element per partition more
    than ``src``, which is int32 or float32. ``index_offset`` is added to the indices. The result of a partition with
    elements that were never written counts as never written, because AWS's find_nonzero_indices leaves partitions out.
    """
    dst, src = tile(dst, "dst", psum=False), tile(src, "src", psum=False)
    length = free_size(src)
    if dst._array.shape[0] != src._array.shape[0] or free_size(dst) != length + 1:
        raise ShapeError(
            "dst", f"{src._array.shape[0]} x {length + 1}, one element more than src", dst.shape,
            "allocate it with this shape",
        )  # fmt: skip
    if src.dtype.name not in ("int32", "float32"):
        raise DtypeError("src", "int32 or float32", src.dtype, "copy it to one of these")
    if dst.dtype.name != "int32":
        raise DtypeError("dst", "int32", dst.dtype, "allocate it with nl.int32")
    holes = unwritten(src)
    values = np.zeros((dst._array.shape[0], length + 1), np.int32)
    chosen, lost = np.zeros(values.shape, np.bool_), np.zeros(values.shape, np.bool_)
    for lane in range(0, src._array.shape[0], LANES):
        found = np.flatnonzero(src._array[lane].reshape(-1))
        values[lane] = padding_val
        values[lane, : len(found)] = found + index_offset
        values[lane, -1] = len(found)
        chosen[lane] = True
        lost[lane] = holes is not None and bool(holes[lane].any())
    shape = dst._array.shape
    write_where(dst, values.reshape(shape), chosen.reshape(shape))
    if lost.any():
        keep_holes(dst, lost.reshape(shape))
    current().count("gpsimd", src._array.size)


def _check_inside(indices: NDArray[np.int64], size: int, operand: str) -> None:
    outside = (indices < 0) | (indices >= size)
    if outside.any():
        raise OutOfBoundsError(
            operand, f"0 <= index < {size}", int(indices[outside][0]), "clamp the indices"
        )


@instruction
def nc_n_gather(
    dst: NkiTensor, data: NkiTensor, indices: NkiTensor, name: str | None = None
) -> None:
    """Gather elements within each partition: dst[p, i] = data[p, indices[p, i]], with flattened free dimensions.

    All tiles are in SBUF. ``indices`` is uint32. ``dst`` may have another dtype than ``data``.
    """
    dst, data = tile(dst, "dst", psum=False), tile(data, "data", psum=False)
    indices = tile(indices, "indices", psum=False)
    same_size(indices, "indices", dst, "dst")
    if data._array.shape[0] != dst._array.shape[0]:
        raise ShapeError(
            "data", f"{dst._array.shape[0]} partitions as dst has", data.shape, "slice it"
        )
    if indices.dtype.name != "uint32":
        raise DtypeError("indices", "uint32", indices.dtype, "copy them to nl.uint32")
    at = raw_flat(indices, "indices").astype(np.int64)
    _check_inside(at, free_size(data), "indices")
    _gather(dst, data, at)
    current().count("gpsimd", dst._array.size)


def _gather(dst: NkiTensor, data: NkiTensor, at: NDArray[np.int64]) -> None:
    """Write data[p, at[p, i]] to dst; elements that are not gathered may be unwritten.

    Partitions in which nothing of ``data`` was written hold no data if others do (:mod:`nki_impl.sim.tensor.idle`):
    their results count as unwritten.
    """
    partitions, size = data._array.shape[0], free_size(data)
    rows = np.arange(partitions)[:, None]
    holes = unwritten(data)
    idle = np.zeros(partitions, np.bool_)
    if holes is not None and not holes.all():
        idle = np.asarray(holes.reshape(partitions, size).all(axis=1))
    chosen = np.zeros((partitions, size), np.bool_)
    chosen[rows, at] = True
    chosen[idle] = False
    check_read_where(data, chosen.reshape(data._array.shape), "data")
    values = data._array.reshape(partitions, size)[rows, at]
    if dst.dtype is not data.dtype:
        values = round_once(to_float32(values), dst.dtype)
    write(dst, values)
    if idle.any():
        keep_holes(dst, np.repeat(idle, free_size(dst)).reshape(dst.shape))


@instruction
def local_gather(
    dst: NkiTensor,
    src_buffer: NkiTensor,
    index: NkiTensor,
    num_elem_per_idx: Any = 1,
    num_valid_indices: Any = None,
    name: str | None = None,
) -> None:
    """Gather with common indices for each group of 16 partitions: dst[p, i] = src_buffer[p, index_i].

    index_i is element i of the group's rows of ``index``, counted down the partitions first. ``index`` is uint16. The
    first ``num_valid_indices`` of them count (None: all). ``num_elem_per_idx`` other than 1 is not modelled.
    """
    dst, data = tile(dst, "dst", psum=False), tile(src_buffer, "src_buffer", psum=False)
    index = tile(index, "index", psum=False)
    if num_elem_per_idx != 1:
        raise UnsupportedError("num_elem_per_idx", "1", num_elem_per_idx, "gather single elements")
    partitions = data._array.shape[0]
    if (
        partitions % LANES
        or index._array.shape[0] != partitions
        or dst._array.shape[0] != partitions
    ):
        raise ShapeError(
            "index", "a multiple of 16 partitions, as many as src_buffer and dst",
            f"{index.shape[0]}, {partitions} and {dst.shape[0]}", "pad the tiles",
        )  # fmt: skip
    if index.dtype.name != "uint16" or dst.dtype is not data.dtype:
        raise DtypeError(
            "index", "uint16, and dst with the dtype of src_buffer",
            f"{index.dtype}, and {data.dtype} to {dst.dtype}", "cast one of them",
        )  # fmt: skip
    groups = raw_flat(index, "index").astype(np.int64).reshape(partitions // LANES, LANES, -1)
    flat = groups.transpose(0, 2, 1).reshape(partitions // LANES, -1)
    count = flat.shape[1] if num_valid_indices is None else int(num_valid_indices)
    if not 1 <= count <= flat.shape[1] or free_size(dst) != count:
        raise ShapeError(
            "num_valid_indices", f"1 to {flat.shape[1]}, and as many elements per partition of dst",
            f"{count}, and dst {dst.shape}", "allocate dst with num_valid_indices elements",
        )  # fmt: skip
    at = np.repeat(flat[:, :count], LANES, axis=0)
    _check_inside(at, free_size(data), "index")
    _gather(dst, data, at)
    current().count("gpsimd", dst._array.size)
