"""Dense attention and its gradient in float64: the definition (FWD-1 to FWD-10, BWD-1 to BWD-11).

One worker, no blocks, every S x S matrix written out. Everything else in ringspec is tested against these
functions, and they are tested against an oracle that shares no code with them. ``block`` calls the functions for
scores and gradients on its tiles, with the roundings of a recipe; here the recipe is float64, which rounds nothing.

Symbols: b a batch, h a query head, i a query row, j a key, n a sink of the head, d an entry of a vector.
``<x, y>`` is the dot product over d, and every logarithm is natural. Arrays are [B, H, S, D]: q, dy and o
have H heads and Sq rows, k and v have Hkv heads and Sk rows, D is the width of q and k, Dv that of v.

scale, softcap, bias, sinks and dropout_p are float64 numbers, each taken exactly. The default scale is the
float64 nearest to the real 1/sqrt(D) (FWD-2); ``1 / math.sqrt(D)`` is rounded twice and misses it at
D = 128. q, k, v, dy, dlse and sinks are finite, and so is the bias, in which -inf alone has a meaning (a
mask). Finite inputs have finite scores and gradients: a score at a visible pair, a dp or a gradient that
overflows float64 is refused with a NonFiniteError. Scores of masked pairs may be of any size. Zeros in results are +0.

A check of the gradients without a second implementation, for each row with a visible key or a sink::

    sum_j ds_ij + sum_n exp(sink_hn - lse_i) (dlse_i - delta_i) = dlse_i

Sources: Vaswani et al., https://arxiv.org/abs/1706.03762 (section 3.2.1); for the gradient Dao et
al., FlashAttention, https://arxiv.org/abs/2205.14135 (appendix B.2); sinks as in GPT-OSS
(https://arxiv.org/abs/2508.10925), in the denominator only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspec.formats import check_range, check_results
from ringspec.problem.model import Array, Block, Problem, Terms, columns_of
from ringspec.spec.dropout import keep_factor
from ringspec.spec.masks import visible


@dataclass(frozen=True)
class Forward:
    """``o`` [B, H, Sq, Dv] and ``lse`` [B, H, Sq], natural log, both float64."""

    o: Array
    lse: Array


@dataclass(frozen=True)
class Gradients:
    """float64 gradients of the loss in the shapes of what they belong to.

    ``dq`` [B, H, Sq, D], ``dk`` [B, Hkv, Sk, D], ``dv`` [B, Hkv, Sk, Dv]; ``dsinks`` and ``dbias``
    in the shape of sinks and bias as they were given, None without them.
    """

    dq: Array
    dk: Array
    dv: Array
    dsinks: Array | None = None
    dbias: Array | None = None


def scores(q: Array, k: Array, block: Block) -> tuple[Array, Array | None]:
    """s [B, H, n_q, n_k], -inf where the mask forbids, and t [B, H, n_q, n_k] or None (FWD-1, FWD-3, MASK-9)::

        z_ij = scale <q_i, k_j> + bias_ij          t_ij = tanh(z_ij / softcap)      s_ij = softcap t_ij

    Without a soft cap s = z, and t is None. The scale does not touch the bias. k has one head for each
    query head here (FWD-10).
    """
    rows, columns, terms, recipe = block.rows, block.columns, block.terms, block.recipe
    allowed = visible(rows, columns, terms)
    with np.errstate(over="ignore", invalid="ignore"):  # check_range sees what matters
        z = terms.scale * recipe.product(q, k.swapaxes(2, 3))
        if rows.bias is not None:
            bias = columns_of(rows.bias, columns)
            z = z + np.where(np.isneginf(bias), 0.0, bias)
    if recipe.products == "float64":  # in a narrower recipe an overflow is what a kernel shows too
        check_range(z, allowed, "scores")
    t = None
    if terms.softcap is not None:
        with np.errstate(over="ignore"):  # tanh of infinity is 1
            t = recipe.to_scores(np.tanh(z / terms.softcap))
        z = terms.softcap * t
    return np.where(allowed, recipe.to_scores(z), -np.inf), t


def normalise(problem: Problem, s: Array) -> tuple[Array, Array]:
    """lse [B, H, Sq] and p [B, H, Sq, Sk] of scores (FWD-4, FWD-5, FWD-7)::

        lse_i = log(sum_j exp(s_ij) + sum_n exp(sink_hn))            p_ij = exp(s_ij - lse_i)

    Sinks are logits in the domain of s: neither scale nor soft cap applies to them. They join the
    denominator once per row, and nothing else. A row with no visible key and no sink has lse = -inf (FWD-8), a
    row with sinks alone their log-sum-exp (FWD-9); p is 0 in both. p and lse are those before dropout. p is
    computed as exp(s - m) / sum, the same number with a smaller rounding error than exp(s - lse).
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


