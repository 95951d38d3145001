"""The memories of the device: storages, and the capacity of each physical core.

A :class:`Storage` is one allocation. It holds the bytes and, until every element has been written, a mask of the
written elements. Unwritten memory holds any bytes; reading it for arithmetic is an error (see
:mod:`nki_impl.sim.tensor.access`).

The used capacity of SBUF is the number of allocated bytes per partition; if they exceed the capacity, :mod:`.liveness`
decides. PSUM is counted per bank of 2 KiB. A tile that fits into one bank is never split between two banks. A storage is
freed when the last Python reference to its tensor and views is dropped; with CPython's reference counts that moment
depends only on the program.

A kernel may place tensors itself (``address=``). Such tensors keep separate bytes even if their addresses overlap; the
module :mod:`nki_impl.sim.tensor.overlap` finds reads of overwritten data. Together they use as many bytes as the
highest address that any of them reaches.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/about/memory-hierarchy-overview.html
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import Counter
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nki_impl.sim.errors import CapacityError, PartitionError, ShapeError, Spot
from nki_impl.sim.memory.liveness import Lifetimes, collect
from nki_impl.sim.tensor.dtypes import DType

PARTITIONS = 128
PSUM_BANKS = 8
PSUM_BANK_BYTES = 2048
SBUF_PARTITION_BYTES = {2: 192 * 1024, 3: 224 * 1024, 4: 256 * 1024}
"""SBUF bytes per partition by generation (trn1: 2, trn2: 3, trn3: 4)."""
SBUF_USABLE_BYTES = {2: 180224, 3: 212984, 4: 245752}
"""The SBUF bytes per partition that a kernel may use: 16 KiB are reserved, from trn2 on 8 bytes more.

Source: https://github.com/leanprover/KLR, KLR/Trace.lean (total_available_sbuf_size)."""


