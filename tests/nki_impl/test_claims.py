"""The tables of claimed and unclaimed cases in docs/nki/index.md are those that the claims give."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import nki_claims

from nki_impl.target import nki_impl
from ringspec.conformance.cases.profiles import run_cases

PAGE = Path(__file__).resolve().parents[2] / "docs" / "nki" / "index.md"


def test_every_reason_of_an_unclaimed_case_has_its_row() -> None:
    groups = nki_claims.reasons(nki_impl.capabilities, run_cases("core"))
    assert set(groups) <= set(nki_claims.NEEDS)


def test_the_page_has_every_target_with_its_cases_of_core_and_every_need() -> None:
    page, cases = PAGE.read_text(encoding="utf-8"), run_cases("core")
    assert [text for text in nki_claims.NEEDS.values() if f"| {text} |" not in page] == []
    counts = [nki_claims.claimed(one.capabilities, cases) for one in nki_claims.TARGETS]
    rows = [
        f"| `{x.name}` | {n} of {len(cases)} |"
        for x, n in zip(nki_claims.TARGETS, counts, strict=True)
    ]
    assert [row for row in rows if row not in page] == []


@pytest.mark.slow
def test_the_page_has_the_counts_of_the_program() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for table in nki_claims.tables():
        assert table in page
