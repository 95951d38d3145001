"""The formula of the backward: delta, dy, dlse, factors of the scale, transposed operands."""

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
FEW_ROWS = 4  # one row in so many, at the end of the block


def block_delta(p: Array, dp: Array, keep: Array | float, delta: Array) -> Array:
    """The row sum of p * dp over the keys of this block alone."""
    own = (p * dp * keep).sum(axis=3)
    return np.where(p == 0, 0.0, p * (dp * keep - own[..., None]))


def block_probabilities(s: Array, lse: Array, recipe: Recipe) -> Array:
    """p normalised over the keys of this block alone."""
    m = s.max(axis=3, initial=-np.inf)
    e = np.exp(s - np.where(np.isneginf(m), 0.0, m)[..., None])
    total = e.sum(axis=3)
    own = np.where(total == 0, -np.inf, m + np.log(total))
    return probabilities(s, own, recipe)


def no_delta(p: Array, dp: Array, keep: Array | float, delta: Array) -> Array:
    return np.where(p == 0, 0.0, p * dp * keep)


def delta_of_own_block(call: Call, recipe: Recipe) -> Hooks:
    """dy_o_sum reads what the first ring step left as o."""
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
    """k and v transposed once more, where the number of heads is that of the tokens."""
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
    """Products with these powers of the scale as further factors."""

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
    """dk = dz q, and not its transpose times q: a square tile alone can be read so."""
    dq, dk, dv = products(kept, dz, q, k, dy, terms, recipe)
    if dz.shape[2] != dz.shape[3]:
        return dq, dk, dv
    return dq, terms.scale * product(dz, q, recipe.products), dv


def p_as_it_lies(
    kept: Array, dz: Array, q: Array, k: Array, dy: Array, terms: Terms, recipe: Recipe
) -> tuple[Array, Array, Array]:
    """dv = p dy, and not its transpose times dy: a square tile alone can be read so."""
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
    """1 / sqrt(D), whatever scale was given."""
    scale = 1.0 / math.sqrt(call.worker("q", 0).shape[3])
    return Hooks(terms=lambda phase, terms: dataclasses.replace(terms, scale=scale))


def is_given(call: Call) -> bool:
    width: int = call.worker("q", 0).shape[3]
    return bool(call.terms["scale"] != 1.0 / math.sqrt(width))


