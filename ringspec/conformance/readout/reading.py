"""Explain the results of one problem: find the sets of faults that give every number in them.

A *problem* is a call whose results show what the kernel computed for each pair of tokens. A *fault* is a mistake of a
kernel at some place. A *reading* (:class:`Reading`) is what was found out from the results of one problem. It contains
only plain data, so that a report can hold it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

from ringspec.conformance.cases.model import Outputs
from ringspec.conformance.diagnose.candidates import run_right
from ringspec.conformance.readout.backward_search import explain_backward, match_backward
from ringspec.conformance.readout.choices import Choices
from ringspec.conformance.readout.fault_sets import composed, cost
from ringspec.conformance.readout.forward_search import explain_forward, match_forward
from ringspec.conformance.readout.geometry import WAYS
from ringspec.conformance.readout.hints import ROUNDING, hint_for
from ringspec.conformance.readout.kinds import Fault
from ringspec.conformance.readout.known_faults import Known
from ringspec.conformance.readout.masks import right_mask
from ringspec.conformance.readout.matches import Explanation, Match, near
from ringspec.conformance.readout.model.backward import backward_pass
from ringspec.conformance.readout.model.forward import forward_pass
from ringspec.conformance.readout.model.ring import Model
from ringspec.conformance.readout.model.scores import drop_factors, scores_of_pairs
from ringspec.conformance.readout.not_finite import FROM_FORWARD, GRADIENTS, not_finite
from ringspec.conformance.readout.pairs import Seen, seen_in, without_padding
from ringspec.conformance.readout.places import PAIRS
from ringspec.conformance.readout.problems import COARSE, Problem
from ringspec.conformance.readout.read_factors import (
    EXACT,
    FEWEST,
    LEAST_WEIGHT,
    backward_factors,
    forward_factors,
)
from ringspec.conformance.readout.reader import EVALUATIONS, Reader
from ringspec.conformance.readout.rounding import (
    LOOSE,
    backward_rounding,
    forward_rounding,
    is_rounding,
    less_exact,
    rounded_values,
)
from ringspec.formats import load
from ringspec.problem.model import Array, Booleans
from ringspec.recipes import RECIPES

MOST_SETS = 40
LEAST_OF_WAYS = 0.03  # of a whole search, in each other way of computing a block
LEAST_FOR_WAYS = 0.12  # a search with a smaller share is made in the usual way alone
EVALUATIONS_AGAIN = 13_000  # in all searches with the tolerance of 16-bit parts
MATRICES = {
    "A": "the softmax weights in o",
    "lse": "lse",
    "V": "the rest of o",
    "P": "the softmax weights of the backward pass",
    "dS of dq": "dS as used for dq",
    "dS of dk": "dS as used for dk",
    "dS of bias": "dbias",
    "dsinks": "the gradient of the sinks",
}
# Words that describe a mistake in blocks, and the words for the same mistake in single pairs.
OF_PAIRS = {
    "the block is not computed": "the scores are not computed",
    "the block is counted": "a pair is counted",
    "no pair is masked": "the mask does not hide what it should hide",
}
NOT_SEARCHED = "the explanations of other problems do not fit, and no others were searched"
BY_ROUNDING = (
    "each pair has the correct weight to within 5 %, but the numbers differ by more than rounding allows. "
    "The readout does not see why; ringspec check measures it."
)


@dataclass(frozen=True)
class Named:
    """A fault in words: its ``kind``, its ``place`` ('' is everywhere), and a ``hint`` at the code to look at."""

    phase: str
    kind: str
    place: str
    cost: float
    hint: str

    @property
    def name(self) -> tuple[str, str, str]:
        """What identifies the same fault in another problem."""
        return self.phase, self.kind, self.place

    def told(self) -> str:
        """Return one sentence that describes the fault."""
        where = f", {self.place}" if self.place else ""
        if PAIRS not in self.place:
            return f"In the {self.phase} pass{where}, {self.kind}."
        kind = self.kind
        for of_blocks, of_pairs in OF_PAIRS.items():
            kind = kind.replace(of_blocks, of_pairs)
        return f"In the {self.phase} pass{where} (slots of a worker, from 0), {kind}."


@dataclass(frozen=True)
class PassRead:
    """What was found out about one pass. ``sets``: sets of faults that each give every number, the simplest set first.

    If no set does, ``sets`` is empty, and ``left`` says which matrices and blocks are not explained. ``base``: what the backward pass computes apart from the faults; '' if it is the
    gradient.
    """

    sets: tuple[tuple[Named, ...], ...] = ()
    left: str = ""
    base: str = ""

    @property
    def whole(self) -> bool:
        return not self.left


@dataclass(frozen=True)
class Reading:
    """What was found out from the results of one problem.

    ``right``: the results are correct to within the tolerance. A pass is None if it was not run, or if there is nothing
    to explain: the results are correct, or so close that the faults cannot be told from rounding. ``evaluations``: the
    work of the search, in tables over all pairs; not part of the plain data.
    """

    problem: str
    right: bool
    forward: PassRead | None = None
    backward: PassRead | None = None
    evaluations: int = 0

    @property
    def passes(self) -> tuple[PassRead, ...]:
        return tuple(one for one in (self.forward, self.backward) if one is not None)

    @property
    def explained(self) -> bool:
        """Whether the results are wrong and every wrong number is explained."""
        wrong = any(one.sets or one.base for one in self.passes)
        return not self.right and wrong and all(one.whole for one in self.passes)

    def as_dict(self) -> dict[str, Any]:
        """Return the reading as a dict of plain data."""
        return {
            "problem": self.problem,
            "right": self.right,
            "forward": self.forward and dataclasses.asdict(self.forward),
            "backward": self.backward and dataclasses.asdict(self.backward),
        }


def reading_from(data: Mapping[str, Any]) -> Reading:
    """Return the reading in ``data``, which must satisfy :func:`ringspec.conformance.report.lines.check_reading`."""
    return Reading(
        data["problem"], data["right"], pass_from(data["forward"]), pass_from(data["backward"])
    )


def pass_from(data: Mapping[str, Any] | None) -> PassRead | None:
    if data is None:
        return None
    sets = tuple(tuple(Named(**fault) for fault in one) for one in data["sets"])
    return PassRead(sets, data["left"], data["base"])


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
    given = Given(problem, seen, share, proof or {}, names, refuted, missing)
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


def read_both(given: Given) -> Reading:
    """Explain both passes of a kernel; a pass with results that are not finite is not searched."""
    if "forward" in given.not_finite:
        left = PassRead(left=given.not_finite["forward"])
        of_gradients = given.not_finite.get("backward")
        return Reading(
            given.problem.id, False, left, PassRead(left=of_gradients) if of_gradients else None
        )
    with np.errstate(all="ignore"):  # wrong choices overflow
        reader, (found, choices), forward, work = read_forward(given)
        backward = None
        if "backward" in given.not_finite:
            backward = PassRead(left=given.not_finite["backward"])
        elif given.seen.p is not None:
            backward = read_backward(given, reader, choices, found.whole)
    work += reader.model.evaluations
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
class Given:
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
    given: Given,
    reader: Reader,
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
    usual, right = given.problem.tolerance, reader.model.right
    tolerances = [usual, *([LOOSE] if usual < LOOSE else [])]
    if len(tolerances) > 1:
        found = []
        for reader.tolerance in tolerances:
            found.append(predict(right))
        tolerances = tolerances[::-1] if rounded_values(*found) else tolerances
    first, *again = tolerances
    failed: tuple[Explanation, Choices] | None = None
    for tolerance in (first, *again):
        reader.tolerance = tolerance
        reader.search_from(right)
        if tolerance != first:
            reader.evaluations += given.share * EVALUATIONS_AGAIN
        result = search()
        explanation = result[0]
        if explanation.whole:
            if tolerance == usual:
                return result, pass_of(given.seen, explanation, phase)
            reader.tolerance = usual
            exact = exactly(explanation, right, predict)
            if exact is not None:
                return (exact, composed(right, exact.faults)), pass_of(given.seen, exact, phase)
            reader.tolerance = tolerance
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
    given: Given, reader: Reader, choices: Choices, forward_is_whole: bool
) -> PassRead:
    """Explain the backward pass of the kernel, given the ``choices`` of a ring with the faults of its forward pass."""
    seen, usual = given.seen, given.problem.tolerance
    model, scale = reader.model, reader.geometry.scale
    forward = forward_pass(model, choices)
    saved = forward, forward.lse if seen.lse is None else seen.lse, seen.through
    plain = match_backward(reader, seen, backward_pass(model, model.right, *saved))
    reader.factors["backward"] = backward_factors(model, seen, plain, usual)
    known = Known(reader, given.known).faults("backward")
    return explained_by(
        given,
        reader,
        lambda wrong: match_backward(reader, seen, backward_pass(model, wrong, *saved)),
        lambda: (explain_backward(reader, seen, choices, forward_is_whole, known), choices),
        lambda match: backward_rounding(seen, match, usual, given.proof, reader.largest, scale),
        "backward",
    )[1]


def pass_of(seen: Seen, found: Explanation, phase: str, rounded: Sequence[str] = ()) -> PassRead:
    """Return an explanation of one pass in the form that a reading holds; ``rounded``: which values are rounded, in words."""
    weaker = tuple(less_exact(words) or words for words in rounded)
    statements = [rounded] if weaker == tuple(rounded) else [rounded, weaker]
    sets = (found.faults, *found.others) if found.faults or rounded else ()
    return PassRead(
        tuple(
            (*map(named, one), *(Named(phase, x, "", 1.0 + 0.1 * number, ROUNDING) for x in words))
            for number, words in enumerate(statements)
            for one in sets[:MOST_SETS]
        ),
        "" if found.whole else left_of(seen, found),
        found.base,
    )


def named(fault: Fault) -> Named:
    return Named(*fault.name, round(fault.cost, 3), hint_for(fault.kind))


def left_of(seen: Seen, found: Explanation) -> str:
    """Describe the matrices and blocks that are not explained, and how large their wrong elements are."""
    return "; ".join(
        f"{MATRICES[matrix]} in {blocks_text(equal)}{size_text(seen, found.match, matrix)}"
        for matrix, equal in found.match.blocks.items()
        if not equal.all()
    )


def size_text(seen: Seen, match: Match, matrix: str) -> str:
    """Say how large the wrong elements of a matrix are, as parts of what is expected; '' if too few of these are not 0."""
    read = {
        "A": seen.weights, "P": seen.p, "dS of dq": seen.ds_of_dq, "dS of dk": seen.ds_of_dk
    }.get(matrix)  # fmt: skip
    if read is None:
        return ""
    ours = match.ours[matrix]
    at = ~match.equal[matrix] & (np.abs(ours) > LEAST_WEIGHT) & np.isfinite(read)
    if at.sum() < FEWEST:
        return ""
    low, middle, high = np.quantile(read[at] / ours[at], (0.25, 0.5, 0.75))
    if high - low <= EXACT * abs(middle):
        return f", {middle:.3g} times as large as expected" if middle else ", most of them 0"
    first, last = (f"{x + 0.0:.2g}" for x in (low, high))  # adding 0 makes -0 a 0
    some = first if first == last else f"{first} to {last}"
    return f", half of the wrong ones {some} times as large as expected"


def blocks_text(equal: Booleans) -> str:
    """Describe the wrong blocks or workers; ``equal`` [a, b] or [a] is False for them."""
    where = list(zip(*np.nonzero(~np.asarray(equal)), strict=True))
    if len(where) == equal.size:
        return "all blocks" if equal.ndim == 2 else "all workers"
    if equal.ndim == 1:
        return "worker " + ", ".join(str(a) for (a,) in where)
    return "the blocks (queries of worker, keys of worker) " + ", ".join(
        f"({a}, {b})" for a, b in where
    )


def joined(shards: Iterable[Any]) -> Array:
    """Join the arrays [1, heads, n, ..] of the workers to one array [W, heads, n, ..]."""
    return np.concatenate([np.asarray(x) for x in shards])


def agrees(
    results: Mapping[str, Array], expected: Mapping[str, tuple[Array, Array]], tolerance: float
) -> bool:
    """Return whether results are the expected ones.

    ``expected`` has, by name, the expected values and the sizes of their elements. The size of an element is the sum of
    the absolute values of its terms. ``tolerance`` is relative to this size.
    """
    return all(near(x, *expected[name], tolerance).all() for name, x in results.items())


def sizes_of(problem: Problem) -> dict[str, Array]:
    """Return the sizes of all elements: the sums that define them, with the absolute value of each term.

    The result has o, dq [W, H, n, d], dk, dv [W, Hkv, n, d] and lse [W, H, n].
    """
    pairs, geometry = problem.pairs, problem.pairs.geometry
    model = Model(pairs, [right_mask(geometry).pattern], [])
    forward = forward_pass(model, model.right)
    inputs, dim = problem.inputs, problem.call.worker("q", 0).shape[3]
    q, k, v, dy = (np.abs(inputs[name]) for name in ("q", "k", "v", "dy"))
    k, v = (np.repeat(x, geometry.group, axis=1) for x in (k, v))
    weights, g = forward.weights, np.abs(model.of_heads("g"))
    delta = (weights * g).sum(axis=(1, 4))
    p = np.exp(scores_of_pairs(model, model.right) - forward.lse[:, None, ..., None])
    ds = p * (g * drop_factors(model, model.right) + delta[:, None, ..., None])
    if pairs.dlse is not None:
        ds = ds + p * np.abs(pairs.dlse)[:, None, ..., None]
    more: dict[str, Array] = {}
    per_head = {
        "dk": geometry.scale * np.einsum("abhij,ahid->bhjd", ds, q),
        "dv": np.einsum("abhij,ahid->bhjd", weights, dy),
    }
    if pairs.sinks is not None:
        weight = np.exp(pairs.sinks[None, :, None] - forward.lse[..., None])
        per_sink = weight * delta[..., None]
        more["dsinks"] = per_sink.sum(axis=2).reshape(-1, pairs.sinks.shape[1])
    if pairs.bias is not None:
        of_keys = ds.transpose(0, 2, 3, 1, 4).reshape(pairs.bias.shape)
        more["dbias"] = of_keys[..., np.argsort(geometry.position.ravel())]
    shape = (geometry.workers, -1, geometry.group, geometry.slots, dim)
    return more | {
        "o": np.einsum("abhij,bhjd->ahid", weights, v),
        "lse": np.maximum(1.0, np.abs(forward.lse)),
        "dq": geometry.scale * np.einsum("abhij,bhjd->ahid", ds, k),
        **{name: x.reshape(shape).sum(axis=2) for name, x in per_head.items()},
    }


ForwardRead = tuple[Reader, tuple[Explanation, Choices], PassRead]


def read_forward(given: Given) -> tuple[Reader, tuple[Explanation, Choices], PassRead, int]:
    """Explain the forward pass of the kernel.

    If queries travel in the backward pass, either keys or queries may travel in the forward pass, and both are tried.
    The result is the better explanation, with the :class:`Reader` that found it, the choices of a ring with its faults,
    and the evaluations of the other reader.
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
    others = [reader for reader, *_ in found if reader is not best[0]]
    return *best, sum(reader.model.evaluations for reader in others)


