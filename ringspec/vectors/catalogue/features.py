"""Cases of dense attention with scale, bias, soft cap, sinks, dropout, dlse, and various heads, shapes and formats."""

from __future__ import annotations

from ringspec.vectors.catalogue.build import bias_of, case, coins, constant, put

ROW_0_DROPPED = (put(False, None, None, 0, None),)

CASES = (
    case(
        "attention/scale-given",
        "A scale other than the default, once in the scores and once in dq and dk.",
        "FWD-1 BWD-5 BWD-6", "scale-twice", scale=0.75,
    ),
    case(
        "attention/default-scale-of-128",
        "At D = 128 the float64 nearest to 1/sqrt(D) is not what 1/math.sqrt(D) gives.",
        "FWD-2", dtype="f64", H=1, Sq=4, Sk=6, D=128, Dv=2,
    ),
    case(
        "attention/bias",
        "A bias for every pair is added after the scale, which does not touch it.",
        "FWD-1 BWD-8", S=12, scale=2.0, bias=bias_of(1, 2, 12, 12),
    ),
    case(
        "attention/bias-of-heads-and-keys",
        "dbias of a bias [1, H, 1, Sk] is summed over the batch and over all queries.",
        "BWD-8", "bias-gradient-reduced", B=2, S=8, bias=bias_of(1, 2, 1, 8),
    ),
    case(
        "attention/bias-of-keys",
        "dbias of a bias [1, 1, 1, Sk] is summed over batch, heads and queries.",
        "BWD-8", "bias-gradient-reduced", B=2, S=8, bias=bias_of(1, 1, 1, 8),
    ),
    case(
        "attention/bias-of-batch-entries-and-queries",
        "dbias of a bias [B, 1, Sq, 1] is the row sum of dz, which the soft cap keeps from being 0.",
        "BWD-8 BWD-4", B=2, S=8, softcap=1.25, bias=bias_of(2, 1, 8, 1),
    ),
    case(
        "attention/bias-constant-along-rows",
        "A constant along a row cancels in the softmax: dbias is dlse and nothing else.",
        "BWD-8 BWD-3", S=8, bias=bias_of(1, 2, 8, 1), dlse=True,
    ),
    case(
        "attention/bias-of-batch-entries",
        "dbias of a bias [B, 1, 1, Sk] keeps the batch and sums over the heads.",
        "BWD-8", B=2, S=8, causal=True, bias=bias_of(2, 1, 1, 8),
    ),
    case(
        "attention/softcap",
        "Scores far beyond the cap: s = softcap * tanh(z / softcap), and 1 - t**2 in the gradient.",
        "FWD-3 BWD-4", "softcap-gradient-missing", softcap=1.5,
    ),
    case(
        "attention/softcap-with-bias",
        "The soft cap comes after the bias, and so does 1 - t**2 in dbias.",
        "FWD-3 BWD-4 BWD-8", S=12, softcap=2.0, bias=bias_of(1, 2, 12, 12),
    ),
    case(
        "attention/sink",
        "One sink a head takes weight and gives no value: o shrinks and dsinks is not 0.",
        "FWD-5 BWD-9", "sink-dropped", causal=True, sinks=((1.5,), (-0.75,)),
    ),
    case(
        "attention/several-sinks",
        "Three sinks of a head add up in the denominator, and each has a gradient of its own.",
        "FWD-5 BWD-9", sinks=((0.5, -1.25, 2.0), (3.0, 0.0, -4.5)),
    ),
    case(
        "attention/sinks-under-softcap",
        "Sinks live in the domain of s: the soft cap does not touch them.",
        "FWD-3 FWD-5 BWD-9", softcap=1.25, sinks=((2.5,), (1.75,)),
    ),
    case(
        "attention/sinks-with-dlse",
        "A gradient of lse reaches the sinks with the other sign than delta.",
        "BWD-9 BWD-3", sinks=((1.0,), (-0.5,)), dlse=True,
    ),
    case(
        "attention/sinks-in-rows-without-keys",
        "A row with sinks alone has o = 0 and their log-sum-exp as lse, and passes dlse to them.",
        "FWD-9 BWD-9", "sink-outside-maximum", causal=True, q_offset=-4,
        sinks=((1.25, 0.5), (-2.0, -2.0)), dlse=True,
    ),
    case(
        "attention/dropout",
        "The counter-based keep mask of seed 7 enters o, dp and dv, and never the denominator.",
        "DROP-1 DROP-2 FWD-6 FWD-7 BWD-2 BWD-7", "dropout-mask-not-replayed", dropout_p=0.25,
        dropout_seed=7,
    ),
    case(
        "attention/dropout-of-a-tenth",
        "At p = 0.1 neither p * 2**32 nor 1/(1 - p) is a float64: the threshold is a floor.",
        "DROP-2 FWD-6", causal=True, dropout_p=0.1, dropout_seed=12345,
    ),
    case(
        "attention/dropout-with-a-64-bit-seed",
        "Both halves of the seed enter the key, head and batch the counter.",
        "DROP-1", B=2, S=8, dropout_p=0.5, dropout_seed=0xDEADBEEF_00000005,
    ),
    case(
        "attention/dropout-at-far-positions",
        "The counter takes positions, not indices: with q_offset = 1000 and shuffled keys.",
        "DROP-1", S=8, dropout_p=0.5, dropout_seed=3, q_offset=1000,
        positions_k=(3, 1003, 7, 0, 999, 2**33 + 3, 500, 1),
    ),
    case(
        "attention/keep-given",
        "A given keep mask is used as it is, with 1/(1 - p) from dropout_p.",
        "DROP-3 FWD-6 BWD-2", "dropout-missing-in-dp", dropout_p=0.5, keep=coins(128, 1, 2, 16, 16),
    ),
    case(
        "attention/keep-without-probability",
        "A given keep mask with dropout_p = 0 drops and does not rescale.",
        "DROP-3 BWD-7", S=12, keep=coins(64, 1, 1, 12, 12),
    ),
    case(
        "attention/keep-drops-a-row",
        "Row 0 sees one key, which is dropped: o = 0, and lse is still that of the key.",
        "FWD-7 BWD-1", "dropout-before-denominator", causal=True, dropout_p=0.25,
        keep=coins(64, 1, 2, 16, 16, patches=ROW_0_DROPPED),
    ),
    case(
        "attention/dropout-with-dlse",
        "dlse goes through the undropped p while dy goes through the dropped one.",
        "FWD-7 BWD-3", "dropout-missing-in-dp", dropout_p=0.5, dropout_seed=11, dlse=True,
    ),
    case(
        "attention/dlse",
        "A loss that reads lse: p * dlse is part of ds.",
        "BWD-3", "dlse-ignored", dlse=True,
    ),
    case(
        "attention/dlse-alone",
        "dy is 0 and dlse is not: dv is exactly 0 and dq is that of lse.",
        "BWD-3 BWD-7", "dlse-ignored", S=12, dy=constant(0.0), dlse=True,
    ),
    case(
        "attention/one-key-head",
        "All four query heads share one key head, whose dk and dv are sums over them.",
        "FWD-10 BWD-6 BWD-7", "gqa-not-summed", S=12, H=4, Hkv=1,
    ),
    case(
        "attention/grouped-heads",
        "Query heads 0 and 1 use key head 0: dealing heads out in turn would give 0 and 2.",
        "FWD-10 BWD-6", "gqa-wrong-head", S=12, H=4, Hkv=2,
    ),
    case(
        "attention/grouped-heads-and-narrow-values",
        "v is half as wide as k with half as many heads, so that sizes alone cannot tell them apart.",
        "FWD-10 BWD-7", "value-width", S=8, H=4, Hkv=2, D=8, Dv=4,
    ),
    case(
        "attention/wide-values",
        "v is three times as wide as q: o and dy have the width of v, dq that of q.",
        "BWD-2 BWD-7", "value-width", S=12, D=4, Dv=12,
    ),
    case(
        "attention/heads-as-many-as-tokens",
        "H = S, so that a swap of these axes keeps every shape.",
        "FWD-10 BWD-6", "transposed-kv-heads", S=8, H=8,
    ),
    case(
        "attention/one-query",
        "One query over many keys with grouped heads: lse belongs to each of the eight heads.",
        "FWD-4 FWD-10", "lse-only-first-head", Sq=1, Sk=16, H=8, Hkv=2,
    ),
    case(
        "attention/one-key",
        "One key: o is v and lse is the score exactly, and dq and dk are exactly 0.",
        "FWD-4 BWD-1", Sq=6, Sk=1,
    ),
    case(
        "attention/batch-heads-and-tokens-differ",
        "B = 2, H = 3 and S = 5 differ, so that lse in another order of axes has another shape.",
        "FWD-4", "lse-layout", B=2, H=3, S=5,
    ),
    case(
        "attention/head-size-one",
        "D = 1 and Dv = 1: no sum over d hides a missing factor.",
        "FWD-1 BWD-5", S=8, D=1, scale=1.5,
    ),
    case(
        "attention/float16",
        "In float16 three more bits count than in bfloat16, also in the gradients.",
        "NUM-1", "dtype-hard-coded", dtype="fp16", causal=True,
    ),
    case(
        "attention/float32",
        "Inputs of fourteen bits: a program that rounds them to 16 bits loses four.",
        "NUM-1 NUM-2", dtype="f32", causal=True,
    ),
    case(
        "attention/float64",
        "Inputs of 32 bits and results in float64 alone, the definition's own format.",
        "FWD-4 BWD-3", dtype="f64", S=12, causal=True,
    ),
    case(
        "attention/gradient-of-one-row",
        "dy is 0 but for one query: every other row of dq is exactly 0, and dk, dv come from it alone.",
        "BWD-1 BWD-5", "delta-of-few-rows", S=12,
        dy=constant(0.0, None, put(1.5, 0, 1, 7, None), put(-0.25, 0, 1, 7, 2)),
    ),
    case(
        "attention/negative-scale",
        "A scale below 0 turns the order of the keys round.",
        "FWD-1 BWD-5", S=8, scale=-0.5, causal=True,
    ),
    case(
        "attention/common-part-of-values",
        "One column of v is 64 for every key: dp and delta share a large part, which cancels in ds.",
        "BWD-3 BWD-1", S=12, patches={"v": (put(64.0, None, None, None, 0),)},
    ),
)  # fmt: skip
