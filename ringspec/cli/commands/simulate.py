"""``ringspec simulate``: run a ring on given or random tensors and compare it with the definition."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from click.core import ParameterSource

import ringspec
from ringspec import fast
from ringspec.cli.shared import output, progress, ranks
from ringspec.cli.shared.inputs import Inputs, drawn, drawn_inputs, read_inputs, shortened
from ringspec.cli.shared.options import (
    SHAPE_OPTIONS,
    Request,
    choice,
    in_range,
    problem_options,
    request_from,
)
from ringspec.cli.views import reference
from ringspec.cli.views.describe import heading, problem_data
from ringspec.cli.views.passes import Data, layout_data, pass_data, pass_lines
from ringspec.errors import OptionError
from ringspec.formats import load
from ringspec.rings.lockstep import Moment
from ringspec.rings.ring import ring
from ringspec.rings.run import Run
from ringspec.rings.show import schedules
from ringspec.truth.dense import pairs_in, parts_of

# Number of pairs of a query and a key whose computation takes long enough for a progress bar.
LONG = 1 << 22
MAX_SAVED_BYTES = 1 << 30
MAX_BLOCK = 1 << 26
BLOCKS = ("spec", "fast")
LEGEND = {
    "circulation": "what travels: keys and values (kv, gather) or, in the backward pass, queries (q)",
    "recipe": "number formats and rounding points",
    "q1 x k0 (256)": "query block 1 with key block 0: 256 visible pairs in each of the B H heads",
    "after step 0": "what each worker r then sends to which neighbour, before the next step",
    "rows, columns": "positions and documents of the queries (rows) and keys (columns) that travel",
    "imbalance": "visible pairs of the busiest worker / mean over workers; 1 is perfect balance",
    "lockstep": "the same if in every step all workers wait for the busiest one",
    "2 x 2080 pairs": "B H = 2 heads with 2080 visible pairs each",
    "errors": "in units of the row scale of each row; abs: the largest |error| itself",
    "row scale": "unit for rounding errors: the sums of a row with every term replaced by its "
    "absolute value, times 1 + the row's largest logit, computed in the same way",
}

EXAMPLES = """\b
Examples:
  ringspec simulate --workers 4 --layout zigzag --circulation q
  ringspec simulate --input qkv.npz --workers 2 --recipe bf16 --json
  mpiexec -n 4 ringspec simulate --layout zigzag

