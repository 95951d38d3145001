"""One attention block and its gradients in float64 torch, from the values given.

Tensors are [B, S, H, D]; k and v may have fewer heads, which groups of query heads share. ``visible`` [Sq, Sk] is True
where a query sees a key. No value is recomputed that is given: the backward pass uses the o and lse that it receives.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Gradients", "backward", "forward"]


class Gradients(NamedTuple):
    """Gradients of q, k and v in their shapes, and ``delta`` [B, H, Sq]: the sum of dout * o of each row."""

    dq: Any
    dk: Any
    dv: Any
    delta: Any


def forward(
    q: Any, k: Any, v: Any, visible: Any, scale: float, softcap: float = 0.0
) -> tuple[Any, Any]:
    """Return o [B, Sq, H, D] and lse [B, H, Sq] in float64; a row without keys has o 0 and lse -inf."""
    import torch

    keys, values = heads(k, q), heads(v, q)
    s, _ = scores(q.double(), keys, scale, softcap)
    s = s.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(s, dim=3)
    base = lse.masked_fill(lse == -torch.inf, 0.0)  # without it, -inf - -inf is NaN
    return torch.einsum("bhij,bjhd->bihd", torch.exp(s - base[..., None]), values), lse


def backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    visible: Any,
    scale: float,
    softcap: float = 0.0,
) -> Gradients:
    """Return the gradients in float64, from the o [B, Sq, H, D] and lse [B, H, Sq] given.

    A row whose lse is +inf contributes nothing.
    """
    import torch

    wide_q, wide_dout, keys, values = q.double(), dout.double(), heads(k, q), heads(v, q)
    s, slope = scores(wide_q, keys, scale, softcap)
    s = s.masked_fill(~visible, -torch.inf)
    p = torch.exp(s - lse.double()[..., None])
    delta = torch.einsum("bihd,bihd->bhi", wide_dout, o.double())
    dp = torch.einsum("bihd,bjhd->bhij", wide_dout, values)
    ds = p * (dp - delta[..., None]) * slope * scale
    dq = torch.einsum("bhij,bjhd->bihd", ds, keys)
    dk = torch.einsum("bhij,bihd->bjhd", ds, wide_q)
    dv = torch.einsum("bhij,bihd->bjhd", p, wide_dout)
    return Gradients(dq, shared(dk, k), shared(dv, v), delta)


def scores(q: Any, k: Any, scale: float, softcap: float) -> tuple[Any, Any]:
    """Return the scores [B, H, Sq, Sk] after the soft cap, and the slope of the soft cap at each."""
    import torch

    s = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if softcap <= 0.0:
        return s, 1.0
    t = torch.tanh(s / softcap)
    return softcap * t, 1.0 - t * t


def heads(x: Any, q: Any) -> Any:
    """Return k or v in float64 with one head for each query head: query head h uses h // (H / Hkv)."""
    return x.double().repeat_interleave(q.shape[2] // x.shape[2], dim=2)


def shared(gradient: Any, x: Any) -> Any:
    """Sum a gradient [B, Sk, H, D] over the query heads that share a head of x."""
    batch, tokens, kv_heads, width = x.shape
    group = gradient.shape[2] // kv_heads
    return gradient.reshape(batch, tokens, kv_heads, group, width).sum(dim=3)
