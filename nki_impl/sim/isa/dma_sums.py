"""Addition by the DMA engines: the sum of tensors, and rows that are added to rows that indices select.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/generated/nki.isa.dma_compute.html
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nki_impl.sim.errors import DmaError, UnsupportedError
from nki_impl.sim.isa.common import Array
from nki_impl.sim.isa.dma import dma_operand, same_count, selected_rows
from nki_impl.sim.isa.enums import oob_mode as Oob
from nki_impl.sim.machine.core import current, instruction
from nki_impl.sim.memory.storage import SBUF
from nki_impl.sim.operators.ops import find
from nki_impl.sim.tensor.access import read, write
from nki_impl.sim.tensor.patterns import view_of
from nki_impl.sim.tensor.views import NkiTensor


@instruction
def dma_compute(
    dst: NkiTensor,
    srcs: list[NkiTensor],
    reduce_op: Any,
    scales: Any = None,
    unique_indices: bool = True,
    oob_mode: Oob = Oob.error,
    name: str | None = None,
) -> None:
    """Compute dst = srcs[0] + srcs[1] + ... in float32, with at most 16 sources.

    Only nl.add and scales of 1.0 are supported. With a ``vector_offset`` there are two sources, and one of them is
    ``dst`` itself: either rows of a tensor in HBM are added to ``dst`` in SBUF (gather), or a tile in SBUF is added to
    rows of ``dst`` in HBM (scatter). With ``oob_mode.skip``, an index outside the tensor adds nothing. If rows of a
    scatter are selected twice, ``unique_indices`` must be False.
    """
    core = current()
    if find(reduce_op, "reduce_op", "arith").name != "add":
        raise DmaError("reduce_op", "nl.add", reduce_op, "use the vector engine")
    if scales is not None and any(scale != 1.0 for scale in scales):
        raise DmaError("scales", "None or all 1.0", scales, "scale on the vector engine")
    if not 1 <= len(srcs) <= 16:
        raise DmaError("srcs", "1 to 16 tensors", len(srcs), "add in several steps")
    dst = dma_operand(dst, "dst")
    for number, src in enumerate(srcs):
        same_count(dst, dma_operand(src, f"srcs[{number}]"))
    if any(tensor.dynamic is not None for tensor in (dst, *srcs)):
        _add_rows(dst, srcs, unique_indices, oob_mode is Oob.skip)
    else:
        write(dst, _sum(srcs, dst._array.shape))
    core.count("dma", dst._array.size, 0, dst._array.size * dst.dtype.itemsize * len(srcs))


def _sum(srcs: list[NkiTensor], shape: tuple[int, ...]) -> Array:
    total: Array | None = None
    for number, src in enumerate(srcs):
        values = read(src, f"srcs[{number}]").reshape(shape)
        total = values if total is None else total + values
    assert total is not None
    return total


def _add_rows(dst: NkiTensor, srcs: list[NkiTensor], unique: bool, skip: bool) -> None:
    """Add rows that indices select to ``dst``, or a tile to rows of ``dst``."""
    if any(t.dynamic is not None and t.dynamic.kind != "vector" for t in (dst, *srcs)):
        raise UnsupportedError(
            "srcs", "static addresses or a vector_offset", "a scalar_offset", "use dma_copy first"
        )
    others = [src for src in srcs if not _same_place(src, dst)]
    if len(srcs) != 2 or len(others) != 1:
        raise DmaError(
            "srcs",
            "dst itself and one other tensor, as there is a vector_offset",
            f"{len(srcs)} tensors, {len(others)} of them not dst",
            "pass srcs=[other, dst]",
        )
    other = others[0]
    scattered = dst.dynamic is not None
    fixed, indexed = (other, dst) if scattered else (dst, other)
    if fixed.dynamic is not None or fixed._storage.buffer is not SBUF:
        raise DmaError(
            "srcs", "a tile in SBUF and rows in HBM", fixed, "dma_copy one of them to SBUF first"
        )
    every, named, inside = selected_rows(indexed, "dst" if scattered else "srcs", skip)
    if fixed._array.shape[0] != len(named):
        raise DmaError("dst", f"{len(named)} rows", fixed.shape, "select one row per partition")
    if scattered and unique:
        _check_unique(named[inside])
    for row in np.flatnonzero(inside):
        one = view_of(every, every._array[named[row]], every.dtype)
        part = view_of(fixed, fixed._array[row], fixed.dtype)
        to = one if scattered else part
        write(to, _sum([one, part], to._array.shape))


def _check_unique(rows: NDArray[np.int64]) -> None:
    found, count = np.unique(rows, return_counts=True)
    if (count > 1).any():
        raise DmaError(
            "unique_indices",
            "False if a row is selected twice",
            f"row {found[count > 1][0]} {count.max()} times",
            "pass unique_indices=False; the additions would otherwise overwrite each other",
        )


def _same_place(a: NkiTensor, b: NkiTensor) -> bool:
    """Return whether both tensors are the same elements, selected by the same indices."""
    if a is b:
        return True
    if (a._storage, a.dtype, a._array.shape) != (b._storage, b.dtype, b._array.shape):
        return False
    if a.byte_offset != b.byte_offset or a._array.strides != b._array.strides:
        return False
    one, two = a.dynamic, b.dynamic
    if one is None or two is None:
        return one is two
    sources = one.source, two.source
    return (one.kind, one.stride, one.limit) == (two.kind, two.stride, two.limit) and (
        sources[0] is sources[1]
        or all(isinstance(source, NkiTensor) for source in sources)
        and _same_place(*sources)  # type: ignore[arg-type]
    )
