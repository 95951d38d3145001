"""Which known bug gives what came back? A failing case beside what each mutant would have given.

Every mutant (:mod:`ringspec.conformance.mutants`) that applies to the case's calls is run under the
recipe by which the target is judged. Two answers are alike where they differ by no more than rounding:

    sigma^2 = (mutant under the recipe - mutant in float64)^2, averaged over a row
              + a part of its average over the tensor + (half a unit of the result's format)^2
    distance = root mean square of (got - mutant) / sigma, averaged over the tensors

The noise is that of the mutant itself, so that large wrong numbers are allowed their large roundings. A
mutant *fits* where every tensor lies within :data:`FIT` of such standard deviations, and it is *named*
where it fits and is clearly nearer than the right program. Mutants that cannot be told from the named
one on this case are listed beside it. A kernel whose values are right up to their noise, but whose noise
is not that of its recipe, is compared by the size of its noise (:func:`by_noise`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.calls import due_of
from ringspec.conformance.capabilities import Capabilities
from ringspec.conformance.cases import Outputs
from ringspec.conformance.mutants import MUTANTS
from ringspec.conformance.mutants.hooks import Hooks, Results
from ringspec.conformance.mutants.mutant import Mutant, run_mutant
from ringspec.conformance.mutants.precision_bugs import BUGS as PRECISION
from ringspec.conformance.mutants.ring import RESULTS
from ringspec.conformance.precision import recipe_for
from ringspec.conformance.target import Call
from ringspec.formats import load, store, unit_roundoff
from ringspec.recipes import RECIPES, Recipe

Array = NDArray[np.float64]
PairsOfShards = list[tuple[Array, Array]]
FIT = 3.0
FURTHEST = 100.0  # of a single element: sigma is an estimate from few numbers
CAP = 1e3
POOLED = 0.1  # part of the tensor's mean noise in each row's
NEARER = 0.5  # of the right program's distance
REFINED = 10  # mutants that are also run in float64
SAME_NOISE = 1.5  # ratio of rms errors between which two noises are alike
MANY_PAIRS = 1 << 16  # B * H * Sq * Sk from which on only bugs of rounding are tried
SMALL = 0.05  # relative error below which a whole tensor is right up to noise
KEY_TENSORS = ("dk", "dv")


@dataclass(frozen=True)
class Candidate:
    """A mutant (None: the right program) and its distance; ``fits``: within noise in every tensor."""

    mutant: Mutant | None
    distance: float
    fits: bool

    @property
    def id(self) -> str:
        return "" if self.mutant is None else self.mutant.id


@dataclass(frozen=True)
class Diagnosis:
    """What a failing case looks like.

    ``named``      the mutant that fits, or None; ``alike``: others that give the same here
    ``runner_up``  the nearest one that is not alike
    ``right``      the right program, with its distance
    ``tried``      how many mutants could show in the case
    """

    named: Candidate | None
    alike: tuple[Candidate, ...]
    runner_up: Candidate | None
    right: Candidate
    tried: int

    def lines(self) -> list[str]:
        """In words, for a report."""
        if self.named is None or self.named.mutant is None:
            return [f"no known bug ({self.tried} were tried)"]
        lines = [f"{self.named.mutant.title} [{self.named.id}]", self.named.mutant.what]
        lines += self.named.mutant.links
        if self.alike:
            lines.append("the same here: " + ", ".join(one.id for one in self.alike))
        lines.append(self.how_sure())
        return lines

    def how_sure(self) -> str:
        assert self.named is not None
        far = [
            f"{one.distance:.3g} for {one.id or 'the right program'}"
            for one in (self.runner_up, self.right)
            if one is not None
        ]
        return f"distance {self.named.distance:.2g} in units of rounding noise; {', '.join(far)}"

    def as_dict(self) -> dict[str, Any]:
        """For a report."""
        mutant = None if self.named is None else self.named.mutant
        return {
            "id": None if mutant is None else mutant.id,
            "title": "no known bug" if mutant is None else mutant.title,
            "what": "" if mutant is None else mutant.what,
            "links": [] if mutant is None else list(mutant.links),
            "alike": [one.id for one in self.alike],
            "distance": None if self.named is None else self.named.distance,
            "runner_up": None if self.runner_up is None else self.runner_up.id,
            "runner_up_distance": None if self.runner_up is None else self.runner_up.distance,
            "right_distance": self.right.distance,
            "tried": self.tried,
        }


def diagnose(
    claims: Capabilities, calls: Sequence[Call], outputs: Sequence[Outputs]
) -> Diagnosis | None:
    """The mutants beside the answers to a case's calls; None where no mutant applies to them.

    >>> from ringspec.conformance.noise_cases import noise_call
    >>> from ringspec.conformance.targets.reference import reference_bf16 as right
    >>> call = noise_call("example", "bf16", 3, tokens=24, head_dim=8)
    >>> result = right.run(call)
    >>> stale = dict(o=result.o, dq=result.dq, dk=result.dk[::-1], dv=result.dv)
    >>> diagnose(right.capabilities, [call], [stale]).right.fits
    False
    """
    given = list(zip(calls, outputs, strict=True))
    small = all(pairs_of(call) <= MANY_PAIRS for call in calls)
    known = MUTANTS.values() if small else PRECISION
    applicable = [m for m in known if any(m.applies(call) for call, _ in given)]
    if not applicable:
        return None
    views = [View(claims, call, got) for call, got in given]
    right = placed(views, None)
    coarse = [(sum(view.coarse(mutant) for view in views), mutant) for mutant in applicable]
    coarse.sort(key=lambda pair: pair[0])
    found = [placed(views, mutant) for _, mutant in coarse[:REFINED]]
    found.sort(key=lambda one: one.distance)
    found = [one for one in found if changes(views, one.mutant)]
    if right.fits:
        named = by_noise(views, [mutant for _, mutant in coarse])
        found = [] if named is None else [named, *(f for f in found if f.id != named.id)]
    elif not found or not found[0].fits or not found[0].distance < NEARER * right.distance:
        return Diagnosis(None, (), found[0] if found else None, right, len(applicable))
    if not found:
        return Diagnosis(None, (), None, right, len(applicable))
    best, rest = found[0], found[1:]
    assert best.mutant is not None
    alike = [one for one in rest if one.fits and agree(views, best.mutant, one.mutant)]
    others = [one for one in rest if one not in alike]
    return Diagnosis(best, tuple(alike), others[0] if others else None, right, len(applicable))


def pairs_of(call: Call) -> int:
    """B * H * Sq * Sk of all workers together."""
    if call.operation == "merge":
        return 0
    q, k = (call.worker(name, 0).shape for name in ("q", "k"))
    return int(q[0] * q[1] * q[2] * k[2] * call.workers**2)


class View:
    """One call with its answer, and what programs give for it, each computed once."""

    def __init__(self, claims: Capabilities, call: Call, got: Outputs) -> None:
        self.call = call
        self.recipe = recipe_for(claims, call.formats)
        due = due_of(call)
        self.formats = {name: due[name].format for name in got if name in due}
        self.got = {name: [load(x) for x in got[name]] for name in self.formats}
        self.kept: dict[tuple[str, bool], dict[str, list[Array]]] = {}
        self.noises: dict[str, dict[str, list[Array]]] = {}

    def shown(self, mutant: Mutant | None) -> Mutant | None:
        """The mutant, or None where its results are the right ones."""
        return mutant if mutant is not None and mutant.applies(self.call) else None

    def of(self, mutant: Mutant | None, exact: bool = False) -> dict[str, list[Array]]:
        """Results of a program under the recipe, as they would be stored, or in float64.

        A mutant that does not apply to the call gives the right program's.
        """
        mutant = self.shown(mutant)
        key = ("" if mutant is None else mutant.id, exact)
        if key not in self.kept:
            recipe = RECIPES["float64"] if exact else self.recipe
            results = (
                run_right(self.call, recipe)
                if mutant is None
                else run_mutant(mutant, self.call, recipe)
            )
            self.kept[key] = {
                name: [
                    load(x) if exact else load(store(np.asarray(x), self.formats[name]))
                    for x in results[name]
                ]
                for name in self.formats
            }
        return self.kept[key]

    def tokens(self, x: Array, name: str, worker: int) -> Array:
        """A worker's array without its padding slots."""
        index = self.call.index_k if name in KEY_TENSORS else self.call.index_q
        if index is None or name in ("dsinks", "dbias") or self.call.operation == "merge":
            return x
        return x[:, :, index[worker] >= 0]

    def pairs(self, ours: dict[str, list[Array]], name: str) -> PairsOfShards:
        """(got, ours) of each worker, without padding; empty where shapes differ."""
        found = []
        for worker, got in enumerate(self.got[name]):
            mine = ours[name][worker]
            if got.shape != mine.shape:
                return []
            found.append((self.tokens(got, name, worker), self.tokens(mine, name, worker)))
        return found

    def coarse(self, mutant: Mutant) -> float:
        """A distance by the right program's noise, to choose which mutants are looked at closely."""
        rms, _ = self.compared(self.of(mutant), self.noise(None))
        return sum(rms.values())

    def noise(self, mutant: Mutant | None) -> dict[str, list[Array]]:
        """sigma of each row: of the program's own rounding errors."""
        mutant = self.shown(mutant)
        key = "" if mutant is None else mutant.id
        if key not in self.noises:
            exact, rounded = self.of(mutant, exact=True), self.of(mutant)
            self.noises[key] = {
                name: row_noise(rounded[name], exact[name], unit_roundoff(self.formats[name]))
                for name in self.formats
            }
        return self.noises[key]

    def compared(
        self, ours: dict[str, list[Array]], noise: dict[str, list[Array]]
    ) -> tuple[dict[str, float], float]:
        """Root mean square of (got - ours) / sigma by tensor, and the largest."""
        rms, largest = {}, 0.0
        for name in self.formats:
            square, count = 0.0, 0
            for worker, (got, mine) in enumerate(self.pairs(ours, name)):
                z = standardised(got, mine, self.tokens(noise[name][worker], name, worker))
                square, count = square + float((z * z).sum()), count + z.size
                largest = max(largest, float(z.max(initial=0.0)))
            rms[name] = math.sqrt(square / count) if count else 0.0
        return rms, largest


