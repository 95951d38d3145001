"""Compute row scales with the same exact method as the results. A row scale is the unit for the errors of one row.

To compute the row scale, take the sum that defines the row's result, and replace every term by its absolute value.
Multiply it by kappa, which says how sensitive the row's exponentials are to rounding (docs/spec/numbers.md).

Let ``keep`` be the dropout mask (0 or 1), A = 1 - dropout_p, g = keep sum_d |dy||v| and O_i = sum_j P keep |v|. Then
the scales are these numbers, or the largest of them over d::

    kappa_i = 1 + max(max_j(|scale| sum |q||k| + |bias|), max |sink|)
    a_ij    = P_ij b_ij / A,   b_ij = g_ij + sum_d |dy| O_i + A |dlse_i|

    o: kappa_i O_i / A                  dv: sum_i kappa_i P keep |dy| / A
    dq: |scale| kappa_i sum_j a|k|      dk: |scale| sum_i kappa_i a|q|
    lse: kappa_i + |lse_i|
    dbias: kappa_i a, summed as dbias   dsinks: sum_i P_sink kappa_i (sum_d |dy| O_i / A + |dlse_i|)

**Errors.** kappa is an integer times a power of two, so it is exact. Let e_i be the error of P in row i. The error of a
sum of P times exact numbers is e_i times the sum of these numbers, so b_ij is off by at most
err(b_i) = e_i sum_d |dy| sum_j keep |v|. With b^ for the computed b, a_ij A is off by at most
e_i max_j b^_ij + err(b_i) max(P, 1). A ball is an interval with a middle and a radius. The largest of several numbers
lies between the largest lower end and the largest upper end of their balls.
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
    """Compute the row scales of o and lse [B, H, Sq] and, if ``seeds`` (dy and dlse) are given, of the gradients.

    ``bits``: the number of bits of the computation. ``groups``: groups of rows for which dsinks and dbias are also
    summed separately. ``by``: lse and delta, if the caller gives them. Then P = exp(s - lse), A |delta| replaces sum_d
    |dy| O + A |dlse|, and the result lacks o and lse.
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
    """P of some rows of one head (``weights``), their kappa [n], and P keep as 16-bit digits (``p``)."""

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
    """Compute kappa + |lse|, with lse = 0 for an empty row."""
    lse = weights.lse
    bits = max(lse.bits, kappa.bits)
    up = bits - lse.bits
    return Ball((abs(lse.middle) << up) + at_bits(kappa, bits), lse.radius << up, bits)


def add_gradients(
    sums: dict[str, Sums], block: Block, row: Ball, seed: Fixed, groups: Groups | None
) -> None:
    """Add what some rows contribute to the row scales of the gradients.

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
    """Compute sum_d |dy| O + A |dlse| of each row [n]; it is 0 in an empty row, which contributes no gradient."""
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
    """Compute A |delta| of each row [n], from the delta that the caller gives."""
    delta = times_kept(by.delta[block.place], block.prepared.kept)
    middle = where(block.weights.empty, 0, abs(delta.units))
    return Ball(middle, zeros(middle.shape), delta.bits)


def weighted(block: Block, row: Ball, seed: Fixed) -> RowBall:
    """Compute a_ij A for each visible pair."""
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
    """Multiply P_sink [n, N] by the number of each row."""
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
