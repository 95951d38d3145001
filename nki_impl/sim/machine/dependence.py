"""Which instructions of a launch must follow which others, because of the data that they read and write.

The compiler may reorder operations that have no data dependencies, so the program order of a core alone orders nothing.
:class:`Graph` has a node for each instruction of every core, and an edge to it from each node that it must follow:

- those that wrote what it reads, and those that read or wrote what it writes. This holds for tensors, for tiles that a
  kernel places at overlapping addresses, for registers, and for the reduce registers of the engines;
- the instruction before it in ``nl.no_reorder()``, and those that ``depends_on`` names;
- the last ``core_barrier`` of its core: no instruction passes a barrier.

A ``sendrecv``, a ``core_barrier`` or a collective has one more node, which follows the instructions of all cores that
take part. So if a core reads T, computes a tile from it and sends the tile, then whatever another core computes from the
received tile follows the read of T. A barrier counts as a write of its ``data``.

A whole storage counts as one place, so an instruction may seem to follow more than it does, and never less.

For two orders of the program, the documentation does not say whether the compiler must keep them: it "will respect the
sequential order of operations", and it "is free to reorder independent operations". Their edges are kept apart
(``program_order``):

- an instruction that comes after a ``sendrecv`` or a collective, and does not depend on it;
- a barrier on T that comes after a core has read K and then written T, if T does not depend on K.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/generated/nki.language.no_reorder.html,
nki.isa.core_barrier.html, nki.isa.sendrecv.html and nki.isa.NkiInstruction.html in the same folder, and
nki/get-started/nki-language-guide.html
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nki_impl.sim.machine.core import Core
from nki_impl.sim.memory.registers import NkiScalar, VirtualRegister
from nki_impl.sim.memory.storage import Site, Storage
from nki_impl.sim.tensor.views import NkiTensor


@dataclass(eq=False, slots=True)
class Trail:
    """The node that last wrote a place, 0 if none did, and the nodes that have read the place since."""

    writer: int = 0
    readers: list[int] = field(default_factory=list)


class Graph:
    """The instructions of all cores of a launch. Node 0 is no instruction."""

    def __init__(self) -> None:
        self._before: list[tuple[int, ...]] = [()]
        self._listed: list[tuple[int, ...]] = [()]
        self.is_amended = False

    def add(self, before: Iterable[int], listed: Iterable[int] = ()) -> int:
        """Return a new node that follows ``before``, and in program order also the nodes ``listed``."""
        self._before.append(tuple(before))
        self._listed.append(tuple(listed))
        return len(self._before) - 1

    def amend(self, node: int, before: Iterable[int]) -> None:
        """Let ``node`` follow the nodes ``before``, too, some of which may be newer."""
        self._before[node] += tuple(before)
        self.is_amended = True

    def ancestors(self, node: int, oldest: int, program_order: bool) -> set[int]:
        """Return the nodes from ``oldest`` on that ``node`` must follow; older ones may be among them.

        ``program_order``: whether the edges that only the order of the program gives count, too.
        """
        oldest = 1 if self.is_amended else oldest
        found: set[int] = set()
        stack = [node]
        while stack:
            at = stack.pop()
            before = self._before[at]
            for one in before + self._listed[at] if program_order else before:
                if one >= oldest and one not in found:
                    found.add(one)
                    stack.append(one)
        return found


class Program:
    """The instructions of one core, which it adds to the graph of the launch."""

    def __init__(self, graph: Graph, core: Core) -> None:
        self.graph = graph
        self._core = core
        self._nodes: dict[int, int] = {}
        self._last = 0
        self._reads: list[Trail] = []
        self._writes: list[Trail] = []
        self._reduce_registers = Trail()
        self._barrier = 0
        self._exchange: tuple[int, ...] = ()

    def node(self, index: int) -> int:
        """Return the node of instruction ``index``, 0 if it has none."""
        return self._nodes.get(index, 0)

    def enter(
        self,
        core: int,
        index: int,
        names: Sequence[str],
        args: Sequence[Any],
        more: Mapping[str, Any],
    ) -> None:
        """Begin instruction ``index`` of ``core``, an operation with these arguments (``names``: of the positional)."""
        reads: list[Trail] = []
        writes: list[Trail] = []
        rivals: list[Trail] = []
        is_barrier = self._core.operation == "core_barrier"
        for name, value in (*zip(names, args, strict=False), *more.items()):
            if name == "reduce_cmd":
                writes.append(self._reduce_registers)
            for place in (value,) if type(value) is NkiTensor else _places(value):
                is_output = "dst" in name or name == "reduce_res" or is_barrier
                (writes if is_output else reads).append(_trail(_owner(place), core))
                if isinstance(place, NkiTensor):
                    if place._storage.site is not None:
                        rivals.extend(_rivals(place._storage.site, core))
                    if place.dynamic is not None:
                        sources = _places(place.dynamic.source)
                        reads.extend(_trail(_owner(source), core) for source in sources)
        before = {self._barrier}
        if self._core.no_reorder and self._last > self._core.block_start:
            before.add(self._nodes[self._last])
        for trail in reads:
            before.add(trail.writer)
        for trail in (*writes, *rivals):
            before.add(trail.writer)
            before.update(trail.readers)
        before.discard(0)
        self._reads, self._writes = reads, writes
        self._last = index
        self._nodes[index] = node = self.graph.add(before, self._exchange)
        self._mark(node)

    def wait(self, index: int, producers: Iterable[int]) -> None:
        """Let instruction ``index`` follow the instructions ``producers`` of the same core (``depends_on``)."""
        node = self.node(index)
        if node:
            self.graph.amend(node, [self.node(one) for one in producers if self.node(one)])

    def _mark(self, node: int) -> None:
        """Let what depends on the current instruction follow ``node``."""
        for trail in self._reads:
            trail.readers.append(node)
        for trail in self._writes:
            trail.writer = node
            trail.readers = []

    @staticmethod
    def meet(programs: Sequence[Program], is_barrier: bool, listed: Iterable[int] = ()) -> None:
        """Join the current instructions of ``programs``, an exchange or a barrier that all of them take part in.

        ``listed``: nodes that come before it in program order.
        """
        node = programs[0].graph.add((one._nodes[one._last] for one in programs), listed)
        for one in programs:
            one._nodes[one._last] = node
            one._mark(node)
            if is_barrier:
                one._barrier = node
            else:
                one._exchange = (node,)


def _places(value: Any) -> Iterable[NkiTensor | VirtualRegister]:
    if isinstance(value, NkiScalar):
        return value.roots or (value,)
    if isinstance(value, (NkiTensor, VirtualRegister)):
        return (value,)
    if isinstance(value, (list, tuple)):
        return [place for one in value for place in _places(one)]
    return ()


def _owner(place: NkiTensor | VirtualRegister) -> Storage | VirtualRegister | Site:
    """Return what has the trail of a place: the memory of a tile with an address, which other tiles may use in turn."""
    if isinstance(place, VirtualRegister):
        return place
    storage = place._storage
    return storage if storage.site is None else storage.site


def _rivals(site: Site, core: int) -> list[Trail]:
    """Return the trails of other memory that overlaps ``site``."""
    return [_trail(near.site, core) for near in site.near if near.site is not site]


def _trail(owner: Storage | VirtualRegister | Site, core: int) -> Trail:
    if owner.trails is None:
        owner.trails = [None, None]
    trail: Trail | None = owner.trails[core]
    if trail is None:
        trail = owner.trails[core] = Trail()
    return trail
