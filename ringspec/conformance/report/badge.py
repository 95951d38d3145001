"""A badge: the verdict of one report in a few words, as data for shields.io.

A badge claims no more than its report shows. It names the profile only if the report contains every case of the
profile.
"""

from __future__ import annotations

from datetime import date
from typing import Any

from ringspec.conformance.report.lines import refuse
from ringspec.conformance.report.records import FAILURES
from ringspec.conformance.report.report import Report, counts_of

__all__ = ["badge"]

# Versions in the header that are not those of the target.
NOT_THE_TARGET = ("python", "numpy", "ringspec", "specification")
MOST_VERSIONS = 3
LONGEST = 120  # characters of a text on a badge


def badge(report: Report, whole: bool | None = None) -> dict[str, Any]:
    """Return the data of a badge in the format of shields.io's endpoint.

    The result has the keys ``schemaVersion`` (1), ``label``, ``message`` and ``color``. The label names the version of
    ringspec and the profile: 'part of core' if the report lacks cases of the profile, or does not say how many there
    are. The message counts the cases that passed, of those that the target claims, and gives versions of the target and
    the day of the run. It begins with 'incomplete' if the run was interrupted. ``whole``: whether the report has every
    case of the profile, if the caller knows. Raises :class:`~ringspec.errors.FileFormatError` if the header has no date.
    Source: https://shields.io/badges/endpoint-badge.

    >>> from ringspec.conformance.report.records import Record
    >>> header = {"profile": "smoke", "versions": {"ringspec": "0.1.0", "torch": "2.13.0"},
    ...           "cases": {"profile": 2, "chosen": 2}, "started": "2026-11-26T07:15:00+00:00"}
    >>> cases = (Record("ring/a", "pass"), Record("ring/b", "mismatch"))
    >>> badge(Report(header, cases, {"complete": True}))["message"]
    '1 of 2 cases passed, torch 2.13.0, 2026-11-26'
    """
    words, color = verdict(report)
    header = report.header
    part = "" if (is_whole_profile(report) if whole is None else whole) else "part of "
    label = f"ringspec {header['versions'].get('ringspec', '')} {part}{header['profile']}"
    message = ", ".join([words, *versions(report), day_of(report)])
    return {
        "schemaVersion": 1,
        "label": short(" ".join(label.split())),
        "message": short(message),
        "color": color,
    }


def day_of(report: Report) -> str:
    """Return the day on which the run began, as YYYY-MM-DD; raise FileFormatError if the header has no date."""
    said = report.header["started"]
    try:
        return date.fromisoformat(said[:10]).isoformat()
    except ValueError:
        refuse("a date and time as started in the header of a report", said)


def is_whole_profile(report: Report) -> bool:
    """Return whether a report has a record of every case of its profile; False if its header has no count.

    A run with ``--only`` has fewer. Reports of ringspec before 2026-11-26 do not say how many cases the profile has.
    """
    count = report.header.get("cases", {}).get("profile")
    return count is not None and len(report.records) == count


def verdict(report: Report) -> tuple[str, str]:
    """Return what a report shows, in words, and the colour of the badge."""
    counts = counts_of(report.records)
    executed = sum(n for name, n in counts.items() if name not in ("not claimed", "not run"))
    words = f"{counts.get('pass', 0)} of {executed} cases passed"
    known = counts.get("expected failure", 0)
    if known:
        words += f", {known} known failure{'' if known == 1 else 's'}"
    if not report.complete:
        return f"incomplete: {words} so far", "lightgrey"
    if not executed:
        return "no case was executed", "lightgrey"
    if any(name in FAILURES for name in counts):
        return words, "red"
    return words, "yellow" if known else "brightgreen"


def versions(report: Report) -> list[str]:
    """Return up to three versions of the target's packages, such as 'torch 2.13.0'.

    The versions that the calls used replace those of the header.
    """
    known = {**report.header["versions"], **(report.footer or {}).get("versions", {})}
    named = [f"{name} {version}" for name, version in known.items() if name not in NOT_THE_TARGET]
    return named[:MOST_VERSIONS]


def short(text: str) -> str:
    r"""Replace characters that cannot be printed, and shorten the text to the width of a badge.

    >>> short("a\x1b[31m\nb")
    'a [31m b'
    """
    plain = "".join(one if one.isprintable() else " " for one in text)
    return plain if len(plain) <= LONGEST else f"{plain[: LONGEST - 4]} ..."
