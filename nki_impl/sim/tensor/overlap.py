"""Tensors that a kernel placed at overlapping addresses, and copies whose destination overlaps their source.

Kernels may place tensors in SBUF and PSUM themselves (``address=``), and may reuse an address deliberately: allocators
of published kernels do so after a reset. An overlap alone is therefore no error. It is an error to read a tensor after
another tensor was written over it. The simulator keeps separate bytes for each tensor. A write to one of two
overlapping tensors, which are called *rivals*, marks the same bytes of the other as *lost*, until they are written again.

Published kernels place many tensors at few places, which they use in turn. The tensors at one place therefore share a
:class:`~nki_impl.sim.memory.storage.Site`, and which places overlap is computed once for each pair of sites.

A copy may have the same elements in the same order as source and destination. Otherwise a destination that overlaps the
source is an error: the engines read and write in a pipeline, and DMA runs in several queues, so nothing says whether an
element is read before or after it is overwritten.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nki_impl.sim.errors import OverlapError, kernel_line
from nki_impl.sim.memory.storage import Extent, Near, Place, Site, Storage
from nki_impl.sim.tensor.patterns import covers_storage, over, over_each

if TYPE_CHECKING:
    from nki_impl.sim.tensor.views import NkiTensor

_PARTITION_STRIDE = 1 << 20
"""More than the bytes of a partition, so that (partition, byte) can be one number."""


def describe(storage: Storage) -> str:
    """Return the name, address and allocation line of a storage, for messages."""
    name = storage.name or "an unnamed tensor"
    if storage.placed is None:
        return name
    kind, size = storage.buffer.value, storage.partition_bytes
    return f"{name} ({kind} address {storage.placed}, {size} bytes, allocated at {storage.line})"


def join_site(storage: Storage, sites: dict[Extent, Site]) -> None:
    """Give a placed storage its site; a new site is linked to those of ``sites`` that share memory with it.

    ``sites``: all sites in the same memory of the same core.
    """
    partition, byte = storage.placed or (0, 0)
    extent = (partition, partition + storage.shape[0], byte, byte + storage.partition_bytes)
    site = sites.get(extent)
    if site is None:
        site = sites[extent] = Site(extent)
        for other in sites.values():
            common = _common(extent, other.extent)
            if common is None:
                continue
            site.near.append(_near(site, other, common))
            if other is not site:
                other.near.append(_near(other, site, common))
    storage.site = site
    if storage.missing == 0:
        _fill(storage, site)


def _fill(storage: Storage, site: Site) -> None:
    """Record that ``storage`` may hold data now."""
    storage.is_filling = True
    site.filled = [ref for ref in site.filled if ref() is not None]
    site.filled.append(weakref.ref(storage))


def _common(a: Extent, b: Extent) -> Extent | None:
    """Return the memory that two extents share, or None."""
    if a[1] <= b[0] or b[1] <= a[0] or a[3] <= b[2] or b[3] <= a[2]:
        return None
    return max(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), min(a[3], b[3])


def _near(site: Site, other: Site, common: Extent) -> Near:
    """Return what ``site`` has to know of ``other``, with which it shares the memory ``common``."""
    return Near(
        other, _place(common, site.extent), _place(common, other.extent), common == other.extent
    )


def _place(part: Extent, whole: Extent) -> Place:
    """Return where ``part`` is, counted from the start of ``whole``."""
    top, bottom, left, right = part
    return slice(top - whole[0], bottom - whole[0]), slice(left - whole[2], right - whole[2])


def _rows(storage: Storage, array: NDArray) -> NDArray:
    """Return ``array``, which has one entry per byte of ``storage``, as (partitions, bytes)."""
    return array.reshape(storage.shape[0], -1)


def overwrite_rivals(tensor: NkiTensor) -> None:
    """Mark the bytes that rivals share with ``tensor`` as lost, and the tensor's own bytes as present."""
    storage = tensor._storage
    site = storage.site
    assert site is not None
    if not storage.is_filling:
        _fill(storage, site)
    rivals = [
        (near, held)
        for near in site.near
        for ref in near.site.filled
        if (held := ref()) is not None and held is not storage
    ]
    if not rivals and storage.lost is None:
        return
    whole = covers_storage(tensor)
    if whole:
        storage.lost = None
    by = f"{describe(storage)}, written at {kernel_line()}" if rivals else ""
    written = None
    for near, held in rivals:
        if whole and near.is_covered and held.missing == 0:
            _lose_all(held, by)
            continue
        written = _written_bytes(tensor) if written is None else written
        rows, columns = near.mine
        hit = written[:, columns] if len(written) == 1 else written[rows, columns]
        _lose(held, near.theirs, hit, by)
    if storage.lost is not None:
        written = _written_bytes(tensor) if written is None else written
        storage.lost = storage.lost & ~written


def _written_bytes(tensor: NkiTensor) -> NDArray[np.bool_]:
    """Return (partitions, bytes) of the tensor's storage, True in the tensor; one row if that is the same in all."""
    storage = tensor._storage
    if tensor._array.shape[0] == storage.shape[0]:
        row = np.zeros(storage.partition_bytes, np.bool_)
        part = over_each(tensor, row, 1)
        if part is not None:
            part[0] = True
            return row[None]
    written = np.zeros(storage.raw.size, np.bool_)
    over(tensor, written, 1)[...] = True
    return _rows(storage, written)


def _lose_all(rival: Storage, by: str) -> None:
    """Mark all bytes of ``rival``, which are all written, as lost; ``by`` describes the write."""
    rival.lost = True
    rival.lost_to = by
    rival.missing = rival.raw.size // rival.unit
    rival.mask = rival.started = None
    _empty(rival)


