"""The kernel set: further cases with shapes that kernels support, stored only as digests.

They have 128 or 256 tokens per worker and at most 1024 in total, so that their exact values are derived in seconds.
:mod:`~ringspec.vectors.catalogue.kernel_tiles` has more lengths and numbers of workers.
"""

from __future__ import annotations

from typing import Any

from ringspec.vectors.catalogue.kernel_shapes import FORWARD, shaped
from ringspec.vectors.format.case import Case


def kernel(name: str, reason: str, rules: str, flags: str = "", **data: Any) -> Case:
    return shaped(f"kernel/{name}", reason, rules, flags, storage="digests", **data)


CONTIGUOUS = (
    kernel(
        "contiguous-w1",
        "A full tile without a ring: what fails here is the tile, not the ring.",
        "FWD-4 BWD-5", "tolerance-too-wide", W=1, H=2,
    ),
    kernel(
        "contiguous-causal-w1",
        "The triangle of one tile at D = 128, without a ring.",
        "MASK-1", W=1, H=2, D=128, causal=True,
    ),
    kernel(
        "contiguous-causal-w1-two-tiles", "Two tiles on a side, the upper right one skipped.",
        "MASK-1 LAYOUT-7", W=1, n=256, H=2, causal=True,
    ),
    kernel(
        "contiguous-w2",
        "Two full blocks of two heads: the second block's keys are not the first's.",
        "RING-1", "stale-keys", W=2, H=2,
    ),
    kernel(
        "contiguous-causal-w2", "Two blocks at D = 128, one of them skipped by worker 0.", "RING-8",
        "inverted-skip", W=2, D=128, causal=True,
    ),
    kernel(
        "contiguous-causal-w2-two-tiles",
        "A worker's own block has two diagonal tiles and a full one below them.",
        "RING-8 MASK-1", "causal-on-every-step", W=2, n=256, causal=True,
    ),
    kernel(
        "contiguous-w2-batches",
        "Two batch entries of one head: blocks of both travel together.",
        "RING-6", W=2, B=2,
    ),
    kernel(
        "contiguous-causal-w3",
        "Three causal blocks: a reversed ring would bring the future first.",
        "RING-1 RING-8", "ring-direction", W=3, causal=True,
    ),
    kernel(
        "contiguous-w3",
        "Three full blocks at D = 128, none of which may be overwritten while it is sent.",
        "RING-2", "buffer-reuse", W=3, D=128,
    ),
    kernel(
        "contiguous-w4",
        "Four full blocks, whose dk and dv take four hops.",
        "RING-4", "dkv-not-home", W=4,
    ),
    kernel(
        "contiguous-causal-w4",
        "Four causal blocks at D = 128: a skip the wrong way round computes six others.",
        "RING-8", "inverted-skip", W=4, D=128, causal=True,
    ),
    kernel(
        "contiguous-causal-w4-two-tiles",
        "1024 tokens: the longest stream of the set.",
        "RING-4 SOFT-1", W=4, n=256, causal=True,
    ),
    kernel(
        "reversed-w3",
        "Full blocks that travel to r - 1: ownership runs the other way.",
        "RING-1 RING-3", "ring-direction", W=3, direction=-1,
    ),
    kernel(
        "reversed-causal-w4", "Causal blocks against the usual direction: the past comes last.",
        "RING-3 RING-8", W=4, direction=-1, causal=True,
    ),
    kernel(
        "gather-w2",
        "Gathered keys without a mask: dk and dv of both workers are reduced.",
        "RING-2", W=2, circulation="gather",
    ),
    kernel(
        "gather-causal-w4",
        "512 gathered keys for 128 queries: the mask starts at the worker's own position.",
        "RING-2 RING-8", W=4, circulation="gather", causal=True,
    ),
    kernel(
        "forward-only-w4",
        "A forward at D = 128 for kernels without a backward.",
        "SOFT-1", W=4, D=128, passes=FORWARD,
    ),
)  # fmt: skip