def run_right(call: Call, recipe: Recipe) -> Results:
    with np.errstate(all="ignore"):
        return RESULTS[call.operation](call, recipe, Hooks())


def row_noise(rounded: Sequence[Array], exact: Sequence[Array], unit: float) -> list[Array]:
    """sigma by row, one array a worker, with an axis of 1 for d where there is one."""
    squares = [finite_square(a, b) for a, b in zip(rounded, exact, strict=True)]
    count = sum(x.size for x in squares)
    pooled = POOLED * sum(float(x.sum()) for x in squares) / count if count else 0.0
    found = []
    for square, x in zip(squares, rounded, strict=True):
        size = np.where(np.isfinite(x), np.abs(x), 0.0)
        if x.ndim == 4:
            square = square.mean(axis=3, keepdims=True)
            size = size.max(axis=3, keepdims=True, initial=0.0)
        least = (0.5 * unit * size) ** 2
        found.append(np.sqrt(square + pooled + least))
    return found


def finite_square(a: Array, b: Array) -> Array:
    with np.errstate(invalid="ignore", over="ignore"):
        d = a - b
        return np.where(np.isfinite(d), np.minimum(d * d, 1e300), 0.0)


def standardised(got: Array, ours: Array, sigma: Array) -> Array:
    """|got - ours| / sigma up to CAP; 0 where both are the same infinity or both NaN."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        difference = np.abs(got - ours)
        z = np.where(difference == 0, 0.0, difference / sigma)
    same = (np.isnan(got) & np.isnan(ours)) | (got == ours)
    return np.where(same, 0.0, np.where(np.isfinite(z), np.minimum(z, CAP), CAP))


def placed(views: Sequence[View], mutant: Mutant | None) -> Candidate:
    """A program's distance from the answers."""
    distances, fits = [], True
    for view in views:
        # By rounding the answer may be nearer to either: both are the program's.
        noise = view.noise(mutant)
        best = None
        for exact in (True, False):
            rms, largest = view.compared(view.of(mutant, exact), noise)
            mean = math.sqrt(sum(x * x for x in rms.values()) / max(len(rms), 1))
            within = all(x <= FIT for x in rms.values()) and largest <= FURTHEST
            if best is None or mean < best[0]:
                best = (mean, within)
        assert best is not None
        distances.append(best[0])
        fits = fits and best[1]
    return Candidate(mutant, float(np.mean(distances)), fits)


