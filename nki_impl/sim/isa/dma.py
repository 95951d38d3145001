"""The DMA engines: copies between HBM and SBUF, with dynamic addresses, and transposition.

:mod:`nki_impl.sim.isa.dma_sums` adds tensors by DMA.

Source and destination must have the same number of elements, but may have different shapes: both are traversed in
row-major order. DMA can access any partition of SBUF, but not PSUM. Reading memory that was never written is an error.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/generated/nki.isa.dma_copy.html
and nki.isa.dma_transpose.html.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nki_impl.sim.errors import DmaError, DtypeError, OutOfBoundsError, UnsupportedError
from nki_impl.sim.isa.common import Array, exchanged
from nki_impl.sim.isa.enums import dge_mode as Dge
from nki_impl.sim.isa.enums import engine as Engine
from nki_impl.sim.isa.enums import oob_mode as Oob
from nki_impl.sim.isa.enums import unknown_engine
from nki_impl.sim.machine.core import current, instruction
from nki_impl.sim.memory.storage import PSUM, SBUF
from nki_impl.sim.tensor.access import note_load, read_raw, resolve, write
from nki_impl.sim.tensor.dtypes import to_float32
from nki_impl.sim.tensor.overlap import check_copy
from nki_impl.sim.tensor.patterns import strided, view_of
from nki_impl.sim.tensor.views import NkiTensor


def dma_operand(tensor: object, operand: str) -> NkiTensor:
    """Return ``tensor``; raise an error if it is not a tensor that DMA can access."""
    if not isinstance(tensor, NkiTensor):
        raise DtypeError(operand, "a tensor", type(tensor).__name__, "pass a tensor in HBM or SBUF")
    if tensor._storage.buffer is PSUM:
        raise DmaError(operand, "a tensor in HBM or SBUF", "psum", "tensor_copy it to SBUF first")
    return tensor


def same_count(dst: NkiTensor, src: NkiTensor) -> None:
    """Raise :class:`DmaError` unless both tensors have the same number of elements."""
    if dst._array.size != src._array.size:
        raise DmaError(
            "dst",
            f"{src.size} elements as src {src.shape}",
            f"{dst.size} in {dst.shape}",
            "slice one of them",
        )


@instruction
def dma_copy(
    dst: NkiTensor,
    src: NkiTensor,
    priority: int | None = None,
    oob_mode: Oob = Oob.error,
    dge_mode: Dge = Dge.unknown,
    engine: Engine = unknown_engine,
    name: str | None = None,
) -> None:
    """Copy ``src`` to ``dst``, both in row-major order; different dtypes are converted through float32.

    If ``src`` or ``dst`` was made by ``ap(..., scalar_offset=)`` or ``select``, its index is read when the instruction
    runs. With ``vector_offset``, one row per partition is gathered from ``src``, or scattered to ``dst``. An index
    outside the tensor raises an error; with ``oob_mode.skip``, the elements of ``dst`` for that index do not change.
    """
    core = current()
    dst, src = dma_operand(dst, "dst"), dma_operand(src, "src")
    same_count(dst, src)
    if engine is not unknown_engine and dge_mode is not Dge.hwdge:
        raise DmaError("engine", "unknown unless dge_mode is hwdge", engine, "leave it out")
    if dge_mode is Dge.hwdge and dst.dtype is not src.dtype:
        raise DmaError(
            "dge_mode", "equal dtypes with hwdge", f"{src.dtype} to {dst.dtype}", "leave it unknown"
        )
    skip = oob_mode is Oob.skip
    rows = [t for t in (dst, src) if t.dynamic is not None and t.dynamic.kind == "vector"]
    if rows:
        _copy_rows(dst, src, skip)
    else:
        to, of = resolve(dst, skip), resolve(src, skip)
        if to is None or of is None:
            return
        check_copy(to, of)
        values = read_raw(of, "src")
        write(to, values if to.dtype is of.dtype else to_float32(values))
    note_load(dst, src)
    core.count("dma", dst._array.size, 0, dst._array.size * dst.dtype.itemsize)


def selected_rows(
    tensor: NkiTensor, operand: str, skip: bool
) -> tuple[NkiTensor, NDArray[np.int64], NDArray[np.bool_]]:
    """Return a tensor of all rows that an index can select, the indices, and for each index whether it is valid."""
    dynamic = tensor.dynamic
    assert dynamic is not None and isinstance(dynamic.source, NkiTensor)
    index = dynamic.source
    if not index.dtype.is_integer or index.size < tensor.shape[0]:
        raise DtypeError(
            "vector_offset",
            f"an integer tile of {tensor.shape[0]} indices",
            f"{index.dtype} {index.shape}",
            "store int32",
        )
    # Index i is at [i % P, i // P]: down the partitions first.
    named = read_raw(index, "vector_offset").T.ravel()[: tensor.shape[0]].astype(np.int64)
    item = tensor.dtype.itemsize
    inner = (
        sum((n - 1) * s for n, s in zip(tensor.shape[1:], tensor._array.strides[1:], strict=True))
        + item
    )
    room = (tensor._storage.raw.size - tensor.byte_offset - inner) // max(
        dynamic.stride * item, 1
    ) + 1
    limit = min(dynamic.limit, room)
    inside = (named >= 0) & (named < limit)
    if not inside.all() and not skip:
        raise OutOfBoundsError(
            "vector_offset",
            f"0 <= index < {limit}",
            f"{named[~inside][0]} in {operand}",
            "clamp it, or use oob_mode.skip",
        )
    strides = (dynamic.stride * item, *tensor._array.strides[1:])
    every = strided(
        tensor, tensor.byte_offset, (max(limit, 1), *tensor.shape[1:]), strides, tensor.dtype
    )
    return view_of(tensor, every, tensor.dtype), named, inside


def _copy_rows(dst: NkiTensor, src: NkiTensor, skip: bool) -> None:
    """Gather rows from ``src``, or scatter rows to ``dst``; the tensor with a ``vector_offset`` says which."""
    if dst.dynamic is not None and src.dynamic is not None:
        raise DmaError("src", "a dynamic index on one side", "one on each", "copy in two steps")
    gathered = src.dynamic is not None
    every, named, inside = selected_rows(
        src if gathered else dst, "src" if gathered else "dst", skip
    )
    still = dst if gathered else src
    if still._array.shape[0] != len(named):
        raise DmaError(
            "dst", f"{len(named)} rows", still.shape, "give both sides the same first dimension"
        )
    for row in range(len(named)):
        if not inside[row]:
            continue
        moving = view_of(every, every._array[named[row]], every.dtype)
        fixed = view_of(still, still._array[row], still.dtype)
        to, of = (fixed, moving) if gathered else (moving, fixed)
        values = read_raw(of, "src").reshape(to._array.shape)
        write(to, values if to.dtype is of.dtype else to_float32(values))


@instruction
def dma_transpose(
    dst: NkiTensor,
    src: NkiTensor,
    axes: Any = None,
    priority: int | None = None,
    dge_mode: Dge = Dge.unknown,
    oob_mode: Oob = Oob.error,
    name: str | None = None,
) -> None:
    """Transpose a tensor of rank 2, 3 or 4 with the axes (1, 0), (2, 1, 0) or (3, 1, 2, 0).

    ``dst`` and ``src`` have the same dtype, of 2 or 4 bytes. ``dst`` has at most 128 partitions; in SBUF, it must have
    exactly the transposed shape. ``dge_mode=hwdge`` is refused, because the rules of this mode are not modelled.
    """
    core = current()
    dst, src = dma_operand(dst, "dst"), dma_operand(src, "src")
    order = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}.get(src.ndim)
    if order is None or (axes is not None and tuple(axes) != order):
        raise DmaError(
            "axes",
            "(1, 0), (2, 1, 0) or (3, 1, 2, 0) for rank 2, 3, 4",
            f"{axes} for rank {src.ndim}",
            "reshape src",
        )
    if dge_mode is Dge.hwdge:
        raise UnsupportedError("dge_mode", "unknown or swdge", dge_mode, "leave it unknown")
    if dst._storage.buffer is not SBUF:
        raise DmaError("dst", "a tile in SBUF", dst.buffer.value, "transpose into SBUF, then copy")
    if dst.dtype is not src.dtype or src.dtype.itemsize not in (2, 4):
        raise DmaError(
            "dst",
            "src's dtype, of 2 or 4 bytes",
            f"{src.dtype} to {dst.dtype}",
            "cast before or after",
        )
    shape = tuple(src.shape[axis] for axis in order)
    if dst.shape != shape:
        raise DmaError("dst", f"shape {shape}, rank included", dst.shape, "slice or reshape dst")
    if src.dynamic is not None and src.dynamic.kind == "vector":
        every, named, inside = selected_rows(src, "src", oob_mode is Oob.skip)
        if not inside.all():
            raise UnsupportedError("oob_mode", "indices inside src", "some outside", "clamp them")
        rows = [view_of(every, every._array[row], every.dtype) for row in named]
        values: Array = np.stack([read_raw(row, "src") for row in rows])
    else:
        of = resolve(src, oob_mode is Oob.skip)
        if of is None:
            return
        check_copy(dst, view_of(of, of._array.transpose(order), of.dtype))
        values = read_raw(of, "src")
    write(dst, exchanged(values))
    core.count("dma", dst._array.size, 0, dst._array.size * dst.dtype.itemsize)
