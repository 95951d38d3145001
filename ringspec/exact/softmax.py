"""Compute the probabilities P and lse of some rows of one head with F bits, and bound the error of each row.

Let m be the largest computed logit of the row; m is used as an exact number, because P does not depend on it. Let
e_j = exp(s_j - m) be the true terms of the n keys and sinks, and z their sum. E and Z are the computed terms and their
computed sum. Errors are in units of 2**-F:

1. Terms. Without a soft cap, s_j - m is exact and exp is off by at most 2. With a soft cap, s_j is off by at
   most 1 unit and exp(s_j - m) <= e**(2**-F), so e_j is off by less than 2 + 2 = 4. Let eps be
   this bound. The sum of the terms is off by at most n eps. The term of the maximum is computed as
   exactly 1, and its true value is at least exp(-2**-F), so z >= 1/2.
2. P. E/Z - e/z = (E - e)/z + (E/Z)(z - Z)/z, of magnitude <= (eps + n eps)/z <= 2 (n + 1) eps; rounding
   the quotient down adds 1. The same holds for the sinks' P.
3. lse = m + log z: log is off by at most 2, and log Z - log z by at most n eps / min(Z, z) <= 2 n eps.

If all logits and sinks of a row are equal, E is exactly 2**F. So P = 1/n is off by less than 1 unit, and exact if n
divides 2**F; for example, P is exactly 1 in a row with one key. The lse of such a row is m + log n, where only log n,
and m with a soft cap, have errors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringspec.errors import ShapeError
from ringspec.exact.elementary import EXP_ERROR, LOG_ERROR, exp, log
from ringspec.exact.integers import Fixed, Units, at_bits, objects, where, zeros
from ringspec.exact.logits import Logits, Prepared, logits, per_row
from ringspec.exact.rounding import Ball

LARGEST_ROW = 1 << 30  # log requires sums below 2**31


@dataclass(frozen=True)
class Weights:
    """P and lse of n query rows; P and its error are in units of 2**-bits.

    ``p``: P of each visible pair. ``sinks`` [n, N]: P of the sinks. ``error`` [n]: a bound on the error of every P in a
    row. ``empty`` [n]: rows without keys and sinks, whose ``lse`` is stored as 0.
    """

    logits: Logits
    p: Units
    sinks: Units
    error: Units
    bits: int
    lse: Ball
    empty: NDArray[np.bool_]


def softmax(prepared: Prepared, b: int, h: int, rows: slice, bits: int) -> Weights:
    """Compute P and lse of ``rows`` of query head h in batch b, for F = ``bits``."""
    pairs = logits(prepared, b, h, rows, bits)
    n = pairs.count.size
    sink_logits = Fixed(zeros((0,)), 0)
    if prepared.sinks is not None:
        sink_logits = prepared.sinks[h]
    terms = pairs.count + sink_logits.units.size
    if terms.max(initial=0) > LARGEST_ROW:
        raise ShapeError(f"at most {LARGEST_ROW} keys", str(terms.max()), "use fewer keys")
    scale = max(pairs.s_bits, sink_logits.bits)
    s = at_bits(Fixed(pairs.s, pairs.s_bits), scale)
    sink = at_bits(sink_logits, scale)
    m = largest(s, sink, pairs)
    e = objects(exp((s - m[pairs.i]).tolist(), scale, bits), s.shape)
    to_sinks = (sink[None, :] - m[:, None]) if sink.size else zeros((n, 0))
    e_sinks = objects(exp(to_sinks.ravel().tolist(), scale, bits), to_sinks.shape)
    total = per_row(np.add, e, pairs, 0) + e_sinks.sum(axis=1, initial=0)
    empty = terms == 0
    uniform = all_equal(pairs, s, m, sink, prepared.softcap is not None)
    eps = where(uniform, 0, EXP_ERROR + 2 * pairs.error)
    safe = where(empty, 1, total)
    p = (e << bits) // safe[pairs.i]
    inexact = [int((1 << bits) % max(count, 1) != 0) for count in terms.tolist()]
    error = where(uniform, objects(inexact, (n,)), 2 * (terms + 1) * eps + 1)
    error[empty] = 0
    log_z = objects(log(where(empty, 1 << bits, total).tolist(), bits), (n,))
    if prepared.softcap is not None:
        eps[pairs.count > 0] = EXP_ERROR + 2 * pairs.error
    exact_log = empty | ((eps == 0) & (total == 1 << bits))
    log_error = where(exact_log, 0, LOG_ERROR + 2 * terms * eps)
    lse = added(Fixed(m, scale), Fixed(log_z, bits), log_error, empty)
    return Weights(pairs, p, (e_sinks << bits) // safe[:, None], error, bits, lse, empty)


def largest(s: Units, sink: Units, pairs: Logits) -> Units:
    """Return the largest logit of each row, sinks included; 0 for a row without terms."""
    floor = min(int(s.min(initial=0)), int(sink.min(initial=0)))
    m = per_row(np.maximum, s, pairs, floor)
    if sink.size:
        return np.maximum(m, sink.max())
    m[pairs.count == 0] = 0
    return m


def all_equal(
    pairs: Logits, s: Units, m: Units, sink: Units, has_softcap: bool
) -> NDArray[np.bool_]:
    """Return a mask of the rows in which all keys and sinks have provably equal logits.

    Keys are compared by their logits z before the soft cap, which are exact. With a soft cap, a key is provably equal
    to a sink only if z and the sink are 0. ``s``, ``m`` and ``sink`` are in the same unit.
    """
    low, high = (per_row(f, pairs.z, pairs, 0) for f in (np.minimum, np.maximum))
    same = (low == high).astype(np.bool_)
    if sink.size == 0:
        return same
    sinks_at_m = (sink[None, :] == m[:, None]).all(axis=1).astype(np.bool_)
    alone = pairs.count == 0
    if has_softcap:
        zero = (low == 0) & (high == 0) & bool((sink == 0).all())
        return (sinks_at_m & alone) | zero.astype(np.bool_)
    keys_at_m = (per_row(np.minimum, s, pairs, 0) == m).astype(np.bool_)
    return sinks_at_m & (alone | (same & keys_at_m))


def added(m: Fixed, log_z: Fixed, error: Units, empty: NDArray[np.bool_]) -> Ball:
    """Return m + log z, or 0 in an ``empty`` row; ``error`` is in the units of ``log_z``."""
    bits = max(m.bits, log_z.bits)
    middle = at_bits(m, bits) + at_bits(log_z, bits)
    return Ball(where(empty, 0, middle), error << (bits - log_z.bits), bits)


def given_weights(
    prepared: Prepared, b: int, h: int, rows: slice, bits: int, lse: Fixed, empty: NDArray[np.bool_]
) -> Weights:
    """Compute P = exp(s - lse) with the lse [n] that the caller gives, which counts as exact (rule BWD-11).

    Without a soft cap, s - lse is exact, so P is off by at most 2 units. With a soft cap, s is off by at most 1
    unit of 2**-F, which changes P by less than 2 max(P, 1) more units. exp(0) = 1 is exact.

    Raises OptionError if a logit exceeds lse by more than about 5400.
    """
    pairs = logits(prepared, b, h, rows, bits)
    sink_logits = Fixed(zeros((0,)), 0) if prepared.sinks is None else prepared.sinks[h]
    scale = max(pairs.s_bits, sink_logits.bits, lse.bits)
    shift = at_bits(lse, scale)
    there = ~empty[pairs.i]
    x = at_bits(Fixed(pairs.s, pairs.s_bits), scale) - shift[pairs.i]
    p = zeros(x.shape)
    p[there] = exp(x[there].tolist(), scale, bits)
    to_sinks = at_bits(sink_logits, scale)[None, :] - shift[:, None]
    p_sinks = objects(exp(to_sinks.ravel().tolist(), scale, bits), to_sinks.shape)
    p_sinks[empty] = 0
    one = 1 << bits
    error = EXP_ERROR + pairs.error * 2 * (1 + per_row(np.maximum, p, pairs, 0) // one)
    at_lse = (per_row(np.maximum, abs(x), pairs, 0) == 0) & (to_sinks == 0).all(axis=1)
    if prepared.softcap is None:
        error[at_lse.astype(np.bool_)] = 0
    error[empty] = 0
    given = Ball(shift, zeros(shift.shape), scale)
    return Weights(pairs, p, p_sinks, error.astype(object), bits, given, empty)
