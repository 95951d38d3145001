"""Truth for inputs of somebody's own: exact where that is affordable, else float64.

The float64 values are those of the definition, for some query rows at a time, so that the Sq x Sk
matrix is never stored. Results of sampled rows are then held against the exact ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec import exact
from ringspec.compare.row_scale import AbsoluteSums, absolute_sums, row_scale
from ringspec.errors import UndecidedError
from ringspec.problem.model import Problem, take
from ringspec.spec.definition import backward, forward, normalise, per_query_head, scores
from ringspec.spec.dropout import keep_factor
from ringspec.spec.masks import visible
from ringspec.vectors.format.sharded import Tables
from ringspec.vectors.generate import exact_problem

Array = NDArray[np.float64]
Named = dict[str, Array]
# B * H * Sq * Sk * (D + Dv) up to which the exact values take a second or two.
EXACT_LIMIT = 1 << 23
PART = 1 << 20
SAMPLED = 2
# What float64 may differ from the exact values, in units of the row scale; measured below 1e-15.
AGREEMENT = 1e-13
GRADIENTS = ("dq", "dk", "dv", "dsinks", "dbias")
OVER_ROWS = ("dsinks", "dbias")
WITH_LAST_AXIS = ("o", "dq", "dk", "dv")


@dataclass(frozen=True)
class Seeds:
    """Upstream gradients: ``dy`` [B, H, Sq, Dv], ``dlse`` [B, H, Sq] (None: 0). No dy, no gradients."""

    dy: Array | None = None
    dlse: Array | None = None

    def take(self, rows: NDArray[np.int64]) -> Seeds:
        return Seeds(*(None if x is None else take(x, rows, 2) for x in (self.dy, self.dlse)))

    def for_sums(self, problem: Problem) -> tuple[Array, Array]:
        """Both, zeros where there is none."""
        shape = (*problem.q.shape[:3], problem.v.shape[3])
        dy = np.zeros(shape) if self.dy is None else self.dy
        return dy, np.zeros(shape[:3]) if self.dlse is None else self.dlse


@dataclass(frozen=True)
class Dense:
    """``values`` by name (o, lse; with dy dq, dk, dv, dsinks, dbias), global, float64, and their row
    scales; ``source``: which truth.

    With the tables of a ring also ``dsinks_parts`` [W, H, N] and, of a bias that is the same for all
    queries, ``dbias_parts`` [W, ...]: the sums over each worker's own rows.
    """

    values: Named
    scale: Named
    source: str


def truth_of(
    problem: Problem,
    seeds: Seeds | None = None,
    tables: Tables | None = None,
    limit: int | None = None,
) -> Dense:
    """Results of a checked problem; the exact ones up to ``limit`` terms, else those in float64.

    ``limit``: None is :data:`EXACT_LIMIT`.

    >>> from ringspec.problem.options import check
    >>> one = np.ones((1, 1, 4, 2))
    >>> truth = truth_of(check(one, one, one, {"causal": True}), Seeds(one))
    >>> truth.source, float(truth.values["o"].max())
    ('exact', 1.0)
    """
    seeds = seeds or Seeds()
    values, scale = in_float64(problem, seeds, tables)
    batch, heads, queries, width = problem.q.shape
    terms = batch * heads * queries * problem.k.shape[2] * (width + problem.v.shape[3])
    if terms <= (EXACT_LIMIT if limit is None else limit):
        return Dense(exactly(problem, seeds, tables), scale, "exact")
    checked = cross_checked(problem, seeds, values, scale)
    return Dense(values, scale, f"float64, {checked} rows checked against exact values")


def exactly(problem: Problem, seeds: Seeds, tables: Tables | None = None) -> Named:
    asked = exact_problem(problem)
    if seeds.dy is None:
        truth = exact.forward(asked)
    else:
        groups: dict[str, Any] = {}
        if tables is not None:
            groups = {"row_groups": tables.worker_of_query(), "groups": tables.workers}
        truth = exact.backward(asked, seeds.dy, seeds.dlse, **groups)
    return {name: x["float64"] for name, x in truth.tensors.items()}


@dataclass
class Gathered:
    """What some query rows after others give: rows side by side, everything else added up."""

    by_row: tuple[str, ...]
    rows: dict[str, list[Array]] = field(default_factory=dict)
    sums: Named = field(default_factory=dict)
    of_worker: dict[str, list[Array]] = field(default_factory=dict)

    def add(self, results: Mapping[str, Array], worker: int) -> None:
        for name, x in results.items():
            if name in self.by_row:
                self.rows.setdefault(name, []).append(x)
                continue
            self.sums[name] = self.sums.get(name, 0.0) + x
            if name in OVER_ROWS:
                parts = self.of_worker.setdefault(name, [])
                if len(parts) == worker:
                    parts.append(np.zeros(x.shape))
                parts[worker] = parts[worker] + x

    def whole(self, order: NDArray[np.int64], with_parts: bool) -> Named:
        """All tensors, with the rows back in the order of the tokens."""
        back = np.argsort(order)
        rows = {name: np.concatenate(parts, axis=2) for name, parts in self.rows.items()}
        whole = {name: np.take(x, back, axis=2) for name, x in rows.items()} | self.sums
        if with_parts:
            whole |= {f"{name}_parts": np.stack(parts) for name, parts in self.of_worker.items()}
        return whole


def in_float64(problem: Problem, seeds: Seeds, tables: Tables | None = None) -> tuple[Named, Named]:
    """Results by the definition, and the row scales, part by part of the query rows."""
    batch, heads, queries, _ = problem.q.shape
    size = max(PART // max(batch * heads * problem.k.shape[2], 1), 1)
    bias = problem.rows.bias
    by_row = ("o", "lse", "dq") + (("dbias",) if bias is not None and bias.shape[2] > 1 else ())
    values, sums = Gathered(by_row), Gathered(by_row)
    groups = [np.arange(queries)] if tables is None else [row[row >= 0] for row in tables.q]
    for worker, tokens in enumerate(groups):
        for first in range(0, max(len(tokens), 1), size):  # a worker without tokens adds zeros
            part = tokens[first : first + size]
            some = replace(problem, q=take(problem.q, part, 2), rows=problem.rows.take(part))
            values.add(results_of(some, seeds.take(part)), worker)
            sums.add(sums_of(some, seeds.take(part)), worker)
    order, in_ring = np.concatenate(groups), tables is not None
    return values.whole(order, in_ring), largest_of_rows(sums.whole(order, in_ring))


def results_of(problem: Problem, seeds: Seeds) -> Named:
    result = forward(problem)
    named = {"o": result.o, "lse": result.lse}
    if seeds.dy is not None:
        shares = backward(problem, *seeds.for_sums(problem))
        gradients = {name: getattr(shares, name) for name in GRADIENTS}
        named |= {name: x for name, x in gradients.items() if x is not None}
    return named


def sums_of(problem: Problem, seeds: Seeds) -> Named:
    """What the row scale of these rows is made of."""
    lse, p = normalise(
        problem, scores(problem.q, per_query_head(problem.k, problem.terms), problem.block)[0]
    )
    rows, columns, terms = problem.rows, problem.columns, problem.terms
    sums = absolute_sums(
        problem.q,
        problem.k,
        problem.v,
        *seeds.for_sums(problem),
        p,
        lse,
        visible(rows, columns, terms),
        terms.scale,
        rows.bias,
        keep_factor(rows, columns, terms, problem.q.shape[0]),
        terms.sinks,
    )
    return {name: x for name, x in vars(sums).items() if x is not None}


def largest_of_rows(sums: Named) -> Named:
    """Row scales of whole sums, by name."""
    parts = {name: x for name, x in sums.items() if name.endswith("_parts")}
    scale = row_scale(AbsoluteSums(**{n: x for n, x in sums.items() if n not in parts}))
    return {name: x for name, x in vars(scale).items() if x is not None} | parts


def cross_checked(problem: Problem, seeds: Seeds, values: Named, scale: Named) -> int:
    """How many rows agree with the exact values; raises UndecidedError where one does not.

    o, lse and dq of sampled query rows are those of the whole problem. dk, dv, dsinks and dbias are
    sums over all query rows: of them the share of the sampled rows is held against its exact value,
    and only the addition of shares is not.
    """
    queries = problem.q.shape[2]
    sampled = np.unique(np.linspace(0, queries - 1, SAMPLED).astype(np.int64))
    some = replace(problem, q=take(problem.q, sampled, 2), rows=problem.rows.take(sampled))
    truth = exactly(some, seeds.take(sampled))
    shares, sizes = in_float64(some, seeds.take(sampled))
    for name in ("o", "lse", "dq"):
        if name in truth:
            shares[name], sizes[name] = (x[name][:, :, sampled] for x in (values, scale))
    for name, want in truth.items():
        check_agreement(name, shares[name], want, sizes[name])
    return len(sampled) * problem.q.shape[0] * problem.q.shape[1]


def check_agreement(name: str, got: Array, want: Array, scale: Array) -> None:
    """Raises UndecidedError unless float64 values agree with exact ones."""
    bound = AGREEMENT * (scale[..., None] if name in WITH_LAST_AXIS else scale)
    with np.errstate(invalid="ignore"):
        agrees = (got == want) | (np.abs(got - want) <= bound)
    if not agrees.all():
        raise UndecidedError(
            f"float64 within {AGREEMENT} row scales of the exact {name}",
            "a larger difference in a sampled row",
            "test smaller logits, or a shape that is small enough for exact values",
        )
