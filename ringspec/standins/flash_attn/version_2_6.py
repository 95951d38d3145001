"""The functions of ``flash_attn.flash_attn_interface`` that rings call, as in version 2.6.

They take ``window_size`` and return eight values forward and four backward. Autograd does not see them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringspec.standins.flash_attn.calls import (
    NAMES,
    backward,
    eight,
    forward,
    no_paging,
    packed_backward,
    packed_forward,
)
from ringspec.standins.names import Standin

Functions = dict[str, Callable[..., Any]]

WINDOW = (-1, -1)


def functions_of_2_6(chosen: Standin) -> Functions:
    """Return the functions of 2.6."""

    def _flash_attn_forward(
        q: Any,
        k: Any,
        v: Any,
        dropout_p: Any,
        softmax_scale: Any,
        causal: Any,
        window_size: Any,
        softcap: Any,
        alibi_slopes: Any,
        return_softmax: Any,
    ) -> Any:
        given = (
            softmax_scale,
            causal,
            window_size,
            softcap,
            dropout_p,
            alibi_slopes,
            return_softmax,
        )
        return eight(forward(chosen, q, k, v, *given), q, k, v)

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
        window_size: Any = WINDOW,
        softcap: Any = 0.0,
        alibi_slopes: Any = None,
        return_softmax: Any = False,
        block_table: Any = None,
        leftpad_k: Any = None,
        seqused_k: Any = None,
    ) -> Any:
        given = (
            softmax_scale,
            causal,
            window_size,
            softcap,
            dropout_p,
            alibi_slopes,
            return_softmax,
        )
        four = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        no_paging(block_table=block_table, leftpad_k=leftpad_k, seqused_k=seqused_k)
        return eight(packed_forward(chosen, q, k, v, four, False, *given), q, k, v)

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
        window_size: Any,
        softcap: Any,
        alibi_slopes: Any,
        deterministic: Any,
        rng_state: Any = None,
    ) -> Any:
        given = (softmax_scale, causal, window_size, softcap, dropout_p, alibi_slopes)
        named = dict(zip(NAMES, (dout, q, k, v, out, dq, dk, dv), strict=True))
        sums, buffers = backward(chosen, named, softmax_lse, *given)
        return *buffers, sums

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
        window_size: Any,
        softcap: Any,
        alibi_slopes: Any,
        deterministic: Any,
        rng_state: Any = None,
    ) -> Any:
        given = (softmax_scale, causal, window_size, softcap, dropout_p, alibi_slopes)
        named = dict(zip(NAMES, (dout, q, k, v, out, dq, dk, dv), strict=True))
        four = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        sums, buffers = packed_backward(chosen, named, softmax_lse, four, False, *given)
        return *buffers, sums

    made = (
        _flash_attn_forward,
        _flash_attn_backward,
        _flash_attn_varlen_forward,
        _flash_attn_varlen_backward,
    )
    return {function.__name__: function for function in made}
