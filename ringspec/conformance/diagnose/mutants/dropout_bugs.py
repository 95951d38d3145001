"""Dropout masks that are not replayed, applied in the wrong place, or drawn at the wrong coordinates.

A bug replaces one or a few of the functions that compute a ring; these functions are called pieces and are listed in
:class:`~ringspec.conformance.diagnose.mutants.hooks.Hooks`.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ringspec.conformance.diagnose.mutants.conditions import (
    attends,
    backward,
    drops,
    forward,
    ring,
    when,
)
from ringspec.conformance.diagnose.mutants.hooks import At, Hooks, keep, score_gradient
from ringspec.conformance.diagnose.mutants.mutant import mutant
from ringspec.conformance.diagnose.mutants.wrong_masks import local
from ringspec.conformance.target.protocol import Call
from ringspec.formats import round_to, row_sum
from ringspec.problem.model import Array, Columns, Rows, Terms
from ringspec.recipes import Recipe
from ringspec.spec.online_softmax import SoftmaxState, absorb

Factor = Array | float


def other_seed(at: At, rows: Rows, columns: Columns, terms: Terms, batch: int) -> Factor:
    if at.phase == "backward":
        terms = dataclasses.replace(terms, dropout_seed=terms.dropout_seed + 1)
    return keep(at, rows, columns, terms, batch)


def everything_in_backward(
    at: At, rows: Rows, columns: Columns, terms: Terms, batch: int
) -> Factor:
    return 1.0 if at.phase == "backward" else keep(at, rows, columns, terms, batch)


def not_rescaled(at: At, rows: Rows, columns: Columns, terms: Terms, batch: int) -> Factor:
    return keep(at, rows, columns, terms, batch) * (1.0 - terms.dropout_p)


def at_local_coordinates(call: Call, recipe: Recipe) -> Hooks:
    counted = local(call)

    def local_keep(at: At, rows: Rows, columns: Columns, terms: Terms, batch: int) -> Factor:
        return keep(at, *counted(rows, columns), terms, batch)

    return Hooks(keep=local_keep)


def first_head(at: At, rows: Rows, columns: Columns, terms: Terms, batch: int) -> Factor:
    factor = keep(at, rows, columns, terms, batch)
    return factor if isinstance(factor, float) else np.broadcast_to(factor[:1, :1], factor.shape)


def sum_after_dropout(
    state: SoftmaxState, s: Array, v: Array, keep: Factor, recipe: Recipe
) -> SoftmaxState:
    """Absorb one tile into the softmax state, but leave dropped weights out of the softmax sum l."""
    right = absorb(state, s, v, keep, recipe)
    shift = np.where(np.isneginf(right.m), 0.0, right.m)
    c = round_to(np.exp(state.m - shift), recipe.statistics)
    e = round_to(np.exp(s - shift[..., None]), recipe.statistics)
    l = round_to(c * state.l + row_sum(e * keep, recipe.statistics), recipe.statistics)
    return SoftmaxState(right.m, l, right.o)


def dp_without_keep(p: Array, dp: Array, keep: Factor, delta: Array) -> Array:
    return score_gradient(p, dp, 1.0, delta)


def dropped_p(p: Array, dp: Array, keep: Factor, delta: Array) -> Array:
    return score_gradient(p * keep, dp, 1.0, delta)


def seeded(call: Call) -> bool:
    """Tell whether the call draws its dropout mask from counters; the alternative is a mask from the caller."""
    return drops(call) and "keep" not in call.tensors


DROPS = when(attends, drops)

BUGS = (
    mutant(
        "dropout-mask-not-replayed",
        "the backward pass draws a different dropout mask from the forward pass",
        "The state of the random generator is not passed on.",
        "zhuzilin/ring-flash-attention/issues/36",
        flags=("dropout-mask-not-replayed",),
        applies=when(attends, seeded, backward),
        keep=other_seed,
    ),
    mutant(
        "dropout-missing-in-backward",
        "the backward pass runs without dropout",
        "p and dp are computed as in attention without dropout.",
        flags=("dropout-missing-in-dp", "dropout-mask-not-replayed"),
        applies=when(DROPS, backward),
        keep=everything_in_backward,
    ),
    mutant(
        "dropout-missing-in-dp",
        "the dropout mask is not applied to dp",
        "ds is p * (dp - delta) instead of p * (keep * dp - delta), where keep is the dropout "
        "factor. dv is correct.",
        "aws-neuron/nki-samples/pull/81",
        flags=("dropout-missing-in-dp",),
        applies=when(DROPS, backward),
        score_gradient=dp_without_keep,
    ),
    mutant(
        "dropped-p-in-ds",
        "the softmax gradient uses p after dropout",
        "ds is keep * p * (dp - delta) instead of p * (keep * dp - delta), where keep is the "
        "dropout factor. Dropped entries get no gradient at all.",
        "aws-neuron/nki-samples/pull/81",
        flags=("dropout-missing-in-dp",),
        applies=when(DROPS, backward),
        score_gradient=dropped_p,
    ),
    mutant(
        "dropout-before-denominator",
        "the softmax sum is taken after dropout",
        "The weights of the kept entries sum to 1, and a row whose entries are all dropped is "
        "treated as empty.",
        "aws-neuron/nki-samples/pull/80",
        flags=("dropout-before-denominator",),
        applies=when(DROPS, forward),
        absorb_tile=sum_after_dropout,
    ),
    mutant(
        "dropout-not-rescaled",
        "kept entries are not divided by 1 - dropout_p",
        "On average, o and the gradients are too small by the factor 1 - dropout_p.",
        applies=DROPS,
        keep=not_rescaled,
    ),
    mutant(
        "dropout-local-counters",
        "the dropout mask is drawn at indices within the block",
        "Every pair of blocks has the same dropout mask. With one worker the bug has no effect. "
        "Tests that check only averages pass.",
        "Dao-AILab/flash-attention/issues/2088",
        flags=("dropout-mask-not-replayed",),
        applies=when(ring(2), seeded),
        hooks=at_local_coordinates,
    ),
    mutant(
        "dropout-of-first-head",
        "all heads and batch entries use the dropout mask of the first",
        "The counter of the random generator leaves out head and batch. Tests that check only "
        "averages pass.",
        flags=("dropout-mask-not-replayed",),
        applies=when(attends, seeded),
        keep=first_head,
    ),
)  # fmt: skip
