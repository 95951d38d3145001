"""Flags: classes of bugs that the golden cases detect.

Most of these bugs occurred in real implementations. A flag without a report is for a likely mistake of which no public
report is known.

>>> FLAGS["stale-keys"].statuses
('fixed',)
"""

from __future__ import annotations

from types import MappingProxyType

from ringspec.vectors.format.flag import Flag, flag

__all__ = ["Flag"]

RING = (
    flag(
        "stale-keys", "schedule, backward",
        "Every step of the backward differentiates against the keys of step 0: dq, dk, dv are "
        "wrong from two workers on, the forward is right.",
        "fixed huggingface/diffusers/issues/14265",
    ),
    flag(
        "ring-direction", "schedule",
        "Keys or gradients travel against the direction that ownership assumes; two workers cannot show it.",
        "agreed pytorch/pytorch/pull/129514", "fixed zhuzilin/ring-flash-attention/pull/10",
    ),
    flag(
        "group-ranks", "schedule, ownership",
        "Neighbours are numbered inside the group where global ranks are wanted, so that blocks go "
        "to the wrong workers.",
        "fixed zhuzilin/ring-flash-attention/commit/7895974",
    ),
    flag(
        "buffer-reuse", "schedule, asynchronous buffers",
        "A block is received into the buffer that is still being sent, so that one block is seen "
        "twice and another never; it takes three workers.",
        "fixed zhuzilin/ring-flash-attention/commit/8c83989",
        "review NVIDIA/TransformerEngine/pull/951",
    ),
    flag(
        "dkv-not-home", "schedule, gradient accumulation",
        "dk and dv miss a hop, or do not travel on skipped steps, and end at another worker than the keys' owner.",
        "fixed zhuzilin/ring-flash-attention/pull/10",
    ),
    flag(
        "dq-not-home", "schedule, gradient accumulation",
        "In the Q ring the share of dq of the last step stays where it was computed.",
    ),
    flag(
        "causal-on-every-step", "mask, schedule",
        "The local triangle is applied to blocks that came from other workers, which are wholly "
        "visible or wholly hidden.",
        "fixed zhuzilin/ring-flash-attention/commit/63b1c31",
    ),
    flag(
        "inverted-skip", "mask, schedule",
        "The test that skips future blocks is inverted, so that workers drop the past and see the future.",
        "fixed zhuzilin/ring-flash-attention/commit/63b1c31",
    ),
    flag(
        "mask-ignored-in-ring", "mask",
        "The ring calls its kernel as if the mask were full or causal, whatever was asked for.",
        "review NVIDIA/TensorRT-LLM/pull/13821", "fixed huggingface/accelerate/pull/4177",
    ),
    flag(
        "striped-diagonal", "layout, mask",
        "The diagonal of a striped block is off by one where the keys' worker comes after the queries'.",
        "reported lucidrains/ring-attention-pytorch/issues/11",
    ),
    flag(
        "zigzag-chunk-order", "layout",
        "The two zigzag chunks of a worker are paired or ordered wrongly against the full sequence.",
        "agreed feifeibear/long-context-attention/issues/53",
    ),
    flag(
        "zigzag-needs-causal", "layout",
        "The load-balanced layout works only with a causal mask.",
        "reported pytorch/pytorch/issues/141429",
    ),
    flag(
        "short-or-uneven-length", "layout, shape",
        "Lengths below or beside a multiple of 2W give unequal chunks, wrong shapes or dropped tokens.",
        "agreed pytorch/pytorch/issues/159706", "reported jzhang38/EasyContext/pull/57",
    ),
    flag(
        "positions-not-sharded", "layout, packing",
        "Positions or segment ids are not sharded with the tokens that they belong to.",
        "fixed NVIDIA/TransformerEngine/pull/2349",
    ),
    flag(
        "document-balance", "layout, packing",
        "Zigzag is laid over the stream and not inside each document, so that workers get unequal "
        "work or wrong neighbours.",
        "fixed pytorch/pytorch/pull/189902",
    ),
)  # fmt: skip

