"""Explain the results of one problem: find sets of faults that give every number of a pass, or say what is left.

A *problem* is a call whose results show what the kernel computed for each pair of tokens. A *fault* is a mistake of a
kernel at some place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from ringspec.conformance.cases.model import Outputs
from ringspec.conformance.diagnose.candidates import run_right
from ringspec.conformance.readout.faults.choices import Choices
from ringspec.conformance.readout.faults.hints import ROUNDING
from ringspec.conformance.readout.faults.places import PAIRS
from ringspec.conformance.readout.model.backward import backward_pass
from ringspec.conformance.readout.model.forward import forward_pass
from ringspec.conformance.readout.problem.geometry import WAYS
from ringspec.conformance.readout.problem.pairs import Seen, joined, seen_in, without_padding
from ringspec.conformance.readout.problem.problems import COARSE, Problem
from ringspec.conformance.readout.reading import Named, PassRead, Reading, in_words
from ringspec.conformance.readout.search.backward_match import match_backward
from ringspec.conformance.readout.search.backward_search import explain_backward
from ringspec.conformance.readout.search.context import EVALUATIONS, SearchContext
from ringspec.conformance.readout.search.fault_sets import composed, cost
from ringspec.conformance.readout.search.forward_search import explain_forward, match_forward
from ringspec.conformance.readout.search.known_faults import Known
from ringspec.conformance.readout.search.matches import Explanation, Match
from ringspec.conformance.readout.search.not_finite import FROM_FORWARD, GRADIENTS, not_finite
from ringspec.conformance.readout.search.read_factors import backward_factors, forward_factors
from ringspec.conformance.readout.search.rounding import (
    LOOSE,
    backward_rounding,
    forward_rounding,
    is_rounding,
    less_exact,
    rounded_values,
)
from ringspec.conformance.readout.search.sizes import agrees, sizes_of
from ringspec.conformance.readout.search.unexplained import left_of
from ringspec.formats import load
from ringspec.recipes import RECIPES

MOST_SETS = 40
LEAST_OF_WAYS = 0.03  # of a whole search, in each other way of computing a block
LEAST_FOR_WAYS = 0.12  # a search with a smaller share is made in the usual way alone
EVALUATIONS_AGAIN = 13_000  # in all searches with the tolerance of 16-bit parts
NOT_SEARCHED = "the explanations of other problems do not fit, and no others were searched"


def read(
    problem: Problem,
    outputs: Outputs,
    share: float = 1.0,
    proof: Outputs | None = None,
    known: Sequence[Sequence[Named]] = (),
    refuted: str = "",
) -> Reading:
    """Explain the results of one problem; ``share``: the part of the usual work that its searches may do; 0: no search.

    ``proof``: the results of the call with random inputs, if they are known. ``known``: sets of faults that other
    problems showed. ``refuted``: a kind of fault that is not tried.
    """
    geometry = problem.pairs.geometry
    results = without_padding(geometry, {x: joined(map(load, outputs[x])) for x in outputs})
    seen = seen_in(geometry, results)
    exact, sizes = run_right(problem.call, RECIPES["float64"]), sizes_of(problem)
    right = without_padding(geometry, {name: joined(exact[name]) for name in results})
    expected = {name: (right[name], sizes[name]) for name in results}
    if agrees(results, expected, problem.tolerance):
        return Reading(problem.id, True)
    missing = not_finite(geometry, results, right)
    if not share and "forward" not in missing:
        return Reading(problem.id, False, PassRead(left=NOT_SEARCHED))
    names = [[one.name for one in faults if not is_rounding(one.kind)] for faults in known]
    gradients = {name: results[name] for name in GRADIENTS if name in results}
    if "forward" in missing and not agrees(gradients, expected, problem.tolerance):
        missing["backward"] = FROM_FORWARD
    given = Task(problem, seen, share, proof or {}, names, refuted, missing)
    found = read_both(given)
    # Other ways differ in rules about tiles, which single faults show after few evaluations. Then sets are tried,
    # if nothing explains the results.
    ways = WAYS.get(geometry.layout, ())[1:] if share > LEAST_FOR_WAYS and not missing else ()
    for most, enough in ((LEAST_OF_WAYS, settled), (share / 2, attrgetter("explained"))):
        for parts in ways:
            if not enough(found):
                way = dataclasses.replace(given, parts=parts, share=most)
                found = better(found, read_both(way))
    if agrees(results, expected, COARSE) and not found.explained:
        return Reading(problem.id, False, evaluations=found.evaluations)
    return found


def read_both(given: Task) -> Reading:
    """Explain both passes of a kernel; a pass with results that are not finite is not searched."""
    if "forward" in given.not_finite:
        left = PassRead(left=given.not_finite["forward"])
        of_gradients = given.not_finite.get("backward")
        return Reading(
            given.problem.id, False, left, PassRead(left=of_gradients) if of_gradients else None
        )
    with np.errstate(all="ignore"):  # wrong choices overflow
        context, (found, choices), forward, work = read_forward(given)
        backward = None
        if "backward" in given.not_finite:
            backward = PassRead(left=given.not_finite["backward"])
        elif given.seen.p is not None:
            backward = read_backward(given, context, choices, found.whole)
    work += context.model.evaluations
    return Reading(given.problem.id, False, forward, backward, work)


def settled(found: Reading) -> bool:
    """Return whether a reading is explained without a list of pairs."""
    first = [fault for one in found.passes for fault in (one.sets[0] if one.sets else ())]
    return found.explained and not any(PAIRS in fault.place for fault in first)


def better(one: Reading, other: Reading) -> Reading:
    """Return the reading that explains more passes, of two that explain as many the one without lists of pairs."""

    def worth(reading: Reading) -> tuple[int, bool]:
        return sum(x.whole for x in reading.passes), settled(reading)

    best = other if worth(other) > worth(one) else one
    return dataclasses.replace(best, evaluations=one.evaluations + other.evaluations)


@dataclass(frozen=True)
class Task:
    """What was read from the results of a problem; ``share`` and ``proof`` are as for :func:`read`.

    ``known``: the names of the faults that other problems showed. ``refuted``: a kind that is not tried, or ''.
    ``not_finite``: by pass, the rows whose results are not finite, in words. ``parts``: as in a ring's geometry.
    """

    problem: Problem
    seen: Seen
    share: float
    proof: Outputs
    known: Sequence[Sequence[tuple[str, str, str]]]
    refuted: str = ""
    not_finite: Mapping[str, str] = field(default_factory=dict)
    parts: str = ""


def explained_by(
    given: Task,
    context: SearchContext,
    predict: Callable[[Choices], Match],
    search: Callable[[], tuple[Explanation, Choices]],
    rounding: Callable[[Match], tuple[str, ...] | None],
    phase: str,
) -> tuple[tuple[Explanation, Choices], PassRead]:
    """Explain one pass: with the usual tolerance, and with one that leaves room for values that are rounded to 16 bits.

    The second is tried first if the match without faults looks like rounding. What it leaves must be ``rounding``, unless
    one of the sets of faults that it finds leaves nothing at the usual tolerance. ``predict`` compares the pass of a ring
    with given choices with what was read.
    """
    usual, right = given.problem.tolerance, context.model.right
    tolerances = [usual, *([LOOSE] if usual < LOOSE else [])]
    if len(tolerances) > 1:
        found = []
        for context.tolerance in tolerances:
            found.append(predict(right))
        tolerances = tolerances[::-1] if rounded_values(*found) else tolerances
    first, *again = tolerances
    failed: tuple[Explanation, Choices] | None = None
    for tolerance in (first, *again):
        context.tolerance = tolerance
        context.search_from(right)
        if tolerance != first:
            context.evaluations += given.share * EVALUATIONS_AGAIN
        result = search()
        explanation = result[0]
        if explanation.whole:
            if tolerance == usual:
                return result, pass_of(given.seen, explanation, phase)
            context.tolerance = usual
            exact = exactly(explanation, right, predict)
            if exact is not None:
                return (exact, composed(right, exact.faults)), pass_of(given.seen, exact, phase)
            context.tolerance = tolerance
            words = rounding(explanation.match)
            if words is not None:
                return result, pass_of(given.seen, explanation, phase, words)
        if failed is None or tolerance == usual:
            failed = dataclasses.replace(explanation, faults=(), whole=False), result[1]
    assert failed is not None
    return failed, pass_of(given.seen, failed[0], phase)


def exactly(
    found: Explanation, right: Choices, predict: Callable[[Choices], Match]
) -> Explanation | None:
    """Return an explanation with only those of its sets of faults after which ``predict`` leaves nothing; None without one."""
    sets = [one for one in (found.faults, *found.others) if one and not found.base]
    whole = [one for one in sets if predict(composed(right, one)).whole]
    return dataclasses.replace(found, faults=whole[0], others=tuple(whole[1:])) if whole else None


def read_backward(
    given: Task, context: SearchContext, choices: Choices, forward_is_whole: bool
) -> PassRead:
    """Explain the backward pass of the kernel, given the ``choices`` of a ring with the faults of its forward pass."""
    seen, usual = given.seen, given.problem.tolerance
    model, scale = context.model, context.geometry.scale
    forward = forward_pass(model, choices)
    saved = forward, forward.lse if seen.lse is None else seen.lse, seen.through
    plain = match_backward(context, seen, backward_pass(model, model.right, *saved))
    context.factors["backward"] = backward_factors(model, seen, plain, usual)
    known = Known(context, given.known).faults("backward")
    return explained_by(
        given,
        context,
        lambda wrong: match_backward(context, seen, backward_pass(model, wrong, *saved)),
        lambda: (explain_backward(context, seen, choices, forward_is_whole, known), choices),
        lambda match: backward_rounding(seen, match, usual, given.proof, context.largest, scale),
        "backward",
    )[1]


def pass_of(seen: Seen, found: Explanation, phase: str, rounded: Sequence[str] = ()) -> PassRead:
    """Return an explanation of one pass in the form that a reading holds; ``rounded``: which values are rounded, in words."""
    weaker = tuple(less_exact(words) or words for words in rounded)
    statements = [rounded] if weaker == tuple(rounded) else [rounded, weaker]
    sets = (found.faults, *found.others) if found.faults or rounded else ()
    return PassRead(
        tuple(
            (
                *map(in_words, one),
                *(Named(phase, x, "", 1.0 + 0.1 * number, ROUNDING) for x in words),
            )
            for number, words in enumerate(statements)
            for one in sets[:MOST_SETS]
        ),
        "" if found.whole else left_of(seen, found),
        found.base,
    )


ForwardRead = tuple[SearchContext, tuple[Explanation, Choices], PassRead]


def read_forward(given: Task) -> tuple[SearchContext, tuple[Explanation, Choices], PassRead, int]:
    """Explain the forward pass of the kernel.

    If queries travel in the backward pass, either keys or queries may travel in the forward pass, and both are tried.
    The result is the better explanation, with the :class:`SearchContext` that found it, the choices of a ring with its faults,
    and the evaluations of the other context.
    """
    found: list[ForwardRead] = []
    circulation = given.problem.pairs.geometry.circulation
    for travels in ("keys", "queries") if circulation == "q" else ("keys",):
        found.append(read_forward_as(given, travels))
        explanation, _ = found[-1][1]
        listed = any(PAIRS in fault.place.words for fault in explanation.faults)
        if explanation.whole and not listed:
            break
    best = max(found, key=lambda one: preference(one[1][0]))
    others = [context for context, *_ in found if context is not best[0]]
    return *best, sum(context.model.evaluations for context in others)


def read_forward_as(given: Task, travels: str) -> ForwardRead:
    """Explain the forward pass of a kernel in which ``travels`` travel, 'keys' or 'queries'."""
    problem, seen = given.problem, given.seen
    there = dataclasses.replace(problem.pairs.geometry, forward_travels=travels, parts=given.parts)
    pairs = dataclasses.replace(problem.pairs, geometry=there)
    context = SearchContext(pairs, problem.tolerance, given.share * EVALUATIONS, given.refuted)
    model = context.model
    plain = match_forward(context, seen, forward_pass(model, model.right))
    context.factors["forward"] = forward_factors(model, seen, plain, problem.tolerance)
    known = Known(context, given.known).faults("forward")
    explained, passed = explained_by(
        given,
        context,
        lambda wrong: match_forward(context, seen, forward_pass(model, wrong)),
        lambda: explain_forward(context, seen, known),
        lambda match: forward_rounding(seen, match, problem.tolerance, given.proof),
        "forward",
    )
    return context, explained, passed


def preference(found: Explanation) -> tuple[bool, float]:
    """Return a sort key that is larger for the better of two explanations.

    A complete explanation is better than none. Of two complete ones, the simpler is better; without one, the ring whose
    computation without faults agrees more with what was read.
    """
    return found.whole, -cost((found.faults, found.match)) if found.whole else found.match.score
