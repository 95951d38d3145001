"""The suite as one function, for notebooks and programs: run cases, diagnose failures, report as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringspec.conformance.cases.profiles import cases_for
from ringspec.conformance.diagnose.summary import Diagnoser, most_likely
from ringspec.conformance.report.records import Record
from ringspec.conformance.report.report import headline
from ringspec.conformance.report.shared import shared_dtype_lines, with_shared_dtype
from ringspec.conformance.report.words import folded, record_text, verdict_lines
from ringspec.conformance.run.opening import close, opened
from ringspec.conformance.run.suite import Progress, Summary, run
from ringspec.conformance.target.protocol import Target

WIDTH, MOST_SHOWN = 86, 4


@dataclass(frozen=True)
class Checked:
    """The results of a check.

    Printing an instance shows the failures, the diagnosis and a headline. ``summary`` is the whole run; the properties
    are parts of it.
    """

    summary: Summary

    @property
    def records(self) -> tuple[Record, ...]:
        """One record for each case, in the order of the run."""
        return self.summary.records

    @property
    def failures(self) -> tuple[Record, ...]:
        return self.summary.failures

    @property
    def passed(self) -> bool:
        """True if at least one case was executed and none failed."""
        return self.summary.exit_code == 0

    @property
    def headline(self) -> str:
        """The run in one sentence, such as 'passed 14 of 14 claimed, 19 not claimed'."""
        return headline(self.summary.counts, self.summary.coverage.clauses)

    @property
    def diagnosis(self) -> dict[str, Any] | None:
        """The most likely bug, as ``diagnose.summary.most_likely`` finds it; None if nothing was diagnosed.

        ``id``, ``title``, ``links``: the bug; ``id`` is None if no known bug explains the failures. ``of``: number of
        diagnosed cases. ``count``: number of those whose results may come from this bug.
        """
        return most_likely(self.records)

    @property
    def wrong(self) -> tuple[str, ...]:
        """The names of results that were wrong in some case: 'o', 'lse', 'dq', ..."""
        found = [f.tensor for one in self.failures for f in one.findings if f.kind != "ok"]
        return tuple(dict.fromkeys(found))

    def __str__(self) -> str:
        alike = with_shared_dtype(self.failures)
        shown = [one for one in self.failures if one not in alike[1:]]
        lines = [line for one in shown[:MOST_SHOWN] for line in failure_lines(one)]
        if len(shown) > MOST_SHOWN:
            lines += [f"and {len(shown) - MOST_SHOWN} more failures", ""]
        if alike:
            lines += [*folded(shared_dtype_lines(alike, self.summary.recipe), WIDTH), ""]
        found = self.diagnosis
        if found is not None:
            lines += folded(verdict_lines(found), WIDTH)
        return "\n".join([*lines, self.headline])


def failure_lines(record: Record, width: int = WIDTH) -> list[str]:
    """Describe a failure in lines of at most ``width`` characters, and add an empty line."""
    return [*folded(record_text(record, 2).splitlines(), width), ""]


def check(
    target: Target | str,
    profile: str = "smoke",
    *,
    only: str | Sequence[str] | None = None,
    timeout: float | None = None,
    progress: Progress | None = None,
) -> Checked:
    """Run a profile of the conformance suite: ``ringspec check`` as a function.

    ``target``: the program under test. It is an object with ``name``, ``capabilities`` and ``run(call)``, such as
    :class:`~ringspec.conformance.adapters.numpy_lists.NumPyTarget`, or a text as on the command line of ``ringspec
    check``. ``profile``: 'smoke' (seconds), 'core' (minutes), 'full', 'seeds' or 'noise'. ``only``: patterns of case
    ids, such as ``ring/*``. ``timeout``: seconds for one call of a target that runs in another process.
    ``progress(done, total, id)`` is called after each case.

    Results are compared with the correctly rounded values of the definition, within the bounds of
    :mod:`ringspec.compare.bounds`. Raises the errors of :func:`ringspec.conformance.run.load.load_target` and
    :func:`ringspec.conformance.run.suite.run`, which are subclasses of :class:`~ringspec.errors.RingspecError`.

    >>> checked = check("ringspec.conformance.targets.reference:reference_float32", only="ring/*")
    >>> print(checked)
    passed 5 of 5 claimed, 0 not claimed
    >>> checked.passed, checked.diagnosis is None
    (True, True)
    """
    options: dict[str, Any] = {"only": only, "timeout": timeout, "progress": progress}
    if not isinstance(target, str):
        cases = cases_for(profile, target.capabilities)
        return Checked(run(target, cases, **options, diagnose=Diagnoser()))
    found = opened(target, timeout, here=timeout is None)
    try:
        cases = cases_for(profile, found.capabilities)
        return Checked(run(found, cases, **options, diagnose=Diagnoser()))
    finally:
        close(found)
