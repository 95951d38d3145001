"""Run known bugs and read their effect: a pattern, weights, or errors in units of their bounds.

The attention pattern is read as the probes read it: one-hot values write the weight of each key into o,
one-hot dy those of the backward into dv, one-hot keys write dZ into dq, one-hot queries into dk. The
other inputs are those of the case that detects the bug. The arithmetic is float64, so that every
difference from the specification's run is due to the bug, not to rounding.

If none of the four readings differs, the case itself is run in the recipe in which it fails, and the
error of each row is divided by its bound, as in the conformance suite.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.cases.calls import call_of, expected_of, forward_alone
from ringspec.conformance.cases.golden import golden_case
from ringspec.conformance.cases.model import RunCase
from ringspec.conformance.cases.noise import cases as noise_cases
from ringspec.conformance.cases.probes import cases as probe_cases
from ringspec.conformance.diagnose.mutants import Mutant, MutantTarget, precision_bugs, run_mutant
from ringspec.conformance.diagnose.mutants.hooks import Hooks
from ringspec.conformance.diagnose.mutants.ring import RESULTS
from ringspec.conformance.diagnose.picture import gathered, place, start
from ringspec.conformance.judge.bounds import bounds_of, compared
from ringspec.conformance.judge.scales import with_all_rows
from ringspec.conformance.report.records import Finding
from ringspec.conformance.target import Call, Target
from ringspec.conformance.target.results import frozen
from ringspec.conformance.targets.reference import REFERENCES
from ringspec.formats import load, store
from ringspec.recipes import RECIPES
from ringspec.vectors import VectorSet, open_set
from ringspec.vectors.format.case import Case
from ringspec.vectors.sets.cache import tensors_of

READINGS = ("o", "dv", "dq", "dk")
KEYS_FIRST = ("dk", "dv")
LARGEST = 64
# A weight that is off by less is shown as an error in units of its bound.
LEAST_FACTOR = 1.02
# dZ is a difference: below this part of the largest, a number is rounding.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Pattern:
    """One head of one reading: pairs that should be visible, and pairs that are; NaN in ``got`` stays NaN.

    ``expected`` and ``got`` [queries, keys] are weights or dZ; ``workers_q``, ``workers_k`` say
    whose token each row and column is; ``origin`` is the first query and key of a cut.
    """

    tensor: str
    case: str
    head: tuple[int, int]
    expected: NDArray[np.float64]
    got: NDArray[np.float64]
    workers_q: NDArray[np.int64]
    workers_k: NDArray[np.int64]
    origin: tuple[int, int]
    weights: bool  # whether the pairs are right and their weights are shown


@dataclass(frozen=True)
class RowErrors:
    """The largest error of each row of one head, in units of its bound; NaN where the result is NaN.

    ``errors`` [rows] and ``workers`` [rows]; ``failing`` are all tensors that fail in the case.
    """

    tensor: str
    case: str
    recipe: str
    head: tuple[int, int]
    axis: str
    errors: NDArray[np.float64]
    workers: NDArray[np.int64]
    failing: tuple[str, ...]


@dataclass(frozen=True)
class WorstErrors:
    """The largest error of each tensor of a probe, in units of its bound."""

    case: str
    recipe: str
    tensors: tuple[str, ...]
    errors: tuple[float, ...]


@dataclass(frozen=True)
class Ratios:
    """Root mean square of error / predicted noise by tensor of a noise case, and the first alarm."""

    case: str
    recipe: str
    tensors: tuple[str, ...]
    right: tuple[float, ...]
    got: tuple[float, ...]
    alarm: str


def shown(mutant: Mutant) -> Pattern | RowErrors | WorstErrors | Ratios:
    """Choose the picture of a bug: the first reading with other pairs, else other weights, else errors.

    A bug of rounding is drawn by its errors. dq and dk come after the weights of o and dv unless they
    show a masked pair: dZ may also vanish at a visible pair, where its terms cancel.
    """
    recipe, id = case_to_show(mutant)
    if id not in core().ids:
        return of_probe(mutant, recipe, id)
    if mutant in precision_bugs.BUGS:
        return row_errors(mutant, recipe, id)
    read = []
    for pattern in (found for name in READINGS for found in reading(mutant, id, name)):
        if other_pairs(pattern, id):
            return pattern
        read.append(pattern)
    for pattern in read:
        if largest_factor(pattern) > LEAST_FACTOR:
            return dataclasses.replace(pattern, weights=True)
    return row_errors(mutant, recipe, id)


@cache
def core() -> VectorSet:
    """The core set, opened once."""
    return open_set("core")


def case_to_show(mutant: Mutant) -> tuple[str, str]:
    """Recipe and id of the golden case that detects the bug, else of a probe or a noise case."""
    golden = [(r, id) for r, id in mutant.kills.items() if id in core().ids]
    return (golden or list(mutant.kills.items()))[0]


@cache
def called(id: str) -> Call:
    return call_of(core().case(id), core().tensors(id))


def reading(mutant: Mutant, id: str, name: str) -> Iterator[Pattern]:
    """The reading of the head that differs most, if the case has this reading at all."""
    call = asked(id, name)
    if call is None or not mutant.applies(call):
        return
    expected = right_matrix(id, name)
    got = matrix(call, name, run_mutant(mutant, call, RECIPES["float64"]))
    b, h = worst_head(expected, got)
    yield cut(call, name, id, (b, h), expected[b, h], got[b, h])


@cache
def asked(id: str, name: str) -> Call | None:
    """The call of a case with the one-hot inputs of a reading; None where it has no such result."""
    call = called(id)
    if call.operation == "merge":
        return None
    if name == "o":
        if "forward" not in call.passes:
            return None
        return with_tensors(forward_alone(call), v=hot(call, "k"))
    if "backward" not in call.passes:
        return None
    if name == "dv":
        width = tokens(call, "q")
        return with_tensors(call, v=zeros(call, "v", width), dy=hot(call, "q"))
    if name == "dq":
        return with_tensors(call, q=zeros(call, "q", tokens(call, "k")), k=hot(call, "k"))
    return with_tensors(call, q=hot(call, "q"), k=zeros(call, "k", tokens(call, "q")))


def with_tensors(call: Call, **arrays: list[NDArray]) -> Call:
    stored = {
        name: frozen(store(x, call.formats["inputs"]) for x in parts)
        for name, parts in arrays.items()
    }
    return dataclasses.replace(call, tensors={**call.tensors, **stored})


def tokens(call: Call, side: str) -> int:
    index = table(call, side)
    return int((index >= 0).sum())


def table(call: Call, side: str) -> NDArray[np.int64]:
    index = call.index_q if side == "q" else call.index_k
    assert index is not None
    return index


def hot(call: Call, side: str) -> list[NDArray]:
    """Each token is 1 in the column of its own number, in every batch and head; padding is 0."""
    like, index = call.tensors["q" if side == "q" else "k"], table(call, side)
    width = tokens(call, side)
    made = []
    for x, slots in zip(like, index, strict=True):
        row = (slots[:, None] == np.arange(width)).astype(float)
        made.append(np.broadcast_to(row, (*x.shape[:2], *row.shape)))
    return made


def zeros(call: Call, name: str, width: int) -> list[NDArray]:
    return [np.zeros((*x.shape[:3], width)) for x in call.tensors[name]]


@cache
def right_matrix(id: str, name: str) -> NDArray[np.float64]:
    call = asked(id, name)
    assert call is not None
    with np.errstate(all="ignore"):
        return matrix(call, name, RESULTS[call.operation](call, RECIPES["float64"], Hooks()))


def matrix(call: Call, name: str, results) -> NDArray[np.float64]:
    """[B, heads, queries, keys] in the order of the tokens."""
    side = "k" if name in KEYS_FIRST else "q"
    whole = gathered(results[name], table(call, side))
    return whole.swapaxes(2, 3) if name in KEYS_FIRST else whole


def pairs_of(pattern: Pattern) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Expected and recovered pairs. A weight counts unless it is 0, dZ unless it is rounding; NaN counts."""
    least = 0.0
    if pattern.tensor in ("dq", "dk"):
        sizes = np.abs(np.stack([pattern.expected, pattern.got]))
        least = ROUNDING * float(sizes[np.isfinite(sizes)].max(initial=0.0))
    return np.abs(pattern.expected) > least, ~(np.abs(pattern.got) <= least)


