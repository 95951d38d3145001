"""The cases as tests of pytest: ``pytest --pyargs ringspec.conformance --ringspec-target TARGET``.

A case that TARGET does not claim to support is skipped, and an expected failure is an xfail. Every other outcome except
'pass' is a failure with the text of the report. ``pytest -k`` and ``-n`` work as usual.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from ringspec.conformance.report.words import record_text


def test_case(ringspec_run: Any, ringspec_case: Any, record_property: Any) -> None:
    record = ringspec_run.record(ringspec_case)
    record_property("ringspec", json.dumps([record.id, record.outcome, record.used]))
    if record.outcome == "not claimed":
        pytest.skip(f"not claimed: {record.reason}")
    if record.outcome == "expected failure":
        pytest.xfail(record.reason)
    if record.outcome != "pass":
        command = f"ringspec replay {ringspec_run.spec} {record.id}"
        pytest.fail(f"{record_text(record)}\nrepeat it: {command}", pytrace=False)
