"""The differentiable functions of the stand-in for flash_attn, with the signatures of 2.6 to 2.8.

The gradient of lse is ignored, as by the original.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ringspec.standins.flash_attn.arguments import (
    Lengths,
    Options,
    check_tensors,
    lengths,
    not_modelled,
    options,
)
from ringspec.standins.flash_attn.calls import kernel_of, no_paging, probabilities
from ringspec.standins.names import Standin

__all__ = ["public"]

NONE = (-1, -1)


@dataclass(frozen=True)
class Calling:
    """One call: its stand-in, its options, the lengths of packed sequences, and whether lse is returned."""

    standin: Standin
    options: Options
    lengths: Lengths | None
    returns_lse: bool

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        kernel = kernel_of(self.standin)
        if self.lengths is None:
            return kernel.dense_forward(q, k, v, self.options)
        return kernel.packed_forward(q, k, v, self.lengths, self.options)

    def backward(self, given: tuple[Any, ...], lse: Any, buffers: tuple[Any, Any, Any]) -> None:
        kernel = kernel_of(self.standin)
        if self.lengths is None:
            kernel.dense_backward(self.standin, given, lse, buffers, self.options)
        else:
            kernel.packed_backward(self.standin, given, lse, buffers, self.lengths, self.options)


@functools.cache
def attention_function() -> Any:
    """Make the autograd function, which needs torch."""
    import torch

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, calling: Calling) -> Any:
            o, lse = calling.forward(q, k, v)
            ctx.calling = calling
            ctx.save_for_backward(q, k, v, o, lse)
            return (o, lse) if calling.returns_lse else o

        @staticmethod
        def backward(ctx: Any, dout: Any, *_: Any) -> Any:
            q, k, v, o, lse = ctx.saved_tensors
            buffers = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
            ctx.calling.backward((dout, q, k, v, o), lse, buffers)
            return *buffers, None

    return Attention


def evaluate(
    chosen: Standin,
    tensors: tuple[Any, Any, Any],
    packed: tuple[Any, ...] | None,
    dropout_p: Any,
    scale: Any,
    rest: tuple[Any, ...],
) -> Any:
    """Return o, or (o, lse, probabilities) if the call returns them.

    ``packed``: cu_seqlens and max_seqlen of q and k. ``rest``: causal, window_size, softcap, alibi_slopes,
    deterministic, return_attn_probs.
    """
    q, k, v = tensors
    causal, window, softcap, alibi_slopes, _, returns = rest
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    checked = options(scale, causal, window, softcap, dropout_p, alibi_slopes)
    check_tensors(chosen, 4 if packed is None else 3, q=q, k=k, v=v)
    rows = None if packed is None else lengths(packed, q, k)
    result = attention_function().apply(q, k, v, Calling(chosen, checked, rows, bool(returns)))
    return (*result, probabilities(q, False, 0, 0, 0, 0)) if returns else result


def public(chosen: Standin) -> dict[str, Callable[..., Any]]:
    """Return the public functions by name."""
    made = (*dense(chosen), *varlen(chosen), with_kvcache())
    return {function.__name__: function for function in made}


def with_kvcache() -> Callable[..., Any]:
    def flash_attn_with_kvcache(*given: Any, **named: Any) -> Any:
        raise not_modelled(
            "no call of flash_attn_with_kvcache", f"{len(given)} arguments", "use flash_attn_func"
        )

    return flash_attn_with_kvcache


def dense(chosen: Standin) -> tuple[Callable[..., Any], ...]:
    """Return the functions of [B, S, H, D]; packed qkv is [B, S, 3, H, D], packed kv [B, S, 2, H, D]."""

    def flash_attn_func(
        q: Any,
        k: Any,
        v: Any,
        dropout_p: Any = 0.0,
        softmax_scale: Any = None,
        causal: Any = False,
        window_size: Any = NONE,
        softcap: Any = 0.0,
        alibi_slopes: Any = None,
        deterministic: Any = False,
        return_attn_probs: Any = False,
    ) -> Any:
        rest = (causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
        return evaluate(chosen, (q, k, v), None, dropout_p, softmax_scale, rest)

    def flash_attn_kvpacked_func(
        q: Any,
        kv: Any,
        dropout_p: Any = 0.0,
        softmax_scale: Any = None,
        causal: Any = False,
        window_size: Any = NONE,
        softcap: Any = 0.0,
        alibi_slopes: Any = None,
        deterministic: Any = False,
        return_attn_probs: Any = False,
    ) -> Any:
        rest = (causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
        three = (q, kv[:, :, 0], kv[:, :, 1])
        return evaluate(chosen, three, None, dropout_p, softmax_scale, rest)

    def flash_attn_qkvpacked_func(
        qkv: Any,
        dropout_p: Any = 0.0,
        softmax_scale: Any = None,
        causal: Any = False,
        window_size: Any = NONE,
        softcap: Any = 0.0,
        alibi_slopes: Any = None,
        deterministic: Any = False,
        return_attn_probs: Any = False,
    ) -> Any:
        rest = (causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
        three = (qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2])
        return evaluate(chosen, three, None, dropout_p, softmax_scale, rest)

    return flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func


def varlen(chosen: Standin) -> tuple[Callable[..., Any], ...]:
    """Return the functions of [T, H, D]; packed qkv is [T, 3, H, D], packed kv [T, 2, H, D]."""

    def flash_attn_varlen_func(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: Any,
        max_seqlen_k: Any,
        dropout_p: Any = 0.0,
        softmax_scale: Any = None,
        causal: Any = False,
        window_size: Any = NONE,
        softcap: Any = 0.0,
        alibi_slopes: Any = None,
        deterministic: Any = False,
        return_attn_probs: Any = False,
        block_table: Any = None,
    ) -> Any:
        no_paging(block_table=block_table)
        packed = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        rest = (causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
        return evaluate(chosen, (q, k, v), packed, dropout_p, softmax_scale, rest)

    def flash_attn_varlen_kvpacked_func(
        q: Any,
        kv: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: Any,
        max_seqlen_k: Any,
        dropout_p: Any = 0.0,
        softmax_scale: Any = None,
        causal: Any = False,
        window_size: Any = NONE,
        softcap: Any = 0.0,
        alibi_slopes: Any = None,
        deterministic: Any = False,
        return_attn_probs: Any = False,
    ) -> Any:
        packed = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        rest = (causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
        three = (q, kv[:, 0], kv[:, 1])
        return evaluate(chosen, three, packed, dropout_p, softmax_scale, rest)

    def flash_attn_varlen_qkvpacked_func(
        qkv: Any,
        cu_seqlens: Any,
        max_seqlen: Any,
        dropout_p: Any = 0.0,
        softmax_scale: Any = None,
        causal: Any = False,
        window_size: Any = NONE,
        softcap: Any = 0.0,
        alibi_slopes: Any = None,
        deterministic: Any = False,
        return_attn_probs: Any = False,
    ) -> Any:
        packed = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
        rest = (causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
        three = (qkv[:, 0], qkv[:, 1], qkv[:, 2])
        return evaluate(chosen, three, packed, dropout_p, softmax_scale, rest)

    return (
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
    )
