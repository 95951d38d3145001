"""The text of ``ringspec diff``: what changed from one report to another."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ringspec.cli.shared import output
from ringspec.conformance.report.diff import CaseChange, Change, Diff, FigureChange, beyond, ratio

MOST = 20  # lines of one list
LONGEST = 60  # characters of the value of a claim


def lines(found: Diff) -> list[str]:
    """Describe a comparison; lists are cut to 20 lines, and control characters are replaced."""
    return [
        output.printable(line)
        for line in [*head(found), *cases(found), *verdicts(found), *figures(found)]
    ]


def head(found: Diff) -> Iterator[str]:
    """Describe both reports, and what differs in their headers."""
    for name, side in zip(("OLD", "NEW"), found.sides, strict=True):
        yield f"{name}: {side['name']} ({side['spec']}), profile {side['profile']}, {side['started']}"
        yield f"  {side['headline']}" + ("" if side["complete"] else "; the run was interrupted")
    shared = found.sides[1]["versions"].items()
    same = ", ".join(f"{name} {x}" for name, x in shared if name not in found.versions)
    yield from ([f"in both: {same}"] if same else [])
    for what, entries in (
        ("versions", found.versions),
        ("claims", found.claims),
        ("golden vectors", found.vectors),
    ):
        if entries:
            yield f"{what}: {'; '.join(f'{name} {arrow(pair)}' for name, pair in entries.items())}"
    yield ""


def arrow(pair: Change) -> str:
    """Format an old and a new value.

    >>> arrow(("2.12", "2.13")), arrow((None, ["kv"]))
    ('2.12 -> 2.13', 'none -> ["kv"]')
    """
    return " -> ".join(map(value, pair))


def value(x: Any) -> str:
    text = "none" if x is None else x if isinstance(x, str) else json.dumps(x)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 4]} ..."


def cases(found: Diff) -> Iterator[str]:
    """List the cases that changed, and those that only one report has."""
    for title, changes in (
        ("worse", found.worse),
        ("repaired", found.repaired),
        ("other outcome, neither worse nor repaired", found.changed),
        ("fails in both, but not in the same way", found.failing),
    ):
        yield from section(f"{title}: {count(changes, 'case')}", list(map(change, changes)))
    for name, ids in zip(("OLD", "NEW"), found.only, strict=True):
        outcomes = Counter(ids.values())
        said = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.most_common())
        yield from section(f"only in {name}: {count(ids, 'case')} ({said})", list(ids))


def section(title: str, entries: Sequence[str]) -> Iterator[str]:
    """Return a title and its entries, at most :data:`MOST`; nothing without entries."""
    if entries:
        yield title
        yield from (f"  {entry}" for entry in entries[:MOST])
        if len(entries) > MOST:
            yield f"  and {len(entries) - MOST} more; --json lists all"
        yield ""


def count(entries: Sequence[Any] | Mapping[str, Any], noun: str) -> str:
    return f"{len(entries)} {noun}" + ("" if len(entries) == 1 else "s")


def change(one: CaseChange) -> str:
    """Describe the change of a case in one line.

    >>> change(CaseChange("ring/a", ("pass", "mismatch"), ((), ("dk", "dv")), (None, "dkv-not-home")))
    'ring/a: pass -> mismatch; wrong: dk, dv; diagnosis: dkv-not-home'
    """
    old, new = one.outcome
    parts = [f"{one.id}: {old}" if old == new else f"{one.id}: {old} -> {new}"]
    wrong = [", ".join(names) or "nothing" for names in one.wrong]
    if any(one.wrong):
        parts.append(f"wrong: {step(wrong, 'nothing')}")
    if any(one.diagnosis):
        parts.append(f"diagnosis: {step([id or 'none' for id in one.diagnosis], 'none')}")
    return "; ".join([*parts, *([one.reason] if one.reason else [])])


def step(pair: Sequence[str], empty: str) -> str:
    """Format two texts as 'old -> new'; only the other text if one is empty or both are equal."""
    shown = [text for text in dict.fromkeys(pair) if text != empty]
    return " -> ".join(shown) if len(shown) == 1 or empty not in pair else " -> ".join(pair)


def verdicts(found: Diff) -> Iterator[str]:
    """Print the explanations and the named bugs of both runs, if they differ."""
    for what, pair in (
        ("explanation", tuple(" ".join(sentences) for sentences in found.explanation)),
        ("diagnosis of the run", tuple(id or "" for id in found.diagnosis)),
    ):
        if pair[0] != pair[1]:
            yield from section(
                what, [f"{name}: {text or 'none'}" for name, text in zip(("OLD", "NEW"), pair, strict=True)]
            )  # fmt: skip


def figures(found: Diff) -> Iterator[str]:
    """List the errors that changed by more than the factor, the largest increase first."""
    grown = [one for one in found.figures if one.ratio > 1]
    for what, some in (("larger", grown), ("smaller", [x for x in found.figures if x.ratio < 1])):
        title = f"worst error {what} by more than {found.factor:g} times, in units of the bound"
        shown = some if what == "larger" else some[::-1]
        yield from section(f"{title}: {len(some)} of {found.compared}", list(map(figure, shown)))
    entries = [
        f"{name} {was:.2g} -> {now:.2g}" + ("  *" if beyond(ratio(was, now), found.factor) else "")
        for name, (was, now) in found.worst.items()
    ]
    if any(entry.endswith("*") for entry in entries):
        yield from section("largest error of the cases that pass in both", entries)


def figure(one: FigureChange) -> str:
    """Describe one changed error.

    >>> figure(FigureChange("ring/a", "dq", (0.02, 0.5), 25.0))
    'ring/a: dq 0.02 -> 0.5 (25 times)'
    """
    times = one.ratio if one.ratio > 1 else 1 / one.ratio if one.ratio else math.inf
    said = f"{times:.3g} times" if math.isfinite(times) else "infinitely many times"
    was, now = one.error
    return f"{one.id}: {one.tensor} {was:.2g} -> {now:.2g} ({said}{'' if one.ratio > 1 else ' smaller'})"
