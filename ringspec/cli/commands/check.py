"""``ringspec check``, and the options that ``smoke``, ``check`` and ``replay`` share.

What they do is in ``check_run``, which is imported by the command that runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., Any])
FILE = click.Path(path_type=Path, dir_okay=False)

TARGETS = """\b
TARGET is one of
  package.module:object     an object with name, capabilities and run(call)
  path/file.py:object       the same in a file
  cmd:PROGRAM ARGUMENTS     a program in any language
  dir:FOLDER                results that another machine has left beside the inputs
  NAME                      a target that an installed package registers
Without it, [tool.ringspec] target of the nearest pyproject.toml is taken."""

EXIT_CODES = """\b
Exit codes:
  0    every claimed case passed, or failed as the list of expected failures says
  1    a case failed, or passed though it was expected to fail
  2    bad input: no such target, an unknown case, a file that cannot be read
  3    no case was executed: nothing was claimed
  130  Ctrl-C; the report says that it is not complete"""


def target_argument(function: Function) -> Function:
    return click.argument("target", metavar="[TARGET]", required=False)(function)


def timeout_option(function: Function) -> Function:
    return click.option(
        "--timeout",
        type=click.FloatRange(0, 86_400),
        default=120.0,
        show_default=True,
        metavar="SECONDS",
        help="For one call, made in another process. 0: no limit, in this process (for a debugger).",
    )(function)


def report_options(function: Function) -> Function:
    """--json, --report, --junit, --html."""
    for name, text in (
        ("--html", "Write one self-contained page that opens in a browser."),
        ("--junit", "Write JUnit XML."),
        ("--report", "Write the report as JSON Lines, line by line while it runs."),
    ):
        option = click.option(name, type=FILE, metavar="FILE", help=text)
        function = option(function)
    text = "Print the report as JSON Lines instead of text."
    return click.option("--json", "as_json", is_flag=True, help=text)(function)


@click.command("check", epilog=f"{TARGETS}\n\n{EXIT_CODES}", short_help="Test an implementation.")
@target_argument
@click.option(
    "--profile",
    type=click.Choice(["smoke", "core", "full", "seeds", "noise"]),
    help="How many cases: seconds, minutes, everything; seeds: random inputs for false alarms. "
    "Default: core, or what dir:FOLDER was written for.",
)
@click.option(
    "--only", multiple=True, metavar="PATTERN", help="Only cases whose id matches; may be repeated."
)
@click.option(
    "--jobs",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    metavar="N",
    help="Processes that work at the same time.",
)
@timeout_option
@click.option(
    "--expected-failures",
    type=FILE,
    metavar="FILE",
    help="TOML: ids of cases that fail, or patterns with a count, a reason each. A case that "
    "passes all the same is a failure.",
)
@report_options
def check_command(**given: Any) -> None:
    """Test an implementation of ring attention, and say where it first is wrong.

    Every case that TARGET claims is run, and every tensor of every worker compared with the
    truth, element by element, within a bound that follows from the declared precision. A case
    that TARGET does not claim is counted as not claimed, never as passed.
    """
    from ringspec.cli.commands import check_run

    check_run.check(**given)
