"""``fused_attn_fwd`` and ``fused_attn_bwd``: FusedAttention, which computes with cuDNN in the original.

Computed in float64 from the values given, and rounded once; the backward pass uses the o and the statistics that it is
given. Formats are [B, S, H, D], [S, B, H, D] and packed [T, H, D]; q, k, v, o and the gradients have the same one.

- The first tokens of a sequence are used: as many as ``cu_seqlens`` says, with a mask for padding; otherwise all. In
  packed tensors it begins at ``cu_seqlens_padded``, or at ``cu_seqlens`` without it.
- ``bottom_right_diagonal`` says where the diagonal of causal masks and windows is: it begins at the first query and
  key, or ends at the last used query and key. A side of a window with -1 has no limit.
- Statistics are lse in float32: [B, H, S, 1], or [T, H, 1] of packed tensors. Rows without keys have o 0 and lse -inf.
- Rows of no sequence are 0 in packed o and gradients, and NaN in all other new tensors.

Modelled from pytorch/csrc/extensions/attention.cpp and common/fused_attn/fused_attn_f16_arbitrary_seqlen.cu. No code is
taken from there.
"""

from __future__ import annotations

from typing import Any

from ringspec.errors import RefusedError
from ringspec.standins import attention
from ringspec.standins.rounding import rounded
from ringspec.standins.transformer_engine_torch.fused_arguments import (
    attention_of,
    check,
    lse_of,
    none_of,
    part,
    statistics_shape,
)

__all__ = ["FUNCTIONS"]


def fused_attn_fwd(
    max_seqlen_q: Any,
    max_seqlen_kv: Any,
    is_training: Any,
    attn_scale: Any,
    p_dropout: Any,
    set_zero: Any,
    qkv_layout: Any,
    o_format: Any,
    qkv_scale_inv_format: Any,
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: Any,
    bottom_right_diagonal: Any,
    cu_seqlens_q: Any,
    cu_seqlens_kv: Any,
    Q: Any,
    K: Any,
    V: Any,
    fake_dtype: Any,
    cu_seqlens_q_padded: Any,
    cu_seqlens_kv_padded: Any,
    page_table_k: Any,
    page_table_v: Any,
    s_quantizer: Any,
    o_quantizer: Any,
    Bias: Any,
    SoftmaxOffset: Any,
    rng_gen: Any,
    rng_elts_per_thread: Any,
    return_max_logit: Any,
    cuda_graph: Any,
) -> list[Any]:
    """Return o, the statistics, and a state of the random number generator, which is not used."""
    import torch

    given = locals()
    chosen = attention_of(given, (qkv_layout,), (o_format,))
    check(is_training is True, "is_training=True", is_training)
    check(not return_max_logit, "return_max_logit=False", return_max_logit)
    none_of(given, "page_table_k page_table_v s_quantizer o_quantizer Bias SoftmaxOffset")
    packed = chosen.form == "THD"
    o = torch.full((*Q.shape[:-1], V.shape[-1]), 0.0 if packed else torch.nan, dtype=Q.dtype)
    statistics = torch.full(statistics_shape(chosen, Q), torch.nan, dtype=torch.float32)
    for number, (queries, keys) in enumerate(zip(chosen.q, chosen.k, strict=True)):
        q = part(chosen, Q, number, queries)[None]
        k, v = (part(chosen, x, number, keys)[None] for x in (K, V))
        seen = chosen.visible(q.shape[1], k.shape[1])
        found, lse = attention.forward(q, k, v, seen, chosen.scale)
        part(chosen, o, number, queries).copy_(rounded(found[0], o.dtype))
        lse = lse[0].masked_fill(lse[0].isnan(), -torch.inf)
        lse_of(chosen, statistics, number, queries).copy_(rounded(lse, torch.float32))
    return [o, statistics, torch.zeros(2, dtype=torch.int64)]


def fused_attn_bwd(
    max_seqlen_q: Any,
    max_seqlen_kv: Any,
    attn_scale: Any,
    p_dropout: Any,
    set_zero: Any,
    qkv_layout: Any,
    o_format: Any,
    do_format: Any,
    dqkv_layout: Any,
    qkv_scale_inv_format: Any,
    do_scale_inv_format: Any,
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: Any,
    bottom_right_diagonal: Any,
    deterministic: Any,
    cu_seqlens_q: Any,
    cu_seqlens_kv: Any,
    Q: Any,
    K: Any,
    V: Any,
    O: Any,
    dO: Any,
    fake_dtype: Any,
    Aux_CTX_Tensors: Any,
    cu_seqlens_q_padded: Any,
    cu_seqlens_kv_padded: Any,
    s_quantizer: Any,
    dp_quantizer: Any,
    dqkv_quantizer: Any,
    cuda_graph: Any,
) -> list[Any]:
    """Return dq, dk and dv, and None for the gradients of a bias and of a softmax offset."""
    import torch

    given = locals()
    chosen = attention_of(given, (qkv_layout, dqkv_layout), (o_format, do_format))
    none_of(given, "s_quantizer dp_quantizer dqkv_quantizer")
    check(
        len(Aux_CTX_Tensors) == 2, "the statistics and the state of the generator", Aux_CTX_Tensors
    )
    statistics, shape = Aux_CTX_Tensors[0], statistics_shape(chosen, Q)
    if tuple(statistics.shape) != shape or statistics.dtype != torch.float32:
        got = f"{tuple(statistics.shape)} in {statistics.dtype}"
        raise RefusedError(f"statistics {shape} in float32", got, "pass those of fused_attn_fwd")
    size = (*Q.shape[:-1], V.shape[-1])
    for name, x in (("O", O), ("dO", dO)):
        if tuple(x.shape) != size or x.dtype != Q.dtype or not x.is_contiguous():
            got = f"{tuple(x.shape)} in {x.dtype}, strides {x.stride()}"
            raise RefusedError(f"{name} {size} in {Q.dtype}, contiguous", got, f"pass {name} so")
    empty = 0.0 if chosen.form == "THD" else torch.nan
    gradients = [torch.full(x.shape, empty, dtype=x.dtype) for x in (Q, K, V)]
    for number, (queries, keys) in enumerate(zip(chosen.q, chosen.k, strict=True)):
        q, o, dout = (part(chosen, x, number, queries)[None] for x in (Q, O, dO))
        k, v = (part(chosen, x, number, keys)[None] for x in (K, V))
        lse = lse_of(chosen, statistics, number, queries)[None]
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # a row without keys adds nothing
        seen = chosen.visible(q.shape[1], k.shape[1])
        found = attention.backward(dout, q, k, v, o, lse, seen, chosen.scale)
        for into, place, x in zip(gradients, (queries, keys, keys), found, strict=False):
            part(chosen, into, number, place).copy_(rounded(x[0], into.dtype))
    return [*gradients, None, None]


FUNCTIONS = (fused_attn_fwd, fused_attn_bwd)
