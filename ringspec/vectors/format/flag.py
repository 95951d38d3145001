"""Flags: the classes of bugs that golden cases detect, with public reports of such bugs.

The status of a report says how well it is confirmed: "fixed" (a fix was merged), "agreed" (the maintainers agreed, but
no merged fix is known), "code" (the bug is in the public source), "reported" (described with an analysis or a
reproduction, but not known to be confirmed), "review" (a comment in a code review).
"""

from __future__ import annotations

from dataclasses import dataclass

STATUSES = ("fixed", "agreed", "code", "reported", "review")
SITE = "https://github.com/"


@dataclass(frozen=True)
class Flag:
    """A flag: its ``name``, the ``bug_class`` in a few words, and the ``effect`` of such bugs in one sentence.

    ``reports``: the public addresses of reports. ``statuses``: one of :data:`STATUSES` for each report.
    """

    name: str
    bug_class: str
    effect: str
    reports: tuple[str, ...] = ()
    statuses: tuple[str, ...] = ()


def flag(name: str, bug_class: str, effect: str, *reports: str) -> Flag:
    """Make a flag from reports of the form 'status path', where the path is relative to :data:`SITE`."""
    pairs = [report.split(" ") for report in reports]
    addresses = tuple(SITE + path for _, path in pairs)
    return Flag(name, bug_class, effect, addresses, tuple(status for status, _ in pairs))
