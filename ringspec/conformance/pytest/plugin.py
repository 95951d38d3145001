"""The plugin of ``pytest --pyargs ringspec.conformance --ringspec-target TARGET``.

An entry point of the group ``pytest11`` loads it. If ringspec is on the path but not installed, use
``-p ringspec.conformance.pytest.plugin``. Other tests are not affected.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ringspec.conformance.pytest.session import PytestRun

PREFIX = "--ringspec-"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ringspec conformance")
    for name, metavar, text in (
        ("target", "TARGET", "what to test, as for 'ringspec check'"),
        ("profile", "PROFILE", "smoke, core (the default), full or seeds"),
        ("timeout", "SECONDS", "time limit of one call; the target then runs in another process"),
        ("expected-failures", "FILE", "TOML file: ids of cases that must fail, each with a reason"),
    ):
        group.addoption(PREFIX + name, default=None, metavar=metavar, help=text)


def option(config: pytest.Config, name: str) -> Any:
    return config.getoption(PREFIX + name, default=None)


@pytest.fixture(scope="session")
def ringspec_run(pytestconfig: pytest.Config) -> Iterator[PytestRun]:
    """The target, which is the program under test, and its cases; the same object for the whole session."""
    run = session_run(pytestconfig)
    yield run
    run.close()


def session_run(config: pytest.Config) -> PytestRun:
    """Return the run of this session; raise UsageError for bad input."""
    # Imported here, so that pytest starts fast in runs that do not use the suite.
    from ringspec.conformance.pytest.session import start
    from ringspec.errors import RingspecError

    key = "_ringspec_run"
    if not hasattr(config, key):
        names = ("target", "profile", "timeout", "expected-failures")
        try:
            setattr(config, key, start(*(option(config, name) for name in names)))
        except RingspecError as error:
            raise pytest.UsageError(str(error)) from None
    run: PytestRun = getattr(config, key)
    return run


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "ringspec_case" in metafunc.fixturenames:
        cases = session_run(metafunc.config).cases
        metafunc.parametrize("ringspec_case", cases, ids=[case.id for case in cases])


def records_of(reporter: Any) -> list[tuple[str, str, dict[str, Any]]]:
    """Return (id, outcome, used values) of all finished cases, including those of other processes."""
    return [
        (id, outcome, used)
        for reports in reporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "ringspec" and report.when == "call"
        for id, outcome, used in [json.loads(value)]
    ]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print a one-sentence summary of the run, and the claims that were not tested."""
    found = {one[0]: one for one in records_of(terminalreporter)}
    if found:
        from ringspec.conformance.report.coverage import coverage_of
        from ringspec.conformance.report.records import Record
        from ringspec.conformance.report.report import counts_of, headline

        records = [Record(id, outcome, used=used) for id, outcome, used in found.values()]
        coverage = coverage_of(session_run(config).target.capabilities, records)
        terminalreporter.section("ringspec")
        for line in filter(None, (coverage.line, *coverage.hints)):
            terminalreporter.write_line(line)
        terminalreporter.write_line(headline(counts_of(records), coverage.clauses))


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Iterator[None]:
    """Fail if no case was executed: skips must not look like a pass."""
    result = yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    found = [outcome for _, outcome, _ in records_of(reporter)] if reporter is not None else []
    none_executed = bool(found) and set(found) <= {"not claimed", "not run"}
    if none_executed and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
    return result