LAYOUTS = (
    kernel(
        "striped-w2",
        "Striped rows without a mask: only where rows go back can be wrong.",
        "LAYOUT-6", W=2, layout="striped",
    ),
    kernel(
        "striped-causal-w2",
        "Every striped block has a diagonal at D = 128, at i or at i - 1.",
        "RING-9", "striped-diagonal", W=2, D=128, layout="striped", causal=True,
    ),
    kernel(
        "striped-causal-w2-two-tiles",
        "The off-by-one diagonal crosses a border of tiles.",
        "RING-9", "striped-diagonal", W=2, n=256, layout="striped", causal=True,
    ),
    kernel(
        "striped-causal-w3",
        "Three striped workers with two heads: the mask is the same for both heads.",
        "LAYOUT-2 RING-9", W=3, H=2, layout="striped", causal=True,
    ),
    kernel(
        "striped-causal-w4",
        "Four striped workers: three of four blocks of worker 0 hide their diagonal.",
        "LAYOUT-2 LAYOUT-6", W=4, layout="striped", causal=True,
    ),
    kernel(
        "striped-gather-w3",
        "Gathered keys in striped order: their positions are not their indices.",
        "LAYOUT-2 RING-2", W=3, layout="striped", circulation="gather", causal=True,
    ),
    kernel("striped-window-w2", "A window over striped rows: every block has a band of 32 columns.",
           "MASK-2 RING-9", "window-per-block", W=2, layout="striped", causal=True, window=(63, 0)),
    kernel(
        "zigzag-causal-w1",
        "Zigzag on one worker: its two chunks are the sequence in order.",
        "LAYOUT-3", W=1, layout="zigzag", causal=True,
    ),
    kernel(
        "zigzag-w2",
        "Zigzag without a mask, where no chunk may be skipped.",
        "LAYOUT-3", "zigzag-needs-causal", W=2, layout="zigzag",
    ),
    kernel(
        "zigzag-causal-w2",
        "Chunks of 64 rows: half a tile is hidden, in both heads.",
        "RING-10", "zigzag-chunk-order", W=2, H=2, layout="zigzag", causal=True,
    ),
    kernel(
        "zigzag-causal-w2-two-tiles",
        "Chunks of one tile each at D = 128: whole tiles are hidden or visible.",
        "RING-10", W=2, n=256, D=128, layout="zigzag", causal=True,
    ),
    kernel(
        "zigzag-causal-w3",
        "Three zigzag workers: the middle one holds the chunks 1 and 4.",
        "LAYOUT-3 RING-10", "zigzag-chunk-order", W=3, layout="zigzag", causal=True,
    ),
    kernel(
        "zigzag-causal-w4",
        "Four zigzag workers at D = 128 with equal work on every step.",
        "LAYOUT-3 RING-10", W=4, D=128, layout="zigzag", causal=True,
    ),
    kernel(
        "zigzag-gather-w2",
        "Gathered keys in zigzag order: the last chunk stands second.",
        "LAYOUT-3 RING-2", W=2, layout="zigzag", circulation="gather", causal=True,
    ),
    kernel("zigzag-reversed-w3", "Zigzag blocks that travel to r - 1.", "RING-10 RING-3", W=3,
           layout="zigzag", direction=-1, causal=True),
    kernel(
        "zigzag-per-document-w2",
        "Two documents of 128 tokens, each dealt in zigzag.",
        "LAYOUT-4", "document-balance", W=2, layout="zigzag_per_document", cu_seqlens=(0, 128, 256),
        causal=True,
    ),
    kernel(
        "zigzag-per-document-w3", "Documents of 96, 192 and 96 tokens: chunks of 16, 32 and 16.",
        "LAYOUT-4 MASK-5", "document-balance", W=3, layout="zigzag_per_document",
        cu_seqlens=(0, 96, 288, 384), causal=True,
    ),
)  # fmt: skip

