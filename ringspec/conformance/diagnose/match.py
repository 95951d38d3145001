"""Name the known bug that gives the results of a failing case, by running known bugs on the same calls.

The target is the program under test, and a call is one request to it. A mutant is a known bug that can be run
(:mod:`ringspec.conformance.diagnose.mutants`). Every mutant that can change the results of the case's calls is run with
the rounding by which the target is judged (its recipe). Then the results are compared, tensor by tensor::

    sigma^2 = (mutant under the recipe - mutant in float64)^2, averaged over a row
              + a part of its average over the tensor + (half a unit of the result's format)^2
    distance = root mean square of (got - mutant) / sigma, averaged over the tensors

Here got are the results of the target, and sigma is the noise: the size of the mutant's own rounding errors. The noise
of the correct program would be too small, because large wrong numbers have large rounding errors.

A mutant *fits* if the distance in every tensor is at most :data:`FIT`. It is *named* if it fits and is clearly nearer
than the correct program. Other mutants that give the same results in this case are listed with it.

If no mutant is named, more suspects are tried. A suspect is a mutant, or another form of it called a guise, run with
choices that the specification leaves to an implementation (:mod:`ringspec.conformance.diagnose.mutants.variants`). For
example, a guise may have the bug only in the backward pass, and one of the choices is the order of merging.

Sometimes the correct program fits as well, or lies within the noise of the mutant. Then the distance cannot identify
the bug, and the mutant is named only if the target makes the same rounding errors, element by element
(:func:`by_rounding`, :mod:`ringspec.conformance.diagnose.explained`).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, Literal

import numpy as np

from ringspec.conformance.cases.model import Outputs
from ringspec.conformance.diagnose.candidates import CannotRun, Suspect, View, standardised
from ringspec.conformance.diagnose.explained import alike as deviate_alike
from ringspec.conformance.diagnose.explained import explained
from ringspec.conformance.diagnose.mutants import MUTANTS
from ringspec.conformance.diagnose.mutants.conditions import Condition, either
from ringspec.conformance.diagnose.mutants.mutant import Mutant
from ringspec.conformance.diagnose.mutants.mutant import mutant as made
from ringspec.conformance.diagnose.mutants.precision_bugs import BUGS as PRECISION
from ringspec.conformance.diagnose.mutants.variants import NORMALISED, USUAL, ways_of
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Call
from ringspec.recipes import RECIPES

FIT = 3.0
FURTHEST = 100.0  # for a single element; large, because sigma is estimated from few numbers
NEARER = 0.5  # fraction of the correct program's distance below which a mutant is clearly nearer
ABOUT_AS_MUCH = 0.7  # prefer the plain mutant if it explains this fraction of what a variant does
FAR = 100.0  # a coarse distance, at which a mutant fits only if its own noise is large
Far = Literal["always", "if none is near", "never"]  # when mutants that are FAR are examined
REFINED = 10  # number of suspects that are also run in float64
OF_ONE = 2  # of these, the most with the same mutant
MANY_PAIRS = 1 << 16  # B * H * Sq * Sk above which only rounding bugs are tried
RIGHT = made("", "the correct program", "", applies=lambda call: True)
IN_NOISE, UNEXPLAINED = "units of rounding noise", "part left unexplained"


@dataclass(frozen=True)
class Candidate:
    """A suspect (None: the correct program) and its distance; ``fits``: whether every tensor is within noise."""

    suspect: Suspect | None
    distance: float
    fits: bool

    @property
    def mutant(self) -> Mutant | None:
        return None if self.suspect is None else self.suspect.mutant

    @property
    def id(self) -> str:
        return "" if self.suspect is None else self.suspect.mutant.id

    @property
    def how(self) -> str:
        """The difference between the suspect and its mutant, in words; '' if there is none."""
        return "" if self.suspect is None else self.suspect.in_words()


@dataclass(frozen=True)
class Diagnosis:
    """The known bugs whose results are nearest to those of a failing case.

    ``named``      the nearest mutant, if it fits and is clearly nearer than the correct program; else None
    ``alike``      other mutants that give the same results in this case
    ``runner_up``  the nearest of the remaining mutants
    ``right``      the correct program, with its distance
    ``tried``      number of mutants that can change the results of the case's calls
    ``measure``    unit of the distances: rounding noise, or the part of the deviation from the correct program that a
                   program leaves unexplained, which is 1 for the correct program itself
    ``dropped``    mutants that raised an exception, with the text of the exception (an error in ringspec)
    """

    named: Candidate | None
    alike: tuple[Candidate, ...]
    runner_up: Candidate | None
    right: Candidate
    tried: int
    measure: str = IN_NOISE
    dropped: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the diagnosis as lines of a report."""
        if self.named is None or self.named.mutant is None:
            fits = (
                "; they differ from the correct results by rounding only" if self.right.fits else ""
            )
            counted = f"{self.tried} of {len(MUTANTS)} apply to a case of this kind and size"
            return [
                f"no known bug gives these results ({counted}){fits}",
                *self.not_compared(),
            ]
        lines = [f"{self.named.mutant.title} [{self.named.id}]", self.named.mutant.what]
        if self.named.how:
            lines.append(f"in this variant: {self.named.how}")
        lines += self.named.mutant.links
        if self.alike:
            lines.append("same results in this case: " + ", ".join(one.id for one in self.alike))
        lines.append(self.how_sure())
        return lines + self.not_compared()

    def not_compared(self) -> list[str]:
        return [f"not compared, because of an error in ringspec: {one}" for one in self.dropped]

    def how_sure(self) -> str:
        assert self.named is not None
        if self.measure == UNEXPLAINED:
            found = f"it explains {1 - self.named.distance:.0%} of the deviation from the correct program"
            if self.runner_up is None:
                return found
            return f"{found}; {self.runner_up.id} explains {1 - self.runner_up.distance:.0%}"
        far = [
            f"{one.distance:.3g} with {one.id}" if one.id else f"{one.distance:.3g} without a bug"
            for one in (self.runner_up, self.right)
            if one is not None
        ]
        near = f"{self.named.distance:.2g} with this bug"
        return f"distance from these results in units of rounding noise: {', '.join([near, *far])}"

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis as plain data for a report file."""
        mutant = None if self.named is None else self.named.mutant
        return {
            "id": None if mutant is None else mutant.id,
            "title": "no known bug" if mutant is None else mutant.title,
            "what": "" if mutant is None else mutant.what,
            "links": [] if mutant is None else list(mutant.links),
            "alike": [one.id for one in self.alike],
            "forms": {one.id: one.how for one in (self.named, *self.alike) if one and one.how},
            "distance": None if self.named is None else self.named.distance,
            "runner_up": None if self.runner_up is None else self.runner_up.id,
            "runner_up_distance": None if self.runner_up is None else self.runner_up.distance,
            "right_distance": self.right.distance,
            "tried": self.tried,
            "measure": self.measure,
        }


def diagnose(
    claims: Capabilities,
    calls: Sequence[Call],
    outputs: Sequence[Outputs],
    *,
    variants: bool = True,
    rounding: bool = True,
    far: Far = "always",
    views: Sequence[View] | None = None,
) -> Diagnosis | None:
    """Compare the results of a case's calls with those of all mutants; return None if no mutant can change them.

    ``variants`` and ``rounding``: whether other forms of a mutant are tried, and whether a rounding bug may be named.
    Each takes longer than trying the mutants themselves. ``far``: whether mutants far from the results are examined; 'if
    none is near': only if no other one has them. ``views``: what :func:`views_of` returns for the calls, which keeps the
    results of mutants from one call of this function to the next.

    >>> from ringspec.conformance.cases.noise import noise_call
    >>> from ringspec.conformance.targets.reference import reference_bf16 as right
    >>> call = noise_call("example", "bf16", 3, tokens=24, head_dim=8)
    >>> result = right.run(call)
    >>> stale = dict(o=result.o, dq=result.dq, dk=result.dk[::-1], dv=result.dv)
    >>> diagnose(right.capabilities, [call], [stale]).right.fits
    False
    """
    small = all(pairs_of(call) <= MANY_PAIRS for call in calls)
    known = dict(MUTANTS) if small else {one.id: one for one in PRECISION}
    views = views or views_of(claims, calls, outputs, rounding)
    dropped: list[str] = []
    while True:
        try:
            found = compared(views, list(known.values()), variants, rounding, far)
        except CannotRun as fault:  # the next attempt reuses what the views have computed
            if known.pop(fault.suspect.mutant.id, None) is None:
                raise
            dropped.append(str(fault))
        else:
            return found and dataclasses.replace(found, dropped=tuple(dropped))


def views_of(
    claims: Capabilities, calls: Sequence[Call], outputs: Sequence[Outputs], rounding: bool = True
) -> list[View]:
    """Return the calls with the target's results, to be compared with those of mutants; the arguments are those of :func:`diagnose`."""
    return [
        View(claims, call, got, exact=not rounding)
        for call, got in zip(calls, outputs, strict=True)
    ]


