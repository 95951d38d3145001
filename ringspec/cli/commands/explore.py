"""``ringspec explore``: write a page that steps through recorded rings, or other ways to split attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ringspec.cli.shared import output, progress
from ringspec.cli.shared.options import MeshType, NamesType, choice
from ringspec.cli.views.explore_records import (
    BUG_TOKENS,
    BUG_WORKERS,
    MOST_TOKENS,
    MOST_WORKERS,
    TOKENS,
    WORKERS,
    check_numbers,
    how_many,
    records,
)
from ringspec.cli.views.explore_schemes import MESHES
from ringspec.errors import OptionError
from ringspec.tensorfile import replace_file

EXAMPLES = """\b
Examples:
  ringspec explore -o ring.html
  ringspec explore -o ring.html --workers 2,4 --tokens 32
  ringspec explore --json > records.json
  ringspec explore --bug dkv-not-home -o bug.html
  ringspec explore --scheme all -o schemes.html
  ringspec explore --scheme usp --mesh ulysses=2,ring=2 -o usp.html

\b
Exit code: 0; 2 for bad input; 130 after Ctrl-C.
The keys of --json: the docstrings of explore_records.py and
explore_schemes.py in ringspec/cli/views.
"""


class WorkersType(click.ParamType):
    """The type of an option that takes numbers separated by commas."""

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
    metavar="N,N,...",
    help=f"Ring sizes that the page offers, 1 to {MOST_WORKERS}; may be repeated. "
    f"[default: {','.join(str(one) for one in WORKERS)}; with --bug only {BUG_WORKERS}]",
)
@click.option(
    "--tokens",
    type=int,
    metavar="N",
    help=f"S, the sequence length, 1 to {MOST_TOKENS}. {TOKENS} is divisible by 2W for every default W. "
    f"[default: {TOKENS}; with --bug {BUG_TOKENS}]",
)
@click.option(
    "--seed", default=0, show_default=True, metavar="N", help="Seed of the random tensors."
)
@click.option(
    "--bug",
    metavar="NAME",
    help="A known bug; the page then shows a ring with this bug next to the correct one, step by step.",
)
@click.option(
    "--scheme", "schemes", type=NamesType(), metavar="NAME,...",
    help=f"Ways to split attention that the page offers in place of rings: {choice(('all', *MESHES))}.",
)  # fmt: skip
@click.option(
    "--mesh", type=MeshType(), metavar="AXIS=N,...",
    help="The mesh of a single --scheme, outermost axis first. [default: 4 ranks]",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the records as one JSON document.")
def explore_command(
    path: Path | None,
    workers: tuple[tuple[int, ...], ...],
    tokens: int | None,
    seed: int,
    bug: str | None,
    schemes: tuple[str, ...] | None,
    mesh: tuple[tuple[str, int], ...] | None,
    as_json: bool,
) -> None:
    """Write one HTML page that steps through a ring, or through other ways to split attention (--scheme).

    The page lets the reader choose the number of workers W, the layout, the mask, the pass and the circulation, which
    says whether keys or queries travel. For each step the page shows which worker holds which blocks, which pairs it
    computes, the softmax state of a row, the bytes sent and which workers wait. Every number comes from a recorded run
    of one small problem in float64. With --bug, the page shows a ring with this known bug and marks what differs from
    the correct ring. With --scheme, it shows which tokens and heads each rank of a mesh holds, what it computes, and
    what moves.
    """
    from ringspec.cli.shared.options import in_range
    from ringspec.render.explore import explore_page

    if path is None and not as_json:
        raise OptionError(
            "--output with the path of the page, or --json", "neither", "pass -o ring.html"
        )
    check_destination(path)
    in_range(seed, "seed", 0, (1 << 64) - 1)
    sizes = [one for group in workers for one in group]
    if schemes is not None or mesh is not None:
        refused = "--workers" if sizes else "--bug" if bug else ""
        document = some_schemes(schemes, mesh, tokens, seed, refused)
    elif bug is None:
        document = all_rings(sizes or list(WORKERS), TOKENS if tokens is None else tokens, seed)
    else:
        from ringspec.cli.views.explore_bug import bug_records

        size = one_size(sizes or [BUG_WORKERS])
        document = bug_records(bug, size, BUG_TOKENS if tokens is None else tokens, seed)
    if path is not None:
        replace_file(path.absolute(), explore_page(document).encode())
    if as_json:
        output.show_json(document)
    else:
        count = len(document["runs"])
        if "schemes" in document:
            count = len(document["schemes"])
            output.show([f"written to {path}: {count} scheme{'s' * (count > 1)}"])
            return
        words = f"{bug} in {next(iter(document['runs']))}" if bug else f"{count} rings"
        output.show([f"written to {path}: {words}"])


def some_schemes(
    names: tuple[str, ...] | None,
    mesh: tuple[tuple[str, int], ...] | None,
    tokens: int | None,
    seed: int,
    refused: str,
) -> dict[str, Any]:
    """Return the data of a page of schemes; ``refused``: an option of rings that was given as well."""
    from ringspec.cli.views.explore_schemes import TOKENS as SCHEME_TOKENS
    from ringspec.cli.views.explore_schemes import as_option, scheme_records

    if names is None:
        axes = {axis for axis, _ in mesh or ()}
        fitting = [
            name
            for name, default in MESHES.items()
            if axes and axes <= set(default) and (name != "dcp" or "dcp" in axes)
        ]
        fix = f"add --scheme {fitting[0]}" if fitting else "add --scheme and its name"
        raise OptionError("--scheme beside --mesh", "no --scheme", fix)
    if refused:
        example = MESHES.get(names[0]) if len(names) == 1 else None
        raise OptionError(
            "--scheme with --mesh, --tokens and --seed only",
            f"{refused} beside --scheme",
            f"leave out {refused}"
            + (
                f"; give the ranks as --mesh {as_option(example)}"
                if example and refused != "--bug"
                else ""
            ),
        )
    chosen = tuple(MESHES) if names == ("all",) else names
    return scheme_records(chosen, mesh, SCHEME_TOKENS if tokens is None else tokens, seed)


def all_rings(sizes: list[int], tokens: int, seed: int) -> dict[str, Any]:
    """Return the data of a page that offers every layout, mask and circulation for each of these ring sizes."""
    check_numbers(sizes, tokens)
    with progress.stepping("rings", how_many(sizes), wanted=True) as tick:
        return records(sizes, tokens, seed, tick)


def one_size(sizes: list[int]) -> int:
    """Return the ring size; raise OptionError if several are given, because the page of a bug shows only one ring."""
    if len(sizes) > 1:
        raise OptionError(
            "one ring size with --bug",
            f"--workers {','.join(str(one) for one in sizes)}",
            "pass one number",
        )
    return sizes[0]


def check_destination(path: Path | None) -> None:
    """Raise OptionError if the folder of the page does not exist; called before the rings run."""
    if path is not None and not path.absolute().parent.is_dir():
        raise OptionError(
            f"the folder of {path}",
            "no such folder",
            "make the folder, or write elsewhere",
            code="destination",
        )