BACKWARD = (
    flag(
        "block-local-delta", "backward formula",
        "delta, or lse, of one block's partial result stands where that of the whole row belongs: "
        "dq and dk are wrong, dv is right.",
        "fixed SHI-Labs/NATTEN/issues/274",
    ),
    flag(
        "delta-of-few-rows", "backward, race",
        "delta is computed before dy is complete, so that some rows of dq and dk are corrupted and dv is right.",
        "fixed Dao-AILab/flash-attention/pull/2481",
    ),
    flag(
        "dy-ignored", "backward formula",
        "The gradient of the sum of o is computed; it is right only where dy is all ones.",
        "review mindspore-lab/mindone/pull/1438",
    ),
    flag(
        "dlse-ignored", "backward formula",
        "lse is a differentiable output whose gradient is dropped.",
        "review ByteDance-Seed/VeOmni/pull/1021",
    ),
    flag(
        "transposed-kv-heads", "backward, strides",
        "Saved keys and values are transposed once too often, which shapes cannot reveal where H = S.",
        "reported huggingface/diffusers/issues/14338", "agreed NVIDIA-NeMo/Automodel/pull/3157",
    ),
    flag(
        "gqa-not-summed", "grouped heads",
        "dk and dv are not summed over the query heads of a group.",
        "fixed marin-community/levanter/pull/449",
        "reported bigcode-project/Megatron-LM/pull/37",
    ),
    flag(
        "gqa-wrong-head", "grouped heads",
        "Query heads are dealt to key heads in another order than h // (H / Hkv).",
    ),
    flag(
        "value-width", "grouped heads, shape",
        "v narrower or wider than q is reshaped by the wrong head count or width.",
        "agreed NVIDIA/TransformerEngine/issues/2868",
    ),
    flag(
        "scale-twice", "backward formula",
        "The scale is missing from dq or dk, or is applied to both q and the scores.",
    ),
    flag(
        "softcap-gradient-missing", "soft cap",
        "The backward leaves out 1 - t**2, or runs as if there were no soft cap.",
        "reported xdit-project/xDiT/pull/598",
    ),
    flag(
        "bias-gradient-reduced", "bias",
        "dbias is not summed over the axes along which bias was broadcast, or over all workers.",
    ),
)  # fmt: skip

MERGE = (
    flag(
        "log2-lse", "LSE base",
        "A base-2 lse is merged, or read by the backward, as a natural one.",
        "fixed vllm-project/vllm/pull/47079", "reported flashinfer-ai/flashinfer/issues/2113",
        "review meta-pytorch/attention-gym/pull/200",
    ),
    flag(
        "natural-lse-as-log2", "LSE base",
        "A natural lse is merged with weights 2**lse.",
        "fixed sgl-project/sglang/pull/33065",
    ),
    flag(
        "merge-overflow", "merge",
        "exp of an lse, or of the difference of the wrong sign, overflows where one part dominates.",
        "fixed NVIDIA/TransformerEngine/pull/716", "fixed zhuzilin/ring-flash-attention/pull/30",
    ),
    flag(
        "empty-merge-nan", "merge, empty rows",
        "Two empty parts are merged to NaN, by -inf minus -inf.",
        "reported vllm-project/vllm/pull/39148",
        "reported flashinfer-ai/flashinfer/issues/4051",
    ),
    flag(
        "finite-lse-of-empty", "empty rows",
        "A part without keys has a finite lse, so that its undefined o enters the merge.",
        "fixed vllm-project/vllm/pull/49294", "agreed flashinfer-ai/flashinfer/issues/4452",
    ),
    flag(
        "plus-inf-lse-of-empty", "empty rows",
        "A row without keys has lse = +inf, which takes all weight in a merge.",
        "reported Dao-AILab/flash-attention/pull/978", "reported deepseek-ai/FlashMLA/pull/77",
    ),
    flag(
        "lse-only-first-head", "LSE, grouped heads",
        "lse is written only for the first query head of each group, while o is right.",
        "reported NVIDIA/cudnn-frontend/issues/1083",
    ),
    flag(
        "lse-layout", "LSE layout",
        "lse is stored or read with the wrong order of axes; o is right.",
        "fixed flashinfer-ai/flashinfer/pull/3838", "fixed zhuzilin/ring-flash-attention/pull/47",
        "reported NVIDIA/TransformerEngine/issues/1467",
    ),
)  # fmt: skip

EMPTY = (
    flag(
        "sentinel", "masking",
        "A finite number stands for -inf, so that valid scores below it are lost or hidden keys get weight.",
        "fixed flashinfer-ai/flashinfer/pull/4401",
    ),
    flag(
        "running-max-of-masked-block", "online softmax",
        "The running maximum of a wholly masked first block is set to 0 and kept, so that a row of "
        "low scores underflows to zero.",
        "reported Dao-AILab/flash-attention/issues/2082",
    ),
    flag(
        "masked-block-nan", "online softmax",
        "A wholly masked first block makes NaN in the rescale, by -inf minus -inf or infinity times 0.",
        "reported pytorch/pytorch/pull/130014",
    ),
    flag(
        "empty-row-nan", "empty rows",
        "A row without visible keys gives NaN, or sends NaN into dk and dv.",
        "fixed tracel-ai/burn/issues/4694", "reported NVIDIA/cudnn-frontend/issues/676",
    ),
    flag(
        "padding-nan", "padding, backward",
        "Padding rows of lse, delta or the gradients are never written, and NaN from there reaches real gradients.",
        "fixed tile-ai/tilelang/pull/2461", "reported NVIDIA/TransformerEngine/issues/2186",
        "reported fla-org/flash-linear-attention/pull/892",
    ),
)  # fmt: skip

