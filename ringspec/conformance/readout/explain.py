"""Read a target: run it on a few problems and say in sentences what it computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringspec.conformance.diagnose.candidates import run_right
from ringspec.conformance.diagnose.match import diagnose
from ringspec.conformance.readout.choices import Choices
from ringspec.conformance.readout.pairs import Seen, inputs_of, seen_in
from ringspec.conformance.readout.problems import COARSE, Problem, problems_for
from ringspec.conformance.readout.search import Explanation, Reader, near
from ringspec.conformance.readout.vocabulary import Fault
from ringspec.conformance.run.call import Stop, ask, outputs_of
from ringspec.conformance.target.conventions import as_seen
from ringspec.conformance.target.protocol import PerWorker, Target
from ringspec.formats import load
from ringspec.problem.model import Array, Booleans
from ringspec.recipes import RECIPES

MOST_CANDIDATES = 40
MOST_ALTERNATIVES = 2
ABOUT_AS_SIMPLE = 0.5  # difference in cost up to which another explanation is reported, too
MATRICES = {
    "A": "the weights of the forward",
    "lse": "lse",
    "V": "the products of the weights with the values",
    "P": "the weights of the backward",
    "dS of dq": "dS as dq got it",
    "dS of dk": "dS as dk got it",
}


@dataclass(frozen=True)
class Read:
    """One problem, read. ``right``: all results are those of the definition; ``stopped``: why there were none."""

    problem: Problem
    right: bool
    forward: Explanation | None = None
    backward: Explanation | None = None
    outputs: dict[str, PerWorker] = dataclasses.field(default_factory=dict)
    stopped: str = ""

    @property
    def explained(self) -> bool:
        """Tell whether everything that was seen is accounted for by a fault or more."""
        passes = [one for one in (self.forward, self.backward) if one is not None]
        wrong = any(one.faults or one.base for one in passes)
        return not self.right and bool(passes) and wrong and all(one.whole for one in passes)


@dataclass(frozen=True)
class Told:
    """What a target computes.

    ``sentences``: the faults, or what is wrong where they are not known; ``alternatives``: other explanations that fit
    as well; ``explains``: how many of the ``wrong`` problems these faults account for; ``known``: id, title and links of
    a known bug with the same results. ``unread``: why nothing could be read.
    """

    reads: tuple[Read, ...]
    sentences: tuple[str, ...] = ()
    alternatives: tuple[str, ...] = ()
    explains: int = 0
    known: dict[str, Any] | None = None
    unread: str = ""

    @property
    def wrong(self) -> int:
        return sum(not one.right for one in self.reads)

    @property
    def right(self) -> bool:
        """Tell whether at least one problem was read and none was wrong."""
        return bool(self.reads) and self.wrong == 0

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "right": self.right,
            "problems": [
                {"id": one.problem.id, "right": one.right, "stopped": one.stopped}
                for one in self.reads
            ],
            "sentences": list(self.sentences),
            "alternatives": list(self.alternatives),
            "explains": self.explains,
            "wrong": self.wrong,
            "known": self.known,
            "unread": self.unread,
        }


def explain_target(target: Target) -> Told:
    """Run a target on a few problems that it claims, and read what it computes.

    Raises nothing for a target that fails: its problems are wrong, with the reason.

    >>> from ringspec.conformance.targets.reference import reference_float32
    >>> explain_target(reference_float32).right
    True
    """
    problems, reason = problems_for(target.capabilities)
    reads = tuple(read(target, one) for one in problems)
    if not reads:
        return Told((), unread=reason)
    return told(target, reads)


def read(target: Target, problem: Problem) -> Read:
    """Run one problem and explain its results."""
    claims = target.capabilities
    try:
        result, _ = ask(target, as_seen(problem.call, claims))
        outputs = outputs_of(result, problem.call, claims)
    except Stop as stop:
        return Read(problem, False, stopped=f"{stop.outcome}: {stop.message.splitlines()[0]}")
    results = {name: joined(map(load, arrays)) for name, arrays in outputs.items()}
    seen = seen_in(problem.pairs.geometry, results)
    right, sizes = run_right(problem.call, RECIPES["float64"]), sizes_of(problem)
    expected = {name: (joined(right[name]), sizes[name]) for name in results}
    found = Read(problem, agrees(results, expected, problem.tolerance), outputs=outputs)
    if found.right or agrees(results, expected, COARSE):
        return found
    for tolerance in dict.fromkeys((problem.tolerance, COARSE)):
        with np.errstate(all="ignore"):  # wrong choices overflow
            reader, forward, choices = read_forward(problem, seen, tolerance)
            backward = None
            if seen.p is not None:
                backward = reader.backward(seen, choices, forward.whole)
        found = dataclasses.replace(found, forward=forward, backward=backward)
        if found.explained:
            break
    return found


def joined(shards: Iterable[Any]) -> Array:
    """[1, heads, n, ..] of the workers as [W, heads, n, ..]."""
    return np.concatenate([np.asarray(x) for x in shards])


def agrees(
    results: Mapping[str, Array], expected: Mapping[str, tuple[Array, Array]], tolerance: float
) -> bool:
    """Tell whether results are the expected ones; ``expected``: values and sizes by name.

    ``tolerance`` is relative to the size of an element's parts: its sums with absolute values in them.
    """
    return all(near(x, *expected[name], tolerance).all() for name, x in results.items())


def sizes_of(problem: Problem) -> dict[str, Array]:
    """Sizes of o, dq [W, H, n, d], dk, dv [W, Hkv, n, d] and lse [W, H, n]: sums of absolute values."""
    pairs, geometry = problem.pairs, problem.pairs.geometry
    model = Reader(pairs, problem.tolerance).model
    forward = model.forward(model.right)
    dim = problem.call.worker("q", 0).shape[3]
    inputs = inputs_of(pairs, dim)
    q, k, v, dy = (np.abs(inputs[name]) for name in ("q", "k", "v", "dy"))
    k, v = (np.repeat(x, geometry.group, axis=1) for x in (k, v))
    p, g = forward.weights, np.abs(model.of_heads("g", 0))
    ds = p * (g + (p * g).sum(axis=(1, 4))[:, None, ..., None])
    per_head = {
        "dk": geometry.scale * np.einsum("abhij,ahid->bhjd", ds, q),
        "dv": np.einsum("abhij,ahid->bhjd", p, dy),
    }
    shape = (geometry.workers, -1, geometry.group, geometry.slots, dim)
    return {
        "o": np.einsum("abhij,bhjd->ahid", p, v),
        "lse": np.maximum(1.0, np.abs(forward.lse)),
        "dq": geometry.scale * np.einsum("abhij,bhjd->ahid", ds, k),
        **{name: x.reshape(shape).sum(axis=2) for name, x in per_head.items()},
    }


def read_forward(
    problem: Problem, seen: Seen, tolerance: float
) -> tuple[Reader, Explanation, Choices]:
    """The forward; of a Q ring also as one that sends its queries, which the definition leaves free."""
    found = []
    geometry = problem.pairs.geometry
    for travels in ("keys", "queries") if geometry.circulation == "q" else ("keys",):
        there = dataclasses.replace(geometry, forward_travels=travels)
        reader = Reader(dataclasses.replace(problem.pairs, geometry=there), tolerance)
        explanation, choices = reader.forward(seen)
        found.append((reader, explanation, choices))
        if explanation.whole:
            break
    return max(found, key=lambda one: (one[1].whole, one[1].match.score))


def told(target: Target, reads: Sequence[Read]) -> Told:
    """The explanation that accounts for most of the wrong problems."""
    wrong = [one for one in reads if not one.right]
    if not wrong:
        return Told(tuple(reads))
    explained = [one for one in wrong if one.explained]
    if not explained:
        return Told(tuple(reads), tuple(unexplained(wrong)), known=known_bug(target, wrong))
    first = explained[0]
    sentences: list[str] = []
    alternatives: list[str] = []
    counts = []
    for phase in ("forward", "backward"):
        best, others, count = best_of(phase, first, explained)
        sentences += best
        alternatives += others
        counts.append(count)
    left = [one for one in wrong if one not in explained]
    sentences += unexplained(left) if left else []
    return Told(
        tuple(reads),
        tuple(sentences),
        tuple(alternatives),
        min(counts),
        known_bug(target, explained),
    )


def best_of(phase: str, first: Read, explained: Sequence[Read]) -> tuple[list[str], list[str], int]:
    """Sentences, alternatives, and how many problems they account for, of one pass.

    Of the sets of faults that account for the first problem, those that account for most of the others.
    """
    own = first.forward if phase == "forward" else first.backward
    if own is None:
        return [], [], len(explained)
    if not own.faults:
        return [own.base] if own.base else [], [], len(explained)
    sets = [own.faults, *own.others][:MOST_CANDIDATES]
    counted = []
    for faults in sets:
        count = sum(accounts(phase, faults, one) for one in explained)
        counted.append((-count, sum(fault.cost for fault in faults), faults))
    counted.sort(key=lambda one: one[:2])
    most, cheapest, best = counted[0]
    others: dict[tuple[str, ...], str] = {}
    for count, price, faults in counted[1:]:
        if count == most and price <= cheapest + ABOUT_AS_SIMPLE and kinds(faults) != kinds(best):
            others.setdefault(kinds(faults), " ".join(fault.told() for fault in faults))
    return [fault.told() for fault in best], list(others.values())[:MOST_ALTERNATIVES], -most


def kinds(faults: Sequence[Fault]) -> tuple[str, ...]:
    return tuple(fault.kind.words for fault in faults)


def accounts(phase: str, faults: Sequence[Fault], one: Read) -> bool:
    """Tell whether the same faults, by name, are among the explanations of another problem."""
    found = one.forward if phase == "forward" else one.backward
    if found is None or not found.faults:
        return False
    names = [fault.name for fault in faults]
    return any([fault.name for fault in other] == names for other in (found.faults, *found.others))


def unexplained(wrong: Sequence[Read]) -> list[str]:
    """Where the results of problems are wrong that no set of faults accounts for."""
    one = wrong[0]
    name = one.problem.id
    if one.stopped:
        return [f"{name}: no results ({one.stopped})."]
    lines = []
    for found in (one.forward, one.backward):
        if found is None or found.whole:
            continue
        lines += [fault.told() for fault in found.faults]
        parts = [
            f"{MATRICES[matrix]} in {blocks_text(equal)}"
            for matrix, equal in found.match.blocks.items()
            if not equal.all()
        ]
        rest = "the rest is not explained: " if found.faults else "not explained: "
        lines.append(f"{name}: {rest}{'; '.join(parts)}.")
    return lines or [
        f"{name}: each pair has the correct weight, but the numbers differ by more than rounding allows. "
        "The readout does not see why; ringspec check measures it."
    ]


def blocks_text(equal: Booleans) -> str:
    """The wrong blocks, or workers, in words."""
    where = list(zip(*np.nonzero(~np.asarray(equal)), strict=True))
    if len(where) == equal.size:
        return "all blocks" if equal.ndim == 2 else "all workers"
    if equal.ndim == 1:
        return "worker " + ", ".join(str(a) for (a,) in where)
    return "the blocks (queries of worker, keys of worker) " + ", ".join(
        f"({a}, {b})" for a, b in where
    )


def known_bug(target: Target, wrong: Sequence[Read]) -> dict[str, Any] | None:
    """The known bug that gives the results of the first of these problems; None if there is none."""
    one = next((read for read in wrong if read.outputs), None)
    if one is None:
        return None
    found = diagnose(target.capabilities, [one.problem.call], [one.outputs])
    if found is None or found.named is None or found.named.mutant is None:
        return None
    mutant = found.named.mutant
    return {"id": mutant.id, "title": mutant.title, "links": list(mutant.links)}
