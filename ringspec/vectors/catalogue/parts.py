"""Cases that test the parts of a ring separately: blocks, merges and schedules."""

from __future__ import annotations

from ringspec.vectors.catalogue.build import (
    bias_of,
    block_backward,
    block_forward,
    coins,
    constant,
    merge,
    numbers,
    put,
    schedule,
    spread,
)

INF = float("-inf")
PAST = tuple(range(8, 16))
STRIPED = (tuple(range(1, 17, 2)), tuple(range(0, 16, 2)))
ZIGZAG = ((0, 1, 2, 3, 12, 13, 14, 15), (4, 5, 6, 7, 8, 9, 10, 11))
LOG_2, LOG_8 = 0.6931471824645996, 2.079441547393799  # the nearest float32 numbers

BLOCKS = (
    block_forward(
        "block/forward-diagonal",
        "A block of a worker's own keys under the causal mask.",
        "FWD-4 MASK-1", causal=True,
    ),
    block_forward(
        "block/forward-past",
        "Keys of an earlier worker: wholly visible though the mask is causal.",
        "MASK-8 FWD-4", "causal-on-every-step", causal=True, positions_q=PAST,
    ),
    block_forward(
        "block/forward-future",
        "Keys of a later worker: o = 0 and lse = -inf in every row.",
        "FWD-8 SOFT-2", "finite-lse-of-empty plus-inf-lse-of-empty", causal=True, positions_k=PAST,
    ),
    block_forward(
        "block/forward-partly-empty",
        "Three rows of a block see no key and five do.",
        "FWD-8 MASK-8", "finite-lse-of-empty", causal=True, q_offset=-3,
    ),
    block_forward(
        "block/forward-striped",
        "Striped keys of a worker that comes first: the diagonal is visible.",
        "RING-9 MASK-8", "striped-diagonal", causal=True, positions_q=STRIPED[0],
        positions_k=STRIPED[1],
    ),
    block_forward(
        "block/forward-striped-behind",
        "Striped keys of a worker that comes later: the diagonal is hidden, row 0 is empty.",
        "RING-9 FWD-8", "striped-diagonal", causal=True, positions_q=STRIPED[1],
        positions_k=STRIPED[0],
    ),
    block_forward(
        "block/forward-zigzag",
        "Outer chunks of queries on middle chunks of keys: half of the block is visible.",
        "RING-10", "zigzag-chunk-order", causal=True, positions_q=ZIGZAG[0], positions_k=ZIGZAG[1],
    ),
    block_forward(
        "block/forward-segments",
        "A key block of which each query sees one segment, and one query none.",
        "MASK-3", segments_q=(0, 0, 1, 1, 2, 2, 2, 9), segments_k=(1, 1, 1, 0, 0, 2, -1, 2),
    ),
    block_forward(
        "block/forward-grouped-heads-float32",
        "Six query heads on two key heads, float32, values wider than keys.",
        "FWD-10", "gqa-wrong-head", dtype="f32", H=6, Hkv=2, Dv=6,
    ),
    block_backward(
        "block/backward-diagonal",
        "lse is that of a whole row, so that the block's p sum to less than 1.",
        "BWD-11 BWD-3", "block-local-delta", causal=True,
    ),
    block_backward(
        "block/backward-past",
        "A visiting block that is wholly visible: p from the given lse, delta from the given delta.",
        "BWD-11 MASK-8", "causal-on-every-step stale-keys", causal=True, positions_q=PAST,
    ),
    block_backward(
        "block/backward-future",
        "A hidden block sends no gradient: dq, dk and dv are exactly 0.",
        "BWD-10 MASK-8", "inverted-skip", causal=True, positions_k=PAST,
    ),
    block_backward(
        "block/backward-empty-rows",
        "Rows whose lse is -inf send no gradient, though the block's own mask would let them.",
        "BWD-10", "empty-row-nan",
        lse=(
            (
                (3.0, INF, 2.5, 4.0, INF, 3.5, 2.75, 3.25),
                (INF, 2.5, 3.5, 3.0, 2.25, 4.25, 3.0, INF),
            ),
        ),
    ),
    block_backward(
        "block/backward-low-lse",
        "An lse below the block's own makes p larger than 1, which nothing may clip or renormalise.",
        "BWD-11", lse=constant(-0.5),
    ),
    block_backward(
        "block/backward-softcap-and-bias",
        "1 - t**2 and dbias of one block, with other numbers for its own columns.",
        "BWD-4 BWD-8", "softcap-gradient-missing", softcap=2.0, bias=bias_of(1, 2, 8, 8),
    ),
    block_backward(
        "block/backward-grouped-heads",
        "dk and dv of one block are summed over three query heads each.",
        "BWD-6 BWD-7 FWD-10", "gqa-not-summed", H=6, Hkv=2,
    ),
    block_backward(
        "block/backward-dropout",
        "The keep mask of a visiting block is that of its global positions.",
        "DROP-1 BWD-2 BWD-7", "dropout-missing-in-dp", dropout_p=0.5, dropout_seed=17,
        positions_k=PAST,
    ),
    block_backward(
        "block/backward-dense-mask-float16",
        "A masked block in float16, whose gradients keep eleven bits.",
        "MASK-6 BWD-5", "dtype-hard-coded", dtype="fp16", mask=coins(100, 1, 1, 8, 8),
    ),
    block_backward(
        "block/backward-float64",
        "A block in float64 with unequal lengths.",
        "BWD-11 BWD-5", dtype="f64", Sq=6, Sk=9,
    ),
)  # fmt: skip

