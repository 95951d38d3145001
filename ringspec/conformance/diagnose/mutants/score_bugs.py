"""Soft cap and bias: applied in the wrong order or columns, or with wrong gradients.

A bug replaces one or a few of the functions that compute a ring; these functions are called pieces and are listed in
:class:`~ringspec.conformance.diagnose.mutants.hooks.Hooks`. dz is the gradient of the scores before the soft cap.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ringspec.conformance.diagnose.mutants.conditions import (
    attends,
    backward,
    ring,
    tensor,
    term,
    when,
)
from ringspec.conformance.diagnose.mutants.hooks import At, Hooks, add, capped, finite_bias, score
from ringspec.conformance.diagnose.mutants.mutant import mutant
from ringspec.conformance.diagnose.mutants.wrong_masks import slots, taken
from ringspec.conformance.target.protocol import Call
from ringspec.formats import product, round_to
from ringspec.problem.model import Array, Booleans, Columns, Rows, Terms
from ringspec.recipes import Recipe

Scores = tuple[Array, Array | None]


def hidden(z: Array, allowed: Booleans, recipe: Recipe) -> Array:
    return np.where(allowed, round_to(z, recipe.scores), -np.inf)


def constant_slope(ds: Array, t: Array) -> Array:
    return ds


def no_cap_in_backward(phase: str, terms: Terms) -> Terms:
    return terms if phase == "forward" else dataclasses.replace(terms, softcap=None)


def bias_after_cap(
    q: Array, k: Array, allowed: Booleans, rows: Rows, columns: Columns, terms: Terms, recipe: Recipe
) -> Scores:  # fmt: skip
    z, t = capped(terms.scale * product(q, k.swapaxes(2, 3), recipe.products), terms, recipe)
    return hidden(z + finite_bias(rows, columns), allowed, recipe), t


def scale_after_cap(
    q: Array, k: Array, allowed: Booleans, rows: Rows, columns: Columns, terms: Terms, recipe: Recipe
) -> Scores:  # fmt: skip
    z, t = capped(product(q, k.swapaxes(2, 3), recipe.products), terms, recipe)
    return hidden(terms.scale * z + finite_bias(rows, columns), allowed, recipe), t


def mask_before_cap(
    q: Array, k: Array, allowed: Booleans, rows: Rows, columns: Columns, terms: Terms, recipe: Recipe
) -> Scores:  # fmt: skip
    """Mask the scores before the soft cap, which turns -inf into -softcap.

    Places in a block that hold no token keep -inf.
    """
    s, t = score(q, k, allowed, rows, columns, terms, recipe)
    if terms.softcap is None:
        return s, t
    real = (rows.index >= 0)[:, None] & (columns.index >= 0)[None, :]
    return np.where(np.isneginf(s) & real, -terms.softcap, s), t


def not_multiplied_back(
    q: Array, k: Array, allowed: Booleans, rows: Rows, columns: Columns, terms: Terms, recipe: Recipe
) -> Scores:  # fmt: skip
    s, t = score(q, k, allowed, rows, columns, terms, recipe)
    return (s if t is None else hidden(t, allowed, recipe)), t


def bias_before_scale(
    q: Array, k: Array, allowed: Booleans, rows: Rows, columns: Columns, terms: Terms, recipe: Recipe
) -> Scores:  # fmt: skip
    z = product(q, k.swapaxes(2, 3), recipe.products) + finite_bias(rows, columns)
    z, t = capped(terms.scale * z, terms, recipe)
    return hidden(z, allowed, recipe), t


def bias_at_local_columns(call: Call, recipe: Recipe) -> Hooks:
    on_k = slots(call.index_k)

    def local_bias(
        q: Array, k: Array, allowed: Booleans, rows: Rows, columns: Columns, terms: Terms,
        recipe: Recipe,
    ) -> Scores:  # fmt: skip
        local = dataclasses.replace(columns, index=taken(on_k, columns.index)[0])
        return score(q, k, allowed, rows, local, terms, recipe)

    return Hooks(score=local_bias)


def first_of_broadcast(dz: Array, rows: Rows, terms: Terms) -> Array:
    """Keep dz only at index 0 of each axis along which the bias is broadcast, instead of summing over the axis."""
    assert rows.bias is not None
    kept = dz.copy()
    for axis, size in enumerate(rows.bias.shape):
        if size == 1:
            kept[(slice(None),) * axis + (slice(1, None),)] = 0.0
    return kept


def scaled_bias_gradient(dz: Array, rows: Rows, terms: Terms) -> Array:
    return terms.scale * dz


def bias_of_first_step(at: At, name: str, total: Array, share: Array, format: str) -> Array:
    if name == "dbias" and at.step > 0:
        return total
    return add(at, name, total, share, format)


def broadcast(call: Call) -> bool:
    return 1 in call.worker("bias", 0).shape


CAPPED = when(attends, term("softcap"))
BIASED = when(attends, tensor("bias"))

BUGS = (
    mutant(
        "softcap-gradient-missing",
        "the derivative of the soft cap is left out",
        "The factor 1 - tanh(z / softcap)**2 is missing from the gradient of the scores. Scores "
        "far below the cap hide the bug.",
        flags=("softcap-gradient-missing",),
        applies=when(CAPPED, backward),
        uncapped=constant_slope,
    ),
    mutant(
        "softcap-ignored-in-backward",
        "the backward pass runs without the soft cap",
        "It is called with a cap of 0, so its scores do not match the lse, and p does not sum to "
        "1.",
        "xdit-project/xDiT/pull/598",
        flags=("softcap-gradient-missing",),
        applies=when(CAPPED, backward),
        terms=no_cap_in_backward,
    ),
    mutant(
        "softcap-before-bias",
        "the bias is added after the soft cap",
        "The scores are cap(z) + bias instead of cap(z + bias).",
        flags=("softcap-gradient-missing",),
        applies=when(CAPPED, tensor("bias")),
        score=bias_after_cap,
    ),
    mutant(
        "softcap-before-scale",
        "the scale is applied after the soft cap",
        "The scores are scale * cap(q k) instead of cap(scale * q k). A scale of 1 hides the bug.",
        applies=CAPPED,
        score=scale_after_cap,
    ),
    mutant(
        "softcap-over-mask",
        "the mask is applied before the soft cap",
        "The cap turns -inf into a finite score, so masked keys get weight. A large cap hides "
        "the bug.",
        flags=("sentinel",),
        applies=CAPPED,
        score=mask_before_cap,
    ),
    mutant(
        "softcap-not-multiplied-back",
        "the scores are tanh(z / softcap), without the factor softcap",
        "All scores lie between -1 and 1.",
        applies=CAPPED,
        score=not_multiplied_back,
    ),
    mutant(
        "bias-before-scale",
        "the bias is multiplied by the scale",
        "The scores are scale * (q k + bias) instead of scale * q k + bias. A scale of 1 hides "
        "the bug.",
        applies=BIASED,
        score=bias_before_scale,
    ),
    mutant(
        "bias-columns-local",
        "the bias is read at key indices within the block",
        "Every visiting block reads columns 0 to n - 1 of the bias, which belong to the first "
        "worker's keys. With one worker the bug has no effect.",
        "NVIDIA/TransformerEngine/issues/1046",
        flags=("causal-on-every-step",),
        applies=when(ring(2), BIASED),
        hooks=bias_at_local_columns,
    ),
    mutant(
        "bias-gradient-reduced",
        "dbias is not summed over the axes along which bias was broadcast",
        "dbias is that of the first batch entry, head, query or key instead of the sum. A bias "
        "that has all axes hides the bug.",
        flags=("bias-gradient-reduced",),
        applies=when(BIASED, backward, broadcast),
        for_bias=first_of_broadcast,
    ),
    mutant(
        "bias-gradient-scaled",
        "dbias is multiplied by the scale",
        "The bias is added after the scale, so dbias should be the gradient of the scores "
        "itself. A scale of 1 hides the bug.",
        flags=("bias-gradient-reduced",),
        applies=when(BIASED, backward),
        for_bias=scaled_bias_gradient,
    ),
    mutant(
        "bias-gradient-of-first-step",
        "dbias contains only the contribution of each worker's first ring step",
        "The contributions of later steps are not added. With one worker the bug has no effect.",
        flags=("bias-gradient-reduced",),
        applies=when(ring(2), tensor("bias"), backward),
        add=bias_of_first_step,
    ),
)  # fmt: skip
