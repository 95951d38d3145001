"""Race detection: find accesses of two cores to shared HBM whose order is undefined.

Only the two physical cores of one rank (LNC 2) share memory, and only ``nl.shared_hbm``. Two operations order their
accesses: a ``core_barrier`` those to its ``data``, and a collective those to its sources and destinations. All views of a
tensor are the same tensor here. The documentation of ``core_barrier`` calls ``data`` the shared data to synchronise on: on
the device, an instruction waits only for those that access the same data, so a barrier on K does not wait for writes to V.

For one tensor, the time between two such operations is a *phase*. Both cores are always in the same phase. Therefore:

- two accesses of different cores in different phases are ordered;
- two accesses of different cores in one phase are a race if either of them is a write, and neither depends on the other.

Data pass dependences on through barriers and collectives on other tensors and through ``sendrecv``
(:mod:`nki_impl.sim.machine.dependence`). A barrier on T also waits for what T was computed from, and no instruction of
either core passes it. So if a core reads K, computes T from it, and then meets the other core at a barrier on T, the
other core may overwrite K.

Some accesses are ordered only if the compiler keeps an order of the program that it may not have to keep: one is complete
before a ``sendrecv``, and the other comes after it but does not depend on it; or a core reads K and then writes T, which
does not depend on K, before a barrier on T. This is a :class:`RaceWarning`.

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

import bisect
import warnings
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from nki_impl.sim.errors import RaceError, RaceWarning, kernel_line
from nki_impl.sim.machine.core import Core
from nki_impl.sim.machine.dependence import Graph, Program
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
from nki_impl.sim.machine.rewrites import Rewrite, own_read, remaining, written_once
from nki_impl.sim.machine.turns import Worker
from nki_impl.sim.memory.storage import SHARED_HBM, Storage
from nki_impl.sim.tensor.patterns import over
from nki_impl.sim.tensor.views import NkiTensor


@dataclass(frozen=True, slots=True)
class Doubt:
    """An access that may be a race with any of ``others``, earlier accesses of the other core, at ``count`` elements."""

    name: str
    access: Access
    others: Sequence[Access]
    count: int


class Detector:
    """The race detector of one rank: it checks every access of its two cores to shared HBM.

    ``only_warn``: whether a race is a :class:`RaceWarning` instead of a :class:`RaceError`. ``graph``: the dependences of
    the launch. ``programs``: the two cores in the graph, which the launch sets. Races are reported by :meth:`report` when
    the run has ended, because ``depends_on`` may add to the graph until then.
    """

    def __init__(self, graph: Graph, only_warn: bool = False) -> None:
        self.programs: list[Program] = []
        self._graph = graph
        self._doubts: list[Doubt] = []
        self._reads: tuple[list[int], list[int]] = ([], [])
        self._rewrite: Rewrite | None = None
        self._accessed: weakref.WeakSet[Storage] = weakref.WeakSet()
        self._only_warn = only_warn
        self._warned: set[tuple[str, str, str]] = set()

    def read_before(self, storage: Storage) -> list[int]:
        """Return the nodes of reads of shared memory after which the same core has written ``storage`` in its phase.

        Each read is returned once, because what follows this barrier follows it.
        """
        ledger = storage.shadow
        log = ledger.log if isinstance(ledger, Ledger) else []
        found = []
        for core, reads in enumerate(self._reads):
            written = (a.node for a in reversed(log) if a.core == core and a.kind == WRITE)
            count = bisect.bisect_left(reads, next(written, 0))
            found += reads[:count]
            del reads[:count]
        return found

    def order(self, storages: Iterable[Storage]) -> None:
        """Begin a new phase of these storages, because both cores have met to order them."""
        self.settle()
        for storage in storages:
            self._end_phase(storage)
            storage.shadow = None
            self._accessed.discard(storage)

    def finish(self) -> None:
        """End the phases of all storages, because both cores have finished."""
        self.settle()
        for storage in list(self._accessed):
            self._end_phase(storage)

    def on_access(self, core: Core, tensor: NkiTensor, is_write: bool) -> None:
        """Check one read or write."""
        self.settle()
        if _watched(tensor):
            self._note(core, tensor, WRITE if is_write else READ)

    def on_collective(
        self, core: Core, reads: Sequence[NkiTensor], writes: Sequence[NkiTensor]
    ) -> None:
        """Check the operands of a collective that ``core`` issues."""
        self.settle()
        for tensors, kind in ((reads, COLLECTIVE_READ), (writes, COLLECTIVE_WRITE)):
            for tensor in tensors:
                if _watched(tensor):
                    self._note(core, tensor, kind)

    def settle(self) -> None:
        """Check the last rewrite; called when its bytes are in memory."""
        rewrite = self._rewrite
        if rewrite is not None:
            self._rewrite = None
            ledger, access = rewrite.ledger, rewrite.access
            places = _places(ledger, access, rewrite.clash())
            self._refuse(rewrite.tensor.name, access, places, ledger, READ | WRITE)

    def _note(self, core: Core, tensor: NkiTensor, kind: int) -> None:
        """Mark one access, and compare it with the other core's accesses in this phase."""
        ledger = ledger_of(tensor)
        self._accessed.add(tensor._storage)
        mine, other = core.core, 1 - core.core
        marks = over(tensor, ledger.marks, ledger.unit)
        start = tensor.byte_offset // ledger.unit
        node = self.programs[mine].node(core.index)
        if kind == READ:
            self._reads[mine].append(node)
        line, shape = kernel_line(), marks.shape
        access = Access(mine, kind, core.operation, line, start, shape, marks.strides, node)
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
        """Find a race if what remains in ``storage``, or a read of it, depends on which core wrote last.

        A core that reads what it has written itself is checked here, because it finds the same if the other core has
        written the same bits.
        """
        ledger = storage.shadow
        places = remaining(ledger) if isinstance(ledger, Ledger) else None
        if places is not None:
            assert isinstance(ledger, Ledger)
            writes = (a for a in reversed(ledger.log) if a.kind == WRITE)
            last = next(access for access in writes if window(places, access).any())
            self._refuse(storage.name, last, places, ledger, WRITE)
            once = written_once(ledger, places)
            for read in (access for access in ledger.log if access.kind == READ):
                seen = np.zeros_like(once)
                window(seen, read)[...] = window(once, read)
                self._refuse(storage.name, read, seen if seen.any() else None, ledger, WRITE)

    def _refuse(
        self, name: str | None, access: Access, places: Chosen | None, ledger: Ledger, kinds: int
    ) -> None:
        """Keep for :meth:`report` that there are ``places`` of the storage where ``access`` may be a race.

        The message names the other core's last access, of a kind in ``kinds``, to any of these places.
        """
        if places is None:
            return
        others = [
            other
            for other in reversed(ledger.log)
            if other.core != access.core and other.kind & kinds and window(places, other).any()
        ]
        others = self._unordered(access, others, program_order=False)
        if others:
            self._doubts.append(Doubt(name or "", access, others, int(np.count_nonzero(places))))

    def report(self) -> None:
        """Raise RaceError, or warn, for the accesses that no dependence orders; called when the run has ended."""
        for doubt in self._doubts:
            apart = self._unordered(doubt.access, doubt.others, program_order=False)
            reordered = self._unordered(doubt.access, apart, program_order=True)
            if reordered and not self._only_warn:
                raise race(doubt, reordered[0])
            for earlier in (reordered or apart)[:1]:
                self._warn(doubt, earlier, in_order=not reordered)

    def _unordered(
        self, access: Access, others: Sequence[Access], program_order: bool
    ) -> list[Access]:
        """Return those of ``others`` that ``access`` does not follow, and that do not follow it."""
        graph, at = self._graph, access.node
        oldest = min((other.node for other in others), default=0)
        before = graph.ancestors(at, oldest, program_order) if others else set()
        return [
            other
            for other in others
            if other.node not in before
            and (
                (other.node < at and not graph.is_amended)
                or at not in graph.ancestors(other.node, at, program_order)
            )
        ]

    def _warn(self, doubt: Doubt, earlier: Access, in_order: bool) -> None:
        one, two = sorted((doubt.access.line, earlier.line))
        pair = doubt.name, one, two
        if pair in self._warned:
            return
        self._warned.add(pair)
        file, _, number = doubt.access.line.rpartition(":")
        text = in_program_order(doubt, earlier) if in_order else str(race(doubt, earlier))
        warnings.warn_explicit(text, RaceWarning, file or "?", int(number or 0), "kernel")


