"""The text of a run: its head, each failure with the command that repeats it, the headline."""

from __future__ import annotations

import re
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import click

from ringspec.cli.shared import output
from ringspec.conformance.diagnose.summary import most_likely
from ringspec.conformance.report.records import FAILURES, Record
from ringspec.conformance.report.report import Report
from ringspec.conformance.report.words import folded, record_text, verdict_lines
from ringspec.conformance.target.versions import Installed

MOST_FAILURES, MOST_DETAILED = 20, 100
MOST_LINES = 30
FEW_FINDINGS, ALL_FINDINGS = 2, 24
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    r"""ASCII, and nothing that a terminal would obey.

    >>> plain("a\x1b[2Jb\u00e9")
    'a\\x1b[2Jb\\xe9'
    """
    visible = CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
    return visible.encode("ascii", "backslashreplace").decode("ascii")


def show_head(header: dict[str, Any], count: int) -> None:
    """The target, and what it is held against."""
    target, versions, vectors = header["target"], header["versions"], header["vectors"]
    name = target["name"]
    click.echo(plain(name if name == target["spec"] else f"{name} ({target['spec']})"))
    for note in target["notes"]:
        click.echo(plain(f"note: {note}"))
    cases = "1 case" if count == 1 else f"{count} cases"
    click.echo(
        f"profile {header['profile']}, {cases}; ringspec {versions['ringspec']}, specification "
        f"{versions['specification']}, vectors {vectors['name']} {vectors['set_version']} "
        f"({vectors['digest'][:12]})"
    )
    for line in computed_with(header["versions"], header["files"]):
        click.echo(plain(line))
    click.echo()


def computed_with(versions: dict[str, str], files: dict[str, str]) -> list[str]:
    """The packages that compute, each with the file that it was imported from.

    >>> computed_with({"torch": "2.13.0", "numpy": "2.4.6"}, {"torch": "/x/torch/__init__.py"})
    ['computed with torch 2.13.0 (/x/torch/__init__.py)']
    """
    names = [name for name in files if name not in ("numpy", "python")]
    # Said where it is not the one that the reader started.
    names += ["python"] if files.get("python", sys.executable) != sys.executable else []
    said = Installed(versions, files)
    return [f"computed with {said.of(name)}" for name in names]


def show_end(report: Report, files: dict[str, Path], details: bool) -> None:
    """Failures, what is not claimed, the headline, and where the reports lie.

    With ``details`` every executed case is told.
    """
    told = [record for record in report.records if record.outcome in FAILURES]
    if details:
        told = [record for record in report.records if record.outcome != "not claimed"]
    most = MOST_DETAILED if details else MOST_FAILURES
    for record in told[:most]:
        show_record(record, report, details)
    if len(told) > most:
        click.echo(f"and {len(told) - most} more, which a report lists (--html, --report)\n")
    show_unclaimed(report)
    show_diagnosis(report)
    assert report.footer is not None
    show_changed(report.header, report.footer)
    show_coverage(report.footer.get("coverage", {}))
    click.echo(report.footer["headline"])
    for name, path in sorted(files.items()):
        click.echo(plain(f"{name}: {path}"))


def show_changed(header: dict[str, Any], footer: dict[str, Any]) -> None:
    """Packages that the calls imported from elsewhere than the head of the report says."""
    first = Installed(header["versions"], header["files"])
    last = first.merged(Installed(footer.get("versions", {}), footer.get("files", {})))
    names = [*footer.get("versions", {}), *footer.get("files", {})]
    for name in dict.fromkeys(names):
        click.echo(plain(f"the calls computed with {last.of(name)}, and not {first.of(name)}"))


def show_record(record: Record, report: Report, details: bool) -> None:
    lines = plain(record_text(record, ALL_FINDINGS if details else FEW_FINDINGS)).splitlines()
    if len(lines) > MOST_LINES:
        half = MOST_LINES // 2
        lines = [*lines[:half], f"  ... {len(lines) - 2 * half} lines ...", *lines[-half:]]
    if details:
        lines += worst_lines(record)
    click.echo("\n".join(folded(lines, output.width())))
    if record.outcome in FAILURES:
        if report.header["profile"] != "replay":
            words = ("ringspec", "replay", report.header["target"]["spec"], record.id)
            click.echo(plain(f"  repeat it: {shlex.join(words)}"))
        click.echo()


def worst_lines(record: Record) -> list[str]:
    """The largest error of each tensor that passes, over all workers."""
    worst: dict[str, float] = {}
    for one in record.findings:
        if one.kind == "ok":
            worst[one.tensor] = max(one.error, worst.get(one.tensor, 0.0))
    if not worst:
        return []
    figures = ", ".join(f"{name} {error:.2g}" for name, error in worst.items())
    return [f"  largest error in units of the bound: {figures}; {record.seconds:.2f} s"]


def show_diagnosis(report: Report) -> None:
    """What the failures that were diagnosed say together."""
    found = most_likely(report.records)
    if found is None:
        return
    text = [plain(line) for line in verdict_lines(found)]
    click.echo("\n".join(folded(text, output.width())))


def show_coverage(coverage: dict[str, Any]) -> None:
    """What is claimed and was not tested, and how to have it tested."""
    lines = [coverage.get("untested_line", ""), *coverage.get("hints", ())]
    for line in filter(None, lines):
        click.echo("\n".join(folded([plain(line)], output.width())))


def show_unclaimed(report: Report) -> None:
    """Why cases are not claimed, the commonest reasons first."""
    reasons = Counter(record.reason for record in report.records if record.outcome == "not claimed")
    if reasons:
        listed = [f"{count} {reason}" for reason, count in reasons.most_common(8)]
        more = f"; {len(reasons) - 8} other reasons" if len(reasons) > 8 else ""
        text = plain(f"not claimed: {'; '.join(listed)}{more}")
        click.echo("\n".join(folded([text], output.width())))
