"""Rounding in the wrong place, in the wrong direction, or to the wrong format.

A bug replaces one or a few of the functions that compute a ring; these functions are called pieces and are listed in
:class:`~ringspec.conformance.diagnose.mutants.hooks.Hooks`. A recipe says where a program rounds (its rounding points)
and to which formats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from ringspec.conformance.diagnose.mutants.conditions import (
    attends,
    backward,
    forward,
    merges,
    ring,
    when,
)
from ringspec.conformance.diagnose.mutants.hooks import Hooks, Results, probabilities
from ringspec.conformance.diagnose.mutants.mutant import Make, guise, mutant
from ringspec.conformance.target.protocol import Call
from ringspec.formats import format_of, product, round_to, row_sum
from ringspec.problem.model import Array
from ringspec.recipes import Recipe
from ringspec.spec.online_softmax import SoftmaxState, finish, finite_shift

NARROW = ("bfloat16", "float16")


def truncated(x: Array, format: str) -> Array:
    """Truncate towards zero to the significand length of a format."""
    with np.errstate(all="ignore"):
        part, exponent = np.frexp(x)
        bits = format_of(format).precision
        cut = np.ldexp(np.trunc(np.ldexp(part, bits)), exponent - bits)
    return np.where(np.isfinite(x), cut, x)


def narrow_of(recipe: Recipe) -> str:
    """Return the 16-bit format that a kernel would use: its input format if that has 16 bits, else bfloat16."""
    return recipe.inputs if recipe.inputs in NARROW else "bfloat16"


def rounding(*points: str) -> Callable[[Recipe], Recipe]:
    """Return a function that changes a recipe so that it rounds to 16 bits at ``points``."""

    def changed(recipe: Recipe) -> Recipe:
        return recipe.replace(**dict.fromkeys(points, narrow_of(recipe)))

    return changed


PARTIAL = ("block_o", "carried_o", "block_gradients", "carried_dq", "carried_dkv")


def partials(recipe: Recipe) -> Recipe:
    return rounding(*PARTIAL)(recipe).replace(merge_order="normalised")


def cut_p(
    state: SoftmaxState, s: Array, v: Array, keep: Array | float, recipe: Recipe
) -> SoftmaxState:
    """Absorb one tile into the softmax state, with P truncated instead of rounded."""
    m = np.maximum(state.m, s.max(axis=3, initial=-np.inf))
    shift = finite_shift(m)
    c = round_to(np.exp(state.m - shift), recipe.statistics)
    e = round_to(np.exp(s - shift[..., None]), recipe.statistics)
    l = round_to(c * state.l + row_sum(e, recipe.statistics), recipe.statistics)
    o = c[..., None] * state.o + product(truncated(e * keep, recipe.p), v, recipe.products)
    return SoftmaxState(m, l, round_to(o, recipe.products))


def narrow_exponentials(
    state: SoftmaxState, s: Array, v: Array, keep: Array | float, recipe: Recipe
) -> SoftmaxState:
    """Absorb one tile into the softmax state, with exp(s - m) rounded to 16 bits before the sum."""
    m = np.maximum(state.m, s.max(axis=3, initial=-np.inf))
    shift = finite_shift(m)
    c = round_to(np.exp(state.m - shift), recipe.statistics)
    e = round_to(np.exp(s - shift[..., None]), narrow_of(recipe))
    l = round_to(c * state.l + row_sum(e, recipe.statistics), recipe.statistics)
    o = c[..., None] * state.o + product(round_to(e * keep, recipe.p), v, recipe.products)
    return SoftmaxState(m, l, round_to(o, recipe.products))


def narrow_probabilities(s: Array, lse: Array, recipe: Recipe) -> Array:
    return round_to(probabilities(s, lse, recipe), narrow_of(recipe))


def cut_operand(which: str) -> Callable[[str, Array, Recipe], Array]:
    def operand(name: str, x: Array, recipe: Recipe) -> Array:
        cut = truncated if name == which else round_to
        return cut(x, getattr(recipe, name))

    return operand


def cut_results(names: tuple[str, ...], *points: str) -> Make:
    """Return a function that makes pieces that truncate the results ``names`` instead of rounding them.

    ``points``: rounding points that get a wide format, so that no result is rounded before it is truncated.
    """

    def hooks(call: Call, recipe: Recipe) -> Hooks:
        format = call.formats["outputs"]

        def cut(results: Results) -> Results:
            return results | {
                name: [truncated(x, format) for x in results[name]]
                for name in names
                if name in results
            }

        wide = "float64" if recipe.products == "float64" else "float32"
        return Hooks(recipe=lambda used: used.replace(**dict.fromkeys(points, wide)), results=cut)

    return hooks


def cut_before_backward(call: Call, recipe: Recipe) -> Hooks:
    """Return pieces that truncate the gradients, and compute delta from a truncated o."""
    made = cut_results(("dq", "dk", "dv"), "outputs", "gradients")(call, recipe)

    def finished(
        worker: int, running: SoftmaxState, sinks: Array | None, used: Recipe
    ) -> tuple[Array, Array]:
        o, lse = finish(running, sinks, used)
        return truncated(o, call.formats["outputs"]), lse

    return dataclasses.replace(made, finish=finished)


def dq_in_bfloat16(results: Results) -> Results:
    if "dq" not in results:
        return results
    return results | {"dq": [round_to(x, "bfloat16") for x in results["dq"]]}


def flushed(call: Call, recipe: Recipe) -> Hooks:
    """Return pieces that set results to 0 if they are subnormal in their format."""
    least = 2.0 ** format_of(call.formats["outputs"]).min_exponent

    def flush(results: Results) -> Results:
        return results | {
            name: [np.where(np.abs(x) < least, 0.0, x) for x in results[name]]
            for name in ("o", "dq", "dk", "dv")
            if name in results
        }

    return Hooks(results=flush)


def has_wider_results(call: Call) -> bool:
    return call.formats["outputs"] != "bfloat16"


KEPT = "the results are in bfloat16 anyway"
LAST_BIT = "recipes do not declare exp and the order of float32 sums, so the last bit of an operand is not checked"
MAY_FLUSH = "the bounds allow a kernel to flush values that are subnormal in float32"

BUGS = (
    mutant(
        "partials-rounded-to-16-bit",
        "each block's results are rounded to 16 bits on every ring step",
        "A kernel call returns o, dq, dk and dv of its block in the dtype of its inputs, and "
        "every addition rounds them again. The error grows with the number of workers.",
        "zhuzilin/ring-flash-attention/issues/42", "NVIDIA/TransformerEngine/pull/821",
        "Dao-AILab/flash-attention/pull/2723",
        flags=("partials-rounded-to-16-bit",),
        applies=lambda call: True,
        recipe=partials,
        guises=(
            guise(
                "only o of the block is rounded",
                when(attends, forward),
                recipe=rounding("block_o"),
            ),
            guise(
                "only the gradients of the block are rounded",
                when(attends, backward),
                recipe=rounding("block_gradients"),
            ),
            guise(
                "partial results are merged unnormalised, as (m, l, o)",
                ring(2),
                recipe=rounding(*PARTIAL),
            ),
        ),
    ),
    mutant(
        "dkv-accumulated-in-16-bit",
        "dk and dv are accumulated in 16 bits",
        "Every addition between ring steps rounds to the dtype of the inputs.",
        "cornstarch-org/Cornstarch/pull/66", "NVIDIA/TransformerEngine/pull/821",
        flags=("partials-rounded-to-16-bit",),
        applies=when(ring(2), backward),
        recipe=rounding("carried_dkv"),
    ),
    mutant(
        "dq-accumulated-in-16-bit",
        "dq is accumulated in 16 bits",
        "Every addition between ring steps rounds to the dtype of the inputs; dk and dv are "
        "correct.",
        "NVIDIA/TransformerEngine/pull/821",
        flags=("partials-rounded-to-16-bit",),
        applies=when(ring(2), backward),
        recipe=rounding("carried_dq"),
    ),
    mutant(
        "merge-in-16-bit",
        "partial results are merged in 16 bits",
        "Products and sums of the merge are rounded to the dtype of the inputs.",
        "NVIDIA/TransformerEngine/pull/821",
        flags=("partials-rounded-to-16-bit",),
        applies=when(merges, forward),
        recipe=rounding("merge", "carried_o"),
        guises=(
            guise("only o is rounded, between steps", when(ring(2), forward), recipe=rounding("carried_o")),
        ),
    ),
    mutant(
        "statistics-in-16-bit",
        "exp(s - m) and its running sum l are kept in 16 bits",
        "exp(s - m), l and the lse computed from them are rounded to the dtype of the inputs.",
        flags=("partials-rounded-to-16-bit",),
        applies=lambda call: True,
        recipe=rounding("statistics"),
        guises=(
            guise(
                "only the exponentials are rounded",
                attends,
                absorb_tile=narrow_exponentials,
                probabilities=narrow_probabilities,
            ),
        ),
    ),
    mutant(
        "scores-in-16-bit",
        "the scores are rounded to 16 bits before the softmax",
        "If a score of 256 is off by one part in 256, its weight is off by a factor of e.",
        applies=attends,
        recipe=rounding("scores"),
    ),
    mutant(
        "lse-in-16-bit",
        "the backward pass reads an lse that was rounded to 16 bits",
        "The rounding error of lse changes every p = exp(s - lse) of a row by the same factor.",
        applies=when(attends, backward),
        recipe=rounding("backward_lse"),
        guises=(
            guise(
                "the forward pass also returns the rounded lse",
                when(attends, forward),
                recipe=rounding("backward_lse", "lse"),
            ),
        ),
    ),
    mutant(
        "delta-in-16-bit",
        "delta is rounded to 16 bits",
        "All entries of a row of ds use the same inaccurate delta; dv is correct.",
        applies=when(attends, backward),
        recipe=rounding("delta", "dy_o_products"),
        guises=(
            guise("only the sum of dy * o is rounded", when(attends, backward), recipe=rounding("delta")),
            guise(
                "only the products dy * o are rounded",
                when(attends, backward),
                recipe=rounding("dy_o_products"),
            ),
        ),
    ),
    mutant(
        "dtype-hard-coded",
        "dq is cast to bfloat16, whatever the dtype of the inputs",
        "float16 loses three significant bits and float32 sixteen; dk and dv are not affected.",
        "zhuzilin/ring-flash-attention/pull/87",
        flags=("dtype-hard-coded",),
        applies=when(attends, backward, has_wider_results),
        results=dq_in_bfloat16,
        unseen={"bf16": KEPT},
    ),
    mutant(
        "truncated-p",
        "P is truncated to 16 bits instead of rounded",
        "Every weight is too small, on average by half a unit in the last place. No bound on "
        "single values detects the resulting bias of o and dv.",
        flags=("double-rounding",),
        applies=attends,
        absorb_tile=cut_p,
        operand=cut_operand("p"),
        guises=(
            guise("in the backward pass only", when(attends, backward), operand=cut_operand("p")),
        ),
        unseen={"float32": LAST_BIT},
    ),
    mutant(
        "truncated-ds",
        "dS is truncated to 16 bits instead of rounded",
        "Every entry is slightly too close to 0, so dq and dk are too small.",
        flags=("double-rounding",),
        applies=when(attends, backward),
        operand=cut_operand("ds"),
        unseen={"float32": LAST_BIT},
    ),
    mutant(
        "truncated-results",
        "results are truncated to their dtype instead of rounded",
        "o and the gradients lose up to one unit in the last place, always towards 0.",
        flags=("double-rounding",),
        applies=attends,
        hooks=cut_results(("o", "dq", "dk", "dv"), "outputs", "gradients"),
        guises=(
            guise(
                "only the gradients are truncated",
                when(attends, backward),
                cut_results(("dq", "dk", "dv"), "gradients"),
            ),
            guise(
                "the backward pass also reads the truncated o",
                when(attends, forward, backward),
                cut_before_backward,
            ),
        ),
    ),
    mutant(
        "subnormal-flushed",
        "results below the smallest normal number become 0",
        "The processor flushes subnormal numbers to zero. Ordinary values hide the bug.",
        flags=("subnormal-flushed",),
        applies=lambda call: True,
        hooks=flushed,
        unseen={"bf16": MAY_FLUSH},
    ),
)  # fmt: skip
