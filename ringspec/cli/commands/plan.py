"""``ringspec plan``: estimate with formulas, without running anything, what attention on W workers costs on given hardware."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import ringspec
from ringspec.cli.shared import output
from ringspec.cli.shared.options import LengthsType, MeshType, NamesType, WindowType, choice
from ringspec.cli.views.plan_figure import DRAWN_WORKERS
from ringspec.errors import OptionError, shown
from ringspec.recipes import RECIPES
from ringspec.spec.schedule import CIRCULATIONS

if TYPE_CHECKING:
    from ringspec.plan import Hardware, Plan

TOKENS_PER_WORKER = 8192
MOST_PLANS = 64
LAYOUTS = ("contiguous", "striped", "zigzag")
SCHEMES = ("ring", "double_ring", "all_gather", "ulysses", "usp", "joint", "pcp", "dcp")
PRESETS = ("h200", "trn2")
PICTURES = (".png", ".svg", ".pdf")
PASSED_ON = (
    "batch", "heads", "kv_heads", "head_dim", "value_dim", "causal", "window", "recipe", "backward",
    "overlap", "mesh", "text", "new",
)  # fmt: skip

EPILOG = """\b
Examples:
  ringspec plan --workers 8 --length 131072 --kv-heads 8
  ringspec plan --workers 64,512,65536 --hardware trn2 --kv-heads 8
  ringspec plan --workers 8 --hardware rates.toml --figure ring.png
  ringspec plan --mesh ring=2,ulysses=4 --kv-heads 8
  ringspec plan --workers 16 --scheme ulysses,usp,joint --no-causal --text 512

