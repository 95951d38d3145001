"""Race detection: find accesses of two cores to shared HBM whose order is undefined.

Only the two physical cores of one rank (LNC 2) share memory, and only ``nl.shared_hbm``. Two operations order their
accesses: a ``core_barrier`` those to its ``data``, and a collective those to its sources and destinations. All views of a
tensor are the same tensor here. ``sendrecv`` orders only the tiles that it moves. The documentation of ``core_barrier``
calls ``data`` the shared data to synchronise on: on the device, an instruction waits only for those that access the same
data, so a barrier on K does not wait for writes to V.

For one tensor, the time between two such operations is a *phase*. Both cores are always in the same phase. Therefore:

- two accesses of different cores in different phases are ordered;
- two accesses of different cores in one phase are not ordered, and are a race if either of them is a write.

A barrier on T also waits for what T was computed from, and no instruction of either core passes it. So if a core reads
K, then writes T, and then meets the other core at a barrier on T, the other core may overwrite K. The detector assumes
that T depends on every earlier read, and forgets these reads at the barrier. It never forgets a write to another tensor.

The verdict depends neither on which core ran first nor on the values, with one exception. Both cores may write the same
bits to the same place (each may set up the same table, for example), and each core may then read the bits that it
wrote.

A collective belongs to the phase that it ends. From the moment that a core issues it until it is complete, its sources
are being read and its destinations written. Anywhere in that phase,

- the other core must not write a source;
- the other core must neither read nor write a destination.

Within one core the program order applies: instructions after a collective wait for its data.

For each storage the detector keeps one byte per element, with a bit for each kind of access by each core. The bits are
reset when a phase begins. With one core per rank nothing is checked.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nki_impl.sim.errors import RaceError, kernel_line
from nki_impl.sim.machine.core import Core
from nki_impl.sim.memory.storage import MemoryRegion, Storage
from nki_impl.sim.tensor.patterns import over
from nki_impl.sim.tensor.views import NkiTensor

# One bit for core 0; shifted left by one for core 1.
READ, WRITE, COLLECTIVE_READ, COLLECTIVE_WRITE = 1, 4, 16, 64
_ANY = READ | WRITE | COLLECTIVE_READ | COLLECTIVE_WRITE
_VERBS = {
    READ: "reads",
    WRITE: "writes",
    COLLECTIVE_READ: "sends by a collective",
    COLLECTIVE_WRITE: "receives by a collective",
}
Marks = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Access:
    """One access in the current phase, kept so that the message of a race can name it.

    ``index``: the number of the instruction in the program of the core.
    """

    core: int
    index: int
    kind: int
    operation: str
    line: str
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __str__(self) -> str:
        return f"core {self.core} {_VERBS[self.kind]} in {self.operation} ({self.line})"


@dataclass(eq=False, slots=True)
class Ledger:
    """The accesses to one storage in its phase: a byte of ``marks`` for each ``unit`` bytes, and ``log``, a list."""

    unit: int
    marks: Marks
    log: list[Access] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Rewrite:
    """A write over data that the other core wrote in this phase; it is allowed if it changes no bit."""

    tensor: NkiTensor
    before: NDArray[np.uint8]
    clash: NDArray[np.bool_]
    access: Access
    ledger: Ledger


class Detector:
    """The race detector of one rank: it checks every access of its two cores to shared HBM."""

    def __init__(self) -> None:
        self._rewrite: Rewrite | None = None
        self._accessed: weakref.WeakSet[Storage] = weakref.WeakSet()

    def at_barrier(self, storage: Storage) -> None:
        """Begin a new phase of ``storage``, and forget reads of other tensors that its new values depend on."""
        ledger = storage.shadow
        if isinstance(ledger, Ledger):
            for core in (0, 1):
                writes = [a.index for a in ledger.log if a.core == core and a.kind == WRITE]
                for other in list(self._accessed) if writes else ():
                    if isinstance(other.shadow, Ledger):
                        _forget_reads(other.shadow, core, writes[-1])
        self.order((storage,))

    def order(self, storages: Iterable[Storage]) -> None:
        """Begin a new phase of these storages, because both cores have met to order them."""
        self.settle()
        for storage in storages:
            storage.shadow = None
            self._accessed.discard(storage)

    def on_access(self, core: Core, tensor: NkiTensor, is_write: bool) -> None:
        """Check one read or write; raises :class:`RaceError`."""
        self.settle()
        if _watched(tensor):
            self._note(core, tensor, WRITE if is_write else READ)

    def on_collective(
        self, core: Core, reads: Sequence[NkiTensor], writes: Sequence[NkiTensor]
    ) -> None:
        """Check the operands of a collective that ``core`` issues; raises :class:`RaceError`."""
        self.settle()
        for tensors, kind in ((reads, COLLECTIVE_READ), (writes, COLLECTIVE_WRITE)):
            for tensor in tensors:
                if _watched(tensor):
                    self._note(core, tensor, kind)

    def settle(self) -> None:
        """Check whether the last rewrite changed a bit; called when its bytes are written. Raises :class:`RaceError`."""
        rewrite = self._rewrite
        if rewrite is None:
            return
        self._rewrite = None
        changed = _bytes_of(rewrite.tensor) != rewrite.before
        clash = rewrite.clash & changed.any(axis=-1)
        if clash.any():
            self._refuse(rewrite.tensor, rewrite.access, clash, rewrite.ledger, WRITE)

    def _note(self, core: Core, tensor: NkiTensor, kind: int) -> None:
        """Mark one access, and compare it with the other core's accesses in this phase; raises RaceError."""
        ledger = self._ledger(tensor)
        mine, other = core.core, 1 - core.core
        marks = over(tensor, ledger.marks, ledger.unit)
        start = tensor.byte_offset // ledger.unit
        access = Access(
            mine, core.index, kind, core.operation, kernel_line(), start, marks.shape, marks.strides
        )
        present = int(np.bitwise_or.reduce(marks, axis=None))
        if present & (_ANY << other):
            self._compare(tensor, marks, access, ledger)
        if kind in (READ, COLLECTIVE_READ) and present & (WRITE << mine):
            # A core may read what it has written itself.
            foreign = (marks & np.uint8(WRITE << mine)) == 0
            marks |= foreign.view(np.uint8) * np.uint8(kind << mine)
        else:
            marks |= np.uint8(kind << mine)
        ledger.log.append(access)

    def _compare(self, tensor: NkiTensor, marks: Marks, access: Access, ledger: Ledger) -> None:
        mine, other = access.core, 1 - access.core
        own = marks & np.uint8(WRITE << mine)
        if access.kind in (READ, COLLECTIVE_READ):
            foreign = WRITE if access.kind == COLLECTIVE_READ else WRITE | COLLECTIVE_WRITE
            clash = (marks & np.uint8((foreign << other) & 0xFF)) != 0
            clash &= (own == 0) | ((marks & np.uint8(COLLECTIVE_WRITE << other)) != 0)
            self._refuse(tensor, access, clash, ledger, foreign)
        elif access.kind == COLLECTIVE_WRITE:
            clash = (marks & np.uint8((READ | WRITE) << other)) != 0
            self._refuse(tensor, access, clash, ledger, READ | WRITE)
        else:
            foreign = READ | COLLECTIVE_READ | COLLECTIVE_WRITE
            clash = (marks & np.uint8((foreign << other) & 0xFF)) != 0
            self._refuse(tensor, access, clash, ledger, foreign)
            again = (marks & np.uint8(WRITE << other)) != 0
            if again.any():
                self._rewrite = Rewrite(
                    tensor, _bytes_of(tensor).copy(), _per_element(again, tensor), access, ledger
                )

    def _ledger(self, tensor: NkiTensor) -> Ledger:
        """Return the ledger of the tensor's storage for its current phase."""
        storage: Storage = tensor._storage
        ledger = storage.shadow
        if not isinstance(ledger, Ledger):
            unit = storage.dtype.itemsize
            ledger = Ledger(unit, np.zeros(storage.raw.size // unit, np.uint8))
            storage.shadow = ledger
            self._accessed.add(storage)
        if tensor.dtype.itemsize < ledger.unit:
            # A view with a smaller dtype: one mark per smaller unit from here on.
            unit, times = tensor.dtype.itemsize, ledger.unit // tensor.dtype.itemsize
            log = [_finer(access, times) for access in ledger.log]
            marks = np.repeat(ledger.marks, times)
            ledger = Ledger(unit, marks, log)
            storage.shadow = ledger
        return ledger

    def _refuse(
        self,
        tensor: NkiTensor,
        access: Access,
        clash: NDArray[np.bool_],
        ledger: Ledger,
        kinds: int,
    ) -> None:
        """Raise RaceError for the elements in ``clash``.

        The error names the other core's last access, of a kind in ``kinds``, to any of these elements.
        """
        if not clash.any():
            return
        mine = np.zeros(ledger.marks.shape, np.bool_)
        own = _window(mine, access)
        own[...] = clash if clash.shape == own.shape else clash[..., None]
        earlier = next(
            other
            for other in reversed(ledger.log)
            if other.core != access.core and other.kind & kinds and _window(mine, other).any()
        )
        name = tensor.name or "an unnamed tensor"
        raise RaceError(
            name,
            "a core_barrier or a collective on this tensor between the accesses of the two cores to it",
            f"{access}, {earlier}, and nothing orders the two; {int(np.count_nonzero(mine))} elements",
            f"put nisa.core_barrier({tensor.name or 'the tensor'}, (0, 1)) between the two",
            operation=access.operation,
        )


def _watched(tensor: NkiTensor) -> bool:
    """Return whether both cores can access the tensor and the kernel may write it."""
    return tensor._storage.buffer is MemoryRegion.shared_hbm and not tensor._storage.read_only


def _forget_reads(ledger: Ledger, core: int, before: int) -> None:
    """Remove the reads of ``core`` with an index below ``before`` from the log and the marks."""
    kept = [a for a in ledger.log if a.core != core or a.kind != READ or a.index >= before]
    if len(kept) == len(ledger.log):
        return
    ledger.log = kept
    ledger.marks &= np.uint8(0xFF ^ (READ << core))
    for access in kept:
        if access.core == core and access.kind == READ:
            marks = _window(ledger.marks, access)
            foreign = (marks & np.uint8(WRITE << core)) == 0
            marks |= foreign.view(np.uint8) * np.uint8(READ << core)


def _window(array: NDArray, access: Access) -> NDArray[np.bool_]:
    """Return the part of ``array`` that ``access`` covers; ``array`` has one entry per unit of the storage."""
    return np.ndarray(access.shape, array.dtype, array, access.start, access.strides)


def _finer(access: Access, times: int) -> Access:
    """Return ``access`` with its place given in units that are ``times`` times smaller."""
    shape, strides = (*access.shape, times), (*(times * s for s in access.strides), 1)
    return Access(
        access.core,
        access.index,
        access.kind,
        access.operation,
        access.line,
        access.start * times,
        shape,
        strides,
    )


def _bytes_of(tensor: NkiTensor) -> NDArray[np.uint8]:
    """Return the bytes of the tensor's elements, with an additional last dimension for the bytes of one element.

    Unlike floating-point numbers, bytes can be compared even if an element is NaN.
    """
    array = tensor._array
    strides = (*array.strides, 1)
    shape = (*array.shape, tensor.dtype.itemsize)
    return np.ndarray(shape, np.uint8, tensor._storage.raw, tensor.byte_offset, strides)


def _per_element(marks: NDArray[np.bool_], tensor: NkiTensor) -> NDArray[np.bool_]:
    """Return one bool for each element of ``tensor``: True if any of its ``marks`` is True."""
    return np.asarray(marks.any(axis=-1)) if marks.ndim > tensor.ndim else marks
