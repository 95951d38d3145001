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
    """Run the case ID with the same inputs as in any run, and report each of its tensors.

    Several IDs may follow TARGET. A single word is the ID; TARGET then comes from
    pyproject.toml. With --json, --shrink prints one more line after the report, of kind 'shrunk'.
    """
    from ringspec.cli.commands import check_run

    check_run.replay(words, **given)
