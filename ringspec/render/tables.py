"""The tables on the page of a report: features by operation and format, errors by tensor and worker, and all cases."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringspec.render.environment import class_of

Case = Mapping[str, Any]
TENSORS = ("o", "lse", "dq", "dk", "dv", "dsinks", "dbias")
MOST_WORKERS = 64
NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
GROUPS = ("operation", "layout", "circulation", "inputs", "workers")


@dataclass(frozen=True)
class Cell:
    """A table cell: text, CSS classes and tooltip."""

    text: str
    kind: str
    title: str | None = None


@dataclass(frozen=True)
class Matrix:
    """The table that counts cases: a row for each feature, a column for each operation, layout, format or worker count.

    ``groups``: (name, number of columns) of each group of columns. ``columns``: (name, whether a group begins with it).
    ``rows``: (name, cells).
    """

    groups: list[tuple[str, int]]
    columns: list[tuple[str, bool]]
    rows: list[tuple[str, list[Cell]]]


@dataclass(frozen=True)
class ErrorGrid:
    """The table of errors on a ring: a row for each tensor, a column for each worker."""

    workers: int
    rows: list[tuple[str, list[Cell]]]


@dataclass(frozen=True)
class CaseRow:
    """One row of the table of all cases."""

    id: str
    outcome: str
    worst: str
    seconds: str
    reason: Any


@dataclass(frozen=True)
class CaseGroup:
    """The cases whose ids have the same first part; ``counts`` says how many cases have each outcome."""

    name: str
    counts: str
    rows: list[CaseRow]


def matrix(cases: Sequence[Case]) -> Matrix:
    """Count the cases of a report in a table of features (rows) by operation, layout, format and workers (columns).

    A cell counts the cases that belong to both its row and its column. Cases that were not claimed or not run are
    counted separately.
    """
    cells: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    columns: dict[str, set[str]] = {group: set() for group in GROUPS}
    rows: Counter[str] = Counter()
    for case in cases:
        uses = rows_of(case)
        rows.update(uses)
        for group in GROUPS:
            for value in columns_of(case, group):
                columns[group].add(value)
                for use in uses:
                    cells[use, group, value][class_of(case["outcome"])] += 1
    order = [
        (group, value, n == 0)
        for group in GROUPS
        for n, value in enumerate(sorted(columns[group], key=natural))
    ]
    return Matrix(
        [(group, len(columns[group])) for group in GROUPS if columns[group]],
        [(value, first) for _, value, first in order],
        [
            (
                use,
                [
                    matrix_cell(cells[use, group, value], use, group, value, first)
                    for group, value, first in order
                ],
            )
            for use in sorted(rows, key=lambda use: (use != "plain", use))
        ],
    )


def rows_of(case: Case) -> list[str]:
    needs = case.get("needs") or {}
    uses = [*listed(needs.get("masks")), *listed(needs.get("features"))]
    return [str(use) for use in uses] or ["plain"]


def columns_of(case: Case, group: str) -> list[str]:
    needs = case.get("needs") or {}
    if group == "operation":
        passes = listed(needs.get("passes"))
        return [f"{needs.get('operation', 'unknown')} {one}" for one in passes] or ["unknown"]
    return [str(needs[group])] if group in needs else []


def listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def natural(value: str) -> tuple[bool, int, str]:
    """Return a sort key that puts numbers, in ascending order, before words."""
    short = value.isascii() and value.isdigit() and len(value) < 10
    return (not short, int(value) if short else 0, value)


def matrix_cell(counts: Counter[str], use: str, group: str, value: str, first: bool) -> Cell:
    good, known, bad, neutral = (counts[name] for name in ("good", "known", "bad", "neutral"))
    also = " first" if first else ""
    if not good + known + bad + neutral:
        return Cell("", f"none{also}")
    words = (
        f"{use}, {group} {value}: {good} passed, {bad} failed, {known} failed as expected, "
        f"{neutral} not claimed or not run"
    )
    if bad + known:
        shown, kind = f"{good}/{good + known + bad}", "bad" if bad else "known"
    elif good:
        shown, kind = str(good), "good"
    else:
        shown, kind = "\u2013", "neutral"
    return Cell(shown, f"{kind}{also}", words)


def number(value: Any) -> float:
    """Return a value from a report as a number; NaN if it is not a number.

    >>> number("Infinity"), number(2), number("x")
    (inf, 2.0, nan)
    """
    if isinstance(value, str):
        return NUMBERS.get(value, math.nan)
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e308 else math.nan


def worst_errors(cases: Sequence[Case]) -> list[tuple[str, ErrorGrid]]:
    """Return a title and a table for each number of workers: the largest errors in all cases, by tensor and worker."""
    rings: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for case in cases:
        workers = workers_of(case)
        if workers is not None:
            rings[workers] += listed(case.get("findings"))
    tables = []
    for workers, findings in sorted(rings.items()):
        if findings:
            title = f"{workers} workers" if workers > 1 else "1 worker"
            shown = workers or 1 + max(number_of(one) for one in findings)
            tables.append(
                (title if workers else "rings of several sizes", error_grid(findings, shown))
            )
    return tables


def workers_of(case: Case) -> int | None:
    """Return the number of workers that a case declares; None if the declared value is not valid.

    Without a declared number, the result is 0 for a ring, because its calls have different sizes, and 1 otherwise.
    """
    needs = case.get("needs") or {}
    workers = needs.get("workers", 0 if needs.get("operation") == "ring" else 1)
    return workers if type(workers) is int and 0 <= workers <= MOST_WORKERS else None


def number_of(finding: Mapping[str, Any]) -> int:
    """Return the worker whose tensor was compared; ``finding`` is the result of the comparison."""
    worker = finding.get("worker", 0)
    return worker if type(worker) is int and 0 <= worker < MOST_WORKERS else 0


def error_grid(findings: Sequence[Mapping[str, Any]], workers: int) -> ErrorGrid:
    """Return the table of tensors by workers; a cell has the largest error in units of its tolerance, or a fault."""
    worst: dict[tuple[str, int], Mapping[str, Any]] = {}
    for finding in findings:
        key = str(finding.get("tensor")), number_of(finding)
        if key not in worst or badness(finding) > badness(worst[key]):
            worst[key] = finding
    names = sorted({name for name, _ in worst}, key=lambda name: (rank(name), name))
    rows = [(name, [error_cell(worst.get((name, n))) for n in range(workers)]) for name in names]
    return ErrorGrid(workers, rows)


def rank(name: str) -> int:
    return TENSORS.index(name) if name in TENSORS else len(TENSORS)


def badness(finding: Mapping[str, Any]) -> tuple[bool, float]:
    error = number(finding.get("error", 0.0))
    return finding.get("kind") != "ok", math.inf if math.isnan(error) else error


def error_cell(finding: Mapping[str, Any] | None) -> Cell:
    if finding is None:
        return Cell("", "none")
    kind, error = str(finding.get("kind")), number(finding.get("error", 0.0))
    if kind == "ok" and error <= 1:
        return Cell(f"{error:.2g}", "good" if error <= 0.5 else "known")
    numeric = kind in ("ok", "beyond bound") and math.isfinite(error)
    return Cell(f"{error:.3g}" if numeric else kind, "bad", kind)


def case_groups(cases: Sequence[Case]) -> list[CaseGroup]:
    """Return all cases, grouped by the first part of their ids, in the order of the report.

    >>> cases = [{"id": "ring/a", "outcome": "pass"}, {"id": "ring/b", "outcome": "not claimed"}]
    >>> [(group.name, group.counts, len(group.rows)) for group in case_groups(cases)]
    [('ring', '1 pass, 1 not claimed', 2)]
    """
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(str(case["id"]).split("/")[0], []).append(case)
    return [
        CaseGroup(name, counts_of(members), [case_row(case) for case in members])
        for name, members in groups.items()
    ]


def counts_of(cases: Sequence[Case]) -> str:
    counted = Counter(case["outcome"] for case in cases)
    return ", ".join(f"{count} {outcome}" for outcome, count in counted.items())


def case_row(case: Case) -> CaseRow:
    return CaseRow(
        id=case["id"],
        outcome=case["outcome"],
        worst=worst_text(case),
        seconds=f"{number(case.get('seconds', 0)):.2f}",
        reason=case.get("reason") or "",
    )


def worst_text(case: Case) -> str:
    found = listed(case.get("findings"))
    if not found:
        return ""
    worst = max(found, key=badness)
    error = number(worst.get("error", 0.0))
    kind = worst.get("kind")
    return f"{error:.3g}" if kind in ("ok", "beyond bound") and math.isfinite(error) else str(kind)


def reasons(cases: Sequence[Case]) -> list[tuple[str, int]]:
    """Return each reason why cases are not claimed, with the number of those cases."""
    counted = Counter(
        case.get("reason") or "no reason given"
        for case in cases
        if case["outcome"] == "not claimed"
    )
    return counted.most_common()
