"""``ringspec diff``: compare two reports of ``ringspec check --report``."""

from __future__ import annotations

from pathlib import Path

import click

from ringspec.cli.commands.check import FILE

EPILOG = """\b
Examples:
  ringspec diff old.jsonl new.jsonl
  ringspec diff old.jsonl new.jsonl --factor 1.2 --json

\b
Exit codes:
  0    nothing is worse
  1    a case that passed fails, is no longer claimed, or did not run
  2    bad input: not a report, or no case in both
  130  Ctrl-C"""


@click.command("diff", epilog=EPILOG, short_help="Compare two reports.")
@click.argument("old", metavar="OLD", type=FILE)
@click.argument("new", metavar="NEW", type=FILE)
@click.option(
    "--factor",
    type=click.FloatRange(1, 1e9, min_open=True),
    default=2.0,
    show_default=True,
    metavar="X",
    help="List errors that grow or shrink by more than this factor. Errors below 1 % of their bound count as 1 %.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
def diff_command(old: Path, new: Path, factor: float, as_json: bool) -> None:
    """Compare two reports of "ringspec check --report": what is worse in NEW, what is repaired, what else changed.

    A case is worse if it passed in OLD and, in NEW, fails, is no longer claimed or did not run. Cases that are in only
    one report are listed, but are never worse. The reports may come from different machines or different targets.
    """
    from ringspec.cli.shared import output
    from ringspec.cli.views import diff as text
    from ringspec.conformance.report.diff import compare
    from ringspec.conformance.report.report import plain, read_report

    found = compare(read_report(old), read_report(new), factor)
    if as_json:
        output.show_json({"command": "diff", **plain(found.as_dict())})
    else:
        output.show(text.lines(found))
        output.echo([found.headline])  # one line, which programs read
    if found.worse:
        click.get_current_context().exit(1)
