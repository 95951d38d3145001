"""The text that a run of the conformance suite prints: a heading, the failures, and the result in one line."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ringspec.cli.shared import output
from ringspec.conformance.diagnose.summary import most_likely
from ringspec.conformance.report.limits import limits_of
from ringspec.conformance.report.limits_text import limit_lines
from ringspec.conformance.report.records import FAILURES, Record
from ringspec.conformance.report.report import Report
from ringspec.conformance.report.shared import same_message, shared_dtype_lines, with_shared_dtype
from ringspec.conformance.report.words import record_text, verdict_lines
from ringspec.conformance.target.versions import Installed

MOST_FAILURES, MOST_DETAILED = 20, 100
MOST_LINES = 30
FEW_FINDINGS, ALL_FINDINGS = 2, 24
FEW_EXPLAINED = 2


def show_head(header: dict[str, Any], count: int) -> None:
    """Print the target, the profile, and the versions of ringspec, of the specification and of the golden vectors."""
    target, versions, vectors = header["target"], header["versions"], header["vectors"]
    name = target["name"]
    cases = "1 case" if count == 1 else f"{count} cases"
    lines = [
        name if name == target["spec"] else f"{name} ({target['spec']})",
        *(f"note: {note}" for note in target["notes"]),
        f"profile {header['profile']}, {cases}; ringspec {versions['ringspec']}, specification "
        f"{versions['specification']}, vectors {vectors['name']} {vectors['set_version']} "
        f"({vectors['digest'][:12]})",
        *computed_with(header["versions"], header["files"]),
        "",
    ]
    output.show(map(output.printable, lines))


def computed_with(versions: dict[str, str], files: dict[str, str]) -> list[str]:
    """Name the packages with which the target computes, and the file from which each was imported.

    >>> computed_with({"torch": "2.13.0", "numpy": "2.4.6"}, {"torch": "/x/torch/__init__.py"})
    ['computed with torch 2.13.0 (/x/torch/__init__.py)']
    """
    names = [name for name in files if name not in ("numpy", "python")]
    # Shown only if it is not the interpreter that runs this command.
    names += ["python"] if files.get("python", sys.executable) != sys.executable else []
    said = Installed(versions, files)
    return [f"computed with {said.of(name)}" for name in names]


def show_first(readouts: Sequence[Record]) -> None:
    """Print a first diagnosis to stderr as soon as the readout cases are done.

    The results of a readout case tell which pairs of tokens the target computes. The diagnosis is repeated at the end
    of the run.
    """
    found = most_likely(readouts)
    if found and found["explanation"]:
        for line in found["explanation"]["sentences"]:
            click.echo(output.printable(f"so far: {line}"), err=True)


def show_end(report: Report, files: dict[str, Path], details: bool) -> None:
    """Print the end of a run: diagnosis, failures, why cases are not claimed, the result, and the paths of reports.

    ``details``: print every executed case, not only the failures. If the diagnosis explains many failures, only one of
    them is printed as an example.
    """
    found = most_likely(report.records)
    explanation = found and found["explanation"]
    if found and explanation:
        show_diagnosis(found, report, ())
        output.show([""])
    shown = [record for record in report.records if record.outcome in FAILURES]
    if details:
        shown = [record for record in report.records if record.outcome != "not claimed"]
    if explanation:
        shown = with_one_example(shown, explanation["explained"])
    most = MOST_DETAILED if details else MOST_FAILURES
    alike = with_shared_dtype(report.records)
    shared = same_message([record for record in shown if record not in alike])
    repeated = {record.id for record in alike[1:]}.union(*shared.values())
    shown = [record for record in shown if record.id not in repeated]
    for record in shown[:most]:
        show_record(record, report, details)
        if record.id in shared:
            output.show([f"{len(shared[record.id])} more cases fail with this message", ""])
    if len(shown) > most:
        output.show([f"and {len(shown) - most} more; --html or --report lists them all", ""])
    if alike:
        lines = shared_dtype_lines(alike, report.header["capabilities"].get("recipe"))
        output.show([*map(output.printable, lines), ""])
    show_unclaimed(report)
    if found and not explanation:
        show_diagnosis(found, report, shown[:most])
    assert report.footer is not None
    show_changed(report.header, report.footer)
    show_coverage(report.footer.get("coverage", {}))
    output.show(limit_lines(limits_of(report.records)))
    output.echo([report.footer["headline"]])  # one line, which programs read
    output.echo(output.printable(f"{name}: {path}") for name, path in sorted(files.items()))


def with_one_example(records: Sequence[Record], explained: Sequence[str]) -> list[Record]:
    """Return the records without those that ``explained`` lists, of which only one is kept; print the listed ids.

    If ``explained`` lists only a few ids, return all records and print nothing.
    """
    if len(explained) <= FEW_EXPLAINED:
        return list(records)
    output.show([f"failures that it explains: {', '.join(explained)}", ""])
    rings = [id for id in explained if id.startswith("ring/")]
    example = next((id for id in rings or explained if not id.startswith("readout/")), explained[0])
    return [record for record in records if record.id == example or record.id not in explained]


def show_changed(header: dict[str, Any], footer: dict[str, Any]) -> None:
    """Print which packages the calls used in another version, or from another file, than the report's header states."""
    first = Installed(header["versions"], header["files"])
    last = first.merged(Installed(footer.get("versions", {}), footer.get("files", {})))
    names = [*footer.get("versions", {}), *footer.get("files", {})]
    output.show(
        output.printable(f"the calls used {last.of(name)} instead of {first.of(name)}")
        for name in dict.fromkeys(names)
    )


