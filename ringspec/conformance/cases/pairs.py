"""Pairs of features: small problems that test any two features together, if a problem can have both.

The rows of :mod:`ringspec.conformance.cases.pair_rows` are a covering array. Take any two values of operation, layout,
circulation (what travels), direction, number of workers, format, head ratio (H / Hkv), mask terms and features that can
occur in one problem. Then a golden case or a row has both values, and each of them changes the result.
tests/conformance/cases/test_pairs.py verifies this.

If a target, the program under test, does not claim to support a value of a row, the row runs without this value or with
a claimed value instead. Claimed values stay, so the rows cover all pairs of values that a target claims. The default
scale of these problems is never a power of two. If it were, a missing scale could look like another bug, which is wrong
by a factor of 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ringspec.conformance.cases.calls import call_of, passes_for, with_claimed_passes
from ringspec.conformance.cases.model import Judgement, Outputs, RunCase
from ringspec.conformance.cases.pair_problem import case_of
from ringspec.conformance.cases.pair_rows import ROWS, fitted_row
from ringspec.conformance.cases.problems import Seen, judged, tensors_of
from ringspec.conformance.target.capabilities import Capabilities, why_not
from ringspec.conformance.target.protocol import Call
from ringspec.vectors.format.case import Case

MOST_TOKENS = 96


def cases(profile: str = "core") -> list[RunCase]:
    """Return one case for each row, ``pairs/000`` and so on; none in 'smoke'."""
    if profile == "smoke":
        return []
    return [pair_case(f"pairs/{n:03}", n) for n in range(len(ROWS))]


def pair_case(id: str, number: int) -> RunCase:
    def claimed(claims: Capabilities) -> str | None:
        case = fitted_case(number, claims)
        if case is None:
            return f"workers {ROWS[number].workers}"
        if is_repeated(number, claims):
            return "with these claims, an earlier case of pairs is the same problem"
        if max(case.requires["lengths"]) > MOST_TOKENS:
            return f"no ring of at most {MOST_TOKENS} tokens"
        return why_not(claims, case.requires | {"passes": passes_for(case, claims)})

    def needs(claims: Capabilities) -> dict[str, Any]:
        case = fitted_case(number, claims)
        return {} if case is None else case.requires

    def make(claims: Capabilities) -> list[Call]:
        case = fitted_case(number, claims)
        assert case is not None
        return [call_for(case, claims)]

    def judge(claims: Capabilities, calls: Sequence[Call], outputs: Sequence[Outputs]) -> Judgement:
        case = fitted_case(number, claims)
        assert case is not None
        return judged(Seen(claims, (case,), tuple(calls), tuple(outputs)))

    everything = case_of(ROWS[number], id)
    return RunCase(
        id,
        "Two features that work separately can fail together.",
        everything.requires,
        make,
        judge,
        rules=("MASK-9",),
        claimed=claimed,
        narrowed=needs,
    )


def call_for(case: Case, claims: Capabilities) -> Call:
    """Make the call of a case, with the circulation and direction of its row, for all claimed passes."""
    tensors = tensors_of(case)
    return with_claimed_passes(call_of(case, tensors), case, claims, lambda: tensors)


@lru_cache(maxsize=1024)
def fitted_case(number: int, claims: Capabilities) -> Case | None:
    """Make the problem of a row, limited to what a target claims; None if it claims no ring for the row."""
    found = fitted_row(ROWS[number], claims, number)
    return None if found is None else case_of(found, f"pairs/{number:03}", claims)


@lru_cache(maxsize=1024)
def is_repeated(number: int, claims: Capabilities) -> bool:
    """Tell whether an earlier row, fitted to the same claims, gives the same problem."""
    own = fitted_row(ROWS[number], claims, number)
    earlier = (fitted_row(ROWS[n], claims, n) for n in range(number))
    return any(one == own for one in earlier)