def forward(problem: Problem) -> Forward:
    """o and lse of a validated problem (FWD-6, FWD-8)::

        o_i = sum_j p_ij keep_ij / (1 - dropout_p) v_j

    keep_ij is 0 or 1, and always 1 without dropout. o = 0 in a row with no visible key.
    """
    k, v = (per_query_head(x, problem.terms) for x in (problem.k, problem.v))
    s, _ = scores(problem.q, k, problem.block)
    lse, p = normalise(problem, s)
    kept = p * keep_factor(problem.rows, problem.columns, problem.terms, problem.q.shape[0])
    return Forward(kept @ v + 0.0, lse)  # + 0.0: zeros are +0


def backward(problem: Problem, dy: Array, dlse: Array) -> Gradients:
    """Gradients of a validated problem, for dy = dL/do and dlse = dL/dlse (BWD-1 to BWD-10)::

        delta_i = <dy_i, o_i>

    The AWS NKI library calls delta ``dy_o_sum``. The expression is the same with dropout.
    """
    k, v = (per_query_head(x, problem.terms) for x in (problem.k, problem.v))
    s, t = scores(problem.q, k, problem.block)
    lse, p = normalise(problem, s)
    keep = keep_factor(problem.rows, problem.columns, problem.terms, problem.q.shape[0])
    delta = (dy * ((p * keep) @ v)).sum(axis=3)  # BWD-1
    return gradients(problem, p, t, dy, lse, delta - dlse)


def block_gradients(problem: Problem, dy: Array, lse: Array, row_term: Array) -> Gradients:
    """The share of a block, from lse and row_term = delta - dlse of the whole rows as given (BWD-11)."""
    s, t = scores(problem.q, per_query_head(problem.k, problem.terms), problem.block)
    with np.errstate(over="ignore"):
        p = probabilities(s, lse)
    check_range(p, p > 0, "exp(s - lse)")
    return gradients(problem, p, t, dy, lse, row_term)


def gradients(
    problem: Problem, p: Array, t: Array | None, dy: Array, lse: Array, row_term: Array
) -> Gradients:
    """All gradients from p, t and row_term = delta - dlse (BWD-2 to BWD-9)."""
    sinks, bias = problem.terms.sinks, problem.rows.bias
    dz, dq, dk, dv = products_of_gradients(
        problem.q, problem.k, problem.v, dy, p, t, row_term, problem.block
    )
    dsinks = None if sinks is None else sink_gradient(sinks, lse, -row_term)
    dbias = None if bias is None else reduce_to(dz, bias.shape)
    check_results(dq=dq, dk=dk, dv=dv, dsinks=dsinks, dbias=dbias)
    dq, dk, dv = dq + 0.0, dk + 0.0, dv + 0.0  # zeros are +0
    dsinks = None if dsinks is None else dsinks + 0.0
    dbias = None if dbias is None else dbias + 0.0
    return Gradients(dq, dk, dv, dsinks, dbias)


