"""``ringspec explain``: say in sentences what an implementation computes for each pair of a query and a key."""

from __future__ import annotations

from typing import Any

import click

from ringspec.cli.commands.check import TARGETS, target_argument, timeout_option

EXIT_CODES = """\b
Exit codes:
  0    every result is that of the definition
  1    some result is not
  2    bad input: no such target
  3    nothing could be read: no readout fits what the target claims"""


@click.command(
    "explain",
    epilog=f"{TARGETS}\n\n{EXIT_CODES}",
    short_help="Say in sentences what a target computes.",
)
@target_argument
@timeout_option
@click.option(
    "--thorough",
    is_flag=True,
    help="Search three times as long for what stays unexplained, such as two mistakes at once.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
def explain_command(**given: Any) -> None:
    """Run TARGET on a few small problems whose results spell out the weight of each pair of tokens.

    If the results are wrong, say which error in a block, mask, lse, delta, merge or transfer would produce them. This
    takes seconds. `ringspec check` tests more.

    TARGET may be a ring, a dense kernel (a ring of one worker) or a single block.
    """
    from ringspec.cli.views import explain

    explain.run(**given)
