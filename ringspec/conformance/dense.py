"""Truth for inputs of somebody's own: exact where that is affordable, else float64.

The float64 values are those of the definition, for some query rows at a time, so that the Sq x Sk
matrix is never stored. Forward results of sampled rows are then held against the exact ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ringspec import exact
from ringspec.compare.row_scale import AbsoluteSums, RowScale, absolute_sums, add_parts, row_scale
from ringspec.errors import UndecidedError
from ringspec.spec.attention import backward, forward, normalise, scores
from ringspec.spec.dropout import keep_factor
from ringspec.spec.masks import visible
from ringspec.spec.problem import Problem, take
from ringspec.vectors.generate import exact_problem

Array = NDArray[np.float64]
# B * H * Sq * Sk * (D + Dv) up to which the exact values take a second or two.
EXACT_LIMIT = 1 << 23
PART = 1 << 20
SAMPLED = 2
# What float64 may differ from the exact values, in units of the row scale; measured below 1e-15.
AGREEMENT = 1e-13


@dataclass(frozen=True)
class Dense:
    """``values`` by name (o, lse; with dy dq, dk, dv), global, float64; ``source``: which truth."""

    values: dict[str, Array]
    scale: RowScale
    source: str


def truth_of(problem: Problem, dy: Array | None, limit: int = EXACT_LIMIT) -> Dense:
    """Results of a checked problem; the exact ones up to ``limit`` terms, else those in float64.

    >>> from ringspec.spec.options import check
    >>> one = np.ones((1, 1, 4, 2))
    >>> truth = truth_of(check(one, one, one, {"causal": True}), one)
    >>> truth.source, float(truth.values["o"].max())
    ('exact', 1.0)
    """
    values, scale = in_float64(problem, dy)
    batch, heads, queries, width = problem.q.shape
    terms = batch * heads * queries * problem.k.shape[2] * (width + problem.v.shape[3])
    if terms <= limit:
        return Dense(exactly(problem, dy), scale, "exact")
    checked = cross_checked(problem, values, scale)
    return Dense(values, scale, f"float64, {checked} rows checked against exact values")


def exactly(problem: Problem, dy: Array | None) -> dict[str, Array]:
    asked = exact_problem(problem)
    truth = exact.forward(asked) if dy is None else exact.backward(asked, dy)
    names = ("o", "lse", "dq", "dk", "dv")
    return {name: truth.tensors[name]["float64"] for name in names if name in truth.tensors}


def in_float64(problem: Problem, dy: Array | None) -> tuple[dict[str, Array], RowScale]:
    """The definition and the row scales, part by part of the query rows."""
    batch, heads, queries, _ = problem.q.shape
    size = max(PART // max(batch * heads * problem.k.shape[2], 1), 1)
    total: AbsoluteSums | None = None
    rows: dict[str, list[Array]] = {"o": [], "lse": [], "dq": []}
    sums: dict[str, Array] = {}
    for first in range(0, max(queries, 1), size):
        part = np.arange(first, min(first + size, queries))
        some = replace(problem, q=take(problem.q, part, 2), rows=problem.rows.take(part))
        result = forward(some)
        rows["o"].append(result.o)
        rows["lse"].append(result.lse)
        if dy is not None:
            shares = backward(some, take(dy, part, 2), np.zeros(result.lse.shape))
            rows["dq"].append(shares.dq)
            for name in ("dk", "dv"):
                sums[name] = sums.get(name, 0.0) + getattr(shares, name)
        total = add_parts(total, sums_of(some, None if dy is None else take(dy, part, 2)))
    assert total is not None
    joined = {name: np.concatenate(parts, axis=2) for name, parts in rows.items() if parts}
    return joined | sums, row_scale(total)


def sums_of(problem: Problem, dy: Array | None) -> AbsoluteSums:
    """What the row scale of these rows is made of."""
    lse, p = normalise(problem, scores(problem)[0])
    rows, columns, terms = problem.rows, problem.columns, problem.terms
    shape = (*problem.q.shape[:3], problem.v.shape[3])
    return absolute_sums(
        problem.q,
        problem.k,
        problem.v,
        np.zeros(shape) if dy is None else dy,
        np.zeros(lse.shape),
        p,
        lse,
        visible(rows, columns, terms),
        terms.scale,
        rows.bias,
        keep_factor(rows, columns, terms, problem.q.shape[0]),
        terms.sinks,
    )


def cross_checked(problem: Problem, values: dict[str, Array], scale: RowScale) -> int:
    """How many rows agree with the exact o and lse; raises UndecidedError where one does not."""
    queries = problem.q.shape[2]
    sampled = np.unique(np.linspace(0, queries - 1, SAMPLED).astype(np.int64))
    some = replace(problem, q=take(problem.q, sampled, 2), rows=problem.rows.take(sampled))
    truth = exact.forward(exact_problem(some)).tensors
    for name in ("o", "lse"):
        got, want = values[name][:, :, sampled], truth[name]["float64"]
        row = getattr(scale, name)[:, :, sampled]
        bound = AGREEMENT * (row[..., None] if name == "o" else row)
        with np.errstate(invalid="ignore"):
            agrees = (got == want) | (np.abs(got - want) <= bound)
        if not agrees.all():
            raise UndecidedError(
                f"float64 within {AGREEMENT} row scales of the exact {name}",
                "a larger difference in a sampled row",
                "test smaller logits, or a shape that is small enough for exact values",
            )
    return len(sampled) * problem.q.shape[0] * problem.q.shape[1]
