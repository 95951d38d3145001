"""Probes with 128 tokens per worker, for kernels that support only long blocks and large heads.

A probe is a case with inputs so simple that its results show the attention pattern: which keys each query sees. A
pattern of 256 or 384 keys does not fit into the 64 or 128 columns of one head, so the keys are distributed over heads.
Head h has one-hot values for keys h * Dv to (h + 1) * Dv - 1 and zeros for all other keys. All queries are zero, so
every head has the same weights, and the columns of all heads side by side are the pattern.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.cases.closed_form import head_probe, one_row_of_dy, value_of
from ringspec.conformance.cases.invariance import hidden_keys, hidden_queries
from ringspec.conformance.cases.model import RunCase
from ringspec.conformance.cases.patterns import FLAGS, Reads
from ringspec.conformance.cases.problems import USUAL_DTYPES, dealt, drawn, run_case
from ringspec.vectors.catalogue.build import constant, put
from ringspec.vectors.format.case import Case, TensorRecipe

BLOCK = 128
LAYOUTS = ("contiguous", "striped", "zigzag")
MASKS: dict[str, dict[str, Any]] = {"causal": {"causal": True}, "full": {}}
SIZES = ((2, 128), (2, 64), (3, 128))  # (W, D)
# The exact truth of a backward pass takes seconds: even these few sizes take as long as all other probes together.
GRADIENT_SIZES = {"causal": SIZES, "full": SIZES[:1]}
# Token 200 and those after it lie beyond the first 64 tokens of their worker, so possibly in its second tile.
KEYS, QUERIES, ONE_ROW = (200, 256), (0, 200), 220


def long_block_cases() -> Iterator[RunCase]:
    """Yield probes that read the pattern, and then other probes with long blocks.

    Cases with the same correct results follow each other, because these results are cached.
    """
    for mask in MASKS:
        for workers, width in SIZES:
            for dtype in USUAL_DTYPES:
                for layout in LAYOUTS:
                    yield pattern(mask, dtype, workers, width, layout)
    for mask, sizes in GRADIENT_SIZES.items():
        for workers, width in sizes:
            for dtype in USUAL_DTYPES:
                for layout in LAYOUTS:
                    yield gradient_pattern(mask, dtype, workers, width, layout)
    for dtype in USUAL_DTYPES:
        yield from others(dtype)


@functools.cache
def forward_problem(mask: str, dtype: str, workers: int, width: int) -> Case:
    """Make the problem that all layouts divide. To make it takes longer than to divide it."""
    return drawn(
        f"long-pattern-{mask}-w{workers}-d{width}", dtype, backward=False, q=constant(0.0),
        v=dealt_to_heads(workers * BLOCK, width), **sizes_of(workers, width), **MASKS[mask],
    )  # fmt: skip


def pattern(mask: str, dtype: str, workers: int, width: int, layout: str) -> RunCase:
    id = f"probe/pattern/long-{mask}-{layout}-w{workers}-d{width}-{dtype}"
    problem = forward_problem(mask, dtype, workers, width)
    return run_case(
        id,
        "Zero queries, one-hot values distributed over the heads: o of all heads together is the attention pattern.",
        [dealt(problem, id, workers, layout)],
        Reads(("o",), join=side_by_side),
        rules=("FWD-4", "MASK-9"),
        flags=FLAGS[mask],
    )


@functools.cache
def backward_problems(mask: str, dtype: str, workers: int, width: int) -> tuple[Case, ...]:
    """Make the three problems of :func:`gradient_pattern`, which all layouts divide."""
    name, tokens = f"long-gradient-{mask}-w{workers}-d{width}", workers * BLOCK
    ones, zero = dealt_to_heads(tokens, width), constant(0.0)
    turns = constant(
        0.0, None, *(put(2.0 if t % 2 == 0 else -1.0, None, None, t, 0) for t in range(tokens))
    )
    first = constant(0.0, None, put(1.0, None, None, None, 0))
    rest = sizes_of(workers, width) | MASKS[mask]
    return (
        drawn(name, dtype, q=zero, k=zero, v=ones, dy=ones, **rest),
        drawn(name, dtype, q=zero, k=ones, v=turns, dy=first, **rest),
        drawn(name, dtype, q=ones, k=zero, v=turns, dy=first, **rest),
    )


def gradient_pattern(mask: str, dtype: str, workers: int, width: int, layout: str) -> RunCase:
    """Make a case of three calls, which show the pattern in dv (one-hot dy), dq (one-hot k) and dk (one-hot q).

    dq and dk show dZ, the gradient of the masked scores, which is 0 for hidden pairs. It must not be small for visible
    pairs. Therefore dy is 1 in column 0 in the last two calls, where v alternates between 2 and -1. Then dP = dy v^T is
    2 or -1 for a pair, depending on its key, and delta, the mean of dP over the visible keys, is between 0.5 and 2. dZ
    is still 0 for a query that sees only one key.
    """
    id = f"probe/gradient-pattern/long-{mask}-{layout}-w{workers}-d{width}-{dtype}"
    parts = zip(backward_problems(mask, dtype, workers, width), "abc", strict=True)
    return run_case(
        id,
        "Zero scores, one-hot inputs distributed over the heads: dv, dq and dk show which query "
        "contributed to which key.",
        [dealt(problem, f"{id}-{part}", workers, layout) for problem, part in parts],
        Reads(("dv",), ("dq",), ("dk",), join=side_by_side),
        only_backward=True,
        rules=("BWD-5", "BWD-6", "BWD-7", "MASK-9"),
        flags=("stale-keys", "dy-ignored", *FLAGS[mask]),
    )


def sizes_of(workers: int, width: int) -> dict[str, Any]:
    """Return sizes that give each key its own column in some head."""
    return {"S": workers * BLOCK, "D": width, "H": workers * BLOCK // width}


@functools.cache
def dealt_to_heads(tokens: int, width: int) -> TensorRecipe:
    """Make a tensor in which token t is 1 in column t mod width of head t // width, and 0 elsewhere."""
    return constant(0.0, None, *(put(1.0, None, t // width, t, t % width) for t in range(tokens)))


def side_by_side(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Put the columns of all heads side by side: [B, H, S, d] becomes one head [B, 1, S, H * d].

    >>> side_by_side(np.arange(8.0).reshape(1, 2, 2, 2)).tolist()
    [[[[0.0, 1.0, 4.0, 5.0], [2.0, 3.0, 6.0, 7.0]]]]
    """
    batch, heads, tokens, width = x.shape
    return np.reshape(x.swapaxes(1, 2), (batch, 1, tokens, heads * width))


def others(dtype: str) -> Iterator[RunCase]:
    """Yield the probes that read no pattern, with two workers, D = 128 and a causal mask."""
    sizes: dict[str, Any] = {"S": 2 * BLOCK, "D": 128, "causal": True}
    one_head = sizes | {"H": 1}
    forward = drawn("long-isolation", dtype, backward=False, **one_head)
    both = drawn("long-isolation", dtype, **one_head)
    values = constant(0.0, None, *(put(value_of(0, h), None, h, None, None) for h in range(2)))
    heads = drawn("long-heads", dtype, H=4, Hkv=2, v=values, **sizes)
    for layout in LAYOUTS:
        name, ring = f"{layout}-w2-d128-{dtype}", (2, layout)
        yield hidden_keys(f"probe/hidden-keys/long-causal-{name}", forward, KEYS, ring)
        yield hidden_queries(f"probe/hidden-queries/long-causal-{name}", both, QUERIES, ring)
        id = f"probe/one-row-of-dy/long-{name}"
        yield one_row_of_dy(id, "long-one-row-of-dy", dtype, ring, ONE_ROW, S=2 * BLOCK, D=128, H=1)
        yield head_probe(f"probe/heads/long-4-over-2-{name}", heads, ring)