def other_pairs(pattern: Pattern, id: str) -> bool:
    """True if the picture shows pairs: another pair or NaN; for dZ, a masked pair or many pairs."""
    expected, got = pairs_of(pattern)
    differs = expected != got
    if pattern.tensor in ("dq", "dk"):
        hidden = np.asarray(right_matrix(id, "dv") == 0).all(axis=(0, 1))
        at = np.s_[: differs.shape[0], : differs.shape[1]]
        extra = got & ~expected & hidden[shifted(pattern)][at]
        return bool(
            extra.any() or np.isnan(pattern.got).any() or 4 * differs.sum() > expected.sum()
        )
    return bool(differs.any() or np.isnan(pattern.got).any())


def shifted(pattern: Pattern) -> tuple[slice, slice]:
    top, left = pattern.origin
    return np.s_[top : top + LARGEST, left : left + LARGEST]


def factors(pattern: Pattern) -> NDArray[np.float64]:
    """got / expected at the pairs that should be visible, NaN elsewhere."""
    seen, _ = pairs_of(pattern)
    with np.errstate(all="ignore"):
        return np.where(seen, pattern.got / np.where(seen, pattern.expected, 1.0), np.nan)


def largest_factor(pattern: Pattern) -> float:
    """The largest factor by which a number is off, up or down; infinite for a changed sign."""
    with np.errstate(all="ignore"):
        ratio = factors(pattern)
        far = np.where(ratio > 0, np.maximum(ratio, 1 / ratio), np.inf)
    return float(far[~np.isnan(ratio)].max(initial=1.0))


