"""Cases of the operation 'context_parallel': every way to split attention over ranks.

They are only added for a target (the program under test) that claims a scheme. :mod:`.splits` makes the problems and
:mod:`.scheme_list` lists them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ringspec.compare.explain import explain_all
from ringspec.conformance.cases.model import Judgement, Outputs, RunCase
from ringspec.conformance.cases.scheme_list import SPLITS
from ringspec.conformance.cases.splits import Split, call_of, expected_of, needs_of
from ringspec.conformance.judge.bounds import bounds_of, findings_of
from ringspec.conformance.report.records import Finding
from ringspec.conformance.target.capabilities import Capabilities, why_not
from ringspec.conformance.target.protocol import Call
from ringspec.formats import load

RULES = ("CP-1", "CP-2", "CP-3", "CP-4")


def cases(profile: str = "core") -> list[RunCase]:
    """Return all cases of a profile, those of published bugs first; 'smoke' has a few."""
    return [case_of(split) for split in SPLITS if split.smoke or profile != "smoke"]


@lru_cache(maxsize=256)
def case_of(split: Split) -> RunCase:
    """Make one case; its number format and width are those that a target claims."""

    def make(claims: Capabilities) -> list[Call]:
        return [call_of(split, claims)]

    def judge(claims: Capabilities, calls: Sequence[Call], outputs: Sequence[Outputs]) -> Judgement:
        [call], [output] = calls, outputs
        expected = expected_of(split, claims, call)
        findings = findings_of(bounds_of(claims, call, expected), expected, output, claims)
        wrong = [one for one in findings if not one.ok]
        if not wrong:
            return Judgement(True, findings)
        return Judgement(False, findings, message_of(split, call, findings, output, claims))

    def claimed(claims: Capabilities) -> str | None:
        bare = {"operation": "context_parallel", "passes": ("forward",), "scheme": split.scheme}
        return why_not(claims, bare) or why_not(claims, needs_of(split, claims))

    needs = {
        "operation": "context_parallel", "passes": ("forward",), "scheme": split.scheme,
        "workers": split.workers,
    }  # fmt: skip
    return RunCase(
        split.id, split.reason, needs, make, judge,
        rules=RULES, claimed=claimed, narrowed=lambda claims: needs_of(split, claims),
    )  # fmt: skip


def message_of(
    split: Split, call: Call, findings: Sequence[Finding], output: Outputs, claims: Capabilities
) -> str:
    """Say what is wrong; where the values tell the keys apart, also which weights a row has."""
    text = explain_all(findings)
    rows = [one for one in findings if one.tensor == "o" and not one.ok and one.where]
    if not split.telling or not rows:
        return text
    first = rows[0]
    assert first.where is not None and call.index_q is not None and call.heads_q is not None
    batch, head, slot = first.where[:3]
    want = load(expected_of(split, claims, call)["o"].values[first.worker])[batch, head, slot]
    got = load(output["o"][first.worker])[batch, head, slot]
    token, number = call.index_q[first.worker][slot], call.heads_q[first.worker][head]
    group = split.sizes["H"] // split.sizes["Hkv"]
    return f"{text}\nquery {token}, head {number} of rank {first.worker}: {weights(want, got, number // group)}"


def weights(want: np.ndarray, got: np.ndarray, key_head: int) -> str:
    """List the weights of the keys that are most wrong."""
    error = np.where(np.isfinite(got), np.abs(got - want), np.inf)
    worst = [int(j) for j in np.argsort(-error, kind="stable") if error[j] > 0.1 * error.max()]
    unit = 1 + key_head
    shown = [f"{got[j] / unit:.3g} of key {j}, expected {want[j] / unit:.3g}" for j in worst[:4]]
    more = f"; and {len(worst) - 4} more" if len(worst) > 4 else ""
    return "read from o, weight " + ", ".join(shown) + more
