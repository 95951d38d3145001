"""``ringspec replay``: single cases, reported in full."""

from __future__ import annotations

from typing import Any

import click

from ringspec.cli.commands.check import EXIT_CODES, TARGETS, report_options, timeout_option


@click.command("replay", epilog=f"{TARGETS}\n\n{EXIT_CODES}", short_help="Run single cases by id.")
@click.argument("words", metavar="[TARGET] ID", nargs=-1, required=True)
@timeout_option
@report_options
def replay_command(words: tuple[str, ...], **given: Any) -> None:
    """Run the case ID with the same inputs as in any run, and report each of its tensors.

    Several IDs may follow TARGET. A single word is the ID; TARGET then comes from
    pyproject.toml.
    """
    from ringspec.cli.commands import check_run

    check_run.replay(words, **given)
