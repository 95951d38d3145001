"""Race detection: find accesses of two cores to shared HBM whose order is undefined.

Only the two physical cores of one rank (LNC 2) share memory, and only ``nl.shared_hbm``. Two operations order their
accesses: a ``core_barrier`` those to its ``data``, and a collective those to its sources and destinations. All views of a
tensor are the same tensor here. ``sendrecv`` orders only the tiles that it moves, and what depends on them
(:mod:`nki_impl.sim.machine.dependence`). The documentation of ``core_barrier``
calls ``data`` the shared data to synchronise on: on the device, an instruction waits only for those that access the same
data, so a barrier on K does not wait for writes to V.

For one tensor, the time between two such operations is a *phase*. Both cores are always in the same phase. Therefore:

- two accesses of different cores in different phases are ordered;
- two accesses of different cores in one phase are not ordered unless the later one depends on the earlier one by a
  ``sendrecv``, and are a race if either of them is a write.

A barrier on T also waits for what T was computed from, and no instruction of either core passes it. So if a core reads
K, then writes T, and then meets the other core at a barrier on T, the other core may overwrite K. The detector assumes
that T depends on every earlier read, and forgets these reads at the barrier. It never forgets a write to another tensor.

Both cores may write the same bits to the same place in one phase: each may set up the same table, or fill it with zeros
and then write the same entries. :mod:`nki_impl.sim.machine.rewrites` says when this is no race. The verdict depends
neither on which core ran first nor on the values, with this one exception.

A collective belongs to the phase that it ends. From the moment that a core issues it until it is complete, its sources
are being read and its destinations written. Anywhere in that phase,

- the other core must not write a source;
- the other core must neither read nor write a destination.

Within one core the program order applies: instructions after a collective wait for its data.

For each storage the detector keeps one byte per element, with a bit for each kind of access by each core. The bits are
reset when a phase begins. With one core per rank nothing is checked.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence

import numpy as np

from nki_impl.sim.errors import RaceError, RaceWarning, kernel_line
from nki_impl.sim.machine.core import Core
from nki_impl.sim.machine.dependence import Dependence
from nki_impl.sim.machine.ledger import (
    ANY,
    COLLECTIVE_READ,
    COLLECTIVE_WRITE,
    READ,
    WRITE,
    Access,
    Chosen,
    Ledger,
    Marks,
    bytes_of,
    ledger_of,
    window,
)
from nki_impl.sim.machine.rewrites import Rewrite, forget_reads, own_read, remaining
from nki_impl.sim.memory.storage import SHARED_HBM, Storage
from nki_impl.sim.tensor.patterns import over
from nki_impl.sim.tensor.views import NkiTensor


class UnclearRace(RaceError):
    """A race that may be none if dependences are followed: :func:`~nki_impl.sim.machine.launch.run_ranks` runs again."""


class Detector:
    """The race detector of one rank: it checks every access of its two cores to shared HBM.

    ``only_warn``: whether a race is a :class:`RaceWarning` instead of a :class:`RaceError`. ``follow``: whether to follow
    dependences, which only ``sendrecv`` needs, and which takes time: without it, a race after a sendrecv is an
    :class:`UnclearRace`.
    """

    def __init__(self, only_warn: bool = False, follow: bool = True) -> None:
        self.dependence = Dependence() if follow else None
        self._exchanged = False
        self._rewrite: Rewrite | None = None
        self._accessed: weakref.WeakSet[Storage] = weakref.WeakSet()
        self._only_warn = only_warn
        self._warned: set[tuple[str, str, str]] = set()

    def at_exchange(self) -> None:
        """Pass on what both cores follow, which meet in ``sendrecv``."""
        self._exchanged = True
        if self.dependence is not None:
            self.dependence.meet()

    def at_barrier(self, storage: Storage) -> None:
        """Begin a new phase of ``storage``, and forget reads of other tensors that its new values depend on."""
        ledger = storage.shadow
        if isinstance(ledger, Ledger):
            for core in (0, 1):
                writes = [a.index for a in ledger.log if a.core == core and a.kind == WRITE]
                for other in list(self._accessed) if writes else ():
                    if isinstance(other.shadow, Ledger):
                        forget_reads(other.shadow, core, writes[-1])
        self.order((storage,))

    def order(self, storages: Iterable[Storage]) -> None:
        """Begin a new phase of these storages, because both cores have met to order them; raises RaceError."""
        self.settle()
        for storage in storages:
            self._end_phase(storage)
            storage.shadow = None
            self._accessed.discard(storage)

    def finish(self) -> None:
        """End the phases of all storages, because both cores have finished; raises RaceError."""
        self.settle()
        for storage in list(self._accessed):
            self._end_phase(storage)

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
        """Check the last rewrite; called when its bytes are in memory. Raises :class:`RaceError`."""
        rewrite = self._rewrite
        if rewrite is not None:
            self._rewrite = None
            ledger, access = rewrite.ledger, rewrite.access
            places = _places(ledger, access, rewrite.clash())
            self._refuse(rewrite.tensor.name, access, places, ledger, READ | WRITE)

    def _note(self, core: Core, tensor: NkiTensor, kind: int) -> None:
        """Mark one access, and compare it with the other core's accesses in this phase; raises RaceError."""
        ledger = ledger_of(tensor)
        self._accessed.add(tensor._storage)
        mine, other = core.core, 1 - core.core
        marks = over(tensor, ledger.marks, ledger.unit)
        start = tensor.byte_offset // ledger.unit
        follows = 0 if self.dependence is None else self.dependence.access(mine, core.index)
        line, shape = kernel_line(), marks.shape
        access = Access(
            mine, core.index, kind, core.operation, line, start, shape, marks.strides, follows
        )
        present = int(np.bitwise_or.reduce(marks, axis=None))
        if present & (ANY << other):
            self._compare(tensor, marks, access, ledger)
        if kind == WRITE and (present & (WRITE | WRITE << 1) or ledger.last is not None):
            own, others = (marks & np.uint8(WRITE << c) != 0 for c in (mine, other))
            before = bytes_of(tensor, tensor._storage.raw).copy()
            self._rewrite = Rewrite(tensor, before, own, others, access, ledger)
        if kind in (READ, COLLECTIVE_READ) and present & (WRITE << mine):
            # A core may read what it has written itself.
            foreign = (marks & np.uint8(WRITE << mine)) == 0
            places = _places(ledger, access, own_read(tensor, ledger, mine, marks))
            self._refuse(tensor.name, access, places, ledger, WRITE)
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
        else:
            foreign = READ | WRITE if access.kind == COLLECTIVE_WRITE else ANY & ~WRITE
            clash = (marks & np.uint8((foreign << other) & 0xFF)) != 0
        self._refuse(tensor.name, access, _places(ledger, access, clash), ledger, foreign)

    def _end_phase(self, storage: Storage) -> None:
        """Raise RaceError if what remains in ``storage`` depends on which core wrote last."""
        ledger = storage.shadow
        places = remaining(ledger) if isinstance(ledger, Ledger) else None
        if places is not None:
            assert isinstance(ledger, Ledger)
            writes = (a for a in reversed(ledger.log) if a.kind == WRITE)
            last = next(access for access in writes if window(places, access).any())
            self._refuse(storage.name, last, places, ledger, WRITE)

    def _refuse(
        self, name: str | None, access: Access, places: Chosen | None, ledger: Ledger, kinds: int
    ) -> None:
        """Raise RaceError, or warn, if there are ``places`` of the storage where ``access`` is a race.

        The message names the other core's last access, of a kind in ``kinds``, to any of these places.
        """
        if places is None:
            return
        others = [
            other
            for other in reversed(ledger.log)
            if other.core != access.core and other.kind & kinds and window(places, other).any()
        ]
        apart = [other for other in others if not self._is_ordered(other, access)]
        if not apart:
            return
        earlier = apart[0]
        unclear = self._exchanged and self.dependence is None
        error = (UnclearRace if unclear else RaceError)(
            name or "an unnamed tensor",
            "a core_barrier or a collective on this tensor between the accesses of the two cores to it",
            f"{access}, {earlier}, and nothing orders the two; {int(np.count_nonzero(places))} elements",
            f"put nisa.core_barrier({name or 'the tensor'}, (0, 1)) between the two",
            operation=access.operation,
            line=access.line,
        )
        if not self._only_warn:
            raise error
        one, two = sorted((access.line, earlier.line))
        pair = name or "", one, two
        if pair not in self._warned:
            self._warned.add(pair)
            file, _, number = access.line.rpartition(":")
            warnings.warn_explicit(str(error), RaceWarning, file or "?", int(number or 0), "kernel")

    def _is_ordered(self, earlier: Access, access: Access) -> bool:
        if self.dependence is None:
            return False
        return bool(self.dependence.bit(earlier.core, earlier.index) & access.follows)


def _places(ledger: Ledger, access: Access, clash: Chosen) -> Chosen | None:
    """Return which places of the storage ``clash``, a part of those that ``access`` covers, marks; None if none."""
    if not clash.any():
        return None
    places = np.zeros(ledger.marks.shape, np.bool_)
    window(places, access)[...] = clash
    return places


def _watched(tensor: NkiTensor) -> bool:
    """Return whether both cores can access the tensor and the kernel may write it."""
    return tensor._storage.buffer is SHARED_HBM and not tensor._storage.read_only
