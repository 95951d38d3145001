"""A pytest session for one target (program under test), with the cases and verdicts of ``ringspec check``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ringspec.conformance.cases.model import RunCase
from ringspec.conformance.cases.profiles import cases_for
from ringspec.conformance.diagnose.summary import Diagnoser
from ringspec.conformance.report.records import Record
from ringspec.conformance.run.case import run_case
from ringspec.conformance.run.expected import Expectation, read_expected
from ringspec.conformance.run.load import asked_of
from ringspec.conformance.run.opening import close, opened
from ringspec.conformance.run.suite import selected
from ringspec.conformance.target.project import target_or_default
from ringspec.conformance.target.protocol import Target
from ringspec.errors import OptionError, shown


@dataclass(frozen=True)
class PytestRun:
    """The cases of a session and their ``target``.

    With a time limit the target runs in another process, otherwise in this one.
    """

    spec: str
    target: Target
    cases: list[RunCase]
    expected: Expectation
    diagnose: Diagnoser = field(default_factory=Diagnoser)

    def record(self, case: RunCase) -> Record:
        """Run one case and apply the list of expected failures."""
        return self.expected.settle(run_case(self.target, case, self.diagnose))

    def close(self) -> None:
        close(self.target)


def start(
    target: str | None,
    profile: str | None = None,
    timeout: str | None = None,
    expected_failures: str | None = None,
) -> PytestRun:
    """Load the target and its cases. Raises :class:`~ringspec.errors.RingspecError` for bad input."""
    spec = target_or_default(target)
    chosen, only = asked_of(spec, profile)
    expected = {} if expected_failures is None else read_expected(Path(expected_failures))
    limit = seconds(timeout)
    loaded = opened(spec, limit, here=limit is None)
    cases = selected(cases_for(chosen, loaded.capabilities), only or None)
    return PytestRun(spec, loaded, cases, Expectation(expected, loaded, cases))


def seconds(text: str | None) -> float | None:
    """Parse the value of --ringspec-timeout; None if the option is not given.

    >>> seconds("2.5"), seconds(None)
    (2.5, None)
    """
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 86_400:
        raise OptionError("--ringspec-timeout as seconds", shown(text), "write a number above 0")
    return value
