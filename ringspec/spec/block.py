"""One block of queries against one block of keys, forward and backward, under a recipe.

This is the computation of one worker in one ring step, and the parameter that a ring takes: a
faster program, or a kernel, with these two signatures can stand in its place. Arrays are float64;
``rows``, ``columns`` and ``terms`` are those of :mod:`ringspec.problem.model`, ``recipe`` says where
values are rounded.

Sources: Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691 (algorithms 1 and 2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ringspec.formats import check_range, check_results, row_sum
from ringspec.problem.model import Array, Columns, Rows, Terms, columns_of
from ringspec.recipes import Recipe
from ringspec.spec.definition import over_group, reduce_to
from ringspec.spec.dropout import keep_factor
from ringspec.spec.masks import visible
from ringspec.spec.online_softmax import (
    SoftmaxState,
    absorb,
    normalised,
    start,
)


@dataclass(frozen=True)
class BlockGradients:
    """One block's shares: ``dq`` [B, H, n_q, D], ``dk`` [B, Hkv, n_k, D], ``dv`` [B, Hkv, n_k, Dv].

    ``dbias`` has the shape of the block's bias rows with all global keys, or is None.
    """

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None


BlockForward = Callable[[Array, Array, Array, Rows, Columns, Terms, Recipe], SoftmaxState]
BlockBackward = Callable[
    [Array, Array, Array, Array, Array, Array, Rows, Columns, Terms, Recipe], BlockGradients
]


def tiles(length: int, size: int | None) -> list[tuple[int, int]]:
    """(start, stop) of each tile; one tile for the whole length without a size.

    >>> tiles(5, 2)
    [(0, 2), (2, 4), (4, 5)]
    """
    step = length if size is None else size
    return [(first, min(first + step, length)) for first in range(0, length, max(step, 1))]


def score(
    q: Array, k: Array, rows: Rows, columns: Columns, terms: Terms, recipe: Recipe
) -> tuple[Array, Array | None]:
    """s [B, H, n_q, n_k] with -inf where the mask forbids, and t = tanh (FWD-1, FWD-3).

    k has one head per query head here.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # check_range sees what matters
        z = terms.scale * recipe.product(q, k.swapaxes(2, 3))
        if rows.bias is not None:
            bias = columns_of(rows.bias, columns)
            z = z + np.where(np.isneginf(bias), 0.0, bias)
    allowed = visible(rows, columns, terms)
    if recipe.products == "float64":  # in a narrower recipe an overflow is what a kernel shows too
        check_range(z, allowed, "scores")
    t = None
    if terms.softcap is not None:
        with np.errstate(over="ignore"):  # tanh of infinity is 1
            t = recipe.to_scores(np.tanh(z / terms.softcap))
        z = terms.softcap * t
    return np.where(allowed, recipe.to_scores(z), -np.inf), t


