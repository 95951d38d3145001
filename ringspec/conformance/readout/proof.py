"""Prove a reading: the faults that explain a readout must also give the results for random inputs in the same ring.

A readout is a problem with special inputs, whose results show what a kernel computed for each pair of tokens. Different
faults may give the same results with these inputs. The *proof* of a problem is a second call, with random inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from ringspec.conformance.cases.model import Outputs
from ringspec.conformance.readout.backward_search import SAME, SAVED
from ringspec.conformance.readout.calls import expressible
from ringspec.conformance.readout.hints import ROUNDING
from ringspec.conformance.readout.infinite_rows import by_infinite_rows
from ringspec.conformance.readout.kinds import listing
from ringspec.conformance.readout.masks import SIZES, in_single_sizes, with_more_sizes
from ringspec.conformance.readout.not_finite import NOT_FINITE, RESULTS
from ringspec.conformance.readout.problems import (
    BACKWARDS,
    MORE_WORKERS,
    ODD_SLOTS,
    SLOTS,
    WORKERS,
    Problem,
)
from ringspec.conformance.readout.reading import Named, PassRead, Reading, read
from ringspec.conformance.readout.replay import Replayed, explains, gives, replay_of
from ringspec.conformance.readout.rounded_inputs import rounded_inputs
from ringspec.conformance.readout.rounding import narrow_results
from ringspec.conformance.readout.told import BATCHES, WITH_A_WINDOW, Told, separate, told
from ringspec.conformance.target.protocol import Call

MOST_NAMED = 3  # problems in a sentence; one more if it is the last
MOST_TRIED, MOST_OF_TILES = 6, 2  # sets of faults of a pass
# The largest share of a search in a problem in which a search for a known bug with the same results found nothing.
SHARE_AGAIN = 0.006
OF_TILES = re.compile(r"\btiles? of \d")
# They may be a short last tile.
OF_LAST = re.compile(r"for the last \d+ (queries|keys) of a worker")
WINDOW = re.compile(r"/(window|band)\b")  # in the ids of problems
OF_CIRCULATION = ("-q", "-gather")  # parts of the ids of problems
# Parts of the ids of problems, and what is said of faults that show in no other problems.
SHOWN_ONLY = {
    "-q": "This holds where the queries travel; the same problem with travelling keys is right.",
    "-gather": "This holds where the keys are gathered; the same problem with travelling keys is right.",
    f"-{BACKWARDS}": "This holds with direction -1 alone; the same problems with direction 1 are right.",
    f"-w{MORE_WORKERS}": f"This shows with {MORE_WORKERS} workers, and not with {WORKERS}.",
    f"-n{ODD_SLOTS}": f"This shows with {ODD_SLOTS} tokens on a worker, where tiles are cut short, and not with {SLOTS}.",
}
NOT_RANDOM = (
    "the readout's numbers are right, but those of random inputs are not; perhaps values are rounded, or limited to a "
    "range, which the whole numbers of a readout do not show"
)
NOT_PROVED = "a change that gives the numbers of this readout was found, but it does not give those of random inputs"


@dataclass(frozen=True)
class Stored:
    """What a search once found in a problem for known bugs; ``in_vain``: whether it found nothing for one of them."""

    readings: tuple[Reading, ...] = ()
    in_vain: bool = False


def read_proven(
    problem: Problem,
    outputs: Sequence[Outputs],
    earlier: Sequence[Reading] = (),
    share: float = 1.0,
    stored: Callable[[Outputs], Stored] | None = None,
) -> Reading:
    """Read the results of a problem's two calls, the readout and its proof.

    ``share``: the part of the usual work that the searches may do; 0: no search. Faults of ``earlier`` readings are tried first,
    then those that ``stored`` returns for the results of the first call. They are accepted if they explain the results of
    both calls.
    """
    outputs = problem.results(outputs)
    same = read_as(problem, outputs, earlier)
    if same is not None:
        return same
    found = read(problem, outputs[0], 0.0)
    if not found.right:
        bugs = stored(outputs[0]) if stored is not None else Stored()
        same = read_as_stored(problem, outputs, bugs.readings)
        if same is not None:
            return same
        share = min(share, SHARE_AGAIN) if bugs.in_vain else share
        known = dict.fromkeys(faults for one in earlier for faults in explained_sets(one))
        names = list(known)[::-1]
        found = read(problem, outputs[0], share, outputs[1], names)
    if found.right:
        if right_too(problem, outputs[1]):
            return with_narrow_results(found, problem, outputs[1])
        rounded = rounded_inputs(problem.proof, outputs[1]) if expressible(problem.proof) else None
        forward, backward = rounded or (PassRead(left=NOT_RANDOM), None)
        return Reading(problem.id, False, forward, backward, evaluations=1)
    if not share:
        return found
    if found.forward and NOT_FINITE in found.forward.left and expressible(problem.call):
        return proven(by_infinite_rows(problem, found, outputs[0]), problem, outputs[1])
    shown = proven(found, problem, outputs[1])
    if shown.explained or not found.explained:
        return shown
    # The least simple fault is the least likely, so the search is repeated without its kind.
    faults = [fault for one in found.passes for faults in one.sets[:1] for fault in faults]
    least = max(faults, key=lambda fault: fault.cost).kind if faults else ""
    again = proven(read(problem, outputs[0], share, outputs[1], names, least), problem, outputs[1])
    best = again if again.explained else shown
    return dataclasses.replace(best, evaluations=found.evaluations + again.evaluations)


def with_narrow_results(right: Reading, problem: Problem, outputs: Outputs) -> Reading:
    """Return a right reading, or one that says which results have fewer bits than their format holds."""
    narrow = narrow_results(problem.proof.formats["inputs"], outputs)
    if not narrow:
        return right
    found = {
        phase: PassRead((tuple(Named(phase, narrow[x], "", 1.0, ROUNDING) for x in names),))
        for phase, every in RESULTS.items()
        if (names := [x for x in every if x in narrow])
    }
    forward, backward = (found.get(phase) for phase in RESULTS)
    return Reading(problem.id, False, forward, backward, evaluations=1)


def right_too(problem: Problem, outputs: Outputs) -> bool:
    """Return whether the results of the problem's proof are right, too, as far as the model ring can compute them."""
    if not expressible(problem.proof):
        return True
    compared = replay_of(problem.proof, outputs).compared(Told())
    return compared is None or compared.fits