def _empty(rival: Storage) -> None:
    """Record that ``rival`` holds no data any more."""
    rival.is_filling = False
    assert rival.site is not None
    rival.site.filled = [ref for ref in rival.site.filled if ref() is not rival]


def _lose(rival: Storage, place: Place, hit: NDArray[np.bool_], by: str) -> None:
    """Mark the bytes ``hit`` of the part ``place`` of ``rival`` as lost; ``by`` describes the write.

    ``hit`` has one row if it is the same in all partitions of ``place``. If these are all partitions of the rival, its
    marks remain alike, and one row stands for all.
    """
    if not hit.any():
        return
    rival.lost_to = by
    rows, columns = place
    alike = len(hit) == 1 and rows.stop - rows.start == rival.shape[0]
    mask = rival.partition_mask() if alike else None
    if mask is None:
        mask, alike = rival.written_mask(), False
    marks = mask[None] if alike else _rows(rival, mask)
    rows = slice(None) if alike else rows
    units, inside = _touched((rows, columns), rival.unit)
    part = marks[units]
    gone = np.zeros((len(part), part.shape[1] * rival.unit), np.bool_)
    gone[:, inside] = hit
    if rival.missing:
        gone &= _each_byte(part, rival.unit)
    _add_lost(rival, (rows, columns), gone[:, inside])
    if rival.started is not None:
        _end_products(rival, place, gone[:, inside])
    part &= ~_any_byte(gone, rival.unit)
    left = int(np.count_nonzero(marks))
    rival.missing = (marks.size - left) * (rival.shape[0] if alike else 1)
    if left == 0:
        rival.mask = None
        _empty(rival)


def _add_lost(rival: Storage, place: Place, gone: NDArray[np.bool_]) -> None:
    """Add ``gone`` to the lost bytes of ``rival``, (partitions, bytes), which have one row if all rows are the same."""
    lost = rival.lost
    if isinstance(lost, bool):
        return  # all bytes are lost already
    if lost is None:
        lost = np.zeros(
            (1 if place[0] == slice(None) else rival.shape[0], rival.partition_bytes), np.bool_
        )
    elif len(lost) == 1 and place[0] != slice(None):
        lost = np.repeat(lost, rival.shape[0], axis=0)
    lost[place] |= gone
    rival.lost = lost


def _end_products(rival: Storage, place: Place, gone: NDArray[np.bool_]) -> None:
    """Record that elements of ``rival`` with a byte in ``gone`` were not written by a matmul last."""
    width = rival.dtype.itemsize
    wide, inside = _touched(place, width)
    started = _rows(rival, rival.started_mask())[wide]
    ended = np.zeros((len(gone), started.shape[1] * width), np.bool_)
    ended[:, inside] = gone
    started &= ~_any_byte(ended, width)


def _touched(place: Place, width: int) -> tuple[Place, slice]:
    """Return the place in units of ``width`` bytes that holds all bytes of ``place``, and where these are inside it."""
    rows, columns = place
    first, last = columns.start // width, -(-columns.stop // width)
    skipped = columns.start - first * width
    return (rows, slice(first, last)), slice(skipped, skipped + columns.stop - columns.start)


def _each_byte(marks: NDArray[np.bool_], width: int) -> NDArray[np.bool_]:
    """Repeat each mark ``width`` times along the last axis, as np.repeat does more slowly: 0x01 in each byte of a unit."""
    ones = int.from_bytes(b"\x01" * width, "little")
    return np.multiply(marks, ones, dtype=f"u{width}").view(np.bool_)


def _any_byte(marks: NDArray[np.bool_], width: int) -> NDArray[np.bool_]:
    """Return one bool for every ``width`` bytes: whether any of their marks is True."""
    return marks.view(f"u{width}") != 0


def refuse_lost(tensor: NkiTensor, operand: str) -> None:
    """Raise :class:`OverlapError` if a rival was written over an element of ``tensor``."""
    storage = tensor._storage
    if storage.lost is None:
        return
    size = (storage.shape[0], storage.partition_bytes)
    lost = over(tensor, np.ascontiguousarray(np.broadcast_to(storage.lost, size)).ravel(), 1)
    if lost.any():
        count = int(np.count_nonzero(lost.any(axis=-1) if lost.ndim > tensor.ndim else lost))
        raise OverlapError(
            operand,
            "a tensor over which no other tensor was written",
            f"{count} of {tensor.size} elements of {describe(storage)} overwritten by {storage.lost_to}",
            "place the two tensors apart, or read this one before the other is written",
        )


def check_copy(dst: NkiTensor, src: NkiTensor) -> None:
    """Raise :class:`OverlapError` if ``dst`` overlaps ``src``, unless both are the same elements in the same order."""
    a, b = dst._storage, src._storage
    if a is b:
        if not np.may_share_memory(dst._array, src._array):
            return
    elif a.site is None or not any(near.site is b.site for near in a.site.near):
        return
    to, of = _places(dst), _places(src)
    if np.array_equal(to, of) or not np.isin(to, of, kind="sort").any():
        return
    shared = int(np.count_nonzero(np.isin(to, of)))
    raise OverlapError(
        "dst",
        "a destination that does not overlap the source, or is the same elements in the same order",
        f"{shared} of {to.size} bytes of dst in src: {describe(a)} and {describe(b)}",
        "copy through another tensor",
    )


def _places(tensor: NkiTensor) -> NDArray[np.int64]:
    """Return the address of each byte of ``tensor``, in the order in which an instruction goes through it."""
    storage = tensor._storage
    numbers = np.arange(storage.raw.size)
    if storage.placed is not None:
        partition, byte = storage.placed
        rows, columns = np.divmod(numbers, storage.partition_bytes)
        numbers = (rows + partition) * _PARTITION_STRIDE + columns + byte
    return over(tensor, numbers, 1).ravel()
