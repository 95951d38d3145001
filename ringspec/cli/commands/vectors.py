"""``ringspec vectors``: list, read, verify and compute golden vectors (inputs with correctly rounded results).

The code is in ``vectors_read`` (list, show, diff, export) and ``vectors_derive`` (verify, generate, materialise, make),
which are imported only when one of their commands runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ringspec.cli.shared.group import Commands
from ringspec.cli.shared.options import some_problem_options

Function = TypeVar("Function", bound=Callable[..., Any])
SET = "core, kernel, merge, cp, or the folder of a set"

EPILOG = """\b
Examples:
  ringspec vectors list --flag stale-keys
  ringspec vectors show ring/zigzag-causal-w4 --tensors
  ringspec vectors verify --only 'ring/*'
  ringspec vectors export core core.tar
  ringspec vectors make mine --length 96 --workers 3 --layout striped

\b
Exit code: 0; 1 if verify or diff finds a difference; 2 for bad input;
130 after Ctrl-C. The keys of --json: ringspec/cli/vectors.schema.json.
"""


def set_argument(default: str) -> Callable[[Function], Function]:
    return click.argument("name", metavar="[SET]", default=default)


def json_option(function: Function) -> Function:
    text = "Print one JSON document instead of text."
    return click.option("--json", "as_json", is_flag=True, help=text)(function)


def only_option(function: Function) -> Function:
    text = "Only cases whose full id matches this pattern, such as 'ring/*'."
    return click.option("--only", metavar="PATTERN", help=text)(function)


def jobs_option(function: Function) -> Function:
    text = "Number of parallel processes. [default: one per processor]"
    return click.option("--jobs", type=click.IntRange(1, 256), metavar="N", help=text)(function)


@click.group(
    "vectors", cls=Commands, epilog=EPILOG, short_help="List, show and verify golden test vectors."
)
def vectors_group() -> None:
    """List, show and verify golden test vectors: inputs and correctly rounded results.

    A case is a small attention problem, dense or on a ring, with its exact results rounded once to nearest even. Each
    case has one stated reason to exist and lists the known bugs that it finds. This package contains in full the sets
    "core", "merge" (partial results, with the bits of public merges) and "cp" (attention split over ranks). For the
    larger set "kernel" it contains only digests; "materialise" computes the values on this machine.
    """


@vectors_group.command("list")
@set_argument("core")
@click.option("--rule", metavar="ID", help="Only cases that test this rule, such as RING-4.")
@click.option("--flag", metavar="NAME", help="Only cases that find this bug, such as stale-keys.")
@click.option(
    "--operation",
    metavar="OP",
    help="Only cases of attention, ring, block, merge, schedule or context_parallel.",
)
@click.option(
    "--flags",
    "all_flags",
    is_flag=True,
    help="List the flags (classes of bugs) and their effects instead of cases.",
)
@json_option
def list_command(**given: Any) -> None:
    """List the cases of a set with their shapes, formats and flags.

    SET is core (the default), kernel, merge, cp, or the folder of a set.
    """
    from ringspec.cli.commands import vectors_read

    vectors_read.list_cases(**given)


@vectors_group.command("show", short_help="Show one case, its bugs and its tensors.")
@click.argument("id", metavar="ID")
@click.option("--set", "name", metavar="SET", help=f"{SET}. [default: the first with this case]")
@click.option("--tensors", is_flag=True, help="Also print some values of every tensor.")
@json_option
def show_command(**given: Any) -> None:
    """Show one case: why it exists, what it needs, which bugs it finds, and its tensors.

    The digest of a tensor is the SHA-256 of its little-endian bytes in C order.
    """
    from ringspec.cli.commands import vectors_read

    vectors_read.show_case(**given)


@vectors_group.command("verify", short_help="Compute every case again and compare all bytes.")
@set_argument("core")
@only_option
@jobs_option
@json_option
def verify_command(**given: Any) -> None:
    """Check the files of a set, compute every case again, and compare all bytes.

    This takes less than a minute for each packaged set on two processors. The exit code is 1 if
    anything differs.
    """
    from ringspec.cli.commands import vectors_derive

    vectors_derive.verify_set(**given)


@vectors_group.command("generate", short_help="Compute a set and write it to a new folder.")
@click.argument("name", metavar="core|kernel|merge|cp")
@click.argument("destination", metavar="DEST", type=click.Path(path_type=Path))
@only_option
@jobs_option
@json_option
def generate_command(**given: Any) -> None:
    """Compute all values of a set from its list of cases and write them to a new folder.

    DEST must not exist: nothing is overwritten. Compare the new set with the existing one ("ringspec vectors diff"),
    and then move it into place. The bytes do not depend on the number of processes.
    """
    from ringspec.cli.commands import vectors_derive

    vectors_derive.generate_set(**given)


@vectors_group.command("make", short_help="Compute golden values for your own problem.")
@click.argument("destination", metavar="DEST", type=click.Path(path_type=Path))
@some_problem_options("recipe", "skip_masked")
@click.option("--dense", is_flag=True, help="Attention without a ring: no workers, no layout.")
@click.option(
    "--dtype",
    default="bf16",
    metavar="[bf16|fp16|f32|f64]",
    help="Number format of inputs and outputs. [default: bf16]",
)
@click.option("--softcap", type=float, metavar="X", help="Soft cap of the scores.")
@click.option("--sinks", type=click.IntRange(0, 64), default=0, metavar="N", help="Sinks per head.")
@click.option("--bias", is_flag=True, help="Add a bias [1, H, Sq, Sk].")
@click.option("--dlse", is_flag=True, help="Add an upstream gradient of lse.")
@click.option(
    "--id",
    "id",
    default="mine/case",
    show_default=True,
    metavar="ID",
    help="Name of the case. It also determines the inputs.",
)
@json_option
def make_command(**given: Any) -> None:
    """Compute correctly rounded results for your own problem, and write them to a new folder.

    The folder contains one case: case.json, and a safetensors file with the inputs, the results in the
    output format and in float64, and the row scales. The same options give the same bytes on every
    machine. DEST must not exist. Exact arithmetic takes seconds for 256 tokens, minutes for 2048.
    """
    from ringspec.cli.commands import vectors_derive

    vectors_derive.make_set(**given)


@vectors_group.command("diff", short_help="Show the differences between two sets.")
@click.argument("old", metavar="A")
@click.argument("new", metavar="B")
@json_option
def diff_command(**given: Any) -> None:
    """Show the differences between two sets: in cases, in fields of case.json, and in tensors (in ulps).

    A and B are core, kernel, merge, cp, or folders. The exit code is 1 if anything differs.
    """
    from ringspec.cli.commands import vectors_read

    vectors_read.diff(**given)


@vectors_group.command("export", short_help="Pack a set into one reproducible archive.")
@click.argument("name", metavar="SET")
@click.argument("destination", metavar="FILE.tar[.gz]", type=click.Path(path_type=Path))
@json_option
def export_command(**given: Any) -> None:
    """Pack a set into one archive; the same set always gives the same bytes.

    SET is core, kernel, merge, cp, or the folder of a set. Every file is checked while it is packed.
    """
    from ringspec.cli.commands import vectors_read

    vectors_read.export(**given)


@vectors_group.command(
    "materialise", short_help="Compute and cache values that a set stores as digests."
)
@set_argument("kernel")
@click.option(
    "--cache",
    "cache_dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Folder of the computed values. [default: $RINGSPEC_CACHE_DIR, or the user's cache folder]",
)
@only_option
@jobs_option
@json_option
def materialise_command(**given: Any) -> None:
    """Compute the values that a set stores only as digests, check them, and cache them.

    SET is kernel (the default), or the folder of a set that stores digests. An interrupted run continues where it
    stopped. Values are checked again whenever they are read from the cache.
    """
    from ringspec.cli.commands import vectors_derive

    vectors_derive.materialise_set(**given)
