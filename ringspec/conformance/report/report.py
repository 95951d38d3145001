"""A report: JSON Lines with a header, one line per case, and a footer.

Each line is a JSON object with a ``kind``. NaN and infinities, which JSON lacks, are the strings "NaN", "Infinity" and
"-Infinity". The footer counts the cases by outcome. Without a footer the report is incomplete: the run ended early, or
the file was cut off.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType
from typing import Any, TextIO

import numpy as np

import ringspec
from ringspec.conformance.diagnose.summary import most_likely
from ringspec.conformance.report.coverage import Coverage
from ringspec.conformance.report.limits import FormatLimits, as_data, limits_of
from ringspec.conformance.report.limits_text import explanation, heading, limit_rows
from ringspec.conformance.report.lines import (
    check_coverage,
    lines_of,
    read_header,
    read_record,
    refuse,
    texts_by_name,
)
from ringspec.conformance.report.records import OUTCOMES, Record
from ringspec.conformance.report.words import verdict_lines
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.provenance import CHANGING, said_by
from ringspec.plainfile import read_plain_file

__all__ = ["Report", "headline", "read_report"]

FORMAT = "ringspec-report-1"
MAX_BYTES = 1 << 28
MAX_CASES = 100_000


@dataclass(frozen=True)
class Report:
    """A report: ``header``, one record for each case, and ``footer`` (None if the file ends early)."""

    header: dict[str, Any]
    records: tuple[Record, ...]
    footer: dict[str, Any] | None

    @property
    def complete(self) -> bool:
        """True if the file has a footer and the run reached its end."""
        return self.footer is not None and self.footer["complete"]


def counts_of(records: Iterable[Record]) -> dict[str, int]:
    """Count the cases of each outcome, in the order of ``OUTCOMES``; outcomes without cases are left out.

    >>> counts_of([Record("a", "pass"), Record("b", "not claimed"), Record("c", "pass")])
    {'pass': 2, 'not claimed': 1}
    """
    return ordered(Counter(record.outcome for record in records))


def ordered(counts: Counter[str]) -> dict[str, int]:
    return {outcome: counts[outcome] for outcome in OUTCOMES if counts[outcome]}


def headline(counts: Mapping[str, int], clauses: Sequence[str] = ()) -> str:
    """Summarise a run in one sentence, from ``counts`` of cases by outcome.

    ``clauses``: what was not tested (:attr:`ringspec.conformance.report.coverage.Coverage.clauses`).

    >>> headline({"pass": 7, "mismatch": 1, "not claimed": 3, "expected failure": 1, "not run": 2})
    'passed 7 of 9 claimed, 3 not claimed; 1 expected failure; 2 not run'
    >>> headline({"not claimed": 3})
    'passed 0 of 0 claimed, 3 not claimed; no case was executed'
    """
    unmatched = ("not claimed", "not run")
    claimed = sum(count for outcome, count in counts.items() if outcome not in unmatched)
    parts = [
        f"passed {counts.get('pass', 0)} of {claimed} claimed, "
        f"{counts.get('not claimed', 0)} not claimed"
    ]
    for outcome, plural in (
        ("expected failure", "expected failures"),
        ("unexpected pass", "unexpected passes"),
        ("not run", "not run"),
    ):
        if count := counts.get(outcome, 0):
            parts.append(f"{count} {outcome if count == 1 else plural}")
    return "; ".join([*parts, *(["no case was executed"] if claimed == 0 else []), *clauses])


def make_header(
    target: Any, *, spec: str, profile: str, vectors: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Make the first line of a report, which describes the target, the golden vectors and the machine.

    ``spec``: the target as the user wrote it on the command line. ``vectors``: name, set_version and digest of the
    golden set. The header's ``versions`` and ``files`` are those of the packages in the process that runs the target
    (:func:`ringspec.conformance.target.provenance.computed_with`).
    """
    claims: Capabilities = target.capabilities
    said = said_by(target, spec)
    return {
        "kind": "header",
        "format": FORMAT,
        "target": {"name": said["name"], "spec": spec, "notes": said["notes"]},
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            **said["versions"],
            "ringspec": ringspec.__version__,
            "specification": ringspec.SPEC_VERSION,
        },
        "files": said["files"],
        "capabilities": plain(claims.as_dict()),
        "machine": {
            "system": platform.system(),
            "processor": platform.machine(),
            "cores": os.cpu_count() or 1,
        },
        "vectors": plain(dict(vectors or {})),
        "profile": profile,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


class ReportWriter:
    """Writes a report line by line, so that the file is readable even if the run ends early.

    >>> import io
    >>> stream = io.StringIO()
    >>> writer = ReportWriter(stream, {"kind": "header"})
    >>> writer(Record("probes/one", "pass"))
    >>> writer.finish(complete=True)["headline"]
    'passed 1 of 1 claimed, 0 not claimed'
    """

    def __init__(self, stream: TextIO, header: Mapping[str, Any]) -> None:
        self.stream = stream
        self.outcomes: Counter[str] = Counter()
        self.line(header)

    def line(self, data: Mapping[str, Any]) -> None:
        self.stream.write(json.dumps(plain(data), ensure_ascii=True, allow_nan=False) + "\n")
        self.stream.flush()

    def __call__(self, record: Record) -> None:
        self.outcomes[record.outcome] += 1
        self.line(case_line(record))

    def finish(
        self,
        complete: bool,
        coverage: Coverage | None = None,
        changed: Mapping[str, Any] | None = None,
        limits: Sequence[FormatLimits] | None = None,
    ) -> dict[str, Any]:
        """Write the footer and return it.

        ``coverage``: the claims that were not tested; None if unknown. ``changed``: versions and files that differ from
        the header (:func:`ringspec.conformance.target.provenance.changed_since`). ``limits``: the smallest errors that
        the cases detect (:func:`ringspec.conformance.report.limits.limits_of`); None leaves them out.
        """
        counts = ordered(self.outcomes)
        known = None if coverage is None else coverage.as_dict()
        footer = footer_of(counts, complete, known, limits) | dict(changed or {})
        self.line(footer)
        return footer


