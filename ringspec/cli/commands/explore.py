"""``ringspec explore``: a page that steps through recorded rings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ringspec.cli.shared import output, progress
from ringspec.cli.views.explore_records import (
    MOST_TOKENS,
    MOST_WORKERS,
    TOKENS,
    WORKERS,
    check_numbers,
    how_many,
    records,
)
from ringspec.errors import OptionError
from ringspec.tensorfile import replace_file

EXAMPLES = """\b
Examples:
  ringspec explore -o ring.html
  ringspec explore -o ring.html --workers 2,4 --tokens 32
  ringspec explore --json > records.json

\b
Exit code: 0; 2 for bad input; 130 after Ctrl-C.
The keys of --json: the docstring of ringspec/cli/views/explore_records.py.
"""


class WorkersType(click.ParamType):
    """Numbers separated by commas."""

    name = "workers"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of ring sizes: write 2,3,4,8", param, ctx)


@click.command("explore", epilog=EXAMPLES)
@click.option(
    "-o",
    "--output",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Path of the page. The page needs no network and no other file.",
)
@click.option(
    "--workers",
    type=WorkersType(),
    multiple=True,
    default=(WORKERS,),
    metavar="N,N,...",
    help=f"Ring sizes that the page offers, 1 to {MOST_WORKERS}; may be repeated. "
    f"[default: {','.join(str(one) for one in WORKERS)}]",
)
@click.option(
    "--tokens",
    default=TOKENS,
    show_default=True,
    metavar="N",
    help=f"S, the sequence length, 1 to {MOST_TOKENS}. 48 is divisible by 2W for every default W.",
)
@click.option(
    "--seed", default=0, show_default=True, metavar="N", help="Seed of the random tensors."
)
@click.option("--json", "as_json", is_flag=True, help="Print the records as one JSON document.")
def explore_command(
    path: Path | None,
    workers: tuple[tuple[int, ...], ...],
    tokens: int,
    seed: int,
    as_json: bool,
) -> None:
    """Write one HTML page that steps through a ring.

    The page offers W, layout, mask, circulation and pass. For each step it shows which worker holds
    which blocks, the pairs it computes, the state of a row, the bytes sent and which workers wait.
    Every number comes from a recorded run of one small problem in float64.
    """
    from ringspec.cli.shared.options import in_range
    from ringspec.render.explore import explore_page

    if path is None and not as_json:
        raise OptionError(
            "--output with the path of the page, or --json", "neither", "pass -o ring.html"
        )
    check_destination(path)
    sizes = [one for group in workers for one in group]
    check_numbers(sizes, tokens)
    in_range(seed, "seed", 0, (1 << 64) - 1)
    with progress.stepping("rings", how_many(sizes), wanted=True) as tick:
        document = records(sizes, tokens, seed, tick)
    if path is not None:
        replace_file(path.absolute(), explore_page(document).encode())
    if as_json:
        output.show_json(document)
    else:
        output.show([f"written to {path}: {len(document['runs'])} rings"])


def check_destination(path: Path | None) -> None:
    """Report a missing folder before the rings run."""
    if path is not None and not path.absolute().parent.is_dir():
        raise OptionError(
            f"the folder of {path}",
            "no such folder",
            "make the folder, or write elsewhere",
            code="destination",
        )
