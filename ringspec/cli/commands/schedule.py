"""``ringspec schedule``: show which worker holds which blocks at each step, without creating tensors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import click
import numpy as np

import ringspec
from ringspec.cli.shared import output, progress
from ringspec.cli.shared.inputs import MAX_ELEMENTS
from ringspec.cli.shared.options import Request, problem_options, request_from
from ringspec.cli.views.describe import heading, problem_data
from ringspec.cli.views.passes import (
    Data,
    holding_lines,
    layout_data,
    offset_lines,
    pass_data,
    pass_lines,
    same_meetings,
)
from ringspec.errors import OptionError
from ringspec.problem import model as spec_problem
from ringspec.problem.options import check, default_scale
from ringspec.recipes import recipe as recipe_of
from ringspec.rings.ring import invisible_pairs, layouts_for
from ringspec.rings.schedules import backward_schedule, forward_schedule, skip

# Number of pairs whose counting takes long enough for a spinner.
LONG = 1 << 26
MAX_PAIRS = 1 << 32
MAX_BLOCK_PAIRS = 1 << 26

EXAMPLES = """\b
Examples:
  ringspec schedule --workers 4 --layout striped
  ringspec schedule --workers 8 --layout zigzag --window 1024,0 --json

\b
Exit code: 0; 2 for bad input; 130 after Ctrl-C.
The keys of --json: ringspec/cli/schema.json.
"""


@click.command(
    "schedule", epilog=EXAMPLES, short_help="Show which worker holds which blocks at each step."
)
@problem_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
def schedule_command(**given: Any) -> None:
    """Show which worker holds which blocks at each step of a ring, for both passes.

    For every worker and step, prints which block of queries meets which block of keys, the number of visible pairs, and
    the offset of the causal diagonal in this pair of blocks (cp_offset). For every pass, prints hops, bytes and
    imbalance (the work of the busiest worker divided by the mean). Uses only shapes and masks; no tensor is created.
    """
    asked = request_from(given)
    with progress.working("counting visible pairs", wanted=pairs(asked) > LONG):
        document = report(asked)
    if given["as_json"]:
        output.show_json(document)
    else:
        width = output.width()
        output.show(text(document, width))


def pairs(asked: Request) -> int:
    return asked.shape.length * asked.shape.kv_length


def check_size(asked: Request) -> None:
    """Refuse a problem with too many pairs of a query and a key, because every pair of one head is visited."""
    block = pairs(asked) // asked.workers**2
    if pairs(asked) > MAX_PAIRS or block > MAX_BLOCK_PAIRS:
        raise OptionError(
            f"at most {MAX_PAIRS} pairs of a query and a key, {MAX_BLOCK_PAIRS} in one block",
            f"{pairs(asked)}, {block} in one block",
            "choose smaller lengths; the schedule does not depend on them",
        )
    elements = max(math.prod(asked.shape.of(name)[1:3]) for name in "qk")
    if elements > MAX_ELEMENTS:
        raise OptionError(
            f"at most {MAX_ELEMENTS} rows over all heads", f"{elements}", "choose fewer heads"
        )


def shapes_only(asked: Request) -> spec_problem.Problem:
    """Return the problem with tensors that use no memory, because each is one zero, broadcast to its shape."""
    check_size(asked)
    heads = {"q": asked.shape.heads, "k": asked.shape.kv_heads, "v": asked.shape.kv_heads}
    q, k, v = (np.zeros((1, n, asked.shape.of(name)[2], 1)) for name, n in heads.items())
    problem = check(q, k, v, asked.options)
    q, k, v = (np.broadcast_to(np.zeros(()), asked.shape.of(name)) for name in heads)
    terms = replace(problem.terms, scale=default_scale(asked.shape.head_dim))
    return replace(problem, q=q, k=k, v=v, terms=terms)


def report(asked: Request) -> Data:
    """Return the report as plain data, for JSON."""
    problem, recipe = shapes_only(asked), recipe_of(asked.recipe)
    layout_q, layout_k = layouts_for(problem, asked.layout, asked.workers, asked.options)
    planned = [forward_schedule(asked.circulation, asked.workers, asked.direction)]
    if asked.backward:
        planned.append(backward_schedule(asked.circulation, asked.workers, asked.direction))
    if asked.skip_masked:
        invisible = invisible_pairs(problem, layout_q, layout_k)
        planned = [skip(schedule, invisible) for schedule in planned]
    return {
        "command": "schedule",
        "version": ringspec.__version__,
        "specification": ringspec.SPEC_VERSION,
        "problem": problem_data(asked, problem, asked.backward),
        "layout": layout_data(layout_q, layout_k),
        "passes": [
            pass_data(problem, s, layout_q, layout_k, recipe, asked.options["q_offset"])
            for s in planned
        ],
    }


def text(document: Data, width: int) -> list[str]:
    """Return the report as lines."""
    lines = [*heading(document["problem"]), "", *holding_lines(document["layout"])]
    before = None
    for data in document["passes"]:
        lines += ["", *pass_lines(data, width, before)]
        if document["problem"]["causal"] and not same_meetings(data, before):
            lines += ["", *offset_lines(data, document["problem"]["layout"], width)]
        before = data
    return lines
