"""When both cores write the same bytes of shared HBM, and nothing orders the two.

This is no race if no order of the writes can change what a core reads or what remains. For one place in one phase, with
writes by both cores:

- what remains at the end of the phase is the last write of one of the cores, so both must have written the same bits
  last;
- a core that reads the place after it has written it finds either what it wrote last or what the other core wrote, so
  the other core must have written nothing else, neither earlier nor later.

So both cores may fill a table with zeros and then write the same entries, as AWS's router_topk does, and each core may
read a table that both write once. A core that reads a place before it has written it is handled in
:mod:`nki_impl.sim.machine.races`.

Three facts about a place are kept for each core. Only the order of the core's own instructions determines them:
``VARIED``: it has written different bits; ``OWN_READ``: it has read what it wrote last; ``STALE``: it has read what it
wrote, and then written other bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nki_impl.sim.machine.ledger import WRITE, Access, Chosen, Ledger, Marks, bytes_of
from nki_impl.sim.tensor.patterns import over
from nki_impl.sim.tensor.views import NkiTensor

# One bit for core 0; shifted left by one for core 1.
VARIED, OWN_READ, STALE = 1, 4, 16


@dataclass(eq=False, slots=True)
class Rewrite:
    """A write to places that a core has written before in this phase, before its bytes are in memory.

    ``before``: the bytes in memory. ``mine``, ``others``: the places that this core and the other core have written.
    """

    tensor: NkiTensor
    before: NDArray[np.uint8]
    mine: Chosen
    others: Chosen
    access: Access
    ledger: Ledger

    def clash(self) -> Chosen:
        """Record what the write has changed, and return the places where it is a race with earlier accesses."""
        ledger, core = self.ledger, self.access.core
        raw = self.tensor._storage.raw
        now = bytes_of(self.tensor, raw)
        mine_before = (
            self.before if ledger.last is None else bytes_of(self.tensor, ledger.last[core])
        )
        changed = self.mine & _differ(mine_before, now, self.mine.shape)
        if changed.any():
            history = _history(self.tensor, ledger)
            stale = changed & (history & (OWN_READ << core) != 0)
            history |= changed * np.uint8(VARIED << core) | stale * np.uint8(STALE << core)
            history &= ~(stale * np.uint8(OWN_READ << core))
        if ledger.last is not None:
            bytes_of(self.tensor, ledger.last[core])[...] = now
        elif (self.others & _differ(self.before, now, self.others.shape)).any():
            ledger.last = (raw.copy(), raw.copy())
            bytes_of(self.tensor, ledger.last[1 - core])[...] = self.before
        return _undetermined(self.tensor, ledger, self.others)


def own_read(tensor: NkiTensor, ledger: Ledger, core: int, marks: Marks) -> Chosen:
    """Record that ``core`` reads what it wrote; return the places where the other core may have written other bits."""
    own = (marks & np.uint8(WRITE << core)) != 0
    history = _history(tensor, ledger)
    history |= own * np.uint8(OWN_READ << core)
    both = own & ((marks & np.uint8(WRITE << (1 - core))) != 0)
    return _undetermined(tensor, ledger, both)


def remaining(ledger: Ledger) -> Chosen | None:
    """Return the places of the storage where the cores wrote different bits last, or None if there are none."""
    if ledger.last is None:
        return None
    both = np.uint8(WRITE | WRITE << 1)
    apart = _differ(ledger.last[0], ledger.last[1], ledger.marks.shape)
    apart &= (ledger.marks & both) == both
    return apart if apart.any() else None


def written_once(ledger: Ledger, places: Chosen) -> Chosen:
    """Return those of ``places`` to which no core has written different bits."""
    if ledger.history is None:
        return places
    varied = ledger.history & np.uint8(VARIED | VARIED << 1)
    return places & (varied == 0)


def _undetermined(tensor: NkiTensor, ledger: Ledger, both: Chosen) -> Chosen:
    """Return the places among ``both``, which both cores wrote, where what a core read depends on the order.

    If a core has read bits that the other core has not written last, one of the two writes the place again, which is
    found here, or :func:`remaining` finds the difference.
    """
    if ledger.history is None or not both.any():
        return np.zeros(both.shape, np.bool_)
    history = _history(tensor, ledger)
    bad: Chosen = (history & np.uint8(STALE | STALE << 1)) != 0
    for core in (0, 1):
        read = (history & np.uint8(OWN_READ << core)) != 0
        bad |= read & ((history & np.uint8(VARIED << (1 - core))) != 0)
    return bad & both


def _history(tensor: NkiTensor, ledger: Ledger) -> Marks:
    if ledger.history is None:
        ledger.history = np.zeros(ledger.marks.shape, np.uint8)
    return over(tensor, ledger.history, ledger.unit)


def _differ(a: NDArray[np.uint8], b: NDArray[np.uint8], shape: tuple[int, ...]) -> Chosen:
    """Return which units of ``shape`` differ in any of their bytes."""
    return np.asarray((a != b).reshape(*shape, -1).any(axis=-1))
