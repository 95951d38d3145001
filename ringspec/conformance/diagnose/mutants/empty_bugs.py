"""Rows without visible keys, finite stand-ins for -inf, softmax maxima, and memory that was never written.

A bug replaces one or a few of the functions that compute a ring; these functions are called pieces and are listed in
:class:`~ringspec.conformance.diagnose.mutants.hooks.Hooks`. A part is the partial result of one block of keys. A
padding slot is a place in a worker's block that holds no token; a padding token belongs to no document.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ringspec.conformance.diagnose.mutants.conditions import (
    attends,
    backward,
    either,
    forward,
    hides,
    packed,
    padded,
    ring,
    when,
)
from ringspec.conformance.diagnose.mutants.hooks import At, merged, score
from ringspec.conformance.diagnose.mutants.mutant import guise, mutant
from ringspec.formats import product, round_to, row_sum
from ringspec.problem.model import Array, Booleans, Columns, Rows, Terms
from ringspec.recipes import Recipe
from ringspec.spec.online_softmax import SoftmaxState, absorb, finish
from ringspec.spec.worker import QuerySide

SENTINEL = -5e4


def unguarded_tile(
    state: SoftmaxState, s: Array, v: Array, keep: Array | float, recipe: Recipe
) -> SoftmaxState:
    right = absorb(state, s, v, keep, recipe)
    lost = np.isneginf(right.m)
    l = np.where(lost, np.nan, right.l)
    return SoftmaxState(right.m, l, np.where(lost[..., None], np.nan, right.o))


def tile_with_maximum_of_zero(
    state: SoftmaxState, s: Array, v: Array, keep: Array | float, recipe: Recipe
) -> SoftmaxState:
    """Absorb one tile; while a row has not seen a key, its running maximum is 0 instead of -inf."""
    right = absorb(state, s, v, keep, recipe)
    return SoftmaxState(np.where(np.isneginf(right.m), 0.0, right.m), right.l, right.o)


def without_maximum(
    state: SoftmaxState, s: Array, v: Array, keep: Array | float, recipe: Recipe
) -> SoftmaxState:
    e = round_to(np.exp(s), recipe.statistics)
    l = round_to(state.l + row_sum(e, recipe.statistics), recipe.statistics)
    o = state.o + product(round_to(e * keep, recipe.p), v, recipe.products)
    return SoftmaxState(np.zeros(l.shape), l, o)


def finite_lse(at: At, part: SoftmaxState, recipe: Recipe) -> SoftmaxState:
    """Give rows without visible keys lse = 0 and o = 1, which stands for unwritten memory."""
    empty = part.l == 0
    o = np.where(empty[..., None], 1.0, part.o)
    return SoftmaxState(np.where(empty, 0.0, part.m), np.where(empty, 1.0, part.l), o)


def finite_lse_and_zeros(at: At, part: SoftmaxState, recipe: Recipe) -> SoftmaxState:
    empty = part.l == 0
    return SoftmaxState(np.where(empty, 0.0, part.m), np.where(empty, 1.0, part.l), part.o)


def plus_infinity(at: At, part: SoftmaxState, recipe: Recipe) -> SoftmaxState:
    empty = part.l == 0
    return SoftmaxState(np.where(empty, np.inf, part.m), np.where(empty, 1.0, part.l), part.o)


def infinity_takes_all(
    at: At, running: SoftmaxState, part: SoftmaxState, recipe: Recipe
) -> SoftmaxState:
    """Merge two softmax states; where the lse of one is +inf, the result is that state alone."""
    result = merged(at, running, part, recipe)
    for one in (part, running):
        all_of_it = np.isposinf(one.m)
        result = SoftmaxState(
            np.where(all_of_it, one.m, result.m),
            np.where(all_of_it, one.l, result.l),
            np.where(all_of_it[..., None], one.o, result.o),
        )
    return result


def zeros_for_nan(
    worker: int, running: SoftmaxState, sinks: Array | None, recipe: Recipe
) -> tuple[Array, Array]:
    o, lse = finish(running, sinks, recipe)
    return np.where(np.isnan(lse)[..., None], 0.0, o), lse


def maximum_of_zero(at: At, part: SoftmaxState, recipe: Recipe) -> SoftmaxState:
    """Set the running maximum of rows without visible keys to 0."""
    return SoftmaxState(np.where(part.l == 0, 0.0, part.m), part.l, part.o)


def zero_over_zero(
    worker: int, running: SoftmaxState, sinks: Array | None, recipe: Recipe
) -> tuple[Array, Array]:
    o, lse = finish(running, sinks, recipe)
    return np.where(np.isneginf(lse)[..., None], np.nan, o), lse


def finite_sentinel(
    q: Array,
    k: Array,
    allowed: Booleans,
    rows: Rows,
    columns: Columns,
    terms: Terms,
    recipe: Recipe,
) -> tuple[Array, Array | None]:
    """Compute scores with -5e4 instead of -inf for masked pairs; only padding slots get -inf."""
    s, t = score(q, k, allowed, rows, columns, terms, recipe)
    real = (rows.index >= 0)[:, None] & (columns.index >= 0)[None, :]
    return np.where(np.isneginf(s) & real, SENTINEL, s), t


def nan_in_empty_rows(s: Array, lse: Array, recipe: Recipe) -> Array:
    """Compute p = exp(s - lse) without a guard, which gives NaN in rows without visible keys."""
    return round_to(np.exp(s - lse[..., None]), recipe.statistics)


def garbage_in_padding(phase: str, side: QuerySide) -> QuerySide:
    """Set delta to NaN, as in unwritten memory, in the rows of padding slots and padding tokens."""
    if phase == "forward":
        return side
    assert side.rows is not None and side.row_term is not None and side.lse is not None
    padding = (side.rows.index < 0)[None, :]
    if side.rows.segment is not None:
        padding = padding | (side.rows.segment < 0)
    delta = np.where(padding[:, None] & np.isneginf(side.lse), np.nan, side.row_term)
    return dataclasses.replace(side, row_term=delta)


def unguarded_gradient(p: Array, dp: Array, keep: Array | float, delta: Array) -> Array:
    return p * (dp * keep - delta[..., None])


BUGS = (
    mutant(
        "masked-block-nan",
        "a fully masked block turns the running softmax into NaN",
        "Rescaling computes (-inf) - (-inf) for a row that has had no visible key yet.",
        "pytorch/pytorch/pull/130014",
        flags=("masked-block-nan",),
        applies=when(attends, forward, hides),
        absorb_tile=unguarded_tile,
        guises=(
            guise(
                "a guarded division sets o to 0; lse stays NaN",
                when(attends, forward, hides),
                absorb_tile=unguarded_tile,
                finish=zeros_for_nan,
            ),
        ),
    ),
    mutant(
        "finite-lse-of-empty",
        "a block without visible keys has a finite lse",
        "The backend never writes o and lse of such rows, so the merge gives weight to whatever "
        "the memory holds.",
        "vllm-project/vllm/pull/49294", "flashinfer-ai/flashinfer/issues/4452",
        flags=("finite-lse-of-empty",),
        applies=when(attends, forward, hides),
        part=finite_lse,
        guises=(
            guise("o is zero", when(attends, forward, hides), part=finite_lse_and_zeros),
        ),
    ),
    mutant(
        "plus-inf-lse-of-empty",
        "a block without visible keys has lse = +inf",
        "The infinite lse takes all the weight in a merge, or turns it into NaN.",
        "Dao-AILab/flash-attention/pull/978", "deepseek-ai/FlashMLA/pull/77",
        flags=("plus-inf-lse-of-empty",),
        applies=when(attends, forward, hides),
        part=plus_infinity,
        guises=(
            guise(
                "the block takes all the weight",
                when(attends, forward, hides),
                part=plus_infinity,
                merge=infinity_takes_all,
            ),
        ),
    ),
    mutant(
        "running-max-of-masked-block",
        "a fully masked block sets the running maximum to 0",
        "If all scores of a row are far below 0, its weights then underflow to 0. Scores near 0 "
        "hide the bug.",
        "Dao-AILab/flash-attention/issues/2082",
        flags=("running-max-of-masked-block",),
        applies=when(ring(2), forward, hides),
        part=maximum_of_zero,
        guises=(
            guise(
                "a fully masked tile within a block is enough",
                when(attends, forward, hides),
                absorb_tile=tile_with_maximum_of_zero,
            ),
        ),
    ),
    mutant(
        "empty-row-nan",
        "a row without visible keys gives NaN",
        "o is divided by a softmax sum of 0.",
        "tracel-ai/burn/issues/4694", "tracel-ai/burn/pull/4697",
        flags=("empty-row-nan",),
        applies=when(attends, forward),
        finish=zero_over_zero,
    ),
    mutant(
        "empty-row-nan-in-backward",
        "a row without visible keys puts NaN into the gradients",
        "The backward pass computes p of this row as exp((-inf) - (-inf)). The forward pass is "
        "correct.",
        "NVIDIA/cudnn-frontend/issues/676",
        flags=("empty-row-nan",),
        applies=when(attends, backward),
        probabilities=nan_in_empty_rows,
    ),
    mutant(
        "padding-nan",
        "delta of padding rows is never written, but contributes to dk",
        "A padding row contributes 0 times whatever the memory holds, so a NaN there makes dk of "
        "the whole block NaN. Memory that happens to be zero hides the bug.",
        "tile-ai/tilelang/pull/2461", "NVIDIA/TransformerEngine/issues/2186",
        "fla-org/flash-linear-attention/pull/892",
        flags=("padding-nan",),
        applies=when(attends, backward, either(padded, packed)),
        queries=garbage_in_padding,
        score_gradient=unguarded_gradient,
    ),
    mutant(
        "sentinel",
        "the mask uses -5e4 instead of -inf",
        "Masked keys get weight if the visible scores are near or below -5e4, and the lse of a "
        "row without visible keys is finite. In all other rows, ordinary scores hide the bug.",
        "flashinfer-ai/flashinfer/pull/4401", "flashinfer-ai/flashinfer/issues/4452",
        flags=("sentinel",),
        applies=when(attends, hides),
        score=finite_sentinel,
    ),
    mutant(
        "no-maximum",
        "the softmax does not subtract the row maximum",
        "In float32, exp overflows for scores above about 88 and underflows below about -103. "
        "Scores near 0 hide the bug.",
        flags=("merge-overflow",),
        applies=when(attends, forward),
        absorb_tile=without_maximum,
    ),
)  # fmt: skip
