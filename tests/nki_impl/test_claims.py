"""The tables of claimed and unclaimed cases in docs/nki/index.md are those that the claims give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks import nki_claims

from nki_impl.target import nki_impl
from ringspec.conformance.cases.profiles import run_cases

PAGE = Path(__file__).resolve().parents[2] / "docs" / "nki" / "index.md"


def test_every_reason_of_an_unclaimed_case_has_its_row() -> None:
    groups = nki_claims.reasons(nki_impl.capabilities, run_cases("core"))
    assert set(groups) <= set(nki_claims.NEEDS)


def test_the_rows_of_the_page_are_those_of_the_program() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [text for text in nki_claims.NEEDS.values() if f"| {text} |" not in page] == []
    assert all(re.search(rf"\| `{one.name}` \| \d+ of", page) for one in nki_claims.TARGETS)


@pytest.mark.slow
def test_the_page_has_the_counts_of_the_program() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for table in nki_claims.tables():
        assert table in page
