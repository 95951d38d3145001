"""Expected values for any inputs: exact if the problem is small enough, else float64.

Float64 values are used only if some of their rows, the *sampled* rows, agree with exact values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspec.errors import UndecidedError
from ringspec.problem.model import Array, Problem
from ringspec.truth.dense import Named, in_float64, pairs_in
from ringspec.truth.exactly import attention
from ringspec.truth.problem import Upstream, rows_of
from ringspec.truth.sharded import Tables

# Up to this B * H * Sq * Sk * (D + Dv), the exact values take a second or two.
EXACT_LIMIT = 1 << 23
SAMPLED = 2
# Largest accepted difference between float64 and exact values, in row scales; the measured one is below 1e-15.
AGREEMENT = 1e-13
WITH_LAST_AXIS = ("o", "dq", "dk", "dv")


@dataclass(frozen=True)
class Expected:
    """Expected results in token order, float64.

    ``values`` by name: o and lse; if dy is given, also dq, dk, dv, dsinks and dbias. ``scale``, by name: the row
    scales, by which errors are divided. ``source``: how the values were computed, in words.

    For a ring of W workers, also ``dsinks_parts`` [W, H, N] and, if all queries share the bias, ``dbias_parts``
    [W, ...]: the sums over each worker's own rows.
    """

    values: Named
    scale: Named
    source: str


def expected_of(
    problem: Problem,
    upstream: Upstream,
    tables: Tables | None = None,
    limit: int | None = None,
) -> Expected:
    """Return the expected results of a problem, exact or in float64.

    They are exact if B * H * Sq * Sk * (D + Dv) is at most ``limit`` (None: :data:`EXACT_LIMIT`). Raises UndecidedError
    if the float64 values of a sampled row are not close to the exact values. ``tables``: which tokens each worker of a
    ring holds.

    >>> from ringspec.problem.options import check
    >>> one = np.ones((1, 1, 4, 2))
    >>> truth = expected_of(check(one, one, one, {"causal": True}), Upstream(one))
    >>> truth.source, float(truth.values["o"].max())
    ('exact', 1.0)
    """
    values, scale = in_float64(problem, upstream, tables)
    terms = pairs_in(problem) * (problem.q.shape[3] + problem.v.shape[3])
    if terms <= (EXACT_LIMIT if limit is None else limit):
        return Expected(exact_values(problem, upstream, tables), scale, "exact")
    checked = cross_checked(problem, upstream, values, scale)
    return Expected(values, scale, f"float64, {checked} rows checked against exact values")


def exact_values(problem: Problem, upstream: Upstream, tables: Tables | None = None) -> Named:
    """Return exact results by name, rounded to float64."""
    truth = attention(problem, upstream, tables)
    return {name: x["float64"] for name, x in truth.tensors.items()}


def cross_checked(problem: Problem, upstream: Upstream, values: Named, scale: Named) -> int:
    """Compare sampled rows with exact values; return the number of rows, or raise UndecidedError.

    For o, lse and dq, the sampled rows themselves are compared. dk, dv, dsinks and dbias are sums over all query
    rows. What the sampled rows contribute to these sums is compared with its exact value; only the summation over all
    rows is unchecked.
    """
    queries = problem.q.shape[2]
    sampled = np.unique(np.linspace(0, queries - 1, SAMPLED).astype(np.int64))
    some, some_upstream = rows_of(problem, sampled), upstream.take(sampled)
    truth = exact_values(some, some_upstream)
    shares, sizes = in_float64(some, some_upstream)
    for name in ("o", "lse", "dq"):
        if name in truth:
            shares[name], sizes[name] = (x[name][:, :, sampled] for x in (values, scale))
    for name, want in truth.items():
        check_agreement(name, shares[name], want, sizes[name])
    return len(sampled) * problem.q.shape[0] * problem.q.shape[1]


def check_agreement(name: str, got: Array, want: Array, scale: Array) -> None:
    """Raise UndecidedError unless the float64 values ``got`` agree with the exact values ``want``."""
    bound = AGREEMENT * (scale[..., None] if name in WITH_LAST_AXIS else scale)
    with np.errstate(invalid="ignore"):
        agrees = (got == want) | (np.abs(got - want) <= bound)
    if not agrees.all():
        raise UndecidedError(
            f"float64 within {AGREEMENT} row scales of the exact {name}",
            "a larger difference in a sampled row",
            "use smaller logits, or a shape that is small enough for exact values",
        )
