"""Correctly rounded results of attention, of the gradients of one block, and of a merge, in global token order."""

from __future__ import annotations

from dataclasses import dataclass

from ringspec import exact
from ringspec.exact import Truth
from ringspec.exact.keywords import problem_of
from ringspec.problem.model import Array, Problem
from ringspec.truth.problem import Upstream
from ringspec.truth.sharded import Tables

__all__ = ["FLOAT64", "Truth", "Wanted", "attention", "block_gradients", "merge"]

STATISTICS = ("lse", "dsinks", "dsinks_parts")


@dataclass(frozen=True)
class Wanted:
    """Which values to compute: results in each of ``formats`` and, if ``scales`` is true, row scales.

    ``statistics``: the formats of lse and dsinks, if they differ from ``formats``. A row scale is the unit in which the
    errors of one row are measured.
    """

    formats: tuple[str, ...] = ("float64",)
    statistics: tuple[str, ...] | None = None
    scales: bool = False

    def formats_of(self, name: str) -> tuple[str, ...]:
        """Return the formats of one result."""
        if self.statistics is None or name not in STATISTICS:
            return self.formats
        return self.statistics


FLOAT64 = Wanted()


def attention(
    problem: Problem, upstream: Upstream, tables: Tables | None = None, wanted: Wanted = FLOAT64
) -> Truth:
    """Return correctly rounded o and lse and, if ``upstream.dy`` is given, the gradients.

    ``tables``: which tokens each of the W workers of a ring holds. With it, the result also has ``dsinks_parts``
    [W, H, N] and, if all queries share the bias, ``dbias_parts`` [W, ...]: the sums over each worker's own rows. Raises
    the errors of :func:`ringspec.exact.backward`.
    """
    asked = problem_of(problem)
    if upstream.dy is None:
        return exact.forward(asked, **vars(wanted))
    groups = None if tables is None else tables.worker_of_query()
    return exact.backward(
        asked,
        upstream.dy,
        upstream.dlse,
        **vars(wanted),
        row_groups=groups,
        groups=0 if tables is None else tables.workers,
    )


def block_gradients(
    problem: Problem, dy: Array, lse: Array, delta: Array, wanted: Wanted = FLOAT64
) -> Truth:
    """Return what the keys of ``problem`` contribute to the gradients.

    lse and delta [B, H, Sq] belong to whole rows, which may have more keys than ``problem``.
    """
    return exact.block_backward(problem_of(problem), dy, lse, delta, **vars(wanted))


def merge(o: Array, lse: Array, wanted: Wanted = FLOAT64, *, base: int | None = None) -> Truth:
    """Return o and lse merged from partial results o [N, B, H, S, Dv] and lse [N, B, H, S].

    ``base``: 2 if the lse are logarithms to base 2; None: natural.
    """
    return exact.merge(o, lse, **vars(wanted), base=base)
