"""The specification's ring as correct targets, one for each recipe (where a kernel rounds, and to which format).

A target is an implementation that the suite can test. ``reference_float64`` claims to support everything, in every
input format. Each other target claims the input formats that its recipe reads without rounding. :data:`REFERENCES` maps
the name of each recipe to its target.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.target.capabilities import (
    FEATURES,
    FORMATS,
    LAYOUTS,
    MASKS,
    OPERATIONS,
    Capabilities,
)
from ringspec.conformance.target.declared import base_recipe
from ringspec.conformance.target.protocol import Call, Result
from ringspec.conformance.target.results import due_of
from ringspec.formats import holds, load, round_to, store
from ringspec.problem.model import Tile
from ringspec.problem.options import check, check_gradients
from ringspec.recipes import RECIPES, Recipe
from ringspec.rings.layouts import unshard
from ringspec.rings.ring import ring, run_backward
from ringspec.rings.run import WorkerResult
from ringspec.rings.schedules import backward_schedule
from ringspec.spec.block import block_backward, block_forward
from ringspec.spec.layout import Layout
from ringspec.spec.online_softmax import SoftmaxState, finish, merge, merge_normalised

Results = dict[str, list[NDArray]]
OF_KEYS = ("k", "v", "segments_k")
PER_TOKEN = ("segments_q", "segments_k", "bound_min", "bound_max")
PAIRS = ("bias", "mask", "keep")
OPTIONS = (*PER_TOKEN, *PAIRS, "sinks")
NOT_TERMS = ("q_offset",)  # the positions of a call already include it


class Reference:
    """A target that runs ``ringspec.ring``, single blocks and merges under one recipe."""

    def __init__(self, recipe: Recipe, **claims: Any) -> None:
        self.recipe = recipe
        self.name = f"reference-{recipe.name}"
        everything: dict[str, Any] = {
            "operations": OPERATIONS,
            "layouts": LAYOUTS,
            "masks": MASKS,
            "features": FEATURES,
            "formats": tuple(name for name in FORMATS if holds(recipe.inputs, name)),
            "repeats_bitwise": True,
            "recipe": recipe.name,
        }
        self.capabilities = Capabilities(**everything | claims)
        self.notes = (recipe.note,)

    def run(self, call: Call) -> Result:
        evaluate: Callable[[Call, Recipe], Results] = {
            "ring": ring_results,
            "block": block_results,
            "merge": merge_results,
        }[call.operation]
        # store rounds results to narrow formats; an overflow gives infinity.
        results = evaluate(call, base_recipe(self.capabilities.recipe, call.formats["inputs"]))
        return Result(
            **{
                name: [store(x, due.format) for x in results[name]]
                for name, due in due_of(call).items()
            }
        )


def whole(call: Call, name: str) -> NDArray:
    """Return a tensor of all workers in global order; floats as float64."""
    parts = [load(x) if x.dtype.kind in "fV" else x for x in call.tensors[name]]
    if name == "sinks" or (name in PAIRS and parts[0].shape[2] == 1):
        return parts[0]
    index = call.index_k if name in OF_KEYS else call.index_q
    assert index is not None
    return unshard(parts, Layout("table", index), 1 if name in PER_TOKEN else 2)


def arrays_of(call: Call) -> tuple[NDArray, NDArray, NDArray, NDArray | None, NDArray | None]:
    """Return q, k, v, dy and dlse of all workers in global order; dy and dlse are None if the call has none."""
    q, k, v = (whole(call, name) for name in ("q", "k", "v"))
    dy, dlse = (whole(call, name) if name in call.tensors else None for name in ("dy", "dlse"))
    return q, k, v, dy, dlse


def tables_of(call: Call) -> tuple[Layout, Layout]:
    """Return the layouts of queries and keys."""
    assert call.index_q is not None and call.index_k is not None
    return Layout("table", call.index_q), Layout("table", call.index_k)


def given_forward(call: Call) -> list[WorkerResult]:
    """Return the o and lse of each worker, which a call of only the backward pass contains."""
    outputs = zip(call.tensors["o"], call.tensors["lse"], strict=True)
    index_q, index_k = (layout.table for layout in tables_of(call))
    return [
        WorkerResult(r, index_q[r], index_k[r], load(o), load(lse))
        for r, (o, lse) in enumerate(outputs)
    ]


def options_of(call: Call) -> dict[str, Any]:
    """Return the keyword arguments of ``ringspec.ring`` for a call, with explicit positions."""
    assert call.index_q is not None and call.index_k is not None
    assert call.position_q is not None and call.position_k is not None
    options = {name: term for name, term in call.terms.items() if name not in NOT_TERMS}
    options |= {name: whole(call, name) for name in OPTIONS if name in call.tensors}
    for name, index, position in (
        ("positions_q", call.index_q, call.position_q),
        ("positions_k", call.index_k, call.position_k),
    ):
        options[name] = unshard(list(position), Layout("table", index), 1)
    return options


def ring_results(call: Call, recipe: Recipe) -> Results:
    """Run the ring, or only its backward pass from the o and lse of the call."""
    q, k, v, dy, dlse = arrays_of(call)
    options = options_of(call)
    if call.passes == ("backward",):
        problem = check(q, k, v, options)
        gradients = check_gradients(problem, dy, dlse)
        schedule = backward_schedule(call.circulation, call.workers, call.direction)
        results = run_backward(
            problem, gradients, recipe, *tables_of(call), schedule, block_backward,
            given_forward(call), lambda moment: None,
        )  # fmt: skip
        return workers_of(results)
    run = ring(
        q,
        k,
        v,
        dy,
        dlse=dlse,
        workers=call.workers,
        layout=(call.index_q, call.index_k),
        circulation=call.circulation,
        direction=call.direction,
        recipe=recipe,
        **options,
    )
    return workers_of(list(run.workers))


def workers_of(results: list[WorkerResult]) -> Results:
    names = ("o", "lse", "dq", "dk", "dv", "dsinks", "dbias")
    return {name: [getattr(one, name) for one in results] for name in names}


def block_results(call: Call, recipe: Recipe) -> Results:
    """Compute o and lse of one block, or what it adds to the gradients.

    The gradients are computed from the given lse and delta.
    """
    q, k, v = (whole(call, name) for name in ("q", "k", "v"))
    problem = check(q, k, v, options_of(call))
    tile = Tile(problem.rows, problem.columns, problem.terms, recipe)
    q, k, v = (round_to(x, recipe.inputs) for x in (problem.q, problem.k, problem.v))
    results: Results = {}
    if "forward" in call.passes:
        o, lse = finish(block_forward(q, k, v, tile), None, recipe)
        results |= {"o": [o], "lse": [lse]}
    if "backward" in call.passes:
        lse = round_to(whole(call, "lse"), recipe.backward_lse)
        delta = round_to(whole(call, "delta"), recipe.delta)
        share = block_backward(q, k, v, whole(call, "dy"), lse, delta, tile)
        for name in ("dq", "dk", "dv"):
            results[name] = [round_to(getattr(share, name), recipe.gradients) + 0.0]
        if share.dbias is not None:
            results["dbias"] = [share.dbias]
    return results


def merge_results(call: Call, recipe: Recipe) -> Results:
    """Merge normalised partial results one by one, as the ``merge_order`` of the recipe says."""
    parts = zip(load(call.worker("parts_o", 0)), load(call.worker("parts_lse", 0)), strict=True)
    states = []
    for o, lse in parts:
        weight = np.where(np.isneginf(lse), 0.0, 1.0)
        states.append(SoftmaxState(lse, weight, np.where(weight[..., None] > 0, o, 0.0)))
    join = merge_normalised if recipe.merge_order == "normalised" else merge
    state = states[0]
    for part in states[1:]:
        state = join(state, part, recipe)
    o, lse = finish(state, None, recipe)
    return {"o": [o], "lse": [lse]}


REFERENCES = {
    name: Reference(recipe)
    for name, recipe in RECIPES.items()
    if any(holds(recipe.inputs, stored) for stored in FORMATS)
}
reference = reference_float64 = REFERENCES["float64"]
reference_float32 = REFERENCES["float32"]
reference_bf16 = REFERENCES["bf16"]
reference_fp16 = REFERENCES["fp16"]
reference_bf16_partials = REFERENCES["bf16_partials"]
reference_fp16_partials = REFERENCES["fp16_partials"]
reference_nki = REFERENCES["nki"]
reference_nki_low = REFERENCES["nki_low"]
