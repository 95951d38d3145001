"""Say where a result is wrong: in which tensors, workers, heads and rows, and which block is missing.

This needs no list of known bugs. An element is wrong if its distance from the truth (the correct result) exceeds
:data:`FAR` times its predicted rounding noise. A block is all pairs of one worker's queries and one worker's keys. The
ring of the known bugs (:mod:`~ringspec.conformance.diagnose.mutants.ring`) computes the error that arises if a block is
missing or counted twice. A block is named if this error equals the error of a worker.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from ringspec.compare.noise.predict import predict
from ringspec.compare.noise.problem import Geometry
from ringspec.conformance.cases.calls import forward_alone
from ringspec.conformance.cases.model import Outputs
from ringspec.conformance.diagnose.mutants.hooks import At, Hooks, merged
from ringspec.conformance.diagnose.mutants.ring import ring_results
from ringspec.conformance.judge.noise_inputs import geometry_of, in_order, question_of
from ringspec.conformance.judge.recipe import recipe_for
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Call
from ringspec.errors import RingspecError
from ringspec.recipes import RECIPES, Recipe
from ringspec.spec.online_softmax import SoftmaxState
from ringspec.truth.dense import Named

Array = NDArray[np.float64]
Booleans = NDArray[np.bool_]
FAR = 8.0
EXPLAINED = 0.98  # part of the error's sum of squares that a block must explain
KEY_TENSORS = ("dk", "dv")
ORDER = ("o", "lse", "dq", "dk", "dv")
# The count of a block in a sum: how it is told, and what else gives the error if the block is the worker's whole result.
COUNTS = {
    0: ("is missing from", ", or the whole result is missing"),
    2: (
        "is counted twice in",
        ", or a factor 1/2 is missing: the whole result is twice the expected one",
    ),
}


@dataclass(frozen=True)
class Wrong:
    """The wrong rows of one tensor: ``rows`` bool [B, H, S]; ``owner`` [S], the worker of each row."""

    name: str
    rows: Booleans
    owner: NDArray[np.int64]


def localise(
    claims: Capabilities, call: Call, outputs: Outputs, failing: Collection[str] = ORDER
) -> list[str]:
    """Describe in sentences where the outputs of a ring call differ from the truth by more than noise.

    ``failing``: the tensors that failed the case, by default all. Other tensors are never called wrong, however far
    they are from the truth. The result is [] for other calls, and for inputs near the limits of float64.
    """
    if call.operation != "ring":
        return []
    try:
        question, geometry = question_of(call), geometry_of(call)
        noise = predict(question.attention, recipe_for(claims, call.formats), geometry)
    except RingspecError:
        return []
    got, truth = in_order(call, outputs), question.truth
    found = [
        Wrong(name, wrong_rows(got[name], truth[name], noise.sd[name]), owner_of(name, geometry))
        for name in ORDER
        if name in got
    ]
    wrong = [one for one in found if one.name in failing and one.rows.any()]
    if not wrong:
        return []
    named = [one.name for one in wrong]
    right = [one.name for one in found if one.name not in named]
    lines = [f"wrong: {', '.join(named)}; right: {', '.join(right) or 'none'}"]
    lines += [f"{one.name} holds NaN" for one in wrong if np.isnan(got[one.name]).any()]
    lines += [described(one, geometry) for one in wrong]
    sums = [name for name in named if name != "lse"]
    return [*lines, *blocks_that_count_wrongly(call, truth, geometry, got, sums)]


def owner_of(name: str, geometry: Geometry) -> NDArray[np.int64]:
    return geometry.owner_k if name in KEY_TENSORS else geometry.owner_q


def wrong_rows(got: Array, truth: Array, sd: Array) -> Booleans:
    """Return bool [B, H, S]: True for rows with a wrong element.

    An element is also wrong if it is NaN or infinite where the truth is finite.
    """
    with np.errstate(invalid="ignore"):
        off = ~((got == truth) | (np.abs(got - truth) <= FAR * sd))
    return off.any(axis=3) if off.ndim == 4 else off


def described(wrong: Wrong, geometry: Geometry) -> str:
    """Say which batches, heads, workers and rows of one tensor are wrong.

    >>> rows = np.zeros((1, 2, 8), dtype=bool); rows[0, 1, 6:] = True
    >>> owner = np.repeat([0, 1], 4)
    >>> described(Wrong("dq", rows, owner), Geometry.ring(owner, owner, 2))
    'dq: 2 of 16 rows; head 1 of 2; worker 1 of 2; rows 2 to 3 of the 4 of each worker'
    """
    rows = wrong.rows
    parts = [f"{int(rows.sum())} of {rows.size} rows"]
    batches, heads, tokens = (rows.any(axis=axes) for axes in ((1, 2), (0, 2), (0, 1)))
    parts += few("batch", np.asarray(batches)) + few("head", np.asarray(heads))
    tokens = np.asarray(tokens)
    workers = np.array([tokens[wrong.owner == r].any() for r in range(geometry.workers)])
    parts += few("worker", workers)
    parts += within_blocks(wrong, tokens, geometry.workers)
    return f"{wrong.name}: " + "; ".join(parts)


def few(what: str, which: Booleans) -> list[str]:
    """Return a list with 'head 1 of 4' or 'heads 1, 3 of 4'; an empty list if ``which`` is True everywhere.

    >>> few("head", np.array([False, True, False, True])), few("head", np.array([True, True]))
    (['heads 1, 3 of 4'], [])
    """
    index = np.flatnonzero(which)
    if len(index) == len(which):
        return []
    listed = ", ".join(map(str, index))
    return [f"{what}{'' if len(index) == 1 else 's'} {listed} of {len(which)}"]


def within_blocks(wrong: Wrong, tokens: Booleans, workers: int) -> list[str]:
    """Say which range of rows is wrong in each worker's block.

    Nothing is said if the range differs between workers, or if it is the whole block.
    """
    ranges = set()
    for r in range(workers):
        mine = np.flatnonzero(wrong.owner == r)
        at = np.flatnonzero(tokens[mine])
        if at.size:
            ranges.add((int(at[0]), int(at[-1]), len(mine)))
    if len(ranges) != 1:
        return []
    [(first, last, count)] = ranges
    return (
        []
        if (first, last) == (0, count - 1)
        else [f"rows {first} to {last} of the {count} of each worker"]
    )


def blocks_that_count_wrongly(
    call: Call, truth: Named, geometry: Geometry, got: Named, wrong: Collection[str]
) -> Iterator[str]:
    """Yield a sentence for each block that explains a worker's error, by being missing or counted twice.

    If a missing or doubled result of the whole worker would explain the error as well, the sentence says so.
    """
    for step, (factor, (words, or_else)) in product(range(call.workers), COUNTS.items()):
        ours = counted(call, step, factor)
        for name, r in product(wrong, range(call.workers)):
            mine, true = owner_of(name, geometry) == r, truth[name]
            error, effect, whole = (
                x[:, :, mine] for x in (got[name] - true, ours[name] - true, (factor - 1) * true)
            )
            if explains(effect, error):
                whose = "queries" if name in KEY_TENSORS else "keys"
                other = partner(call, name, r, step)
                line = f"the block of {whose} of worker {other} (step {step}) {words} {name} of worker {r}"
                yield line + (or_else if explains(whole, error) else "")


def counted(call: Call, step: int, factor: int) -> Named:
    """Return the results if the blocks of one step count ``factor`` times in the sums for o, dq, dk and dv.

    The gradients are those of the correct o and lse.
    """

    def merge(at: At, running: SoftmaxState, part: SoftmaxState, recipe: Recipe) -> SoftmaxState:
        for _ in range(factor if at.step == step else 1):
            running = merged(at, running, part, recipe)
        return running

    def add(at: At, name: str, total: Array, share: Array, format: str) -> Array:
        return total + (factor if at.step == step else 1) * share

    exact, found = RECIPES["float64"], {}
    with np.errstate(all="ignore"):
        if "backward" in call.passes:
            found = ring_results(call, exact, Hooks(add=add))
        if "forward" in call.passes:
            found["o"] = ring_results(forward_alone(call), exact, Hooks(merge=merge))["o"]
    return in_order(call, {name: tuple(x) for name, x in found.items()})


def partner(call: Call, name: str, worker: int, step: int) -> int:
    """Return the worker whose block is added to the tensor of a worker in a step."""
    direction = 1 if call.circulation == "gather" else call.direction
    queries_travel = call.circulation == "q" and name != "o"
    forth = (name in KEY_TENSORS) != queries_travel
    return (worker + (direction if forth else -direction) * step) % call.workers


def explains(effect: Array, error: Array) -> bool:
    """Tell whether ``effect`` equals ``error`` up to a small part of the error's sum of squares."""
    size, rest = float((error * error).sum()), error - effect
    return 0 < size < np.inf and float((rest * rest).sum()) <= (1 - EXPLAINED) * size
