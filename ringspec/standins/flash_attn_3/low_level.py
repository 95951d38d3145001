"""``_flash_attn_forward`` and ``_flash_attn_backward`` of FlashAttention 3, with the signatures of each version.

3.0.0.b1 takes ``window_size`` and ``causal``, and returns dq, dk, dv and the sums of dout * out. 3.0.0 takes
``window_size_left``, ``window_size_right`` and, backward, ``is_causal``, and returns the sums only, which are NaN here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringspec.errors import RefusedError
from ringspec.standins.flash_attn_3 import kernel
from ringspec.standins.flash_attn_3.arguments import (
    Given,
    check_backward,
    check_splits,
    check_tensors,
    options_of,
    refused_package,
    rows_of,
    unused,
)
from ringspec.standins.names import Standin

__all__ = ["backward", "forward", "low_level"]

NOT_MODELLED = (
    "k_new v_new qv out cu_seqlens_k_new page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary"
    " q_descale k_descale v_descale"
).split()
TILE = 128


def forward(
    chosen: Standin, q: Any, k: Any, v: Any, given: Given, given_options: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Return o and lse of one call; ``given_options``: scale, causal, window, softcap, attention_chunk."""
    scale, causal, window, softcap, chunk = given_options
    check_tensors(chosen, given, q=q, k=k, v=v)
    options = options_of(scale, causal, window, softcap, q, chunk)
    return kernel.forward(q, k, v, rows_of(given, q, k), options)


def backward(
    chosen: Standin,
    tensors: dict[str, Any],
    lse: Any,
    given: Given,
    given_options: tuple[Any, ...],
    deterministic: Any = False,
) -> tuple[Any, Any, Any]:
    """Write dq, dk and dv, which are allocated if None, and return them; ``tensors``: dout, q, k, v, out, dq, dk, dv."""
    import torch

    scale, causal, window, softcap = given_options
    # The original allocates those that are missing.
    for name in ("dq", "dk", "dv"):
        if tensors[name] is None:
            tensors = tensors | {name: torch.full_like(tensors[name[1:]], torch.nan)}
    q, k, v = (tensors[name] for name in "qkv")
    check_tensors(chosen, given, **tensors)
    check_backward(q, v, deterministic)
    options = options_of(scale, causal, window, softcap, q)
    buffers = (tensors["dq"], tensors["dk"], tensors["dv"])
    inputs = (tensors["dout"], q, k, v, tensors["out"])
    kernel.backward(chosen, inputs, lse, buffers, rows_of(given, q, k), options)
    return buffers