\b
Exit code: 0; 1 if the ring differs from the dense definition by more than
1e-14 of the row scale (recipe float64; other recipes have no bound); 2 for
bad input; 4 if an MPI rank hangs; 130 after Ctrl-C.
The keys of --json: ringspec/cli/schema.json.
"""


@click.command(
    "simulate",
    epilog=EXAMPLES,
    short_help="Run ring attention and compare it with dense attention.",
)
@problem_options
@click.option("--softcap", type=float, metavar="X", help="s = softcap * tanh(z / softcap).")
@click.option("--sinks", default=0, metavar="N", help="Number of attention sinks per query head.")
@click.option("--dropout", default=0.0, metavar="P", help="Probability of dropping an entry of P.")
@click.option("--dropout-seed", default=0, metavar="N", help="Seed of the keep mask.")
@click.option("--scale", type=float, metavar="X", help="Factor of <q, k>. [default: 1/sqrt(D)]")
@click.option("--dlse", is_flag=True, help="Add an upstream gradient of lse.")
@click.option(
    "--seed", default=0, show_default=True, metavar="N", help="Seed of the random tensors."
)
@click.option(
    "--input",
    "input_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Read q, k, v and optionally dy, dlse from a .safetensors or .npz file.",
)
@click.option(
    "--compare",
    "method",
    default="auto",
    show_default=True,
    metavar=choice(reference.METHODS),
    help=f"Rows to compare. dense: all; rows: o, lse, dq of {reference.ROWS_PER_WORKER} query rows of "
    "each worker; auto: dense if B*H*Sq*Sk <= 2**24, else rows; none: no comparison.",
)
@click.option(
    "--save",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Write results and recorded states to a .safetensors file.",
)
@click.option(
    "--states/--no-states", default=True, help="With --save: also write the recorded states."
)
@click.option(
    "--blocks",
    type=click.Choice(BLOCKS),
    default="spec",
    show_default=True,
    help="What computes a block: the specification, or ringspec.fast, which uses threads and suits long "
    "sequences (recipes float64 and float32 only).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
@click.option("--quiet", is_flag=True, help="Omit the legend at the end of the text.")
@ranks.ranks_options
def simulate_command(**given: Any) -> None:
    """Run ring attention, and compare every worker's results with dense attention.

    The tensors are random or read from a file. All workers run in one process, or each worker runs as an MPI rank.

    Prints a verdict, a table of which worker computes which block in each step, the numbers of visible pairs, hops and
    bytes, and the errors of o, lse, dq, dk, dv for each worker.

    Besides q, k, v, dy and dlse, a file may contain bias, mask, segments_q, segments_k, bound_min,
    bound_max, sinks, keep, positions_q and positions_k, in the form that ringspec.ring accepts.
    """
    with ranks.team(given) as team:
        simulate(click.get_current_context(), team, given)


def simulate(ctx: click.Context, team: ranks.Team, given: dict[str, Any]) -> None:
    """Run the command on one rank; if there are several ranks, only rank 0 prints a report."""
    if given["input_path"] is not None:
        refuse_shapes(ctx)
    asked = request_from(given)
    in_range(given["sinks"], "sinks", 0, 1024)
    in_range(given["seed"], "seed", 0, (1 << 64) - 1)
    reference.check_method(given["method"])
    check_target(given["save"])
    inputs = read_or_draw(asked, given)
    options = asked.options | {
        "softcap": given["softcap"],
        "scale": given["scale"],
        "dropout_p": given["dropout"],
        "dropout_seed": given["dropout_seed"],
    }
    if given["sinks"] and "sinks" in inputs.options:
        raise OptionError("--sinks or sinks in the file", "both", "leave one of them out")
    options |= inputs.options
    if given["sinks"]:
        heads = inputs.tensors["q"].shape[1:2]
        options["sinks"] = drawn(given["seed"], "sinks", (*heads, given["sinks"]))
    record = given["save"] is not None and given["states"]
    # Numbers beyond a format's range become inf and nan, and the report shows them.
    with np.errstate(over="ignore", invalid="ignore"):
        run = run_ring(team, asked, inputs, options, record, given["blocks"])
        if run is None:
            return
        if given["save"] is not None:
            run.save(given["save"])
        document = report(run, asked, inputs, given["method"])
    if given["as_json"]:
        output.show_json(document)
    else:
        width = output.width()
        lines = text(document, width, given["save"])
        output.show(lines if given["quiet"] else [*lines, "", *legend_lines(width)])
    if document["comparison"]["within_bound"] is False:
        ctx.exit(1)


def refuse_shapes(ctx: click.Context) -> None:
    """Refuse options that set shapes or a seed if there is an input file, which determines shapes and values."""
    for name in (*SHAPE_OPTIONS, "seed", "dlse"):
        needed = name == "seed" and ctx.params["sinks"]
        if not needed and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = "--" + name.replace("_", "-")
            raise OptionError(
                f"no {option} together with --input",
                "both",
                f"leave {option} out; the file decides",
            )


def check_target(path: Path | None) -> None:
    """Raise OptionError if the file of --save cannot be written; called before the ring runs."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise OptionError(
            "--save with the path of a file in a directory that exists",
            str(path),
            "make the directory, or pass another path",
        )


def read_or_draw(asked: Request, given: dict[str, Any]) -> Inputs:
    if given["input_path"] is not None:
        return read_inputs(given["input_path"])
    names = ["q", "k", "v"] + (["dy"] if asked.backward else [])
    names += ["dlse"] if asked.backward and given["dlse"] else []
    return drawn_inputs(given["seed"], asked.shape, tuple(names))


