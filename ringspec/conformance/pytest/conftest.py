"""The cases are no tests of ringspec itself: they are collected where somebody asks for them."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without a target, and without ``--pyargs ringspec.conformance``, there is nothing to run."""
    target = config.getoption("--ringspec-target", default=None)
    if collection_path.name == "test_conformance.py" and target is None:
        return None if config.getoption("pyargs") else True
    return None
