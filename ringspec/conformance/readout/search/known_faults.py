"""Faults that were read from other problems of the same kernel, as faults in the ring of this problem.

They are tried first, all of them or some, and the search for further faults begins with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product

from ringspec.conformance.readout.faults.kinds import Fault, Name
from ringspec.conformance.readout.faults.masks import SIZES, shares_sizes
from ringspec.conformance.readout.faults.places import OWN_BLOCKS
from ringspec.conformance.readout.search.context import SearchContext
from ringspec.conformance.readout.search.vocabulary import fault_named

MOST_SETS = 40
OTHER_SIDE = {"earlier": "later", "later": "earlier"}
# What a kernel does to blocks, it does to chunks if it computes the chunks of a zigzag shard one by one.
CHUNKS = "between the results of chunks of keys, "


class Known:
    """The names of the faults of each pass that other problems showed: sets of faults, the last one first."""

    def __init__(self, context: SearchContext, sets: Sequence[Sequence[Name]]) -> None:
        self.context, self.sets = context, sets

    def faults(self, phase: str) -> list[tuple[Fault, ...]]:
        """Return sets of faults of a pass, the smallest first: each set of names, parts of it, and the same about chunks."""
        found: dict[tuple[Name, ...], tuple[Fault, ...]] = {}
        for names in self.sets:
            each = [self.named(name) for name in names if name[0] == phase]
            every = [forms for forms in each if forms]
            for size in range(1, len(every) + 1):
                for part in combinations(every, size):
                    for faults in product(*part):
                        found.setdefault(tuple(one.name for one in faults), faults)
        return sorted(found.values(), key=len)[:MOST_SETS]

    def named(self, name: Name) -> list[Fault]:
        """Return the faults with this name in the ring of this problem: for its blocks, and for the chunks of its keys."""
        phase, kind, place = name
        found = [
            self.fault((phase, words, where))
            for where in self.places(place)
            for words in self.forms(phase, kind)
        ]
        return [one for one in found if one is not None]

    def places(self, place: str) -> Iterator[str]:
        """Yield a place, and those that may be meant by it here.

        With direction -1, keys arrive from the other side. What shows only in blocks that a mask hides in part shows
        everywhere in the layout contiguous if it holds in a worker's own block.
        """
        yield place
        if not place:
            yield OWN_BLOCKS
        if self.context.geometry.direction == -1:
            mirrored = [OTHER_SIDE.get(word, word) for word in place.split(" ")]
            if " ".join(mirrored) != place:
                yield " ".join(mirrored)

    def forms(self, phase: str, kind: str) -> Iterator[str]:
        geometry = self.context.geometry
        # Of several sizes with equal results in one problem, only some may have them here.
        if SIZES.search(kind):
            yield from (x.words for x in self.context.kinds(phase) if shares_sizes(x.words, kind))
        yield kind.removeprefix(CHUNKS)
        if geometry.run < geometry.slots:
            yield f"{CHUNKS}{kind.removeprefix(CHUNKS)}"
            if " within a block" in kind:
                yield kind.replace(" within a block", " within a chunk")
            if "block's own lse" in kind:
                yield kind.replace("the block's own lse", "the lse of the chunk of keys alone")

    def fault(self, name: Name) -> Fault | None:
        """Return the fault with this name; the usual kinds are tried before those that are the same in this ring."""
        context = self.context
        if name[1] == context.refuted:
            return None
        usual = fault_named(context.geometry, context.masks, name, distinct=True)
        if usual is not None or context.geometry.run < context.geometry.slots:
            return usual
        return fault_named(context.geometry, context.masks, name)
