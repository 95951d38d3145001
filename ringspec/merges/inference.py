"""Merge recipes of inference systems and kernels.

A GPU compiler may contract products and sums, and kernels use approximate exponentials (``ex2.approx``), so the source does
not determine the bits of a run. ``fma=True`` declares the contraction. Triton's exponential is ex2.approx(x log2(e)), its
division ``div.full.f32``, and its logarithm that of libdevice: with these as functions, the recipes of Triton kernels gave every
bit of them on a GPU. The recipes without ``compared_with`` were only written
from the source.
"""

from __future__ import annotations

from ringspec.merges.recipe import GradientSum, MergeRecipe

__all__ = ["INFERENCE", "UNNORMALISED"]

_VLLM = "vllm-project/vllm, vllm/v1/attention/ops"
_GPU = "H100, torch 2.11.0, Triton 3.6.0, with Triton's functions and division"

INFERENCE = (
    MergeRecipe(
        "sglang_merge",
        "pair",
        "by_rank",
        carried_o="own",
        empty_lse=("inf",),
        fma=True,
        fused="earlier",
        source="sgl-project/sglang, kernels/ops/attention/merge_state.py, 0.5.23",
        versions="0.5.23",
        compared_with=f"merge_state_triton of sglang 0.5.23, {_GPU}",
        note="prefix and suffix of a row; lse [tokens, H]; two empty parts give NaN",
    ),
    MergeRecipe(
        "vllm_merge",
        "pair",
        "by_rank",
        carried_o="own",
        empty_lse=("inf",),
        fma=True,
        fused="earlier",
        source=f"{_VLLM}/triton_merge_attn_states.py, 01ac819c",
        versions="0.24.0, not 0.33.0",
        compared_with=f"merge_attn_states in Triton of vllm 0.24.0, {_GPU}",
        note="prefix and suffix of a row, Triton; lse [H, tokens]; two empty parts give NaN",
    ),
    MergeRecipe(
        "vllm_merge_0_33",
        "pair",
        "by_rank",
        carried_o="own",
        empty_lse=("inf",),
        all_empty="-inf",
        empty_o="zero",
        fma=True,
        fused="earlier",
        source=f"{_VLLM}/triton_merge_attn_states.py, 0.33.0",
        versions="0.33.0",
        compared_with=f"merge_attn_states in Triton of vllm 0.33.0, {_GPU}",
        note="as vllm_merge, but two empty parts give o = 0 and lse -inf",
    ),
    MergeRecipe(
        "vllm_merge_cuda",
        "pair",
        "by_rank",
        carried_o="own",
        empty_lse=("inf",),
        all_empty="-inf",
        source="vllm-project/vllm, csrc/libtorch_stable/attention/, merge_attn_states, 03f97cce",
        versions="03f97cce",
        note="as vllm_merge, but two empty parts give the prefix's o and lse -inf",
    ),
    MergeRecipe(
        "vllm_dcp_ag_rs",
        "all_parts",
        "by_rank",
        carried_o="own",
        products_rounded=True,
        empty_lse=("nan", "inf"),
        skips="zero_weight",
        sum_tree="halves",
        source=f"{_VLLM}/common.py, cp_lse_ag_out_rs, 05cce93f",
        versions="0.33.0",
        compared_with=f"_correct_attn_cp_out_kernel of vllm 0.33.0, and a sum by rank, {_GPU}",
        note="each weighted part is stored in the type of o, and a reduce-scatter adds them in this type, here by rank; 0.24.0 "
        "skips nothing, so that NaN in an empty part stays",
    ),
    MergeRecipe(
        "vllm_dcp_a2a",
        "all_parts",
        "by_rank",
        empty_lse=("nan", "inf"),
        skips="zero_weight",
        start="zeros",
        fma=True,
        source=f"{_VLLM}/dcp_alltoall.py, 03752bec",
        versions="0.33.0",
        compared_with=f"_dcp_a2a_unpack_combine of vllm 0.33.0, {_GPU}",
        note="the weighted parts are added in float32 by rank, with one rounding; 0.24.0 skips nothing, so that NaN in an empty "
        "part stays",
    ),
    MergeRecipe(
        "sglang_dcp_a2a",
        "all_parts",
        "by_rank",
        empty_lse=("nan", "inf"),
        start="zeros",
        fma=True,
        weights="end",
        source="sgl-project/sglang, kernels/ops/attention/dcp_kernels.py, 0.5.23",
        versions="0.5.23",
        compared_with=f"dcp_lse_combine_triton of sglang 0.5.23, {_GPU}",
        note="the division is the last operation; NaN in an empty part stays",
    ),
    MergeRecipe(
        "flash_decoding_fa2",
        "all_parts",
        "by_rank",
        sum_tree="halves",
        start="zeros",
        all_empty="inf",
        source="Dao-AILab/flash-attention, csrc/flash_attn/src/flash_fwd_kernel.h, 0251105a",
        versions="0251105a",
        note="splits of the keys within one device; a row without keys has lse +inf",
    ),
    MergeRecipe(
        "flashmla",
        "all_parts",
        "by_rank",
        base="2",
        natural_result=True,
        sum_tree="halves",
        start="zeros",
        all_empty="inf",
        fma=True,
        source="deepseek-ai/FlashMLA, csrc/smxx/decode/combine/combine.cu, 9241ae3e",
        versions="082094b7 to 9241ae3e, and 4f5ac5bb",
        note="splits of the keys within one device, at least 2 and at most 64: the kernel adds more in another order; lse of the "
        "splits in base 2, the merged one natural, +inf in a row without keys; without attn_sink; its exp2, log2 and division "
        "are approximate instructions (--use_fast_math)",
    ),
    MergeRecipe(
        "fa3",
        "all_parts",
        "by_rank",
        skips="zero_weight",
        weights="reciprocal",
        sum_tree="halves",
        start="zeros",
        source="Dao-AILab/flash-attention, hopper/flash_fwd_combine_kernel.h, 0251105a",
        versions="0251105a",
        note="as flash_decoding_fa2, but a row without keys has lse -inf",
    ),
    MergeRecipe(
        "helix",
        "all_parts",
        "by_rank",
        weights="reciprocal",
        sum_tree="neighbours",
        start="zeros",
        source="NVIDIA/TensorRT-LLM, cpp/tensorrt_llm/kernels/helixKernels.cu, 000d88bc",
        versions="000d88bc",
        note="its statistics are pairs (max, sum); the recipe is for a sum of 1, that is max = lse; an empty row is 0, there NaN",
    ),
    MergeRecipe(
        "flashinfer_merge",
        "pair",
        "by_rank",
        carried_o="own",
        base="2",
        all_empty="-inf",
        source="flashinfer-ai/flashinfer, include/flashinfer/attention/cascade.cuh, fb28d724",
        versions="fb28d724",
        note="two states, lse in base 2; the kernel's exp2 and log2 are approximate instructions",
    ),
)

# A part of these recipes is (m, l, o) with o unnormalised: Part(o, lse=m, sums=l).
UNNORMALISED = (
    MergeRecipe(
        "nki_ring",
        "state",
        "down",
        carried_o="own",
        products_rounded=True,
        all_empty="0",
        source="aws-neuron/nki-library, nkilib/experimental/attention/ring_attention_fwd.py, 092a49dc",
        versions="092a49dc",
        note="parts are unnormalised; a row without keys has lse 0",
    ),
    MergeRecipe(
        "tokamax",
        "state",
        "down",
        dq=GradientSum("down", "float32", "zeros", "carried"),
        dkv=GradientSum("up", "float32", "zeros", "carried"),
        all_empty="-inf",
        source="openxla/tokamax, tpu/splash_attention/ring_attention_kernel.py, 783ea957",
        versions="783ea957",
        note="a part is (max, exp(lse - max), o exp(lse - max)) in float32; XLA on a CPU contracts (fma)",
    ),
)
