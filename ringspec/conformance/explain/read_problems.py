"""Run a target on readout problems, one after the other, and read the results of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from threadpoolctl import threadpool_limits

from ringspec.conformance.cases.model import Outputs
from ringspec.conformance.explain.known_bugs import KnownBugs
from ringspec.conformance.readout.block_words import without_ring
from ringspec.conformance.readout.problem.problems import Problem
from ringspec.conformance.readout.problem.shapes import subject_of
from ringspec.conformance.readout.proof.read_proven import read_as, read_proven
from ringspec.conformance.readout.reading import Reading
from ringspec.conformance.readout.search.context import EVALUATIONS
from ringspec.conformance.run.call import Stop, ask, outputs_of
from ringspec.conformance.target.conventions import as_seen
from ringspec.conformance.target.protocol import Target

# What the searches in all problems may do together, and in one problem, in evaluations; 2,000 take about 1 s. The
# searches of a problem get what those of earlier problems left; LEAST if that is less, or if one was not explained. If
# MOST_UNEXPLAINED were not explained, others are not searched: what was not found in these is not found there, either.
EVALUATIONS_OF_ALL, EVALUATIONS_OF_ONE, LEAST = 22_500.0, 14_000.0, 1_000.0
MOST_UNEXPLAINED = 3
THOROUGH = 3.0  # times as many evaluations in a thorough search
MOST_AGREED = 3  # explanations of later problems by which a problem is read again


@dataclass(frozen=True)
class Search:
    """How faults are searched: the arguments of :func:`ringspec.conformance.explain.explain.explain_target`."""

    thorough: bool
    catalogue: bool
    progress: Callable[[str], None]


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


@contextmanager
def one_thread() -> Iterator[None]:
    """Let matrix products use one thread, in a with statement or as a decorator: small rings are too small for more."""
    with threadpool_limits(1, user_api="blas"):
        yield


def runs_of(
    target: Target,
    problems: Iterable[Problem],
    how: Search,
    bugs: KnownBugs | None = None,
    earlier: Sequence[Run] = (),
) -> list[Run]:
    """Run problems one after the other; those of a feature, or of another length, only if the others are right.

    Batches are not a feature.
    """
    made: list[Run] = []
    longer = THOROUGH if how.thorough else 1.0
    left, unexplained = EVALUATIONS_OF_ALL * longer, 0
    for problem in problems:
        geometry = problem.pairs.geometry
        special = subject_of(geometry) not in ("", "window", "batches")
        if (special or problem.of_other_sizes) and any(
            run.reading is not None and not run.right for run in made
        ):
            continue
        readings = [run.reading for run in (*earlier, *made) if run.reading]
        most = max(LEAST * longer, min(left, EVALUATIONS_OF_ONE * longer))
        share = most / EVALUATIONS if unexplained < MOST_UNEXPLAINED else 0.0
        stored = bugs if how.catalogue and not how.thorough else None
        how.progress(problem.id)
        made.append(run_problem(target, problem, readings, share, stored))
        reading = made[-1].reading
        left -= reading.evaluations if reading else 0
        if reading is not None and not (reading.right or reading.explained):
            left, unexplained = 0.0, unexplained + 1
    return made


def agreed(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Read a problem by the faults of the others as well, if these explain it, too.

    Some faults, and some pairs of tokens, do not show in every problem: a causal mask hides pairs. Of two faults, or rules
    about tiles, that give the same numbers in one problem, another problem may show which one it is.
    """
    found = list(runs)
    for number, run in enumerate(runs):
        if run.reading is not None and run.reading.explained:
            others = [x.reading for x in (*runs[number + 1 :], *found[:number]) if x.reading]
            for other in distinct_from(run.reading, others):
                reading = read_as(run.problem, run.outputs, [other])
                if reading is not None:
                    both = with_sets_of(reading, found[number].reading or reading)
                    found[number] = dataclasses.replace(run, reading=both)
    return tuple(found)


def distinct_from(reading: Reading, others: Sequence[Reading]) -> list[Reading]:
    """Return the first few of the readings whose first faults differ from those of ``reading`` and from each other, with these alone."""

    def named(one: Reading) -> tuple[tuple[str, str, str], ...]:
        return tuple(fault.name for x in one.passes if x.sets for fault in x.sets[0])

    by_names = {named(one): one for one in reversed(others) if one.explained}
    by_names.pop(named(reading), None)
    return [with_first_sets(one) for one in list(by_names.values())[::-1][:MOST_AGREED]]


def with_first_sets(reading: Reading) -> Reading:
    forward, backward = (
        part and dataclasses.replace(part, sets=part.sets[:1])
        for part in (reading.forward, reading.backward)
    )
    return dataclasses.replace(reading, forward=forward, backward=backward)


def with_sets_of(reading: Reading, other: Reading) -> Reading:
    """Return a reading with its own sets of faults, then those of another reading of the same problem."""
    forward, backward = (
        mine
        and his
        and dataclasses.replace(mine, sets=tuple(dict.fromkeys((*mine.sets, *his.sets))))
        for mine, his in ((reading.forward, other.forward), (reading.backward, other.backward))
    )
    return dataclasses.replace(reading, forward=forward, backward=backward)


def run_problem(
    target: Target,
    problem: Problem,
    earlier: Sequence[Reading] = (),
    share: float = 1.0,
    bugs: KnownBugs | None = None,
) -> Run:
    """Run one problem and read its results.

    ``earlier``: what earlier problems showed. The faults in it are the first to be tried as an explanation. What is stored for
    ``bugs`` with the results of a problem comes next.
    """
    claims = target.capabilities
    try:
        outputs = [
            outputs_of(ask(target, as_seen(call, claims))[0], call, claims)
            for call in problem.asked
        ]
    except Stop as stop:
        return Run(problem, stopped=f"{stop.outcome}: {first_line(stop)}")
    stored = None if bugs is None else partial(bugs.stored, problem)
    with one_thread():
        reading = read_proven(problem, outputs, earlier, share, stored)
    if problem.call.workers == 1:
        reading = without_ring(reading)
    return Run(problem, reading, tuple(problem.results(outputs)))


def first_line(stop: Stop) -> str:
    """Return why there are no results, in one line: of a traceback, its last line."""
    where, found, trace = stop.message.partition("Traceback (most recent call last):\n")
    if not found:
        return stop.message.splitlines()[0]
    lines = [line for line in trace.splitlines() if line[:1].strip()]
    return where + next((line for line in lines if not line.startswith("Traceback")), stop.outcome)
