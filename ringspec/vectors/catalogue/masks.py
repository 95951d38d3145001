"""Cases of dense attention, with every kind of mask."""

from __future__ import annotations

from ringspec.vectors.catalogue.build import bias_of, case, coins, put

SEGMENTS = (0, 0, 0, -1, 1, 1, 1, 1, 1, -1, 2, 2, 0, 0, 3, 3)
SEGMENTS_Q = ((0, 0, 0, 1, 1, 1, 2, 2), (-1, 5, 5, 5, 5, 7, 7, -1))
SEGMENTS_K = ((0, 1, 1, 1, 2, 2, 2, 2), (5, 5, -1, 5, 7, 7, 8, 8))
BOUND_MIN = (0, 0, 1, 2, 5, 5, 7, 9, 0, 15, 3, 3, 12, 0, 4, 10)
BOUND_MAX = (1, 2, 2, 9, 5, 6, 16, 99, 16, 16, 4, 8, 16, 0, 9, 11)
SHUFFLED_Q = (9, 2, 14, 0, 7, 11, 4, 15, 1, 12, 6, 3, 13, 8, 10, 5)
SHUFFLED_K = (3, 17, 8, 0, 11, 6, 15, 1, 13, 9, 2, 12, 5, 14, 4, 10)
PER_BATCH = ((4, 0, 2, 9, 7, 1, 3, 8), (20, 25, 21, 24, 26, 22, 23, 27))