def explained_sets(reading: Reading) -> tuple[tuple[Named, ...], ...]:
    """Return the best set of faults of each pass that a reading explains."""
    return tuple(one.sets[0] for one in reading.passes if one.whole and one.sets)


def read_as(
    problem: Problem, outputs: Sequence[Outputs], others: Sequence[Reading]
) -> Reading | None:
    """Return the reading of a problem's two calls by the faults of one of ``others``; None if these do not explain them.

    Faults that the problem's ring cannot have, or that change nothing in it, are left out: without a mask, there is no
    fault in the mask.
    """
    calls = problem.call, problem.proof

    def same_without_base(found: Told) -> bool:
        # A wrong lse that is saved is no mistake that the backward pass can repeat, and where the mistake in storing o
        # changes nothing, nothing is used from before it.
        return found.base in (SAME, SAVED) and explains(
            dataclasses.replace(found, base=""), calls, outputs
        )

    tried: list[Told] = []
    explained = [one for one in others if one.explained]
    # What accounts for most of the other problems is tried first.
    for one, found in (
        (one, told(x)) for x in (explained, *([y] for y in explained)) for one in x[:1]
    ):
        if not found.faults or found.faults in [x.faults for x in tried]:
            continue
        tried.append(found)
        if explains(found, calls, outputs):
            possible = replay_of(problem.call, outputs[0]).possible(found.faults)
            possible = needed(possible, found.base, calls, outputs)
            forward, backward = (
                part and with_faults(part, found, possible) for part in (one.forward, one.backward)
            )
            if backward and (not (forward and forward.sets) or same_without_base(found)):
                backward = dataclasses.replace(backward, base="")
            reading = Reading(problem.id, False, forward, backward)
            if reading.explained:
                return reading
    return None


