"""Count the cases that the NKI kernels claim, and group the others by what they would need.

    python tests/benchmarks/nki_claims.py

prints the two tables of docs/nki/index.md in Markdown. The counts come from the claims of the targets; a case counts
once, under the first requirement that is not claimed.
"""

from __future__ import annotations

import re
from collections import Counter

from nki_impl.target import nki_impl, nki_impl_lnc2, nki_impl_official
from ringspec.conformance.cases.model import RunCase
from ringspec.conformance.cases.profiles import run_cases
from ringspec.conformance.target.capabilities import Capabilities

TARGETS = (nki_impl, nki_impl_lnc2, nki_impl_official)
NEEDS = {
    "inputs float64": "a machine with float64; the engines compute in float32",
    "mask dense|bias": "a tile [rows, keys] of a mask or bias, loaded with each key tile; dbias as a further result",
    "sinks": "one more term in the sum of each row, and a gradient for it",
    "softcap": "tanh of the scores, and its derivative in the backward pass",
    "dropout|keep": "a mask for P that both passes generate or load",
    "dlse": "the gradient of lse, subtracted from dy_o_sum",
    "feature positions": "positions of keys that do not ascend with their tokens: a sort by position in the target",
    "operation (block|merge)": "an entry point for one block or one merge; the functions exist, but only on chip",
    "value_dim": "a head dimension of v and dy of its own",
    "direction|circulation|gather": "a ring in the other direction, or another thing that travels",
    "no other layout|fewer than|padding": "nothing of the kernels: the case compares rings that are not all claimed",
}
"""Regular expressions for reasons, in order, and what a case of that group would need."""


def reasons(claims: Capabilities, cases: list[RunCase]) -> Counter[str]:
    """Count the unclaimed cases by the regular expression in NEEDS that matches their reason."""
    counts: Counter[str] = Counter()
    for case in cases:
        reason = case.why_not(claims)
        if reason is not None:
            counts[next((group for group in NEEDS if re.search(group, reason)), reason)] += 1
    return counts


def claimed(claims: Capabilities, cases: list[RunCase]) -> int:
    """Count the claimed cases."""
    return sum(case.why_not(claims) is None for case in cases)


def tables() -> tuple[str, str]:
    """Return the table of claimed cases, and that of the others."""
    profiles = {name: run_cases(name) for name in ("core", "full")}
    lines = ["| target | profile core | profile full |", "| --- | --- | --- |"]
    for target in TARGETS:
        counts = (f"{claimed(target.capabilities, x)} of {len(x)}" for x in profiles.values())
        lines.append(f"| `{target.name}` | {' | '.join(counts)} |")
    found = {name: reasons(nki_impl.capabilities, x) for name, x in profiles.items()}
    others = ["| core | full | what the cases would need |", "| --- | --- | --- |"]
    for group, _ in found["full"].most_common():
        text = NEEDS.get(group, group)
        others.append(f"| {found['core'][group]} | {found['full'][group]} | {text} |")
    return "\n".join(lines), "\n".join(others)


if __name__ == "__main__":
    print("\n\n".join(tables()))