\b
Exit code: 0; 2 for bad input; 130 after Ctrl-C.
The keys of --json: ringspec/cli/plan.schema.json.
"""


@click.command(
    "plan",
    epilog=EPILOG,
    short_help="Estimate what a ring, or another scheme, costs on given hardware.",
)
@click.option(
    "--hardware", default="h200", show_default=True, metavar=f"{choice(PRESETS)[:-1]}|FILE]",
    help="Rates of one device: the name of a preset, or a TOML or JSON file.",
)  # fmt: skip
@click.option(
    "--workers", type=LengthsType(), metavar="N,...",
    help="W, the number of workers; one plan for each number. [default: 8, or the ranks of --mesh]",
)  # fmt: skip
@click.option(
    "--length", type=LengthsType(), metavar="N,...",
    help="S, the number of tokens; one plan for each number; 64k is 65536, 1M is 1048576. "
    f"[default: {TOKENS_PER_WORKER} per worker]",
)  # fmt: skip
@click.option("--batch", default=1, show_default=True, metavar="N", help="B, the batch size.")
@click.option(
    "--heads", default=32, show_default=True, metavar="N", help="H, the number of query heads."
)
@click.option(
    "--kv-heads",
    type=int,
    metavar="N",
    help="Hkv, the number of key/value heads. [default: --heads]",
)
@click.option(
    "--head-dim",
    default=128,
    show_default=True,
    metavar="N",
    help="D, the head dimension of q and k.",
)
@click.option(
    "--value-dim", type=int, metavar="N", help="Dv, the head dimension of v. [default: --head-dim]"
)
@click.option("--causal/--no-causal", default=True, show_default=True, help="Causal mask.")
@click.option(
    "--window", type=WindowType(), metavar="L,R",
    help="Sliding window: a query sees keys at most L positions earlier and R later; one number sets both, 'none' is unbounded.",
)  # fmt: skip
@click.option(
    "--recipe", default="bf16", show_default=True, metavar="NAME",
    help="Number formats; they determine the bytes sent and the rate of matrix products. One of "
    f"{', '.join(RECIPES)}.",
)  # fmt: skip
@click.option(
    "--layout",
    type=NamesType(),
    metavar=choice(LAYOUTS),
    help="Layouts to compare, separated by commas. [default: all]",
)
@click.option(
    "--circulation", type=NamesType(), metavar=choice(CIRCULATIONS),
    help="Circulations to compare, separated by commas. [default: all]",
)  # fmt: skip
@click.option(
    "--scheme", "schemes", type=NamesType(), metavar="NAME,...",
    help=f"Show these ways to split attention, and what moves in them, instead of the comparison of rings. {choice(SCHEMES)}",
)  # fmt: skip
@click.option(
    "--mesh", type=MeshType(), metavar="AXIS=N,...",
    help="The axes of the ranks, outermost first: show schemes with these axes, as with --scheme.",
)  # fmt: skip
@click.option(
    "--text", type=int, metavar="N", help="How many of the tokens are the text of joint attention."
)
@click.option(
    "--new", type=int, metavar="N",
    help="How many of the tokens are new in pcp and dcp; the others are cached. [default: all in pcp, 1 in dcp]",
)  # fmt: skip
@click.option(
    "--backward/--no-backward", default=True, show_default=True, help="Include the backward pass."
)
@click.option(
    "--overlap/--no-overlap", default=True, show_default=True,
    help="Assume that transfers run at the same time as the computation.",
)  # fmt: skip
@click.option(
    "--flops",
    type=float,
    metavar="X",
    help="FLOP/s of dense matrix products. [default of this and of --memory: the value of --hardware]",
)
@click.option(
    "--efficiency",
    type=float,
    metavar="X",
    help="Fraction of --flops that a kernel reaches, in both passes.",
)
@click.option(
    "--bandwidth",
    type=float,
    metavar="X",
    help="Bytes/s from a worker to its neighbour, for any number of workers.",
)
@click.option(
    "--latency", type=float, metavar="X", help="Seconds per hop; 0 if only --bandwidth is given."
)
@click.option("--memory", type=float, metavar="X", help="Memory of one device in bytes.")
@click.option(
    "--figure", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help=f"Draw the timeline of the recommended ring (up to {DRAWN_WORKERS} workers) as PNG, SVG or PDF.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
def plan_command(**given: Any) -> None:
    """Estimate what the attention of one layer costs on W workers: time, waiting, bytes sent and memory.

    Compares all layouts and three kinds of rings: keys travel, queries travel, or every worker gathers all keys. A ring
    may have up to 1048576 workers. Then lists the ways to split attention that are possible, such as Ulysses and USP, and
    says why the others are not. Counts of pairs and bytes are exact; times are computed from these counts and the given
    device rates. The presets use figures that the vendors publish; --json prints their sources.
    """
    from ringspec.cli.views.plan_figure import draw
    from ringspec.cli.views.plan_rings import text
    from ringspec.cli.views.plan_schemes import scheme_lines

    plans = planned(given)
    if given["figure"] is not None:
        if given["figure"].suffix.lower() not in PICTURES:
            raise OptionError(
                f"--figure with one of the endings {', '.join(PICTURES)}",
                shown(str(given["figure"])),
                "write --figure ring.png",
            )
        draw(plans[0], given["figure"])
    if given["as_json"]:
        output.show_json(document(plans))
        return
    width = output.width()
    lines = []
    narrowed = given["schemes"] is not None or given["mesh"] is not None
    for one in plans:
        lines += [*text(one, width, narrowed), "", *scheme_lines(one, width, narrowed), ""]
    output.show(lines[:-1])


def planned(given: dict[str, Any]) -> list[Plan]:
    """Return a plan for each combination of a number of workers and a sequence length."""
    from ringspec.plan import plan

    device = hardware(given)
    lengths, sizes = given["length"] or (None,), workers_of(given)
    if len(lengths) * len(sizes) > MOST_PLANS:
        raise OptionError(
            f"at most {MOST_PLANS} pairs of --workers and --length",
            f"{len(lengths) * len(sizes)}",
            "request fewer at once",
        )
    return [
        plan(
            TOKENS_PER_WORKER * workers if length is None else length,
            workers,
            hardware=device,
            layouts=given["layout"],
            circulations=given["circulation"],
            schemes=given["schemes"],
            **{name: given[name] for name in PASSED_ON},
        )
        for workers in sizes
        for length in lengths
    ]


def workers_of(given: dict[str, Any]) -> tuple[int, ...]:
    """Return the numbers of workers: those given, the ranks of the mesh, or 8."""
    if given["workers"] is not None:
        return tuple(given["workers"])
    return (8,) if given["mesh"] is None else (math.prod(size for _, size in given["mesh"]),)


def hardware(given: dict[str, Any]) -> Hardware:
    """Return the hardware that a preset or a file describes; rates given as options replace its rates."""
    from ringspec.plan import PRESETS, read_hardware
    from ringspec.plan.hardware import hardware_named

    which = given["hardware"]
    file = which not in PRESETS and (Path(which).suffix or Path(which).exists())
    device = read_hardware(which) if file else hardware_named(which)
    return device.with_rates(
        flops_per_second=given["flops"],
        efficiency=given["efficiency"],
        bytes_per_second=given["bandwidth"],
        latency=given["latency"],
        memory=given["memory"],
    )


def document(plans: list[Plan]) -> dict[str, Any]:
    """Return the plans as plain data."""
    from ringspec.plan import plan_document

    return {
        "command": "plan",
        "version": ringspec.__version__,
        "specification": ringspec.SPEC_VERSION,
        "plans": [plan_document(one) for one in plans],
    }