def read_as_stored(
    problem: Problem, outputs: Sequence[Outputs], stored: Sequence[Reading]
) -> Reading | None:
    """Return the first of the ``stored`` readings that explains the results of a problem's two calls; None without one.

    Of its sets of faults, those are kept that do.
    """
    calls = problem.call, problem.proof
    if not all(map(expressible, calls)):
        return None
    for one in stored:
        found: Reading | None = one
        for call, got in zip(calls, outputs, strict=True):
            if found is not None and found.explained:
                found = that_fits(found, replay_of(call, got))
        if found is not None and found.explained:
            return found
    return None


def needed(
    faults: list[Named], base: str, calls: Sequence[Call], outputs: Sequence[Outputs]
) -> list[Named]:
    """Return the faults without those that change nothing here, beside the others: of these, a problem shows nothing."""
    for one in tuple(faults)[::-1]:
        others = [x for x in faults if x is not one]
        if others and explains(Told(tuple(others), base), calls, outputs):
            faults = others
    return faults


def with_faults(part: PassRead, found: Told, possible: Sequence[Named]) -> PassRead:
    """Return the same pass with at most one set of faults: the ``possible`` ones of the first with no fault outside ``found``."""
    sets = [one for one in part.sets if set(one) <= set(found.faults)]
    left = [tuple(fault for fault in one if fault in possible) for one in sets[:1]]
    return dataclasses.replace(part, sets=tuple(one for one in left if one))


def simplest(part: PassRead) -> tuple[tuple[Named, ...], ...]:
    """Return the simplest sets of faults of a pass; and of sets with a rule about tiles, which is seldom simple, a few more."""
    first, others = part.sets[:MOST_TRIED], part.sets[MOST_TRIED:]
    return (*first, *[one for one in others if of_tiles(one)][:MOST_OF_TILES])


def of_tiles(faults: Sequence[Named]) -> bool:
    """Return whether one of the faults is, or may be, a rule about tiles."""
    in_words = ((one.kind, one.place) for one in faults)
    return any(OF_TILES.search(f"{x} {y}") or OF_LAST.search(y) for x, y in in_words)


def proven(reading: Reading, problem: Problem, outputs: Outputs) -> Reading:
    """Keep the sets of faults that also give ``outputs``, the results of the problem's proof.

    If no set does, the reading becomes unexplained. If the effect of faults on the proof cannot be computed, the
    reading stays as it is.
    """
    if not reading.passes or not expressible(problem.proof):
        return reading
    if not reading.explained:
        if all(one.whole for one in reading.passes):
            return reading
        return proven_alone(reading, replay_of(problem.proof, outputs))
    replayed = replay_of(problem.proof, outputs)
    fitting = that_fits(reading, replayed)
    if fitting is None:
        return reading
    return fitting if fitting.passes else proven_alone(reading, replayed)


def that_fits(reading: Reading, replayed: Replayed) -> Reading | None:
    """Keep the sets of faults of a reading that give the results of a call; None if their effect cannot be computed.

    If no set does, nothing is left, and the reading counts as unexplained.
    """
    first, second = (one or PassRead() for one in (reading.forward, reading.backward))
    # A backward pass that is right for what the forward pass saved may look like one that does the same.
    others = [dataclasses.replace(second, base="")] if second.base and not second.sets else []
    for backward in (second, *others):
        kept = sets_that_fit(first, backward, replayed)
        if kept is None:
            return None
        if kept[0]:
            forward, backward = (
                dataclasses.replace(one, sets=tuple(x for x in found if x))
                for one, found in zip((first, backward), kept, strict=True)
            )
            known = None if reading.backward is None else backward
            return dataclasses.replace(reading, forward=forward, backward=known)
    return Reading(reading.problem, False)


def sets_that_fit(
    first: PassRead, second: PassRead, replayed: Replayed
) -> tuple[list[tuple[Named, ...]], list[tuple[Named, ...]]] | None:
    """Return the sets of faults of each pass that give the results of a call together; None if this cannot be computed."""
    kept: tuple[dict[tuple[Named, ...], None], ...] = ({}, {})
    for forward, backward in product(simplest(first) or ((),), simplest(second) or ((),)):
        told_here = Told(faults=(*forward, *backward), base=second.base)
        found = replayed.compared(told_here) if told_here.faults else None
        if found is None:
            return None
        if found.fits:
            faults = replayed.without_contradiction(told_here).faults
            for number, phase in enumerate(("forward", "backward")):
                kept[number][tuple(one for one in faults if one.phase == phase)] = None
    return list(kept[0]), list(kept[1])


