"""The metadata of collectives of variable length (:mod:`nki_impl.sim.exchange.variable`): counts and places."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nki_impl.sim.errors import CollectiveError, DtypeError, PlacementError, ShapeError
from nki_impl.sim.memory.storage import MemoryRegion
from nki_impl.sim.tensor.access import read_raw
from nki_impl.sim.tensor.dtypes import uint32
from nki_impl.sim.tensor.views import NkiTensor

Table = NDArray[np.int64]


def check_metadata(
    src: NkiTensor, dst: NkiTensor, metadata: object, n: int, has_rdispls: bool
) -> None:
    """Check dtype, memory, shape and layout of the metadata for a group of ``n`` ranks, and the layout of src and dst."""
    if not isinstance(metadata, NkiTensor):
        raise DtypeError(
            "metadata_tensor", "a tensor", type(metadata).__name__, "write the counts to a tensor"
        )
    if metadata.dtype is not uint32:
        raise DtypeError("metadata_tensor", "dtype uint32", metadata.dtype, "use nl.uint32")
    if metadata.buffer is MemoryRegion.psum:
        raise PlacementError("metadata_tensor", "a tensor in HBM or SBUF", "PSUM", "copy it out")
    rows = 4 if has_rdispls else 3
    shape = (1, rows, n) if metadata.storage.on_chip else (rows, n)
    if metadata.shape != shape:
        raise ShapeError(
            "metadata_tensor",
            f"shape {shape} in {metadata.buffer.value} with has_rdispls={bool(has_rdispls)}",
            metadata.shape,
            "allocate it with this shape",
        )
    for operand, tensor in (("srcs", src), ("dsts", dst), ("metadata_tensor", metadata)):
        if not tensor.is_contiguous():
            raise ShapeError(
                operand, "contiguous elements", f"strides {tensor.strides}", "copy it first"
            )
    if not has_rdispls and dst.size % n:
        raise ShapeError("dsts", f"a size divisible by {n}", dst.size, "pad it")


def values_of(metadata: NkiTensor, n: int, gather: bool, has_rdispls: bool) -> Table:
    """Read counts, offsets and, with ``has_rdispls``, places of the metadata: an array with 2 or 3 rows of length n."""
    columns = 1 if gather else n
    first = read_raw(_part(metadata, 0, 2, columns), "metadata_tensor").reshape(2, columns)
    rows = [np.broadcast_to(first, (2, n))]
    if has_rdispls:
        rows.append(read_raw(_part(metadata, 3, 4, n), "metadata_tensor").reshape(1, n))
    return np.concatenate(rows).astype(np.int64)


def received_row(metadata: NkiTensor) -> NkiTensor:
    """Return row 2, for the counts that are received."""
    return _part(metadata, 2, 3, metadata.shape[-1])


def _part(metadata: NkiTensor, start: int, end: int, columns: int) -> NkiTensor:
    return metadata.slice(metadata.ndim - 2, start, end).slice(metadata.ndim - 1, 0, columns)


def check_sent(table: Table, src: NkiTensor) -> None:
    """Raise CollectiveError if a part that is sent ends outside src."""
    for column, (count, start) in enumerate(zip(*table[:2], strict=True)):
        if start + count > src.size:
            raise CollectiveError(
                "metadata_tensor",
                f"parts of src, which has {src.size} elements",
                f"{count} elements from {start} on in column {column}",
                "correct rows 0 and 1, or allocate a larger src",
            )


def places(who: str, table: Table, counts: Table, dst: NkiTensor) -> list[int]:
    """Return where the parts from each rank begin in dst; raise CollectiveError if they overlap or end outside."""
    n, size = len(counts), dst.size
    given = len(table) == 3
    starts = table[2].tolist() if given else [size // n * rank for rank in range(n)]
    limits = [size] * n if given else [*starts[1:], size]
    used: list[tuple[int, int]] = []
    for sender, (start, count, limit) in enumerate(
        zip(starts, counts.tolist(), limits, strict=True)
    ):
        end = start + count
        if end > limit or (count and any(start < b and a < end for a, b in used)):
            raise CollectiveError(
                "metadata_tensor",
                f"received parts that fit: {limit - start} elements from {start} on"
                if end > limit
                else "received parts that do not overlap",
                f"{count} elements from rank {sender} of the group to {start} in dst of {who}",
                "send fewer elements, or allocate a larger dst",
            )
        if count:
            used.append((start, end))
    return starts


def chunk(tensor: NkiTensor, start: int, count: int) -> NkiTensor | None:
    """Return ``count`` elements of a contiguous tensor from ``start`` on, or None if ``count`` is 0."""
    if count == 0:
        return None
    return tensor.reshape((tensor.size,)).slice(0, int(start), int(start + count))
