"""One block of queries against one block of keys, forward and backward, under a recipe.

This is the computation of one worker in one ring step. A kernel with the signatures of :func:`block_forward` and
:func:`block_backward` can replace it. Arrays are float64; ``block`` says what belongs
to the queries, what to the keys, and where values are rounded.

Sources: Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691 (algorithms 1 and 2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ringspec.formats import check_results, row_sum
from ringspec.problem.model import Array, Block, Columns
from ringspec.recipes import Recipe
from ringspec.spec.definition import (
    per_query_head,
    probabilities,
    products_of_gradients,
    reduce_to,
    scores,
)
from ringspec.spec.dropout import keep_factor
from ringspec.spec.online_softmax import SoftmaxState, absorb, normalised, start


@dataclass(frozen=True)
class BlockGradients:
    """One block's shares: ``dq`` [B, H, n_q, D], ``dk`` [B, Hkv, n_k, D], ``dv`` [B, Hkv, n_k, Dv].

    ``dbias`` has the shape of the block's bias rows with all global keys, or is None.
    """

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None


BlockForward = Callable[[Array, Array, Array, Block], SoftmaxState]
BlockBackward = Callable[[Array, Array, Array, Array, Array, Array, Block], BlockGradients]


def tiles(length: int, size: int | None) -> list[tuple[int, int]]:
    """(start, stop) of each tile; one tile for the whole length without a size.

    >>> tiles(5, 2)
    [(0, 2), (2, 4), (4, 5)]
    """
    step = length if size is None else size
    return [(first, min(first + step, length)) for first in range(0, length, max(step, 1))]


def block_forward(q: Array, k: Array, v: Array, block: Block) -> SoftmaxState:
    """The softmax state of queries q [B, H, n_q, D] over keys k [B, Hkv, n_k, D] and v [B, Hkv, n_k, Dv] alone.

    Key tiles of ``block.recipe`` are absorbed one after the other. Sinks are added once per row, by the
    ring, never here (FWD-5).
    """
    recipe, (batch, heads, n_q, _) = block.recipe, q.shape
    k, v = (per_query_head(x, block.terms) for x in (k, v))
    state = start(batch, heads, n_q, v.shape[3])
    for first, stop in tiles(k.shape[2], recipe.tile_k):
        tile = block.tile((0, n_q), (first, stop))
        s, _ = scores(q, k[:, :, first:stop], tile)
        keep = keep_factor(tile.rows, tile.columns, tile.terms, batch)
        state = absorb(state, s, v[:, :, first:stop], keep, recipe)
    if recipe.merge_order == "normalised":
        state = normalised(state, recipe)
    return SoftmaxState(state.m, state.l, recipe.to_block_o(state.o))  # NUM-2


def dy_o_sum(dy: Array, o: Array, recipe: Recipe) -> Array:
    """BWD-1: delta_i = <dy_i, o_i> [B, H, n], from dy and the o [B, H, n, Dv] of whole rows (RING-13).

    ``recipe`` says how each product and the sum are rounded.
    """
    return row_sum(recipe.to_dy_o_products(dy * o), recipe.delta)


def block_backward(
    q: Array, k: Array, v: Array, dy: Array, lse: Array, row_term: Array, block: Block
) -> BlockGradients:
    """One block's share of every gradient, from lse and row_term [B, H, n_q] as given (BWD-11), float64.

    q, k, v and ``block`` as in :func:`block_forward`; dy [B, H, n_q, Dv]. ``row_term`` is delta - dlse
    (RING-7). p = exp(s - lse) is not renormalised.
    """
    recipe = block.recipe
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    dbias = None if block.rows.bias is None else np.zeros(block.rows.bias.shape)
    for q0, q1 in tiles(q.shape[2], recipe.tile_q):
        for k0, k1 in tiles(k.shape[2], recipe.tile_k):
            tile = block.tile((q0, q1), (k0, k1))
            dz, dq_tile, dk_tile, dv_tile = tile_backward(
                q[:, :, q0:q1],
                k[:, :, k0:k1],
                v[:, :, k0:k1],
                dy[:, :, q0:q1],
                lse[:, :, q0:q1],
                row_term[:, :, q0:q1],
                tile,
            )
            dq[:, :, q0:q1] = recipe.to_tile_dq(dq[:, :, q0:q1] + dq_tile)
            dk[:, :, k0:k1] = recipe.to_tile_dkv(dk[:, :, k0:k1] + dk_tile)
            dv[:, :, k0:k1] = recipe.to_tile_dkv(dv[:, :, k0:k1] + dv_tile)
            if dbias is not None:
                add_bias_gradient(dbias, dz, q0, q1, tile.columns)
    if recipe.products == "float64":
        check_results(dq=dq, dk=dk, dv=dv, dbias=dbias)
    dq, dk, dv = (recipe.to_block_gradients(x) for x in (dq, dk, dv))
    return BlockGradients(dq, dk, dv, dbias)


def tile_backward(
    q: Array, k: Array, v: Array, dy: Array, lse: Array, row_term: Array, tile: Block
) -> tuple[Array, Array, Array, Array]:
    """dz and the shares of dq, dk, dv of one tile (BWD-10, BWD-11)."""
    s, t = scores(q, per_query_head(k, tile.terms), tile)
    with np.errstate(over="ignore", invalid="ignore"):
        p = tile.recipe.to_statistics(probabilities(s, lse))
    return products_of_gradients(q, k, v, dy, p, t, row_term, tile)


def add_bias_gradient(dbias: Array, dz: Array, q0: int, q1: int, columns: Columns) -> None:
    """BWD-8: add dz, summed over broadcast axes, to rows q0..q1-1 and the block's global keys."""
    b, h, n_rows, n_keys = dbias.shape
    shape = (b, h, 1 if n_rows == 1 else q1 - q0, 1 if n_keys == 1 else dz.shape[3])
    share = reduce_to(dz, shape)
    target = dbias if n_rows == 1 else dbias[:, :, q0:q1]
    if n_keys == 1:
        target += share
        return
    real = np.flatnonzero(columns.index >= 0)
    target[..., columns.index[real]] += share[..., real]
