"""Cases that call the target for several rings, but only for rings that it claims to support.

The target is the program under test. A ring is a number of workers and a layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from ringspec.conformance.cases.calls import passes_for
from ringspec.conformance.cases.model import Judgement, Outputs, RunCase
from ringspec.conformance.cases.problems import Seen, call_for, judged, needs_of
from ringspec.conformance.target.capabilities import Capabilities, why_not
from ringspec.conformance.target.protocol import Call
from ringspec.vectors.format.case import Case

MOST_TOKENS = 96  # exact truth of longer problems takes seconds
PER_RING = ("workers", "layout", "tokens_per_worker")


def case_of_rings(
    id: str,
    reason: str,
    rings: Callable[[Capabilities], Sequence[Case]],
    judge_seen: Callable[[Seen], Judgement] = judged,
    *,
    least: int = 1,
    varying: tuple[str, ...] = PER_RING,
    **rest: Any,
) -> RunCase:
    """Make one case from problems in different rings; a target runs those that it claims.

    ``rings(claims)``: the problems, one for each call. ``least``: if the target claims fewer problems than this, it
    does not claim the case. ``varying``: the kinds of requirement in which the problems differ, such as layouts; the
    case itself requires none of these.
    """
    every = rings(Capabilities())
    needs = {key: x for key, x in needs_of(every).items() if key not in varying}

    def why(claims: Capabilities, case: Case) -> str | None:
        return why_not(claims, needs_of([case]) | {"passes": passes_for(case, claims)})

    @lru_cache(maxsize=4)
    def chosen(claims: Capabilities) -> tuple[Case, ...]:
        return tuple(case for case in rings(claims) if why(claims, case) is None)

    def claimed(claims: Capabilities) -> str | None:
        if len(chosen(claims)) >= least:
            return None
        reasons = filter(None, (why(claims, case) for case in rings(claims) or every[:1]))
        first = next(reasons, f"no ring of 3 or more workers with at most {MOST_TOKENS} tokens")
        return first if least == 1 else f"fewer than {least} of its rings are claimed: {first}"

    def make(claims: Capabilities) -> list[Call]:
        return [call_for(claims, case) for case in chosen(claims)]

    def judge(claims: Capabilities, calls: Sequence[Call], outputs: Sequence[Outputs]) -> Judgement:
        return judge_seen(Seen(claims, chosen(claims), tuple(calls), tuple(outputs)))

    def narrowed(claims: Capabilities) -> dict[str, Any]:
        return {key: x for key, x in needs_of(chosen(claims)).items() if key not in varying}

    return RunCase(id, reason, needs, make, judge, claimed=claimed, narrowed=narrowed, **rest)