def worst_head(expected: NDArray, got: NDArray) -> tuple[int, int]:
    """The head with the most pairs that differ; of equals, the one whose numbers differ most."""
    with np.errstate(all="ignore"):
        wrong = ((expected != 0) != (got != 0)) | ~np.isfinite(got)
        count = wrong.sum(axis=(2, 3))
        size = np.nan_to_num(np.abs(got - expected)).sum(axis=(2, 3))
    order = count + size / (1 + size.max(initial=0.0))
    b, h = np.unravel_index(int(order.argmax()), order.shape)
    return int(b), int(h)


def cut(
    call: Call, name: str, id: str, head: tuple[int, int], expected: NDArray, got: NDArray
) -> Pattern:
    """At most 64 x 64 of one head, from a little before the first difference."""
    differs = np.argwhere(~((expected == got) | (np.isnan(expected) & np.isnan(got))))
    row, column = (int(n) for n in differs[0]) if len(differs) else (0, 0)
    top, left = start(row, expected.shape[0]), start(column, expected.shape[1])
    part = np.s_[top : top + LARGEST, left : left + LARGEST]
    workers_q, workers_k = (owners(table(call, side)) for side in "qk")
    return Pattern(
        name,
        id,
        head,
        expected[part],
        got[part],
        workers_q[part[0]],
        workers_k[part[1]],
        (top, left),
        False,
    )


def owners(index: NDArray[np.int64]) -> NDArray[np.int64]:
    """The worker of each token."""
    return np.array([place(token, index)[0] for token in range(int((index >= 0).sum()))])


def as_run_case(id: str) -> RunCase:
    stored, whole = partial(core().tensors, id), partial(tensors_of, core(), id)
    return golden_case(core().case(id), stored, whole)