MERGES = (
    merge("merge/two-parts", "Two parts of like weight.", "SOFT-3", N=2),
    merge(
        "merge/weights-two-and-eight",
        "lse = log 2 and log 8 with outputs 0 and 10: the mixture is 8, with the wrong base it is not.",
        "SOFT-3", "natural-lse-as-log2 log2-lse", N=2, H=1, S=1, Dv=2, dtype="f32",
        parts_o=(((((0.0, 0.0),),),), ((((10.0, -10.0),),),)),
        parts_lse=((((LOG_2,),),), (((LOG_8,),),)),
    ),
    merge(
        "merge/one-part", "One part is itself, bit for bit.", "SOFT-3", N=1,
    ),
    merge(
        "merge/eight-parts", "Eight parts, none of which may be counted twice or left out.",
        "SOFT-3 NUM-3", "partials-rounded-to-16-bit", N=8,
    ),
    merge(
        "merge/two-empty-parts",
        "Two parts without keys, whose o are undefined numbers: the result is o = 0, lse = -inf.",
        "SOFT-2", "empty-merge-nan", N=2, parts_lse=constant("-inf"),
    ),
    merge(
        "merge/first-part-empty",
        "The first part has no keys; the result is the second, bit for bit.",
        "SOFT-2", "masked-block-nan", N=2,
        patches={"parts_lse": (put("-inf", 0, None, None, None),)},
    ),
    merge(
        "merge/last-part-empty",
        "The last part has no keys and holds numbers that must not count.",
        "SOFT-2", "finite-lse-of-empty", N=3,
        patches={"parts_lse": (put("-inf", 2, None, None, None),)},
    ),
    merge(
        "merge/rows-empty-here-and-there",
        "Each part lacks other rows, and one row is empty in all of them.",
        "SOFT-2 SOFT-3", "empty-merge-nan finite-lse-of-empty", N=3,
        patches={"parts_lse": (
            put("-inf", 0, None, None, (0, 2)), put("-inf", 1, None, None, (1, 4)),
            put("-inf", 2, None, 1, (1, 2)), put("-inf", 2, None, None, 3),
        )},
    ),
    merge(
        "merge/huge-garbage-in-an-empty-part",
        "An empty part holds 2**120: 0 times it must be 0, in any order of products.",
        "SOFT-2", "plus-inf-lse-of-empty", N=2,
        patches={
            "parts_o": (put(2.0**120, 0, None, None, None, None),),
            "parts_lse": (put("-inf", 0, None, None, None),),
        },
    ),
    merge(
        "merge/second-part-dominates",
        "The second lse is 95 above the first: exp of the gap overflows float32.",
        "SOFT-4", "merge-overflow", N=2, patches={"parts_lse": (put(95.0, 1, None, None, None),)},
    ),
    merge(
        "merge/first-part-dominates",
        "The first lse is 120 above the second, whose weight is no normal float32 number.",
        "SOFT-4", "merge-overflow", N=2, patches={"parts_lse": (put(120.0, 0, None, None, None),)},
    ),
    merge(
        "merge/large-lse",
        "Both lse lie near 1000, where exp overflows even in float64.",
        "SOFT-4", "merge-overflow", N=2,
        parts_lse=spread(1000.0, 0.25, 13, 2, 1, 2, 6),
    ),
    merge(
        "merge/large-negative-lse",
        "All lse lie near -1000, where exp is 0 in float64: the weights are not.",
        "SOFT-4 SOFT-2", "sentinel", N=3, parts_lse=spread(-1003.0, 0.5, 11, 3, 1, 2, 6),
    ),
    merge(
        "merge/equal-weights",
        "Equal lse: the mean of the parts, and lse + log 2.",
        "SOFT-3", N=2, parts_lse=constant(1.5),
    ),
    merge(
        "merge/opposite-parts",
        "Equal weights and outputs of opposite sign: o is exactly +0.",
        "SOFT-3 NUM-1", N=2, S=4, parts_lse=constant(-2.25),
        parts_o=constant(1.375, None, put(-1.375, 1, None, None, None, None)),
    ),
    merge(
        "merge/nearly-equal-weights",
        "The lse of a row differ by one float32 step at 100, which exp(lse) alone would not show.",
        "SOFT-3 NUM-3", N=2, dtype="f32",
        parts_lse=constant(100.0, None, put(100.00000762939453, 1, None, None, None)),
    ),
    merge(
        "merge/batches-and-heads",
        "B = 2, H = 3 and S = 5: lse of each row and head weighs its own o.",
        "SOFT-3", "lse-layout", N=3, B=2, H=3, S=5,
    ),
    merge(
        "merge/rising-weights",
        "Each of five parts outweighs all before it: the running maximum moves at every step.",
        "SOFT-1 SOFT-3", N=5, parts_lse=numbers(6, -5, shard=96, shards=5),
    ),
    merge(
        "merge/float16", "Parts in float16, whose products keep eleven bits.", "NUM-3",
        "dtype-hard-coded", N=3, dtype="fp16",
    ),
    merge("merge/float64", "Parts and lse in float64.", "SOFT-3 NUM-2", N=3, dtype="f64"),
)  # fmt: skip

