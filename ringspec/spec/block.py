"""One block of queries against one block of keys, forward and backward (BWD-10, BWD-11).

A *block* is what travels: the queries of one worker, or its keys with their values. A *tile* is a rectangle of the
score matrix; :class:`~ringspec.problem.model.Tile` says which queries and keys it covers. A *recipe* says where values
are rounded, and into which tiles blocks are cut. A block of queries and a block of keys define one tile, which
``recipe.tile_q`` and ``recipe.tile_k`` cut into smaller tiles. The forward pass cuts only the keys, because each query
row is computed independently of the others.

:func:`block_forward` and :func:`block_backward` are what one worker computes in one ring step. Kernels with the same
signatures can replace these two functions. Arrays are float64.

Sources: Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691 (algorithms 1 and 2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ringspec.formats import check_range, check_results
from ringspec.problem.model import Array, Tile
from ringspec.spec.dense_backward import add_bias_gradient, tile_gradients
from ringspec.spec.dense_forward import per_query_head, scores
from ringspec.spec.dropout import keep_factor
from ringspec.spec.online_softmax import SoftmaxState, absorb, normalised, start


@dataclass(frozen=True)
class BlockGradients:
    """What one block of queries and one block of keys contribute to the gradients.

    ``dq`` [B, H, n_q, D], ``dk`` [B, Hkv, n_k, D], ``dv`` [B, Hkv, n_k, Dv]. ``dbias`` has one row for each query of
    the block and one column for each key of the whole sequence; None without a bias.
    """

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None


# (q, k, v, tile) and (q, k, v, dy, lse, row_term, tile)
BlockForward = Callable[[Array, Array, Array, Tile], SoftmaxState]
BlockBackward = Callable[[Array, Array, Array, Array, Array, Array, Tile], BlockGradients]


def ranges(length: int, size: int | None) -> list[tuple[int, int]]:
    """Cut the range from 0 to ``length`` into pieces of ``size`` (None: one piece); return (start, stop) of each.

    >>> ranges(5, 2)
    [(0, 2), (2, 4), (4, 5)]
    """
    step = length if size is None else size
    return [(first, min(first + step, length)) for first in range(0, length, max(step, 1))]


def block_forward(q: Array, k: Array, v: Array, tile: Tile) -> SoftmaxState:
    """Return the softmax state of a block of queries over one block of keys and values.

    q [B, H, n_q, D], k [B, Hkv, n_k, D], v [B, Hkv, n_k, Dv]; ``tile`` holds the data of the same queries and keys. Key
    tiles are absorbed one after another. Sinks are not added here: the ring adds them once per row, when it finishes
    the row (FWD-5).
    """
    recipe, (batch, heads, n_q, _) = tile.recipe, q.shape
    k, v = (per_query_head(x, tile.terms) for x in (k, v))
    state = start(batch, heads, n_q, v.shape[3])
    for first, stop in ranges(k.shape[2], recipe.tile_k):
        part = tile.part((0, n_q), (first, stop))
        s, _ = scores(q, k[:, :, first:stop], part)
        keep = keep_factor(part.rows, part.columns, part.terms, batch)
        state = absorb(state, s, v[:, :, first:stop], keep, recipe)
    if recipe.merge_order == "normalised":
        state = normalised(state, recipe)
    return SoftmaxState(state.m, state.l, recipe.to_block_o(state.o))  # NUM-2


def block_backward(
    q: Array, k: Array, v: Array, dy: Array, lse: Array, row_term: Array, tile: Tile
) -> BlockGradients:
    """Return what a block of queries and a block of keys contribute to every gradient.

    q, k, v and ``tile`` are as in :func:`block_forward`; dy [B, H, n_q, Dv]. lse and row_term [B, H, n_q] are those of
    the whole rows, over all keys, and are used as given (BWD-11); row_term is delta - dlse (RING-7).
    """
    recipe = tile.recipe
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    dbias = None if tile.rows.bias is None else np.zeros(tile.rows.bias.shape)
    for q0, q1 in ranges(q.shape[2], recipe.tile_q):
        for k0, k1 in ranges(k.shape[2], recipe.tile_k):
            part, rows, keys = tile.part((q0, q1), (k0, k1)), slice(q0, q1), slice(k0, k1)
            q_part, dy_part = q[:, :, rows], dy[:, :, rows]
            k_part, v_part = k[:, :, keys], v[:, :, keys]
            s, t = scores(q_part, per_query_head(k_part, tile.terms), part)
            p = probabilities(s, lse[:, :, rows], part)
            dz, dq_part, dk_part, dv_part = tile_gradients(
                q_part, k_part, v_part, dy_part, p, t, row_term[:, :, rows], part
            )
            dq[:, :, rows] = recipe.to_tile_dq(dq[:, :, rows] + dq_part)
            dk[:, :, keys] = recipe.to_tile_dkv(dk[:, :, keys] + dk_part)
            dv[:, :, keys] = recipe.to_tile_dkv(dv[:, :, keys] + dv_part)
            if dbias is not None:
                add_bias_gradient(dbias, dz, q0, q1, part.columns)
    if recipe.products == "float64":
        check_results(dq=dq, dk=dk, dv=dv, dbias=dbias)
    dq, dk, dv = (recipe.to_block_gradients(x) for x in (dq, dk, dv))
    return BlockGradients(dq, dk, dv, dbias)


def probabilities(s: Array, lse: Array, tile: Tile) -> Array:
    """Return p_ij = exp(s_ij - lse_i), with lse as given and p not renormalised (BWD-11); 0 in empty rows (BWD-10)."""
    empty = np.isneginf(lse)[..., None]
    with np.errstate(over="ignore", invalid="ignore"):
        p = np.where(empty, 0.0, np.exp(s - np.where(empty, 0.0, lse[..., None])))
    if tile.recipe.products == "float64":
        check_range(p, p > 0, "exp(s - lse)")
    return tile.recipe.to_statistics(p)