def block_forward(
    q: Array, k: Array, v: Array, rows: Rows, columns: Columns, terms: Terms, recipe: Recipe
) -> SoftmaxState:
    """The softmax state of queries q [B, H, n_q, D] over keys k, v [B, Hkv, n_k, D|Dv] alone.

    ``rows`` [n_q] and ``columns`` [n_k] give positions and masks, ``terms`` scale and soft cap. Key
    tiles of ``recipe`` are absorbed one after the other; sinks are not a block's matter (FWD-5).
    """
    batch, heads, n_q, _ = q.shape
    k, v = (np.repeat(x, terms.group, axis=1) for x in (k, v))  # FWD-10
    state = start(batch, heads, n_q, v.shape[3])
    for first, stop in tiles(k.shape[2], recipe.tile_k):
        tile = columns.slice(first, stop)
        s, _ = score(q, k[:, :, first:stop], rows, tile, terms, recipe)
        keep = keep_factor(rows, tile, terms, batch)
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
    q: Array,
    k: Array,
    v: Array,
    dy: Array,
    lse: Array,
    delta: Array,
    rows: Rows,
    columns: Columns,
    terms: Terms,
    recipe: Recipe,
) -> BlockGradients:
    """One block's share of every gradient, from lse and delta [B, H, n_q] as given (BWD-11).

    q, k, v, ``rows``, ``columns``, ``terms`` and ``recipe`` as in :func:`block_forward`; dy
    [B, H, n_q, Dv]. ``delta`` is dy_o_sum, or dy_o_sum - dlse where the loss reads lse (RING-7). p = exp(s - lse) is
    not renormalised.
    """
    dq, dbias = np.zeros(q.shape), None
    dk, dv = np.zeros(k.shape), np.zeros(v.shape)
    if rows.bias is not None:
        dbias = np.zeros(rows.bias.shape)
    for q0, q1 in tiles(q.shape[2], recipe.tile_q):
        for k0, k1 in tiles(k.shape[2], recipe.tile_k):
            tile_rows, tile_columns = rows.slice(q0, q1), columns.slice(k0, k1)
            dz, dq_tile, dk_tile, dv_tile = tile_backward(
                q[:, :, q0:q1],
                k[:, :, k0:k1],
                v[:, :, k0:k1],
                dy[:, :, q0:q1],
                lse[:, :, q0:q1],
                delta[:, :, q0:q1],
                tile_rows,
                tile_columns,
                terms,
                recipe,
            )
            dq[:, :, q0:q1] = recipe.to_tile_dq(dq[:, :, q0:q1] + dq_tile)
            dk[:, :, k0:k1] = recipe.to_tile_dkv(dk[:, :, k0:k1] + dk_tile)
            dv[:, :, k0:k1] = recipe.to_tile_dkv(dv[:, :, k0:k1] + dv_tile)
            if dbias is not None:
                add_bias_gradient(dbias, dz, q0, q1, tile_columns)
    if recipe.products == "float64":
        check_results(dq=dq, dk=dk, dv=dv, dbias=dbias)
    dq, dk, dv = (recipe.to_block_gradients(x) for x in (dq, dk, dv))
    return BlockGradients(dq, dk, dv, dbias)


def tile_backward(
    q: Array,
    k: Array,
    v: Array,
    dy: Array,
    lse: Array,
    delta: Array,
    rows: Rows,
    columns: Columns,
    terms: Terms,
    recipe: Recipe,
) -> tuple[Array, Array, Array, Array]:
    """dz and the shares of dq, dk, dv of one tile (BWD-2 to BWD-7, BWD-10)."""
    k, v = (np.repeat(x, terms.group, axis=1) for x in (k, v))
    s, t = score(q, k, rows, columns, terms, recipe)
    keep = keep_factor(rows, columns, terms, q.shape[0])
    empty = np.isneginf(lse)  # such a row sends no gradient (BWD-10)
    with np.errstate(over="ignore", invalid="ignore"):
        p = np.exp(s - np.where(empty, 0.0, lse)[..., None])
        p = np.where(empty[..., None], 0.0, recipe.to_statistics(p))
        # BWD-2, BWD-3, BWD-4: delta already holds - dlse; 0 by definition where the mask hides.
        dp = recipe.product(dy, v.swapaxes(2, 3)) * keep
        dz = np.where(p == 0, 0.0, p * (dp - delta[..., None]))
    if t is not None:
        dz = dz * (1.0 - t * t)
    kept = recipe.to_p(p * keep)
    dz_operand = recipe.to_ds(dz)
    # BWD-5, BWD-6, BWD-7
    dq = recipe.to_products(terms.scale * recipe.product(dz_operand, k))
    dk = terms.scale * recipe.product(dz_operand.swapaxes(2, 3), q)
    dv = recipe.product(kept.swapaxes(2, 3), dy)
    dk, dv = (recipe.to_products(over_group(x, terms.group)) for x in (dk, dv))
    return dz, dq, dk, dv


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
