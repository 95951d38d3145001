"""The tensor engine: matrix multiplication and transposition.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/generated/nki.isa.nc_matmul.html
and nki.isa.nc_transpose.html.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nki_impl.sim.errors import DtypeError, MatmulError, PlacementError
from nki_impl.sim.isa.common import Array, exchanged, flat, free_size, pick_engine
from nki_impl.sim.isa.enums import (
    PLAIN_MATMUL,
    matmul_perf_mode,
    tensor_engine,
    unknown_engine,
    vector_engine,
)
from nki_impl.sim.isa.enums import engine as Engine
from nki_impl.sim.isa.matmul_modes import (
    double_rows,
    perf_mode_of,
    transpose_through_matmul,
    warn_of_narrow_psum,
)
from nki_impl.sim.machine.core import current, instruction
from nki_impl.sim.memory.storage import PSUM, PSUM_BANK_BYTES, SBUF
from nki_impl.sim.tensor.access import (
    is_written,
    mark_written,
    read_operand,
    read_raw,
    result_array,
    tile,
    write,
)
from nki_impl.sim.tensor.dtypes import float32, round_once, to_float32
from nki_impl.sim.tensor.overlap import overwrite_rivals, refuse_lost
from nki_impl.sim.tensor.patterns import covers_storage, over
from nki_impl.sim.tensor.views import NkiTensor

_FREE = {"float8_e4m3", "float8_e4m3fn", "float8_e5m2", "bfloat16", "float16"}
_WIDE = {"float32", "tfloat32"}


@instruction
def nc_matmul(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: Any = None,
    tile_position: Any = (),
    tile_size: Any = (),
    perf_mode: matmul_perf_mode = PLAIN_MATMUL,
    name: str | None = None,
) -> None:
    """Compute dst[M, N] = stationary[K, M].T @ moving[K, N] in float32, or add this product to dst.

    The partition dimension K of both inputs is contracted; free dimensions are flattened. Inputs are in SBUF, dst in
    one bank of PSUM (2 KiB per partition); K <= 128, M <= 128, N <= 512. If one input is float32, the other input must
    be float32 as well.

    ``perf_mode`` double_row contracts float8 operands [K, 2, M] and [K, 2, N] over K and both rows. ``is_transpose``
    writes the transpose of ``stationary``; elements that were never written remain so.

    ``accumulate``: True adds, False overwrites. None adds to an element if the last write to it was by a matmul, and
    overwrites it otherwise. True raises an error if the last write to an element was not by a matmul, because the
    documentation leaves this case undefined on trn1 and trn2. If ``core.strict_matmul`` is False, True raises an error
    only if an element was never written.
    """
    core = current()
    dst, stationary, moving = (
        tile(dst, "dst"),
        tile(stationary, "stationary"),
        tile(moving, "moving"),
    )
    mode = perf_mode_of(perf_mode)
    rows = 1 if mode is PLAIN_MATMUL else 2
    k, m, n = (
        stationary._array.shape[0],
        free_size(stationary) // rows,
        free_size(moving) // rows,
    )
    _check_matmul(dst, stationary, moving, (k, m, n), core.generation, is_transpose)
    check_tiling(tile_position, tile_size, k, m)
    if is_transpose:
        transpose_through_matmul(dst, stationary, moving, accumulate)
    elif rows == 1:
        a, b = (
            flat(read_operand(stationary, "stationary")),
            flat(read_operand(moving, "moving")),
        )
        if accumulate is None and _is_unstarted(dst):
            accumulate = False
        out = result_array(dst, (m, n)) if accumulate is False else None
        accumulate_product(dst, np.matmul(a.T, b, out=out), accumulate, core.strict_matmul)
    else:
        tiled = bool(tile_size) and tile_size[1] < 128
        a = double_rows(stationary, "stationary", tiled, core.generation)
        b = double_rows(moving, "moving", tiled, core.generation)
        accumulate_product(dst, np.matmul(a.T, b), accumulate, core.strict_matmul)
    core.count("tensor", m * n, 2 * rows * k * m * n)


def _check_matmul(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    sizes: tuple[int, int, int],
    generation: int,
    is_transpose: bool,
) -> None:
    k, m, n = sizes
    if _is_usual(dst, stationary, moving, sizes):
        return
    for tensor, operand in ((stationary, "stationary"), (moving, "moving")):
        if tensor._storage.buffer is not SBUF:
            raise MatmulError(
                operand, "an SBUF tile", tensor.buffer.value, "tensor_copy it to SBUF first"
            )
        if tensor.dtype.name not in _FREE and tensor.dtype.name not in _WIDE:
            raise MatmulError(
                operand, "a floating-point tile", tensor.dtype, "cast it to bfloat16 or float32"
            )
    if dst._storage.buffer is not PSUM:
        raise MatmulError("dst", "a PSUM tile", dst.buffer.value, "allocate it with buffer=nl.psum")
    if (stationary.dtype.name in _WIDE) != (moving.dtype.name in _WIDE):
        raise MatmulError(
            "moving",
            "float32 (or tfloat32) pairs with float32 (or tfloat32) only",
            f"{stationary.dtype} and {moving.dtype}",
            "cast one of them",
        )
    if moving._array.shape[0] != k:
        raise MatmulError(
            "moving",
            f"K = {k} partitions as stationary has",
            moving._array.shape[0],
            "contract over partitions",
        )
    if m > 128:
        raise MatmulError("stationary", "M <= 128 free elements", m, "split it into tiles of 128")
    limit = 512 if generation < 4 else 4096 if dst.dtype.name == "float32" else 8192
    if n > limit:
        raise MatmulError(
            "moving", f"N <= {limit} free elements", n, f"split it into tiles of {limit}"
        )
    if dst._array.shape[0] != m or free_size(dst) != n:
        raise MatmulError(
            "dst", f"M x N = {m} x {n}", f"{dst._array.shape[0]} x {free_size(dst)}", "slice dst"
        )
    narrow = dst.dtype.name == "bfloat16"
    if narrow and is_transpose and generation == 3:
        warn_of_narrow_psum(dst)
    elif dst.dtype.name != "float32" and not (generation >= 4 and narrow):
        raise MatmulError(
            "dst", "float32", dst.dtype, "accumulate in float32, round when copying out"
        )
    if generation < 4:
        _check_bank(dst)


def _is_usual(
    dst: NkiTensor, stationary: NkiTensor, moving: NkiTensor, sizes: tuple[int, int, int]
) -> bool:
    """Return whether the operands satisfy every rule of every target, as most do: one test instead of ten."""
    k, m, n = sizes
    to, array = dst._storage, dst._array
    return (
        stationary._storage.buffer is SBUF
        and moving._storage.buffer is SBUF
        and to.buffer is PSUM
        and stationary.dtype.is_16_bit_float
        and moving.dtype.is_16_bit_float
        and dst.dtype is float32
        and moving._array.shape[0] == k
        and m <= 128
        and n <= 512
        and array.shape[0] == m
        and array.size == m * n
        and to.partition_bytes <= PSUM_BANK_BYTES
    )


def _check_bank(dst: NkiTensor) -> None:
    """Raise :class:`MatmulError` unless all elements of ``dst`` in a partition are in one bank of 2 KiB."""
    storage = dst._storage
    if storage.partition_bytes <= PSUM_BANK_BYTES:
        return
    array = dst._array
    first = dst.byte_offset % storage.partition_bytes + (storage.placed or (0, 0))[1]
    reach = sum((c - 1) * s for c, s in zip(array.shape[1:], array.strides[1:], strict=True))
    last = first + reach + array.itemsize - 1
    if first // PSUM_BANK_BYTES != last // PSUM_BANK_BYTES:
        raise MatmulError(
            "dst",
            f"inside one PSUM bank of {PSUM_BANK_BYTES} bytes per partition",
            f"bytes {first} to {last}",
            "write one bank with each matmul",
        )


def check_tiling(position: tuple[int, ...], size: tuple[int, ...], k: int, m: int) -> None:
    """Raise :class:`MatmulError` unless the tile of the tensor engine is valid and holds K x M elements."""
    if not position and not size:
        return
    if len(position) != 2 or len(size) != 2 or any(s not in (32, 64, 128) for s in size):
        raise MatmulError(
            "tile_size",
            "tile_position and tile_size both, sizes of 32, 64 or 128",
            f"{position}, {size}",
            "set both",
        )
    if any(p % s or p + s > 128 for p, s in zip(position, size, strict=True)):
        raise MatmulError(
            "tile_position", f"multiples of {size} inside 128 x 128", position, "move the tile"
        )
    if k > size[0] or m > size[1]:
        raise MatmulError("tile_size", f"at least K x M = {k} x {m}", size, "choose a larger tile")


def accumulate_product(
    dst: NkiTensor, product: Array, accumulate: bool | None, strict: bool
) -> None:
    """Write ``product`` to ``dst`` or add it, as ``accumulate`` says, and mark it as written by a matmul."""
    storage, target = dst._storage, dst._array
    if accumulate is False:
        write(dst, product)
        _mark_started(dst)
        return
    held = to_float32(target)
    if product.shape != target.shape:
        product = product.reshape(target.shape)
    whole = storage.started is True
    started = None if whole else over(dst, storage.started_mask(), storage.dtype.itemsize)
    if started is None or started.all():
        if dst.dtype is float32:
            np.add(product, held, out=target)
        else:
            target[...] = round_once(product + held, dst.dtype)
    elif accumulate is None:
        if started.any():
            product = np.where(started, product + np.where(started, held, 0), product)
        target[...] = round_once(product, dst.dtype)
    else:
        refuse_lost(dst, "dst")
        if strict or not is_written(dst):
            raise MatmulError(
                "accumulate",
                "accumulate=True only on elements that a matmul has started",
                f"{int(started.size - np.count_nonzero(started))} of {started.size} elements not started by a matmul",
                "pass accumulate=(i > 0), or None",
            )
        target[...] = round_once(product + held, dst.dtype)
    _mark_started(dst)
    mark_written(dst)
    if storage.site is not None:
        overwrite_rivals(dst)


def _is_unstarted(dst: NkiTensor) -> bool:
    """Return whether no element of ``dst`` was last written by a matmul."""
    started = dst._storage.started
    if isinstance(started, np.ndarray):
        return not over(dst, started, dst._storage.dtype.itemsize).any()
    return started is None


def _mark_started(dst: NkiTensor) -> None:
    storage = dst._storage
    if covers_storage(dst):
        storage.started = True
    elif storage.started is not True:
        over(dst, storage.started_mask(), storage.dtype.itemsize)[...] = True


@instruction
def nc_transpose(
    dst: NkiTensor, data: NkiTensor, engine: Engine = unknown_engine, name: str | None = None
) -> None:
    """Transpose partitions and (flattened) free elements, bit for bit.

    The tensor engine transposes up to 128 x 128 elements from SBUF to PSUM. The vector engine transposes up to 32 x 32
    elements, and can read and write both SBUF and PSUM. ``dst`` has the dtype of ``data``. By default, an engine that
    supports the operands is chosen.
    """
    core = current()
    dst, data = tile(dst, "dst"), tile(data, "data")
    p, f = data._array.shape[0], free_size(data)
    small = p <= 32 and f <= 32
    in_order = data._storage.buffer is SBUF and dst._storage.buffer is PSUM
    chosen = pick_engine(
        engine, (tensor_engine, vector_engine), tensor_engine if in_order else vector_engine
    )
    if chosen == "vector" and not small:
        raise MatmulError(
            "data",
            "32 x 32 or smaller on the vector engine (the tensor engine reads SBUF and writes PSUM)",
            f"{p} x {f} from {data.buffer.value} to {dst.buffer.value}",
            "transpose SBUF to PSUM, or in blocks of 32",
        )
    if chosen == "tensor" and not in_order:
        raise PlacementError(
            "dst",
            "data in SBUF and dst in PSUM",
            f"{data.buffer.value} to {dst.buffer.value}",
            "use a PSUM dst",
        )
    if f > 128:
        raise MatmulError("data", "128 x 128 or smaller", f"{p} x {f}", "transpose block by block")
    if dst._array.shape[0] != f or free_size(dst) != p:
        raise MatmulError(
            "dst",
            f"{f} x {p}, the shape of data with its dimensions exchanged",
            f"{dst._array.shape[0]} x {free_size(dst)}",
            "allocate dst with this shape, or slice it",
        )
    if dst.dtype is not data.dtype:
        raise DtypeError(
            "dst", f"{data.dtype} as data has", dst.dtype, "allocate dst with data.dtype"
        )
    write(dst, exchanged(flat(read_raw(data, "data"))))
    core.count(chosen, p * f, 2 * p * f * p if chosen == "tensor" else 0)