Q_RINGS = (
    kernel(
        "q-ring-w2",
        "A Q ring of two: dq takes two hops and comes home.",
        "RING-5", "dq-not-home", W=2, circulation="q",
    ),
    kernel(
        "q-ring-causal-w2",
        "A causal Q ring at D = 128: worker 0's queries have nothing to do at worker 1.",
        "RING-5 RING-8", W=2, D=128, circulation="q", causal=True,
    ),
    kernel(
        "q-ring-w3",
        "A Q ring of three full blocks, which shows its direction.",
        "RING-5 RING-4", "ring-direction", W=3, circulation="q",
    ),
    kernel(
        "q-ring-causal-w3-two-heads",
        "Two heads travel together in a Q ring, with lse and delta of both.",
        "RING-5 RING-6", W=3, H=2, circulation="q", causal=True,
    ),
    kernel(
        "q-ring-causal-w4",
        "Four causal workers in a Q ring: dq travels on over skipped steps.",
        "RING-4 RING-5", "dq-not-home", W=4, circulation="q", causal=True,
    ),
    kernel(
        "q-ring-w4-of-128",
        "Four full blocks at D = 128 add to dq while it travels.",
        "RING-5", W=4, D=128, circulation="q",
    ),
    kernel(
        "q-ring-striped-w3",
        "Striped queries visit: the diagonal belongs to the pair, not to the host.",
        "RING-5 RING-9", "striped-diagonal", W=3, layout="striped", circulation="q", causal=True,
    ),
    kernel(
        "q-ring-zigzag-w4",
        "Zigzag queries visit: both chunks see other parts of the host's keys.",
        "RING-5 RING-10", W=4, layout="zigzag", circulation="q", causal=True,
    ),
    kernel(
        "q-ring-reversed-w3",
        "A causal Q ring to r - 1: dq comes home the other way.",
        "RING-5 RING-3", W=3, circulation="q", direction=-1, causal=True,
    ),
    kernel(
        "q-ring-dlse-w2",
        "delta - dlse travels in a Q ring of kernels.",
        "RING-7", "dlse-ignored", W=2, circulation="q", causal=True, dlse=True,
    ),
    kernel("q-ring-grouped-heads-w2", "Two query heads visit one key head.", "RING-5 BWD-6",
           "gqa-not-summed", W=2, H=2, Hkv=1, circulation="q", causal=True),
)  # fmt: skip

FEATURES = (
    kernel(
        "window-w2",
        "A window on both sides over two full blocks.",
        "MASK-2", "window-off-by-one", W=2, window=(50, 30),
    ),
    kernel(
        "window-causal-w4",
        "A window of 200 on 128 tokens a worker: at most three blocks count.",
        "MASK-2 RING-11", "window-per-block", W=4, causal=True, window=(199, 0),
    ),
    kernel(
        "window-zigzag-w2",
        "A window over zigzag chunks: neighbours in a tile may be far apart.",
        "MASK-2 RING-10", W=2, layout="zigzag", causal=True, window=(64, 0),
    ),
    kernel("documents-w2", "Three packed documents without a causal mask.", "MASK-5",
           "packing-ignored", W=2, cu_seqlens=(0, 100, 130, 256)),
    kernel("documents-causal-w4", "Six packed documents, one of a single token, on four workers.",
           "MASK-5 RING-6", "packing-ignored", W=4, causal=True,
           cu_seqlens=(0, 1, 128, 200, 383, 385, 512)),
    kernel(
        "documents-striped-w2",
        "Packed documents in a striped layout: each worker has rows of both.",
        "MASK-5 LAYOUT-2", "local-document-starts", W=2, layout="striped", causal=True,
        cu_seqlens=(0, 90, 256),
    ),
    kernel("documents-with-padding-w2", "28 tokens behind the last document are padding.",
           "MASK-5 FWD-8", "padding-not-zero", W=2, causal=True, cu_seqlens=(0, 120, 228)),
    kernel("q-offset-w2", "End-aligned: 256 queries behind 512 keys, blocks of 128 and 256.",
           "RING-8 MASK-8", "end-alignment", W=2, Sq=256, Sk=512, causal=True, q_offset=256),
    kernel(
        "sinks-w2",
        "Sinks of two heads in full blocks, one of which outweighs its keys.",
        "FWD-5 BWD-9", "sink-dropped", W=2, H=2, sinks=((1.0,), (4.0,)),
    ),
    kernel("sinks-causal-w4", "A sink on four causal workers: four partial sums of dsinks.",
           "RING-12 FWD-5", "sink-per-block", W=4, causal=True, sinks=((2.0,),)),
    kernel("sinks-zigzag-w2", "Two sinks a head in a zigzag ring.", "FWD-5 RING-12", W=2,
           layout="zigzag", causal=True, sinks=((0.5, 1.5),)),
    kernel(
        "softcap-w2",
        "A soft cap of 5 in full blocks.",
        "FWD-3 BWD-4", "softcap-gradient-missing", W=2, softcap=5.0,
    ),
    kernel(
        "softcap-causal-w3",
        "A soft cap of 2, which most scores feel, on three workers.",
        "BWD-4", W=3, causal=True, softcap=2.0,
    ),
    kernel(
        "dlse-w2",
        "dlse in a causal ring: delta - dlse and not delta in every block.",
        "BWD-3 RING-7", "dlse-ignored", W=2, causal=True, dlse=True,
    ),
    kernel("dropout-causal-w2", "Counter-based dropout of a tenth under a causal mask.",
           "DROP-1 DROP-2", "dropout-mask-not-replayed", W=2, causal=True, dropout_p=0.1,
           dropout_seed=77),
    kernel("one-key-head-w2", "Two query heads and one key head in full blocks.", "FWD-10 BWD-6",
           "gqa-not-summed", W=2, H=2, Hkv=1),
    kernel(
        "grouped-heads-w1",
        "Four query heads on two key heads: neighbours share a key head.",
        "FWD-10 BWD-7", "gqa-wrong-head", W=1, H=4, Hkv=2, causal=True,
    ),
    kernel(
        "narrow-values-w2",
        "D = 128 and Dv = 64: o and dv are half as wide as dq and dk.",
        "BWD-7", "value-width", W=2, D=128, Dv=64, causal=True,
    ),
    kernel("large-scores-w2", "A scale of 1 at D = 64 makes scores of eight times the usual size.",
           "SOFT-1 FWD-1", "merge-overflow", W=2, causal=True, scale=1.0),
    kernel("empty-rows-w2", "q_offset = -64 empties half of worker 0's rows.", "FWD-8 BWD-10",
           "empty-row-nan", W=2, causal=True, q_offset=-64),
)  # fmt: skip

