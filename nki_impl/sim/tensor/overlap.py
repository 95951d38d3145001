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
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nki_impl.sim.errors import OverlapError, Spot, kernel_spot, line_of
from nki_impl.sim.memory.storage import Extent, MemoryRegion, Near, Place, Site, Storage
from nki_impl.sim.tensor.patterns import covers_storage, over, over_each

if TYPE_CHECKING:
    from nki_impl.sim.tensor.views import NkiTensor

_PARTITION_STRIDE = 1 << 20
"""More than the bytes of a partition, so that (partition, byte) can be one number."""


class Label(NamedTuple):
    """What a message says of a tensor. It has no reference to the tensor, which would keep its memory."""

    name: str
    buffer: MemoryRegion
    placed: tuple[int, int] | None
    size: int
    made_at: Spot | None

    def __str__(self) -> str:
        name = self.name or "an unnamed tensor"
        if self.placed is None:
            return name
        return f"{name} ({self.buffer.value} address {self.placed}, {self.size} bytes, allocated at {line_of(self.made_at)})"


Writer = tuple[Label, Spot | None]
"""The tensor through which memory was overwritten, and what of the kernel wrote it."""


def _label(storage: Storage) -> Label:
    return Label(
        storage.name, storage.buffer, storage.placed, storage.partition_bytes, storage.made_at
    )


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
            theirs = other.extent
            if (
                extent[3] <= theirs[2]
                or theirs[3] <= extent[2]
                or extent[1] <= theirs[0]
                or theirs[1] <= extent[0]
            ):
                continue
            common = _common(extent, theirs)
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


def _common(a: Extent, b: Extent) -> Extent:
    """Return the memory that two overlapping extents share."""
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


def overwrite_rivals(tensor: NkiTensor) -> None:
    """Mark what rivals share with ``tensor`` as lost, and the tensor's own elements as present."""
    storage = tensor._storage
    site = storage.site
    assert site is not None
    if not storage.is_filling:
        _fill(storage, site)
    if storage.lost is not None:
        _mark_present(tensor)
    whole = False
    by: Writer | None = None
    written: tuple[slice, NDArray[np.bool_] | None] | None = None
    for near in site.near:
        for ref in near.site.filled:
            rival = ref()
            if rival is None or rival is storage:
                continue
            if by is None:
                by, whole = (_label(storage), kernel_spot()), covers_storage(tensor)
            if whole and near.is_covered and rival.missing == 0:
                _lose_all(rival, by)
                continue
            written = written or _written_bytes(tensor)
            _lose(rival, *_shared(near, *written), by)


def _mark_present(tensor: NkiTensor) -> None:
    """Record that no element of ``tensor``, which has just been written, is lost."""
    storage = tensor._storage
    if storage.missing == 0:
        storage.lost = None
        return
    lost = _lost_units(storage)
    if len(lost) == 1 and tensor._array.shape[0] == storage.shape[0]:
        part = over_each(tensor, lost[0], storage.unit)
        if part is not None:
            part[0] = False
            return
    over(tensor, _in_all_rows(storage), storage.unit)[...] = False


def _lost_units(storage: Storage) -> NDArray[np.bool_]:
    """Return the lost units as (partitions, units), in one row if they are the same in all partitions."""
    if not isinstance(storage.lost, np.ndarray):
        count = storage.partition_bytes // storage.unit
        storage.lost = np.full((1, count), storage.lost is True)
    return storage.lost


def _in_all_rows(storage: Storage) -> NDArray[np.bool_]:
    """Return the lost units with a row for each partition; what is written to this array is kept."""
    lost = _lost_units(storage)
    if len(lost) < storage.shape[0]:
        lost = storage.lost = np.repeat(lost, storage.shape[0], axis=0)
    return lost


def _written_bytes(tensor: NkiTensor) -> tuple[slice, NDArray[np.bool_] | None]:
    """Return the bytes of a partition of the storage that hold ``tensor``, and which of them do, as (partitions, bytes).

    The array has one row if that is the same in all partitions; it is None if all these bytes do.
    """
    storage, array = tensor._storage, tensor._array
    size = storage.partition_bytes
    if array.shape[0] == storage.shape[0] and (array.shape[0] == 1 or array.strides[0] == size):
        row = array[0]
        start = tensor.byte_offset
        if row.flags.c_contiguous and start + row.nbytes <= size:
            return slice(start, start + row.nbytes), None
        marks = np.zeros(size, np.bool_)
        part = over_each(tensor, marks, 1)
        if part is not None:
            part[0] = True
            return slice(0, size), marks[None]
    marks = np.zeros((storage.shape[0], size), np.bool_)
    over(tensor, marks, 1)[...] = True
    return slice(0, size), marks


