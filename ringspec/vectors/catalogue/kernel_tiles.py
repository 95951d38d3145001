"""Further cases of the kernel set: many workers, lengths that are not powers of two, odd numbers of heads.

They test what kernels with fixed tiles handle specially: a key tile that is not full, an odd number of heads to split
between two cores, a group of three query heads per key head, and eight hops.
"""

from __future__ import annotations

from ringspec.vectors.catalogue.kernels import kernel

EIGHT = (
    kernel(
        "contiguous-w8",
        "Eight full blocks: an error that each hop adds shows eight times.",
        "RING-1 NUM-3", "partials-rounded-to-16-bit", W=8,
    ),
    kernel(
        "contiguous-causal-w8",
        "Of 64 blocks 28 are skipped: worker 0 has one block, worker 7 has eight.",
        "RING-8 RING-4", "dkv-not-home", W=8, causal=True,
    ),
    kernel(
        "striped-causal-w8",
        "Each block is a triangle, with or without its diagonal.",
        "RING-9 LAYOUT-2", "striped-diagonal", W=8, layout="striped", causal=True,
    ),
    kernel(
        "q-ring-causal-w8",
        "dq gathers eight blocks on its way home.",
        "RING-5 RING-4", "dq-not-home", W=8, circulation="q", causal=True,
    ),
)  # fmt: skip

LENGTHS = (
    kernel(
        "contiguous-causal-w1-five-tiles",
        "640 keys: after a key tile of 512 one of 128 is left.",
        "MASK-1 LAYOUT-7", W=1, n=640, causal=True,
    ),
    kernel(
        "contiguous-causal-w2-three-tiles",
        "384 tokens a worker: three query tiles, and a key tile that is not full.",
        "RING-8 LAYOUT-7", "lse-layout", W=2, n=384, causal=True,
    ),
    kernel(
        "striped-causal-w2-three-tiles",
        "A triangle of three tiles on a side in every block.",
        "RING-9 LAYOUT-7", W=2, n=384, layout="striped", causal=True,
    ),
    kernel(
        "contiguous-causal-w1-eight-tiles",
        "1024 tokens on one worker: two full key tiles.",
        "MASK-1", W=1, n=1024, causal=True,
    ),
)  # fmt: skip

HEADS = (
    kernel(
        "three-heads-of-two-batches-w2",
        "Six items; two cores share them evenly, four do not.",
        "RING-6", W=2, B=2, H=3, causal=True,
    ),
    kernel(
        "three-heads-w3",
        "Three items on two cores: one is done in halves, or twice.",
        "RING-6", W=3, H=3,
    ),
    kernel(
        "grouped-heads-striped-w3",
        "Three query heads share one key head, in a striped ring.",
        "FWD-10 BWD-6", "gqa-not-summed", W=3, H=3, Hkv=1, layout="striped", causal=True,
    ),
    kernel(
        "float32-grouped-heads-w4",
        "Four query heads on two key heads in float32.",
        "FWD-10 BWD-6", "gqa-not-summed", W=4, H=4, Hkv=2, dtype="f32", causal=True,
    ),
)  # fmt: skip

FORMATS = (
    kernel(
        "float16-causal-w3",
        "A causal ring in float16: what passes through bfloat16 loses three bits.",
        "NUM-1", "dtype-hard-coded", W=3, dtype="fp16", causal=True,
    ),
    kernel(
        "float16-striped-w4",
        "A striped ring in float16.",
        "NUM-1 RING-9", "dtype-hard-coded", W=4, dtype="fp16", layout="striped", causal=True,
    ),
)  # fmt: skip

CASES = EIGHT + LENGTHS + HEADS + FORMATS
