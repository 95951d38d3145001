"""The row scales (docs/spec/numbers.md), computed with the same method as the results.

kappa_i = 1 + max(max_j(|scale| sum |q||k| + |bias|), max |sink|) is dyadic, so it is exact. With
A = 1 - dropout_p, g = keep sum_d |dy||v| and O_i = sum_j P keep |v| (= A times the scale of o
without kappa):

    a_ij A = P_ij (g_ij + sum_d |dy| O_i + A |dlse_i|)
    o: kappa_i O_i / A        lse: kappa_i + |lse_i|       dv: sum_i kappa_i P keep |dy| / A
    dq: scale kappa_i sum_j a|k|        dk: scale sum_i kappa_i a|q|
    dbias: kappa_i a, summed as dbias   dsinks: sum_i P_sink kappa_i (sum|dy| O_i / A + |dlse_i|)

The row scale is the largest of these sums over d. As in ``head``, the error of a sum is e_i, the error of P in row i,
times an exact sum. b_ij = g_ij + sum|dy| O_i + A|dlse_i| has the error err(b_i) = e_i sum|dy| sum_j keep|v|, so
err(a_ij A) <= e_i max_j b^_ij + err(b_i) max(P, 1), where b^ is the computed b. The largest of several balls
(intervals) lies between the largest of their lower ends and the largest of their upper ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringspec.exact.evaluate import (
    Given,
    Groups,
    Seeds,
    Sums,
    add_partial,
    blocks,
    partial_shapes,
    times_kept,
)
from ringspec.exact.head import (
    Operands,
    RowBall,
    divide,
    dropped,
    gradient_products,
    kept_digits,
    output,
    sink_shares,
    times_p,
)
from ringspec.exact.integers import Digits, Fixed, at_bits, matmul, where, zeros
from ringspec.exact.logits import Prepared, per_row
from ringspec.exact.rounding import Ball
from ringspec.exact.softmax import Weights, given_weights, softmax

Booleans = NDArray[np.bool_]
Place = tuple[int, int, slice]


def scale_balls(
    prepared: Prepared,
    seeds: Seeds | None,
    bits: int,
    groups: Groups | None = None,
    by: Given | None = None,
) -> dict[str, Ball]:
    """Compute the row scales of o and lse [B, H, Sq] and, if ``seeds`` is given, those of the gradients.

    ``by``: lse and delta of a block backward. P is then exp(s - lse), A |delta| replaces sum|dy| O + A |dlse|, and the
    result lacks o and lse.
    """
    problem = prepared.problem
    kept = prepared.kept
    sums = {"o": Sums((*problem.q.shape[:3], problem.v.shape[3])), "lse": Sums(problem.q.shape[:3])}
    if seeds is not None:
        for name, x in (("dq", problem.q), ("dk", problem.k), ("dv", problem.v)):
            sums[name] = Sums(x.shape)
        sums |= {name: Sums(shape) for name, shape in partial_shapes(problem, groups).items()}
    for place in blocks(prepared):
        if by is None:
            weights = softmax(prepared, *place, bits)
        else:
            weights = given_weights(prepared, *place, bits, by.lse[place], by.empty[place])
        kappa = condition(prepared, weights, place)
        b, h, rows = place
        keep, shape = problem.kept(b, h, rows), (weights.error.size, problem.pairs[3])
        p = kept_digits(weights, keep, shape)
        values = output(prepared, weights, abs(prepared.v.units[b, h // problem.group]), keep, p)
        sums["o"].add(place, scaled_rows(values, kappa))
        sums["lse"].add(place, absolute_lse(weights, kappa))
        if seeds is not None:
            block = Block(prepared, weights, kappa, place, p)
            row = row_term(block, values, seeds) if by is None else given_term(block, by)
            add_gradients(sums, block, row, seeds.dy, groups)
    if by is not None:
        del sums["o"], sums["lse"]
    balls = {
        name: total.ball() if name == "lse" else divide(total.ball(), kept)
        for name, total in sums.items()
    }
    return {
        name: largest_of_row(ball) if name in ("o", "dq", "dk", "dv") else ball
        for name, ball in balls.items()
    }


@dataclass(frozen=True)
class Block:
    """The weights P of some rows of one head, with kappa [n] and with P keep in digits."""

    prepared: Prepared
    weights: Weights
    kappa: Fixed
    place: Place
    p: Digits


def condition(prepared: Prepared, weights: Weights, place: Place) -> Fixed:
    """Compute kappa [n] of the rows."""
    b, h, rows = place
    problem, pairs = prepared.problem, weights.logits
    q, k = prepared.q.units[b, h, rows], prepared.k.units[b, h // problem.group]
    sizes = matmul(abs(q), abs(k).T)[pairs.i, pairs.j] * abs(prepared.factor)
    logit = Fixed(sizes, prepared.q.bits + prepared.k.bits + prepared.scale.bits)
    if prepared.bias is not None:
        whole = np.broadcast_to(prepared.bias.units, problem.pairs)[b, h, rows]
        bits = max(logit.bits, prepared.bias.bits)
        bias = at_bits(Fixed(abs(whole[pairs.i, pairs.j]), prepared.bias.bits), bits)
        logit = Fixed(at_bits(logit, bits) + bias, bits)
    largest = Fixed(per_row(np.maximum, logit.units, pairs, 0), logit.bits)
    if prepared.sinks is not None and prepared.sinks.units.size:
        bits = max(largest.bits, prepared.sinks.bits)
        sink = at_bits(Fixed(abs(prepared.sinks.units[h]), prepared.sinks.bits), bits)
        largest = Fixed(np.maximum(at_bits(largest, bits), sink.max()), bits)
    return Fixed(largest.units + (1 << largest.bits), largest.bits)


def scaled_rows(ball: Ball, kappa: Fixed) -> Ball:
    """Multiply each row by its kappa."""
    factor = kappa.units.reshape(-1, *[1] * (ball.middle.ndim - 1))
    return Ball(ball.middle * factor, ball.radius * factor, ball.bits + kappa.bits)


def absolute_lse(weights: Weights, kappa: Fixed) -> Ball:
    """Compute kappa + |lse|; an empty row's lse counts as 0."""
    lse = weights.lse
    bits = max(lse.bits, kappa.bits)
    up = bits - lse.bits
    return Ball((abs(lse.middle) << up) + at_bits(kappa, bits), lse.radius << up, bits)


