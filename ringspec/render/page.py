"""One self-contained HTML page from the lines of a conformance report.

The page refers to no other file and loads nothing. The content security policy of the page forbids loading and allows
only the page's own script and style, by their hashes. All text of the report is escaped.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringspec.render.environment import asset, class_of, filled_in
from ringspec.render.failures import failure
from ringspec.render.picture import Picture, picture
from ringspec.render.tables import case_groups, listed, matrix, reasons, worst_errors

MOST_FAILURES = 500
MOST_UNFOLDED = 50  # cases; more are folded by the first part of their ids


@dataclass(frozen=True)
class Headline:
    """The result of the whole run. ``incomplete``: why the run did not finish; None if it finished."""

    words: Any
    colour: str
    incomplete: str | None


@dataclass(frozen=True)
class Limits:
    """The table of the smallest errors that the run detects."""

    heading: Any
    heads: list[Any]
    rows: list[list[Any]]
    notes: list[Any]


def page(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of a report, whose ``lines`` are records, such as the header and one record for each case.

    >>> header = {"kind": "header", "target": {"name": "<mine>"}, "profile": "core"}
    >>> cases = [{"kind": "case", "id": "ring/one", "outcome": "pass"}]
    >>> text = page([header, *cases])
    >>> "&lt;mine&gt;" in text, "<mine>" in text, "Incomplete" in text
    (True, False, True)
    """
    header = next((line for line in lines if line.get("kind") == "header"), {})
    footer = next((line for line in lines if line.get("kind") == "footer"), None)
    verdict = next((line for line in lines if line.get("kind") == "verdict"), {})
    cases = [line for line in lines if line.get("kind") == "case"]
    failed = [case for case in cases if class_of(case["outcome"]) == "bad"]
    counts = Counter(case["outcome"] for case in cases)
    target = described(header.get("target"))
    name = target.get("name", "a target")
    coverage = described((footer or {}).get("coverage"))
    return filled_in(
        "page.html",
        asset("page.js"),
        asset("page.css"),
        title=f"{name}: ringspec conformance",
        name=name,
        profile=header.get("profile", ""),
        headline=headline(footer, counts),
        verdict=[str(line).strip() for line in listed(verdict.get("lines"))],
        evidence=evidence(verdict, cases),
        bar=bar(counts),
        counts=counts.most_common(),
        hints=list(coverage.get("hints", ())),
        untested=untested(coverage),
        notes=list(target.get("notes") or ()),
        failed=len(failed),
        failures=[failure(case, header, n < 3) for n, case in enumerate(failed[:MOST_FAILURES])],
        matrix=matrix(cases),
        errors=worst_errors(cases),
        limits=limits(next((line for line in lines if line.get("kind") == "limits"), {})),
        reasons=reasons(cases),
        outcomes=sorted(counts),
        all_cases=len(cases),
        folded=len(cases) > MOST_UNFOLDED,
        groups=case_groups(cases),
        run=run_details(header, footer),
    )


def evidence(verdict: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]) -> Picture | None:
    """Return the picture of the case that the verdict of the run names as evidence; None without such a picture."""
    shown = [case for case in cases if case.get("id") == verdict.get("shown_by")]
    return picture(shown[0].get("picture")) if shown else None


def described(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def headline(footer: Mapping[str, Any] | None, counts: Counter[str]) -> Headline:
    incomplete = None
    if footer is None or footer.get("complete") is not True:
        incomplete = "it has no footer" if footer is None else "cases were not run"
    kinds = {class_of(outcome) for outcome in counts}
    good = "bad" not in kinds and kinds - {"neutral"} and incomplete is None
    so_far = f"{counts['pass']} cases passed so far"
    words = so_far if footer is None else footer.get("headline")
    return Headline(words, "good" if good else "bad", incomplete)


def untested(coverage: Mapping[str, Any]) -> list[str]:
    """Return the values, such as layouts and formats, that the target claims to support but that were not tested."""
    kinds = described(coverage.get("untested"))
    return [
        f"{str(kind).replace('_', ' ')}: {', '.join(map(str, values))}"
        for kind, values in kinds.items()
    ]


def limits(line: Mapping[str, Any]) -> Limits | None:
    """Return the table of the smallest errors that the run detects; None if the report has no such table."""
    rows = [listed(row) for row in listed(line.get("rows"))]
    if len(rows) < 2:
        return None
    return Limits(line.get("heading"), rows[0], rows[1:], listed(line.get("notes")))


def bar(counts: Counter[str]) -> list[tuple[str, str, str]]:
    """Return (CSS class, x, width) of each part of a bar of width 100, which shows how many cases have each outcome."""
    total = sum(counts.values()) or 1
    x, parts = 0.0, []
    for kind in ("good", "known", "bad", "neutral"):
        width = 100 * sum(n for outcome, n in counts.items() if class_of(outcome) == kind) / total
        if width:
            parts.append((kind, f"{x:.3f}", f"{width:.3f}"))
        x += width
    return parts


def run_details(
    header: Mapping[str, Any], footer: Mapping[str, Any] | None
) -> list[tuple[str, str]]:
    """Return (name, text) of all fields of the report's header, and of the versions and files in its footer."""
    rows = []
    later = {f"later {kind}": (footer or {}).get(kind) for kind in ("versions", "files")}
    said = {**header, **{name: value for name, value in later.items() if value}}
    for name, value in said.items():
        if name in ("kind", "format"):
            continue
        entries = value if isinstance(value, Mapping) else {"": value}
        for key, entry in entries.items():
            words = entry if isinstance(entry, str) else json.dumps(entry)
            rows.append((f"{name} {key}".strip(), words))
    return rows
