"""``ringspec check``, and the options that ``smoke``, ``check`` and ``replay`` share.

The code is in ``check_run``, which is imported only when one of these commands runs.
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
  path/file.py:object       the same, in a file
  cmd:PROGRAM ARGUMENTS     a program in any language
  dir:FOLDER                inputs and results, written on another machine
  NAME                      a target that an installed package registers
Default: target in [tool.ringspec] of the nearest pyproject.toml."""

EXIT_CODES = """\b
Exit codes:
  0    every claimed case passed, or is an expected failure
  1    a case failed, or an expected failure passed
  2    bad input: no such target, an unknown case, a file that cannot be read
  3    no case was executed, because none is claimed
  130  Ctrl-C; the report is marked incomplete"""


def target_argument(function: Function) -> Function:
    return click.argument("target", metavar="[TARGET]", required=False)(function)


def timeout_option(function: Function) -> Function:
    return click.option(
        "--timeout",
        type=click.FloatRange(0, 86_400),
        default=120.0,
        show_default=True,
        metavar="SECONDS",
        help="Time limit of one call, which runs in another process. 0: no limit, and calls run in this process "
        "(for a debugger).",
    )(function)


def report_options(function: Function) -> Function:
    """Add the options --json, --report, --junit and --html to a command."""
    for name, text in (
        ("--html", "Write one self-contained HTML page."),
        ("--junit", "Write JUnit XML."),
        ("--report", "Write the report as JSON Lines, one line after each case."),
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
    help="smoke: seconds; core: minutes; full: everything; seeds: false-alarm test with random inputs; "
    "noise: rounding statistics. [default: core, or the profile of dir:FOLDER]",
)
@click.option(
    "--only",
    multiple=True,
    metavar="PATTERN",
    help="Only cases whose full id matches this pattern, such as 'ring/*'; may be repeated. --report lists "
    "all ids.",
)
@click.option(
    "--jobs",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    metavar="N",
    help="Number of parallel processes.",
)
@click.option(
    "--sharp",
    type=click.FloatRange(0, 86_400, min_open=True),
    metavar="SECONDS",
    help="Add the largest noise case in bfloat16 that takes about this time at most. It detects relative errors "
    "down to 8e-5 in o and 1.5e-4 in gradients (core: 1e-4 and 5e-4). An estimate is shown first.",
)
@timeout_option
@click.option(
    "--expected-failures",
    type=FILE,
    metavar="FILE",
    help="TOML file with the ids of cases that must fail, or patterns with the number that must fail, each "
    "with a reason. An expected failure that passes fails the run.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Go on with an interrupted run: cases that passed in the file of --report do not run again. The target must "
    "be unchanged.",
)
@report_options
def check_command(**given: Any) -> None:
    """Test an implementation of ring attention, and report where it is wrong.

    TARGET declares what it supports. A case that needs nothing else is claimed. Every claimed case runs, and every
    element of every tensor of every worker is compared with the true value. The largest accepted error follows from the
    declared precision. All other cases count as not claimed, never as passed.
    """
    from ringspec.cli.commands import check_run

    check_run.check(**given)