def add_gradients(
    sums: dict[str, Sums], block: Block, row: Ball, seed: Fixed, groups: Groups | None
) -> None:
    """Add the contribution of some rows to the row scales of the gradients.

    ``row`` [n]: the result of :func:`row_term` or :func:`given_term`. ``seed``: dy.
    """
    prepared, weights, place, kappa = block.prepared, block.weights, block.place, block.kappa
    b, h, rows = place
    kv = h // prepared.problem.group
    operands = Operands(
        abs(prepared.q.units[b, h, rows]),
        abs(prepared.k.units[b, kv]),
        Fixed(kappa.units[:, None] * abs(seed.units[b, h, rows]), kappa.bits + seed.bits),
        prepared.problem.kept(b, h, rows),
        block.p,
    )
    bare = weighted(block, row, seed)
    a = RowBall(
        bare.middle * kappa.units[weights.logits.i],
        bare.radius * kappa.units,
        bare.bits + kappa.bits,
    )
    dq, dk, dv = gradient_products(prepared, weights, a, operands, abs(prepared.factor))
    sums["dq"].add(place, dq)
    sums["dk"].add((b, kv), dk)
    sums["dv"].add((b, kv), dv)
    dsinks = sink_part(weights, scaled_rows(row, kappa))
    add_partial(sums, prepared, weights, dsinks, a.flat(weights.logits), place, groups)


def row_term(block: Block, values: Ball, seeds: Seeds) -> Ball:
    """Compute sum|dy| O + A|dlse| of each row [n]; 0 in an empty row, which contributes no gradient."""
    b, h, rows = block.place
    dy = abs(seeds.dy.units[b, h, rows])
    a_dlse = times_kept(seeds.dlse[b, h, rows], block.prepared.kept)
    bits = max(seeds.dy.bits + values.bits, a_dlse.bits)
    up = bits - seeds.dy.bits - values.bits
    middle = (dy * values.middle).sum(axis=1, initial=0) << up
    radius = (dy * values.radius).sum(axis=1, initial=0) << up
    middle = middle + abs(at_bits(a_dlse, bits))
    return Ball(where(block.weights.empty, 0, middle), radius, bits)


def given_term(block: Block, by: Given) -> Ball:
    """Compute A|delta| of each row [n]."""
    delta = times_kept(by.delta[block.place], block.prepared.kept)
    middle = where(block.weights.empty, 0, abs(delta.units))
    return Ball(middle, zeros(middle.shape), delta.bits)


def weighted(block: Block, row: Ball, seed: Fixed) -> RowBall:
    """Compute a_ij A (see the module's docstring) of the visible pairs."""
    prepared, weights = block.prepared, block.weights
    b, h, rows = block.place
    problem, pairs = prepared.problem, weights.logits
    v, kept = abs(prepared.v.units[b, h // problem.group]), problem.kept(b, h, rows)
    g = dropped(matmul(abs(seed.units[b, h, rows]), v.T)[pairs.i, pairs.j], pairs, kept)
    g_bits = seed.bits + prepared.v.bits
    bits = max(row.bits, g_bits)
    up = bits - row.bits
    sizes = (g << (bits - g_bits)) + (row.middle << up)[pairs.i]
    return times_p(weights, sizes, row.radius << up, bits)


def sink_part(weights: Weights, row: Ball) -> Ball:
    """Compute P_sink [n, N] times one number for each row."""
    negative = sink_shares(weights, row)
    return Ball(-negative.middle, negative.radius, negative.bits)


def largest_of_row(ball: Ball) -> Ball:
    """Return a ball that contains the maximum over the last axis.

    The maximum lies between the largest lower end and the largest upper end.
    """
    if ball.middle.shape[-1] == 0:
        nothing = zeros(ball.middle.shape[:-1])
        return Ball(nothing, nothing, ball.bits)
    low = (ball.middle - ball.radius).max(axis=-1)
    high = (ball.middle + ball.radius).max(axis=-1)
    return Ball(low + high, high - low, ball.bits + 1)