SCHEDULES = (
    schedule("schedule/kv-ring-w1", "One worker computes once and sends nothing.", "RING-1", W=1),
    schedule(
        "schedule/kv-ring-w2", "dk and dv take two hops home where k and v take one.",
        "RING-4", "dkv-not-home", W=2,
    ),
    schedule(
        "schedule/kv-ring-w3", "The smallest ring that has a direction.", "RING-1 RING-3",
        "ring-direction", W=3,
    ),
    schedule(
        "schedule/kv-ring-w4",
        "Sixteen pairs in four steps, each once.",
        "RING-2", "buffer-reuse", W=4,
    ),
    schedule(
        "schedule/kv-ring-w8",
        "Eight steps: the owner is (r - t) mod 8, also below 0.",
        "RING-1 RING-4", "group-ranks", W=8,
    ),
    schedule(
        "schedule/q-ring-w3", "In the backward queries visit keys, and their dq goes home.",
        "RING-5", "dq-not-home", W=3, circulation="q",
    ),
    schedule(
        "schedule/q-ring-w4", "Forward and backward of a Q ring move different sides.",
        "RING-5 RING-2", W=4, circulation="q",
    ),
    schedule(
        "schedule/gather-w3", "Gathered keys: one step that computes nothing, then all blocks.",
        "RING-2", W=3, circulation="gather",
    ),
    schedule(
        "schedule/reversed-kv-ring-w3", "Each worker sends to r - 1 and holds block r + t.",
        "RING-1 RING-3", "ring-direction", W=3, direction=-1,
    ),
    schedule(
        "schedule/reversed-q-ring-w4", "A reversed Q ring over four workers.", "RING-5 RING-3", W=4,
        circulation="q", direction=-1,
    ),
)  # fmt: skip

CASES = BLOCKS + MERGES + SCHEDULES
