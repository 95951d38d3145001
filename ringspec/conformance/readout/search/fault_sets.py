"""Find the smallest set of faults that explains everything: single faults first, then sets of two and three.

A *fault* is a kind of mistake at a place, which is a set of pairs of tokens. The *choices* of a ring say what it does for
each pair, and every fault changes some of them. A *chain* is a set of faults with the match that it gives.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ringspec.conformance.readout.faults.choices import OF_ALL, Choices, components
from ringspec.conformance.readout.faults.kinds import Fault
from ringspec.conformance.readout.faults.masks import SIZES, with_more_sizes
from ringspec.conformance.readout.faults.places import Place, listed
from ringspec.conformance.readout.model.ring import Model
from ringspec.conformance.readout.search.matches import Explanation, Match

# How many sets of one fault, and of two faults, that do not explain everything are extended by another fault.
KEPT = (10, 5)
MOST_FAULTS = 3
MOST_PAIRED = 14  # kinds that explain the most alone, of which all sets of two are tried
MOST_WIDENED = 6  # single faults that are also extended at every place
MOST_KNOWN = 2  # sets of faults from other problems that are extended
# The cost up to which a set that is found from a start is told at once. A less simple set, such as two faults of one
# kernel alone, is told only if the search for two faults finds no simpler one.
SIMPLE = 3.0
# The same for a single fault, which may list pairs: two simple faults are searched first.
SIMPLE_ALONE = 2.6

OF_BLOCKS = ("mask", *components("k"))  # choices of what a block contains

Chain = tuple[tuple[Fault, ...], Match]
Candidates = Iterator[tuple[Fault, Match]]
Predict = Callable[[Choices], Match]
Starts = Callable[[Choices, Match], Iterable[Sequence[tuple[Fault, ...]]]]
Attempt = Callable[[Fault], Match]  # predicts what a fault gives, besides those found so far


def composed(choices: Choices, faults: Sequence[Fault]) -> Choices:
    for fault in faults:
        choices = fault.applied(choices)
    return choices


def explain(
    model: Model,
    keep: Callable[[Choices], None],
    predict: Predict,
    base: Choices,
    proposed: Callable[[Choices, Match, bool], Candidates],
    evaluations: float,
    starts: Starts | None = None,
    most_faults: int = MOST_FAULTS,
    known: Sequence[tuple[Fault, ...]] = (),
    singles: bool = True,
    places: Sequence[Place] = (),
) -> Explanation:
    """Return the smallest set of faults that explains everything, or no fault if none is found.

    Of sets with equally many faults, the simplest is returned. A set that explains only some blocks is not returned: it
    is not proved, and of the sets that were once told for known bugs none was true.

    The search ends when ``model`` has computed as many ``evaluations``. ``keep`` stores what similar choices have in
    common, so that they are predicted faster. ``starts`` yields groups of sets of faults that explain a part, such as one matrix;
    these are extended first. ``most_faults``: the largest size of a set. ``predict`` compares a prediction with what was read, and ``proposed``
    yields the faults to try. ``base`` are the choices without faults. ``known``: sets of faults that other problems
    showed, which are tried first, and extended. ``singles``: whether single faults are tried; False if they were.
    ``places``: the sets of blocks that have names.
    """
    model.most = model.evaluations + evaluations
    keep(base)
    search = Search(model, keep, predict, base, proposed, predict(base), places)
    if search.plain.whole:
        return Explanation((), True, search.plain)
    of_known = [(faults, predict(composed(base, faults))) for faults in known]
    explaining = [one for one in of_known if one[1].whole]
    if explaining:
        return explanation_of([with_every_size(explaining)])
    started, spare = list[Chain](), list[Chain]()
    beam: list[Chain] = [((), search.plain)]
    for depth in range(most_faults):
        last = depth + 1 == most_faults
        # Faults that may explain everything are tried first: for a single fault, this is a sixth of the work.
        whole, tried = search.extended(beam, True) if singles or depth > 0 else ([], [])
        if depth == 0 and not last:
            whole, spare = apart(whole, SIMPLE_ALONE)
        if not whole and not last:
            whole = search.from_known(of_known, depth + 1)
        if not whole and depth == 0 and not last and starts is not None:
            whole, found, started = search.from_starts(starts)
            spare = [*spare, *found]
        if not whole and not last:
            whole, tried = search.extended(beam, False)
            if depth == 0:
                whole, _ = apart(whole, SIMPLE_ALONE)
            tried += [one for one in started if len(one[0]) == depth + 1]
            tried.sort(key=search.best)
            if not whole and depth == 0:
                whole, found = apart(search.of_two(tried, known), SIMPLE)
                spare = [*spare, *found]
        if whole or depth > 0 or not tried:
            whole = [*whole, *spare]
        if whole:
            return explanation_of(sorted(whole, key=cost))
        if not tried:
            break
        beam = varied(search.widened(tried) if depth == 0 else tried, KEPT[depth])
    return Explanation((), False, search.plain)


@dataclass(frozen=True)
class Search:
    """The steps of :func:`explain`, whose arguments these are. ``plain``: the match without faults."""

    model: Model
    keep: Callable[[Choices], None]
    predict: Predict
    base: Choices
    proposed: Callable[[Choices, Match, bool], Candidates]
    plain: Match
    places: Sequence[Place] = ()

    def true(self, chain: Chain) -> list[Chain]:
        """Return a set whose faults do what its words say, in which no fault changes again what an earlier one changed; none without one.

        Where the last fault makes the whole choice of an earlier one again, the earlier one gets the place that is left.
        """
        (*faults, last), match = chain
        if not faults:
            return [chain]
        if undoes(last, composed(self.base, faults), self.base):
            return []
        left = [self.left(one, last) for one in faults]
        kept = [one for one in left if one is not None]
        return [((*kept, last), match)] if len(kept) == len(faults) else []

    def left(self, one: Fault, last: Fault) -> Fault | None:
        """Return a fault without the pairs at which ``last`` makes its choice again; None if no words say where that is."""
        again = one.kind.only == last.kind.only and one.kind.slots <= last.kind.slots
        if (
            not again
            or one.kind.slots & set(OF_ALL)
            or not (one.place.table & last.place.table).any()
        ):
            return one
        if one.kind.of_workers:
            return None
        table = one.place.table & ~last.place.table
        blocks = np.asarray(table.any(axis=(2, 3, 4)))
        if not np.array_equal(table, np.broadcast_to(blocks[:, :, None, None, None], table.shape)):
            return None
        same = (x for x in self.places if np.array_equal(x.table[:, :, 0, 0, 0], blocks))
        place = next(same, None) or listed(blocks, ())
        return None if place is None else dataclasses.replace(one, place=place)

    def best(self, chain: Chain) -> tuple[float, float]:
        return by_gain(self.plain, chain)

    def extended(self, beam: Sequence[Chain], last: bool) -> tuple[list[Chain], list[Chain]]:
        """Return the sets with one more fault: those that explain everything, and those that explain more than before."""
        whole: list[Chain] = []
        tried: list[Chain] = []
        for faults, _ in beam:
            choices = composed(self.base, faults)
            self.keep(choices)
            match = self.predict(choices)
            before = match.gain(self.plain)
            for fault, got in self.proposed(choices, match, last):
                if got.whole:
                    whole += self.true(((*faults, fault), got))
                elif not last and got.gain(self.plain) > before:
                    tried.append(((*faults, fault), got))
                if not self.model.may_go_on():
                    return whole, tried
            if whole and faults:
                break
        return whole, tried

    def of_two(self, tried: Sequence[Chain], known: Sequence[tuple[Fault, ...]]) -> list[Chain]:
        """Return what explains everything with two of the kinds that explain the most alone, at their places or everywhere.

        Single faults that other problems showed are among these, at their places.
        """
        alone = [faults for faults in known if len(faults) == 1][:MOST_KNOWN]
        best: dict[str, tuple[Fault, ...]] = {one.kind.words: (one,) for (one,) in alone}
        for (fault,), _ in tried:
            if fault.kind.words not in best:
                at = everywhere(fault), fault
                best[fault.kind.words] = tuple({one.place.words: one for one in at}.values())
            if len(best) == MOST_PAIRED:
                break
        whole: list[Chain] = []
        for one, other in itertools.combinations(best.values(), 2):
            for faults in itertools.product(one, other):
                match = self.predict(composed(self.base, faults))
                if match.whole:
                    whole += self.true((faults, match))
                if not self.model.may_go_on():
                    return whole
        return whole

    def widened(self, tried: Sequence[Chain]) -> Iterator[Chain]:
        """Yield the chains of one fault; after each of the first, its kind everywhere, some of which another fault may hide."""
        for number, (faults, match) in enumerate(tried):
            yield faults, match
            fault = everywhere(faults[0])
            if number < MOST_WIDENED and fault is not faults[0]:
                yield (fault,), self.predict(fault.applied(self.base))

    def from_known(self, of_known: Sequence[Chain], count: int) -> list[Chain]:
        """Return what explains everything with ``count`` faults that other problems showed and one more."""
        few = [x for x in of_known if len(x[0]) == count and x[1].gain(self.plain) > 0]
        if not few:
            return []
        whole, _ = self.extended(sorted(few, key=self.best)[:MOST_KNOWN], True)
        self.keep(self.base)
        return whole

    def from_starts(self, starts: Starts) -> tuple[list[Chain], list[Chain], list[Chain]]:
        """Return what explains everything from the first group of starts that leads to it: simple, or not; then all starts."""
        every: list[Chain] = []
        for group in starts(self.base, self.plain):
            found = [(faults, self.predict(composed(self.base, faults))) for faults in group]
            every += found
            whole = [x for chain in found if chain[1].whole for x in self.true(chain)]
            if not whole:  # a set of two waits until the search for another set of two has failed
                single = sorted((x for x in found if len(x[0]) == 1), key=self.best)
                whole, _ = self.extended(varied(single, KEPT[0]), True)
            self.keep(self.base)
            if whole or not self.model.may_go_on():
                return (*apart(whole, SIMPLE), every)
        return [], [], every


def everywhere(fault: Fault) -> Fault:
    """Return the same kind of fault at every pair of tokens."""
    if fault.place.table.all():
        return fault
    table = np.ones_like(fault.place.table)
    return dataclasses.replace(
        fault, place=dataclasses.replace(fault.place, words="", table=table, cost=0.0)
    )


def undoes(fault: Fault, choices: Choices, base: Choices) -> bool:
    """Return whether a fault makes a choice right again somewhere, so that what was said of ``choices`` is not true there.

    ``base``: the choices without faults. What was said is not true either if :func:`moved_before` holds, if two wrong
    merges differ in which hidden rows they merge, which is a choice of the whole ring, or for keys that fill up tiles of
    the correct blocks beside wrong blocks or masks.
    """
    changed = dict(fault.kind.changes)
    filled = choices["padded"] is not None or "padded" in changed
    wrong = any(x in changed or choices[x] is not base[x] for x in OF_BLOCKS)
    if filled and wrong:
        return True
    if "merge" in changed and choices["merge"].any():
        if changed.get("hidden_merge", False) != choices["hidden_merge"]:
            return True
    if moved_before(fault, choices, base):
        return True
    every = base, choices, fault.applied(choices)
    right, before, now = (one.in_kernel(fault.kind.only) for one in every)
    return any(
        np.any((before[slot] != right[slot]) & (now[slot] == right[slot]))
        for slot in fault.kind.slots - set(OF_ALL)
    )


def moved_before(fault: Fault, choices: Choices, base: Choices) -> bool:
    """Return whether a fault changes where the tokens of an operand come from, of which ``choices`` already change another part.

    A fault that takes the tokens of another layout changes both their worker and their slot. After one that changes the
    worker alone, the slots that are left belong to neither.
    """
    right, now = (one.in_kernel(fault.kind.only) for one in (base, choices))
    slots = fault.kind.slots
    for name in {slot.partition(".")[0] for slot in slots if "." in slot}:
        moved = {x: (now[x] != right[x]) & fault.place.table for x in components(name)}
        again = [x for x in moved if x in slots and moved[x].any()]
        if again and any(moved[x].any() for x in moved if x not in slots):
            return True
    return False


def by_gain(plain: Match, chain: Chain) -> tuple[float, float]:
    """Return a sort key: the sets that explain the most come first, and of these the simplest."""
    return -chain[1].gain(plain), cost(chain)


def apart(whole: list[Chain], simple: float) -> tuple[list[Chain], list[Chain]]:
    """Return all sets first if the cost of one of them is at most ``simple``, else second."""
    return (whole, []) if any(cost(chain) <= simple for chain in whole) else ([], whole)


def with_every_size(chains: Sequence[Chain]) -> Chain:
    """Return the first set, with the sizes of tiles of those that differ from it only in these."""

    def but_sizes(chain: Chain) -> list[tuple[str, str]]:
        return [(SIZES.sub("", one.kind.words), one.place.words) for one in chain[0]]

    faults, match = chains[0]
    for others, _ in (one for one in chains[1:] if but_sizes(one) == but_sizes(chains[0])):
        words = [
            with_more_sizes(x.kind.words, y.kind.words) for x, y in zip(faults, others, strict=True)
        ]
        faults = tuple(
            dataclasses.replace(x, kind=dataclasses.replace(x.kind, words=new))
            for x, new in zip(faults, words, strict=True)
        )
    return faults, match


def explanation_of(whole: Sequence[Chain]) -> Explanation:
    (faults, match), *others = whole
    return Explanation(faults, True, match, tuple(x[0] for x in others))


def varied(tried: Iterable[Chain], most: int) -> list[Chain]:
    """Return the first ``most`` sets, without those that predict the same as an earlier set or are part of one."""
    found: list[Chain] = []
    for chain in tried:
        same = any(
            part_of(chain[0], one[0])
            or all(np.array_equal(one[1].ours[name], x) for name, x in chain[1].ours.items())
            for one in found
        )
        if not same:
            found.append(chain)
        if len(found) == most:
            break
    return found


def part_of(faults: Sequence[Fault], others: Sequence[Fault]) -> bool:
    """Return whether each of ``faults`` has a fault of the same kind in ``others``, at a place that contains its own."""
    return all(
        one.kind is other.kind and not (one.place.table & ~other.place.table).any()
        for one, other in zip(faults, others, strict=True)
    )


def cost(chain: Chain) -> float:
    return sum(fault.cost for fault in chain[0])