CASES = (
    case(
        "attention/plain",
        "No mask: every query sees every key, and dy is neither constant nor of one sign.",
        "FWD-1 FWD-4 BWD-1 BWD-3 BWD-5", "dy-ignored tolerance-too-wide",
    ),
    case(
        "attention/causal",
        "A query sees the key at its own position: a strict comparison loses the diagonal.",
        "MASK-1", causal=True,
    ),
    case(
        "attention/causal-more-queries-than-keys",
        "Starts are aligned: the queries behind the last key see all keys, none is empty.",
        "MASK-1 MASK-8", "end-alignment", Sq=14, Sk=9, causal=True,
    ),
    case(
        "attention/causal-more-keys-than-queries",
        "Keys behind the last query are seen by none, so that their dk and dv are exactly 0.",
        "MASK-1 BWD-6 BWD-7", Sq=9, Sk=14, causal=True,
    ),
    case(
        "attention/causal-end-aligned",
        "q_offset = Sk - Sq aligns the ends: the last query sees every key.",
        "MASK-8", "end-alignment", Sq=9, Sk=14, causal=True, q_offset=5,
    ),
    case(
        "attention/causal-first-rows-empty",
        "A negative q_offset leaves the first three rows without keys: o = 0, lse = -inf, no gradient.",
        "MASK-8 FWD-8 BWD-10", "empty-row-nan", causal=True, q_offset=-3,
    ),
    case(
        "attention/window",
        "Both sides of a window count inclusively, with unequal reach to the left and right.",
        "MASK-2", "window-off-by-one", window=(3, 2),
    ),
    case(
        "attention/window-left-unbounded",
        "Only the right side is bounded: every earlier key and one later key.",
        "MASK-2", "window-sentinel", window=(None, 1),
    ),
    case(
        "attention/window-right-unbounded",
        "Only the left side is bounded: two earlier keys and every later key.",
        "MASK-2", window=(2, None),
    ),
    case(
        "attention/window-self-only",
        "A window of (0, 0) is one key a row: o is v exactly, and dq and dk are exactly 0.",
        "MASK-2 BWD-3", "window-sentinel", window=(0, 0),
    ),
    case(
        "attention/window-and-causal",
        "A window that reaches to the right, under a causal mask that forbids it.",
        "MASK-9 MASK-1 MASK-2", causal=True, window=(4, 2),
    ),
    case(
        "attention/window-beyond-the-keys",
        "Queries whose window lies behind the last key are empty rows.",
        "MASK-2 FWD-8 BWD-10", "empty-row-nan", Sq=14, Sk=6, window=(3, 1),
    ),
    case(
        "attention/window-as-wide-as-the-sequence",
        "A window of S - 1 on both sides hides nothing: its first and last pair are the corners.",
        "MASK-2", "window-off-by-one", window=(15, 15),
    ),
    case(
        "attention/window-one-less-than-the-sequence",
        "A window of S - 2 on the left hides one pair, the first key from the last query.",
        "MASK-2", window=(14, None),
    ),
    case(
        "attention/window-end-aligned",
        "Window and q_offset with unequal lengths: the window lies round the aligned position.",
        "MASK-2 MASK-8", "end-alignment", Sq=5, Sk=16, window=(4, 0), q_offset=11,
    ),
    case(
        "attention/segments-with-padding",
        "Negative segments are padding, which does not see other padding either; segment 0 comes back.",
        "MASK-3 FWD-8", "padding-not-zero", segments_q=SEGMENTS,
    ),
    case(
        "attention/segments-of-queries-and-keys",
        "Queries and keys have segments of their own, and each batch entry its own.",
        "MASK-3", "positions-not-sharded", B=2, S=8, segments_q=SEGMENTS_Q, segments_k=SEGMENTS_K,
    ),
    case(
        "attention/documents",
        "Three packed documents of 5, 1 and 7 tokens, and three tokens of padding behind them.",
        "MASK-5", "packing-ignored padding-not-zero", cu_seqlens=(0, 5, 6, 13),
    ),
    case(
        "attention/documents-causal",
        "Packed documents under a causal mask: positions run on over the documents.",
        "MASK-5 MASK-9", "packing-ignored", causal=True, cu_seqlens=(0, 4, 9, 16),
    ),
    case(
        "attention/documents-with-a-window",
        "A window that reaches over the start of a document ends at that start.",
        "MASK-5 MASK-9", "window-over-documents", window=(3, 0), cu_seqlens=(0, 6, 16),
    ),
    case(
        "attention/documents-of-unequal-lengths",
        "Documents have other lengths in keys than in queries.",
        "MASK-5", Sq=8, Sk=12, cu_seqlens=(0, 3, 8), cu_seqlens_k=(0, 7, 12),
    ),
    case(
        "attention/documents-without-queries",
        "The second document has keys and no query: dk and dv of these keys are exactly 0.",
        "MASK-5 BWD-6", "empty-document", Sq=8, Sk=12, cu_seqlens=(0, 3, 3, 8),
        cu_seqlens_k=(0, 4, 7, 12),
    ),
    case(
        "attention/bounds",
        "Key bounds are half open, some are empty and some reach beyond the last key.",
        "MASK-4 FWD-8", bound_min=BOUND_MIN, bound_max=BOUND_MAX,
    ),
    case(
        "attention/bounds-of-positions",
        "Bounds compare with the positions of keys, not with their indices.",
        "MASK-4 MASK-8", bound_min=BOUND_MIN, bound_max=BOUND_MAX, positions_k=SHUFFLED_K,
    ),
    case(
        "attention/dense-mask",
        "A dense mask lets through where it is True, other pairs for each head.",
        "MASK-6", mask=coins(100, 1, 2, 16, 16),
    ),
    case(
        "attention/dense-mask-of-rows",
        "A mask with one entry a query row empties whole rows, other rows in each batch entry.",
        "MASK-6 FWD-8 BWD-10", "empty-row-nan", B=2, S=8, mask=coins(90, 2, 1, 8, 1),
    ),
    case(
        "attention/bias-minus-infinity",
        "A bias of -inf hides the pair; its dbias is exactly 0 and not NaN.",
        "MASK-7 BWD-8", "empty-row-nan", S=8,
        bias=bias_of(1, 2, 8, 8, patches=(
            put("-inf", None, None, None, (5, 7)), put("-inf", 0, 1, 3, None),
            put("-inf", 0, 0, (1, 6), 2),
        )),
    ),
    case(
        "attention/bias-minus-infinity-under-softcap",
        "The mask comes before the soft cap, which would make -softcap of a bias of -inf.",
        "MASK-7 FWD-3", "sentinel", S=8, softcap=1.5,
        bias=bias_of(1, 1, 8, 8, patches=(put("-inf", None, None, (2, 8), (0, 2)),)),
    ),
    case(
        "attention/positions",
        "Shuffled positions with gaps: an index says nothing about who comes first.",
        "MASK-8 MASK-1", "positions-not-sharded", causal=True, positions_q=SHUFFLED_Q,
        positions_k=SHUFFLED_K,
    ),
    case(
        "attention/positions-of-each-batch-entry",
        "Each batch entry has positions of its own, under a window.",
        "MASK-8 MASK-2", B=2, S=8, window=(3, 1), positions_q=PER_BATCH, positions_k=PER_BATCH,
    ),
    case(
        "attention/all-mask-terms",
        "A pair is visible only if all six kinds of terms allow it; each of them alone hides some.",
        "MASK-9 MASK-3 MASK-4 MASK-6 MASK-7", causal=True, window=(11, None), segments_q=SEGMENTS,
        bound_min=(0,) * 8 + (1,) * 8, bound_max=(6,) * 5 + (16,) * 11,
        mask=coins(40, 1, 2, 16, 16), bias=bias_of(1, 1, 1, 16, patches=(put("-inf", 0, 0, 0, 5),)),
    ),
)  # fmt: skip
