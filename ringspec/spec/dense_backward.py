"""The gradient of dense attention in float64: the definition of the backward pass (BWD-1 to BWD-10).

Symbols, shapes and limits are those of :mod:`~ringspec.spec.dense_forward`; dy = dL/do and dlse = dL/dlse for a loss L.
dp, ds and dz are the gradients of the probabilities p, of the scores s, and of z, the scores before the soft cap.
:func:`tile_gradients` holds the formulas. :mod:`~ringspec.spec.block` calls this function for each tile of a block,
with a recipe that says where values are rounded.

In each row with a visible key or a sink, this identity checks gradients without a second implementation::

    sum_j ds_ij + sum_n exp(sink_hn - lse_i) (dlse_i - delta_i) = dlse_i

Source: Dao et al., FlashAttention, https://arxiv.org/abs/2205.14135 (appendix B.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspec.formats import check_range, check_results, row_sum
from ringspec.problem.model import Array, Columns, Problem, Tile
from ringspec.recipes import Recipe
from ringspec.spec.dense_forward import per_query_head, scores, softmax
from ringspec.spec.dropout import keep_factor


@dataclass(frozen=True)
class Gradients:
    """The gradients of a loss in float64.

    ``dq`` [B, H, Sq, D], ``dk`` [B, Hkv, Sk, D], ``dv`` [B, Hkv, Sk, Dv]. ``dsinks`` and ``dbias`` have the shapes that
    sinks and bias have; None without sinks or without a bias.
    """

    dq: Array
    dk: Array
    dv: Array
    dsinks: Array | None = None
    dbias: Array | None = None


def dense_backward(problem: Problem, dy: Array, dlse: Array) -> Gradients:
    """Return the gradients of a validated problem, from dy [B, H, Sq, Dv] and dlse [B, H, Sq]."""
    terms, tile = problem.terms, problem.tile
    k, v = (per_query_head(x, terms) for x in (problem.k, problem.v))
    s, t = scores(problem.q, k, tile)
    lse, p = softmax(problem, s)
    keep = keep_factor(problem.rows, problem.columns, terms, problem.q.shape[0])
    row_term = dy_o_sum(dy, (p * keep) @ v, tile.recipe) - dlse
    dz, dq, dk, dv = tile_gradients(problem.q, problem.k, problem.v, dy, p, t, row_term, tile)
    dsinks = None if terms.sinks is None else sink_gradient(terms.sinks, lse, row_term) + 0.0
    dbias = None if problem.rows.bias is None else np.zeros(problem.rows.bias.shape)
    if dbias is not None:
        add_bias_gradient(dbias, dz, 0, dz.shape[2], problem.columns)
    check_results(dq=dq, dk=dk, dv=dv, dsinks=dsinks, dbias=dbias)
    return Gradients(dq + 0.0, dk + 0.0, dv + 0.0, dsinks, dbias)  # + 0.0: zeros are +0


def dy_o_sum(dy: Array, o: Array, recipe: Recipe) -> Array:
    """BWD-1: delta_i = <dy_i, o_i> [B, H, n], where o [B, H, n, Dv] is the output over all keys of the row (RING-13).

    The AWS NKI library calls delta ``dy_o_sum``. Dropout does not change the formula. ``recipe`` says how the products
    and their sum are rounded.
    """
    return row_sum(recipe.to_dy_o_products(dy * o), recipe.delta)


def tile_gradients(
    q: Array, k: Array, v: Array, dy: Array, p: Array, t: Array | None, row_term: Array, tile: Tile
) -> tuple[Array, Array, Array, Array]:
    """Return dz and one tile's contributions to dq, dk, dv, from p, t and row_term [B, H, n_q] (BWD-2 to BWD-7)::

        dp_ij = <dy_i, v_j> keep_ij / (1 - dropout_p)      ds_ij = p_ij (dp_ij - row_term_i)
        dz_ij = ds_ij (1 - t_ij^2), or ds_ij without a soft cap
        dq_i = scale sum_j dz_ij k_j                       dk_j = scale sum_{i, h in group} dz_ij q_i
        dv_j = sum_{i, h in group} p_ij keep_ij / (1 - dropout_p) dy_i

    p are the probabilities, t is tanh(z / softcap) or None, and row_term_i = delta_i - dlse_i. *h in group* ranges over
    the query heads that use the key head. ds and dz are 0 where p is 0: at a hidden pair, in an empty row (BWD-10), or
    where exp underflows. The recipe rounds dq after the scale is applied. It rounds dk and dv after the scale and the
    sum over the group, both computed in float64.
    """
    terms, recipe = tile.terms, tile.recipe
    k, v = (per_query_head(x, terms) for x in (k, v))
    keep = keep_factor(tile.rows, tile.columns, terms, q.shape[0])
    with np.errstate(over="ignore", invalid="ignore"):  # check_range finds overflow
        # BWD-2, BWD-3: subtracting row_term adds dlse.
        difference = recipe.matmul(dy, v.swapaxes(2, 3)) * keep - row_term[..., None]
        if recipe.products == "float64":
            check_range(difference, p > 0, "dp - delta + dlse")
        dz = np.where(p == 0, 0.0, p * difference)
    if t is not None:  # BWD-4
        dz = dz * (1.0 - t * t)
    dz_operand, kept = recipe.to_ds(dz), recipe.to_p(p * keep)
    # BWD-5, BWD-6, BWD-7
    dq = recipe.to_products(terms.scale * recipe.matmul(dz_operand, k))
    dk = terms.scale * recipe.matmul(dz_operand.swapaxes(2, 3), q)
    dv = recipe.matmul(kept.swapaxes(2, 3), dy)
    dk, dv = (recipe.to_products(over_group(x, terms.group)) for x in (dk, dv))
    return dz, dq, dk, dv


def over_group(x: Array, group: int) -> Array:
    """Sum [B, H, S, D] over the query heads of each key head: [B, Hkv, S, D] (BWD-6, BWD-7)."""
    batch, heads, length, width = x.shape
    return x.reshape(batch, heads // group, group, length, width).sum(axis=2)


def add_bias_gradient(dbias: Array, dz: Array, q0: int, q1: int, columns: Columns) -> None:
    """BWD-8: add dz, summed over the axes along which the bias was broadcast, to dbias in place.

    dz [B, H, q1 - q0, n_k] is added to rows q0..q1-1 of dbias [B|1, H|1, n|1, Sk|1], at the global keys of
    ``columns``.
    """
    b, h, n_rows, n_keys = dbias.shape
    shape = (b, h, 1 if n_rows == 1 else q1 - q0, 1 if n_keys == 1 else dz.shape[3])
    axes = tuple(axis for axis in range(4) if shape[axis] == 1 and dz.shape[axis] != 1)
    share = dz.sum(axis=axes, keepdims=True)
    target = dbias if n_rows == 1 else dbias[:, :, q0:q1]
    if n_keys == 1:
        target += share
        return
    real = np.flatnonzero(columns.index >= 0)
    target[..., columns.index[real]] += share[..., real]


def sink_gradient(sinks: Array, lse: Array, row_term: Array) -> Array:
    """BWD-9: dsinks [H, N], dsink_hn = sum_{b, i} exp(sink_hn - lse_i) (-row_term_i), with row_term = delta - dlse."""
    empty = np.isneginf(lse)  # with sinks, only an lse that the caller gives can be -inf (BWD-10)
    shift = np.where(empty, 0.0, lse)[..., None]
    p = np.where(empty[..., None], 0.0, np.exp(sinks[None, :, None, :] - shift))
    return (p * -row_term[..., None]).sum(axis=(0, 2))
