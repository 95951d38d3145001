"""The merge recipes of public implementations, each with its source and with what was executed beside it."""

from __future__ import annotations

from ringspec.merges.recipe import GradientSum, MergeRecipe

__all__ = ["MERGES"]

_FLOAT32_RING = {
    "dq": GradientSum("down", "float32", "first"),
    "dkv": GradientSum("up", "float32", "first"),
}

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
        note="contiguous; the final dq is bfloat16 whatever the type of q",
    ),
    MergeRecipe(
        "ring_flash_attn_zigzag",
        "sigmoid",
        "down",
        **_FLOAT32_RING,
        source="zhuzilin/ring-flash-attention, ring_flash_attn/zigzag_ring_flash_attn.py, 89962823 (0.1.8)",
        versions="0.1.8",
        compared_with="update_out_and_lse of ring_flash_attn 0.1.8, CPU, torch 2.13.0, one thread",
        note="zigzag: the parts of later ranks cover the second half of the rows",
    ),
    MergeRecipe(
        "yunchang",
        "sigmoid",
        "down",
        **_FLOAT32_RING,
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
        dkv=GradientSum("down", "float32", "zeros"),
        source="huggingface/diffusers, src/diffusers/models/attention_dispatch.py, 0.42.1",
        versions="0.42.1",
        compared_with="TemplatedRingAttention of diffusers 0.42.1, CPU, torch 2.13.0, one thread",
        note="convert_to_fp32=True, the default; the other direction",
    ),
)

MERGES: dict[str, MergeRecipe] = {recipe.name: recipe for recipe in _RINGS}
