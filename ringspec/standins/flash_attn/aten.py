"""The functions of :mod:`~ringspec.standins.flash_attn.kernel` by PyTorch's own build of FlashAttention 2, on a GPU.

PyTorch contains the kernels of FlashAttention 2 as ``torch.ops.aten._flash_attention_forward`` and ``_backward``. They
have neither softcap nor buffers for the gradients, and do not return the sums of dout * out, which are NaN here.

Source: https://github.com/pytorch/pytorch, aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
"""

from __future__ import annotations

from typing import Any

from ringspec.standins.flash_attn.arguments import (
    HEAD_DIM_MULTIPLE,
    Lengths,
    Options,
    not_modelled,
)
from ringspec.standins.flash_attn.kernel import (
    check_keys,
    dense_sums,
    lse_memory,
    packed_sums,
)
from ringspec.standins.names import Standin

__all__ = ["dense_backward", "dense_forward", "packed_backward", "packed_forward"]


def dense_forward(q: Any, k: Any, v: Any, chosen: Options) -> tuple[Any, Any]:
    """Return o [B, Sq, H, D] and lse [B, H, Sq] of q [B, Sq, H, D] and k, v [B, Sk, Hkv, D]."""
    return forward((q, k, v), (None, None, q.shape[1], k.shape[1]), chosen)


def packed_forward(q: Any, k: Any, v: Any, lengths: Lengths, chosen: Options) -> tuple[Any, Any]:
    """Return o [Tq, H, D] and lse [H, Tq] of q [Tq, H, D] and k, v [Tk, Hkv, D]."""
    return forward((q, k, v), four(lengths), chosen)


def dense_backward(
    standin: Standin,
    given: tuple[Any, ...],
    lse: Any,
    buffers: tuple[Any, Any, Any],
    chosen: Options,
) -> Any:
    """Write dq, dk and dv into the buffers, from ``given``: dout, q, k, v, out; return NaN for the sums."""
    q, k = given[1:3]
    check_keys(k.shape[1])
    read = lse_memory(standin, lse, (q.shape[0], q.shape[2], q.shape[1]), q)
    found = backward(given, read, (None, None, q.shape[1], k.shape[1]), chosen)
    for buffer, gradient in zip(buffers, found, strict=True):
        buffer.copy_(gradient)
    return dense_sums(q)


def packed_backward(
    standin: Standin,
    given: tuple[Any, ...],
    lse: Any,
    buffers: tuple[Any, Any, Any],
    lengths: Lengths,
    chosen: Options,
) -> Any:
    """Write dq, dk and dv into the rows of sequences of the buffers, as dense_backward; return NaN for the sums."""
    q = given[1]
    check_keys(lengths.longest_k)
    read = lse_memory(standin, lse, (q.shape[1], q.shape[0]), q)
    found = backward(given, read, four(lengths), chosen)
    places = (lengths.rows_q, lengths.rows_k, lengths.rows_k)
    for buffer, gradient, rows in zip(buffers, found, places, strict=True):
        inside = slice(rows[0][0], rows[-1][1])
        buffer[inside] = gradient[inside]
    return packed_sums(q, lengths)


def operators() -> Any:
    import torch

    return torch.ops.aten


def four(lengths: Lengths) -> tuple[Any, ...]:
    """Return cu_seqlens and max_seqlen of q and k, as the operators take them."""
    ends = (lengths.ends_q.contiguous(), lengths.ends_k.contiguous())
    return *ends, lengths.longest_q, lengths.longest_k


def forward(tensors: tuple[Any, ...], lengths: tuple[Any, ...], chosen: Options) -> tuple[Any, Any]:
    """Return o and lse of q, k and v."""
    import torch

    keyword = keywords(chosen)
    with torch.no_grad():
        padded = [ready(x) for x in tensors]
        o, lse, *_ = operators()._flash_attention_forward(
            *padded, *lengths, 0.0, chosen.causal, False, **keyword
        )
    return o[..., : tensors[0].shape[-1]], lse


def backward(
    given: tuple[Any, ...], lse: Any, lengths: tuple[Any, ...], chosen: Options
) -> list[Any]:
    """Return dq, dk and dv from ``given``: dout, q, k, v, out."""
    import torch

    keyword = keywords(chosen)
    with torch.no_grad():
        padded = [ready(x) for x in given]
        # The state of the random numbers is read with dropout only.
        state = [torch.zeros(n, dtype=torch.uint64, device=lse.device) for n in (2, 1)]
        found = operators()._flash_attention_backward(
            *padded, lse, *lengths, 0.0, chosen.causal, *state, **keyword
        )
    return [x[..., : given[1].shape[-1]] for x in found]


def keywords(chosen: Options) -> dict[str, Any]:
    """Return scale and window by the operators' names; raise RefusedError for what the operators lack."""
    if chosen.softcap:
        fix = "use softcap=0.0, or the stand-in 'flash_attn' on a CPU"
        raise not_modelled("softcap=0.0 on a GPU", chosen.softcap, fix)
    left, right = chosen.window
    return {"scale": chosen.scale, "window_size_left": left, "window_size_right": right}


def ready(x: Any) -> Any:
    """Return x with its last axis contiguous and padded to a multiple of 8 with zeros, as the original prepares it."""
    import torch

    short = -x.shape[-1] % HEAD_DIM_MULTIPLE
    if short:
        return torch.nn.functional.pad(x, (0, short))
    return x if x.stride(-1) == 1 else x.contiguous()
