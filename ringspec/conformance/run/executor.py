"""Execute cases in this process, or in other processes that load the target by its name.

The target is the program under test.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from ringspec.conformance.cases.model import RunCase
from ringspec.conformance.report.records import Record
from ringspec.conformance.run.case import Diagnose, run_case
from ringspec.conformance.run.judges import in_processes
from ringspec.conformance.run.opening import called_by, close
from ringspec.conformance.target.protocol import Target
from ringspec.errors import OptionError, shown
from ringspec.vectors.processes import MOST_JOBS


def executed(
    target: Target,
    cases: Sequence[RunCase],
    timeout: float | None,
    jobs: int,
    spec: str | None,
    diagnose: Diagnose | None = None,
    profile: str | None = None,
    capture: bool = True,
) -> Generator[Record, None, None]:
    """Yield the records of cases, in their order.

    ``spec`` and ``profile`` are the names by which other processes find the target and the cases, so ``jobs`` > 1
    requires both. Without ``spec`` all cases are executed in this process.
    """
    check_numbers(timeout, jobs)
    if jobs > 1 and spec is not None:
        if profile is None:
            raise OptionError(
                f"the name of the profile of all cases, for {jobs} jobs",
                "none",
                "pass the profile that was given to run_cases",
            )
        yield from in_processes(profile, cases, timeout, jobs, spec, diagnose is not None)
        return
    caller = called_by(target, timeout, spec)
    try:
        for case in cases:
            yield run_case(caller, case, diagnose, capture)
    finally:
        if caller is not target:
            close(caller)


def check_numbers(timeout: float | None, jobs: int) -> None:
    if timeout is not None and not 0 < timeout < float("inf"):
        raise OptionError("a timeout of more than 0 seconds", shown(timeout), "leave it out")
    if type(jobs) is not int or not 1 <= jobs <= MOST_JOBS:
        raise OptionError(f"1 to {MOST_JOBS} jobs", shown(jobs), "give the number of processes")
