"""Probes whose correct results have a closed form, such as a mean, a constant or one row of P.

A probe is a case with inputs so simple that a failure shows its cause. As in other cases, results are compared with
exact ones. The check of the closed form adds a message that names the fault. P are the softmax weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ringspec.conformance.cases.model import RunCase
from ringspec.conformance.cases.patterns import one_hot
from ringspec.conformance.cases.problems import (
    DTYPES,
    HEAD_DIM,
    Seen,
    dealt,
    drawn,
    few_rings,
    run_case,
    tables_of,
    tensors_of,
)
from ringspec.conformance.diagnose.picture import gathered
from ringspec.vectors.catalogue.build import constant, merge, put, times
from ringspec.vectors.format.case import Case

HEADS = ((2, 4, 4), (2, 4, 2), (1, 4, 1))  # (B, H, Hkv)
FEW_TOKENS = 24
ONE_ROW = 29
# Small scores, and dy in one column: with large sums, noise would hide whether delta cancels dp in dq.
LITTLE_NOISE = {
    "q": (times(0.0625, None, None, None, None),),
    "dy": (put(0.0, None, None, None, (1, HEAD_DIM)),),
}
MINUS_INFINITY = float("-inf")
PARTS = 5


def known_cases() -> Iterator[RunCase]:
    for dtype in DTYPES:
        for workers, layout in few_rings(dtype):
            name, ring = f"{layout}-w{workers}-{dtype}", (workers, layout)
            yield zero_queries(f"probe/zero-queries/{name}", dtype, ring)
            yield constant_values(f"probe/constant-values/{name}", dtype, ring)
            id = f"probe/one-row-of-dy/{name}"
            yield one_row_of_dy(id, "one-row-of-dy", dtype, ring, ONE_ROW)
            yield sinks(f"probe/sinks/{name}", dtype, ring)
            for batch, heads, kv_heads in HEADS:
                label = f"{heads}-over-{kv_heads}-{name}"
                yield head_case(f"probe/heads/{label}", dtype, (batch, heads, kv_heads), ring)
        yield merge_weights(dtype)


def zero_queries(id: str, dtype: str, ring: tuple[int, str]) -> RunCase:
    problem = drawn("zero-queries", dtype, causal=True, q=constant(0.0))
    return run_case(
        id,
        "q = 0: each row of o is the mean of its visible values, lse is the log of their number, "
        "and dk is exactly 0.",
        [dealt(problem, id, *ring)],
        rules=("FWD-4", "FWD-6"),
        flags=("log2-lse", "natural-lse-as-log2"),
    )


def constant_values(id: str, dtype: str, ring: tuple[int, str]) -> RunCase:
    problem = drawn(
        "constant-values", dtype, causal=True,
        v=constant(1.625, None, put(-0.8125, None, 1, None, None)), patches=LITTLE_NOISE,
    )  # fmt: skip
    return run_case(
        id,
        "All values of a head are equal: o is that value, and delta cancels dp in dq and dk.",
        [dealt(problem, id, *ring)],
        rules=("BWD-1", "BWD-3", "RING-13"),
        flags=("block-local-delta",),
    )


def one_row_of_dy(
    id: str, inputs: str, dtype: str, ring: tuple[int, str], row: int, **sizes: Any
) -> RunCase:
    """Make a case in which dy has a single nonzero number, in the row of query ``row``.

    ``inputs``: the name from which q, k and v are drawn, so that cases with the same name have the same q, k and v.
    """
    dy = constant(0.0, None, put(1.0, None, None, row, 3))
    return run_case(
        id,
        f"dy is 0 except for one number of query {row}: dv is that row of P. All other rows of dq, and the "
        "dk and dv of keys hidden from that query, are exactly 0.",
        [dealt(drawn(inputs, dtype, causal=True, dy=dy, **sizes), id, *ring)],
        only_backward=True,
        rules=("BWD-3", "BWD-7"),
        flags=("dy-ignored", "stale-keys"),
    )


def head_case(id: str, dtype: str, sizes: tuple[int, int, int], ring: tuple[int, str]) -> RunCase:
    """Make a case in which all values of a key head are one number, so that o shows what a query head reads."""
    batch, heads, kv_heads = sizes
    whose = [put(value_of(b, h), b, h, None, None) for b in range(batch) for h in range(kv_heads)]
    problem = drawn(
        f"heads-{heads}-over-{kv_heads}", dtype, S=FEW_TOKENS, B=batch, H=heads, Hkv=kv_heads,
        v=constant(0.0, None, *whose),
    )  # fmt: skip
    return head_probe(id, problem, ring)


def head_probe(id: str, problem: Case, ring: tuple[int, str]) -> RunCase:
    return run_case(
        id,
        "Each key head has a different constant as its values: o shows which key head a query head reads.",
        [dealt(problem, id, *ring)],
        reads_heads,
        rules=("FWD-10", "BWD-6"),
        flags=("gqa-wrong-head", "gqa-not-summed"),
    )


def value_of(batch: int, head: int) -> float:
    return 1.0 + head + 8.0 * batch


def reads_heads(seen: Seen) -> tuple[str, None]:
    """Check that each query head reads the values of its key head and batch."""
    [case], [output] = seen.cases, seen.outputs
    assert case.shape is not None
    if "o" not in output:
        return "", None
    o = gathered(output["o"], tables_of(tensors_of(case))["q"])
    group = case.shape.H // case.shape.Hkv
    for b in range(case.shape.B):
        for h in range(case.shape.H):
            want = value_of(b, h // group)
            if not (np.abs(o[b, h] - want) < 0.5).all():
                text = f"Batch {b}, query head {h} should read {want:g}, the value of key head {h // group}"
                return f"{text}, but reads {np.median(o[b, h]):g}.", None
    return "", None


def sinks(id: str, dtype: str, ring: tuple[int, str]) -> RunCase:
    """Make a case with q = 0 and one-hot v. A sink is a logit without a key.

    For a query that sees n keys, n columns of o are 1 / (n + exp(sink)), and the others 0.
    """
    problem = drawn(
        "sinks", dtype, S=FEW_TOKENS, causal=True, q=constant(0.0), v=one_hot(FEW_TOKENS),
        sinks=((0.0,), (1.0,)),
    )  # fmt: skip
    return run_case(
        id,
        "A sink takes its share of each row exactly once: the weights of the keys sum to less than 1.",
        [dealt(problem, id, *ring)],
        reads_sinks,
        rules=("FWD-5", "BWD-9"),
        flags=("sink-dropped", "sink-per-block"),
    )


def reads_sinks(seen: Seen) -> tuple[str, None]:
    """Check that the weights of the keys in each row sum to 1 minus the weight of the sink."""
    [case], [output] = seen.cases, seen.outputs
    if "o" not in output:
        return "", None
    tensors = tensors_of(case)
    table = tables_of(tensors)["q"]
    got = gathered(output["o"], table).sum(axis=3)
    want = gathered(list(tensors["out.o.float64"]), table).sum(axis=3)
    for h in range(got.shape[1]):
        # If the sink is missing or counted twice, row 0 changes by more than this.
        if not abs(got[0, h, 0] - want[0, h, 0]) < 0.1:
            share = f"{1 - got[0, h, 0]:.3g} of query 0 instead of {1 - want[0, h, 0]:.3g}"
            return f"The sink of head {h} takes {share}.", None
    return "", None


def merge_weights(dtype: str) -> RunCase:
    """Make a merge of partial results in which o shows the weight of each part.

    The o of part n is 1 in column n and 0 elsewhere, so column n of the result is the weight of part n. Part 1 is
    empty: its lse is -inf.
    """
    parts = constant(0.0, None, *(put(1.0, n, None, None, None, n) for n in range(PARTS)))
    lse = constant(
        1.5, None, put(MINUS_INFINITY, 1, None, None, None), put(9.5, 3, None, None, (0, 4))
    )
    id = f"probe/merge/weights-{dtype}"
    problem = merge(id, "", "", N=PARTS, S=8, Dv=16, dtype=dtype, parts_o=parts, parts_lse=lse)
    return run_case(
        id,
        "Part n is one-hot in column n: o shows the weight of each part, 0 for the part whose lse is -inf.",
        [problem],
        rules=("SOFT-1", "SOFT-2"),
        flags=("log2-lse", "natural-lse-as-log2", "empty-merge-nan"),
    )  # fmt: skip
