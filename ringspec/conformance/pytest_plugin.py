"""The plugin behind ``pytest --pyargs ringspec.conformance --ringspec-target TARGET``.

An entry point of the group ``pytest11`` loads it; where ringspec lies on the path without being
installed, ``-p ringspec.conformance.pytest_plugin`` does. It does nothing to other tests.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ringspec.conformance.pytest_run import PytestRun

PREFIX = "--ringspec-"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ringspec conformance")
    for name, metavar, text in (
        ("target", "TARGET", "what to test, as for 'ringspec check'"),
        ("profile", "PROFILE", "smoke, core (the default), full or seeds"),
        ("timeout", "SECONDS", "for one call, which then runs in another process"),
        ("expected-failures", "FILE", "TOML: ids of cases that fail, a reason each"),
    ):
        group.addoption(PREFIX + name, default=None, metavar=metavar, help=text)


def option(config: pytest.Config, name: str) -> Any:
    return config.getoption(PREFIX + name, default=None)


@pytest.fixture(scope="session")
def ringspec_run(pytestconfig: pytest.Config) -> Iterator[PytestRun]:
    """The target, loaded once."""
    run = session_run(pytestconfig)
    yield run
    run.close()


def session_run(config: pytest.Config) -> PytestRun:
    """The run of this session; bad input ends pytest with a sentence."""
    # Imported here, so that other runs of pytest start as fast as before.
    from ringspec.conformance.pytest_run import start
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


def records_of(reporter: Any) -> list[tuple[str, str]]:
    """(id, outcome) of all cases that have come back, from other processes too."""
    return [
        (id, outcome)
        for reports in reporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "ringspec" and report.when == "call"
        for id, outcome in [json.loads(value)]
    ]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The headline, which counts what is not claimed."""
    found = dict(records_of(terminalreporter))
    if found:
        from ringspec.conformance.report import headline

        terminalreporter.section("ringspec")
        terminalreporter.write_line(headline(Counter(found.values())))


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Iterator[None]:
    """Zero executed cases is a failure: skips must not look like a pass."""
    result = yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    found = [outcome for _, outcome in records_of(reporter)] if reporter is not None else []
    none_executed = bool(found) and set(found) <= {"not claimed", "not run"}
    if none_executed and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
    return result
