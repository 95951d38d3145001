"""Go on with a run that was interrupted: take over from its report the cases that need not run again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringspec.conformance.report.records import Record
from ringspec.conformance.report.report import plain, read_report
from ringspec.errors import OptionError, shown

# What must be the same in both runs: these fields of a report's header.
SAME = ("target", "versions", "files", "capabilities", "vectors", "profile")
TAKEN_OVER = ("pass", "not claimed")


def taken_over(path: Path, header: Mapping[str, Any]) -> dict[str, Record]:
    """Return by id the records in the report at ``path`` of cases that passed or are not claimed.

    ``header``: the header of the new run. The file may end early, even within a line; without a file there are no
    records. Failures are left out, so they run again. Raises :class:`~ringspec.errors.OptionError` if the report is that
    of another target, version or profile, :class:`~ringspec.errors.FileFormatError` if the file is not a report.
    """
    if not path.exists():
        return {}
    report = read_report(path, partial=True)
    now = plain(dict(header))
    for name in SAME:
        if report.header[name] != now[name]:
            raise OptionError(
                f"the same {name} in {path} as in this run: {shown(now[name])}",
                shown(report.header[name]),
                "run without --resume, which begins a new report",
            )
    return {record.id: record for record in report.records if record.outcome in TAKEN_OVER}