def _shared(
    near: Near, written: slice, marks: NDArray[np.bool_] | None
) -> tuple[Place, NDArray[np.bool_] | None]:
    """Return what :func:`_written_bytes` says of the memory that is shared with a rival, as a place of the rival."""
    (rows, columns), (to_rows, to_columns) = near.mine, near.theirs
    start = max(written.start, columns.start)
    stop = max(min(written.stop, columns.stop), start)
    if marks is not None:
        kept = slice(start - written.start, stop - written.start)
        marks = marks[:, kept] if len(marks) == 1 else marks[rows, kept]
    ahead = to_columns.start - columns.start
    return (to_rows, slice(start + ahead, stop + ahead)), marks


def _lose_all(rival: Storage, by: Writer) -> None:
    """Mark all of ``rival``, which is all written, as lost; ``by`` says by which write."""
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


def _lose(rival: Storage, place: Place, hit: NDArray[np.bool_] | None, by: Writer) -> None:
    """Mark the written units of ``rival`` with a byte in ``hit`` as lost; ``by`` says by which write.

    ``hit``: the overwritten bytes of ``place``, in one row if they are the same in all its partitions; None: all bytes.
    If these are all partitions of the rival, its marks remain alike, and one row stands for all.
    """
    rows, columns = place
    if columns.start == columns.stop:
        return
    alike = (hit is None or len(hit) == 1) and rows.stop - rows.start == rival.shape[0]
    mask = rival.partition_mask() if alike else None
    if mask is None:
        mask, alike = rival.written_mask(), False
    rows = slice(None) if alike else rows
    units, inside = _touched(columns, rival.unit)
    part = mask.reshape(1 if alike else rival.shape[0], -1)[rows, units]
    gone = part.copy() if hit is None else part & _any_byte(hit, inside, rival.unit)
    count = int(np.count_nonzero(gone))
    if count == 0:
        return
    lost = _lost_units(rival) if alike else _in_all_rows(rival)
    lost[rows, units] |= gone
    rival.lost_to = by
    if rival.started is not None:
        _end_products(rival, rows, units, gone)
    part ^= gone
    rival.missing += count * (rival.shape[0] if alike else 1)
    if rival.missing == rival.raw.size // rival.unit:
        rival.mask = None
        _empty(rival)


def _end_products(rival: Storage, rows: slice, units: slice, gone: NDArray[np.bool_]) -> None:
    """Record that elements of ``rival`` with a unit in ``gone`` were not written by a matmul last."""
    width = rival.dtype.itemsize // rival.unit
    elements, inside = _touched(units, width)
    started = rival.started_mask().reshape(rival.shape[0], -1)[rows, elements]
    started &= ~_any_byte(gone, inside, width)


def _touched(columns: slice, width: int) -> tuple[slice, slice]:
    """Return the columns of ``width`` that hold all of ``columns``, and where in them ``columns`` begins and ends."""
    first, last = columns.start // width, -(-columns.stop // width)
    skipped = columns.start - first * width
    return slice(first, last), slice(skipped, (last - first) * width)


def _any_byte(marks: NDArray[np.bool_], inside: slice, width: int) -> NDArray[np.bool_]:
    """Return one bool for every ``width`` columns: whether one of its marks is True.

    ``marks`` begin at the column ``inside.start``; the last column is ``inside.stop - 1``.
    """
    wide = np.zeros((len(marks), inside.stop), np.bool_)
    wide[:, inside.start : inside.start + marks.shape[1]] = marks
    return wide.view(f"u{width}") != 0


def refuse_lost(tensor: NkiTensor, operand: str) -> None:
    """Raise :class:`OverlapError` if a rival was written over an element of ``tensor``."""
    storage = tensor._storage
    if storage.lost is None:
        return
    if tensor.dtype.itemsize < storage.unit:
        storage.split_mask(tensor.dtype.itemsize)
    lost = over(tensor, _in_all_rows(storage), storage.unit)
    if lost.any():
        assert storage.lost_to is not None
        writer, spot = storage.lost_to
        count = int(np.count_nonzero(lost.any(axis=-1) if lost.ndim > tensor.ndim else lost))
        raise OverlapError(
            operand,
            "a tensor over which no other tensor was written",
            f"{count} of {tensor.size} elements of {_label(storage)} overwritten by {writer}, written at {line_of(spot)}",
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
        f"{shared} of {to.size} bytes of dst in src: {_label(a)} and {_label(b)}",
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
