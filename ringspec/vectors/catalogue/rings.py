"""Ring cases of every layout, circulation and direction, with 1, 2, 3, 4 and 8 workers."""

from __future__ import annotations

from ringspec.vectors.catalogue.build import coins, ring

# Layout tables with padding in chosen slots, with a worker without tokens, and for cross attention.
RAGGED = ((4, -1, 0), (2, 6, 3), (-1, 1, 5))
RANDOM = ((7, 2, 11, 4), (0, 9, 5, 10), (8, 1, 3, 6))
EMPTY_WORKER = ((0, 3, 4, 7), (-1, -1, -1, -1), (1, 2, 5, 6))
LAST_PADDED = ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, -1, -1, -1))
ZIGZAG_OF_6 = ((0, 1, -1, -1), (2, 3, 4, 5))
THREE_OF_TWO = ((0, -1), (1, 2))
DOCUMENTS_4_3 = ((0, 3, 4, -1), (1, 2, 5, 6))
QUERIES_ODD = ((1, 3), (0, 5), (2, 4))
KEYS_BACKWARD = ((11, 10, 9, 8), (7, 6, 5, 4), (3, 2, 1, 0))

CASES = (
    # contiguous
    ring(
        "ring/contiguous-causal-w1",
        "One worker makes no hop and is dense attention.",
        "LAYOUT-1 RING-1", W=1, S=12, causal=True,
    ),
    ring(
        "ring/contiguous-causal-w2",
        "The triangle belongs to step 0 alone; worker 0 skips its second block and worker 1 does not.",
        "LAYOUT-1 RING-8 MASK-1", "causal-on-every-step inverted-skip", W=2, causal=True,
    ),
    ring(
        "ring/contiguous-causal-w3",
        "With three workers a reversed ring brings other keys than ownership says.",
        "RING-1 RING-8 RING-4", "ring-direction", W=3, S=12, causal=True,
    ),
    ring(
        "ring/contiguous-causal-w4",
        "Four workers do one to four blocks of work, and dk, dv travel on over skipped steps.",
        "RING-4 RING-8 RING-11", "dkv-not-home inverted-skip", W=4, causal=True,
    ),
    ring(
        "ring/contiguous-causal-w8",
        "Two tokens a worker on eight workers: seven hops, most of them skipped.",
        "RING-1 RING-8", "inverted-skip", W=8, causal=True,
    ),
    ring(
        "ring/contiguous-w2",
        "The second step's keys are not those of the first, in the forward as in the backward.",
        "RING-1 RING-13", "stale-keys", W=2,
    ),
    ring(
        "ring/contiguous-w3",
        "Three blocks with unlike keys and values must each be seen once by every worker.",
        "RING-2 RING-3", "buffer-reuse", W=3, S=12,
    ),
    ring(
        "ring/contiguous-w8",
        "Eight blocks of like weight are merged, so that a rounding on every hop adds up.",
        "SOFT-1 NUM-2", "partials-rounded-to-16-bit", W=8,
    ),
    ring(
        "ring/contiguous-w4-batches",
        "Two batch entries and three heads on four workers: blocks travel whole.",
        "RING-1 RING-6", "group-ranks", W=4, B=2, H=3, S=8,
    ),
    ring(
        "ring/contiguous-forward-only-w4",
        "A forward without a backward, for rings that have none.",
        "RING-1 SOFT-1", W=4, S=24, D=8, causal=True, passes=("forward",),
    ),
    # striped
    ring(
        "ring/striped-causal-w2",
        "Where the keys' worker comes after the queries' the diagonal itself is hidden.",
        "LAYOUT-2 RING-9", "striped-diagonal", W=2, layout="striped", causal=True,
    ),
    ring(
        "ring/striped-causal-w3",
        "Striped blocks of six pairs of workers, three with the diagonal and three without.",
        "LAYOUT-2 RING-9 RING-1", "striped-diagonal", W=3, layout="striped", S=12, causal=True,
    ),
    ring(
        "ring/striped-causal-w4",
        "Rows of each worker go back to their places in the sequence, four apart.",
        "LAYOUT-2 LAYOUT-6", W=4, layout="striped", causal=True,
    ),
    ring(
        "ring/striped-causal-w8",
        "Two rows a worker: in most blocks the first row is empty and the second is not.",
        "RING-9 SOFT-2", "masked-block-nan", W=8, layout="striped", causal=True,
    ),
    ring(
        "ring/striped-w3",
        "Without a mask a striped ring differs from a contiguous one only in where rows lie.",
        "LAYOUT-2 LAYOUT-6", W=3, layout="striped", S=12,
    ),
    # zigzag
    ring(
        "ring/zigzag-causal-w1",
        "One worker holds both chunks in order: zigzag is contiguous.",
        "LAYOUT-3", W=1, layout="zigzag", S=12, causal=True,
    ),
    ring(
        "ring/zigzag-causal-w2",
        "Worker 1 holds the two middle chunks, which follow each other; worker 0 the outer ones.",
        "LAYOUT-3 RING-10", "zigzag-chunk-order", W=2, layout="zigzag", causal=True,
    ),
    ring(
        "ring/zigzag-causal-w3",
        "Each pair of workers meets in four chunk pairs with offsets of their own.",
        "LAYOUT-3 RING-10 RING-1", "zigzag-chunk-order", W=3, layout="zigzag", S=12, causal=True,
    ),
    ring(
        "ring/zigzag-causal-w4",
        "Keys from a later worker: only the second query chunk sees them, and only their first chunk.",
        "LAYOUT-3 RING-10", W=4, layout="zigzag", causal=True,
    ),
    ring(
        "ring/zigzag-causal-w8",
        "Chunks of one token: two rows a worker, fifteen positions apart at most.",
        "LAYOUT-3 RING-10", W=8, layout="zigzag", causal=True,
    ),
    ring(
        "ring/zigzag-w2",
        "Zigzag without a causal mask: balance has no reason, and results must still be right.",
        "LAYOUT-3", "zigzag-needs-causal", W=2, layout="zigzag",
    ),
    ring(
        "ring/zigzag-per-document-w2",
        "Documents of 8 and 4 tokens: each worker holds the outer or the middle chunks of both.",
        "LAYOUT-4 MASK-5", "document-balance", W=2, S=12, layout="zigzag_per_document",
        cu_seqlens=(0, 8, 12), causal=True,
    ),
    ring(
        "ring/zigzag-per-document-w3",
        "Documents of 7, 1 and 5 tokens leave padding slots in the middle of a worker's rows.",
        "LAYOUT-4 LAYOUT-5", "padding-not-zero", W=3, S=13, layout="zigzag_per_document",
        cu_seqlens=(0, 7, 8, 13), causal=True,
    ),
    ring(
        "ring/zigzag-per-document-w2-tail",
        "Tokens behind the last document are dealt out like one more, and see nothing.",
        "LAYOUT-4 MASK-5 FWD-8", "padding-not-zero", W=2, S=11, layout="zigzag_per_document",
        cu_seqlens=(0, 5, 9),
    ),
    # tables
    ring(
        "ring/table-random-w3",
        "Tokens in no order at all: positions, not slots, decide who sees whom.",
        "LAYOUT-5 MASK-8 RING-6", "positions-not-sharded", W=3, S=12, table_q=RANDOM, causal=True,
    ),
    ring(
        "ring/table-ragged-w3",
        "Seven tokens on three workers with padding before, between and behind them.",
        "LAYOUT-5", "padding-nan", W=3, S=7, table_q=RAGGED, causal=True,
    ),
    ring(
        "ring/table-empty-worker-w3",
        "A worker without any token passes blocks on and returns zeros.",
        "LAYOUT-5 SOFT-2", "padding-nan", W=3, S=8, table_q=EMPTY_WORKER, causal=True,
    ),
    ring(
        "ring/table-thirteen-tokens-w4",
        "Thirteen tokens on four workers: the last worker has one token and three padding slots.",
        "LAYOUT-5", "short-or-uneven-length", W=4, S=13, table_q=LAST_PADDED, causal=True,
    ),
    ring(
        "ring/table-six-tokens-in-zigzag-w2",
        "Six tokens cannot be cut into four equal chunks: zigzag with padding.",
        "LAYOUT-5 LAYOUT-3", "short-or-uneven-length", W=2, S=6, table_q=ZIGZAG_OF_6, causal=True,
    ),
    ring(
        "ring/table-fewer-tokens-than-chunks-w2",
        "Three tokens for two workers, fewer than 2W.",
        "LAYOUT-5", "short-or-uneven-length", W=2, S=3, table_q=THREE_OF_TWO, causal=True,
    ),
    ring(
        "ring/table-documents-of-4-and-3-w2",
        "A document of three tokens on two workers: its last token counts.",
        "LAYOUT-5 MASK-5", "length-floored", W=2, S=7, table_q=DOCUMENTS_4_3, cu_seqlens=(0, 4, 7),
        causal=True,
    ),
    ring(
        "ring/table-of-queries-and-of-keys-w3",
        "Queries and keys are dealt out by different tables, in cross attention of 6 on 12 tokens.",
        "LAYOUT-5 RING-6", W=3, Sq=6, Sk=12, table_q=QUERIES_ODD, table_k=KEYS_BACKWARD,
        window=(5, 3),
    ),
    # circulations and directions
    ring(
        "ring/q-ring-w2",
        "The queries' inputs travel and their dq comes back to them; dk and dv stay.",
        "RING-5", "dq-not-home", W=2, circulation="q", causal=True,
    ),
    ring(
        "ring/q-ring-w3",
        "In a Q ring of three dq needs three hops, one more than q.",
        "RING-5 RING-4", "dq-not-home ring-direction", W=3, S=12, circulation="q",
    ),
    ring(
        "ring/q-ring-w8",
        "dq collects eight shares on the way round and is rounded once at the end.",
        "RING-5 NUM-2", "partials-rounded-to-16-bit", W=8, circulation="q",
    ),
    ring(
        "ring/q-ring-striped-w3",
        "Queries of a later worker visit striped keys.",
        "RING-5 RING-9", "striped-diagonal", W=3, S=12, circulation="q", layout="striped",
        causal=True,
    ),
    ring(
        "ring/q-ring-zigzag-w4",
        "Two query chunks with far positions visit together.",
        "RING-5 RING-10", W=4, circulation="q", layout="zigzag", causal=True,
    ),
    ring(
        "ring/gather-w3",
        "All keys are gathered first, and dk, dv are reduced and scattered last.",
        "RING-2 RING-4", W=3, S=12, circulation="gather", causal=True,
    ),
    ring(
        "ring/gather-zigzag-w4",
        "Gathered keys of a zigzag layout are not in the order of the sequence.",
        "RING-2 RING-10", "zigzag-chunk-order", W=4, circulation="gather", layout="zigzag",
        causal=True,
    ),
    ring(
        "ring/gather-striped-w2",
        "Gathered striped keys are worker by worker, not token by token.",
        "RING-2 RING-9", W=2, circulation="gather", layout="striped", causal=True,
    ),
    ring(
        "ring/reversed-w3",
        "Keys travel from r to r - 1: at step t worker r holds block r + t.",
        "RING-1 RING-3", "ring-direction", W=3, S=12, direction=-1, causal=True,
    ),
    ring(
        "ring/reversed-q-ring-w4",
        "A Q ring from r to r - 1, whose dq goes home in that direction.",
        "RING-5 RING-3", "ring-direction", W=4, circulation="q", direction=-1,
    ),
    ring(
        "ring/reversed-zigzag-w4",
        "With zigzag the order of steps decides which chunks come first, not what they give.",
        "RING-1 RING-10", W=4, direction=-1, layout="zigzag", causal=True,
    ),
    # lengths and offsets
    ring(
        "ring/contiguous-offset-one-w3",
        "With q_offset = 1 one corner pair of the next worker's block is visible: it cannot be skipped.",
        "RING-8 RING-11", W=3, S=12, causal=True, q_offset=1,
    ),
    ring(
        "ring/contiguous-end-aligned-w2",
        "Blocks of 4 queries and 8 keys: offsets count n_q and n_k apart.",
        "RING-8 MASK-8", "end-alignment", W=2, Sq=8, Sk=16, causal=True, q_offset=8,
    ),
    ring(
        "ring/contiguous-more-queries-w3",
        "Blocks of 5 queries and 3 keys, starts aligned: later workers see every key.",
        "RING-8", "end-alignment", W=3, Sq=15, Sk=9, causal=True,
    ),
    ring(
        "ring/striped-offset-w3",
        "q_offset = 5 moves striped diagonals by two rows or by one.",
        "RING-9", "striped-diagonal", W=3, S=12, layout="striped", causal=True, q_offset=5,
    ),
    ring(
        "ring/striped-negative-offset-w4",
        "q_offset = -2 empties the rows of the first two tokens, which lie on two workers.",
        "RING-9 FWD-8", "empty-row-nan", W=4, layout="striped", causal=True, q_offset=-2,
    ),
    ring(
        "ring/zigzag-end-aligned-w2",
        "Chunks of 2 queries and 4 keys with q_offset = 8.",
        "RING-10 MASK-8", "end-alignment", W=2, Sq=8, Sk=16, layout="zigzag", causal=True,
        q_offset=8,
    ),
    # formats
    ring(
        "ring/float16-w2",
        "Every gradient of a float16 ring is float16, also dq.",
        "NUM-1", "dtype-hard-coded", W=2, dtype="fp16", causal=True,
    ),
    ring(
        "ring/float32-zigzag-w4",
        "In float32 a state kept in 16 bits between steps shows at once.",
        "NUM-2 SOFT-1", "partials-rounded-to-16-bit", W=4, S=16, dtype="f32", layout="zigzag",
        causal=True,
    ),
    ring(
        "ring/float64-w3",
        "A ring in float64 with a dense mask has no rounding to hide behind.",
        "RING-2 MASK-6", W=3, S=12, dtype="f64", mask=coins(60, 1, 1, 12, 12),
    ),
)  # fmt: skip
