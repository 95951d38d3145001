"""A naive attention in one format, and the other things that the rules of ``rivals`` compare with.

The naive implementation is what frameworks compute without a fused kernel: every intermediate matrix is
stored in the format. It is the yardstick of FlashAttention's tests (``attention_ref`` with ``upcast=False,
reorder_ops=True``, https://github.com/Dao-AILab/flash-attention/blob/main/tests/test_flash_attn.py).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ringspec.compare.noise.problem import Attention
from ringspec.formats import round_to, unit_roundoff

Array = NDArray[np.float64]
Named = dict[str, Array]


def stored(x: NDArray, format: str) -> Array:
    """x as a tensor of that format holds it."""
    return round_to(np.asarray(x, dtype=np.float64), format)


def product(a: Array, b: Array, format: str) -> Array:
    """a @ b, accumulated in float32 (float64 for float64) and stored in the format."""
    wide = np.float64 if format == "float64" else np.float32
    return stored(a.astype(wide) @ b.astype(wide), format)


def over_group(x: Array, heads: int) -> Array:
    """Sum over the query heads of each key head."""
    batch, n, *rest = x.shape
    return np.asarray(x.reshape(batch, heads, n // heads, *rest).sum(axis=2))


def naive(
    q: Array,
    k: Array,
    v: Array,
    dy: Array | None,
    *,
    visible: NDArray[np.bool_],
    scale: float,
    format: str,
) -> Named:
    """o and, with dy, dq, dk, dv, where every intermediate result is stored in ``format``.

    q, dy [B, H, Sq, .], k, v [B, Hkv, Sk, .]; ``visible`` broadcastable to [B, H, Sq, Sk]. The scale is
    multiplied to k, softmax and its gradient are computed wide and stored; no row may be empty.

    >>> one = np.ones((1, 1, 2, 4))
    >>> seen = np.tri(2, dtype=bool)
    >>> naive(one, one, one, None, visible=seen, scale=0.5, format="bfloat16")["o"][0, 0, 0, 0]
    np.float64(1.0)
    """
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scaled = stored(k * scale, format)
    s = np.where(visible, product(q, scaled.swapaxes(2, 3), format), -np.inf)
    p = np.exp(s - s.max(axis=3, keepdims=True))
    p = stored(p / p.sum(axis=3, keepdims=True), format)
    results = {"o": product(p, v, format)}
    if dy is None:
        return results
    dp = product(dy, v.swapaxes(2, 3), format)
    ds = stored(p * (dp - (p * dp).sum(axis=3, keepdims=True)), format)
    dk = stored(product(ds.swapaxes(2, 3), q, format) * scale, format)
    dv = product(p.swapaxes(2, 3), dy, format)
    results["dq"] = product(ds, scaled, format)
    results["dk"], results["dv"] = (stored(over_group(x, kv_heads), format) for x in (dk, dv))
    return results


def naive_of(attention: Attention, format: str, seed: int | None = None) -> Named:
    """The naive results of a problem; with ``seed``, of inputs perturbed by one machine epsilon.

    Each element is multiplied by 1 + eps or 1 - eps, eps = 2 u, and stored in the format.
    """
    given = [attention.q, attention.k, attention.v, attention.dy]
    if seed is not None:
        rng, eps = np.random.default_rng(seed), 2.0 * unit_roundoff(format)
        given = [
            None if x is None else stored(x * (1.0 + eps * rng.choice((-1, 1), x.shape)), format)
            for x in given
        ]
    q, k, v, dy = given
    assert q is not None and k is not None and v is not None
    visible = ~np.isneginf(attention.s)
    return naive(q, k, v, dy, visible=visible, scale=attention.scale, format=format)


def gradient_of_scores(attention: Attention) -> Array:
    """ds = p * (dp - delta), without soft cap and dropout."""
    assert attention.dy is not None
    dp = attention.dy @ np.repeat(attention.v, attention.group, axis=1).swapaxes(2, 3)
    delta = (attention.dy * attention.o).sum(axis=3)
    return np.asarray(attention.p * (dp - delta[..., None]))


def sizes(attention: Attention) -> dict[str, tuple[Array, int]]:
    """By tensor: the last product with the absolute values of its operands, and its length."""
    group, kv_heads = attention.group, attention.k.shape[1]
    k, v = (np.repeat(np.abs(x), group, axis=1) for x in (attention.k, attention.v))
    p, n_q, n_k = attention.p, attention.q.shape[2], attention.k.shape[2]
    found = {"o": (np.asarray(p @ v), n_k)}
    if attention.dy is not None:
        ds = attention.scale * np.abs(gradient_of_scores(attention))
        dk = over_group(ds.swapaxes(2, 3) @ np.abs(attention.q), kv_heads)
        dv = over_group(p.swapaxes(2, 3) @ np.abs(attention.dy), kv_heads)
        found |= {"dq": (np.asarray(ds @ k), n_k), "dk": (dk, n_q * group), "dv": (dv, n_q * group)}
    return found