def proven_alone(reading: Reading, replayed: Replayed) -> Reading:
    """Keep the sets of faults of each pass that give its results for the proof; the backward pass gets the kernel's o and lse.

    At least one pass of the reading becomes unexplained, if none is.
    """
    passes: list[PassRead | None] = []
    for phase, one in (("forward", reading.forward), ("backward", reading.backward)):
        if phase == "forward" and one is not None and one.whole and not one.sets:
            found = replayed.compared(Told(), phase)
            passes.append(one if found is None or found.fits else PassRead(left=NOT_RANDOM))
            continue
        if one is None or not one.sets or one.base:
            passes.append(one if one is None or not one.sets else PassRead(left=NOT_PROVED))
            continue
        sets = [
            faults
            for faults in simplest(one)
            if (found := replayed.compared(Told(faults), phase)) is not None and found.fits
        ]
        passes.append(PassRead(tuple(sets)) if sets else PassRead(left=NOT_PROVED))
    if all(one is None or one.whole for one in passes):
        last = max(number for number, one in enumerate(passes) if one is not None)
        passes[last] = PassRead(left=NOT_PROVED)
    return dataclasses.replace(reading, forward=passes[0], backward=passes[1])


def unrefuted(
    readings: Sequence[Reading], right: Sequence[tuple[Problem, Sequence[Outputs]]]
) -> Told:
    """Combine the readings of the problems that failed, without faults that would also show in problems that are right.

    ``right``: these problems, with the results of their two calls. If nothing else explains the problems that failed, the
    faults are told.
    """
    if all(BATCHES in one.problem for one in readings) or not any(x.explained for x in readings):
        return told(readings)
    proofs = proofs_of(readings, right)
    # Other code may compute calls with a window, so where these are right, it says little about the others.
    windows = {problem.id for problem, _ in right if problem.pairs.geometry.window is not None}
    if not any(WINDOW.search(one.problem) for one in readings):
        proofs = [one for one in proofs if one[0] not in windows]
    # Problems that got the faults of others say nothing about which of these faults it is; see with_others.
    # Faults that show with direction -1 alone are not refuted by what is right with direction 1.
    shown = [part for part in SHOWN_ONLY if all(part in one.problem for one in readings)]

    def right_with(parts: Iterable[str]) -> list[Replayed]:
        return [proof for id, proof in proofs if all(part in id for part in parts)]

    right_ids = {id for id, _ in proofs}

    def says_nothing(one: Reading) -> bool:
        # The same problem without this part, such as with direction 1, is right.
        parts = [
            part
            for part in SHOWN_ONLY
            if part in one.problem and one.problem.replace(part, "-kv") in right_ids
        ]
        return BATCHES in one.problem or (one.explained and all_refuted(one, right_with(parts)))

    own = [one for one in readings if one.evaluations or not says_nothing(one)]
    return told([without_refuted(one, right_with(shown)) for one in own])


def proofs_of(
    readings: Sequence[Reading], right: Sequence[tuple[Problem, Sequence[Outputs]]]
) -> list[tuple[str, Replayed]]:
    """Return the proofs of the problems that are ``right``, by id, as far as they say something about those that failed.

    Each batch entry has one head, in which faults of heads do not show, so the problem of batches says nothing.
    """

    def may_refute(id: str) -> bool:
        # A ring whose keys travel says nothing of other circulations, which other code computes.
        others = [part for part in OF_CIRCULATION if part in id]
        return all(any(part in one.problem for one in readings) for part in others)

    return [
        (problem.id, replay_of(problem.proof, outputs[1]))
        for problem, outputs in right
        if expressible(problem.proof) and BATCHES not in problem.id and may_refute(problem.id)
    ]


