"""``ringspec smoke``: run a few small cases to check the adapter that connects an implementation to the suite."""

from __future__ import annotations

from typing import Any

import click

from ringspec.cli.commands.check import (
    EXIT_CODES,
    TARGETS,
    report_options,
    target_argument,
    timeout_option,
)


@click.command(
    "smoke",
    epilog=f"{TARGETS}\n\n{EXIT_CODES}",
    short_help="Run a few small cases to check an adapter.",
)
@target_argument
@timeout_option
@report_options
def smoke_command(**given: Any) -> None:
    """Run a few small cases in seconds to check the adapter of TARGET; report each case in full."""
    from ringspec.cli.commands import check_run

    check_run.check(profile="smoke", only=(), jobs=1, expected_failures=None, **given)
