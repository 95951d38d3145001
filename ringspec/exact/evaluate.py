"""Evaluate a whole problem: compute, for each element of each result, an interval that contains the true value.

An interval is stored as a ball, with a middle and a radius. F is the number of bits of the computation, and
A = 1 - dropout_p. Problems are evaluated in blocks of query rows of one head, whose contributions are summed. Sums of
integers are associative, so neither the block length nor the order of heads changes the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.exact.head import (
    Operands,
    Subtracted,
    divide,
    kept_digits,
    output,
    products,
    shares,
    subtracted,
)
from ringspec.exact.integers import Digits, Fixed, at_bits, fixed, zeros
from ringspec.exact.logits import Prepared
from ringspec.exact.problem import Array, Problem
from ringspec.exact.rounding import Ball
from ringspec.exact.softmax import Weights, given_weights, softmax

BLOCK = 256  # rows at a time; limits the memory to about BLOCK * Sk Python integers


@dataclass(frozen=True)
class Seeds:
    """The upstream gradients dy [B, H, Sq, Dv] and dlse [B, H, Sq], in integers."""

    dy: Fixed
    dlse: Fixed


@dataclass(frozen=True)
class Groups:
    """The group of each query row, for partial sums: ``of_row`` [Sq], from 0 to ``count`` - 1, or -1 for no group."""

    of_row: NDArray[np.int64]
    count: int


class Sums:
    """Running sums of balls: their middles and radii, with one common exponent."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.middle, self.radius, self.bits = zeros(shape), zeros(shape), 0

    def add(self, index: Any, part: Ball) -> None:
        """Add a ball at an index, after its unit and the unit of the sums are made equal."""
        bits = max(self.bits, part.bits)
        if bits > self.bits:
            self.middle = self.middle << (bits - self.bits)
            self.radius = self.radius << (bits - self.bits)
            self.bits = bits
        up = bits - part.bits
        self.middle[index] += part.middle << up
        self.radius[index] += part.radius << up

    def ball(self) -> Ball:
        return Ball(self.middle, self.radius, self.bits)


def blocks(prepared: Prepared) -> list[tuple[int, int, slice]]:
    """Return (b, h, rows) of every block of query rows."""
    batch, heads, length, _ = prepared.problem.pairs
    return [
        (b, h, slice(first, min(first + BLOCK, length)))
        for b in range(batch)
        for h in range(heads)
        for first in range(0, length, BLOCK)
    ]