PACKING = (
    flag(
        "packing-ignored", "packing",
        "Packed documents attend across their boundaries.",
        "reported axolotl-ai-cloud/axolotl/issues/3608", "fixed NVIDIA-NeMo/Automodel/pull/2999",
    ),
    flag(
        "length-floored", "packing",
        "Document lengths are floored to a multiple of the worker count, and last tokens are ignored.",
        "reported NVIDIA/TransformerEngine/issues/1930",
    ),
    flag(
        "local-document-starts", "packing",
        "A worker reads document starts of the whole stream as local ones, or the reverse.",
        "fixed PrimeIntellect-ai/prime-rl/pull/2392", "fixed axolotl-ai-cloud/axolotl/pull/2495",
    ),
    flag(
        "empty-document", "packing",
        "A document without tokens shifts the ones behind it, or breaks the backward.",
        "fixed Dao-AILab/flash-attention/issues/2562",
    ),
    flag(
        "padding-not-zero", "padding",
        "Padding between or behind documents takes part, or keeps values where zeros belong.",
        "reported NVIDIA/TransformerEngine/pull/1012",
    ),
)  # fmt: skip

FEATURES = (
    flag(
        "window-per-block", "window",
        "The same window is given to every ring step, so that each block is windowed round its own diagonal.",
        "code zhuzilin/ring-flash-attention",
    ),
    flag(
        "window-off-by-one", "window",
        "Both sides of a window are inclusive, and one key too many or too few is seen.",
        "agreed huggingface/transformers/issues/39408",
    ),
    flag(
        "window-sentinel", "window",
        "-1 for an unbounded side is taken literally, or a side of 0 as unbounded.",
        "reported NVIDIA/TransformerEngine/issues/3528",
    ),
    flag(
        "window-over-documents", "window, packing",
        "Under packing the window is clamped to the start of the stream and not to the document.",
        "fixed radixark/miles/pull/2038",
    ),
    flag(
        "end-alignment", "mask, unequal lengths",
        "With unequal lengths the diagonal is aligned at the other end than asked for.",
        "reported ROCm/flash-attention/pull/185",
    ),
    flag(
        "sink-dropped", "sinks",
        "The ring drops the sink: plain softmax, and its gradient is 0.",
        "reported NVIDIA/TransformerEngine/pull/3551",
    ),
    flag(
        "sink-per-block", "sinks",
        "The sink is added once for each block or worker and not once for each row.",
    ),
    flag(
        "sink-outside-maximum", "sinks",
        "The sink takes no part in the maximum: a large one overflows, a row with sinks alone is NaN.",
        "review Dao-AILab/flash-attention/pull/2752",
    ),
    flag(
        "sink-gradient-local", "sinks",
        "Only one worker's share of dsinks is counted.",
        "reported NVIDIA/Megatron-LM/issues/7452",
    ),
    flag(
        "dropout-before-denominator", "dropout",
        "The denominator is summed after dropout, and is 0 where all of an early row is dropped.",
        "fixed aws-neuron/nki-samples/pull/80",
    ),
    flag(
        "dropout-missing-in-dp", "dropout",
        "The backward leaves the keep mask out of dp, or uses the dropped p in the softmax gradient.",
        "reported aws-neuron/nki-samples/pull/81",
    ),
    flag(
        "dropout-mask-not-replayed", "dropout",
        "The backward, or another worker, draws another keep mask than the forward.",
        "agreed zhuzilin/ring-flash-attention/issues/36",
        "reported Dao-AILab/flash-attention/issues/2088",
    ),
)  # fmt: skip

NUMBERS = (
    flag(
        "partials-rounded-to-16-bit", "precision",
        "Each block's o and gradients are rounded to 16 bits on every hop, so that the error grows "
        "with the worker count.",
        "reported zhuzilin/ring-flash-attention/issues/42",
        "reported NVIDIA/TransformerEngine/pull/821", "fixed cornstarch-org/Cornstarch/pull/66",
    ),
    flag(
        "dtype-hard-coded", "precision",
        "A result is cast to bfloat16 whatever the inputs are, so that float16 loses three bits.",
        "code zhuzilin/ring-flash-attention/pull/87",
    ),
    flag(
        "tolerance-too-wide", "test inputs",
        "Values that are all positive and alike let a constant pass for attention.",
        "reported Xilinx/mlir-air/issues/1427",
    ),
    flag(
        "double-rounding", "precision",
        "A result is rounded to float32 and then to 16 bits, which is not one rounding.",
    ),
    flag(
        "subnormal-flushed", "precision",
        "Results below the least normal number become 0, or overflows become the largest number.",
    ),
)  # fmt: skip

FLAGS: MappingProxyType[str, Flag] = MappingProxyType(
    {
        f.name: f
        for f in sorted(
            RING + BACKWARD + MERGE + EMPTY + PACKING + FEATURES + NUMBERS, key=lambda f: f.name
        )
    }
)