def note_meeting(members: Sequence[Worker], barrier: Storage | None = None) -> None:
    """Tell the race detectors that ``members`` have met in a ``core_barrier`` on ``barrier``, or in an exchange."""
    detector = members[0].races
    if detector is not None:
        listed = [] if barrier is None else detector.read_before(barrier)
        programs = [one.races.programs[one.core] for one in members if one.races is not None]
        Program.meet(programs, barrier is not None, listed)


def race(doubt: Doubt, earlier: Access) -> RaceError:
    """Return the error for an access that nothing orders after ``earlier``, an access of the other core."""
    name, access = doubt.name, doubt.access
    return RaceError(
        name or "an unnamed tensor",
        "a core_barrier or a collective on this tensor between the accesses of the two cores to it",
        f"{access}, {earlier}, and nothing orders the two; {doubt.count} elements",
        f"put nisa.core_barrier({name or 'the tensor'}, (0, 1)) between the two",
        operation=access.operation,
        line=access.line,
    )


def in_program_order(doubt: Doubt, earlier: Access) -> str:
    """Return the warning for an access that follows ``earlier`` only in the order of the program."""
    name = doubt.name or "the tensor"
    return (
        f"{name}: {earlier}, then the two cores meet, then {doubt.access}; {doubt.count} elements. One of the two accesses "
        "is independent of the meeting, so this order holds only if the compiler keeps it. The documentation says "
        "that the order of the program is respected, and also that independent operations may be reordered. "
        f"To be sure of the order, put nisa.core_barrier({name}, (0, 1)) between the two"
    )


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