def compared(
    views: Sequence[View],
    known: Sequence[Mutant],
    variants: bool,
    rounding: bool,
    far: Far,
) -> Diagnosis | None:
    """Compare the results with those of the mutants in ``known``; the arguments are those of :func:`diagnose`.

    Raises :class:`CannotRun` if a mutant raises an exception.
    """
    calls = [view.call for view in views]
    plain = [Suspect(mutant) for mutant in known if any(map(mutant.applies, calls))]
    tried = sum(any(map(applies_somehow(mutant), calls)) for mutant in known)
    if not tried:
        return None
    right = placed(views, None)
    if right.fits:
        return by_rounding(views, plain, right, tried)
    found = earned(views, nearest(views, plain, far))
    if variants and not named(found, right):
        others = earned(views, nearest(views, list(disguised(known, views)), far))
        found = first_of_each(sorted((*found, *others), key=lambda one: one.distance))
    if not named(found, right):
        of_rounding = [one for one in plain if one.mutant in PRECISION]
        by_errors = by_rounding(views, of_rounding, right, tried) if rounding else None
        if by_errors is not None and by_errors.named is not None:
            return by_errors
        return Diagnosis(None, (), found[0] if found else None, right, tried)
    best, rest = found[0], found[1:]
    assert best.suspect is not None
    same = [best, *(one for one in rest if one.fits and agree(views, best.suspect, one.suspect))]
    left = [one for one in rest if one not in same]
    same.sort(key=lambda one: not supposed(views, one))
    return Diagnosis(same[0], tuple(same[1:]), left[0] if left else None, right, tried)


