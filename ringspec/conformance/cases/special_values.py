"""Special values: empty rows, workers without tokens, equal or extreme scores, garbage in padding.

An empty row is a query that sees no key. Each result is compared with the exact correct values. Values that must be
exactly 0 or -inf are compared exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ringspec.conformance.cases.model import RunCase
from ringspec.conformance.cases.problems import (
    DTYPES,
    USUAL_DTYPES,
    Seen,
    dealt,
    drawn,
    few_rings,
    run_case,
    tables_of,
    tensors_of,
    with_table,
)
from ringspec.conformance.diagnose.picture import gathered, place
from ringspec.conformance.judge.recipe import recipe_for
from ringspec.formats import unit_roundoff
from ringspec.vectors.catalogue.build import coins, constant, put

TOKENS, EMPTY_ROW = 24, 17
ONES = {"v": (put(1.0, None, None, None, 0),)}
SCORES_OF_MINUS_200 = ONES | {
    "q": (put(16.0, None, None, None, 0),), "k": (put(-100.0, None, None, None, 0),)
}  # fmt: skip
SCORES_OF_200 = ONES | {
    "q": (put(16.0, None, None, None, 0),), "k": (put(100.0, None, None, None, 0),)
}  # fmt: skip
PADDED = 20
GARBAGE = {
    "k": (put(2.0**100, None, None, (PADDED, TOKENS), None),),
    "v": (put(-(2.0**100), None, None, (PADDED, TOKENS), None),),
    "dy": (put(2.0**100, None, None, (PADDED, TOKENS), None),),
}
WORKERS = 3
BLOCK = TOKENS // WORKERS
# Queries of worker r see only the keys of worker r + 1, which arrive last if worker 0 sends to worker 1.
NEXT_BLOCK = {
    "segments_q": tuple(i // BLOCK for i in range(TOKENS)),
    "segments_k": tuple((j // BLOCK - 1) % WORKERS for j in range(TOKENS)),
}
OWN_BLOCK_HIDDEN = coins(
    0, 1, 1, TOKENS, TOKENS,
    patches=tuple(
        put(False, 0, 0, (r * BLOCK, (r + 1) * BLOCK), (r * BLOCK, (r + 1) * BLOCK))
        for r in range(WORKERS)
    ),
)  # fmt: skip
NOBODY_ON_1 = (tuple(range(0, 12)), (-1,) * 12, tuple(range(12, 24)))
LAST_SLOTS_EMPTY = (tuple(range(0, 10)), tuple(range(10, 20)), (20, 21, 22, 23, *(-1,) * 6))

# name: (reason, what is special, rules, flags)
PROBLEMS: dict[str, tuple[str, dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "equal-scores": (
        "All keys are equal, so all scores of a row are equal: equal weights, with a row maximum that is not 0.",
        {"causal": True, "k": constant(0.75), "patches": ONES},
        ("FWD-4",),
        (),
    ),
    "low-scores": (
        "All scores are near -200: exp underflows unless the maximum is subtracted first.",
        {"causal": True, "patches": SCORES_OF_MINUS_200},
        ("SOFT-1",),
        ("running-max-of-masked-block",),
    ),
    "high-scores": (
        "All scores are near 200: exp overflows unless the maximum is subtracted first.",
        {"causal": True, "patches": SCORES_OF_200},
        ("SOFT-4",),
        ("merge-overflow",),
    ),
    "one-empty-row-bounds": (
        "One query sees no key because of its bounds: o = 0, lse = -inf, dq = 0, no contribution to dk and dv.",
        {
            "bound_min": (0,) * TOKENS,
            "bound_max": tuple(0 if i == EMPTY_ROW else i + 1 for i in range(TOKENS)),
        },
        ("FWD-8", "BWD-10"),
        ("empty-row-nan", "plus-inf-lse-of-empty"),
    ),
    "one-empty-row-dense": (
        "One query sees no key because of a dense mask: o = 0, lse = -inf, dq = 0, no contribution to dk and dv.",
        {"mask": coins(0, 1, 1, TOKENS, TOKENS, patches=(put(False, 0, 0, EMPTY_ROW, None),))},
        ("FWD-8", "BWD-10"),
        ("empty-row-nan", "plus-inf-lse-of-empty"),
    ),
    "garbage-in-padding": (
        "Tokens of segment -1 hold 2**100: no product with them may reach a result.",
        {
            "segments_q": tuple(-1 if i >= PADDED else 0 for i in range(TOKENS)),
            "patches": GARBAGE,
        },
        ("MASK-3", "BWD-10"),
        ("padding-nan", "sentinel"),
    ),
    "zero-dy": (
        "dy = 0: dq, dk and dv are exactly 0.",
        {"causal": True, "dy": constant(0.0)},
        ("BWD-3",),
        ("dy-ignored",),
    ),
    "zero-values": (
        "v = 0: o, dq and dk are exactly 0, dv is not.",
        {"causal": True, "v": constant(0.0)},
        ("FWD-6", "BWD-3"),
        (),
    ),
}
# Column 0 of v is 1 in these cases, so column 0 of o is the sum of the weights, 1. It is checked separately, because the
# bound grows with the scores, as the row scale does.
COARSE = 2.0**-20  # coarser statistics round an lse near 200 too much for exact weights
WITH_ONES = ("equal-scores", "low-scores", "high-scores")
MASKED_BLOCK = (
    "Scores near -200 after a fully masked first block: if that block leaves a finite maximum, the row underflows.",
    ("SOFT-1", "SOFT-2"),
    ("running-max-of-masked-block", "masked-block-nan"),
)


def special_cases() -> Iterator[RunCase]:
    """Yield all cases of special values.

    Cases with the same correct results follow each other, because these results are cached.
    """
    for name, (reason, what, rules, flags) in PROBLEMS.items():
        for dtype in USUAL_DTYPES if name == "garbage-in-padding" else DTYPES:
            problem = drawn(f"special-{name}", dtype, S=TOKENS, **what)
            for workers, layout in few_rings(dtype):
                id = f"special/{name}/{layout}-w{workers}-{dtype}"
                look = weights_sum_to_one if name in WITH_ONES else None
                ring = [dealt(problem, id, workers, layout)]
                yield run_case(id, reason, ring, look, rules=rules, flags=flags)
    for dtype in DTYPES:
        yield from masked_block(dtype)
        yield from padded(dtype)
        yield from short(dtype)


def masked_block(dtype: str) -> Iterator[RunCase]:
    reason, rules, flags = MASKED_BLOCK
    for name, mask in (("segments", NEXT_BLOCK), ("dense", {"mask": OWN_BLOCK_HIDDEN})):
        problem = drawn(
            f"special-masked-block-{name}", dtype, S=TOKENS, patches=SCORES_OF_MINUS_200, **mask
        )
        id = f"special/masked-block-then-minus-200/{name}-w{WORKERS}-{dtype}"
        ring = [dealt(problem, id, WORKERS)]
        yield run_case(id, reason, ring, weights_sum_to_one, rules=rules, flags=flags)


def padded(dtype: str) -> Iterator[RunCase]:
    """Yield a case in which a worker has no tokens, and one in which the last worker's block is padded."""
    problem = drawn("special-padded", dtype, S=TOKENS, causal=True)
    for name, table in (("empty-worker", NOBODY_ON_1), ("padding-slots", LAST_SLOTS_EMPTY)):
        id = f"special/{name}/causal-w3-{dtype}"
        yield run_case(
            id,
            "Slots without a token see no key, are not seen by any query, and change no result.",
            [with_table(problem, id, table)],
            rules=("LAYOUT-5", "FWD-8"),
            flags=("padding-nan", "padding-not-zero"),
        )


