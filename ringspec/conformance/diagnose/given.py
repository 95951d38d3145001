"""Diagnose a ring that was run outside the suite, for assertions in a project's own tests.

The suite makes its calls from its cases. Here a call is made from a checked problem and a layout, so that the results
of any program can be compared with those of the known bugs. A recipe says where a program rounds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from ringspec.compare.bounds import RECIPE_OF_FORMAT
from ringspec.conformance.cases.calls import QUERY_ROWS, held_by_workers
from ringspec.conformance.cases.model import Outputs
from ringspec.conformance.diagnose.match import diagnose, pairs_of
from ringspec.conformance.diagnose.summary import MOST_PAIRS, where
from ringspec.conformance.target.capabilities import FORMATS, Capabilities
from ringspec.conformance.target.protocol import Call
from ringspec.conformance.target.results import read_only
from ringspec.formats import narrower, store
from ringspec.problem.model import Problem
from ringspec.problem.options import DEFAULTS
from ringspec.recipes import RECIPES, Recipe
from ringspec.truth.problem import Upstream
from ringspec.truth.sharded import Tables, layout_tensors

PER_TOKEN = (*QUERY_ROWS, "segments_k")
DOCUMENTS = ("cu_seqlens", "cu_seqlens_k")


def diagnosis_of(
    problem: Problem,
    upstream: Upstream,
    tables: Tables,
    layout: str,
    recipe: Recipe,
    options: Mapping[str, Any],
    outputs: Outputs,
    failing: Collection[str],
) -> list[str]:
    """Return lines that name the known bug with the same ``outputs``, or else say where the outputs are wrong.

    ``tables``: the tokens of each worker. ``options``: keyword arguments of the problem, as arrays. ``outputs``: maps
    each name to a list of one array per worker, in slot order; lse is natural. ``failing``: the names of the wrong
    outputs. No lines are returned if nothing was found, if the problem is too large, or if the suite does not know the
    input format.

    The circulation (whether keys or queries travel) is not known, so with a backward pass both are tried. If the
    diagnosis raises an exception, a line says so; the exception is not passed on, so that the caller can still report
    the mismatch.
    """
    if recipe.inputs not in FORMATS or not set(failing) & set(outputs):
        return []
    try:
        claims = Capabilities(recipe=declared(recipe), formats=(recipe.inputs,))
        call = call_of_problem(problem, upstream, tables, layout, recipe, options)
        if pairs_of(call) > MOST_PAIRS:
            return []
        lines: list[str] = []
        for circulation in ("kv", "q") if upstream.dy is not None and call.workers > 1 else ("kv",):
            found = diagnose(claims, [replace(call, circulation=circulation)], [outputs])
            if found is not None and found.named is not None:
                return found.lines()
            lines = lines or ([] if found is None else found.lines())
        return lines + where(claims, [call], [outputs], failing)
    except Exception as error:
        return [f"none, because it ended with {type(error).__name__}: {error}"]


def declared(recipe: Recipe) -> Any:
    """Return a recipe as a target declares it: its name, or its changes to the usual recipe of the input format."""
    if RECIPES.get(recipe.name) == recipe:
        return recipe.name
    base = RECIPES[RECIPE_OF_FORMAT[recipe.inputs]]
    values = {f.name: getattr(recipe, f.name) for f in fields(recipe) if f.name != "note"}
    changes = {name: value for name, value in values.items() if value != getattr(base, name)}
    return {recipe.inputs: {"base": base.name, **changes}}


def call_of_problem(
    problem: Problem,
    upstream: Upstream,
    tables: Tables,
    layout: str,
    recipe: Recipe,
    options: Mapping[str, Any],
) -> Call:
    """Make a ring call for a problem in the layout ``tables``; with dy it includes the backward pass."""
    index = layout_tensors(problem, tables)
    whole: dict[str, Any] = {name: getattr(problem, name) for name in ("q", "k", "v")}
    whole |= {} if upstream.dy is None else {"dy": upstream.dy}
    whole = {name: store(x, recipe.inputs) for name, x in whole.items()}
    whole |= {} if upstream.dy is None or upstream.dlse is None else {"dlse": upstream.dlse}
    rows = {name: getattr(problem.rows, name) for name in ("bias", "mask", "keep")}
    given = rows | {"sinks": problem.terms.sinks} | {name: options.get(name) for name in PER_TOKEN}
    whole |= {name: np.asarray(x) for name, x in given.items() if x is not None}
    held = {name: held_by_workers(name, x, index) for name, x in whole.items()}
    # A call has one format for o and the gradients, so take the wider one; the recipe rounds to the narrower one.
    outputs, gradients = recipe.outputs, recipe.gradients
    wider = gradients if narrower(outputs, gradients) == outputs else outputs
    return Call(
        "given",
        "ring",
        ("forward",) if upstream.dy is None else ("forward", "backward"),
        tables.workers,
        held,
        terms_of(problem, options),
        {"inputs": recipe.inputs, "outputs": wider, "statistics": recipe.lse},
        layout,
        index_q=read_only(index["layout.q"]),
        index_k=read_only(index["layout.k"]),
        position_q=read_only(index["position.q"]),
        position_k=read_only(index["position.k"]),
    )


def terms_of(problem: Problem, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a call that are not tensors: ``scale``, and all that differ from their default."""
    known = ("causal", "window", "softcap", "dropout_p", "dropout_seed")
    terms = {name: getattr(problem.terms, name) for name in known}
    terms |= {"q_offset": options.get("q_offset", 0)}
    chosen = {name: value for name, value in terms.items() if value != DEFAULTS[name]}
    for name in DOCUMENTS:
        if options.get(name) is not None:
            chosen[name] = tuple(int(start) for start in np.asarray(options[name]))
    return {"scale": problem.terms.scale} | chosen
