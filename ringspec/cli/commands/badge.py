"""``ringspec badge``: write the data of a badge for one report of ``ringspec check --report``."""

from __future__ import annotations

from pathlib import Path

import click

from ringspec.cli.commands.check import FILE

EPILOG = """\b
Examples:
  ringspec badge report.jsonl
  ringspec badge report.jsonl -o badge.json

\b
Exit codes:
  0    the badge is written, whatever it says
  2    bad input: not a report
  130  Ctrl-C"""


@click.command(
    "badge", epilog=EPILOG, short_help="Write a badge that shows the result of a report."
)
@click.argument("report", metavar="REPORT", type=FILE)
@click.option(
    "-o",
    "--output",
    "path",
    type=FILE,
    metavar="FILE.json",
    help="Write to this file, which is replaced if it exists. [default: stdout]",
)
def badge_command(report: Path, path: Path | None) -> None:
    """Write a badge for REPORT, a file of "ringspec check --report", as JSON that shields.io draws.

    The badge says how many cases passed, of those that the target claims, in which profile, on which day, and with
    which versions. It is red if a case failed, yellow if the only failures are expected ones, and grey if the run was
    interrupted. A report that ends early is accepted: its badge says "incomplete".
    """
    import json

    from ringspec.cli.commands.check_run import check_destination
    from ringspec.conformance.report.badge import badge
    from ringspec.conformance.report.report import read_report
    from ringspec.tensorfile import replace_file

    if path is not None:
        check_destination(path)
    text = json.dumps(badge(read_report(report, partial=True)), indent=1) + "\n"
    if path is None:
        click.echo(text, nl=False)
    else:
        replace_file(path.absolute(), text.encode())
