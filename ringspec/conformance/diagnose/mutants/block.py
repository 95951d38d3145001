"""One block of queries against one block of keys, forward and backward, computed by replaceable functions.

The computation is that of ``ringspec.spec.block`` without its checks, so that a bug gives infinity or NaN wherever a
kernel would. ``hooks`` holds the functions that a bug can replace. dz is the gradient of the scores before the soft
cap.
"""

from __future__ import annotations

import numpy as np

from ringspec.conformance.diagnose.mutants.hooks import At, Hooks
from ringspec.formats import product, round_to
from ringspec.problem.model import Array, Columns, Rows, Terms
from ringspec.recipes import Recipe
from ringspec.spec.block import BlockGradients, ranges
from ringspec.spec.dense_backward import add_bias_gradient
from ringspec.spec.online_softmax import SoftmaxState, normalised, start
from ringspec.spec.worker import KeySide, QuerySide


def block_forward(
    hooks: Hooks, at: At, query: QuerySide, key: KeySide, terms: Terms, recipe: Recipe
) -> SoftmaxState:
    """Compute the softmax state (running maximum, sum and o) of one block of queries over one block of keys."""
    q, rows = query.q, query.rows
    assert q is not None and rows is not None
    assert key.k is not None and key.v is not None and key.columns is not None
    k, v = (hooks.to_query_heads(x, terms) for x in (key.k, key.v))
    batch, heads, n_q, _ = q.shape
    state = start(batch, heads, n_q, v.shape[3])
    for first, stop in ranges(k.shape[2], recipe.tile_k):
        tile = key.columns.slice(first, stop)
        allowed = hooks.mask(at, rows, tile, terms)
        s, _ = hooks.score(q, k[:, :, first:stop], allowed, rows, tile, terms, recipe)
        factor = hooks.keep(at, rows, tile, terms, batch)
        state = hooks.absorb_tile(state, s, v[:, :, first:stop], factor, recipe)
    if recipe.merge_order == "normalised":
        state = normalised(state, recipe)
    return SoftmaxState(state.m, state.l, round_to(state.o, recipe.block_o))


def block_backward(
    hooks: Hooks, at: At, query: QuerySide, key: KeySide, terms: Terms, recipe: Recipe
) -> BlockGradients:
    """Compute what one pair of blocks adds to dq, dk, dv and dbias.

    The lse and delta of the queries are given.
    """
    q, dy, rows, columns = query.q, query.dy, query.rows, key.columns
    k, v, lse, delta = key.k, key.v, query.lse, query.row_term
    assert q is not None and dy is not None and rows is not None and columns is not None
    assert k is not None and v is not None and lse is not None and delta is not None
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    dbias = None if rows.bias is None else np.zeros(rows.bias.shape)
    for q0, q1 in ranges(q.shape[2], recipe.tile_q):
        for k0, k1 in ranges(k.shape[2], recipe.tile_k):
            some_rows, some_columns = rows.slice(q0, q1), columns.slice(k0, k1)
            upper = (q[:, :, q0:q1], dy[:, :, q0:q1], lse[:, :, q0:q1], delta[:, :, q0:q1])
            lower = (k[:, :, k0:k1], v[:, :, k0:k1])
            dz, *shares = tile_backward(
                hooks, at, upper, lower, some_rows, some_columns, terms, recipe
            )
            dq[:, :, q0:q1] = round_to(dq[:, :, q0:q1] + shares[0], recipe.tile_dq)
            dk[:, :, k0:k1] = round_to(dk[:, :, k0:k1] + shares[1], recipe.tile_dkv)
            dv[:, :, k0:k1] = round_to(dv[:, :, k0:k1] + shares[2], recipe.tile_dkv)
            if dbias is not None:
                add_bias_gradient(dbias, hooks.for_bias(dz, some_rows, terms), q0, q1, some_columns)
    dq, dk, dv = (round_to(x, recipe.block_gradients) for x in (dq, dk, dv))
    return BlockGradients(dq, dk, dv, dbias)


def tile_backward(
    hooks: Hooks,
    at: At,
    upper: tuple[Array, Array, Array, Array],
    lower: tuple[Array, Array],
    rows: Rows,
    columns: Columns,
    terms: Terms,
    recipe: Recipe,
) -> tuple[Array, Array, Array, Array]:
    """Compute dz of one tile, and what the tile adds to dq, dk and dv.

    ``upper`` is (q, dy, lse, delta), ``lower`` is (k, v).
    """
    q, dy, lse, delta = upper
    k, v = (hooks.to_query_heads(x, terms) for x in lower)
    allowed = hooks.mask(at, rows, columns, terms)
    s, t = hooks.score(q, k, allowed, rows, columns, terms, recipe)
    keep = hooks.keep(at, rows, columns, terms, q.shape[0])
    p = hooks.probabilities(s, lse, recipe)
    dp = product(dy, v.swapaxes(2, 3), recipe.products)
    dz = hooks.score_gradient(p, dp, keep, delta)
    if t is not None:
        dz = hooks.uncapped(dz, t)
    kept = hooks.operand("p", p * keep, recipe)
    dz_operand = hooks.operand("ds", dz, recipe)
    dq, dk, dv = hooks.products(kept, dz_operand, q, k, dy, terms, recipe)
    dk, dv = (round_to(hooks.over_group(x, terms), recipe.products) for x in (dk, dv))
    return dz, dq, dk, dv
