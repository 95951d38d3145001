"""Run a target on a few readout problems and say in sentences what it computes.

The target is the program under test. The results of a readout problem show the weight of each query and key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringspec.conformance.cases.model import Outputs
from ringspec.conformance.diagnose.match import diagnose
from ringspec.conformance.readout.problems import Problem, group_of, problems_for
from ringspec.conformance.readout.proof import read_as, read_proven
from ringspec.conformance.readout.reading import Reading
from ringspec.conformance.readout.told import Told, told
from ringspec.conformance.run.call import Stop, ask, outputs_of
from ringspec.conformance.target.conventions import as_seen
from ringspec.conformance.target.protocol import Target


@dataclass(frozen=True)
class Run:
    """One problem that was run. ``reading``: what its results show. ``stopped``: why it has no results.

    ``outputs``: the results of the call that is read, and those of the call with random inputs.
    """

    problem: Problem
    reading: Reading | None = None
    outputs: tuple[Outputs, ...] = ()
    stopped: str = ""

    @property
    def right(self) -> bool:
        return self.reading is not None and self.reading.right


@dataclass(frozen=True)
class Explained:
    """What a target computes, read from the problems in ``runs``.

    ``told``: the explanation. ``known``: id, title and links of the known bug with the same results; None if no known
    bug has them. ``unread``: why no problem could be run; '' otherwise.
    """

    runs: tuple[Run, ...]
    told: Told = Told()
    known: dict[str, Any] | None = None
    unread: str = ""

    @property
    def wrong(self) -> int:
        return sum(not one.right for one in self.runs)

    @property
    def right(self) -> bool:
        """Tell whether at least one problem was run and all of them have correct results."""
        return bool(self.runs) and self.wrong == 0

    @property
    def sentences(self) -> tuple[str, ...]:
        """What the target computes, in sentences; if a problem has no results, the first sentence says why."""
        stopped = [one for one in self.runs if one.stopped]
        said = [f"{one.problem.id}: no results ({one.stopped})." for one in stopped[:1]]
        return (*said, *self.told.sentences)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "right": self.right,
            "problems": [
                {"id": one.problem.id, "right": one.right, "stopped": one.stopped}
                for one in self.runs
            ],
            "sentences": list(self.sentences),
            "alternatives": list(self.told.alternatives),
            "explains": len(self.told.explained),
            "wrong": self.wrong,
            "hint": self.told.hint,
            "known": self.known,
            "unread": self.unread,
        }


def explain_target(target: Target) -> Explained:
    """Run a target on a few problems that it claims, and read what it computes.

    Problems with documents, a soft cap or dlse are run only if the others are right. If the target fails, nothing is
    raised: the result says which problems have no results, and why.

    >>> from ringspec.conformance.targets.reference import reference_float32
    >>> explain_target(reference_float32).right
    True
    """
    problems, reason = problems_for(target.capabilities)
    made: list[Run] = []
    for problem in problems:
        special = group_of(problem.pairs.geometry) not in ("", "window")
        if special and any(run.reading is not None and not run.right for run in made):
            break
        made.append(run_problem(target, problem, [x.reading for x in made if x.reading]))
    runs = agreed(made)
    if not runs:
        return Explained((), unread=reason)
    wrong = [one for one in runs if one.reading is not None and not one.right]
    found = told([one.reading for one in wrong if one.reading is not None])
    return Explained(runs, found, known_bug(target, found, wrong))


def agreed(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Read a problem by the faults of a later one if these explain it, too: some faults do not show in every problem."""
    found = list(runs)
    for number in range(len(runs) - 1):
        run = runs[number]
        if run.reading is not None and run.reading.explained:
            own = faults_in(run.reading)
            later = [x.reading for x in runs[number + 1 :] if x.reading is not None]
            more = [x for x in later if faults_in(x) > own]
            reading = read_as(run.problem, run.outputs, more)
            found[number] = dataclasses.replace(run, reading=reading) if reading else run
    return tuple(found)


def faults_in(reading: Reading) -> int:
    """Return the number of faults in the simplest explanation of a problem."""
    return sum(len(one.sets[0]) for one in reading.passes if one.sets)


def run_problem(target: Target, problem: Problem, earlier: Sequence[Reading] = ()) -> Run:
    """Run one problem and read its results.

    ``earlier``: what earlier problems showed. The faults in it are the first to be tried as an explanation.
    """
    claims = target.capabilities
    try:
        outputs = [
            outputs_of(ask(target, as_seen(call, claims))[0], call, claims)
            for call in problem.asked
        ]
    except Stop as stop:
        return Run(problem, stopped=f"{stop.outcome}: {stop.message.splitlines()[0]}")
    return Run(problem, read_proven(problem, outputs, earlier), tuple(problem.results(outputs)))


def known_bug(target: Target, found: Told, wrong: Sequence[Run]) -> dict[str, Any] | None:
    """Find the known bug that gives the same results in the problem that shows the fault; return None without one."""
    shown = [one for one in wrong if one.problem.id == found.shown_by]
    if not shown:
        return None
    one = shown[0]
    seen = diagnose(target.capabilities, [one.problem.call], [one.outputs[0]])
    if seen is None or seen.named is None or seen.named.mutant is None:
        return None
    mutant = seen.named.mutant
    return {"id": mutant.id, "title": mutant.title, "links": list(mutant.links)}