def earned(views: Sequence[View], found: Sequence[Candidate]) -> list[Candidate]:
    """Drop the candidates that fit only because their own noise is large.

    A candidate stays if it differs from the correct program by more than noise, or if it explains the rounding errors
    in the results.
    """
    return [
        one
        for one in found
        if one.suspect is not None
        and (not agree(views, one.suspect, None) or explained(views, one.suspect).enough)
    ]


def supposed(views: Sequence[View], one: Candidate) -> bool:
    """Tell whether a call has everything that the title of the candidate's bug mentions, such as a mask."""
    return one.mutant is not None and any(one.mutant.supposes(view.call) for view in views)


def applies_somehow(mutant: Mutant) -> Condition:
    """Return a condition that is true of a call if the mutant or a guise of it can change the results."""
    return either(mutant.applies, *(one.applies for one in mutant.guises))


def disguised(known: Sequence[Mutant], views: Sequence[View]) -> Iterator[Suspect]:
    """Yield the suspects that were not tried at first.

    These are the guises of each mutant, and mutants and guises with other implementation choices. Only choices that can
    change the results are tried.
    """
    forward_is_right = all(map(right_in_forward, views))
    for mutant in known:
        for one in (None, *mutant.guises):
            program = mutant if one is None else one
            shown = [view.call for view in views if program.applies(view.call)]
            if not shown:
                continue
            if one is not None:
                yield Suspect(mutant, one)
            # Which pieces are replaced does not depend on the recipe, so any recipe will do.
            ways = [
                ways_of(program.hooks(call, RECIPES["float64"]), call, forward_is_right)
                for call in shown
            ]
            for way in dict.fromkeys(way for of_call in ways for way in of_call):
                yield Suspect(mutant, one, way)