def row_errors(mutant: Mutant, recipe: str, id: str) -> RowErrors:
    """Run the case that detects the bug in its recipe, and judge it as the suite does."""
    target = MutantTarget(mutant, recipe)
    case, tensors, claims = core().case(id), core().tensors(id), target.capabilities
    [call] = as_run_case(id).make(claims)
    outputs = answers(target, call)
    findings = compared(claims, case, tensors, call, outputs)
    failing = [one for one in findings if one.kind != "ok"]
    assert failing, f"{id} does not catch {mutant.id} in {recipe}"
    worst = max(failing, key=badness)
    name = worst.tensor
    expected = expected_of(case, with_all_rows(case, tensors))
    bounds = bounds_of(claims, call, expected)
    allowed = bounds.factors[name], bounds.floors[name]
    pieces = [
        in_bounds(load(got), want, scale, *allowed)
        for got, want, scale in zip(
            outputs[name], expected[name].values, expected[name].scale, strict=True
        )
    ]
    names = tuple(dict.fromkeys(one.tensor for one in failing))
    if name in ("dsinks", "dbias"):
        return flat_errors(name, case, recipe, pieces, names)
    side = "k" if name in KEYS_FIRST else "q"
    index = table(call, side) if call.operation != "merge" else np.arange(pieces[0].shape[2])[None]
    rows = gathered([x[..., None] for x in pieces], index)[..., 0]
    b, h = worst.where[:2]
    who = owners(index)
    return RowErrors(name, id, recipe, (b, h), AXIS_OF[side], rows[b, h], who, names)


AXIS_OF = {"q": "query (token number)", "k": "key (token number)"}


def badness(finding: Finding) -> float:
    return np.inf if np.isnan(finding.error) else finding.error


def answers(target: Target, call: Call) -> dict[str, tuple[NDArray, ...]]:
    result = target.run(call)
    names = ("o", "lse", "dq", "dk", "dv", "dsinks", "dbias")
    return {n: tuple(getattr(result, n)) for n in names if getattr(result, n) is not None}


def in_bounds(
    got: NDArray, want: NDArray, scale: NDArray, factor: float, floor: float
) -> NDArray[np.float64]:
    """|got - want| / bound, the largest over the last axis where ``scale`` has none; NaN stays NaN."""
    with np.errstate(all="ignore"):
        bound = factor * scale + np.where(scale == 0, 0.0, floor)
        error = np.where(got == want, 0.0, np.abs(got - want))
        if error.ndim > bound.ndim:
            error = error.max(axis=-1)
        return np.where(error == 0, 0.0, error / bound)


def flat_errors(
    name: str, case: Case, recipe: str, pieces: list[NDArray], failing: tuple[str, ...]
) -> RowErrors:
    """dsinks and dbias: one number after the other, worker by worker."""
    flat = [x.ravel() for x in pieces]
    workers = np.concatenate([np.full(x.size, r) for r, x in enumerate(flat)])
    axis = "element, worker by worker"
    return RowErrors(name, case.id, recipe, (0, 0), axis, np.concatenate(flat), workers, failing)


def of_probe(mutant: Mutant, recipe: str, id: str) -> WorstErrors | Ratios:
    """The result of a probe or a noise case, for a bug that no golden case detects."""
    run = next(one for one in (*probe_cases(), *noise_cases()) if one.id == id)
    target = MutantTarget(mutant, recipe)
    calls = list(run.make(target.capabilities))
    verdict = run.judge(target.capabilities, calls, [answers(target, call) for call in calls])
    assert not verdict.passed, f"{id} does not catch {mutant.id} in {recipe}"
    if verdict.noise is None:
        names = tuple(dict.fromkeys(one.tensor for one in verdict.findings))
        worst = tuple(max(f.error for f in verdict.findings if f.tensor == n) for n in names)
        return WorstErrors(id, recipe, names, worst)
    right = REFERENCES[recipe]
    sound = run.judge(right.capabilities, calls, [answers(right, call) for call in calls])
    assert sound.passed and sound.noise is not None
    names = tuple(verdict.noise["rms"])
    ratios = tuple(tuple(one["rms"][n] for n in names) for one in (sound.noise, verdict.noise))
    return Ratios(id, recipe, names, *ratios, verdict.noise["alarms"][0])
