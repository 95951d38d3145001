"""``ringspec reproduce``: write a program without ringspec that shows a failure."""

from __future__ import annotations

from typing import Any

import click

from ringspec.cli.commands.check import FILE, TARGETS, timeout_option

EXIT_CODES = """\b
Exit codes:
  0    both files are written
  2    bad input: no such target or case, a case that passes, or a call that
       cannot be written
  130  Ctrl-C"""


@click.command(
    "reproduce",
    epilog=f"{TARGETS}\n\n{EXIT_CODES}",
    short_help="Write a program without ringspec that shows a failure.",
)
@click.argument("words", metavar="[TARGET] ID", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    "path",
    type=FILE,
    required=True,
    metavar="FILE.py",
    help="Path of the program. The text for an issue is written beside it, as FILE.md.",
)
@click.option(
    "--shrink-time",
    type=click.FloatRange(0, 86_400),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Time limit of the search for the simplest call that fails in the same way.",
)
@timeout_option
def reproduce_command(words: tuple[str, ...], **given: Any) -> None:
    """Write one file of at most 100 lines (120 for a scheme) that shows how TARGET fails the case ID, and a text for an issue.

    The program imports NumPy and what the target needs, but not ringspec. It contains the simplest inputs that still
    fail, the call, and attention in float64, and prints the numbers that differ. It has been run before it is written.
    A single word is taken as the ID, and TARGET is then read from pyproject.toml.

    TARGET must be a NumPyTarget, or a TorchTarget on a CPU. Its function is copied from the file of the target, or
    imported if it is defined in another module.
    """
    from ringspec.cli.commands import reproduce_run

    reproduce_run.run(words, **given)
