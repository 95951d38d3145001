"""The differentiable functions of the stand-in for FlashAttention 3.

They return o; 3.0.0 returns (o, lse) with ``return_attn_probs``, which 3.0.0.b1 does not know. The gradient of lse is
ignored, as by the original.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ringspec.errors import RefusedError
from ringspec.standins.flash_attn_3.arguments import Given, check_splits, refused_package, unused
from ringspec.standins.flash_attn_3.low_level import backward, forward
from ringspec.standins.names import Standin

__all__ = ["public"]

NO_WINDOW = (-1, -1)


@functools.cache
def attention_function() -> Any:
    """Make the autograd function, which needs torch."""
    import torch

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, q: Any, k: Any, v: Any, chosen: Standin, given: Given, rest: Any
        ) -> Any:
            options, ctx.deterministic, returns_lse = rest
            o, lse = forward(chosen, q, k, v, given, options)
            ctx.called = (chosen, given, options[:4])
            ctx.save_for_backward(q, k, v, o, lse)
            return (o, lse) if returns_lse else o

        @staticmethod
        def backward(ctx: Any, dout: Any, *_: Any) -> Any:
            q, k, v, o, lse = ctx.saved_tensors
            chosen, given, options = ctx.called
            tensors = {"dout": dout, "q": q, "k": k, "v": v, "out": o}
            tensors |= {"dq": None, "dk": None, "dv": None}
            found = backward(chosen, tensors, lse, given, options, ctx.deterministic)
            return *found, None, None, None

    return Attention


def evaluate(chosen: Standin, tensors: tuple[Any, Any, Any], given: Given, named: Any) -> Any:
    """Return o, or (o, lse); ``named``: the arguments of a public function by name."""
    unused(**{name: named.get(name) for name in ("qv", "q_descale", "k_descale", "v_descale")})
    check_splits(named.get("num_splits", 1))
    names = ("softmax_scale", "causal", "window_size", "softcap", "attention_chunk")
    options = tuple(named[name] for name in names)
    rest = (options, named["deterministic"], bool(named.get("return_attn_probs")))
    return attention_function().apply(*tensors, chosen, given, rest)


def public(chosen: Standin) -> dict[str, Callable[..., Any]]:
    """Return the public functions by name."""
    made = with_probabilities(chosen)
    if chosen.version == "3.0.0.b1":
        made = tuple(without_probabilities(function) for function in made)
    return {function.__name__: function for function in (*made, *refusing())}


def refusing() -> tuple[Callable[..., Any], ...]:
    """Return the functions that a program may import, and that are not modelled."""
    return tuple(
        refusing_one(name)
        for name in ("flash_attn_with_kvcache", "flash_attn_combine", "get_scheduler_metadata")
    )


def refusing_one(name: str) -> Callable[..., Any]:
    def refuse(*given: Any, **named: Any) -> Any:
        raise refused_package(
            f"no call of {name}", f"{len(given)} arguments", "use flash_attn_func"
        )

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


def without_probabilities(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function without its last argument, return_attn_probs."""
    import inspect

    signature = inspect.signature(function)
    fewer = signature.replace(parameters=list(signature.parameters.values())[:-1])

    @functools.wraps(function)
    def beta(*given: Any, **named: Any) -> Any:
        if "return_attn_probs" in named:
            raise TypeError(
                f"{function.__name__}() got an unexpected keyword argument 'return_attn_probs'"
            )
        fewer.bind(*given, **named)
        return function(*given, **named)

    beta.__signature__ = fewer  # type: ignore[attr-defined]
    return beta


def with_probabilities(chosen: Standin) -> tuple[Callable[..., Any], ...]:
    """Return the functions with the signatures of 3.0.0."""

    def flash_attn_func(
        q: Any,
        k: Any,
        v: Any,
        softmax_scale: Any = None,
        causal: Any = False,
        qv: Any = None,
        q_descale: Any = None,
        k_descale: Any = None,
        v_descale: Any = None,
        window_size: Any = NO_WINDOW,
        attention_chunk: Any = 0,
        softcap: Any = 0.0,
        num_splits: Any = 1,
        pack_gqa: Any = None,
        deterministic: Any = False,
        sm_margin: Any = 0,
        return_attn_probs: Any = False,
    ) -> Any:
        return evaluate(chosen, (q, k, v), Given(), locals())

    def flash_attn_varlen_func(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: Any,
        max_seqlen_k: Any,
        seqused_q: Any = None,
        seqused_k: Any = None,
        softmax_scale: Any = None,
        causal: Any = False,
        qv: Any = None,
        q_descale: Any = None,
        k_descale: Any = None,
        v_descale: Any = None,
        window_size: Any = NO_WINDOW,
        attention_chunk: Any = 0,
        softcap: Any = 0.0,
        num_splits: Any = 1,
        pack_gqa: Any = None,
        deterministic: Any = False,
        sm_margin: Any = 0,
        return_attn_probs: Any = False,
    ) -> Any:
        given = Given(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
        return evaluate(chosen, (q, k, v), given, locals())

    def flash_attn_qkvpacked_func(
        qkv: Any,
        softmax_scale: Any = None,
        causal: Any = False,
        q_descale: Any = None,
        k_descale: Any = None,
        v_descale: Any = None,
        window_size: Any = NO_WINDOW,
        attention_chunk: Any = 0,
        softcap: Any = 0.0,
        deterministic: Any = False,
        num_heads_q: Any = None,
        sm_margin: Any = 0,
        return_attn_probs: Any = False,
    ) -> Any:
        return evaluate(chosen, three_of(qkv, num_heads_q), Given(), locals())

    return flash_attn_func, flash_attn_varlen_func, flash_attn_qkvpacked_func


def three_of(qkv: Any, heads: Any) -> tuple[Any, Any, Any]:
    """Return q, k and v of [B, S, 3, H, D], or of [B, S, H + 2 Hkv, D] with the number of query heads."""
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    if qkv.dim() != 4 or heads is None or (qkv.shape[2] - heads) % 2:
        expected = "qkv [B, S, 3, H, D], or [B, S, H + 2 Hkv, D] with num_heads_q"
        raise RefusedError(expected, f"{tuple(qkv.shape)} with {heads}", "use flash_attn_func")
    few = (qkv.shape[2] - heads) // 2
    return qkv[:, :, :heads], qkv[:, :, heads : heads + few], qkv[:, :, heads + few :]
