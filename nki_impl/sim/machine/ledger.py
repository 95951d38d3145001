"""What the race detector remembers of one storage in shared HBM: which core accessed which bytes, and how.

The ledger of a storage is reset when a phase begins (:mod:`nki_impl.sim.machine.races`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from nki_impl.sim.memory.storage import Storage
from nki_impl.sim.tensor.views import NkiTensor

# One bit for core 0; shifted left by one for core 1.
READ, WRITE, COLLECTIVE_READ, COLLECTIVE_WRITE = 1, 4, 16, 64
ANY = READ | WRITE | COLLECTIVE_READ | COLLECTIVE_WRITE
_VERBS = {
    READ: "reads",
    WRITE: "writes",
    COLLECTIVE_READ: "sends by a collective",
    COLLECTIVE_WRITE: "receives by a collective",
}
Marks = NDArray[np.uint8]
Chosen = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Access:
    """One access in the current phase, kept so that the message of a race can name it.

    ``node``: the instruction in the graph of the launch (:mod:`nki_impl.sim.machine.dependence`), 0 if there is none.
    """

    core: int
    kind: int
    operation: str
    line: str
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    node: int = 0

    def __str__(self) -> str:
        return f"core {self.core} {_VERBS[self.kind]} in {self.operation} ({self.line})"


@dataclass(eq=False, slots=True)
class Ledger:
    """The accesses to one storage in its phase: a byte of ``marks`` for each ``unit`` bytes, and ``log``, a list.

    ``history``: a byte for each unit, None until a core reads or changes what it has written itself. ``last``: for each
    core the bytes of the storage as if only this core had written them; None while both cores agree with the memory.
    See :mod:`nki_impl.sim.machine.rewrites`.
    """

    unit: int
    marks: Marks
    log: list[Access] = field(default_factory=list)
    history: Marks | None = None
    last: tuple[Marks, Marks] | None = None


def ledger_of(tensor: NkiTensor) -> Ledger:
    """Return the ledger of the tensor's storage for its current phase, a new one if it has none."""
    storage: Storage = tensor._storage
    ledger = storage.shadow
    if not isinstance(ledger, Ledger):
        unit = storage.dtype.itemsize
        ledger = Ledger(unit, np.zeros(storage.raw.size // unit, np.uint8))
        storage.shadow = ledger
    if tensor.dtype.itemsize < ledger.unit:
        # A view with a smaller dtype: one mark per smaller unit from here on.
        times = ledger.unit // tensor.dtype.itemsize
        ledger.unit = tensor.dtype.itemsize
        ledger.log = [_finer(access, times) for access in ledger.log]
        ledger.marks = np.repeat(ledger.marks, times)
        if ledger.history is not None:
            ledger.history = np.repeat(ledger.history, times)
    return ledger


def _finer(access: Access, times: int) -> Access:
    """Return ``access`` with its place given in units that are ``times`` times smaller."""
    shape, strides = (*access.shape, times), (*(times * s for s in access.strides), 1)
    return replace(access, start=access.start * times, shape=shape, strides=strides)


def window(array: NDArray, access: Access) -> NDArray:
    """Return the part of ``array`` that ``access`` covers; ``array`` has one byte per unit of the storage."""
    return np.ndarray(access.shape, array.dtype, array, access.start, access.strides)


def bytes_of(tensor: NkiTensor, raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the bytes of the tensor's elements in ``raw``, with an additional last dimension for the bytes of one.

    ``raw`` is the memory of the tensor's storage or a copy. Unlike floating-point numbers, bytes can be compared even
    if an element is NaN.
    """
    array = tensor._array
    shape, strides = (*array.shape, tensor.dtype.itemsize), (*array.strides, 1)
    return np.ndarray(shape, np.uint8, raw, tensor.byte_offset, strides)