def sums(q: Any, given: Given) -> Any:
    """Return NaN in place of the sums of dout * out, in whole tiles, whose size depends on the GPU in the original."""
    import torch

    varlen = (given.cu_seqlens_q, given.cu_seqlens_k, given.seqused_q, given.seqused_k)
    if all(one is None for one in varlen):
        rows = -(-q.shape[1] // TILE) * TILE
        return torch.full((q.shape[0], q.shape[2], rows), torch.nan, dtype=torch.float32)
    sequences, total = q.shape[0], q.shape[0] * q.shape[1]
    if given.cu_seqlens_q is not None:
        sequences, total = len(given.cu_seqlens_q) - 1, q.shape[0]
    rows = -(-(total + sequences * TILE) // TILE) * TILE
    return torch.full((q.shape[-2], rows), torch.nan, dtype=torch.float32)


def check_forward(chosen: Standin, q: Any, k: Any, v: Any, rest: dict[str, Any]) -> None:
    """Raise RefusedError for arguments that are not modelled; splits and margins do not change what is computed."""
    import torch

    unused(**{name: value for name, value in rest.items() if name.rstrip("_") in NOT_MODELLED})
    unused(scheduler_metadata=rest["scheduler_metadata"])
    check_splits(rest["num_splits"])
    wanted = any(isinstance(x, torch.Tensor) and x.requires_grad for x in (q, k, v))
    if chosen.version == "3.0.0" and torch.is_grad_enabled() and wanted:
        fix = "call flash_attn_func, or call it in an autograd function"
        raise refused_package("_flash_attn_forward without autograd", "q, k or v with it", fix)


def low_level(chosen: Standin) -> dict[str, Callable[..., Any]]:
    """Return the underscored functions by name."""
    made = beta(chosen) if chosen.version == "3.0.0.b1" else stable(chosen)
    return {function.__name__: function for function in made}


def beta(chosen: Standin) -> tuple[Callable[..., Any], ...]:
    """Return the functions of 3.0.0.b1."""

    def _flash_attn_forward(
        q: Any,
        k: Any,
        v: Any,
        k_new: Any,
        v_new: Any,
        qv: Any,
        out: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        cu_seqlens_k_new: Any,
        seqused_q: Any,
        seqused_k: Any,
        max_seqlen_q: Any,
        max_seqlen_k: Any,
        page_table: Any,
        kv_batch_idx: Any,
        leftpad_k: Any,
        rotary_cos: Any,
        rotary_sin: Any,
        seqlens_rotary: Any,
        q_descale: Any,
        k_descale: Any,
        v_descale: Any,
        softmax_scale: Any,
        causal: Any,
        window_size: Any = (-1, -1),
        attention_chunk: Any = 0,
        softcap: Any = 0.0,
        rotary_interleaved: Any = True,
        scheduler_metadata: Any = None,
        num_splits: Any = 1,
        pack_gqa: Any = None,
        sm_margin: Any = 0,
    ) -> Any:
        check_forward(chosen, q, k, v, locals())
        given = Given(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
        options = (softmax_scale, causal, window_size, softcap, attention_chunk)
        return *forward(chosen, q, k, v, given, options), None, None

    def _flash_attn_backward(
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        softmax_lse: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        sequed_q: Any,
        sequed_k: Any,
        max_seqlen_q: Any,
        max_seqlen_k: Any,
        dq: Any,
        dk: Any,
        dv: Any,
        softmax_scale: Any,
        causal: Any,
        window_size: Any = (-1, -1),
        softcap: Any = 0.0,
        deterministic: Any = False,
        sm_margin: Any = 0,
    ) -> Any:
        given = Given(cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k)
        tensors = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "dq": dq, "dk": dk, "dv": dv}
        options = (softmax_scale, causal, window_size, softcap)
        written = backward(chosen, tensors, softmax_lse, given, options, deterministic)
        return *written, sums(q, given)

    return _flash_attn_forward, _flash_attn_backward


def stable(chosen: Standin) -> tuple[Callable[..., Any], ...]:
    """Return the functions of 3.0.0."""

    def _flash_attn_forward(
        q: Any,
        k: Any,
        v: Any,
        k_new: Any = None,
        v_new: Any = None,
        qv: Any = None,
        out_: Any = None,
        cu_seqlens_q: Any = None,
        cu_seqlens_k: Any = None,
        cu_seqlens_k_new: Any = None,
        seqused_q: Any = None,
        seqused_k: Any = None,
        max_seqlen_q: Any = None,
        max_seqlen_k: Any = None,
        page_table: Any = None,
        kv_batch_idx: Any = None,
        leftpad_k: Any = None,
        rotary_cos: Any = None,
        rotary_sin: Any = None,
        seqlens_rotary: Any = None,
        q_descale: Any = None,
        k_descale: Any = None,
        v_descale: Any = None,
        softmax_scale: Any = None,
        causal: Any = False,
        window_size_left: Any = -1,
        window_size_right: Any = -1,
        attention_chunk: Any = 0,
        softcap: Any = 0.0,
        rotary_interleaved: Any = True,
        scheduler_metadata: Any = None,
        num_splits: Any = 1,
        pack_gqa: Any = None,
        sm_margin: Any = 0,
    ) -> Any:
        import torch

        check_forward(chosen, q, k, v, locals())
        given = Given(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
        window = (window_size_left, window_size_right)
        options = (softmax_scale, causal, window, softcap, attention_chunk)
        found = forward(chosen, q, k, v, given, options)
        return *found, torch.tensor([]), torch.tensor([])

    def _flash_attn_backward(
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        softmax_lse: Any,
        cu_seqlens_q: Any = None,
        cu_seqlens_k: Any = None,
        sequed_q: Any = None,
        sequed_k: Any = None,
        max_seqlen_q: Any = None,
        max_seqlen_k: Any = None,
        dq: Any = None,
        dk: Any = None,
        dv: Any = None,
        softmax_scale: Any = None,
        is_causal: Any = False,
        window_size_left: Any = -1,
        window_size_right: Any = -1,
        softcap: Any = 0.0,
        deterministic: Any = False,
        sm_margin: Any = 0,
    ) -> Any:
        if dq is None or dk is None or dv is None:
            # The original allocates it and does not return it.
            expected = "dq, dk and dv, into which the gradients are written"
            raise RefusedError(expected, "None", "pass torch.empty_like of q, k and v")
        given = Given(cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k)
        tensors = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "dq": dq, "dk": dk, "dv": dv}
        options = (softmax_scale, is_causal, (window_size_left, window_size_right), softcap)
        backward(chosen, tensors, softmax_lse, given, options, deterministic)
        return sums(q, given)

    return _flash_attn_forward, _flash_attn_backward
