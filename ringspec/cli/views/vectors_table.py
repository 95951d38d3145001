"""Tables of golden cases, of their tensors, and of flags (classes of bugs that the cases find), as text."""

from __future__ import annotations

from ringspec.cli.shared import output
from ringspec.cli.views.vectors import Tensors, shape_text, tensor_rows, terms_text, values_text
from ringspec.conformance.report.words import folded
from ringspec.vectors.format.case import Case
from ringspec.vectors.format.flag import Flag

LIST_WIDTH = 80
INDENT = "    "
SHORT = {"forward": "fwd", "backward": "bwd"}


def show_flags(flags: list[Flag], cases: list[Case]) -> None:
    for flag in flags:
        count = sum(flag.name in case.flags for case in cases)
        plural = "" if count == 1 else "s"
        lines = ["", f"{flag.name} ({flag.bug_class}; {count} case{plural})", f"  {flag.effect}"]
        pairs = zip(flag.reports, flag.statuses, strict=True)
        output.show([*lines, *(f"  {report} ({status})" for report, status in pairs)])


def show_table(cases: list[Case]) -> None:
    output.echo(table_lines(cases))


def table_lines(cases: list[Case]) -> list[str]:
    """Return a line for each case, followed by indented lines with its ring, its mask and the flags of bugs.

    Lines have at most 80 characters, unless an id or the name of a flag is longer.
    """
    rows = [("id", "passes", "shape", "format"), *map(row_of, cases)]
    widths = [max(len(row[n]) for row in rows) for n in range(3)]
    lines = []
    for row, case in zip(rows, (None, *cases), strict=True):
        padded = [entry.ljust(width) for entry, width in zip(row, (*widths, 0), strict=True)]
        lines.append(" ".join(padded).rstrip())
        if case is not None:
            found = f"finds {', '.join(case.flags)}" if case.flags else ""
            for detail in filter(None, (terms_text(case), found)):
                lines += folded([INDENT + detail], LIST_WIDTH)
    return lines


def row_of(case: Case) -> tuple[str, str, str, str]:
    """Return the id of a case, its passes, its shape and the format of its inputs."""
    mark = " (withdrawn)" if case.withdrawn is not None else ""
    passes = " ".join(SHORT[one] for one in case.passes)
    format = "" if case.formats is None else case.formats.inputs
    return case.id + mark, passes, shape_text(case), format


def show_tensors(case: Case, stored: Tensors, values: bool) -> None:
    """Print the name, dtype, shape and storage of each tensor, and its SHA-256 in the next line."""
    rows = tensor_rows(case, stored)
    names = ("name", "dtype", "shape_text", "stored")
    columns = [[name.removesuffix("_text"), *(row[name] for row in rows)] for name in names]
    table = output.bands([""] * (len(rows) + 1), columns, output.width())
    lines = ["", table[0].strip()]
    for line, row in zip(table[1:], rows, strict=True):
        lines += [line.strip(), f"{INDENT}{row['sha256']}"]
    output.echo(lines)
    if values and stored:
        longest = max(map(len, stored))
        listed = [f"{name:{longest}}  {values_text(stored[name])}" for name in sorted(stored)]
        output.show(["", "values in C order", *listed])
