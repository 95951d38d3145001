"""The merge recipes of public rings, each with its source and with what was executed beside it; :data:`MERGES` has all."""

from __future__ import annotations

from ringspec.merges.inference import INFERENCE, UNNORMALISED
from ringspec.merges.recipe import GradientSum, MergeRecipe

__all__ = ["MERGES"]

_DQ, _DKV = GradientSum("down", "float32", "first"), GradientSum("up", "float32", "first")

_RINGS = (
    MergeRecipe(
        "torch_cp",
        "sigmoid",
        "down",
        dq=GradientSum("down", "float32", "zeros"),
        dkv=GradientSum("up", "float32", "zeros"),
        source="pytorch, torch/distributed/tensor/experimental/_context_parallel/_attention.py, 2.13.0",
        versions="2.13",
        compared_with="_SDPAMerger of torch 2.13.0, CPU, eager, one thread",
        gradients_compared_with="_templated_ring_attention_backward of torch 2.13.0, CPU",
        note="context parallelism of torch with convert_to_f32=True, the default",
    ),
    MergeRecipe(
        "torch_cp_narrow",
        "sigmoid",
        "down",
        carried_o="wider",
        dq=GradientSum("down", "own", "zeros"),
        dkv=GradientSum("up", "own", "zeros"),
        source="pytorch, torch/distributed/tensor/experimental/_context_parallel/_attention.py, 2.13.0",
        versions="2.13",
        compared_with="_SDPAMerger of torch 2.13.0, CPU, eager, one thread",
        gradients_compared_with="_templated_ring_attention_backward of torch 2.13.0, CPU",
        note="context parallelism of torch with convert_to_f32=False: only the first difference is narrow",
    ),
    MergeRecipe(
        "ring_flash_attn",
        "sigmoid",
        "down",
        dq=GradientSum("down", "float32", "first", "bfloat16"),
        dkv=GradientSum("up", "float32", "first"),
        source="zhuzilin/ring-flash-attention, ring_flash_attn/utils.py and ring_flash_attn.py, 89962823 (0.1.8)",
        versions="0.1.8",
        compared_with="update_out_and_lse of ring_flash_attn 0.1.8, CPU, torch 2.13.0, one thread",
        gradients_compared_with="ring_flash_attn_backward of ring_flash_attn 0.1.8, CPU, torch 2.13.0",
        note="contiguous; the final dq is bfloat16 whatever the type of q",
    ),
    MergeRecipe(
        "ring_flash_attn_zigzag",
        "sigmoid",
        "down",
        dq=_DQ,
        dkv=_DKV,
        source="zhuzilin/ring-flash-attention, ring_flash_attn/zigzag_ring_flash_attn.py, 89962823 (0.1.8)",
        versions="0.1.8",
        compared_with="update_out_and_lse of ring_flash_attn 0.1.8, CPU, torch 2.13.0, one thread",
        gradients_compared_with="zigzag_ring_flash_attn_backward of ring_flash_attn 0.1.8, CPU, torch 2.13.0",
        note="zigzag: the parts of later ranks cover the second half of the rows",
    ),
    MergeRecipe(
        "yunchang",
        "sigmoid",
        "down",
        dq=_DQ,
        dkv=_DKV,
        source="feifeibear/long-context-attention, yunchang/ring/utils.py, 0.6.4",
        versions="0.6.4",
        compared_with="update_out_and_lse of yunchang 0.6.4, CPU, torch 2.13.0, one thread",
        note="all rings except the one of sparse SageAttention, which assigns instead of merging",
    ),
    MergeRecipe(
        "diffusers",
        "sigmoid",
        "up",
        dq=GradientSum("up", "float32", "zeros"),
        source="huggingface/diffusers, src/diffusers/models/attention_dispatch.py, 0.42.1",
        versions="0.42.1",
        gradients_compared_with="TemplatedRingAttention.backward of diffusers 0.42.1, CPU, torch 2.13.0",
        compared_with="TemplatedRingAttention.forward of diffusers 0.42.1, CPU, torch 2.13.0, one thread",
        note="convert_to_fp32=True; no dkv: from 3 workers on, its sums of dk and dv mix the blocks of different workers",
    ),
)

_TE_PATH = "transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py"
_TE_DQ = GradientSum("up_own_last", "own", "first")
_TE_DKV = GradientSum("down_own_last", "own", "first")

_TRANSFORMER_ENGINE = (
    MergeRecipe(
        "te_p2p",
        "two_passes",
        "down",
        carried_o="own",
        dq=_TE_DQ,
        dkv=_TE_DKV,
        source=f"NVIDIA/TransformerEngine, {_TE_PATH}, d0067d0d",
        versions="2.4 to 2.19",
        compared_with="the flash_attn_fwd_* functions of transformer_engine 2.4.0, 2.10.0, 2.15.0, 2.18.0, 2.19.0, CPU, eager, torch 2.13.0",
        note="p2p of [B, S, H, D] and [S, B, H, D]; o is rounded to its own format at every step; compiled by torch.compile "
        "on a CPU (2.19.0), the same with the compiled exp and log1p",
    ),
    MergeRecipe(
        "te_p2p_2_20",
        "rescaling",
        "down",
        carried_o="own",
        fma=True,
        dq=_TE_DQ,
        dkv=_TE_DKV,
        source=f"NVIDIA/TransformerEngine, {_TE_PATH}, 2.20.2",
        versions="2.20.2",
        compared_with="the flash_attn_fwd_* functions of transformer_engine 2.20.2, CPU, eager, torch 2.13.0",
        note="two roundings of o a step; torch's addcmul_ on this CPU is a fused multiply-add",
    ),
    MergeRecipe(
        "te_p2p_2_20_compiled",
        "rescaling",
        "down",
        carried_o="own",
        earlier_rounded=False,
        dq=_TE_DQ,
        dkv=_TE_DKV,
        source=f"NVIDIA/TransformerEngine, {_TE_PATH}, 2.20.2",
        versions="2.20.2",
        compared_with="the flash_attn_fwd_* functions of transformer_engine 2.20.2, compiled by torch.compile, CPU, torch 2.13.0",
        note="compiled, the default of TransformerEngine, o is rounded once a step; not run on a GPU; exp and log1p are compiled too",
    ),
)

_THD = MergeRecipe(
    "te_thd",
    "two_passes",
    "down",
    carried_o="own",
    start="zeros",
    products_rounded=True,
    skips="zero_o",
    dq=_TE_DQ,
    dkv=_TE_DKV,
    source="NVIDIA/TransformerEngine, transformer_engine/common/fused_attn/context_parallel.cu, d0067d0d",
    versions="d0067d0d",
    note="packed documents [T, H, D], a CUDA kernel: product and sum are rounded, and where o is 0 nothing is added",
)

MERGES: dict[str, MergeRecipe] = {
    recipe.name: recipe
    for recipe in (*_RINGS, *_TRANSFORMER_ENGINE, _THD, *INFERENCE, *UNNORMALISED)
}
