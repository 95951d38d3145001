"""The upstream gradients of a problem, and a problem restricted to some query rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ringspec.problem.model import Array, Integers, Problem, take


@dataclass(frozen=True)
class Upstream:
    """Upstream gradients: ``dy`` [B, H, Sq, Dv], or None to compute no gradients, and ``dlse`` [B, H, Sq] (None: 0)."""

    dy: Array | None = None
    dlse: Array | None = None

    def take(self, rows: Integers) -> Upstream:
        """Return the upstream gradients of some query rows."""
        return Upstream(*(None if x is None else take(x, rows, 2) for x in (self.dy, self.dlse)))

    def filled(self, problem: Problem) -> tuple[Array, Array]:
        """Return dy and dlse, with zeros in place of None."""
        shape = (*problem.q.shape[:3], problem.v.shape[3])
        dy = np.zeros(shape) if self.dy is None else self.dy
        return dy, np.zeros(shape[:3]) if self.dlse is None else self.dlse


def rows_of(problem: Problem, rows: Integers) -> Problem:
    """Return the problem with only these query rows and all keys."""
    return replace(problem, q=take(problem.q, rows, 2), rows=problem.rows.take(rows))
