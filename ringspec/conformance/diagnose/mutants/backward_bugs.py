"""Wrong formulas, mostly in the backward pass: delta, dy, dlse, scale factors, transposed operands.

A bug replaces one or a few of the functions that compute a ring; these functions are called pieces and are listed in
:class:`~ringspec.conformance.diagnose.mutants.hooks.Hooks`. p are the softmax weights, dp = dy v^T, and delta is the
row sum of dy * o, minus dlse. ds is the gradient of the scores, and dz that of the scores before the soft cap.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from ringspec.conformance.diagnose.mutants.conditions import (
    attends,
    backward,
    in_parts,
    ring,
    square,
    tensor,
    when,
)
from ringspec.conformance.diagnose.mutants.hooks import (
    At,
    Hooks,
    delta,
    probabilities,
    products,
    score,
)
from ringspec.conformance.diagnose.mutants.mutant import mutant
from ringspec.conformance.diagnose.mutants.ring import blocks_of, forward
from ringspec.conformance.target.protocol import Call
from ringspec.formats import product, round_to
from ringspec.problem.model import Array, Booleans, Columns, Rows, Terms
from ringspec.recipes import Recipe
from ringspec.spec.worker import KeySide, QuerySide

Products = Callable[..., tuple[Array, Array, Array]]
FEW_ROWS = 4  # the last 1 / FEW_ROWS of the rows of a block


def block_delta(p: Array, dp: Array, keep: Array | float, delta: Array) -> Array:
    """Compute ds with the row sum of p * dp over the keys of this block alone, instead of ``delta``."""
    own = (p * dp * keep).sum(axis=3)
    return np.where(p == 0, 0.0, p * (dp * keep - own[..., None]))


def block_probabilities(s: Array, lse: Array, recipe: Recipe) -> Array:
    """Compute p normalised over the keys of this block instead of all keys; ``lse`` is ignored."""
    m = s.max(axis=3, initial=-np.inf)
    e = np.exp(s - np.where(np.isneginf(m), 0.0, m)[..., None])
    total = e.sum(axis=3)
    own = np.where(total == 0, -np.inf, m + np.log(total))
    return probabilities(s, own, recipe)


def no_delta(p: Array, dp: Array, keep: Array | float, delta: Array) -> Array:
    return np.where(p == 0, 0.0, p * dp * keep)


def delta_of_own_block(call: Call, recipe: Recipe) -> Hooks:
    """Return pieces that compute delta from the o of the first ring step, not from the final o."""
    o, _ = forward(blocks_of(call, recipe), recipe, Hooks(computes=lambda at: at.own))

    def early(worker: int, dy: Array, whole: Array, dlse: Array, recipe: Recipe) -> Array:
        return delta(worker, dy, o[worker], dlse, recipe)

    return Hooks(delta=early)


def late_rows_missing(worker: int, dy: Array, o: Array, dlse: Array, recipe: Recipe) -> Array:
    whole = delta(worker, dy, o, dlse, recipe)
    n = whole.shape[2]
    whole[:, :, n - -(-n // FEW_ROWS) :] = 0.0
    return whole


def ones_for_dy(dy: Array, dlse: Array) -> tuple[Array, Array]:
    return np.ones(dy.shape), dlse


def without_dlse(dy: Array, dlse: Array) -> tuple[Array, Array]:
    return dy, np.zeros(dlse.shape)


def dlse_added(dy: Array, dlse: Array) -> tuple[Array, Array]:
    return dy, -dlse


def heads_and_tokens_exchanged(at: At) -> tuple[QuerySide, KeySide]:
    """Swap the head and token axes of k and v in the backward pass; needs as many heads as tokens."""
    key = at.key
    if at.phase == "forward" or key.k is None or key.v is None:
        return at.query, key
    k, v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (key.k, key.v))
    return at.query, dataclasses.replace(key, k=k, v=v)


def heads_as_many_as_tokens(call: Call) -> bool:
    if not attends(call):
        return False
    _, heads, tokens, _ = call.worker("k", 0).shape
    return heads == tokens


def times(dq: float = 0.0, dk: float = 0.0) -> Products:
    """Return a piece that computes dq and dk of a tile correctly, then multiplies them by powers of the scale."""

    def scaled(
        kept: Array, dz: Array, q: Array, k: Array, dy: Array, terms: Terms, recipe: Recipe
    ) -> tuple[Array, Array, Array]:
        a, b, c = products(kept, dz, q, k, dy, terms, recipe)
        scale = abs(terms.scale)
        return a * scale**dq, b * scale**dk, c

    return scaled


def ds_as_it_lies(
    kept: Array, dz: Array, q: Array, k: Array, dy: Array, terms: Terms, recipe: Recipe
) -> tuple[Array, Array, Array]:
    """Compute dk with dz in place of its transpose; a tile that is not square keeps the correct dk."""
    dq, dk, dv = products(kept, dz, q, k, dy, terms, recipe)
    if dz.shape[2] != dz.shape[3]:
        return dq, dk, dv
    return dq, terms.scale * product(dz, q, recipe.products), dv


def p_as_it_lies(
    kept: Array, dz: Array, q: Array, k: Array, dy: Array, terms: Terms, recipe: Recipe
) -> tuple[Array, Array, Array]:
    """Compute dv with p in place of its transpose; a tile that is not square keeps the correct dv."""
    dq, dk, dv = products(kept, dz, q, k, dy, terms, recipe)
    if kept.shape[2] != kept.shape[3]:
        return dq, dk, dv
    return dq, dk, product(kept, dy, recipe.products)


def scale_is(power: float) -> Callable[[str, Terms], Terms]:
    def changed(phase: str, terms: Terms) -> Terms:
        sign = math.copysign(1.0, terms.scale)
        return dataclasses.replace(terms, scale=sign * abs(terms.scale) ** power)

    return changed


def score_scaled_twice(
    q: Array,
    k: Array,
    allowed: Booleans,
    rows: Rows,
    columns: Columns,
    terms: Terms,
    recipe: Recipe,
) -> tuple[Array, Array | None]:
    twice = dataclasses.replace(terms, scale=terms.scale * abs(terms.scale))
    return score(q, k, allowed, rows, columns, twice, recipe)


def default_scale(call: Call, recipe: Recipe) -> Hooks:
    """Return pieces that always use the scale 1 / sqrt(D), whatever scale the caller passes."""
    scale = 1.0 / math.sqrt(call.worker("q", 0).shape[3])
    return Hooks(terms=lambda phase, terms: dataclasses.replace(terms, scale=scale))


def is_given(call: Call) -> bool:
    width: int = call.worker("q", 0).shape[3]
    return bool(call.terms["scale"] != 1.0 / math.sqrt(width))


def scale_of_values(call: Call, recipe: Recipe) -> Hooks:
    """Return pieces that multiply the scale by sqrt(D / Dv), as if it were derived from the head dimension of v."""
    ratio = math.sqrt(call.worker("q", 0).shape[3] / call.worker("v", 0).shape[3])
    return Hooks(terms=lambda phase, terms: dataclasses.replace(terms, scale=terms.scale * ratio))


def other_width(call: Call) -> bool:
    return attends(call) and call.worker("q", 0).shape[3] != call.worker("v", 0).shape[3]


def has_long_scale(call: Call) -> bool:
    return attends(call) and float(round_to(call.terms["scale"], "bfloat16")) != call.terms["scale"]


def in_16_bits(phase: str, terms: Terms) -> Terms:
    return dataclasses.replace(terms, scale=float(round_to(terms.scale, "bfloat16")))


DIFFERENTIATES = when(attends, backward)

BUGS = (
    mutant(
        "block-local-delta",
        "delta is summed over the keys of one block only",
        "Each ring step sums p * dp over its own keys instead of all keys of the row, so dq and "
        "dk are wrong. dv and the forward pass are correct. With one worker the bug has no "
        "effect.",
        "SHI-Labs/NATTEN/issues/274",
        flags=("block-local-delta",),
        applies=when(in_parts, backward),
        score_gradient=block_delta,
    ),
    mutant(
        "block-local-statistics",
        "the backward pass of a block uses the lse and delta of that block only",
        "Each block is differentiated as if the row had no other keys. The forward pass is "
        "correct. With one worker the bug has no effect.",
        "SHI-Labs/NATTEN/issues/274", "SHI-Labs/NATTEN/pull/299",
        flags=("block-local-delta",),
        applies=when(in_parts, backward),
        probabilities=block_probabilities,
        score_gradient=block_delta,
    ),
    mutant(
        "delta-of-first-step",
        "delta is computed from o after the first ring step",
        "dy is multiplied by the normalised o of the worker's own block instead of the final o. "
        "dv is correct.",
        flags=("block-local-delta",),
        applies=when(ring(2), backward),
        hooks=delta_of_own_block,
    ),
    mutant(
        "delta-of-few-rows",
        "delta is 0 in the last rows of a block",
        "delta is computed before the kernel that produces dy has finished. A few rows of dq are "
        "wrong, and all rows of dk slightly; dv is correct.",
        "Dao-AILab/flash-attention/pull/2481",
        flags=("delta-of-few-rows",),
        applies=DIFFERENTIATES,
        delta=late_rows_missing,
    ),
    mutant(
        "delta-missing",
        "delta is left out of ds",
        "ds is computed as p * dp. dv is correct.",
        flags=("block-local-delta",),
        applies=DIFFERENTIATES,
        score_gradient=no_delta,
    ),
    mutant(
        "dy-ignored",
        "dy is ignored: the gradient of the sum of o is computed",
        "The upstream gradient is replaced by ones. A test in which dy is all ones passes.",
        "mindspore-lab/mindone/pull/1438",
        flags=("dy-ignored",),
        applies=DIFFERENTIATES,
        seeds=ones_for_dy,
    ),
    mutant(
        "dlse-ignored",
        "the gradient of lse is dropped",
        "lse is a differentiable output, but the backward pass does not read its gradient. A "
        "loss that uses only o hides the bug.",
        "ByteDance-Seed/VeOmni/pull/1021",
        flags=("dlse-ignored",),
        applies=when(DIFFERENTIATES, tensor("dlse")),
        seeds=without_dlse,
    ),
    mutant(
        "dlse-sign",
        "the gradient of lse has the wrong sign",
        "delta is computed as dy_o_sum + dlse instead of dy_o_sum - dlse.",
        flags=("dlse-ignored",),
        applies=when(DIFFERENTIATES, tensor("dlse")),
        seeds=dlse_added,
    ),
    mutant(
        "transposed-kv-heads",
        "the backward pass transposes saved keys and values once too often",
        "Heads and tokens are swapped in k and v but not in q. With as many heads as tokens, no "
        "shape error reveals it.",
        "huggingface/diffusers/issues/14338", "huggingface/diffusers/pull/14341",
        "NVIDIA-NeMo/Automodel/pull/3157",
        flags=("transposed-kv-heads",),
        applies=when(DIFFERENTIATES, heads_as_many_as_tokens),
        sees=heads_and_tokens_exchanged,
    ),
    mutant(
        "ds-not-transposed",
        "ds is not transposed in the product for dk",
        "With as many queries as keys in a block, no shape error reveals it. dq and dv are "
        "correct.",
        flags=("transposed-kv-heads",),
        applies=when(DIFFERENTIATES, square),
        products=ds_as_it_lies,
    ),
    mutant(
        "p-not-transposed",
        "p is not transposed in the product for dv",
        "With as many queries as keys in a block, no shape error reveals it. dq and dk are "
        "correct.",
        flags=("transposed-kv-heads",),
        applies=when(DIFFERENTIATES, square),
        products=p_as_it_lies,
    ),
    mutant(
        "scale-missing-in-dk",
        "the scale is left out of dk",
        "The scores are computed from scaled queries, dk from unscaled ones. A scale of 1 hides "
        "the bug.",
        flags=("scale-twice",),
        applies=DIFFERENTIATES,
        products=times(dk=-1.0),
    ),
    mutant(
        "scale-missing-in-dq",
        "the scale is left out of dq",
        "dk is correct. A scale of 1 hides the bug.",
        flags=("scale-twice",),
        applies=DIFFERENTIATES,
        products=times(dq=-1.0),
    ),
    mutant(
        "scale-twice-in-dq",
        "the scale is applied to dq twice",
        "The scale is applied to ds and again to the product with k. dk is correct. A scale of 1 "
        "hides the bug.",
        flags=("scale-twice",),
        applies=DIFFERENTIATES,
        products=times(dq=1.0),
    ),
    mutant(
        "scale-twice-in-dk",
        "the scale is applied to dk twice",
        "The scale is applied to the saved queries and again to the product with ds. dq is "
        "correct. A scale of 1 hides the bug.",
        flags=("scale-twice",),
        applies=DIFFERENTIATES,
        products=times(dk=1.0),
    ),
    mutant(
        "scale-twice",
        "the scale is applied to the scores twice",
        "The scale is applied to the queries and again to the scores, in both passes.",
        flags=("scale-twice",),
        applies=attends,
        terms=scale_is(2.0),
    ),
    mutant(
        "scale-twice-in-scores",
        "the scale is applied to the scores twice and to the gradients once",
        "Both passes compute the scores with the scale applied twice; dq and dk apply it only "
        "once.",
        flags=("scale-twice",),
        applies=attends,
        score=score_scaled_twice,
    ),
    mutant(
        "scale-missing",
        "the scores are not scaled",
        "Both passes compute softmax(q k) without the scale. A scale of 1 hides the bug.",
        flags=("scale-twice",),
        applies=attends,
        terms=scale_is(0.0),
    ),
    mutant(
        "scale-given-ignored",
        "the scale that the caller passes is ignored",
        "1 / sqrt(D) is used instead. Tests with the default scale pass.",
        flags=("scale-twice",),
        applies=when(attends, is_given),
        hooks=default_scale,
    ),
    mutant(
        "scale-of-value-width",
        "the scale is computed from the width of v",
        "1 / sqrt(Dv) is used instead of 1 / sqrt(D). Equal widths of q and v hide the bug.",
        flags=("value-width", "scale-twice"),
        applies=other_width,
        hooks=scale_of_values,
    ),
    mutant(
        "scale-in-16-bit",
        "the scale is rounded to bfloat16",
        "Its relative error is at most 1/512. A head size that is a power of 4 hides the bug.",
        applies=has_long_scale,
        terms=in_16_bits,
    ),
)  # fmt: skip