class Results:
    """o [B, H, Sq, Dv] and lse [B, H, Sq] of the blocks evaluated so far; lse is 0 in empty rows."""

    def __init__(self, prepared: Prepared) -> None:
        shape = prepared.problem.q.shape[:3]
        self.prepared = prepared
        self.o, self.lse = Sums((*shape, prepared.problem.v.shape[3])), Sums(shape)

    def block(self, b: int, h: int, rows: slice, bits: int) -> tuple[Weights, Digits]:
        """Evaluate o and lse of some rows of one head; return P, and P times the dropout mask as 16-bit digits."""
        problem = self.prepared.problem
        v, kept = self.prepared.v.units[b, h // problem.group], problem.kept(b, h, rows)
        weights = softmax(self.prepared, b, h, rows, bits)
        p = kept_digits(weights, kept, (weights.error.size, len(v)))
        o = output(self.prepared, weights, v, kept, p)
        self.o.add((b, h, rows), divide(o, self.prepared.kept))
        self.lse.add((b, h, rows), weights.lse)
        return weights, p

    def balls(self) -> dict[str, Ball]:
        return {"o": self.o.ball(), "lse": self.lse.ball()}


def forward_balls(prepared: Prepared, bits: int) -> dict[str, Ball]:
    """Evaluate o and lse."""
    results = Results(prepared)
    for b, h, rows in blocks(prepared):
        results.block(b, h, rows, bits)
    return results.balls()


def times_kept(x: Fixed, kept: tuple[int, int]) -> Fixed:
    """Multiply x by A = 1 - dropout_p."""
    return Fixed(x.units * kept[0], x.bits + kept[1])


def backward_balls(
    prepared: Prepared, seeds: Seeds, bits: int, groups: Groups | None
) -> dict[str, Ball]:
    """Evaluate o, lse and the gradients, with a softmax that is computed only once."""
    problem, results = prepared.problem, Results(prepared)
    a_dlse = times_kept(seeds.dlse, prepared.kept)

    def rows_of(b: int, h: int, rows: slice) -> tuple[Weights, Subtracted, Digits]:
        weights, p = results.block(b, h, rows, bits)
        v, kept = prepared.v.units[b, h // problem.group], problem.kept(b, h, rows)
        dy = seeds.dy[b, h, rows]
        by = subtracted(prepared, weights, v, dy, a_dlse[b, h, rows], kept)
        return weights, by, p

    gradients = gradient_balls(prepared, seeds.dy, groups, rows_of)
    return results.balls() | gradients


@dataclass(frozen=True)
class Given:
    """The caller's lse and delta [B, H, Sq] in integers; ``empty`` marks the rows with lse = -inf."""

    lse: Fixed
    empty: NDArray[np.bool_]
    delta: Fixed


def given(lse: Array, delta: Array) -> Given:
    """Convert lse and delta to integers, exactly."""
    empty = np.isneginf(lse)
    return Given(fixed(np.where(empty, 0.0, lse)), empty, fixed(delta))


def block_backward_balls(
    prepared: Prepared, dy: Fixed, by: Given, bits: int, groups: Groups | None
) -> dict[str, Ball]:
    """Evaluate the gradients from the lse and delta that the caller gives (``by``)."""
    problem = prepared.problem
    a_delta = times_kept(by.delta, prepared.kept)

    def rows_of(b: int, h: int, rows: slice) -> tuple[Weights, Subtracted, Digits]:
        at = (b, h, rows)
        weights = given_weights(prepared, b, h, rows, bits, by.lse[at], by.empty[at])
        v, kept = prepared.v.units[b, h // problem.group], problem.kept(b, h, rows)
        g = products(prepared, weights.logits, v, dy[at], kept)
        finer = max(g.bits + bits, a_delta.bits)
        c = at_bits(a_delta[at], finer)
        p = kept_digits(weights, kept, (weights.error.size, len(v)))
        return weights, Subtracted(Ball(c, zeros(c.shape), finer), g), p

    return gradient_balls(prepared, dy, groups, rows_of)


def gradient_balls(
    prepared: Prepared,
    dy: Fixed,
    groups: Groups | None,
    rows_of: Callable[[int, int, slice], tuple[Weights, Subtracted, Digits]],
) -> dict[str, Ball]:
    """Sum the contributions of all blocks of rows to the gradients, and divide the sums by A.

    ``rows_of`` returns, for a block of rows, P, what is subtracted from dp, and P times the dropout mask.
    """
    problem = prepared.problem
    sums = {
        name: Sums(x.shape) for name, x in (("dq", problem.q), ("dk", problem.k), ("dv", problem.v))
    }
    sums |= {name: Sums(shape) for name, shape in partial_shapes(problem, groups).items()}
    for b, h, rows in blocks(prepared):
        weights, by, p = rows_of(b, h, rows)
        kv = h // problem.group
        operands = Operands(
            prepared.q.units[b, h, rows],
            prepared.k.units[b, kv],
            dy[b, h, rows],
            problem.kept(b, h, rows),
            p,
        )
        part = shares(prepared, weights, by, operands)
        sums["dq"].add((b, h, rows), part.dq)
        sums["dk"].add((b, kv), part.dk)
        sums["dv"].add((b, kv), part.dv)
        add_partial(sums, prepared, weights, part.dsinks, part.dz, (b, h, rows), groups)
    return {name: divide(total.ball(), prepared.kept) for name, total in sums.items()}


def partial_shapes(problem: Problem, groups: Groups | None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of dsinks and dbias and, if there are groups of rows, of the partial sum of each group."""
    shapes: dict[str, tuple[int, ...]] = {}
    bias, sinks = problem.bias, problem.sinks
    if sinks is not None:
        shapes["dsinks"] = sinks.shape
        if groups is not None:
            shapes["dsinks_parts"] = (groups.count, *sinks.shape)
    if bias is not None:
        shapes["dbias"] = bias.shape
        if groups is not None and bias.shape[2] == 1:
            shapes["dbias_parts"] = (groups.count, *bias.shape)
    return shapes


def add_partial(
    sums: dict[str, Sums],
    prepared: Prepared,
    weights: Weights,
    dsinks: Ball,
    dz: Ball,
    place: tuple[int, int, slice],
    groups: Groups | None,
) -> None:
    """Add one block's dsinks [n, N], and its dz to dbias, both to the totals and to the sum of each group of rows."""
    _, h, rows = place
    everything = np.ones(weights.error.size, dtype=np.bool_)
    choices: list[tuple[str, tuple[int, ...], NDArray[np.bool_]]] = [("", (), everything)]
    if groups is not None:
        of_row = groups.of_row[rows]
        choices += [("_parts", (group,), of_row == group) for group in range(groups.count)]
    for suffix, before, chosen in choices:
        if "dsinks" + suffix in sums:
            sums["dsinks" + suffix].add((*before, h), summed_rows(dsinks, chosen))
        if "dbias" + suffix in sums:
            add_bias(sums["dbias" + suffix], before, prepared, weights, dz, place, chosen)


def summed_rows(ball: Ball, chosen: NDArray[np.bool_]) -> Ball:
    """Return the sum [N] over the chosen rows of a ball [n, N]."""
    return Ball(
        ball.middle[chosen].sum(axis=0, initial=0),
        ball.radius[chosen].sum(axis=0, initial=0),
        ball.bits,
    )


def add_bias(
    total: Sums,
    before: tuple[int, ...],
    prepared: Prepared,
    weights: Weights,
    dz: Ball,
    place: tuple[int, int, slice],
    chosen: NDArray[np.bool_],
) -> None:
    """Add dz of the chosen rows, summed over the axes along which the bias was broadcast."""
    bias = prepared.problem.bias
    assert bias is not None
    b, h, rows = place
    pairs = weights.logits
    there = chosen[pairs.i]
    nought = np.zeros(int(there.sum()), dtype=np.intp)
    row = nought if bias.shape[2] == 1 else pairs.i[there] + rows.start
    column = nought if bias.shape[3] == 1 else pairs.j[there]
    where = (*before, b if bias.shape[0] != 1 else 0, h if bias.shape[1] != 1 else 0)
    middle, radius = zeros(bias.shape[2:]), zeros(bias.shape[2:])
    np.add.at(middle, (row, column), dz.middle[there])
    np.add.at(radius, (row, column), dz.radius[there])
    total.add(where, Ball(middle, radius, dz.bits))
