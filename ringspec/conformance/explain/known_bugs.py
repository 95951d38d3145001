"""Name the known bug that gives a target's results, and read these results by what a search once found for this bug.

A search for faults can take many seconds, and in one problem its result for a known bug is always the same. So
``known_bugs.json`` contains what was found for each known bug in each problem that was searched; ``docs/readouts.py``
writes it. If a known bug gives the results of a target, this is tried before a search. As what a search finds, it counts
only if a ring with exactly these faults gives the results of both calls of the problem.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from ringspec.conformance.cases.model import Outputs
from ringspec.conformance.diagnose.candidates import View
from ringspec.conformance.diagnose.match import Diagnosis, Far, diagnose, views_of
from ringspec.conformance.diagnose.mutants import Mutant
from ringspec.conformance.readout.conclusion import Conclusion
from ringspec.conformance.readout.problem.problems import Problem
from ringspec.conformance.readout.proof.read_proven import Stored, simplest
from ringspec.conformance.readout.reading import Reading, reading_from
from ringspec.conformance.target.capabilities import Capabilities

FILE = "known_bugs.json"
COMPLETE = frozenset({"o", "lse", "dq", "dk", "dv"})  # with fewer results, other faults fit as well


class KnownBugs:
    """The known bugs with the results of a target that has these ``claims``.

    What is compared with the results of a problem is computed once for each problem.
    """

    def __init__(self, claims: Capabilities) -> None:
        self.claims = claims
        self.views: dict[str, list[View]] = {}
        # Those with the results of the first problem that failed, and its id; None before it.
        self.bugs: tuple[Mutant, ...] | None = None
        self.first = ""

    def stored(self, problem: Problem, outputs: Outputs) -> Stored:
        """Return what is stored, for a problem, of the bugs with the results of the first problem for which this is called."""
        if self.bugs is None:
            seen = self.diagnosis(problem, outputs, variants=False)
            named = () if seen is None or seen.named is None else (seen.named, *seen.alike)
            self.bugs = tuple(one.mutant for one in named if one.mutant is not None)
            self.first = problem.id
        if not outputs.keys() >= COMPLETE:
            return Stored()
        found = [
            one for bug in self.bugs for one in readings_of(bug.id) if of_problem(one, problem)
        ]
        readings = tuple(map(reading_in, found))
        explained = tuple(one for one in readings if one.explained)
        return Stored(explained, len(explained) < len(readings))

    def named(self, problem: Problem, outputs: Outputs, conclusion: Conclusion) -> Mutant | None:
        """Return the known bug with the results of a problem that ``conclusion`` is about; None without one."""
        if self.bugs and self.first == problem.id:
            return self.bugs[0]
        # A rounding bug leaves no fault to be read, and only the noise of such a bug hides that it is near. Two faults
        # are seldom a variant of one known bug.
        seen = self.diagnosis(
            problem,
            outputs,
            variants=len(conclusion.faults) < 2,
            rounding=not conclusion.faults,
            far="never" if conclusion.faults else "if none is near",
        )
        return None if seen is None or seen.named is None else seen.named.mutant

    def diagnosis(
        self,
        problem: Problem,
        outputs: Outputs,
        *,
        variants: bool,
        rounding: bool = False,
        far: Far = "never",
    ) -> Diagnosis | None:
        """Compare the results of a problem's first call with those of the known bugs."""
        call, results = problem.in_batches(outputs)
        given = self.claims, [call], [results]
        if problem.id not in self.views:
            self.views[problem.id] = views_of(*given, rounding=False)
        views = None if rounding else self.views[problem.id]
        return diagnose(*given, variants=variants, rounding=rounding, far=far, views=views)


def readings_of(bug: str) -> list[dict[str, Any]]:
    """Return the stored readings of a known bug as plain data."""
    return list(of_bugs().get(bug, {}).get("readings", ()))


@cache
def of_bugs() -> dict[str, Any]:
    """Return the sentences and readings by bug, as they are stored."""
    text = resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def of_problem(data: Mapping[str, Any], problem: Problem) -> bool:
    """Return whether stored data is that of a problem with the same ring and as many heads."""
    return (data["reading"]["problem"], data["shape"]) == (problem.id, shape_of(problem))


def shape_of(problem: Problem) -> list[int]:
    geometry = problem.pairs.geometry
    return [geometry.workers, geometry.heads, geometry.group, geometry.slots]


def reading_in(data: Mapping[str, Any]) -> Reading:
    """Return the reading in stored data; it is unexplained if nothing was found. It counts as searched."""
    return dataclasses.replace(reading_from(data["reading"]), evaluations=1)


def as_stored(problem: Problem, reading: Reading) -> dict[str, Any]:
    """Return what :func:`reading_in` reads: an explained reading, or that nothing was found in a problem."""
    parts = (reading.forward, reading.backward) if reading.explained else (None, None)
    forward, backward = (x and dataclasses.replace(x, sets=simplest(x)) for x in parts)
    kept = Reading(problem.id, False, forward, backward)
    return {"shape": shape_of(problem), "reading": kept.as_dict()}
