"""Cases whose inputs reveal bugs that random inputs hide: unusual softmax weights, and rows without visible keys."""

from __future__ import annotations

from ringspec.vectors.catalogue.build import case, coins, constant, numbers, put, ring, times

ALL = None
HIDE_OWN = tuple(put(False, 0, 0, (4 * r, 4 * r + 4), (4 * r, 4 * r + 4)) for r in range(3))
# Scores near -200: <q, k> is -400 in one column of q and k, times the scale 0.5 of D = 4.
LOW_SCORES = {
    "q": (put(16.0, ALL, ALL, ALL, 0),), "k": (put(-25.0, ALL, ALL, ALL, 0),)
}  # fmt: skip
RISING = {"q": (put(4.0, ALL, ALL, ALL, 0),), "k": tuple(
    put(6.0 * r - 8.0, ALL, ALL, (4 * r, 4 * r + 4), 0) for r in range(4)
)}  # fmt: skip

CASES = (
    ring(
        "adversarial/maximum-in-the-last-step",
        "The largest score of worker 0 comes in the last of four steps: all before is rescaled.",
        "SOFT-1", W=4, patches={"q": (put(4.0, ALL, ALL, (0, 4), 1),),
                                "k": (put(10.0, ALL, ALL, (4, 8), 1),)},
    ),
    ring(
        "adversarial/maximum-rises-at-every-step",
        "Towards the front of the stream each block's scores lie 12 below the next one's.",
        "SOFT-1 SOFT-4", W=4, direction=-1, patches=RISING,
    ),
    ring(
        "adversarial/all-mass-in-one-hop",
        "One worker's keys have all the weight of every query, and its dk, dv all the gradient.",
        "SOFT-1 RING-4", "stale-keys dkv-not-home", W=3, S=12, layout="contiguous",
        patches={"q": (put(8.0, ALL, ALL, ALL, 2),), "k": (put(12.0, ALL, ALL, (8, 12), 2),)},
    ),
    case(
        "adversarial/first-keys-hidden-then-minus-200",
        "The first keys are hidden, all others score near -200: a maximum kept at 0 loses the row.",
        "SOFT-1 FWD-4", "running-max-of-masked-block", mask=coins(
            0, 1, 1, 1, 16, patches=(put(False, ALL, ALL, ALL, (0, 8)),)), patches=LOW_SCORES,
    ),
    ring(
        "adversarial/own-block-hidden-then-minus-200",
        "Step 0 is wholly masked on every worker, and later steps score near -200.",
        "SOFT-1 SOFT-2", "running-max-of-masked-block masked-block-nan", W=3, S=12,
        mask=coins(0, 1, 1, 12, 12, patches=HIDE_OWN), patches=LOW_SCORES,
    ),
    case(
        "adversarial/one-score-of-minus-60000",
        "A row's only visible score is below every finite sentinel that is in use.",
        "FWD-4 MASK-1", "sentinel", S=4, causal=True,
        patches={"q": (put(256.0, ALL, ALL, ALL, 0),), "k": (put(-472.0, ALL, ALL, ALL, 0),)},
    ),
    case(
        "adversarial/hidden-key-scores-highest",
        "The key behind each query would take all the weight, were it visible.",
        "MASK-1", S=12, causal=True,
        patches={"q": (put(6.0, ALL, ALL, ALL, 0),),
                 "k": tuple(put(2.0 * t, ALL, ALL, t, 0) for t in range(12))},
    ),
    case(
        "adversarial/hidden-keys-hold-garbage",
        "Padding keys and values hold 2**100 and -2**100: no product with them may reach a result.",
        "MASK-3 BWD-10", "padding-nan", S=12,
        segments_q=(0, 0, 0, 0, 0, 1, 1, 1, -1, -1, -1, -1),
        patches={
            "k": (put(2.0**100, ALL, ALL, (8, 10), ALL), put(-(2.0**100), ALL, ALL, (10, 12), ALL)),
            "v": (put(-(2.0**100), ALL, ALL, (8, 12), ALL),),
            "dy": (put(2.0**100, ALL, ALL, (8, 12), ALL),),
        },
    ),
    case(
        "adversarial/near-ties",
        "Two keys of a row score alike to one part in a million; the others are far below.",
        "FWD-4 BWD-3", S=8, dtype="f32", patches={
            "q": (put(1.0, ALL, ALL, ALL, (0, 2)), put(0.5, ALL, ALL, ALL, (2, 4))),
            "k": (put(20.0, ALL, ALL, 2, ALL), put(20.0, ALL, ALL, 5, ALL),
                  put(20.00000762939453, ALL, ALL, 5, 0)),
        },
    ),
    case(
        "adversarial/equal-keys",
        "Every key stands twice: equal scores share the weight, and their gradients are equal.",
        "FWD-4 BWD-6", S=8,
        k=((((0.5, -1.0, 0.25, 2.0), (1.5, 0.75, -0.5, -1.25), (-2.0, 0.125, 1.0, 0.5)) * 2
            + ((0.5, -1.0, 0.25, 2.0), (1.5, 0.75, -0.5, -1.25)),
            ((1.0, 0.25, -0.75, 0.5),) * 8),),
    ),
    case(
        "adversarial/huge-scores",
        "Scores of a few thousand: the softmax is one key a row, to the last bit of float64.",
        "FWD-4 SOFT-4", "merge-overflow", S=8, D=8,
        patches={"q": (times(32.0, ALL, ALL, ALL, ALL),), "k": (times(64.0, ALL, ALL, ALL, ALL),)},
    ),
    case(
        "adversarial/tiny-scores",
        "Scores near 2**-60: weights are equal, and dq and dk are not 0.",
        "FWD-4 BWD-5", S=12, patches={"q": (times(2.0**-60, ALL, ALL, ALL, ALL),)},
    ),
    case(
        "adversarial/queries-of-zero",
        "q = 0: uniform weights over what is visible, lse = log of how many, dk exactly 0.",
        "FWD-4 BWD-6", S=12, causal=True, q=constant(0.0),
    ),
    case(
        "adversarial/constant-values",
        "All values of a head are alike: o is that value and dq, dk are exactly 0.",
        "BWD-1 BWD-3", S=12, causal=True,
        v=constant(1.625, None, put(-0.8125, ALL, 1, ALL, ALL)),
    ),
    ring(
        "adversarial/constant-values-w3",
        "Constant values on three workers: each hop's dq is not 0, their sum is.",
        "BWD-3 RING-13", "block-local-delta", W=3, S=12, v=constant(0.75),
    ),
    case(
        "adversarial/alternating-values",
        "Values of alternating sign under near-uniform weights: o is small beside what it sums.",
        "FWD-6", S=12, q=numbers(4, -8),
        v=constant(3.5, None, *(put(-3.5, ALL, ALL, t, ALL) for t in range(1, 12, 2))),
    ),
    ring(
        "adversarial/one-empty-row-w2",
        "One row of one head is empty, and its neighbours are not.",
        "FWD-8 BWD-10", "empty-row-nan", W=2, S=8,
        mask=coins(70, 1, 2, 8, 8, patches=(put(False, 0, 1, 5, ALL),)),
    ),
    ring(
        "adversarial/one-empty-block-w3",
        "Queries of worker 2 see no key of worker 1, without any mask that could be skipped by rule.",
        "SOFT-2 RING-11", "finite-lse-of-empty", W=3, S=12,
        mask=coins(0, 1, 1, 12, 12, patches=(put(False, 0, 0, (8, 12), (4, 8)),)),
    ),
    ring(
        "adversarial/first-worker-empty-w3",
        "All tokens of worker 0 are padding: its rows are empty and its keys unseen.",
        "FWD-8 BWD-10 MASK-3", "padding-nan", W=3, S=12,
        segments_q=(-1, -1, -1, -1, 0, 0, 0, 0, 0, 1, 1, 1),
    ),
    ring(
        "adversarial/last-worker-empty-zigzag-w2",
        "Both middle chunks are padding, so that worker 1 has nothing at all.",
        "FWD-8 SOFT-2", "padding-nan empty-merge-nan", W=2, S=12, layout="zigzag", causal=True,
        segments_q=(0, 0, 0, -1, -1, -1, -1, -1, -1, 0, 0, 0),
    ),
    ring(
        "adversarial/nothing-visible-w2",
        "No pair is visible on any worker: zeros and -inf everywhere.",
        "FWD-8 BWD-10 SOFT-2", "empty-merge-nan empty-row-nan", W=2, S=8, causal=True, q_offset=-8,
    ),
    case(
        "adversarial/sink-of-100",
        "A sink of 100 takes all weight but e**-97: lse is 100 and o is not 0.",
        "FWD-5 BWD-9", "sink-outside-maximum", S=12, sinks=((100.0,), (97.0,)),
    ),
    case(
        "adversarial/sink-of-minus-100",
        "A sink of -100 has a gradient of e**-100, which is not 0.",
        "FWD-5 BWD-9", S=12, sinks=((-100.0,), (-60.0,)),
    ),
    ring(
        "adversarial/sinks-alone-w2",
        "Worker 1's rows see no key: o = 0, lse that of the sinks, and no gradient but dlse's.",
        "FWD-9 RING-12", "sink-outside-maximum", W=2, S=8, segments_q=(0, 0, 0, 0, -1, -1, -1, -1),
        sinks=((2.0, 1000.0), (-3.0, 0.5)), dlse=True,
    ),
    case(
        "adversarial/lse-near-zero",
        "exp(lse) is 1 + e**-40 and the like: lse is that small number, not 0.",
        "FWD-4", dtype="f32", H=1, Sq=3, Sk=2, D=1, scale=1.0, passes=("forward",),
        q=((((1.0,), (0.5,), (0.25,)),),), k=((((0.0,), (-40.0,)),),),
    ),
    case(
        "adversarial/dropped-maximum",
        "The key with nearly all the weight is dropped: o is made of the rest, over its weight.",
        "FWD-7 FWD-6", "dropout-before-denominator", S=8, dropout_p=0.5,
        keep=coins(100, 1, 1, 8, 8, patches=(put(False, ALL, ALL, ALL, 3),)),
        patches={"q": (put(4.0, ALL, ALL, ALL, 0),), "k": (put(4.0, ALL, ALL, 3, 0),)},
    ),
    case(
        "adversarial/rows-of-unlike-size",
        "Queries and dy of one row are 2**20 times those of another: no tolerance fits both.",
        "BWD-5 BWD-6", "tolerance-too-wide", S=12, causal=True, patches={
            "q": (times(2.0**-10, ALL, ALL, (4, 8), ALL),),
            "dy": (times(2.0**20, ALL, ALL, 2, ALL), times(2.0**-8, ALL, ALL, (7, 9), ALL)),
            "v": (times(2.0**10, ALL, ALL, (0, 2), ALL),),
        },
    ),
    case(
        "adversarial/softcap-saturated",
        "z is 50 times the cap: t rounds to 1 in float32, and 1 - t**2 is e**-100 and not 0.",
        "FWD-3 BWD-4", "softcap-gradient-missing", S=8, softcap=0.5,
        patches={"q": (put(8.0, ALL, ALL, ALL, 0),), "k": (put(6.0, ALL, ALL, ALL, 0),)},
    ),
)  # fmt: skip
