"""Fixtures of the simulator's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def core() -> Iterator[object]:
    """One trn2 core, current inside the test."""
    from nki_impl.sim.machine.core import Core, acting_as

    with acting_as(Core()) as one:
        yield one
