"""The two operators: tensors are [B, H, S, D], lse is [B, H, S]; o and the gradients lie in memory as [B, S, H, D]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringspec.errors import OptionError, shown
from ringspec.standins import attention
from ringspec.standins.names import Standin
from ringspec.standins.rounding import rounded

__all__ = ["operators"]

WIDEST = 256


def operators(chosen: Standin) -> dict[str, Callable[..., Any]]:
    """Return the functions by the names of the operators."""

    def forward(
        query: Any,
        key: Any,
        value: Any,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        import torch

        check(chosen, query, key, value, dropout_p, is_causal)
        if return_debug_mask:
            raise refused("return_debug_mask", "False", "True")
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        o, lse = attention.forward(q, k, v, visible(q, k, is_causal), factor(q, scale))
        statistics = torch.promote_types(query.dtype, torch.float32)
        nothing = torch.empty(0, dtype=query.dtype)
        state, unused = (torch.zeros(n, dtype=torch.uint64) for n in (2, 0))
        results = (
            rounded(o, query.dtype).contiguous().transpose(1, 2),
            lse.to(statistics).contiguous(),
        )
        no_lengths = (torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int32))
        return (*results, *no_lengths, query.shape[2], key.shape[2], state, unused, nothing)

    def backward(
        grad_out: Any,
        query: Any,
        key: Any,
        value: Any,
        out: Any,
        logsumexp: Any,
        cum_seq_q: Any,
        cum_seq_k: Any,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: Any,
        philox_offset: Any,
        *,
        scale: float | None = None,
    ) -> tuple[Any, Any, Any]:
        check(chosen, query, key, value, dropout_p, is_causal)
        dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
        # The kernel reads the memory of lse as [B, H, S], whatever its strides.
        batch, heads, tokens, _ = query.shape
        if tuple(logsumexp.shape) != (batch, heads, tokens):
            raise refused("logsumexp", f"[{batch}, {heads}, {tokens}]", list(logsumexp.shape))
        lse = logsumexp.as_strided((batch, heads, tokens), (heads * tokens, tokens, 1))
        mask = visible(q, k, is_causal)
        found = attention.backward(dout, q, k, v, o, lse, mask, factor(q, scale))
        pairs = ((found.dq, query), (found.dk, key), (found.dv, value))
        dq, dk, dv = (rounded(x, like.dtype).contiguous().transpose(1, 2) for x, like in pairs)
        return dq, dk, dv

    name = "_scaled_dot_product_flash_attention"
    return {name: forward, f"{name}_backward": backward}


def factor(q: Any, scale: float | None) -> float:
    return float(q.shape[3] ** -0.5) if scale is None else scale


def visible(q: Any, k: Any, is_causal: bool) -> Any:
    """Return the mask [Sq, Sk]; the lengths of a causal mask are equal."""
    import torch

    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    return mask.tril() if is_causal else mask


def check(
    chosen: Standin, query: Any, key: Any, value: Any, dropout_p: float, is_causal: bool
) -> None:
    """Raise OptionError for what the CUDA operator refuses, and for what is not modelled."""
    import torch

    if not chosen.exact and query.dtype not in (torch.float16, torch.bfloat16):
        raise refused("query.dtype", "float16 or bfloat16, as the kernel has", query.dtype)
    if len({x.dtype for x in (query, key, value)}) != 1:
        raise refused("dtypes", "one for query, key and value", [x.dtype for x in (key, value)])
    (batch, heads, queries, width), (_, kv_heads, keys, _) = query.shape, key.shape
    if key.shape != value.shape or (key.shape[0], key.shape[3]) != (batch, width):
        got = [list(x.shape) for x in (query, key, value)]
        raise refused("shapes", "[B, H, Sq, D], [B, Hkv, Sk, D], [B, Hkv, Sk, D]", got)
    if heads % kv_heads != 0:
        raise refused("heads", f"a multiple of Hkv = {kv_heads}", heads)
    if width > WIDEST and not chosen.exact:
        raise refused("D", f"at most {WIDEST}", width)
    if dropout_p > 0.0:
        raise refused("dropout_p", "0, because dropout is not modelled", dropout_p)
    if is_causal and queries != keys:
        # scaled_dot_product_attention does not choose the flash kernel then, because its mask is aligned otherwise.
        raise refused("is_causal", "as many queries as keys, as PyTorch does", (queries, keys))


def refused(name: str, expected: str, got: Any) -> OptionError:
    return OptionError(f"{name}: {expected}", shown(got), "change the call of ATen's operator")
