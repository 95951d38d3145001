"""Dense attention and its gradient in float64: the definition (DESIGN section 2).

One worker, no blocks, every S x S matrix written out. All else in ringspec is held to these
functions, and they are held to an oracle that shares no code with them.

Sources: Vaswani et al., https://arxiv.org/abs/1706.03762 (section 3.2.1); for the gradient Dao et
al., FlashAttention, https://arxiv.org/abs/2205.14135 (appendix B.2); sinks as in GPT-OSS
(https://arxiv.org/abs/2508.10925), in the denominator only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike

from ringspec.errors import ShapeError
from ringspec.problem.checks import check_partials, check_range, check_results
from ringspec.problem.model import Array, Problem
from ringspec.problem.options import Options, check, check_gradients, check_lse, takes_options
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


@takes_options
def attention(q: ArrayLike, k: ArrayLike, v: ArrayLike, **options: Unpack[Options]) -> Forward:
    """Softmax attention of DESIGN section 2.

    q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] of any float dtype; keywords are those of
    :class:`~ringspec.problem.options.Options`. Returns :class:`Forward` in float64. Bad input raises a
    subclass of :class:`~ringspec.errors.RingspecError`.

    >>> import numpy as np
    >>> q = k = np.zeros((1, 1, 2, 4)); v = np.arange(8.0).reshape(1, 1, 2, 4)
    >>> attention(q, k, v, causal=True).o[0, 0].tolist()
    [[0.0, 1.0, 2.0, 3.0], [2.0, 3.0, 4.0, 5.0]]
    """
    return forward(check(q, k, v, dict(options)))


@takes_options
def attention_backward(
    dy: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    dlse: ArrayLike | None = None,
    **options: Unpack[Options],
) -> Gradients:
    """Gradients of a loss L with dy = dL/do [B, H, Sq, Dv] and dlse = dL/dlse [B, H, Sq].

    The other arguments are those of :func:`attention`, keywords as in
    :class:`~ringspec.problem.options.Options`. Returns :class:`Gradients` in float64.

    >>> import numpy as np
    >>> q = k = np.zeros((1, 1, 2, 4)); v = dy = np.ones((1, 1, 2, 4))
    >>> attention_backward(dy, q, k, v, causal=True).dv[0, 0, :, 0].tolist()
    [1.5, 0.5]
    """
    problem = check(q, k, v, dict(options))
    dy, dlse = check_gradients(problem, dy, dlse)
    result = backward(problem, dy, dlse)
    return as_given(result, options)


@takes_options
def attention_block_backward(
    dy: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    lse: ArrayLike,
    delta: ArrayLike,
    **options: Unpack[Options],
) -> Gradients:
    """The share of queries q and keys k, v in the gradients, from lse and delta as given (BWD-11).

    ``lse`` and ``delta`` [B, H, Sq] belong to the whole rows, of which these keys may be a part;
    delta is dy_o_sum, less dlse where the loss reads lse. p = exp(s - lse) is not renormalised. The
    other arguments are those of :func:`attention_backward`, keywords as in
    :class:`~ringspec.problem.options.Options`. The shares of all key blocks add up to its result
    (dsinks is that of the rows, not of the block).

    >>> import numpy as np
    >>> q = k = np.zeros((1, 1, 1, 4)); v = dy = np.ones((1, 1, 1, 4))
    >>> half = attention_block_backward(dy, q, k, v, lse=[[[np.log(2.0)]]], delta=[[[4.0]]])
    >>> half.dv.tolist()  # this key has half of the row's weight
    [[[[0.5, 0.5, 0.5, 0.5]]]]
    """
    problem = check(q, k, v, dict(options))
    dy, delta = check_gradients(problem, dy, delta, "delta")
    lse = check_lse(problem, lse)
    s, t = scores(problem)
    empty = np.isneginf(lse)
    with np.errstate(over="ignore"):
        p = np.where(empty[..., None], 0.0, np.exp(s - np.where(empty, 0.0, lse)[..., None]))
    check_range(p, p > 0, "exp(s - lse)")
    keep = keep_factor(problem.rows, problem.columns, problem.terms, problem.q.shape[0])
    return as_given(gradients(problem, p, t, keep, dy, lse, delta), options)


def merge_partials(parts: Sequence[tuple[ArrayLike, ArrayLike]]) -> Forward:
    """The result over all keys of normalised partial results (o_n, lse_n) over disjoint keys.

    ``parts`` is a list of pairs o_n [B, H, S, Dv], lse_n [B, H, S] (natural log; -inf where a part
    saw no key). lse = log sum exp lse_n, o = sum exp(lse_n - lse) o_n (SOFT-2, SOFT-3, SOFT-4).
    Raises :class:`~ringspec.errors.ShapeError` without a pair, or for unlike shapes.

    >>> import numpy as np
    >>> o, lse = np.ones((1, 1, 1, 2)), np.zeros((1, 1, 1))
    >>> merge_partials([(o, lse), (3 * o, lse + np.log(3.0))]).o.tolist()
    [[[[2.5, 2.5]]]]
    """
    pairs = check_partials(parts)
    if len({o.shape for o, _ in pairs}) != 1:
        raise ShapeError(
            "at least one pair (o, lse), all of the same shape",
            str([o.shape for o, _ in pairs]),
            "merge parts of the same query rows",
        )
    m = np.max([lse for _, lse in pairs], axis=0)
    shift = np.where(np.isneginf(m), 0.0, m)
    total = np.sum([np.exp(lse - shift) for _, lse in pairs], axis=0)
    empty = total == 0
    safe = np.where(empty, 1.0, total)
    o = np.zeros(pairs[0][0].shape)
    for part, lse in pairs:
        o = o + (np.exp(lse - shift) / safe)[..., None] * part
    return Forward(o, np.where(empty, -np.inf, shift + np.log(safe)))


def as_given(result: Gradients, options: Any) -> Gradients:
    """dsinks and dbias in the shapes in which sinks and bias were given."""
    dsinks, dbias = result.dsinks, result.dbias
    if dsinks is not None:
        dsinks = dsinks.reshape(np.shape(options["sinks"]))
    if dbias is not None:
        dbias = dbias.reshape(np.shape(options["bias"]))
    return Gradients(result.dq, result.dk, result.dv, dsinks, dbias)


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
