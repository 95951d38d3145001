"""Name the known bug that gives a target's results, and read these results by what a search once found for this bug.

A search for faults can take many seconds, and for a known bug its result is always the same. So ``known_bugs.json``
contains the readings of each known bug; ``docs/readouts.py`` writes it. The readings of a bug that gives the results of
a problem are tried before a search. As those of a search, they count only if a ring with exactly their faults gives the
results of both calls of the problem.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from ringspec.conformance.cases.model import Outputs
from ringspec.conformance.diagnose.candidates import View
from ringspec.conformance.diagnose.match import Diagnosis, Far, diagnose, views_of
from ringspec.conformance.diagnose.mutants import Mutant
from ringspec.conformance.readout.problems import Problem
from ringspec.conformance.readout.proof import Stored, simplest
from ringspec.conformance.readout.reading import Named, PassRead, Reading
from ringspec.conformance.readout.told import Told
from ringspec.conformance.target.capabilities import Capabilities

FILE = "known_bugs.json"
FEWEST_WORKERS = (
    3  # in rings of fewer, simpler faults than the stored ones may have the same effect
)


class KnownBugs:
    """The known bugs with the results of a target that has these ``claims``.

    What is compared with the results of a problem is computed once for each problem.
    """

    def __init__(self, claims: Capabilities) -> None:
        self.claims = claims
        self.views: dict[str, list[View]] = {}
        # Of the bugs with the results of the first problem that failed, and its id if there are any; None before it.
        self.readings: tuple[Reading, ...] | None = None
        self.shown_by = ""

    @property
    def found(self) -> bool:
        """Tell whether a known bug has the results of the first problem that failed."""
        return bool(self.shown_by)

    def stored(self, problem: Problem, outputs: Outputs) -> Stored:
        """Return the stored readings of the bugs with the results of the first problem for which this is called."""
        if problem.call.workers < FEWEST_WORKERS:
            return Stored()
        if self.readings is None:
            seen = self.diagnosis(problem, outputs, variants=False)
            named = () if seen is None or seen.named is None else (seen.named, *seen.alike)
            self.shown_by = problem.id if named else ""
            self.readings = tuple(one for bug in named for one in readings_of(bug.id))
        return Stored(self.readings, self.shown_by == problem.id)

    def named(self, problem: Problem, outputs: Outputs, told: Told) -> Mutant | None:
        """Return the known bug with the results of a problem that has the explanation ``told``; None without one."""
        # A rounding bug leaves no fault to be read, and only the noise of such a bug hides that it is near. Two faults
        # are seldom a variant of one known bug.
        seen = self.diagnosis(
            problem,
            outputs,
            variants=len(told.faults) < 2,
            rounding=not told.faults,
            far="never" if told.faults else "if none is near",
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


def readings_of(bug: str) -> list[Reading]:
    """Return the stored readings of a known bug, as if they were those of a problem with its id; none if none are stored."""
    return [
        Reading(bug, False, pass_from("forward", one), pass_from("backward", one))
        for one in of_bugs().get(bug, {}).get("readings", ())
    ]


@cache
def of_bugs() -> dict[str, Any]:
    """Return the sentences and readings by bug, as they are stored."""
    text = resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def pass_from(phase: str, data: Mapping[str, Any]) -> PassRead | None:
    if data[phase] is None:
        return None
    sets = tuple(tuple(Named(phase, *fault) for fault in faults) for faults in data[phase]["sets"])
    return PassRead(sets, base=data[phase]["base"])


def as_stored(readings: Sequence[Reading]) -> list[dict[str, Any]]:
    """Return explained readings as plain data that :func:`readings_of` reads; equal ones once."""
    found: list[dict[str, Any]] = []
    for one in readings:
        data = {
            phase: part
            and {
                "sets": [
                    [[x.kind, x.place, x.cost, x.hint] for x in faults] for faults in simplest(part)
                ],
                "base": part.base,
            }
            for phase, part in (("forward", one.forward), ("backward", one.backward))
        }
        if data not in found:
            found.append(data)
    return found