def with_limits(
    found: Told, readings: Sequence[Reading], right: Sequence[tuple[Problem, Sequence[Outputs]]]
) -> Told:
    """Say in which problems, whose results are right, the faults do not hold. The arguments are those of :func:`unrefuted`.

    Sizes of tiles and other explanations that these problems refute are left out.
    """
    if not found.faults or all(BATCHES in one.problem for one in readings):
        return found
    proofs = proofs_of(readings, right)

    def holds(id: str, one: Told) -> bool:
        return not any(refutes(proof, one) for _, proof in proofs)

    found = with_sizes_that_hold(found, holds) if proofs else found
    against = [id for id, proof in proofs if refutes(proof, found)]
    if not against:
        same = (dataclasses.replace(found, faults=one.faults) for one in found.alternatives)
        kept = (x for x, one in zip(found.alternatives, same, strict=True) if holds("", one))
        found = dataclasses.replace(found, alternatives=tuple(kept))
    return dataclasses.replace(found, refuted=does_not_hold(found, against))


def does_not_hold(found: Told, against: Sequence[str]) -> tuple[str, ...]:
    """Say in which problems, whose results are right, the faults do not hold."""
    said = []
    for part, words in SHOWN_ONLY.items():
        if all(part in id for id in found.explained) and any(part not in id for id in against):
            said.append(words)
            against = [id for id in against if part in id]
    if against:
        where, where_not = named(found.explained), named(against)
        said.append(f"This holds in {where}, but not in {where_not}, whose results are right.")
    return tuple(said)


def named(ids: Sequence[str]) -> str:
    """Return the ids of some problems as part of a sentence; of many, only the first.

    >>> named(["readout/a", "readout/b", "readout/c", "readout/d", "readout/e"])
    'readout/a, readout/b, readout/c and 2 others'
    """
    if len(ids) <= MOST_NAMED + 1:
        return listing(ids)
    return f"{', '.join(ids[:MOST_NAMED])} and {len(ids) - MOST_NAMED} others"


def with_others(found: Told, problems: Sequence[tuple[Problem, Sequence[Outputs]]]) -> Told:
    """Count those of the problems whose results the told faults give; drop the alternatives that do not give them all."""
    named = {*found.explained, *found.others}
    alternatives = found.alternatives
    also = []
    for problem, outputs in problems if found.faults else ():
        calls = problem.call, problem.proof
        if problem.id not in named and explains(found, calls, outputs):
            also.append(problem.id)
            alternatives = tuple(
                one
                for one in alternatives
                if explains(dataclasses.replace(found, faults=one.faults), calls, outputs)
            )
    return dataclasses.replace(
        found,
        explained=(*found.explained, *also),
        alternatives=alternatives,
    )


def with_rest(found: Told, readings: Sequence[Reading]) -> Told:
    """Say what is wrong in the problems that are explained by faults of others, and for which no sentence accounts."""
    named = {*found.explained, *found.others}
    rest = [one for one in readings if one.explained and one.problem not in named]
    return dataclasses.replace(
        found, separate=separate(found.faults, found.base, rest, found.separate)
    )


def proved(
    found: Told, problems: Sequence[tuple[Problem, Sequence[Outputs]]], known: Collection[str]
) -> Told:
    """Keep, of the problems for which sentences account, those whose results a ring with exactly the told faults gives.

    The faults of the two passes may come from different problems, so together they are proved only here. ``known``: the
    ids of the problems for which the first faults are proved already.
    """
    results = {problem.id: (problem, outputs) for problem, outputs in problems}

    def holds(id: str, told_there: Told) -> bool:
        problem, outputs = results[id]
        compared, *renamed = [
            gives(one, problem.proof, outputs[1]) for one in with_a_window(told_there)
        ]
        return compared is None or compared.fits or any(one and one.fits for one in renamed)

    apart = [
        dataclasses.replace(one, problems=tuple(x for x in one.problems if holds(x, of_one)))
        for one in found.separate
        for of_one in [Told(one.faults, one.base)]
    ]
    found = dataclasses.replace(found, separate=tuple(one for one in apart if one.problems))
    own = [id for id in found.explained if id not in known]
    refuted = {id for id in own if not holds(id, found)}
    explained = tuple(id for id in found.explained if id not in refuted)
    if not explained:
        return Told(left=found.left, separate=found.separate, shown_by=found.shown_by)
    alternatives = tuple(
        one
        for one in found.alternatives
        if all(holds(id, dataclasses.replace(found, faults=one.faults)) for id in own)
    )
    proven = dataclasses.replace(found, explained=explained, alternatives=alternatives)
    return with_sizes_that_hold(proven, holds)


