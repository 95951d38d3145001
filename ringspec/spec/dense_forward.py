"""Dense attention in float64, forward: the definition (FWD-1 to FWD-10).

There is one worker and there are no blocks, and every S x S matrix is stored whole. Everything else in ringspec is
tested against this file and :mod:`~ringspec.spec.dense_backward`. These two files are tested against an oracle that
shares no code with them. :mod:`~ringspec.spec.block` calls :func:`scores` for each tile of a block, with a recipe that
says where values are rounded. Here the recipe is float64, which rounds nothing.

Symbols: b is a batch, h a query head, i a query row, j a key, n a sink of the head, d an entry of a vector. ``<x, y>``
is the dot product over d, and every logarithm is natural. Arrays are [B, H, S, D]: q, dy and o have H heads and Sq
rows, k and v have Hkv heads and Sk rows, D is the width of q and k, Dv that of v.

scale, softcap, bias, sinks and dropout_p are float64 numbers, each taken exactly. The default scale is the float64
nearest to the real 1/sqrt(D) (FWD-2); ``1 / math.sqrt(D)`` is rounded twice and is not that number for D = 128. q, k,
v, dy, dlse, sinks and bias must be finite, except that a bias of -inf masks its pair. Finite inputs must give finite
scores and gradients: if a gradient or the score of a visible pair overflows float64, the call raises NonFiniteError.
Scores of masked pairs may overflow. Zeros in results are +0.

Sources: Vaswani et al., https://arxiv.org/abs/1706.03762 (section 3.2.1); sinks as in GPT-OSS
(https://arxiv.org/abs/2508.10925), in the denominator only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspec.formats import check_range
from ringspec.problem.model import Array, Problem, Terms, Tile, columns_of
from ringspec.spec.dropout import keep_factor
from ringspec.spec.masks import visible


@dataclass(frozen=True)
class Forward:
    """The results of attention in float64: ``o`` [B, H, Sq, Dv] and ``lse`` [B, H, Sq], a natural logarithm."""

    o: Array
    lse: Array


def scores(q: Array, k: Array, tile: Tile) -> tuple[Array, Array | None]:
    """Return the scores s [B, H, n_q, n_k], -inf at masked pairs, and t of the same shape (FWD-1, FWD-3, MASK-9)::

        z_ij = scale <q_i, k_j> + bias_ij          t_ij = tanh(z_ij / softcap)      s_ij = softcap t_ij

    Without a soft cap, s = z and t is None. The scale does not multiply the bias. The argument k must already have one
    head for each query head (FWD-10).
    """
    rows, columns, terms, recipe = tile.rows, tile.columns, tile.terms, tile.recipe
    allowed = visible(rows, columns, terms)
    with np.errstate(over="ignore", invalid="ignore"):  # check_range finds overflow
        z = terms.scale * recipe.matmul(q, k.swapaxes(2, 3))
        if rows.bias is not None:
            bias = columns_of(rows.bias, columns)
            z = z + np.where(np.isneginf(bias), 0.0, bias)
    if recipe.products == "float64":  # narrower products overflow in the result, as in a kernel
        check_range(z, allowed, "scores")
    t = None
    if terms.softcap is not None:
        with np.errstate(over="ignore"):  # tanh of infinity is 1
            t = recipe.to_scores(np.tanh(z / terms.softcap))
        z = terms.softcap * t
    return np.where(allowed, recipe.to_scores(z), -np.inf), t


def per_query_head(x: Array, terms: Terms) -> Array:
    """Repeat the heads of k or v [B, Hkv, n, D] so that each query head has one: [B, H, n, D] (FWD-10)."""
    return np.repeat(x, terms.group, axis=1)


def softmax(problem: Problem, s: Array) -> tuple[Array, Array]:
    """Return lse [B, H, Sq] and p [B, H, Sq, Sk] of scores (FWD-4, FWD-5, FWD-7)::

        lse_i = log(sum_j exp(s_ij) + sum_n exp(sink_hn))            p_ij = exp(s_ij - lse_i)

    Sinks are logits like s: neither scale nor soft cap applies to them. They enter only the denominator, once per row.
    A row with no visible key and no sink has lse = -inf (FWD-8). A row with sinks but no visible key has the
    log-sum-exp of the sinks as lse (FWD-9). In both kinds of rows, p is 0. p and lse are those before dropout. p is
    computed as exp(s - m) / sum, which equals exp(s - lse) and has a smaller rounding error.
    """
    sinks = problem.terms.sinks
    m = s.max(axis=3, initial=-np.inf)
    if sinks is not None:
        m = np.maximum(m, sinks.max(axis=1)[None, :, None])
    shift = np.where(np.isneginf(m), 0.0, m)  # an empty row: exp(-inf - 0) = 0, never NaN
    e = np.exp(s - shift[..., None])
    total = e.sum(axis=3)
    if sinks is not None:
        total = total + np.exp(sinks[None, :, None, :] - shift[..., None]).sum(axis=3)
    empty = total == 0
    lse = np.where(empty, -np.inf, shift + np.log(np.where(empty, 1.0, total)))
    p = e / np.where(empty, 1.0, total)[..., None]
    return lse, p


def dense_forward(problem: Problem) -> Forward:
    """Return o and lse of a validated problem (FWD-6, FWD-8)::

        o_i = sum_j p_ij keep_ij / (1 - dropout_p) v_j

    keep_ij is 0 or 1, and always 1 without dropout. o = 0 in a row with no visible key.
    """
    k, v = (per_query_head(x, problem.terms) for x in (problem.k, problem.v))
    s, _ = scores(problem.q, k, problem.tile)
    lse, p = softmax(problem, s)
    kept = p * keep_factor(problem.rows, problem.columns, problem.terms, problem.q.shape[0])
    return Forward(kept @ v + 0.0, lse)  # + 0.0: zeros are +0
