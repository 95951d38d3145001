"""Collect the conformance cases only on request, because they do not test ringspec itself."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore the cases unless a target or ``--pyargs ringspec.conformance`` is given."""
    target = config.getoption("--ringspec-target", default=None)
    if collection_path.name == "test_conformance.py" and target is None:
        return None if config.getoption("pyargs") else True
    return None