FORMATS = (
    kernel(
        "float32-w2",
        "Full blocks in float32: rounding of operands to 16 bits shows.",
        "NUM-2", W=2, dtype="f32",
    ),
    kernel(
        "float32-causal-w1-two-tiles",
        "Online softmax over two key tiles in float32.",
        "SOFT-1", W=1, n=256, dtype="f32", causal=True,
    ),
    kernel(
        "float32-causal-w4",
        "Four causal workers in float32: the state between steps stays in float32.",
        "NUM-2 SOFT-1", "partials-rounded-to-16-bit", W=4, dtype="f32", causal=True,
    ),
    kernel(
        "float32-striped-w3",
        "A striped ring in float32: a missing diagonal is far above the noise.",
        "RING-9", "striped-diagonal", W=3, dtype="f32", layout="striped", causal=True,
    ),
    kernel(
        "float32-zigzag-w2",
        "A zigzag ring in float32 at D = 128, with sums over 128 products.",
        "RING-10", W=2, D=128, dtype="f32", layout="zigzag", causal=True,
    ),
    kernel(
        "float32-q-ring-w2",
        "A Q ring in float32: dq travels unrounded.",
        "RING-5 NUM-2", W=2, dtype="f32", circulation="q", causal=True,
    ),
    kernel(
        "float32-window-w3",
        "A window in float32: one key too many shows in every row.",
        "MASK-2", W=3, dtype="f32", window=(90, 10),
    ),
    kernel(
        "float16-w2",
        "Full blocks in float16: results keep eleven bits, not eight.",
        "NUM-1", "dtype-hard-coded", W=2, dtype="fp16",
    ),
    kernel(
        "float16-zigzag-w3",
        "A zigzag ring in float16, forward and backward in one format.",
        "NUM-1 RING-10", W=3, dtype="fp16", layout="zigzag", causal=True,
    ),
    kernel("float16-q-ring-w4", "dq of float16 inputs over four hops.", "RING-5 NUM-1",
           "dtype-hard-coded", W=4, dtype="fp16", circulation="q", causal=True),
)  # fmt: skip

CASES = CONTIGUOUS + LAYOUTS + Q_RINGS + FEATURES + FORMATS
