"""Read the two calls of a problem: explain the readout, and keep the faults that also give the results of the proof.

A *readout* is a call with special inputs, whose results show what a kernel computed for each pair of tokens. Different
faults may give the same results with these inputs. The *proof* is a call with random inputs, in the same ring.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from ringspec.conformance.cases.model import Outputs
from ringspec.conformance.readout.conclusion import Conclusion, conclude
from ringspec.conformance.readout.faults.hints import ROUNDING
from ringspec.conformance.readout.problem.problems import Problem
from ringspec.conformance.readout.proof.calls import expressible
from ringspec.conformance.readout.proof.infinite_rows import by_infinite_rows
from ringspec.conformance.readout.proof.replay import Replayed, explains, replay_of
from ringspec.conformance.readout.proof.rounded_inputs import rounded_inputs
from ringspec.conformance.readout.reading import SAME, SAVED, Named, PassRead, Reading
from ringspec.conformance.readout.search.not_finite import NOT_FINITE, RESULTS
from ringspec.conformance.readout.search.read_problem import read
from ringspec.conformance.readout.search.rounding import narrow_results
from ringspec.conformance.target.protocol import Call

MOST_TRIED, MOST_OF_TILES = 6, 2  # sets of faults of a pass
# The largest share of a search in a problem in which a search for a known bug with the same results found nothing.
SHARE_AGAIN = 0.006
OF_TILES = re.compile(r"\btiles? of \d")
# They may be a short last tile.
OF_LAST = re.compile(r"for the last \d+ (queries|keys) of a worker")
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
    compared = replay_of(problem.proof, outputs).compared(Conclusion())
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

    def same_without_base(found: Conclusion) -> bool:
        # A wrong lse that is saved is no mistake that the backward pass can repeat, and where the mistake in storing o
        # changes nothing, nothing is used from before it.
        return found.base in (SAME, SAVED) and explains(
            dataclasses.replace(found, base=""), calls, outputs
        )

    tried: list[Conclusion] = []
    explained = [one for one in others if one.explained]
    # What accounts for most of the other problems is tried first.
    for one, found in (
        (one, conclude(x)) for x in (explained, *([y] for y in explained)) for one in x[:1]
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
        if others and explains(Conclusion(tuple(others), base), calls, outputs):
            faults = others
    return faults


def with_faults(part: PassRead, found: Conclusion, possible: Sequence[Named]) -> PassRead:
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
        together = Conclusion(faults=(*forward, *backward), base=second.base)
        found = replayed.compared(together) if together.faults else None
        if found is None:
            return None
        if found.fits:
            faults = replayed.without_contradiction(together).faults
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
            found = replayed.compared(Conclusion(), phase)
            passes.append(one if found is None or found.fits else PassRead(left=NOT_RANDOM))
            continue
        if one is None or not one.sets or one.base:
            passes.append(one if one is None or not one.sets else PassRead(left=NOT_PROVED))
            continue
        sets = [
            faults
            for faults in simplest(one)
            if (found := replayed.compared(Conclusion(faults), phase)) is not None and found.fits
        ]
        passes.append(PassRead(tuple(sets)) if sets else PassRead(left=NOT_PROVED))
    if all(one is None or one.whole for one in passes):
        last = max(number for number, one in enumerate(passes) if one is not None)
        passes[last] = PassRead(left=NOT_PROVED)
    return dataclasses.replace(reading, forward=passes[0], backward=passes[1])
