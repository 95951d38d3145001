"""``ringspec plan``: estimate with formulas, without running a ring, what a ring costs on given hardware."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import ringspec
from ringspec.cli.shared import output
from ringspec.cli.shared.options import LengthsType, WindowType, choice
from ringspec.errors import OptionError, shown
from ringspec.recipes import RECIPES
from ringspec.spec.schedule import CIRCULATIONS

if TYPE_CHECKING:
    from ringspec.plan import Hardware, Pass, Plan

TOKENS_PER_WORKER = 8192
MOST_PLANS = 64
DRAWN_WORKERS = 8
LAYOUTS = ("contiguous", "striped", "zigzag")
PRESETS = ("h200", "trn2")
PICTURES = (".png", ".svg", ".pdf")
PASSED_ON = (
    "batch", "heads", "kv_heads", "head_dim", "value_dim", "causal", "window", "recipe", "backward",
    "overlap",
)  # fmt: skip

EPILOG = """\b
Examples:
  ringspec plan --workers 8 --length 131072 --kv-heads 8
  ringspec plan --workers 64,512,65536 --hardware trn2 --kv-heads 8
  ringspec plan --workers 8 --hardware rates.toml --figure ring.png

\b
Exit code: 0; 2 for bad input; 130 after Ctrl-C.
The keys of --json: ringspec/cli/plan.schema.json.
"""


class NamesType(click.ParamType):
    """The type of an option that takes names separated by commas."""

    name = "names"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return tuple(value.split(",")) if isinstance(value, str) else value


@click.command("plan", epilog=EPILOG, short_help="Estimate what a ring costs on given hardware.")
@click.option(
    "--hardware", default="h200", show_default=True, metavar=f"{choice(PRESETS)[:-1]}|FILE]",
    help="Rates of one device: the name of a preset, or a TOML or JSON file.",
)  # fmt: skip
@click.option(
    "--workers", type=LengthsType(), default="8", show_default=True, metavar="N,...",
    help="W, the number of workers; one plan for each number.",
)  # fmt: skip
@click.option(
    "--length", type=LengthsType(), metavar="N,...",
    help=f"S, the number of tokens; one plan for each number. [default: {TOKENS_PER_WORKER} per worker]",
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
    help="FLOP/s of dense matrix products. [default for this and the next four options: the value of --hardware]",
)
@click.option(
    "--efficiency", type=float, metavar="X", help="Fraction of --flops that a kernel reaches."
)
@click.option(
    "--bandwidth", type=float, metavar="X", help="Bytes/s from a worker to its neighbour."
)
@click.option("--latency", type=float, metavar="X", help="Seconds per hop.")
@click.option("--memory", type=float, metavar="X", help="Memory of one device in bytes.")
@click.option(
    "--figure", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help=f"Draw the timeline of the recommended ring (up to {DRAWN_WORKERS} workers) as PNG, SVG or PDF.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
def plan_command(**given: Any) -> None:
    """Estimate what the attention of one layer costs on a ring: time, waiting, bytes sent and memory.

    Compares all layouts and three kinds of rings: keys travel, queries travel, or every worker gathers all keys. A ring
    may have up to 1048576 workers. Counts of pairs and bytes are exact; times are computed from these counts and the
    given device rates. The presets use figures that the vendors publish; --json prints their sources.
    """
    plans = planned(given)
    if given["figure"] is not None:
        draw(plans[0], given["figure"])
    if given["as_json"]:
        output.show_json(document(plans))
        return
    width = output.width()
    lines = []
    for one in plans:
        lines += [*text(one, width), ""]
    output.show(lines[:-1])


def planned(given: dict[str, Any]) -> list[Plan]:
    """Return a plan for each combination of a number of workers and a sequence length."""
    from ringspec.plan import plan

    device = hardware(given)
    lengths = given["length"] or (None,)
    if len(lengths) * len(given["workers"]) > MOST_PLANS:
        raise OptionError(
            f"at most {MOST_PLANS} pairs of --workers and --length",
            f"{len(lengths) * len(given['workers'])}",
            "request fewer at once",
        )
    return [
        plan(
            TOKENS_PER_WORKER * workers if length is None else length,
            workers,
            hardware=device,
            layouts=given["layout"],
            circulations=given["circulation"],
            **{name: given[name] for name in PASSED_ON},
        )
        for workers in given["workers"]
        for length in lengths
    ]


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


def text(one: Plan, width: int) -> list[str]:
    """Return one plan as lines: warnings, workload, table of rings, passes of the best ring, advice."""
    from ringspec.plan.advice import advice, warning

    lines = [*warning(one), *heading(one), "", *table(one, width), ""]
    for way in one.best.passes:
        lines.append(pass_line(way))
    return [*lines, "", *advice(one)]


def heading(one: Plan) -> list[str]:
    from ringspec.plan.advice import amount

    work, device = one.work, one.hardware
    mask = "causal" if work.causal else "no mask"
    if work.window is not None:
        mask += f", window {work.window[0]},{work.window[1]}"
    peak = device.peak(work.recipe.p).value
    efficiencies = [device.efficiency(way).value for way in (False, True)]
    return [
        f"{work.workers} workers, {work.length} tokens, {work.tokens} each: batch {work.batch}, "
        f"heads {work.heads}/{work.kv_heads}, D {work.head_dim}/{work.value_dim}, {mask}, "
        f"recipe {work.recipe.name}",
        f"{device.name}: {amount(peak)}FLOP/s, of which {efficiencies[0]:.2f} forward and "
        f"{efficiencies[1]:.2f} backward; {one.link.name}: "
        f"{amount(one.link.bytes_per_second.value)}B/s, {one.link.latency.value * 1e6:.3g} us a hop"
        f"{'' if one.overlap else '; no overlap'}",
    ]


def table(one: Plan, width: int) -> list[str]:
    """Return a table with a line for each layout and kind of ring; columns that exceed ``width`` continue below."""
    from ringspec.plan.advice import amount, duration, percent

    labels, columns = [""], [[name] for name in COLUMNS]
    for entry in one.options:
        mark = "*" if entry is one.best else " "
        labels.append(f"{mark} {entry.layout} {entry.circulation}")
        back = entry.backward
        cells = [
            duration(entry.seconds),
            f"{entry.seconds / one.best.seconds:.2f}",
            duration(entry.forward.seconds),
            "-" if back is None else duration(back.seconds),
            percent(entry.idle),
            percent(sum(way.waiting_seconds for way in entry.passes) / entry.seconds),
            percent(sum(way.exposed_seconds for way in entry.passes) / entry.seconds),
            amount(entry.memory) + ("B" if entry.fits else "B !"),
            "-" if entry.hides_from is None else str(entry.hides_from),
            "-" if entry.hides_to is None else str(entry.hides_to),
        ]
        for column, cell in zip(columns, cells, strict=True):
            column.append(cell)
    labels = [label.ljust(max(map(len, labels))) for label in labels]
    return [*output.bands(labels, columns, width, numbers=True), LEGEND]


COLUMNS = ("time", "ratio", "forward", "backward", "idle", "waits", "exposed", "memory", "n*", "W*")
LEGEND = (
    "*: recommended; idle: fraction of the time in which an average worker does not compute, because it waits for the "
    "busiest worker of the step (waits) or for transfers (exposed); memory: of one worker, ! if the device has "
    "less; n*, W*: with at least n* tokens per worker, or at most W* workers, computation hides all transfers"
)


def pass_line(way: Pass) -> str:
    from ringspec.plan.advice import amount, duration

    return (
        f"{way.name}: {duration(way.seconds)} ({duration(way.compute_seconds)} computing, "
        f"{duration(way.waiting_seconds)} waiting for the busiest worker, {duration(way.exposed_seconds)} waiting "
        f"for transfers, which take {duration(way.transfer_seconds)}); {way.hops} hops, "
        f"{amount(way.bytes_sent)}B sent by each worker; lockstep imbalance {way.lockstep_imbalance:.2f}"
    )


def draw(one: Plan, path: Path) -> None:
    """Draw the timeline of the recommended ring (forward pass, then backward pass) and write it to a file."""
    from ringspec.plan import ring_spans
    from ringspec.render.figures_style import matplotlib_module

    if path.suffix.lower() not in PICTURES:
        raise OptionError(
            f"--figure with one of the endings {', '.join(PICTURES)}",
            shown(str(path)),
            "write --figure ring.png",
        )
    matplotlib_module("matplotlib").use("Agg")
    pyplot = matplotlib_module("matplotlib.pyplot")
    from ringspec.render.figures import cost_timeline

    best = one.best
    work = one.work.resized(min(one.work.workers, DRAWN_WORKERS), one.work.tokens)
    bars, now, steps = [], 0.0, 0
    for backward in range(len(best.passes)):
        spans = ring_spans(
            best.layout, best.circulation, bool(backward), work, one.hardware, one.link
        )
        bars += [
            (s.worker, s.step + steps, s.what, 1e3 * (s.start + now), 1e3 * (s.stop + now))
            for s in spans
        ]
        now += max(s.stop for s in spans)
        steps += 1 + max(s.step for s in spans)
    figure = cost_timeline(bars, unit="ms")
    figure.axes[0].set_title(title(one, work.workers))
    figure.savefig(path)
    pyplot.close(figure)


def title(one: Plan, workers: int) -> str:
    """Return the title of the drawing. If only some of the plan's workers are drawn, the title says how many."""
    best, work = one.best, one.work
    small = "" if workers == work.workers else f" (drawn with {workers} workers)"
    passes = "forward, then backward" if best.backward is not None else "forward"
    return (
        f"{best.layout}, {best.circulation}, {passes}: {work.workers} workers{small}, "
        f"{work.tokens} tokens each, {one.hardware.name}, {one.link.name}"
    )