def right_in_forward(view: View) -> bool:
    """Tell whether o and lse are correct. A result that the call does not return counts as correct."""
    rms, _ = view.compared(view.of(None), view.noise(None))
    return all(rms[name] <= FIT for name in ("o", "lse") if name in rms)


def nearest(
    views: Sequence[View], suspects: Sequence[Suspect], far: Far = "always"
) -> list[Candidate]:
    """Return the nearest suspects in order of distance, at most one per mutant.

    Suspects that do not change any result are left out. ``far``: when those that are FAR are examined, as for :func:`diagnose`.
    """
    found = [] if far == "always" else refined(views, suspects, FAR)
    if far != "never" and not any(one.fits for one in found):
        found = refined(views, suspects)
    found.sort(key=lambda one: one.distance)
    return first_of_each([one for one in found if changes(views, one.suspect)])


def refined(
    views: Sequence[View], suspects: Sequence[Suspect], most: float = math.inf
) -> list[Candidate]:
    """Examine the suspects with the smallest coarse distances; ``most``: the largest of these distances."""
    taken: Counter[str] = Counter()
    found: list[Candidate] = []
    for suspect in by_coarse_distance(views, suspects, most):
        if len(found) == REFINED:
            break
        if taken[suspect.mutant.id] < OF_ONE:
            taken[suspect.mutant.id] += 1
            found.append(placed(views, suspect))
    return found


def by_coarse_distance(
    views: Sequence[View], suspects: Sequence[Suspect], most: float = math.inf
) -> Iterator[Suspect]:
    """Yield the suspects in order of their coarse distance; of those that are equally far, the first of ``suspects`` first.

    Suspects that are farther than ``most`` are left out. A suspect's distance in the forward pass is at most its whole
    distance. So its backward pass, which takes longer, is run only when no other suspect can be nearer.
    """
    left = [
        (sum(view.coarse_in_forward(suspect) for view in views), n, False)
        for n, suspect in enumerate(suspects)
    ]
    heapify(left)
    while left and left[0][0] <= most:
        _, n, whole = heappop(left)
        if whole:
            yield suspects[n]
        else:
            heappush(left, (sum(view.coarse(suspects[n]) for view in views), n, True))


def first_of_each(found: Sequence[Candidate]) -> list[Candidate]:
    """Return the first candidate of each mutant; in a sorted list this is the nearest one."""
    first: dict[str, Candidate] = {}
    for one in found:
        first.setdefault(one.id, one)
    return list(first.values())


def simplest_of_each(found: Sequence[Candidate]) -> list[Candidate]:
    """Return the nearest candidate of each mutant; prefer the mutant itself to a guise that explains little more."""
    first = {one.id: one for one in reversed(found)}
    for one in found:
        plain = one.suspect is not None and one.suspect.guise is None
        if plain and 1 - one.distance >= ABOUT_AS_MUCH * (1 - first[one.id].distance):
            first[one.id] = min(first[one.id], one, key=guised)
    return sorted(first.values(), key=lambda one: one.distance)


def guised(one: Candidate) -> bool:
    return one.suspect is not None and one.suspect.guise is not None


def named(found: Sequence[Candidate], right: Candidate) -> bool:
    """Tell whether the first candidate, which is the nearest, fits and is clearly nearer than the correct program."""
    return bool(found) and found[0].fits and found[0].distance < NEARER * right.distance


