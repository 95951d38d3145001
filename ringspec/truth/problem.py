"""What is evaluated: a checked problem, its upstream gradients, and both for some query rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ringspec import exact
from ringspec.problem.model import Array, Integers, Problem, take
from ringspec.spec.dropout import keep_mask
from ringspec.spec.masks import visible


@dataclass(frozen=True)
class Upstream:
    """Upstream gradients: ``dy`` [B, H, Sq, Dv], ``dlse`` [B, H, Sq] (None: 0). No dy, no gradients."""

    dy: Array | None = None
    dlse: Array | None = None

    def take(self, rows: Integers) -> Upstream:
        """Those of some query rows."""
        return Upstream(*(None if x is None else take(x, rows, 2) for x in (self.dy, self.dlse)))

    def filled(self, problem: Problem) -> tuple[Array, Array]:
        """Both, zeros where there is none."""
        shape = (*problem.q.shape[:3], problem.v.shape[3])
        dy = np.zeros(shape) if self.dy is None else self.dy
        return dy, np.zeros(shape[:3]) if self.dlse is None else self.dlse


def rows_of(problem: Problem, rows: Integers) -> Problem:
    """The same keys with these query rows alone."""
    return replace(problem, q=take(problem.q, rows, 2), rows=problem.rows.take(rows))


def exact_problem(problem: Problem) -> exact.Problem:
    """The same problem for :mod:`ringspec.exact`: one mask, one keep mask."""
    rows, columns, terms = problem.rows, problem.columns, problem.terms
    keep = rows.keep
    if keep is None and terms.dropout_p > 0:
        keep = keep_mask(
            rows.position,
            columns.position,
            heads=np.arange(terms.heads, dtype=np.int64),
            batches=np.arange(problem.q.shape[0], dtype=np.int64),
            dropout_p=terms.dropout_p,
            dropout_seed=terms.dropout_seed,
        )
    return exact.Problem(
        problem.q,
        problem.k,
        problem.v,
        terms.scale,
        visible=visible(rows, columns, terms),
        bias=rows.bias,
        softcap=terms.softcap,
        sinks=terms.sinks,
        keep=keep,
        dropout_p=terms.dropout_p,
    )