def case_line(record: Record) -> dict[str, Any]:
    """Convert a record to a line of a report."""
    # dataclasses.asdict would copy all values before plain does.
    data: dict[str, Any] = plain(
        {"kind": "case", **vars(record), "findings": [vars(one) for one in record.findings]}
    )
    return data


def footer_of(
    counts: Mapping[str, int],
    complete: bool,
    coverage: Mapping[str, Any] | None = None,
    limits: Sequence[FormatLimits] | None = None,
) -> dict[str, Any]:
    """Make the last line of a report. A run in which some cases did not run counts as incomplete.

    ``coverage``: what the run did not test (:meth:`ringspec.conformance.report.coverage.Coverage.as_dict`). ``limits``:
    the smallest errors that the cases detect. If one of the two is None, it is left out of the line.
    """
    known: dict[str, Any] = {} if coverage is None else {"coverage": dict(coverage)}
    if limits is not None:
        known["limits"] = as_data(limits)
    return {
        "kind": "footer",
        "summary": dict(counts),
        "complete": bool(complete and not counts.get("not run")),
        "headline": headline(counts, (coverage or {}).get("clauses", ())),
        **known,
    }


def plain(value: Any) -> Any:
    """Convert a value to JSON types: tuples and arrays become lists, NumPy scalars become Python numbers.

    >>> plain({"a": (np.float32(0.5), float("nan")), "b": np.array([1, 2])})
    {'a': [0.5, 'NaN'], 'b': [1, 2]}
    """
    if type(value) in (str, int, bool, NoneType):  # most values, so they come first
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def report_lines(report: Report) -> list[dict[str, Any]]:
    """Return all lines of a report as plain data, for :mod:`ringspec.render`.

    Up to two further lines are inserted before the footer. They are computed from the cases, not stored in the file. If
    failures were diagnosed, a line of kind 'verdict' contains the verdict as text (``lines``) and the id of the case
    that shows the explanation (``shown_by``). If the run has limits, which are the smallest errors that it detects, a
    line of kind 'limits' contains their table (``heading``, ``rows`` and ``notes``).
    """
    lines = [plain(report.header), *map(case_line, report.records)]
    found = most_likely(report.records)
    if found is not None:
        words = verdict_lines(found, report.header["target"]["spec"])
        shown_by = (found["explanation"] or {}).get("shown_by")
        lines.append({"kind": "verdict", "lines": words, "shown_by": shown_by})
    limits = limits_of(report.records)
    if limits:
        rows, notes = limit_rows(limits), explanation(limits)
        lines.append({"kind": "limits", "heading": heading(), "rows": rows, "notes": notes})
    return lines if report.footer is None else [*lines, report.footer]


def read_report(path: Path, *, partial: bool = False) -> Report:
    """Read and check the report at ``path``; the file is untrusted.

    ``partial``: accept a file that ends early, even within a line. Raises :class:`~ringspec.errors.FileFormatError`.
    """
    return report_from(read_plain_file(path, MAX_BYTES), str(path), partial=partial)


def report_from(data: bytes, what: str, *, partial: bool = False) -> Report:
    """Parse a report; see :func:`read_report`."""
    lines = lines_of(data, what, partial)
    if not lines or lines[0].get("kind") != "header":
        refuse(f"a header in the first line of {what}", lines[0] if lines else "nothing")
    header = read_header(lines[0], what, FORMAT)
    footer = lines[-1] if len(lines) > 1 and lines[-1].get("kind") == "footer" else None
    cases = lines[1:] if footer is None else lines[1:-1]
    if footer is None and not partial:
        refuse(f"a footer in the last line of {what}", "a report that ends early")
    if len(cases) > MAX_CASES:
        refuse(f"at most {MAX_CASES} cases in {what}", len(cases))
    records = tuple(
        read_record(line, f"line {n} of {what}") for n, line in enumerate(cases, start=2)
    )
    ids = Counter(record.id for record in records)
    if twice := [id for id, count in ids.items() if count > 1]:
        refuse(f"each case once in {what}", twice[0])
    if footer is not None:
        check_footer(footer, records, what)
    return Report(header, records, footer)


def check_footer(footer: dict[str, Any], records: tuple[Record, ...], what: str) -> None:
    """Check that the footer agrees with the cases."""
    complete, coverage = footer.get("complete"), footer.get("coverage")
    if coverage is not None:
        check_coverage(coverage, f"coverage in the footer of {what}")
    limits = limits_of(records) if "limits" in footer else None
    due = footer_of(counts_of(records), complete is True, coverage, limits)
    said = {name: value for name, value in footer.items() if name not in CHANGING}
    for name in footer.keys() & set(CHANGING):
        texts_by_name(footer[name], f"{name} in the footer of {what}")
    if type(complete) is not bool or said != due:
        refuse(f"the footer {json.dumps(due)} after the cases of {what}", footer)