def short(dtype: str) -> Iterator[RunCase]:
    """Yield cases with as few tokens as a layout allows."""
    for layout, tokens in (("contiguous", 4), ("striped", 4), ("zigzag", 8)):
        problem = drawn(f"special-short-{tokens}", dtype, S=tokens, causal=True)
        id = f"special/one-token/{layout}-w4-{dtype}"
        yield run_case(
            id,
            "One token per worker or per chunk: the shortest sequence of the layout.",
            [dealt(problem, id, 4, layout)],
            flags=("short-or-uneven-length",),
        )


def weights_sum_to_one(seen: Seen) -> tuple[str, None]:
    """Check that column 0 of o is 1 in every row. Column 0 of v is 1, so o is the sum of the weights there."""
    [case], [output], [call] = seen.cases, seen.outputs, seen.calls
    statistics = recipe_for(seen.claims, call.formats).statistics
    if "o" not in output or unit_roundoff(statistics) > COARSE:
        return "", None
    table = tables_of(tensors_of(case))["q"]
    total = gathered(output["o"], table)[..., 0]
    rows = np.argwhere(~(np.abs(total - 1.0) <= 0.125))
    if not len(rows):
        return "", None
    b, h, token = (int(i) for i in rows[0])
    worker, slot = place(token, table)
    return (
        f"The weights of {len(rows)} of {total.size} rows do not sum to 1; those of query {token} "
        f"(worker {worker}, slot {slot}; batch {b}, head {h}) sum to {total[b, h, token]:.3g}.",
        None,
    )
