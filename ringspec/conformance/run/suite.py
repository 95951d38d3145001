"""Run every case once, and count the outcomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ringspec.conformance.cases.model import RunCase
from ringspec.conformance.report.coverage import Coverage, coverage_of
from ringspec.conformance.report.records import FAILURES, Record
from ringspec.conformance.report.report import counts_of
from ringspec.conformance.run.case import Diagnose
from ringspec.conformance.run.executor import executed
from ringspec.conformance.run.expected import Expectation, Listed
from ringspec.conformance.target.protocol import Target
from ringspec.errors import OptionError, nearest, shown

Progress = Callable[[int, int, str], None]
Sink = Callable[[Record], None]
PASSED, FAILED, USAGE, NOTHING, INTERRUPTED = 0, 1, 2, 3, 130


@dataclass(frozen=True)
class Summary:
    """The ``records`` of a run, and whether it is ``complete``.

    After Ctrl-C a run is not complete, and the remaining cases are 'not run'. ``coverage``: claims of the target (the
    program under test) that no executed case used. ``recipe``: where the target declares to round.
    """

    records: tuple[Record, ...]
    complete: bool = True
    coverage: Coverage = Coverage()
    recipe: Any = None

    @property
    def counts(self) -> dict[str, int]:
        """The number of cases with each outcome, in the order of ``OUTCOMES``."""
        return counts_of(self.records)

    @property
    def claimed(self) -> int:
        """The number of cases that were executed."""
        return sum(record.outcome not in ("not claimed", "not run") for record in self.records)

    @property
    def failures(self) -> tuple[Record, ...]:
        """The records of the cases whose outcome is a failure."""
        return tuple(record for record in self.records if record.outcome in FAILURES)

    @property
    def exit_code(self) -> int:
        """The exit status of the run.

        0: every executed case passed or failed as expected. 1: some case did neither. 3: no case was executed. 130: the
        run was interrupted. (2 is the status of a wrong command line, before any run.)
        """
        if not self.complete:
            return INTERRUPTED
        if self.claimed == 0:
            return NOTHING
        return FAILED if self.failures else PASSED


def run(
    target: Target,
    cases: Sequence[RunCase],
    *,
    timeout: float | None = None,
    jobs: int = 1,
    only: str | Sequence[str] | None = None,
    expected_failures: Listed | None = None,
    progress: Progress | None = None,
    sink: Sink | None = None,
    spec: str | None = None,
    diagnose: Diagnose | None = None,
    profile: str | None = None,
    capture: bool = True,
    done: Mapping[str, Record] | None = None,
) -> Summary:
    """Run cases against a target, the program under test.

    ``only``: patterns of ids, such as ``ring/*``. ``expected_failures``: reasons by id, or count and reason by pattern
    (:func:`ringspec.conformance.run.expected.read_expected`). ``sink(record)`` is called for each record in the order
    of the cases, then ``progress(done, total, id)``. ``diagnose`` is called for each case with wrong numbers
    (:class:`ringspec.conformance.diagnose.summary.Diagnoser`).

    ``spec``: the text by which :func:`ringspec.conformance.run.load.load_target` finds the target. With ``spec``, a
    call of more than ``timeout`` seconds is a 'timeout', and ``jobs`` processes work at the same time; each of them
    calls the target in another process. These processes find the cases by ``profile``, so ``jobs`` > 1 requires a
    profile. Records do not depend on ``jobs``. Without ``capture``, what a target in this process prints goes to
    stdout, for a debugger. Ctrl-C ends the run; the remaining cases are 'not run'. ``done``: records by id of an
    interrupted run, whose cases do not run again; they are not passed to ``sink``.

    >>> from ringspec.conformance.cases.profiles import run_cases
    >>> from ringspec.conformance.targets.reference import reference_float64
    >>> summary = run(reference_float64, run_cases("smoke"))
    >>> summary.exit_code, summary.complete
    (0, True)
    """
    chosen = selected(cases, only)
    expected = Expectation(expected_failures or {}, target, cases)
    records: list[Record] = []
    known = done or {}
    due = [case for case in chosen if case.id not in known]
    running = executed(target, due, timeout, jobs, spec, diagnose, profile, capture)
    try:
        for case in chosen:
            fresh = case.id not in known
            records.append(expected.settle(next(running) if fresh else known[case.id]))
            report(records, len(chosen), progress, sink if fresh else None)
        next(running, None)  # it ends by itself, and with it the processes that it started
    except KeyboardInterrupt:
        running.close()
        for case in chosen[len(records) :]:
            fresh = case.id not in known
            left = Record(case.id, "not run", case.needs, flags=case.flags)
            records.append(left if fresh else expected.settle(known[case.id]))
            report(records, len(chosen), None, sink if fresh else None)
        return summary_of(target, records, complete=False)
    return summary_of(target, records)


def summary_of(target: Target, records: Sequence[Record], complete: bool = True) -> Summary:
    claims = target.capabilities
    return Summary(tuple(records), complete, coverage_of(claims, records), claims.recipe)


def report(records: list[Record], total: int, progress: Progress | None, sink: Sink | None) -> None:
    if sink is not None:
        sink(records[-1])
    if progress is not None:
        progress(len(records), total, records[-1].id)


def remedy(pattern: str, ids: Sequence[str]) -> str:
    """Suggest ``pattern`` followed by a star if some id begins with it, else the id that is most similar.

    >>> remedy("ring/a", ["ring/a-w2", "ring/a-w4"])
    "write 'ring/a*', which matches 2 cases"
    """
    if pattern and (count := sum(id.startswith(pattern) for id in ids)):
        return f"write {pattern + '*'!r}, which matches {count} case{'' if count == 1 else 's'}"
    return nearest(pattern, ids)


def selected(cases: Sequence[RunCase], only: str | Sequence[str] | None) -> list[RunCase]:
    """Return the cases whose id matches one of the patterns; each pattern must match one."""
    if only is None:
        return list(cases)
    patterns = [only] if isinstance(only, str) else list(only)
    ids = [case.id for case in cases]
    for pattern in patterns:
        if not any(fnmatchcase(id, pattern) for id in ids):
            expected = "a pattern that matches the whole id of some case"
            raise OptionError(expected, shown(pattern), remedy(pattern, ids))
    return [case for case in cases if any(fnmatchcase(case.id, one) for one in patterns)]