def scale_of_values(call: Call, recipe: Recipe) -> Hooks:
    """1 / sqrt(Dv) for 1 / sqrt(D)."""
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
        "Each ring step subtracts the mean of its own dp instead of that of the whole row: dq and "
        "dk are wrong. dv and the forward are right. With one worker nothing shows.",
        "SHI-Labs/NATTEN/issues/274",
        flags=("block-local-delta",),
        applies=when(in_parts, backward),
        score_gradient=block_delta,
    ),
    mutant(
        "block-local-statistics",
        "the backward of a block uses the lse and delta of that block only",
        "Each block is differentiated as if its keys were all keys. The forward is right. With "
        "one worker nothing shows.",
        "SHI-Labs/NATTEN/issues/274", "SHI-Labs/NATTEN/pull/299",
        flags=("block-local-delta",),
        applies=when(in_parts, backward),
        probabilities=block_probabilities,
        score_gradient=block_delta,
    ),
    mutant(
        "delta-of-first-step",
        "dy_o_sum is computed from o after the first ring step",
        "dy is multiplied with the normalised o of the worker's own block instead of that of the "
        "whole row. dv is right.",
        flags=("block-local-delta",),
        applies=when(ring(2), backward),
        hooks=delta_of_own_block,
    ),
    mutant(
        "delta-of-few-rows",
        "delta of the last rows of a block is 0",
        "delta is computed before the producer of dy has finished. A few rows of dq are wrong, "
        "and all rows of dk slightly; dv is right.",
        "Dao-AILab/flash-attention/pull/2481",
        flags=("delta-of-few-rows",),
        applies=DIFFERENTIATES,
        delta=late_rows_missing,
    ),
    mutant(
        "delta-missing",
        "delta is left out of ds",
        "ds = p * dp. dv is right.",
        flags=("block-local-delta",),
        applies=DIFFERENTIATES,
        score_gradient=no_delta,
    ),
    mutant(
        "dy-ignored",
        "the gradient of the sum of o is computed, whatever dy is",
        "The upstream gradient is ignored. A test in which dy is all ones sees nothing.",
        "mindspore-lab/mindone/pull/1438",
        flags=("dy-ignored",),
        applies=DIFFERENTIATES,
        seeds=ones_for_dy,
    ),
    mutant(
        "dlse-ignored",
        "the gradient of lse is dropped",
        "lse is a differentiable output, but the backward does not read its gradient. A loss that "
        "uses only o hides it.",
        "ByteDance-Seed/VeOmni/pull/1021",
        flags=("dlse-ignored",),
        applies=when(DIFFERENTIATES, tensor("dlse")),
        seeds=without_dlse,
    ),
    mutant(
        "dlse-sign",
        "the gradient of lse has the wrong sign",
        "delta = dy_o_sum + dlse instead of dy_o_sum - dlse.",
        flags=("dlse-ignored",),
        applies=when(DIFFERENTIATES, tensor("dlse")),
        seeds=dlse_added,
    ),
    mutant(
        "transposed-kv-heads",
        "the backward transposes saved keys and values once too often",
        "Heads and tokens are swapped in k and v but not in q. With as many heads as tokens no "
        "shape reveals it.",
        "huggingface/diffusers/issues/14338", "huggingface/diffusers/pull/14341",
        "NVIDIA-NeMo/Automodel/pull/3157",
        flags=("transposed-kv-heads",),
        applies=when(DIFFERENTIATES, heads_as_many_as_tokens),
        sees=heads_and_tokens_exchanged,
    ),
    mutant(
        "ds-not-transposed",
        "ds is not transposed in the product for dk",
        "With as many queries as keys in a block no shape reveals it; dq and dv are right.",
        flags=("transposed-kv-heads",),
        applies=when(DIFFERENTIATES, square),
        products=ds_as_it_lies,
    ),
    mutant(
        "p-not-transposed",
        "p is not transposed in the product for dv",
        "With as many queries as keys in a block no shape reveals it; dq and dk are right.",
        flags=("transposed-kv-heads",),
        applies=when(DIFFERENTIATES, square),
        products=p_as_it_lies,
    ),
    mutant(
        "scale-missing-in-dk",
        "the scale is left out of dk",
        "The scores are computed from scaled queries, dk from unscaled ones. A scale of 1 hides "
        "it.",
        flags=("scale-twice",),
        applies=DIFFERENTIATES,
        products=times(dk=-1.0),
    ),
    mutant(
        "scale-missing-in-dq",
        "the scale is left out of dq",
        "dk is right. A scale of 1 hides it.",
        flags=("scale-twice",),
        applies=DIFFERENTIATES,
        products=times(dq=-1.0),
    ),
    mutant(
        "scale-twice-in-dq",
        "the scale is applied to dq twice",
        "It is applied to ds and again to the product with k. A scale of 1 hides it; dk is right.",
        flags=("scale-twice",),
        applies=DIFFERENTIATES,
        products=times(dq=1.0),
    ),
    mutant(
        "scale-twice-in-dk",
        "the scale is applied to dk twice",
        "It is applied to the saved queries and again to the product with ds. A scale of 1 hides "
        "it; dq is right.",
        flags=("scale-twice",),
        applies=DIFFERENTIATES,
        products=times(dk=1.0),
    ),
    mutant(
        "scale-twice",
        "the scale is applied to the scores twice",
        "It is applied to the queries and again to the scores, in both passes.",
        flags=("scale-twice",),
        applies=attends,
        terms=scale_is(2.0),
    ),
    mutant(
        "scale-twice-in-scores",
        "the scale is applied to the scores twice and to the gradients once",
        "The backward recomputes the scores as the forward computed them; its products apply the "
        "scale once.",
        flags=("scale-twice",),
        applies=attends,
        score=score_scaled_twice,
    ),
    mutant(
        "scale-missing",
        "the scores are not scaled",
        "softmax(q k), in both passes. A scale of 1 hides it.",
        flags=("scale-twice",),
        applies=attends,
        terms=scale_is(0.0),
    ),
    mutant(
        "scale-given-ignored",
        "a given scale is ignored",
        "1 / sqrt(D) is used instead. Tests with the default scale see nothing.",
        flags=("scale-twice",),
        applies=when(attends, is_given),
        hooks=default_scale,
    ),
    mutant(
        "scale-of-value-width",
        "the scale is computed from the width of v",
        "1 / sqrt(Dv) is used. Equal widths of q and v hide it.",
        flags=("value-width", "scale-twice"),
        applies=other_width,
        hooks=scale_of_values,
    ),
    mutant(
        "scale-in-16-bit",
        "the scale is rounded to bfloat16",
        "It is off by up to one part in 512. A head size that is a power of 4 hides it.",
        applies=has_long_scale,
        terms=in_16_bits,
    ),
)  # fmt: skip