class MemoryRegion(Enum):
    """A memory of the device (``nl.sbuf``, ``nl.psum``, ``nl.private_hbm``, ``nl.shared_hbm``)."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"


SBUF, PSUM, SHARED_HBM = MemoryRegion.sbuf, MemoryRegion.psum, MemoryRegion.shared_hbm
"""The members that instructions compare with. To look up a member of an Enum takes 20 times as long as such a name in
Python 3.11, and an instruction would do so several times."""

_spare: dict[int, list[NDArray[np.uint8]]] = {}
"""The bytes of freed on-chip tensors, by size, for the next tensors. Fresh memory costs a page fault for every 4 KiB,
which together take as long as a small matrix product."""
_MOST_SPARE = 32
"""The largest number of entries for one size."""
_ONLY_HERE = 2
"""The reference count of an object that only one attribute (and the call that counts) refers to."""


def _new_bytes(size: int) -> NDArray[np.uint8]:
    """Return ``size`` bytes with any content."""
    held = _spare.get(size)
    return held.pop() if held else np.empty(size, np.uint8)


def _marks(count: int, value: bool) -> NDArray[np.bool_]:
    """Return ``count`` bools of one value; np.full takes several times as long for the masks of small tiles."""
    return np.ones(count, np.bool_) if value else np.zeros(count, np.bool_)


class NewMemory:
    """How memory begins. With ``zeros``, it holds zeros and counts as written (RINGSPEC_NKI_UNWRITTEN=zeros)."""

    zeros = False


Place = tuple[slice, slice]
"""Partitions and bytes of a partition."""


Extent = tuple[int, int, int, int]
"""The first partition, one past the last, the first byte of a partition, and one past the last."""


class Site:
    """The memory at one ``extent`` in SBUF or PSUM of a core. All tensors that the kernel places exactly there share it.

    ``filled``: those of its tensors that may hold data. ``near``: the sites that share memory with this one, which is
    one of them. ``trails``: see :mod:`nki_impl.sim.machine.dependence`.
    """

    __slots__ = ("extent", "filled", "near", "trails")

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        self.filled: list[weakref.ref[Storage]] = []
        self.near: list[Near] = []
        self.trails: Any = None  # of machine.dependence, which imports this module


class Near(NamedTuple):
    """A site that shares memory with another: the place ``mine`` of that one is the place ``theirs`` of ``site``.

    ``is_covered``: whether ``theirs`` is all of ``site``.
    """

    site: Site
    mine: Place
    theirs: Place
    is_covered: bool


class Storage:
    """One allocation of ``shape`` and ``dtype`` in ``buffer``.

    ``raw``: the bytes. ``missing``: the number of units that were never written. ``mask``: a bool for each ``unit``
    bytes, True if written; None if nothing or everything has been written. ``alike``: ``mask`` has only the entries of
    one partition, because they are the same in all: most instructions write all partitions of an on-chip tensor. ``widened``: float32 copies of
    matmul operands (see :func:`~nki_impl.sim.tensor.access.read_operand`); None after each write. ``started`` (PSUM): the elements whose last
    write was by a matmul; None if there are none, True if all are. ``owner``: (rank, core), with core None for memory that both cores of a rank share.
    ``read_only``: True for kernel inputs, which cannot be written. ``placed``: (partition, byte) if the kernel chose the
    address. ``site``, ``is_filling``, ``lost`` and ``lost_to``: see :mod:`nki_impl.sim.tensor.overlap`. ``made_at``: the
    call of ``nl.ndarray``; None for other allocations.
    """

    __slots__ = (
        "buffer", "dtype", "shape", "size", "raw", "name", "owner", "is_input", "is_output",
        "read_only", "missing", "mask", "alike", "unit", "started", "account", "placed", "banks", "on_chip",
        "free_size", "partition_bytes", "shadow", "first", "last", "site", "is_filling", "lost", "lost_to", "made_at",
        "widened", "trails", "__weakref__",
    )  # fmt: skip

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        buffer: MemoryRegion,
        name: str = "",
        owner: tuple[int, int | None] = (0, 0),
    ) -> None:
        self.buffer = buffer
        self.dtype = dtype
        self.shape = shape
        self.size = math.prod(shape)
        self.raw = _new_bytes(self.size * dtype.itemsize)
        self.name = name
        self.owner = owner
        self.is_input = False
        self.is_output = False
        self.read_only = False
        self.missing = self.size
        self.mask: NDArray[np.bool_] | None = None
        self.alike = False
        self.widened: dict[tuple[object, ...], NDArray[np.float32] | None] | None = None
        self.unit = dtype.itemsize
        self.started: NDArray[np.bool_] | bool | None = None
        self.account: CoreMemory | None = None
        self.placed: tuple[int, int] | None = None
        self.banks: dict[int, int] = {}
        self.on_chip = buffer is SBUF or buffer is PSUM
        self.free_size = self.size // shape[0]
        self.first = self.last = -1
        self.trails: Any = None  # of machine.dependence, which imports this module
        self.partition_bytes = self.free_size * dtype.itemsize
        """Bytes per partition of an on-chip storage."""
        self.site: Site | None = None
        self.is_filling = False
        self.lost: NDArray[np.bool_] | bool | None = None
        """The lost units, as (partitions, units), in one row if they are the same in all partitions; True: all units."""
        self.lost_to: tuple[object, Spot | None] | None = None
        self.made_at: Spot | None = None
        self.shadow: object = None
        """The race detector's records of this storage."""
        if NewMemory.zeros:
            self.raw[:] = 0
            self.missing = 0

    def written_mask(self) -> NDArray[np.bool_]:
        """Return the mask of written elements, one bool per ``unit`` bytes of all partitions; create it if necessary."""
        if self.mask is None:
            self.mask = _marks(self.raw.size // self.unit, self.missing == 0)
        elif self.alike:
            self.mask = np.tile(self.mask, self.shape[0])
        self.alike = False
        return self.mask

    def partition_mask(self) -> NDArray[np.bool_] | None:
        """Return the mask of one partition if it holds for all of them, or None; create it if necessary."""
        if self.mask is None:
            self.mask = _marks(self.partition_bytes // self.unit, self.missing == 0)
            self.alike = True
        return self.mask if self.alike else None

    def started_mask(self) -> NDArray[np.bool_]:
        """Return the mask of elements whose last write was by a matmul; create it if necessary."""
        if not isinstance(self.started, np.ndarray):
            self.started = _marks(self.size, self.started is True)
        return self.started

    def fill_unwritten(self) -> None:
        """Fill unwritten memory with the byte 0xFF, NaN in every float format, so that it can be shown."""
        if self.missing:
            self.raw[np.repeat(~self.written_mask(), self.unit)] = 0xFF

    def set_all_written(self) -> None:
        """Record that every element has been written."""
        self.missing = 0
        self.mask = None

    def split_mask(self, unit: int) -> None:
        """Use a smaller ``unit`` for the mask, which a view with a smaller dtype needs."""
        if self.mask is not None:
            self.mask = np.repeat(self.mask, self.unit // unit)
        if isinstance(self.lost, np.ndarray):
            self.lost = np.repeat(self.lost, self.unit // unit, axis=1)
        self.missing *= self.unit // unit
        self.unit = unit

    def __del__(self) -> None:
        if self.account is not None:
            self.account.release(self)
            if sys.getrefcount(self.raw) == _ONLY_HERE:
                spare = _spare.setdefault(self.raw.size, [])
                if len(spare) < _MOST_SPARE:
                    spare.append(self.raw)


class CoreMemory:
    """The on-chip allocations of one physical core.

    ``sbuf_high`` and ``psum_high``: the largest use so far, in bytes per partition. ``limit``: the capacity of SBUF in
    bytes per partition, by default the usable size; None means unlimited.
    """

    def __init__(self, generation: int = 3, limit: int | None = 0) -> None:
        self.sbuf_limit = SBUF_USABLE_BYTES[generation] if limit == 0 else limit
        self.sbuf_live = 0
        self.sbuf_high = 0
        self.psum_live = [0] * PSUM_BANKS
        self.psum_high = 0
        self.lifetimes = Lifetimes()
        self._placed: dict[int, int] = {}
        """The number of placed tiles that end at a byte of a partition; ``_placed_high`` is the highest of these bytes."""
        self._placed_high = 0
        self.sbuf_sites: dict[Extent, Site] = {}
        self.psum_sites: dict[Extent, Site] = {}
        """The places that the kernel chose so far."""

    def charge(self, storage: Storage, address: tuple[int, int] | None) -> None:
        """Allocate space for ``storage``; ``address`` = (partition, byte) if the kernel chooses the place.

        Raises :class:`CapacityError` if there is not enough space.
        """
        if storage.buffer is SBUF:
            self._charge_sbuf(storage, address)
        else:
            self._charge_psum(storage, address)
        storage.account = self

    def release(self, storage: Storage) -> None:
        """Free the space of ``storage``."""
        if storage.placed is None and storage.last >= 0:
            psum = storage.buffer is PSUM
            first = storage.first if storage.first >= 0 else storage.last
            self.lifetimes.ended.append(
                (first, storage.last, storage.partition_bytes, psum, storage.shape[0])
            )
        if storage.buffer is not SBUF:
            for bank, count in storage.banks.items():
                self.psum_live[bank] -= count
            return
        if storage.placed is None:
            self.sbuf_live -= storage.partition_bytes
            return
        end = storage.placed[1] + storage.partition_bytes
        self._placed[end] -= 1
        if self._placed[end] == 0:
            del self._placed[end]
            if end == self._placed_high:
                self._placed_high = max(self._placed, default=0)

    def settle(self) -> None:
        """At the end of a launch, raise :class:`CapacityError` unless the tiles fit by their uses."""
        if self.lifetimes.error is not None:
            collect()
            self.lifetimes.settle(
                self.sbuf_live + self._placed_high, self.psum_live, self.sbuf_limit
            )

    def _charge_sbuf(self, storage: Storage, address: tuple[int, int] | None) -> None:
        live, high = self.sbuf_live, self._placed_high
        if address is None:
            live += storage.partition_bytes
        else:
            end = address[1] + storage.partition_bytes
            high = max(high, end)
        if self.sbuf_limit is not None and live + high > self.sbuf_limit:
            error = CapacityError(
                storage.name or "SBUF",
                f"{self.sbuf_limit} bytes per partition of SBUF",
                f"{self.sbuf_live} live, {self._placed_high} placed, {storage.partition_bytes} more",
                "use smaller tiles, or drop the references to tiles that are no longer needed",
            )
            self.lifetimes.full(error, storage.partition_bytes, self.sbuf_limit)
        self.sbuf_live = live
        self.sbuf_high = max(self.sbuf_high, live + high)
        storage.placed = address
        if address is not None:
            self._placed[end] = self._placed.get(end, 0) + 1
            self._placed_high = high

    def _charge_psum(self, storage: Storage, address: tuple[int, int] | None) -> None:
        wanted = storage.partition_bytes
        storage.placed = address
        if address is not None:
            end = address[1] + wanted
            if end > PSUM_BANKS * PSUM_BANK_BYTES:
                raise CapacityError(
                    "address", "16384 bytes per partition of PSUM", end, "place it lower"
                )
            self.psum_high = max(self.psum_high, end)
            return
        if wanted <= PSUM_BANK_BYTES:
            free, share = [], wanted
            for bank, live in enumerate(self.psum_live):
                if live + wanted <= PSUM_BANK_BYTES:
                    free = [bank]
                    break
        else:
            empty = [b for b in range(PSUM_BANKS) if self.psum_live[b] == 0]
            count = -(-wanted // PSUM_BANK_BYTES)
            free = empty[:count] if len(empty) >= count else []
            share = PSUM_BANK_BYTES
        if not free:
            error = CapacityError(
                storage.name or "PSUM",
                f"{PSUM_BANKS} banks of {PSUM_BANK_BYTES} bytes per partition in PSUM",
                f"live bytes by bank {self.psum_live}, {wanted} more",
                "use smaller tiles, or drop the references to tiles that are no longer needed",
            )
            self.lifetimes.full(error, wanted, PSUM_BANKS * PSUM_BANK_BYTES)
        for bank in free:
            self.psum_live[bank] += share
            storage.banks[bank] = share
        self.psum_high = max(self.psum_high, sum(self.psum_live))


class RankMemory:
    """The shared HBM of one rank; if the rank has two cores, both get the same storages.

    The n-th allocation of a name on one core is the same storage as the n-th allocation of that name on the other core.
    All unnamed tensors are treated as if they had one common name.
    """

    def __init__(self, lnc: int = 1) -> None:
        self.lnc = lnc
        self._waiting: dict[tuple[str, int], Storage] = {}
        self._ordinals: Counter[tuple[int, str]] = Counter()

    def allocate(
        self, core: int, shape: tuple[int, ...], dtype: DType, name: str, rank: int
    ) -> Storage:
        """Return the storage of this allocation: a new one, or the one that the other core has already created.

        Raises :class:`ShapeError` if the two cores pass different shapes or dtypes.
        """
        key = (name, self._ordinals[core, name])
        self._ordinals[core, name] += 1
        if key in self._waiting:
            storage = self._waiting.pop(key)
            if storage.shape != shape or storage.dtype != dtype:
                raise ShapeError(
                    name or f"shared_hbm tensor {key[1]}",
                    "both cores of a rank allocate the same shape and dtype",
                    f"{storage.shape} {storage.dtype} and {shape} {dtype}",
                    "name the tensors that only one core allocates",
                )
            return storage
        storage = Storage(shape, dtype, SHARED_HBM, name, (rank, None))
        if self.lnc > 1:
            self._waiting[key] = storage
        return storage


def check_shape(shape: tuple[int, ...], buffer: MemoryRegion) -> None:
    """Raise an error for a shape that ``buffer`` cannot hold.

    It is a :class:`PartitionError` for more than 128 partitions, or for no partition dimension on chip, and a
    :class:`ShapeError` for a length below 1.
    """
    for n in shape or (0,):
        if type(n) is not int and not isinstance(n, (int, np.integer)) or n < 1:
            raise ShapeError(
                "shape", "positive integers, at least one", shape, "pass a tuple of lengths"
            )
    if buffer is SBUF or buffer is PSUM:
        if len(shape) < 2:
            raise PartitionError(
                "shape",
                "a partition and a free dimension for an on-chip tensor",
                shape,
                "use (P, 1)",
            )
        if shape[0] > PARTITIONS:
            raise PartitionError(
                "shape",
                f"at most {PARTITIONS} partitions (dimension 0)",
                shape[0],
                "split it into tiles",
            )