def probabilities(s: Array, lse: Array) -> Array:
    """p_ij = exp(s_ij - lse_i) with lse as given, not renormalised (BWD-11); 0 in an empty row (BWD-10)."""
    empty = np.isneginf(lse)[..., None]
    return np.where(empty, 0.0, np.exp(s - np.where(empty, 0.0, lse[..., None])))


def products_of_gradients(
    q: Array,
    k: Array,
    v: Array,
    dy: Array,
    p: Array,
    t: Array | None,
    row_term: Array,
    block: Block,
) -> tuple[Array, Array, Array, Array]:
    """dz and the shares of dq, dk, dv of one block, from p, t and row_term [B, H, n_q] (BWD-2 to BWD-7)::

        dp_ij = <dy_i, v_j> keep_ij / (1 - dropout_p)      ds_ij = p_ij (dp_ij - row_term_i)
        dz_ij = ds_ij (1 - t_ij^2), or ds_ij without a soft cap
        dq_i = scale sum_j dz_ij k_j                       dk_j = scale sum_{i, h in group} dz_ij q_i
        dv_j = sum_{i, h in group} p_ij keep_ij / (1 - dropout_p) dy_i

    row_term_i = delta_i - dlse_i. *h in group* are the query heads that use the key head. ds and dz are 0 where p is 0:
    at a hidden pair, or where exp underflows. Under a recipe dq is rounded after the scale; dk and dv after the
    scale and the sum over the group, which are computed in float64.
    """
    terms, recipe = block.terms, block.recipe
    k, v = (per_query_head(x, terms) for x in (k, v))
    keep = keep_factor(block.rows, block.columns, terms, q.shape[0])
    with np.errstate(over="ignore", invalid="ignore"):  # check_range sees what matters
        # BWD-2, BWD-3: subtracting row_term adds dlse.
        difference = recipe.product(dy, v.swapaxes(2, 3)) * keep - row_term[..., None]
        if recipe.products == "float64":
            check_range(difference, p > 0, "dp - delta + dlse")
        dz = np.where(p == 0, 0.0, p * difference)
    if t is not None:  # BWD-4
        dz = dz * (1.0 - t * t)
    dz_operand, kept = recipe.to_ds(dz), recipe.to_p(p * keep)
    # BWD-5, BWD-6, BWD-7
    dq = recipe.to_products(terms.scale * recipe.product(dz_operand, k))
    dk = terms.scale * recipe.product(dz_operand.swapaxes(2, 3), q)
    dv = recipe.product(kept.swapaxes(2, 3), dy)
    dk, dv = (recipe.to_products(over_group(x, terms.group)) for x in (dk, dv))
    return dz, dq, dk, dv


def per_query_head(x: Array, terms: Terms) -> Array:
    """k or v [B, Hkv, n, D] with one head for each query head: [B, H, n, D] (FWD-10)."""
    return np.repeat(x, terms.group, axis=1)


def over_group(x: Array, group: int) -> Array:
    """[B, H, S, D] summed over the query heads of each key head: [B, Hkv, S, D] (BWD-6)."""
    batch, heads, length, width = x.shape
    return x.reshape(batch, heads // group, group, length, width).sum(axis=2)


def sink_gradient(sinks: Array, lse: Array, dlse_minus_delta: Array) -> Array:
    """BWD-9: dsinks [H, N], dsink_hn = sum_{b, i} exp(sink_hn - lse_i) (dlse_i - delta_i)."""
    empty = np.isneginf(lse)  # only a caller's own lse can be -inf beside sinks (BWD-10)
    shift = np.where(empty, 0.0, lse)[..., None]
    p = np.where(empty[..., None], 0.0, np.exp(sinks[None, :, None, :] - shift))
    return (p * dlse_minus_delta[..., None]).sum(axis=(0, 2))


def reduce_to(x: Array, shape: tuple[int, ...]) -> Array:
    """BWD-8: sums over the axes along which a tensor of ``shape`` was broadcast to x's."""
    axes = tuple(n for n in range(x.ndim) if shape[n] == 1 and x.shape[n] != 1)
    return x.sum(axis=axes, keepdims=True)