def pairs_of(call: Call) -> int:
    """Return the number of query-key pairs of a call, B * H * Sq * Sk over all workers; 0 for a merge."""
    if call.operation == "merge":
        return 0
    q, k = (call.worker(name, 0).shape for name in ("q", "k"))
    return int(q[0] * q[1] * q[2] * k[2] * call.workers**2)


def placed(views: Sequence[View], suspect: Suspect | None) -> Candidate:
    """Measure the distance of a suspect (None: the correct program) from the target's results."""
    distances, fits = [], True
    for view in views:
        # The rounded and the float64 results of the program are equally valid; take the nearer one.
        noise = view.noise(suspect)
        best = None
        for exact in (True, False):
            rms, largest = view.compared(view.of(suspect, exact), noise)
            mean = math.sqrt(sum(x * x for x in rms.values()) / max(len(rms), 1))
            within = all(x <= FIT for x in rms.values()) and largest <= FURTHEST
            if best is None or mean < best[0]:
                best = (mean, within)
        assert best is not None
        distances.append(best[0])
        fits = fits and best[1]
    return Candidate(suspect, float(np.mean(distances)), fits)


def changes(views: Sequence[View], suspect: Suspect | None) -> bool:
    """Tell whether the suspect changes any result of these calls, even if only by rounding."""
    assert suspect is not None
    return any(
        not all(
            np.array_equal(a, b, equal_nan=True)
            for name in view.formats
            for a, b in zip(view.of(suspect)[name], view.of(None)[name], strict=True)
        )
        for view in views
    )


def agree(views: Sequence[View], one: Suspect, other: Suspect | None) -> bool:
    """Tell whether two programs give the same results, up to the noise of the first program."""
    for view in views:
        noise, first, second = view.noise(one), view.of(one), view.of(other)
        for name in view.formats:
            for x, y, sigma in zip(first[name], second[name], noise[name], strict=True):
                z = standardised(x, y, sigma)
                if z.size and not float(np.sqrt((z * z).mean())) <= FIT:
                    return False
    return True


def by_rounding(
    views: Sequence[View], suspects: Sequence[Suspect], right: Candidate, tried: int
) -> Diagnosis:
    """Find the suspect that makes the same rounding errors as the target, element by element.

    This test is used if the correct program fits, or if it is the last chance to name a rounding bug. The deviation of
    the results is their difference from those of the correct program. Here the distance of a suspect is the part of the
    deviation that it leaves unexplained, so the correct program has distance 1.

    For rounding bugs, all guises are tried. Each suspect is run twice: first it merges the partial results of blocks as
    the recipe says, then it normalises them before it merges them. The correct program, from which the deviation is
    measured, merges in the same way.
    """
    forms = [
        Suspect(one.mutant, form)
        for one in suspects
        if one.mutant in PRECISION
        for form in one.mutant.guises
        if any(form.applies(view.call) for view in views)
    ]
    found = []
    for way, base in ((USUAL, None), (NORMALISED, Suspect(RIGHT, None, NORMALISED))):
        for one in (*suspects, *forms):
            suspect = Suspect(one.mutant, one.guise, way)
            seen = explained(views, suspect, base)
            found.append(Candidate(suspect, 1.0 - seen.part, seen.enough))
    found.sort(key=lambda one: round(one.distance, 2))
    possible = simplest_of_each([one for one in found if one.fits])
    if not possible:
        return Diagnosis(None, (), None, right, tried)
    best = possible[0]
    assert best.suspect is not None
    alike = tuple(
        one
        for one in possible[1:]
        if one.suspect is not None and deviate_alike(views, best.suspect, one.suspect)
    )
    same = {one.id for one in (best, *alike)}
    left = [one for one in first_of_each(found) if one.id not in same]
    rivals = [one for one in possible if one.id not in same]
    if rivals and not 1 - rivals[0].distance <= NEARER * (1 - best.distance):
        return Diagnosis(None, (), best, right, tried)
    right = dataclasses.replace(right, distance=1.0)
    return Diagnosis(best, alike, left[0] if left else None, right, tried, UNEXPLAINED)