def with_kind(faults: Sequence[Named], number: int, kind: str) -> tuple[Named, ...]:
    """Return the same faults, of which fault ``number`` has other words."""
    return tuple(
        dataclasses.replace(x, kind=kind) if n == number else x for n, x in enumerate(faults)
    )


def with_sizes_that_hold(found: Told, holds: Callable[[str, Told], bool]) -> Told:
    """Tell, of several sizes of tiles, those that hold in all problems for which the sentence accounts.

    Sizes that give the same numbers in one problem may differ in another one.
    """

    def narrowed(faults: tuple[Named, ...], base: str, ids: Sequence[str]) -> tuple[Named, ...]:
        for number, fault in enumerate(faults):
            sizes = in_single_sizes(fault.kind)
            kept = []
            for kind in sizes if len(sizes) > 1 else ():
                one = Told(with_kind(faults, number, kind), base)
                if all(holds(id, one) for id in ids):
                    kept.append(kind)
            if kept:
                faults = with_kind(faults, number, functools.reduce(with_more_sizes, kept))
        return faults

    def reworded(text: str, old: Sequence[Named], new: Sequence[Named]) -> str:
        for one, other in zip(old, new, strict=True):
            text = text.replace(one.kind, other.kind)
        return text

    faults = narrowed(found.faults, found.base, found.explained)
    separate = []
    for one in found.separate:
        own = narrowed(one.faults, one.base, one.problems)
        words = reworded(one.words, one.faults, own)
        separate.append(dataclasses.replace(one, faults=own, words=words))
    stated = tuple(reworded(text, found.faults, faults) for text in found.stated)
    others = tuple(one for one in found.alternatives if not same_but_sizes(one.faults, faults))
    return dataclasses.replace(
        found, faults=faults, stated=stated, separate=tuple(separate), alternatives=others
    )


def same_but_sizes(faults: Sequence[Named], others: Sequence[Named]) -> bool:
    """Return whether two sets of faults differ in the sizes of tiles alone."""

    def names(of: Sequence[Named]) -> list[tuple[str, str, str]]:
        return [(one.phase, SIZES.sub("", one.kind), one.place) for one in of]

    return names(faults) == names(others)


def all_refuted(reading: Reading, right: Sequence[Replayed]) -> bool:
    """Return whether each set of faults of some pass would show in a problem that is right."""
    base = reading.backward.base if reading.backward else ""
    return any(
        all(any(refutes(x, Told(one, base)) for x in right) for one in simplest(part))
        for part in reading.passes
        if part.sets
    )


def without_refuted(reading: Reading, right: Sequence[Replayed]) -> Reading:
    """Keep the sets of faults that would not show in the problems that are right; all of them if none would be left."""
    if not reading.explained or not right:
        return reading
    base = reading.backward.base if reading.backward else ""

    def kept(part: PassRead | None) -> PassRead | None:
        if part is None or not part.sets:
            return part
        sets = [
            one for one in simplest(part) if not any(refutes(x, Told(one, base)) for x in right)
        ]
        return dataclasses.replace(part, sets=tuple(sets) or part.sets)

    return dataclasses.replace(
        reading, forward=kept(reading.forward), backward=kept(reading.backward)
    )


def with_a_window(found: Told) -> list[Told]:
    """Return ``found``, and the same with the other name that a fault has in a problem with a window, which it may keep."""
    windowed = {causal: kept for kept, causal in WITH_A_WINDOW.items()}
    renamed = tuple(
        dataclasses.replace(one, kind=windowed.get(one.kind, one.kind)) for one in found.faults
    )
    return [
        found,
        *([dataclasses.replace(found, faults=renamed)] if renamed != found.faults else []),
    ]


def refutes(proof: Replayed, found: Told) -> bool:
    """Return whether the results of a problem are right where the faults would make them wrong."""
    for one in with_a_window(found):
        compared = proof.compared(one, in_every_way=True)
        if compared is None and one is not found and not proof.has_window:
            continue
        if compared is None or compared.fits:
            return False
    return True
