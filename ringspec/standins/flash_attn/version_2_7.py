"""The functions of ``flash_attn.flash_attn_interface`` that rings call, as in versions 2.7 and 2.8.

They take ``window_size_left`` and ``window_size_right`` and return four values forward and one backward.
``_wrapped_flash_attn_forward`` and the like are the same functions. Autograd does not see them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringspec.standins.flash_attn.calls import (
    NAMES,
    backward,
    forward,
    no_paging,
    packed_backward,
    packed_forward,
)
from ringspec.standins.names import Standin

Functions = dict[str, Callable[..., Any]]


def functions_of_2_7(chosen: Standin) -> Functions:
    """Return the functions of 2.7 and 2.8."""

    def _flash_attn_forward(
        q: Any,
        k: Any,
        v: Any,
        dropout_p: Any,
        softmax_scale: Any,
        causal: Any,
        window_size_left: Any,
        window_size_right: Any,
        softcap: Any,
        alibi_slopes: Any,
        return_softmax: Any,
    ) -> Any:
        window = (window_size_left, window_size_right)
        given = (softmax_scale, causal, window, softcap, dropout_p, alibi_slopes, return_softmax)
        return forward(chosen, q, k, v, *given)

    def _flash_attn_varlen_forward(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: Any,
        max_seqlen_k: Any,
        dropout_p: Any,
        softmax_scale: Any,
        causal: Any,
        window_size_left: Any = -1,
        window_size_right: Any = -1,
        softcap: Any = 0.0,
        alibi_slopes: Any = None,
        return_softmax: Any = False,
        block_table: Any = None,
        leftpad_k: Any = None,
        seqused_k: Any = None,
        zero_tensors: Any = False,
    ) -> Any:
        window = (window_size_left, window_size_right)
        given = (softmax_scale, causal, window, softcap, dropout_p, alibi_slopes, return_softmax)
        four = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        no_paging(block_table=block_table, leftpad_k=leftpad_k, seqused_k=seqused_k)
        return packed_forward(chosen, q, k, v, four, zero_tensors, *given)

    def _flash_attn_backward(
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        softmax_lse: Any,
        dq: Any,
        dk: Any,
        dv: Any,
        dropout_p: Any,
        softmax_scale: Any,
        causal: Any,
        window_size_left: Any,
        window_size_right: Any,
        softcap: Any,
        alibi_slopes: Any,
        deterministic: Any,
        rng_state: Any = None,
    ) -> Any:
        window = (window_size_left, window_size_right)
        given = (softmax_scale, causal, window, softcap, dropout_p, alibi_slopes)
        named = dict(zip(NAMES, (dout, q, k, v, out, dq, dk, dv), strict=True))
        return backward(chosen, named, softmax_lse, *given)[0]

    def _flash_attn_varlen_backward(
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        softmax_lse: Any,
        dq: Any,
        dk: Any,
        dv: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: Any,
        max_seqlen_k: Any,
        dropout_p: Any,
        softmax_scale: Any,
        causal: Any,
        window_size_left: Any,
        window_size_right: Any,
        softcap: Any,
        alibi_slopes: Any,
        deterministic: Any,
        rng_state: Any = None,
        zero_tensors: Any = False,
    ) -> Any:
        window = (window_size_left, window_size_right)
        given = (softmax_scale, causal, window, softcap, dropout_p, alibi_slopes)
        named = dict(zip(NAMES, (dout, q, k, v, out, dq, dk, dv), strict=True))
        four = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return packed_backward(chosen, named, softmax_lse, four, zero_tensors, *given)[0]

    made = (
        _flash_attn_forward,
        _flash_attn_backward,
        _flash_attn_varlen_forward,
        _flash_attn_varlen_backward,
    )
    found = {function.__name__: function for function in made}
    return found | {f"_wrapped{name}": function for name, function in found.items()}
