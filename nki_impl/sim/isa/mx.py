"""MX formats (trn3): quantisation to packed elements with a scale for each block, and the product of such tiles.

A packed element holds four numbers that are neighbours along the contraction. A *block* is 8 partitions x 1 packed
element, so 32 numbers; its scale is 2**(s - 127), with s an unsigned byte. The scales of a quadrant of 32 partitions are
in the first four partitions of the quadrant: partition 32 q + r of the scales belongs to the partitions 32 q + 8 r to
32 q + 8 r + 7 of the data.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/generated/nki.isa.nc_matmul_mx.html,
nki.isa.quantize_mx.html and nki/deep-dives/mxfp-matmul.html.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nki_impl.sim.errors import DtypeError, MatmulError, PlacementError, ShapeError
from nki_impl.sim.isa.common import flat, free_size
from nki_impl.sim.isa.tensor import accumulate_product, check_tiling
from nki_impl.sim.machine.core import current, instruction_from
from nki_impl.sim.memory.storage import PSUM, SBUF
from nki_impl.sim.tensor.access import check_read_where, read, read_raw, tile, write, write_where
from nki_impl.sim.tensor.dtypes import float4_e2m1fn_x4
from nki_impl.sim.tensor.packed import LARGEST, NUMBERS, pack, unpack_planes
from nki_impl.sim.tensor.views import NkiTensor

QUADRANT, BLOCK, BIAS = 32, 8, 127
_SOURCES = ("bfloat16", "float16")
_SCALES = ("uint8", "float8_e8m0fnu")
_FACTORS = np.append(
    np.ldexp(np.float32(1), np.arange(255, dtype=np.int32) - BIAS), np.float32(np.inf)
)
"""The factor that each scale means; infinite for 255."""


def _rows(partitions: int) -> NDArray[np.int64]:
    """Return the partition of the scales that belongs to each partition of the data."""
    lanes = np.arange(partitions)
    out: NDArray[np.int64] = lanes // QUADRANT * QUADRANT + lanes % QUADRANT // BLOCK
    return out


@instruction_from(4)
def quantize_mx(
    dst: NkiTensor, src: NkiTensor, dst_scale: NkiTensor, name: str | None = None
) -> None:
    """Quantise ``src`` (bfloat16 or float16, [P, 4 F]) to packed elements ``dst`` [P, F] and scales ``dst_scale``.

    The exponent of a scale is the largest exponent of its block, less the largest exponent of the format, as in the
    references of AWS's tests; from release 2.32 on the documentation says that the scale is twice as large. Quotients
    saturate at the largest number of the format. Only the partitions of ``dst_scale`` that hold scales are written:
    according to the documentation, the others can hold the scales of other tensors. ``dst_scale`` is uint8 or
    float8_e8m0fnu, which have the same bits.
    """
    dst, src, dst_scale = tile(dst, "dst"), tile(src, "src"), tile(dst_scale, "dst_scale")
    if dst.dtype not in NUMBERS or dst.dtype is float4_e2m1fn_x4:
        raise DtypeError("dst", "float8_e5m2_x4 or float8_e4m3fn_x4", dst.dtype, "use one of them")
    if src.dtype.name not in _SOURCES:
        raise DtypeError("src", "bfloat16 or float16", src.dtype, "tensor_copy it to bfloat16")
    if dst_scale.dtype.name not in _SCALES:
        raise DtypeError(
            "dst_scale", " or ".join(_SCALES), dst_scale.dtype, "allocate it with nl.uint8"
        )
    partitions, count = src._array.shape[0], free_size(src) // 4
    if partitions % QUADRANT or free_size(src) % 4:
        raise ShapeError(
            "src", "a multiple of 32 partitions and of 4 elements", src.shape, "pad the tile"
        )
    if dst._array.shape[0] != partitions or free_size(dst) != count:
        raise ShapeError("dst", f"{partitions} x {count}", dst.shape, "slice it")
    rows = _rows(partitions)
    if dst_scale._array.shape[0] <= rows[-1] or free_size(dst_scale) != count:
        raise ShapeError(
            "dst_scale", f"{partitions} x {count}", dst_scale.shape, "allocate it like dst"
        )
    values = flat(read(src, "src"))
    blocks = values.reshape(partitions // BLOCK, BLOCK, 4 * count)
    magnitudes = (blocks.view(np.uint32) & 0x7FFFFFFF).max(axis=1)
    largest = magnitudes.reshape(partitions // BLOCK, count, 4).max(axis=2) >> 23
    top, greatest = LARGEST[dst.dtype]
    scales = np.clip(largest.astype(np.int32) - top, 0, 255)
    # Powers of two: the quotients are exact, or so small that every format rounds them to zero.
    factors = np.repeat(np.ldexp(np.float32(1), BIAS - scales), 4, axis=1)
    quotients = blocks * factors[:, None, :]
    np.clip(quotients, -greatest, greatest, out=quotients)
    write(dst, pack(quotients.reshape(values.shape), dst.dtype))
    held = np.zeros((dst_scale._array.shape[0], count), np.uint8)
    held[rows[::BLOCK]] = scales
    chosen = np.zeros(held.shape, np.bool_)
    chosen[rows] = True
    shape = dst_scale._array.shape
    octets = held.view(dst_scale.dtype.storage)
    write_where(dst_scale, octets.reshape(shape), chosen.reshape(shape), "dst_scale")
    current().count("vector", src._array.size)


@instruction_from(4)
def nc_matmul_mx(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    stationary_scale: NkiTensor,
    moving_scale: NkiTensor,
    tile_position: Any = None,
    tile_size: Any = None,
    accumulate: Any = None,
    name: str | None = None,
) -> None:
    """Compute dst[M, N] = sum over k and the four numbers of an element of stationary[k, M] moving[k, N], with scales.

    ``stationary`` and ``moving`` are packed tiles of 32, 64, 96 or 128 partitions in SBUF. ``accumulate`` is as in
    nc_matmul.
    """
    core = current()
    dst = tile(dst, "dst")
    stationary, moving = tile(stationary, "stationary"), tile(moving, "moving")
    k, m, n = stationary._array.shape[0], free_size(stationary), free_size(moving)
    for tensor, operand in ((stationary, "stationary"), (moving, "moving")):
        if tensor._storage.buffer is not SBUF:
            raise PlacementError(operand, "a tile in SBUF", tensor.buffer.value, "copy it")
        if tensor.dtype not in NUMBERS:
            raise DtypeError(operand, "a packed (x4) dtype", tensor.dtype, "use quantize_mx")
    if dst._storage.buffer is not PSUM:
        raise MatmulError("dst", "a PSUM tile", dst.buffer.value, "allocate it with buffer=nl.psum")
    if dst.dtype.name not in ("float32", "bfloat16"):
        raise MatmulError("dst", "float32 or bfloat16", dst.dtype, "allocate it in float32")
    if k % QUADRANT or moving._array.shape[0] != k:
        raise MatmulError(
            "moving",
            f"{k} partitions as stationary has, a multiple of 32",
            moving.shape,
            "pad both",
        )
    limit = 4096 if dst.dtype.name == "float32" else 8192
    if m > 128 or n > limit or dst._array.shape[0] != m or free_size(dst) != n:
        raise MatmulError(
            "dst", f"M x N = {m} x {n} with M <= 128 and N <= {limit}", dst.shape, "slice the tiles"
        )
    check_tiling(tile_position or (), tile_size or (), k, m)
    a = _numbers(stationary, stationary_scale, "stationary")
    b = _numbers(moving, moving_scale, "moving")
    accumulate_product(dst, np.matmul(a.T, b), accumulate, core.strict_matmul)
    core.count("tensor", m * n, 2 * 4 * k * m * n)


def _numbers(tensor: NkiTensor, scale: NkiTensor, operand: str) -> NDArray[np.float32]:
    """Return the scaled numbers of a packed tile as (4 k, free size)."""
    held = flat(read_raw(tensor, operand))
    partitions, count = held.shape
    named = f"{operand}_scale"
    scale = tile(scale, named)
    rows = _rows(partitions)
    if scale.dtype.name not in _SCALES:
        raise DtypeError(named, "uint8", scale.dtype, "store the scales as uint8")
    if scale._array.shape[0] <= rows[-1] or free_size(scale) != count:
        raise ShapeError(
            named, f"{count} elements in {rows[-1] + 1} or more partitions", scale.shape,
            "one scale for 8 partitions of an element, in the first 4 partitions of each 32",
        )  # fmt: skip
    used = np.zeros(scale._array.shape, np.bool_)
    used[rows] = True
    check_read_where(scale, used, named)
    factors = _FACTORS.take(flat(scale._array)[rows].view(np.uint8))
    values = unpack_planes(held, tensor.dtype)
    values *= factors[:, None, :]
    return values.reshape(4 * partitions, count)
