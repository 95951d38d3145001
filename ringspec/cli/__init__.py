"""The command ``ringspec``, which groups all other commands; each of them has its own file.

Exit codes: 0 for success. 1 if a ring differs from the definition by more than the permitted error, if golden vectors
differ from newly derived values, or if an implementation under test fails a case that it claims to support. 2 for bad
input, which a paragraph on stderr explains. 3 if the implementation under test could not execute any case. 130 for
Ctrl-C.
"""

from __future__ import annotations

import click

import ringspec
from ringspec.cli.commands.badge import badge_command
from ringspec.cli.commands.cases import cases_group
from ringspec.cli.commands.check import check_command
from ringspec.cli.commands.diff import diff_command
from ringspec.cli.commands.explain import explain_command
from ringspec.cli.commands.explore import explore_command
from ringspec.cli.commands.plan import plan_command
from ringspec.cli.commands.power import power_command
from ringspec.cli.commands.replay import replay_command
from ringspec.cli.commands.reproduce import reproduce_command
from ringspec.cli.commands.schedule import schedule_command
from ringspec.cli.commands.simulate import simulate_command
from ringspec.cli.commands.smoke import smoke_command
from ringspec.cli.commands.vectors import vectors_group
from ringspec.cli.shared.group import Commands


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(
    ringspec.__version__,
    prog_name="ringspec",
    message=f"%(prog)s %(version)s (specification {ringspec.SPEC_VERSION})",
)
def main() -> None:
    """Run, plan and test ring attention: the executable specification on the command line."""


main.add_command(simulate_command)
main.add_command(schedule_command)
main.add_command(explore_command)
main.add_command(vectors_group)
main.add_command(smoke_command)
main.add_command(check_command)
main.add_command(power_command)
main.add_command(replay_command)
main.add_command(explain_command)
main.add_command(diff_command)
main.add_command(badge_command)
main.add_command(reproduce_command)
main.add_command(cases_group)
main.add_command(plan_command)
