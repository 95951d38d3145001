"""Dense attention and its gradient in float64: the definition (DESIGN section 2).

One worker, no blocks, every S x S matrix written out. All else in ringspec is held to these
functions, and they are held to an oracle that shares no code with them.

Sources: Vaswani et al., https://arxiv.org/abs/1706.03762 (section 3.2.1); for the gradient Dao et
al., FlashAttention, https://arxiv.org/abs/2205.14135 (appendix B.2); sinks as in GPT-OSS
(https://arxiv.org/abs/2508.10925), in the denominator only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspec.formats import check_range, check_results
from ringspec.problem.model import Array, Problem
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


def scores(problem: Problem) -> tuple[Array, Array | None]:
    """s [B, H, Sq, Sk], -inf where the mask forbids, and t = tanh(z / softcap) (FWD-1, FWD-3)."""
    q, rows, columns, terms = problem.q, problem.rows, problem.columns, problem.terms
    k = np.repeat(problem.k, terms.group, axis=1)  # FWD-10
    allowed = visible(rows, columns, terms)
    with np.errstate(over="ignore", invalid="ignore"):  # check_range sees what matters
        z = terms.scale * (q @ k.swapaxes(2, 3))
        if rows.bias is not None:
            z = z + np.where(np.isneginf(rows.bias), 0.0, rows.bias)
    check_range(z, allowed, "scores")
    if terms.softcap is None:
        return np.where(allowed, z, -np.inf), None
    with np.errstate(over="ignore"):  # tanh of infinity is 1
        t = np.tanh(z / terms.softcap)
    return np.where(allowed, terms.softcap * t, -np.inf), t


def normalise(problem: Problem, s: Array) -> tuple[Array, Array]:
    """lse [B, H, Sq] and p [B, H, Sq, Sk] of scores; sinks in the denominator (FWD-4, FWD-5)."""
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
    """o and lse of a checked problem (FWD-6 to FWD-9)."""
    s, _ = scores(problem)
    lse, p = normalise(problem, s)
    kept = p * keep_factor(problem.rows, problem.columns, problem.terms, problem.q.shape[0])
    v = np.repeat(problem.v, problem.terms.group, axis=1)
    return Forward(kept @ v + 0.0, lse)  # + 0.0: zeros are +0


def backward(problem: Problem, dy: Array, dlse: Array) -> Gradients:
    """Gradients of a checked problem (BWD-1 to BWD-10)."""
    s, t = scores(problem)
    lse, p = normalise(problem, s)
    keep = keep_factor(problem.rows, problem.columns, problem.terms, problem.q.shape[0])
    v = np.repeat(problem.v, problem.terms.group, axis=1)
    delta = (dy * ((p * keep) @ v)).sum(axis=3)
    return gradients(problem, p, t, keep, dy, lse, delta - dlse)


def block_gradients(problem: Problem, dy: Array, lse: Array, delta: Array) -> Gradients:
    """The share of a block in the gradients, from lse and delta of the whole rows as given (BWD-11)."""
    s, t = scores(problem)
    empty = np.isneginf(lse)
    with np.errstate(over="ignore"):
        p = np.where(empty[..., None], 0.0, np.exp(s - np.where(empty, 0.0, lse)[..., None]))
    check_range(p, p > 0, "exp(s - lse)")
    keep = keep_factor(problem.rows, problem.columns, problem.terms, problem.q.shape[0])
    return gradients(problem, p, t, keep, dy, lse, delta)


def gradients(
    problem: Problem,
    p: Array,
    t: Array | None,
    keep: Array | float,
    dy: Array,
    lse: Array,
    delta: Array,
) -> Gradients:
    """All gradients from p, t and delta = dy_o_sum - dlse (BWD-2 to BWD-9)."""
    q, rows, terms = problem.q, problem.rows, problem.terms
    k, v = (np.repeat(x, terms.group, axis=1) for x in (problem.k, problem.v))
    with np.errstate(over="ignore", invalid="ignore"):  # check_range sees what matters
        dp = (dy @ v.swapaxes(2, 3)) * keep
        difference = dp - delta[..., None]
        check_range(difference, p > 0, "dp - dy_o_sum")
        # 0 by definition where p is, whatever a hidden dp is
        ds = np.where(p > 0, p * difference, 0.0)
    dz = ds if t is None else ds * (1.0 - t * t)
    dq = terms.scale * (dz @ k)
    dk = over_group(terms.scale * (dz.swapaxes(2, 3) @ q), terms.group)
    dv = over_group((p * keep).swapaxes(2, 3) @ dy, terms.group)
    dsinks = None if terms.sinks is None else sink_gradient(terms.sinks, lse, -delta)
    dbias = None if rows.bias is None else reduce_to(dz, rows.bias.shape)
    check_results(dq=dq, dk=dk, dv=dv, dsinks=dsinks, dbias=dbias)
    dq, dk, dv = dq + 0.0, dk + 0.0, dv + 0.0  # zeros are +0
    dsinks = None if dsinks is None else dsinks + 0.0
    dbias = None if dbias is None else dbias + 0.0
    return Gradients(dq, dk, dv, dsinks, dbias)


def over_group(x: Array, group: int) -> Array:
    """[B, H, S, D] summed over the query heads of each key head: [B, Hkv, S, D] (BWD-6)."""
    batch, heads, length, width = x.shape
    return x.reshape(batch, heads // group, group, length, width).sum(axis=2)


def sink_gradient(sinks: Array, lse: Array, dlse_minus_delta: Array) -> Array:
    """BWD-9: [H, N], the sum over batches and rows of exp(sink - lse) * (dlse - delta)."""
    empty = np.isneginf(lse)  # only a caller's own lse can be -inf beside sinks (BWD-10)
    shift = np.where(empty, 0.0, lse)[..., None]
    p = np.where(empty[..., None], 0.0, np.exp(sinks[None, :, None, :] - shift))
    return (p * dlse_minus_delta[..., None]).sum(axis=(0, 2))


def reduce_to(x: Array, shape: tuple[int, ...]) -> Array:
    """BWD-8: sums over the axes along which a tensor of ``shape`` was broadcast to x's."""
    axes = tuple(n for n in range(x.ndim) if shape[n] == 1 and x.shape[n] != 1)
    return x.sum(axis=axes, keepdims=True)
