"""Names of ``transformer_engine_torch`` that TransformerEngine reads when it is imported.

The values of the enumerations are those of the public headers ``transformer_engine.h`` and ``fused_attn.h``.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

__all__ = ["CUDNN_VERSION", "ENUMERATIONS", "ONLY_IMPORTED"]

CUDNN_VERSION = 91800


def counted(text: str, *, first: int = 0) -> dict[str, int]:
    """Number the words of a text.

    >>> counted("A B", first=1)
    {'A': 1, 'B': 2}
    """
    return {name: number for number, name in enumerate(text.split(), first)}


def prefixed(values: Mapping[str, int]) -> dict[str, int]:
    return {f"NVTE_{name}": value for name, value in values.items()}


DTYPES = {
    "kByte": 0,
    "kInt32": 2,
    "kFloat32": 4,
    "kFloat16": 5,
    "kBFloat16": 6,
    "kFloat8E4M3": 7,
    "kFloat8E5M2": 8,
    "kFloat4E2M1": 10,
}

LAYOUTS = counted(
    "SB3HD SBH3D SBHD_SB2HD SBHD_SBH2D SBHD_SBHD_SBHD BS3HD BSH3D BSHD_BS2HD BSHD_BSH2D BSHD_BSHD_BSHD"
    " T3HD TH3D THD_T2HD THD_TH2D THD_THD_THD SBHD_BSHD_BSHD BSHD_SBHD_SBHD THD_BSHD_BSHD THD_SBHD_SBHD"
    " Paged_KV_BSHD_BSHD_BSHD Paged_KV_BSHD_SBHD_SBHD Paged_KV_SBHD_BSHD_BSHD Paged_KV_SBHD_SBHD_SBHD"
    " Paged_KV_THD_BSHD_BSHD Paged_KV_THD_SBHD_SBHD BHSD_BHSD_BHSD QKV_Layout_NOT_SET"
)
FORMATS = counted("SBHD BSHD THD BSHD_2SBHD SBHD_2BSHD THD_2BSHD THD_2SBHD BHSD QKV_Format_NOT_SET")
MASKS = counted(
    "NO_MASK PADDING_MASK CAUSAL_MASK PADDING_CAUSAL_MASK CAUSAL_BOTTOM_RIGHT_MASK"
    " PADDING_CAUSAL_BOTTOM_RIGHT_MASK"
)
SCALINGS = counted(
    "DELAYED_TENSOR_SCALING MXFP8_1D_SCALING BLOCK_SCALING_1D BLOCK_SCALING_2D NVFP4_1D_SCALING"
)
FORWARD_TENSORS = counted(
    "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT"
    " GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT"
)
BACKWARD_TENSORS = counted(
    "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3"
)

TABLES: dict[str, dict[str, int]] = {
    "DType": DTYPES,
    "FP8FwdTensors": FORWARD_TENSORS,
    "FP8BwdTensors": BACKWARD_TENSORS,
    "NVTE_QKV_Layout": prefixed(LAYOUTS),
    "NVTE_QKV_Format": prefixed(FORMATS),
    "NVTE_Bias_Type": prefixed(counted("NO_BIAS PRE_SCALE_BIAS POST_SCALE_BIAS ALIBI")),
    "NVTE_Mask_Type": prefixed(MASKS),
    "NVTE_Softmax_Type": prefixed(counted("VANILLA_SOFTMAX OFF_BY_ONE_SOFTMAX LEARNABLE_SOFTMAX")),
    "NVTE_Fused_Attn_Backend": prefixed(
        {"No_Backend": -1, **counted("F16_arbitrary_seqlen FP8", first=1)}
    ),
    "NVTEScalingMode": prefixed(SCALINGS) | {"NVTE_INVALID_SCALING": 100},
}

ENUMERATIONS: dict[str, Any] = {name: enum.IntEnum(name, table) for name, table in TABLES.items()}

# Read when TransformerEngine is imported, and called only outside context parallelism.
ONLY_IMPORTED = (
    "CommOverlap",
    "CommOverlapP2P",
    "CommOverlapType",
    "convert_bshd_to_thd",
    "convert_thd_to_bshd",
    "get_fused_attn_backend",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_adam_fp8",
    "multi_tensor_compute_scale_and_scale_inv",
    "multi_tensor_compute_scale_inv_e8m0",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
)
