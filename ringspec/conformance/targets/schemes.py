"""ringspec.context_parallel as correct targets of the operation 'context_parallel'.

A target is an implementation that the suite can test. These claim every scheme. They show that the cases can be passed,
and are an example of the arrays that a target gets and returns.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringspec.conformance.target.capabilities import (
    DOCUMENT_FEATURES,
    FORMATS,
    SCHEME_FEATURES,
    SCHEME_OPERATIONS,
    SCHEME_TERMS,
    SCHEMES,
    Capabilities,
)
from ringspec.conformance.target.cells import global_of, positions_of
from ringspec.conformance.target.protocol import Call, Refused, Result
from ringspec.conformance.target.results import due_of
from ringspec.formats import holds, load, store
from ringspec.recipes import RECIPES, Recipe
from ringspec.schemes.api import context_parallel
from ringspec.schemes.run import RankResult
from ringspec.spec.dense_backward import dy_o_sum, sink_gradient

NOT_OPTIONS = ("cu_seqlens_padded", "text", "text_at", "interleave")


class ReferenceSchemes:
    """A target that runs ``ringspec.context_parallel`` under one recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.name = f"reference-schemes-{recipe.name}"
        self.capabilities = Capabilities(
            operations=SCHEME_OPERATIONS,
            schemes=SCHEMES,
            layouts=("contiguous", "striped", "zigzag", "zigzag_per_document", "zigzag_padded"),
            masks=("causal", "window", "documents"),
            features=(*SCHEME_FEATURES, *SCHEME_TERMS, *DOCUMENT_FEATURES),
            formats=tuple(name for name in FORMATS if holds(recipe.inputs, name)),
            repeats_bitwise=True,
            recipe=recipe.name,
        )
        self.notes = (recipe.note,)

    def run(self, call: Call) -> Result:
        if call.operation != "context_parallel":
            raise Refused(f"the operation {call.operation}: use the target reference")
        given = arguments_of(call)
        results = context_parallel(**given, recipe=self.recipe).ranks
        sums = [sink_sums(call, given, one, self.recipe) for one in results]
        return Result(
            **{
                name: [
                    store(own if name == "dsinks" else getattr(one, name), due.format)
                    for one, own in zip(results, sums, strict=True)
                ]
                for name, due in due_of(call).items()
            }
        )


def sink_sums(call: Call, given: dict[str, Any], one: RankResult, recipe: Recipe) -> Any:
    """Return dsinks [h, N] of the rows of a rank; None in a call without it."""
    if "dsinks" not in due_of(call):
        return None
    dy, dlse = (
        np.zeros_like(one.lse) if name not in call.tensors else load(call.worker(name, one.rank))
        for name in ("dy", "dlse")
    )
    row_term = recipe.to_delta(dy_o_sum(recipe.to_inputs(dy, "dy"), one.o, recipe) - dlse)
    row_term = np.where(np.array(one.query.tokens) >= 0, row_term, 0.0)
    sinks = given["sinks"][list(one.query.heads)]
    return sink_gradient(sinks, recipe.to_backward_lse(one.lse), row_term)


def arguments_of(call: Call) -> dict[str, Any]:
    """Return the arguments of ``ringspec.context_parallel`` for a call."""
    found = {name: global_of(call, name) for name in call.tensors}
    options = {name: x for name, x in call.terms.items() if name not in NOT_OPTIONS}
    options["positions_q"], options["positions_k"] = positions_of(call)
    own = {name: call.terms[name] for name in ("text", "text_at") if name in call.terms}
    return (
        found
        | options
        | own
        | {"mesh": call.mesh, "scheme": call.scheme, "layout": layout_of(call)}
    )


def layout_of(call: Call) -> Any:
    """Return the tables of a call as the argument ``layout``."""
    assert call.index_q is not None and call.index_k is not None
    if call.scheme == "dcp":  # one row for each rank of the first group
        return call.index_k[: dict(call.mesh)["dcp"]]
    if call.scheme != "joint":
        return call.index_q, call.index_k
    text = call.terms["text"]
    rest = [token for token in range(call.index_q.max() + 1) if token not in text]
    slots = [[rest.index(token) for token in row if token in rest] for row in call.index_q.tolist()]
    return np.array(slots)


REFERENCES = {name: ReferenceSchemes(RECIPES[name]) for name in ("float64", "float32", "bf16")}
reference_float64 = REFERENCES["float64"]
reference_float32 = REFERENCES["float32"]
reference_bf16 = REFERENCES["bf16"]