def read_forward_as(given: Given, travels: str) -> ForwardRead:
    """Explain the forward pass of a kernel in which ``travels`` travel, 'keys' or 'queries'."""
    problem, seen = given.problem, given.seen
    there = dataclasses.replace(problem.pairs.geometry, forward_travels=travels, parts=given.parts)
    pairs = dataclasses.replace(problem.pairs, geometry=there)
    reader = Reader(pairs, problem.tolerance, given.share * EVALUATIONS, given.refuted)
    model = reader.model
    plain = match_forward(reader, seen, forward_pass(model, model.right))
    reader.factors["forward"] = forward_factors(model, seen, plain, problem.tolerance)
    known = Known(reader, given.known).faults("forward")
    explained, passed = explained_by(
        given,
        reader,
        lambda wrong: match_forward(reader, seen, forward_pass(model, wrong)),
        lambda: explain_forward(reader, seen, known),
        lambda match: forward_rounding(seen, match, problem.tolerance, given.proof),
        "forward",
    )
    return reader, explained, passed


def preference(found: Explanation) -> tuple[bool, float]:
    """Return a sort key that is larger for the better of two explanations.

    A complete explanation is better than none. Of two complete ones, the simpler is better; without one, the ring whose
    computation without faults agrees more with what was read.
    """
    return found.whole, -cost((found.faults, found.match)) if found.whole else found.match.score
