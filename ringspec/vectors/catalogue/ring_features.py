"""Ring cases with masks, bias, sinks, dropout, dlse and grouped heads."""

from __future__ import annotations

from ringspec.vectors.catalogue.build import bias_of, coins, put, ring

SEGMENTS = (0, 0, 1, 1, 1, -1, 2, 2, 2, 0, 0, -1)
BOUND_MIN = (0, 0, 2, 1, 4, 0, 9, 3, 7, 8, 5, 0)
BOUND_MAX = (1, 5, 3, 12, 9, 0, 12, 8, 8, 11, 6, 12)
POSITIONS = (30, 11, 4, 25, 8, 19, 2, 14, 6, 21, 0, 17)

CASES = (
    ring(
        "ring/window-w3",
        "A window of 5 on blocks of 4 reaches over a whole block: it is not the block's own.",
        "MASK-2 RING-6", "window-per-block", W=3, S=12, window=(5, 2),
    ),
    ring(
        "ring/window-causal-w4",
        "A window of two blocks under a causal mask: far blocks are wholly hidden.",
        "MASK-2 RING-11", "window-per-block mask-ignored-in-ring", W=4, causal=True, window=(6, 0),
    ),
    ring(
        "ring/window-striped-w3",
        "In striped blocks neighbours in the block are three positions apart.",
        "MASK-2 RING-9", "window-per-block", W=3, S=12, layout="striped", window=(4, 1),
    ),
    ring(
        "ring/window-zigzag-w2",
        "A window over zigzag chunks joins the two middle chunks and cuts the outer ones apart.",
        "MASK-2 RING-10", "window-per-block", W=2, layout="zigzag", window=(3, 3),
    ),
    ring(
        "ring/window-self-only-w4",
        "A window of (0, 0): every block but a worker's own is hidden.",
        "MASK-2 RING-11", "masked-block-nan window-sentinel", W=4, window=(0, 0),
    ),
    ring(
        "ring/window-right-unbounded-w2",
        "A window with no right side sees the future block whole.",
        "MASK-2", "mask-ignored-in-ring", W=2, window=(1, None),
    ),
    ring(
        "ring/segments-w3",
        "Segment ids travel with the keys; padding lies on two workers.",
        "MASK-3 RING-6", "positions-not-sharded", W=3, S=12, segments_q=SEGMENTS,
    ),
    ring(
        "ring/segments-q-ring-w3",
        "In a Q ring segment ids and positions travel with the queries.",
        "MASK-3 RING-6 RING-5", "positions-not-sharded", W=3, S=12, circulation="q",
        segments_q=SEGMENTS, causal=True,
    ),
    ring(
        "ring/documents-w2",
        "Two documents in one stream whose border lies inside worker 1.",
        "MASK-5 RING-6", "packing-ignored", W=2, cu_seqlens=(0, 11, 16), causal=True,
    ),
    ring(
        "ring/documents-w4",
        "Three documents: one within a worker, one over three workers, and two tokens of padding.",
        "MASK-5", "local-document-starts", W=4, cu_seqlens=(0, 3, 13, 14), causal=True,
    ),
    ring(
        "ring/documents-striped-w3",
        "Every worker holds tokens of every document.",
        "MASK-5 RING-9", "local-document-starts", W=3, S=12, layout="striped",
        cu_seqlens=(0, 5, 12), causal=True,
    ),
    ring(
        "ring/documents-with-a-window-zigzag-w2",
        "A window ends at the start of its document, which lies in another chunk than the stream's.",
        "MASK-5 MASK-2", "window-over-documents", W=2, layout="zigzag", cu_seqlens=(0, 6, 16),
        window=(4, 0),
    ),
    ring(
        "ring/documents-empty-w2",
        "An empty document in the list shifts no other one.",
        "MASK-5", "empty-document", W=2, S=12, cu_seqlens=(0, 4, 4, 12), causal=True,
    ),
    ring(
        "ring/bounds-q-ring-w3",
        "Bounds travel with the queries and compare with the positions of visiting keys.",
        "MASK-4 RING-6", W=3, S=12, circulation="q", bound_min=BOUND_MIN, bound_max=BOUND_MAX,
    ),
    ring(
        "ring/dense-mask-w2",
        "Rows of the mask belong to the queries, columns to the visiting keys.",
        "MASK-6 RING-6", "mask-ignored-in-ring", W=2, mask=coins(110, 1, 2, 16, 16),
    ),
    ring(
        "ring/positions-w3",
        "Positions given with the tokens decide, and travel with them.",
        "MASK-8 RING-6", "positions-not-sharded", W=3, S=12, causal=True, positions_q=POSITIONS,
        positions_k=POSITIONS,
    ),
    ring(
        "ring/bias-w3",
        "Columns of the bias are picked by the visiting keys' own indices.",
        "RING-6 BWD-8", W=3, S=12, bias=bias_of(1, 2, 12, 12), causal=True,
    ),
    ring(
        "ring/bias-q-ring-w3",
        "In a Q ring rows of bias travel with q, and dbias follows it home.",
        "RING-5 RING-6 BWD-8", "dq-not-home", W=3, S=12, circulation="q",
        bias=bias_of(1, 1, 12, 12),
    ),
    ring(
        "ring/bias-of-keys-w3",
        "A bias [1, H, 1, Sk]: each worker's dbias is a partial sum over its own rows.",
        "RING-12 BWD-8", "bias-gradient-reduced", W=3, S=12, bias=bias_of(1, 2, 1, 12), causal=True,
    ),
    ring(
        "ring/bias-of-queries-w2",
        "A bias [1, H, Sq, 1] under a soft cap: dbias of a row collects over all steps.",
        "BWD-8 BWD-4", "bias-gradient-reduced", W=2, S=8, softcap=1.5, bias=bias_of(1, 2, 8, 1),
    ),
    ring(
        "ring/bias-hides-a-worker-w2",
        "A bias of -inf hides all keys of worker 1: its dk and dv are exactly 0.",
        "MASK-7 RING-11", "masked-block-nan", W=2, S=8,
        bias=bias_of(1, 1, 1, 8, patches=(put("-inf", 0, 0, 0, (4, 8)),)),
    ),
    ring(
        "ring/sink-w3",
        "The sink is added once a row: once a block would count it three times.",
        "FWD-5 RING-12", "sink-per-block sink-gradient-local", W=3, S=12, sinks=((1.0,), (2.5,)),
    ),
    ring(
        "ring/sink-causal-w2",
        "A sink of weight e**3 in a causal ring is not dropped, on either worker.",
        "FWD-5 BWD-9", "sink-dropped", W=2, causal=True, sinks=((3.0,), (3.0,)),
    ),
    ring(
        "ring/several-sinks-striped-w4",
        "dsinks of two sinks a head are sums over rows that lie on all workers.",
        "RING-12 BWD-9", "sink-gradient-local", W=4, layout="striped", causal=True,
        sinks=((0.5, -1.0), (1.5, 0.25)),
    ),
    ring(
        "ring/sink-q-ring-w3",
        "In a Q ring dsinks is made from lse and delta before they travel.",
        "RING-12 RING-5", "sink-per-block", W=3, S=12, circulation="q", causal=True,
        sinks=((1.25,), (-0.5,)), dlse=True,
    ),
    ring(
        "ring/softcap-w3",
        "The soft cap holds on every step and in every step's gradient.",
        "FWD-3 BWD-4", "softcap-gradient-missing", W=3, S=12, softcap=1.25, causal=True,
    ),
    ring(
        "ring/dropout-w3",
        "The keep mask is that of dense attention: positions and heads count globally.",
        "DROP-1 BWD-2", "dropout-mask-not-replayed", W=3, S=12, dropout_p=0.25, dropout_seed=21,
    ),
    ring(
        "ring/dropout-striped-q-ring-w4",
        "Another layout and circulation leave the keep mask as it was.",
        "DROP-1", "dropout-mask-not-replayed", W=4, layout="striped", circulation="q", causal=True,
        dropout_p=0.5, dropout_seed=21,
    ),
    ring(
        "ring/dropout-of-a-tenth-gather-w2",
        "Gathered keys with p = 0.1: the factor 1/(1 - p) is applied once, not at every step.",
        "DROP-2 FWD-6", W=2, S=12, circulation="gather", dropout_p=0.1, dropout_seed=5,
    ),
    ring(
        "ring/keep-given-zigzag-w2",
        "Rows and columns of a given keep mask follow their tokens into the zigzag layout.",
        "DROP-3 FWD-7", "dropout-before-denominator dropout-missing-in-dp", W=2, layout="zigzag",
        causal=True, dropout_p=0.5, keep=coins(128, 1, 1, 16, 16),
    ),
    ring(
        "ring/dlse-w2",
        "dlse enters every step's ds through delta - dlse.",
        "RING-7 BWD-3", "dlse-ignored", W=2, causal=True, dlse=True,
    ),
    ring(
        "ring/dlse-q-ring-w3",
        "In a Q ring delta - dlse travels in place of delta.",
        "RING-7 RING-5", "dlse-ignored", W=3, S=12, circulation="q", dlse=True,
    ),
    ring(
        "ring/one-key-head-w2",
        "One key head for four query heads: dk and dv are summed over heads and steps.",
        "FWD-10 BWD-6", "gqa-not-summed", W=2, S=8, H=4, Hkv=1, causal=True,
    ),
    ring(
        "ring/grouped-heads-zigzag-w3",
        "Grouped heads and values of another width in a zigzag ring.",
        "FWD-10 BWD-7", "gqa-wrong-head value-width", W=3, S=12, H=4, Hkv=2, Dv=6, layout="zigzag",
        causal=True,
    ),
    ring(
        "ring/heads-as-many-as-local-tokens-w2",
        "H = n = 4 on every worker: swapped axes keep the local shapes.",
        "FWD-10 BWD-6", "transposed-kv-heads", W=2, S=8, H=4,
    ),
    ring(
        "ring/whole-row-statistics-w2",
        "Two blocks of unlike weight: each one's own lse and delta are far from the whole row's.",
        "RING-13 BWD-1", "block-local-delta", W=2, S=12, scale=1.5,
    ),
    ring(
        "ring/lse-base-w2",
        "Unequal weights of two blocks: a merge in base 2 gives another mixture, and another lse.",
        "SOFT-3 FWD-4", "log2-lse natural-lse-as-log2", W=2, S=12, scale=1.25,
        passes=("forward",),
    ),
    ring(
        "ring/everything-striped-w3",
        "Mask, bias, soft cap, sinks, dropout and dlse together on three striped workers.",
        "MASK-9 RING-6 RING-7 RING-12", W=3, S=12, H=4, Hkv=2, layout="striped", causal=True,
        window=(8, None), segments_q=SEGMENTS, softcap=3.0, bias=bias_of(1, 1, 1, 12),
        sinks=((0.5,), (-1.0,), (1.5,), (0.0,)), dropout_p=0.25, dropout_seed=99, dlse=True,
    ),
)  # fmt: skip