def show_record(record: Record, report: Report, details: bool) -> None:
    lines = output.printable(
        record_text(record, ALL_FINDINGS if details else FEW_FINDINGS)
    ).splitlines()
    if len(lines) > MOST_LINES:
        half = MOST_LINES // 2
        lines = [*lines[:half], f"  ... {len(lines) - 2 * half} lines ...", *lines[-half:]]
    if details:
        lines += worst_lines(record)
    output.show(lines)
    if record.outcome in FAILURES:
        words = ["ringspec", "replay", report.header["target"]["spec"], record.id]
        # Random inputs say nothing; a smaller call does.
        words += ["--shrink"] if record.id.startswith("seeded/") else []
        again = (
            [] if report.header["profile"] == "replay" else [f"  repeat it: {shlex.join(words)}"]
        )
        output.echo([*map(output.printable, again), ""])


def worst_lines(record: Record) -> list[str]:
    """Return a line with the largest error, over all workers, of each tensor that passes."""
    worst: dict[str, float] = {}
    for one in record.findings:
        if one.kind == "ok":
            worst[one.tensor] = max(one.error, worst.get(one.tensor, 0.0))
    if not worst:
        return []
    figures = ", ".join(f"{name} {error:.2g}" for name, error in worst.items())
    return [f"  largest error in units of the bound: {figures}; {record.seconds:.2f} s"]


def show_diagnosis(found: dict[str, Any], report: Report, shown: Sequence[Record]) -> None:
    """Print the diagnosis of the run, unless one of the ``shown`` records already states it."""
    repeated = found["id"] is not None and found["of"] == 1
    if repeated and any((record.diagnosis or {}).get("id") == found["id"] for record in shown):
        return
    output.show(map(output.printable, verdict_lines(found, report.header["target"]["spec"])))


def show_coverage(coverage: dict[str, Any]) -> None:
    """Print which claims of the target were not tested, and how to test them."""
    lines = [coverage.get("untested_line", ""), *coverage.get("hints", ())]
    output.show(output.printable(line) for line in lines if line)


def show_unclaimed(report: Report) -> None:
    """Print why cases are not claimed, the most frequent reasons first."""
    reasons = Counter(record.reason for record in report.records if record.outcome == "not claimed")
    if reasons:
        listed = [f"{reason} ({count})" for reason, count in reasons.most_common(8)]
        other = len(reasons) - 8
        more = f"; {other} other reason{'' if other == 1 else 's'}" if other > 0 else ""
        output.show([output.printable(f"not claimed: {'; '.join(listed)}{more}")])
