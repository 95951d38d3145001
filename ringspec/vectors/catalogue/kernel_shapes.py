"""Cases of the core set with shapes that kernels with fixed tile sizes support, stored as sampled rows and digests.

Each worker has 128 or 256 tokens, and D is 64 or 128. ``n`` is the number of tokens per worker.
"""

from __future__ import annotations

from typing import Any

from ringspec.vectors.catalogue.build import ring
from ringspec.vectors.format.case import Case


def shaped(
    id: str, reason: str, rules: str, flags: str = "", *, W: int, n: int = 128, D: int = 64,
    H: int = 1, storage: str = "sampled", **data: Any,
) -> Case:  # fmt: skip
    """Make a ring case with W workers that hold n tokens each."""
    return ring(
        id, reason, rules, flags, W=W, S=W * n, H=H, D=D, storage=storage,
        **data,
    )  # fmt: skip


FORWARD = ("forward",)

CASES = (
    shaped(
        "kernel-shape/contiguous-causal-w1",
        "One tile of 128 queries on 128 keys, with its triangle.",
        "MASK-1 BWD-5", "delta-of-few-rows", W=1, causal=True,
    ),
    shaped(
        "kernel-shape/contiguous-causal-w1-two-tiles",
        "Two tiles of lse: row t lies at t % 128 of tile t // 128.",
        "LAYOUT-7 FWD-4", "lse-layout", W=1, n=256, D=128, H=2, causal=True, passes=FORWARD,
    ),
    shaped(
        "kernel-shape/contiguous-causal-w2",
        "A diagonal tile, a full tile and a skipped one.",
        "RING-8 MASK-1", "causal-on-every-step inverted-skip", W=2, H=2, causal=True,
    ),
    shaped(
        "kernel-shape/contiguous-w2",
        "Full tiles at D = 128, the widest head that one matrix unit takes.",
        "RING-1 FWD-2", "tolerance-too-wide", W=2, D=128,
        passes=FORWARD,
    ),
    shaped(
        "kernel-shape/contiguous-w3",
        "Three hops of full tiles show the direction of a ring of kernels.",
        "RING-1 RING-4", "ring-direction buffer-reuse", W=3,
    ),
    shaped(
        "kernel-shape/contiguous-causal-w4",
        "Ten of sixteen tiles are computed, and dk, dv go home over skipped ones.",
        "RING-4 RING-8", "dkv-not-home", W=4, causal=True,
    ),
    shaped(
        "kernel-shape/contiguous-causal-w4-two-tiles",
        "256 tokens a worker: tiles above and below the diagonal within one block.",
        "RING-8 MASK-8", W=4, n=256, causal=True, passes=FORWARD,
    ),
    shaped(
        "kernel-shape/striped-causal-w2",
        "Striped tiles with a diagonal in every block.",
        "LAYOUT-2 RING-9", "striped-diagonal", W=2, layout="striped", causal=True,
    ),
    shaped(
        "kernel-shape/striped-causal-w3",
        "128 tokens on each of three workers: the last tile's diagonal is that of the first.",
        "LAYOUT-2 LAYOUT-6", W=3, layout="striped", causal=True, passes=FORWARD,
    ),
    shaped(
        "kernel-shape/striped-causal-w4-of-128",
        "Striped tiles at D = 128, whose rows go back to the sequence four apart.",
        "LAYOUT-6 RING-9", W=4, D=128, layout="striped", causal=True, passes=FORWARD,
    ),
    shaped(
        "kernel-shape/zigzag-causal-w2-of-128",
        "Two chunks of 64 rows share one tile of 128.",
        "LAYOUT-3 RING-10", "zigzag-chunk-order", W=2, D=128, layout="zigzag", causal=True,
        passes=FORWARD,
    ),
    shaped(
        "kernel-shape/zigzag-causal-w3-two-tiles",
        "Two chunks of 128 rows are a tile each, with offsets of their own.",
        "LAYOUT-3 RING-10", W=3, n=256, layout="zigzag", causal=True, passes=FORWARD,
    ),
    shaped(
        "kernel-shape/zigzag-causal-w4",
        "Half tiles are visible in every block but a worker's own.",
        "LAYOUT-3 RING-10", W=4, layout="zigzag", causal=True,
    ),
    shaped(
        "kernel-shape/q-ring-causal-w4",
        "dq is added up in memory while it travels, and arrives after four hops.",
        "RING-5 RING-4", "dq-not-home", W=4, circulation="q", causal=True,
    ),
    shaped(
        "kernel-shape/q-ring-zigzag-w2",
        "The rows that visit are two chunks whose positions travel with them.",
        "RING-5 RING-6", "positions-not-sharded", W=2, circulation="q", layout="zigzag",
        causal=True,
    ),
    shaped(
        "kernel-shape/gather-causal-w2",
        "256 gathered keys stand behind 128 queries.",
        "RING-2 MASK-1", W=2, circulation="gather", causal=True, passes=FORWARD,
    ),
    shaped(
        "kernel-shape/window-w2",
        "A window of 100 keys reaches over the border of two tiles.",
        "MASK-2", "window-per-block", W=2, causal=True, window=(100, 0),
    ),
    shaped(
        "kernel-shape/documents-w2",
        "Documents whose borders lie inside tiles.",
        "MASK-5", "packing-ignored local-document-starts", W=2, causal=True,
        cu_seqlens=(0, 37, 160, 256), passes=FORWARD,
    ),
    shaped(
        "kernel-shape/sinks-w2",
        "A sink in a kernel's own online softmax, once a row.",
        "FWD-5 BWD-9", "sink-dropped sink-per-block", W=2, causal=True, sinks=((3.0,),),
    ),
    shaped(
        "kernel-shape/grouped-heads-w2",
        "Two query heads share one key head, whose gradients are their sum.",
        "FWD-10 BWD-6", "gqa-not-summed", W=2, H=2, Hkv=1, causal=True,
    ),
    shaped(
        "kernel-shape/softcap-w2",
        "tanh on every tile, before the mask.",
        "FWD-3", W=2, causal=True, softcap=4.0, passes=FORWARD,
    ),
    shaped(
        "kernel-shape/dropout-w2",
        "The counters of 128 x 256 pairs, on two workers.",
        "DROP-1 BWD-2", "dropout-mask-not-replayed", W=2, dropout_p=0.25, dropout_seed=2024,
    ),
    shaped(
        "kernel-shape/float32-causal-w2",
        "In float32 a matrix unit that rounds its operands shows in o and in all gradients.",
        "NUM-2", W=2, dtype="f32", causal=True,
    ),
    shaped(
        "kernel-shape/float32-w4",
        "Four float32 partial results, whose merge must not go through 16 bits.",
        "NUM-2 SOFT-1", "partials-rounded-to-16-bit", W=4, dtype="f32", passes=FORWARD,
    ),
    shaped(
        "kernel-shape/float32-reversed-q-ring-w3",
        "dq accumulates in float32 over three hops against the usual direction.",
        "RING-5 RING-3", W=3, dtype="f32", circulation="q", direction=-1, causal=True,
    ),
    shaped(
        "kernel-shape/float16-causal-w2",
        "Operands, P and gradients in float16 at tile size.",
        "NUM-1 NUM-2", "dtype-hard-coded", W=2, dtype="fp16", causal=True,
    ),
)  # fmt: skip