def changes(views: Sequence[View], mutant: Mutant | None) -> bool:
    """Whether the mutant changes anything here, by rounding or more."""
    assert mutant is not None
    return any(
        not all(
            np.array_equal(a, b, equal_nan=True)
            for name in view.formats
            for a, b in zip(view.of(mutant)[name], view.of(None)[name], strict=True)
        )
        for view in views
    )


def agree(views: Sequence[View], one: Mutant, other: Mutant | None) -> bool:
    """Whether two mutants give the same up to the first one's noise."""
    for view in views:
        noise, first, second = view.noise(one), view.of(one), view.of(other)
        for name in view.formats:
            for x, y, sigma in zip(first[name], second[name], noise[name], strict=True):
                z = standardised(x, y, sigma)
                if z.size and not float(np.sqrt((z * z).mean())) <= FIT:
                    return False
    return True


def by_noise(views: Sequence[View], mutants: Sequence[Mutant]) -> Candidate | None:
    """The mutant whose rounding noise has the sizes that the answers' errors have.

    Looked for where every value is right up to noise. The errors of the right program and of each
    mutant under the recipe are compared tensor by tensor with the answer's, all against float64.
    """
    best: Candidate | None = None
    for mutant in [None, *mutants]:
        ratios = []
        for view in views:
            exact = view.of(None, exact=True)
            ours = view.of(mutant)
            for name in view.formats:
                seen, mine, size = (
                    rms_of(view.pairs(exact, name)),
                    rms_of(list(zip(ours[name], exact[name], strict=True))),
                    rms_of([(x, np.zeros(x.shape)) for x in exact[name]]),
                )
                if not mine <= SMALL * size:
                    ratios = [math.inf]
                    break
                if seen > 0 and mine > 0:
                    ratios.append(abs(math.log(seen / mine)))
        if not ratios:
            continue
        spread = float(np.sqrt(np.mean(np.square(ratios))))
        if best is None or spread < best.distance:
            best = Candidate(mutant, spread, max(ratios) <= math.log(SAME_NOISE))
    return best if best is not None and best.mutant is not None and best.fits else None


def rms_of(pairs: PairsOfShards) -> float:
    squares = [finite_square(a, b) for a, b in pairs]
    count = sum(x.size for x in squares)
    return math.sqrt(sum(float(x.sum()) for x in squares) / count) if count else 0.0
