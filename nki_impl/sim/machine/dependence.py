"""Which accesses to shared HBM an instruction must follow, because of the data that it reads and writes.

The scheduler is free to reorder independent operations of one core, so their program order orders nothing. An
instruction waits for those that wrote what it reads, and for those that read or wrote what it writes. Between the two
cores of a rank, ``sendrecv`` passes this order on: if a core reads T, computes a tile from it and sends the tile, then
whatever the other core computes from the received tile follows the read of T.

Each instruction that accesses shared HBM has a bit; a set of accesses is an int. A whole storage counts as one place, so
an instruction may seem to follow more than it does, and never less.

Most kernels need none of this, and it takes time. So a kernel runs without it first, and again with it if a race follows
a ``sendrecv`` (:func:`nki_impl.sim.machine.launch.run_ranks`).

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/generated/nki.language.no_reorder.html
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nki_impl.sim.memory.registers import VirtualRegister
from nki_impl.sim.memory.storage import Storage
from nki_impl.sim.tensor.views import NkiTensor


@dataclass(eq=False, slots=True)
class Trail:
    """The accesses that a core must follow to read a place (``content``), and besides to write it (``readers``)."""

    content: int = 0
    readers: int = 0


@dataclass(eq=False, slots=True)
class Step:
    """The current instruction of a core: its number, what it reads and writes, and the accesses that it follows."""

    index: int = 0
    reads: list[Trail] = field(default_factory=list)
    writes: list[Trail] = field(default_factory=list)
    follows: int = 0

    def add(self, accesses: int) -> None:
        """Let this instruction, and all that depend on it, follow ``accesses``."""
        self.follows |= accesses
        for trail in self.writes:
            trail.content |= accesses
        for trail in self.reads:
            trail.readers |= accesses


class Dependence:
    """The dependences of the two cores of one rank."""

    def __init__(self) -> None:
        self.steps = [Step(), Step()]
        self._next = 1
        self._bits: dict[tuple[int, int], int] = {}

    def enter(
        self,
        core: int,
        index: int,
        names: Sequence[str],
        args: Sequence[Any],
        more: Mapping[str, Any],
    ) -> None:
        """Begin instruction ``index`` of ``core``, an operation with these arguments (``names``: of the positional)."""
        step = self.steps[core] = Step(index)
        for name, value in (*zip(names, args, strict=False), *more.items()):
            output = "dst" in name or name == "reduce_res"
            for place in _places(value):
                trail = _trail(place, core)
                is_write = output and not isinstance(value, VirtualRegister)
                (step.writes if is_write else step.reads).append(trail)
                if isinstance(place, NkiTensor) and place.dynamic is not None:
                    step.reads.append(_trail(place.dynamic.source, core))
                if isinstance(value, VirtualRegister) and output:
                    step.writes.append(trail)
        follows = 0
        for trail in step.reads:
            follows |= trail.content
        for trail in step.writes:
            follows |= trail.content | trail.readers
        step.add(follows)

    def access(self, core: int, index: int) -> int:
        """Give the current instruction of ``core`` its bit, and return what it follows."""
        step = self.steps[core]
        if step.index != index:
            return 0
        if (core, index) not in self._bits:
            self._bits[core, index] = self._next
            step.add(self._next)
            self._next <<= 1
        return step.follows

    def bit(self, core: int, index: int) -> int:
        """Return the bit of an instruction, 0 if it has none."""
        return self._bits.get((core, index), 0)

    def meet(self) -> None:
        """Both cores are in one ``sendrecv``: what one of them follows, the other follows, too."""
        one, two = self.steps
        both = one.follows | two.follows
        one.add(both)
        two.add(both)


def _places(value: Any) -> Iterable[NkiTensor | VirtualRegister]:
    if isinstance(value, (NkiTensor, VirtualRegister)):
        return (value,)
    if isinstance(value, (list, tuple)):
        return [place for one in value for place in _places(one)]
    return ()


def _trail(place: NkiTensor | VirtualRegister, core: int) -> Trail:
    owner: Storage | VirtualRegister = place._storage if isinstance(place, NkiTensor) else place
    if owner.trails is None:
        owner.trails = (Trail(), Trail())
    trail: Trail = owner.trails[core]
    return trail
