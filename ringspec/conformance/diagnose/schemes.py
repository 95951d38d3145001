"""Name the known bug that gives the results of a failing case of the operation 'context_parallel'.

A bug is named if its results are far from the correct ones, and those of the program under test are near them: in each
tensor, at most 1/50 as far as the correct results are, or within the rounding of the format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.cases.model import Outputs
from ringspec.conformance.diagnose.scheme_answers import Change, answer
from ringspec.conformance.diagnose.scheme_bugs import BUGS, SchemeBug
from ringspec.conformance.diagnose.scheme_world import Answer, World
from ringspec.conformance.target.cells import shards_of
from ringspec.conformance.target.protocol import Call
from ringspec.formats import load, unit_roundoff

NEAR = 0.02
ROUNDINGS = 8.0
LEAST = 1e-5  # kernels with float32 or float64 inputs may round more inside
FORWARD = ("o", "lse")
Flat = Mapping[str, NDArray[np.float64]]


def alike(call: Call, output: Outputs) -> list[SchemeBug]:
    """Return the known bugs that give these results, the nearest first."""
    got = flat(call, output)
    if all(np.isnan(x).all() for x in got.values()):
        return []  # many bugs give nothing but NaN
    rounding = max(ROUNDINGS * unit_roundoff(call.formats["inputs"]), LEAST)
    right, known = known_answers(Keyed(call))
    found = []
    for number, (bug, made) in enumerate(known):
        names = FORWARD if any(np.isnan(made[name]).any() for name in FORWARD) else tuple(made)
        names = tuple(name for name in names if name in got)
        if distance(right, made, right, names, rounding) > 1:
            far = distance(got, made, right, names, rounding)
            if far <= 1:
                found.append((far, number, bug))
    return list({bug.id: bug for _, _, bug in sorted(found, key=lambda one: one[:2])}.values())


class Keyed:
    """A hashable wrapper of a call: one case is diagnosed for several targets in tests."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.key = (call.id, call.passes, call.formats["inputs"], call.worker("q", 0).shape)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keyed) and self.key == other.key


@lru_cache(maxsize=8)
def known_answers(keyed: Keyed) -> tuple[Flat, list[tuple[SchemeBug, Flat]]]:
    """Return the correct results of a call, and those of each bug that can occur in it."""
    call = keyed.call
    world = World(call)
    with np.errstate(all="ignore"):
        right = flat(call, answer(world, Change()))
        made = [(bug, x) for bug in BUGS for x in bug.results(world)]
    return right, [(bug, flat(call, x)) for bug, x in made]


def flat(call: Call, results: Outputs | Answer) -> Flat:
    """Return all elements of each result, of all ranks and without padding slots, as one vector."""
    found = {}
    for name, each in results.items():
        if name == "dsinks":  # it follows from the others
            continue
        tokens, _ = shards_of(call, name)
        found[name] = np.concatenate(
            [load(x)[:, :, at >= 0].ravel() for x, at in zip(each, tokens, strict=True)]
        )
    return found


def distance(one: Flat, made: Flat, right: Flat, names: Sequence[str], rounding: float) -> float:
    """Return how far results are from those of a bug; up to 1 is near."""
    worst = 0.0
    for name in names:
        x, y, z = one[name], made[name], right[name]
        if not np.array_equal(np.isnan(x), np.isnan(y)) or not same_infinities(x, y):
            return np.inf
        finite = np.isfinite(y)
        unit = rounding * float(np.linalg.norm(y[finite]))
        if one is not right:
            known = finite & np.isfinite(z)
            unit = max(unit, NEAR * float(np.linalg.norm(y[known] - z[known])))
        far = float(np.linalg.norm(x[finite] - y[finite]))
        worst = max(worst, far / max(unit, 1e-300))
    return worst


def same_infinities(x: NDArray[np.float64], y: NDArray[np.float64]) -> bool:
    real = ~np.isnan(y)
    both = np.isinf(x[real]), np.isinf(y[real])
    return bool((both[0] == both[1]).all() and (x[real][both[0]] == y[real][both[1]]).all())


def diagnosed_scheme(calls: Sequence[Call], outputs: Sequence[Outputs]) -> dict[str, Any]:
    """Return the diagnosis of a failing case as plain data; its id is that of the nearest known bug."""
    [call], [output] = calls, outputs
    found = alike(call, output)
    if not found:
        text = "no known bug of context parallelism gives these results"
        return {"id": None, "title": "no known bug", "text": text}
    first, *others = found
    text = f"known bug: {first.title}" + "".join(f"; or {one.title}" for one in others)
    if first.links:
        text += f"\npublicly reported: {', '.join(first.links)}"
    return {
        "id": first.id, "title": first.title, "links": list(first.links),
        "alike": [one.id for one in others], "text": text,
    }  # fmt: skip
