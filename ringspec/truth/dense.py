"""Compute attention by its definition in float64, for all query rows at once or for one part of the rows at a time.

Working in parts avoids storing the whole Sq x Sk matrix. This is possible because o, lse and dq of a row depend only on
that row, and dk, dv, dsinks are sums over rows. :func:`in_float64` works in parts. It also returns *row scales*: for
each row, the magnitude by which errors are divided.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ringspec.compare.row_scale import AbsoluteSums, RowScale, absolute_sums, row_scale
from ringspec.problem.model import Array, Integers, Problem
from ringspec.spec.dense_backward import Gradients, dense_backward
from ringspec.spec.dense_forward import Forward, dense_forward, per_query_head, scores, softmax
from ringspec.spec.dropout import keep_factor
from ringspec.spec.masks import visible
from ringspec.truth.problem import Upstream, rows_of
from ringspec.truth.sharded import Tables

Named = dict[str, Array]
PART = 1 << 20
# The step of log(scale) in a central difference quotient, whose error is of second order in it.
STEP = 2.0**-13
OVER_ROWS = ("dsinks", "dbias")


def results_of(problem: Problem, upstream: Upstream) -> Named:
    """Compute o, lse and, if dy is given, the gradients, for all rows at once."""
    named = by_name(dense_forward(problem))
    if upstream.dy is not None:
        named |= by_name(dense_backward(problem, *upstream.filled(problem)))
    return named


def by_name(results: Forward | Gradients | AbsoluteSums | RowScale) -> Named:
    """Return the fields of ``results`` that are not None, as a dict by name."""
    return {name: x for name, x in vars(results).items() if x is not None}


def rescaled(problem: Problem, factor: float) -> Problem:
    """Return the same problem with its softmax scale times ``factor``."""
    terms = replace(problem.terms, scale=problem.terms.scale * factor)
    return replace(problem, terms=terms)


def directions_of(problem: Problem, upstream: Upstream) -> dict[str, Array]:
    """Compute the derivative of each result with respect to log(scale), in float64; NaN for the lse of an empty row."""
    more, less = (results_of(rescaled(problem, by), upstream) for by in (1 + STEP, 1 - STEP))
    with np.errstate(invalid="ignore"):  # the lse of an empty row
        return {name: (more[name] - less[name]) / (2 * STEP) for name in more}


@dataclass(frozen=True)
class Weights:
    """Scores, probabilities and lse of a problem.

    For every pair, [B, H, Sq, Sk]: the score ``s``; ``t`` = tanh(z / softcap), where z is the score before the soft
    cap, or None; the probability ``p`` before dropout; the dropout factor ``keep``. ``lse`` is [B, H, Sq].
    """

    s: Array
    t: Array | None
    lse: Array
    p: Array
    keep: Array | float


def weights_of(problem: Problem) -> Weights:
    """Compute the :class:`Weights` of all rows at once."""
    s, t = scores(problem.q, per_query_head(problem.k, problem.terms), problem.tile)
    lse, p = softmax(problem, s)
    keep = keep_factor(problem.rows, problem.columns, problem.terms, problem.q.shape[0])
    return Weights(s, t, lse, p, keep)


def sums_of(problem: Problem, upstream: Upstream) -> AbsoluteSums:
    """Compute the sums of absolute values from which row scales follow, for all rows at once."""
    at, rows, terms = weights_of(problem), problem.rows, problem.terms
    return absolute_sums(
        problem.q,
        problem.k,
        problem.v,
        *upstream.filled(problem),
        at.p,
        at.lse,
        visible(rows, problem.columns, terms),
        terms.scale,
        rows.bias,
        at.keep,
        terms.sinks,
    )


def pairs_in(problem: Problem) -> int:
    """Return the number of pairs, B * H * Sq * Sk."""
    batch, heads, n_q, _ = problem.q.shape
    return batch * heads * n_q * problem.k.shape[2]


def parts_of(problem: Problem, rows: Integers) -> list[Integers]:
    """Split rows into parts whose score matrices have about a million elements; no rows give one empty part."""
    per_row = max(pairs_in(problem) // max(problem.q.shape[2], 1), 1)
    size = max(PART // per_row, 1)
    return [rows[first : first + size] for first in range(0, max(rows.size, 1), size)]


@dataclass
class Gathered:
    """Results collected from parts of the query rows: tensors in ``by_row`` are concatenated, all others are added."""

    by_row: tuple[str, ...]
    rows: dict[str, list[Array]] = field(default_factory=dict)
    sums: Named = field(default_factory=dict)
    of_worker: dict[str, dict[int, Array]] = field(default_factory=dict)

    def add(self, results: Named, worker: int) -> None:
        for name, x in results.items():
            if name in self.by_row:
                self.rows.setdefault(name, []).append(x)
                continue
            self.sums[name] = self.sums.get(name, 0.0) + x
            if name in OVER_ROWS:
                of_worker = self.of_worker.setdefault(name, {})
                of_worker[worker] = of_worker.get(worker, 0.0) + x

    def whole(self, order: NDArray[np.int64], with_parts: bool) -> Named:
        """Return all tensors, with their rows in token order.

        ``order``: the order in which rows were added. ``with_parts``: whether to include the sums of each worker.
        """
        back = np.argsort(order)
        rows = {name: np.concatenate(parts, axis=2) for name, parts in self.rows.items()}
        whole = {name: np.take(x, back, axis=2) for name, x in rows.items()} | self.sums
        if with_parts:
            whole |= {
                f"{name}_parts": np.stack([*x.values()]) for name, x in self.of_worker.items()
            }
        return whole


def in_float64(
    problem: Problem,
    upstream: Upstream,
    tables: Tables | None = None,
    tick: Callable[[], None] = lambda: None,
) -> tuple[Named, Named]:
    """Compute results and their row scales, by name, for one part of the query rows after another.

    ``tables``: which tokens each worker of a ring holds. With it, both also include ``dsinks_parts`` and
    ``dbias_parts``, as in :func:`ringspec.truth.exactly.attention`. ``tick`` is called after each part.
    """
    bias = problem.rows.bias
    by_row = ("o", "lse", "dq") + (("dbias",) if bias is not None and bias.shape[2] > 1 else ())
    values, sums = Gathered(by_row), Gathered(by_row)
    groups = (
        [np.arange(problem.q.shape[2])] if tables is None else [row[row >= 0] for row in tables.q]
    )
    for worker, tokens in enumerate(groups):
        for part in parts_of(problem, tokens):  # a worker without tokens adds zeros
            some, some_upstream = rows_of(problem, part), upstream.take(part)
            values.add(results_of(some, some_upstream), worker)
            sums.add(by_name(sums_of(some, some_upstream)), worker)
            tick()
    order, in_ring = np.concatenate(groups), tables is not None
    return values.whole(order, in_ring), largest_of_rows(sums.whole(order, in_ring))


def largest_of_rows(sums: Named) -> Named:
    """Return row scales by name, from the sums of absolute values that :func:`sums_of` computes."""
    parts = {name: x for name, x in sums.items() if name.endswith("_parts")}
    scale = row_scale(AbsoluteSums(**{n: x for n, x in sums.items() if n not in parts}))
    return by_name(scale) | parts
