"""Programs and functions that other processes load are no tests: pytest does not import them."""

import pytest

from ringspec.conformance.readout import reading
from ringspec.conformance.run import explain

collect_ignore_glob = ["programs/*", "*_functions.py"]


@pytest.fixture(autouse=True)
def enough_time_to_explain(monkeypatch):
    """Explanations do not depend on the speed of the machine: 6 s of processor time in place of 2.5 s, in all problems."""
    monkeypatch.setattr(reading, "SECONDS", 6.0)
    monkeypatch.setattr(explain, "FIRST_SECONDS", 1000.0)
