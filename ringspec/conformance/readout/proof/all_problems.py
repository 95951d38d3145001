"""Check the explanation of several problems against those that are right, and prove it problem by problem.

A fault is refuted if a problem whose results are right would show it. A *proof* is the second call of a problem, with
random inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterable, Sequence

from ringspec.conformance.cases.model import Outputs
from ringspec.conformance.readout.conclusion import (
    BATCHES,
    WITH_A_WINDOW,
    Conclusion,
    conclude,
    separate,
)
from ringspec.conformance.readout.faults.kinds import listing
from ringspec.conformance.readout.faults.masks import SIZES, in_single_sizes, with_more_sizes
from ringspec.conformance.readout.problem.problems import Problem
from ringspec.conformance.readout.problem.settings import (
    BACKWARDS,
    MORE_WORKERS,
    ODD_SLOTS,
    SLOTS,
    WORKERS,
)
from ringspec.conformance.readout.proof.calls import expressible
from ringspec.conformance.readout.proof.read_proven import simplest
from ringspec.conformance.readout.proof.replay import Replayed, explains, gives, replay_of
from ringspec.conformance.readout.reading import Named, PassRead, Reading

MOST_NAMED = 3  # problems in a sentence; one more if it is the last
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


def unrefuted(
    readings: Sequence[Reading], right: Sequence[tuple[Problem, Sequence[Outputs]]]
) -> Conclusion:
    """Combine the readings of the problems that failed, without faults that would also show in problems that are right.

    ``right``: these problems, with the results of their two calls. If nothing else explains the problems that failed, the
    faults are told.
    """
    if all(BATCHES in one.problem for one in readings) or not any(x.explained for x in readings):
        return conclude(readings)
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
    return conclude([without_refuted(one, right_with(shown)) for one in own])


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
    found: Conclusion,
    readings: Sequence[Reading],
    right: Sequence[tuple[Problem, Sequence[Outputs]]],
) -> Conclusion:
    """Say in which problems, whose results are right, the faults do not hold. The arguments are those of :func:`unrefuted`.

    Sizes of tiles and other explanations that these problems refute are left out.
    """
    if not found.faults or all(BATCHES in one.problem for one in readings):
        return found
    proofs = proofs_of(readings, right)

    def holds(id: str, one: Conclusion) -> bool:
        return not any(refutes(proof, one) for _, proof in proofs)

    found = with_sizes_that_hold(found, holds) if proofs else found
    against = [id for id, proof in proofs if refutes(proof, found)]
    if not against:
        same = (dataclasses.replace(found, faults=one.faults) for one in found.alternatives)
        kept = (x for x, one in zip(found.alternatives, same, strict=True) if holds("", one))
        found = dataclasses.replace(found, alternatives=tuple(kept))
    return dataclasses.replace(found, refuted=does_not_hold(found, against))


def does_not_hold(found: Conclusion, against: Sequence[str]) -> tuple[str, ...]:
    """Say in which problems, whose results are right, the faults do not hold."""
    said = []
    for part, words in SHOWN_ONLY.items():
        if all(part in id for id in found.explained) and any(part not in id for id in against):
            said.append(words)
            against = [id for id in against if part in id]
    if against:
        where, where_not = ids_in_words(found.explained), ids_in_words(against)
        said.append(f"This holds in {where}, but not in {where_not}, whose results are right.")
    return tuple(said)


def ids_in_words(ids: Sequence[str]) -> str:
    """Return the ids of some problems as part of a sentence; of many, only the first.

    >>> ids_in_words(["readout/a", "readout/b", "readout/c", "readout/d", "readout/e"])
    'readout/a, readout/b, readout/c and 2 others'
    """
    if len(ids) <= MOST_NAMED + 1:
        return listing(ids)
    return f"{', '.join(ids[:MOST_NAMED])} and {len(ids) - MOST_NAMED} others"


def with_others(
    found: Conclusion, problems: Sequence[tuple[Problem, Sequence[Outputs]]]
) -> Conclusion:
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


def with_rest(found: Conclusion, readings: Sequence[Reading]) -> Conclusion:
    """Say what is wrong in the problems that are explained by faults of others, and for which no sentence accounts."""
    named = {*found.explained, *found.others}
    rest = [one for one in readings if one.explained and one.problem not in named]
    return dataclasses.replace(
        found, separate=separate(found.faults, found.base, rest, found.separate)
    )


def proved(
    found: Conclusion, problems: Sequence[tuple[Problem, Sequence[Outputs]]], known: Collection[str]
) -> Conclusion:
    """Keep, of the problems for which sentences account, those whose results a ring with exactly the told faults gives.

    The faults of the two passes may come from different problems, so together they are proved only here. ``known``: the
    ids of the problems for which the first faults are proved already.
    """
    results = {problem.id: (problem, outputs) for problem, outputs in problems}

    def holds(id: str, told_there: Conclusion) -> bool:
        problem, outputs = results[id]
        compared, *renamed = [
            gives(one, problem.proof, outputs[1]) for one in with_a_window(told_there)
        ]
        return compared is None or compared.fits or any(one and one.fits for one in renamed)

    apart = [
        dataclasses.replace(one, problems=tuple(x for x in one.problems if holds(x, of_one)))
        for one in found.separate
        for of_one in [Conclusion(one.faults, one.base)]
    ]
    found = dataclasses.replace(found, separate=tuple(one for one in apart if one.problems))
    own = [id for id in found.explained if id not in known]
    refuted = {id for id in own if not holds(id, found)}
    explained = tuple(id for id in found.explained if id not in refuted)
    if not explained:
        return Conclusion(left=found.left, separate=found.separate, shown_by=found.shown_by)
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


def with_sizes_that_hold(found: Conclusion, holds: Callable[[str, Conclusion], bool]) -> Conclusion:
    """Tell, of several sizes of tiles, those that hold in all problems for which the sentence accounts.

    Sizes that give the same numbers in one problem may differ in another one.
    """

    def narrowed(faults: tuple[Named, ...], base: str, ids: Sequence[str]) -> tuple[Named, ...]:
        for number, fault in enumerate(faults):
            sizes = in_single_sizes(fault.kind)
            kept = []
            for kind in sizes if len(sizes) > 1 else ():
                one = Conclusion(with_kind(faults, number, kind), base)
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
        all(any(refutes(x, Conclusion(one, base)) for x in right) for one in simplest(part))
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
            one
            for one in simplest(part)
            if not any(refutes(x, Conclusion(one, base)) for x in right)
        ]
        return dataclasses.replace(part, sets=tuple(sets) or part.sets)

    return dataclasses.replace(
        reading, forward=kept(reading.forward), backward=kept(reading.backward)
    )


def with_a_window(found: Conclusion) -> list[Conclusion]:
    """Return ``found``, and the same with the other name that a fault has in a problem with a window, which it may keep."""
    windowed = {causal: kept for kept, causal in WITH_A_WINDOW.items()}
    renamed = tuple(
        dataclasses.replace(one, kind=windowed.get(one.kind, one.kind)) for one in found.faults
    )
    return [
        found,
        *([dataclasses.replace(found, faults=renamed)] if renamed != found.faults else []),
    ]


def refutes(proof: Replayed, found: Conclusion) -> bool:
    """Return whether the results of a problem are right where the faults would make them wrong."""
    for one in with_a_window(found):
        compared = proof.compared(one, in_every_way=True)
        if compared is None and one is not found and not proof.has_window:
            continue
        if compared is None or compared.fits:
            return False
    return True
