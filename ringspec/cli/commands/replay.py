"""``ringspec replay``: run single cases, and report each in full."""

from __future__ import annotations

from typing import Any

import click

from ringspec.cli.commands.check import EXIT_CODES, TARGETS, report_options, timeout_option


@click.command("replay", epilog=f"{TARGETS}\n\n{EXIT_CODES}", short_help="Run single cases by id.")
@click.argument("words", metavar="[TARGET] ID", nargs=-1, required=True)
@click.option(
    "--shrink",
    "shrinking",
    is_flag=True,
    help="If the case fails, look for the simplest call that TARGET fails in the same way: fewer workers, tokens, "
    "heads and features, simple numbers. Takes one ID.",
)
@click.option(
    "--shrink-time",
    type=click.FloatRange(0, 86_400),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Time limit of the search of --shrink, which starts after the readouts.",
)
@timeout_option
@report_options
def replay_command(words: tuple[str, ...], **given: Any) -> None:
    """Run the case ID with the inputs that it always has, and report each of its tensors.

    Several IDs may follow TARGET. A single word is taken as the ID, and TARGET is then read from pyproject.toml. With
    --json, --shrink adds a line of kind 'shrunk' after the report: the simplest call found that fails in the same way.
    """
    from ringspec.cli.commands import check_run

    check_run.replay(words, **given)
