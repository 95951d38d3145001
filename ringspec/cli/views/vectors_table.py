"""Tables of golden cases, of their tensors and of flags, as text."""

from __future__ import annotations

import sys

import click
from rich.console import Console
from rich.table import Table

from ringspec.cli.views.vectors import Tensors, shape_text, tensor_rows, terms_text, values_text
from ringspec.conformance.report.words import folded
from ringspec.vectors.format.case import Case
from ringspec.vectors.format.flag import Flag

WIDE = 400
LIST_WIDTH = 80
INDENT = "    "
SHORT = {"forward": "fwd", "backward": "bwd"}


def show_flags(flags: list[Flag], cases: list[Case]) -> None:
    for flag in flags:
        count = sum(flag.name in case.flags for case in cases)
        click.echo(
            f"\n{flag.name} ({flag.bug_class}; {count} case{'' if count == 1 else 's'})\n  {flag.effect}"
        )
        for report, status in zip(flag.reports, flag.statuses, strict=True):
            click.echo(f"  {report} ({status})")


def show_table(cases: list[Case]) -> None:
    click.echo("\n".join(table_lines(cases)))


def table_lines(cases: list[Case]) -> list[str]:
    """A line for each case, and below it, indented, its ring and terms and the bugs it finds.

    No line is longer than 80 characters, unless an id or the name of a flag is.
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
    """Id, passes, shape and format of the inputs."""
    mark = " (withdrawn)" if case.withdrawn is not None else ""
    passes = " ".join(SHORT[one] for one in case.passes)
    format = "" if case.formats is None else case.formats.inputs
    return case.id + mark, passes, shape_text(case), format


def show_plain(table: Table) -> None:
    """One line a row, however long: a digest must stay in one piece."""
    console = Console(
        file=sys.stdout, width=WIDE, force_terminal=False, color_system=None, markup=False
    )
    with console.capture() as captured:
        console.print(table)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def show_tensors(case: Case, stored: Tensors, values: bool) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("tensor", "dtype", "shape", "stored", "SHA-256"):
        table.add_column(title, no_wrap=True)
    for row in tensor_rows(case, stored):
        table.add_row(row["name"], row["dtype"], row["shape_text"], row["stored"], row["sha256"])
    click.echo()
    show_plain(table)
    if values and stored:
        longest = max(map(len, stored))
        lines = [f"{name:{longest}}  {values_text(stored[name])}" for name in sorted(stored)]
        click.echo("\nvalues in C order\n" + "\n".join(lines))
