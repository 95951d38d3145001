"""Tables of golden cases, of their tensors and of flags, as text."""

from __future__ import annotations

import sys

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ringspec.cli.shared import output
from ringspec.cli.views.vectors import Tensors, shape_text, tensor_rows, terms_text, values_text
from ringspec.vectors.format.case import Case
from ringspec.vectors.format.flag import Flag

WIDE = 400
SHORT = {"forward": "fwd", "backward": "bwd"}


def show_flags(flags: list[Flag], cases: list[Case]) -> None:
    for flag in flags:
        count = sum(flag.name in case.flags for case in cases)
        click.echo(f"\n{flag.name} ({flag.bug_class}; {count} cases)\n  {flag.effect}")
        for report, status in zip(flag.reports, flag.statuses, strict=True):
            click.echo(f"  {report} ({status})")


def show_table(cases: list[Case]) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for title in ("id", "passes", "shape", "format", "terms", "flags"):
        # An id must stay in one piece, so that it can be copied.
        table.add_column(title, no_wrap=title == "id", overflow="fold")
    for case in cases:
        mark = " (withdrawn)" if case.withdrawn is not None else ""
        table.add_row(
            case.id + mark,
            " ".join(SHORT[one] for one in case.passes),
            shape_text(case),
            "" if case.formats is None else case.formats.inputs,
            terms_text(case),
            " ".join(case.flags),
        )
    console = output.console_on(sys.stdout)
    if console.is_terminal:
        console.print(table)
        return
    table.box = None
    show_plain(table)


def show_plain(table: Table) -> None:
    """One line a row, however long: for a pipe, and for digests that must stay in one piece."""
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