def run_ring(
    team: ranks.Team,
    asked: Request,
    inputs: Inputs,
    options: dict[str, Any],
    record: bool,
    blocks: str,
) -> Run | None:
    """Run the ring, with a progress bar if it takes long; return None on a rank that does not report."""
    tensors = dict(inputs.tensors)
    if not asked.backward:
        tensors.pop("dy", None)
        tensors.pop("dlse", None)
    pieces: dict[str, Any] = dict(fast.pieces()) if blocks == "fast" else {}
    if not pieces:
        check_block(asked, tensors)
    if record:
        check_saved_size(asked, tensors)
    passes = 2 if {"dy", "dlse"} & set(tensors) else 1
    pairs = math.prod(tensors["q"].shape[:3]) * math.prod(tensors["k"].shape[2:3])
    total = passes * asked.workers * (asked.workers + (asked.circulation == "gather"))
    with progress.stepping("ring", total, wanted=pairs > LONG) as tick:

        def observe(moment: Moment) -> None:
            tick()

        compute: Callable[..., Run | None] = ring if team is None else team.ring
        return compute(
            tensors["q"],
            tensors["k"],
            tensors["v"],
            tensors.get("dy"),
            dlse=tensors.get("dlse"),
            workers=asked.workers,
            layout=asked.layout,
            circulation=asked.circulation,
            recipe=asked.recipe,
            direction=asked.direction,
            skip_masked=asked.skip_masked,
            record=record,
            observer=observe,
            **pieces,
            **options,
        )


def check_block(asked: Request, tensors: dict[str, np.ndarray]) -> None:
    """Refuse blocks that are too large, because several score matrices of a block must fit in memory."""
    q, k = tensors["q"].shape, tensors["k"].shape
    block = math.prod(q[:3]) * math.prod(k[2:3]) // asked.workers**2
    if block > MAX_BLOCK:
        raise OptionError(
            f"B * H * Sq/W * Sk/W of at most {MAX_BLOCK} for one block of scores",
            str(block),
            "choose more --workers, smaller lengths, or --blocks fast",
        )


def check_saved_size(asked: Request, tensors: dict[str, np.ndarray]) -> None:
    """Refuse to save a run that is too large: about nine copies of each tensor are saved for every step."""
    size = 8 * 3 * 3 * asked.workers * sum(x.size for x in tensors.values())
    if size > MAX_SAVED_BYTES:
        raise OptionError(
            f"recorded states of at most {MAX_SAVED_BYTES} bytes",
            f"about {size}",
            "save only the results with --no-states, or choose a smaller problem",
        )


def report(run: Run, asked: Request, inputs: Inputs, method: str) -> Data:
    """Return the report as plain data, for JSON."""
    q_offset = asked.options["q_offset"]
    passes = [
        pass_data(run.problem, schedule, run.layout_q, run.layout_k, run.recipe, q_offset)
        for schedule in schedules(run)
    ]
    dy, dlse = (
        load(inputs.tensors[name], name) if run.gradients and name in inputs.tensors else None
        for name in ("dy", "dlse")
    )
    method = reference.choose(method, run.problem)
    rows = reference.rows_to_compare(run, method)
    total = len(parts_of(run.problem, rows))
    long = pairs_in(run.problem) > LONG
    with progress.stepping("dense reference", total, wanted=long) as tick:
        comparison = reference.compare(run, dy, dlse, method, tick)
    return {
        "command": "simulate",
        "version": ringspec.__version__,
        "specification": ringspec.SPEC_VERSION,
        "inputs": {"source": inputs.source, "ignored": list(inputs.ignored)},
        "problem": problem_data(asked, run.problem, run.gradients is not None),
        "layout": layout_data(run.layout_q, run.layout_k),
        "passes": passes,
        "comparison": comparison,
    }


def legend_lines(width: int) -> list[str]:
    """Return lines that explain the terms of the report."""
    lines = ["legend:"]
    for word, meaning in LEGEND.items():
        lines += textwrap.wrap(
            f"  {word:<13} {meaning}", width, subsequent_indent=" " * 16, break_on_hyphens=False
        )
    return lines


def text(document: Data, width: int, saved: Path | None) -> list[str]:
    """Return the report as lines."""
    ring_line, problem_line = heading(document["problem"])
    lines = [reference.verdict(document["comparison"]), "", ring_line]
    lines.append(f"{problem_line}, {document['inputs']['source']}")
    if document["inputs"]["ignored"]:
        lines.append(f"not read: {shortened(document['inputs']['ignored'])}")
    before = None
    for data in document["passes"]:
        lines += ["", *pass_lines(data, width, before)]
        before = data
    compared = reference.comparison_lines(document["comparison"], width)
    lines += ["", *compared] if compared else []
    if saved is not None:
        lines.append(f"saved to {saved}")
    return lines
