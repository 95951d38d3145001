"""Compare two reports case by case: what is worse, what is repaired, and what else changed.

A case is worse if it passed in the old report and, in the new one, fails, is no longer claimed or did not run. Errors
are compared in units of their bound.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ringspec.conformance.diagnose.summary import most_likely
from ringspec.conformance.report.records import FAILURES, Record
from ringspec.conformance.report.report import Report, headline
from ringspec.errors import OptionError, shown

FACTOR = 2.0
FLOOR = 0.01  # in units of the bound; below it, errors are not compared
Pair = tuple[Record, Record]
Change = tuple[Any, Any]


@dataclass(frozen=True)
class CaseChange:
    """A case that is in both reports: its outcomes, the tensors that are wrong, and the known bug that is named.

    ``reason``: why the case is not claimed, or why its failure is expected, in the new report.
    """

    id: str
    outcome: tuple[str, str]
    wrong: tuple[tuple[str, ...], tuple[str, ...]]
    diagnosis: tuple[str | None, str | None]
    reason: str = ""


@dataclass(frozen=True)
class FigureChange:
    """The worst errors of one tensor of a case over all workers, in units of the bound: old, new, and new / old."""

    id: str
    tensor: str
    error: tuple[float, float]
    ratio: float


@dataclass(frozen=True)
class Diff:
    """What changed from one report to another.

    ``sides``: for each report its target, profile, start, versions and headline. ``versions``, ``claims`` and ``vectors``: what
    differs between the headers, as (old, new) by name; None where one report lacks it. ``worse``, ``repaired`` and
    ``changed`` (neither of the two): cases with another outcome. ``failing``: cases that fail in both reports, in other
    tensors or with another diagnosis. ``only``: ids and outcomes of cases that one report lacks. ``explanation`` and
    ``diagnosis``: the sentences and the known bug in the verdict of each run. ``figures``: errors that changed by more
    than ``factor``, of cases with the same outcome in both; ``compared``: how many were compared. ``worst``: for each
    tensor, the largest error among the cases that pass in both reports. ``same``: number of cases with the same outcome
    that are not listed in ``failing``.
    """

    sides: tuple[dict[str, Any], dict[str, Any]]
    versions: dict[str, Change]
    claims: dict[str, Change]
    vectors: dict[str, Change]
    worse: tuple[CaseChange, ...]
    repaired: tuple[CaseChange, ...]
    changed: tuple[CaseChange, ...]
    failing: tuple[CaseChange, ...]
    only: tuple[dict[str, str], dict[str, str]]
    explanation: tuple[tuple[str, ...], tuple[str, ...]]
    diagnosis: tuple[str | None, str | None]
    factor: float
    compared: int
    figures: tuple[FigureChange, ...]
    worst: dict[str, tuple[float, float]]
    same: int

    @property
    def headline(self) -> str:
        """Summarise the comparison in one line."""
        counts = {
            "worse": self.worse, "repaired": self.repaired, "otherwise changed": (*self.changed, *self.failing),
            "only in OLD": self.only[0], "only in NEW": self.only[1],
        }  # fmt: skip
        return (
            f"{', '.join(f'{len(x)} {name}' for name, x in counts.items())}; {self.same} the same"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**dataclasses.asdict(self), "headline": self.headline}


def compare(old: Report, new: Report, factor: float = FACTOR) -> Diff:
    """Compare two reports.

    ``factor``: > 1; an error that grows or shrinks by more than this factor is listed. Errors below 1 % of the bound
    count as 1 %. Raises :class:`~ringspec.errors.OptionError` for another ``factor``, and if no case is in both reports.

    >>> header = {"target": {"name": "t", "spec": "t.py:t"}, "versions": {}, "capabilities": {}, "vectors": {},
    ...           "profile": "core", "started": ""}
    >>> old = Report(header, (Record("a", "pass"), Record("b", "mismatch")), None)
    >>> new = Report(header, (Record("a", "crash"), Record("b", "pass")), None)
    >>> compare(old, new).headline
    '1 worse, 1 repaired, 0 otherwise changed, 0 only in OLD, 0 only in NEW; 0 the same'
    """
    if not 1 < factor < math.inf:
        raise OptionError("a factor larger than 1", shown(factor), "pass a number such as 2")
    before, after = ({one.id: one for one in report.records} for report in (old, new))
    pairs = [(before[id], after[id]) for id in before if id in after]
    if not pairs:
        raise OptionError(
            "two reports with cases in common",
            f"{len(before)} cases in OLD and {len(after)} in NEW, none of them in both",
            "compare reports of the same profile",
        )
    figures = figures_of(pairs)
    worse, repaired, others, failing = (
        listed(pairs, kind) for kind in (is_worse, is_repaired, is_changed, fails_else)
    )
    first, second = verdict(old), verdict(new)
    outside = [one for one in figures if beyond(one.ratio, factor)]
    return Diff(
        sides=(side(old), side(new)),
        versions=changed(versions(old), versions(new)),
        claims=changed(old.header["capabilities"], new.header["capabilities"]),
        vectors=changed(old.header["vectors"], new.header["vectors"]),
        worse=worse,
        repaired=repaired,
        changed=others,
        failing=failing,
        only=(missing(before, after), missing(after, before)),
        explanation=(first[0], second[0]),
        diagnosis=(first[1], second[1]),
        factor=factor,
        compared=len(figures),
        figures=tuple(sorted(outside, key=lambda one: -one.ratio)),
        worst=worst_of(pairs),
        same=len(pairs) - len(worse) - len(repaired) - len(others) - len(failing),
    )


def side(report: Report) -> dict[str, Any]:
    """Describe one report; a report without a footer counts its cases."""
    header, target = report.header, report.header["target"]
    counts = Counter(record.outcome for record in report.records)
    return {
        "name": target["name"],
        "spec": target["spec"],
        "profile": header["profile"],
        "started": header["started"],
        "complete": report.complete,
        "versions": versions(report),
        "headline": headline(counts) if report.footer is None else report.footer["headline"],
    }


def versions(report: Report) -> dict[str, str]:
    """Return the versions of packages; those that the calls used replace those of the header."""
    return {**report.header["versions"], **(report.footer or {}).get("versions", {})}


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Change]:
    """Return the entries that differ, as (old, new); None for a missing entry.

    >>> changed({"torch": "2.12", "numpy": "2.4"}, {"torch": "2.13", "numpy": "2.4", "jax": "0.10"})
    {'torch': ('2.12', '2.13'), 'jax': (None, '0.10')}
    """
    names = [*old, *(name for name in new if name not in old)]
    both = {name: (old.get(name), new.get(name)) for name in names}
    return {name: (was, now) for name, (was, now) in both.items() if was != now}


def missing(of: Mapping[str, Record], other: Mapping[str, Record]) -> dict[str, str]:
    return {id: record.outcome for id, record in of.items() if id not in other}


def state(record: Record) -> str:
    """Return 'passed', 'failed', 'not claimed' or 'not run'.

    >>> state(Record("a", "unexpected pass")), state(Record("a", "expected failure")), state(Record("a", "crash"))
    ('passed', 'failed', 'failed')
    """
    if record.outcome in ("pass", "unexpected pass"):
        return "passed"
    failed = record.outcome == "expected failure" or record.outcome in FAILURES
    return "failed" if failed else record.outcome


def is_worse(old: Record, new: Record) -> bool:
    return state(old) == "passed" and state(new) != "passed"


def is_repaired(old: Record, new: Record) -> bool:
    return state(old) == "failed" and state(new) == "passed"


def is_changed(old: Record, new: Record) -> bool:
    """Tell whether the outcome changed, but is neither worse nor repaired."""
    return old.outcome != new.outcome and not is_worse(old, new) and not is_repaired(old, new)


def fails_else(old: Record, new: Record) -> bool:
    """Tell whether a case fails with the same outcome in both reports, but not in the same way."""
    if old.outcome != new.outcome or state(old) != "failed":
        return False
    return wrong(old) != wrong(new) or named(old) != named(new)


def listed(pairs: Iterable[Pair], kind: Callable[[Record, Record], bool]) -> tuple[CaseChange, ...]:
    """Describe the cases for which ``kind`` is True."""
    return tuple(
        CaseChange(
            new.id,
            (old.outcome, new.outcome),
            (wrong(old), wrong(new)),
            (named(old), named(new)),
            new.reason,
        )
        for old, new in pairs
        if kind(old, new)
    )


def wrong(record: Record) -> tuple[str, ...]:
    """Return the names of wrong tensors, each once."""
    return tuple(dict.fromkeys(one.tensor for one in record.findings if not one.ok))


def named(record: Record) -> str | None:
    """Return the id of the known bug in the diagnosis of a case."""
    id: str | None = (record.diagnosis or {}).get("id")
    return id


def verdict(report: Report) -> tuple[tuple[str, ...], str | None]:
    """Return the sentences that explain the failures of a run, and the known bug that its verdict names."""
    found = most_likely(report.records) or {"explanation": None, "id": None}
    return tuple((found["explanation"] or {}).get("sentences", ())), found["id"]


def errors_of(record: Record) -> dict[str, float]:
    """Return the worst error of each tensor over all workers; NaN counts as infinite."""
    worst: dict[str, float] = {}
    for one in record.findings:
        error = math.inf if math.isnan(one.error) else one.error
        worst[one.tensor] = max(error, worst.get(one.tensor, 0.0))
    return worst


def figures_of(pairs: Iterable[Pair]) -> list[FigureChange]:
    """Compare the errors of each tensor of each case that passes, or fails, in both reports."""
    found = []
    for old, new in pairs:
        if state(old) == state(new):
            before, after = errors_of(old), errors_of(new)
            found += [
                FigureChange(new.id, name, (was, after[name]), ratio(was, after[name]))
                for name, was in before.items()
                if name in after
            ]
    return found


def worst_of(pairs: Iterable[Pair]) -> dict[str, tuple[float, float]]:
    """Return the largest error of each tensor among the cases that pass in both reports."""
    worst: dict[str, tuple[float, float]] = {}
    for old, new in pairs:
        if state(old) == state(new) == "passed":
            before, after = errors_of(old), errors_of(new)
            for name in before.keys() & after.keys():
                was, now = worst.get(name, (0.0, 0.0))
                worst[name] = max(was, before[name]), max(now, after[name])
    return dict(sorted(worst.items()))


def ratio(old: float, new: float) -> float:
    """Return new / old, where errors below :data:`FLOOR` count as :data:`FLOOR`.

    >>> ratio(0.02, 0.06), ratio(0.0, 0.009), ratio(math.inf, math.inf)
    (3.0, 1.0, 1.0)
    """
    was, now = max(old, FLOOR), max(new, FLOOR)
    return 1.0 if was == now else now / was


def beyond(ratio: float, factor: float) -> bool:
    """Tell whether a ratio is larger than ``factor``, or smaller than 1 / ``factor``."""
    return ratio > factor or ratio < 1 / factor
