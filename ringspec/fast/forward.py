"""The forward pass of one row block of one head: a loop over the runs of keys that are not hidden from it.

A row block is an interval of queries, a run an interval of keys, and a tile all pairs of a row block and a run;
:mod:`ringspec.fast.plan` chooses them. A :class:`~ringspec.fast.job.Job` holds q, k and v, the mask and the tiles. The
job's type, float64 or float32, is the type of the computation.

Softmax usually subtracts the row maximum m from the scores s, so that exp neither overflows nor becomes subnormal. By
the Cauchy-Schwarz inequality, |s_ij| <= |q_i| max |k_j|. If this bound is at most :data:`BOUNDED`, exp(s) is computed
without subtraction. This takes one pass over the scores instead of the usual three (maximum, difference, exp). If
NumPy's exp2 is faster than its exp, scores are multiplied by log2(e) (``Job.unit``), and exp2 is used.

A row must not depend on keys that are hidden from it. In a tile with hidden pairs, max |k_j| of each row therefore
covers only the keys that are visible to the row. Rows with a small bound keep m = 0: subtracting 0 and multiplying by
exp(0) change no bit.

Sources: Milakov and Gimelshein, https://arxiv.org/abs/1805.02867; Dao, FlashAttention-2,
https://arxiv.org/abs/2307.08691 (algorithm 1).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringspec.fast.job import Floats, Head, Job, Tile, is_finite, norms_of, product, tile_of
from ringspec.fast.kept import is_immutable
from ringspec.fast.plan import Run, starts
from ringspec.fast.threads import SCRATCH
from ringspec.problem.model import Array, Booleans

# exp(-BOUNDED) is a normal number with a margin, and 2**40 times exp(BOUNDED) is finite.
BOUNDED = {"float32": 40.0, "float64": 300.0}


@dataclass
class State:
    """The running softmax of the n rows of a row block: ``m``, ``l`` [n] in float64, ``o`` [n, Dv] in the job's type.

    ``at_zero``: True if every tile so far used exp(s) without subtraction, so that m is 0 in every row. ``empty``: True
    before the first tile. ``finite`` is False if a query's norm is not finite, or if k and v were searched and contain
    NaN or infinity.
    """

    m: Array
    l: Array
    o: Floats
    at_zero: bool = True
    empty: bool = True
    finite: bool = True


@dataclass(frozen=True)
class Keys:
    """All keys of one key head.

    ``k`` [n, D] and ``v`` [n, Dv] are in the job's type. ``norms`` [n]: the norm of each key. ``peaks``: the greatest
    norm in each granule, a short interval of keys (``TileSizes.granule``); infinity if a norm is NaN. ``finite`` is
    False if k and v were searched and contain NaN or infinity.
    """

    k: Floats
    v: Floats
    norms: Floats
    peaks: list[float]
    finite: bool

    def peak(self, tile: Tile, granule: int) -> float:
        return max(self.peaks[tile.start // granule : -(-tile.stop // granule)])


def keys_of(job: Job, batch: int, key_head: int) -> Keys:
    at = batch, key_head
    k, v = typed(job, job.k, at), typed(job, job.v, at)

    def lengths() -> tuple[Floats, list[float], bool]:
        norms = norms_of(k)
        peaks = np.maximum.reduceat(norms, starts(norms.size, job.sizes.granule))
        finite = is_finite(norms) or is_finite(k)  # the square of a finite number may overflow
        return norms, np.where(np.isnan(peaks), np.inf, peaks).tolist(), finite

    key = "lengths", job.dtype.name, job.sizes.granule, at
    norms, peaks, finite = job.kept.get((job.k,), key, lengths)
    if job.look:
        finite = finite and job.kept.get(
            (job.v,), ("finite", job.dtype.name, at), lambda: is_finite(v)
        )
    return Keys(k, v, norms, peaks, finite or not job.look)


def typed(job: Job, x: Floats, at: tuple[int, int]) -> Floats:
    """Return one head of x [B, H, n, D] in the job's type."""
    if x.dtype == job.dtype:
        return np.ascontiguousarray(x[at])
    key = "typed", job.dtype.name, at
    return job.kept.get((x,), key, lambda: np.ascontiguousarray(x[at], job.dtype))


@dataclass(frozen=True)
class Queries:
    """The queries of a row block, multiplied by scale and ``Job.unit``.

    ``norms``: the norm of each query; ``peak``: the greatest norm. ``limit``: :data:`BOUNDED` times ``Job.unit``.
    ``ones``: an array of ones, as long as the longest run of keys.
    """

    q: Floats
    norms: Floats
    peak: float
    limit: float
    ones: Floats


def queries_of(head: Head, q0: int, q1: int) -> Queries:
    job, scale = head.job, head.job.terms.scale
    key = "queries", job.dtype.name, scale, job.sizes.keys, head.batch, head.head, q0, q1
    return job.kept.get((job.q,), key, lambda: scaled_queries(head, q0, q1))


def scaled_queries(head: Head, q0: int, q1: int) -> Queries:
    job, shape = head.job, (q1 - q0, head.job.q.shape[3])
    # Values that are not cached may use this thread's scratch memory.
    q = np.empty(shape, job.dtype) if is_immutable(job.q) else SCRATCH.get("q", shape, job.dtype)
    np.multiply(head.q[q0:q1], job.terms.scale * job.unit, out=q, casting="same_kind")
    norms = norms_of(q)
    ones = ones_of(job.sizes.keys, job.dtype)
    return Queries(q, norms, float(norms.max()), BOUNDED[job.dtype.name] * job.unit, ones)


@functools.cache
def ones_of(n: int, dtype: np.dtype[Any]) -> Floats:
    ones = np.ones(n, dtype)
    ones.flags.writeable = False
    return ones


def forward_rows(head: Head, keys: Keys, q0: int, q1: int, runs: tuple[Run, ...]) -> State:
    """Compute the softmax state of queries q0..q1-1 over all their runs; ``o`` is in this thread's scratch memory."""
    job = head.job
    n, width = q1 - q0, job.v.shape[3]
    queries = queries_of(head, q0, q1)
    o = SCRATCH.get("o", (n, width), job.dtype)
    finite = keys.finite and math.isfinite(queries.peak)
    state = State(np.full(n, -np.inf), np.zeros(n), o, finite=finite)
    if (
        keys.finite
        and is_plain(head)
        and queries.peak * max(keys.peaks, default=0.0) <= queries.limit
    ):
        plain_rows(state, head, queries, keys, q0, q1, runs)
        return state
    for run in runs:
        tile = tile_of(head, q0, q1, run)
        if tile is not None:
            absorb(state, head, queries, keys, tile)
    if state.empty:
        o[...] = 0.0
    state.m[state.l == 0] = -np.inf
    return state


def is_plain(head: Head) -> bool:
    """Return whether scores are scale * q k^T without bias, soft cap or dropout, and only positions hide pairs."""
    terms, rows = head.job.terms, head.rows
    dense = (rows.mask, rows.bias, rows.keep)
    features = (
        terms.softcap is not None or terms.dropout_p != 0 or any(x is not None for x in dense)
    )
    return not features


def plain_rows(
    state: State,
    head: Head,
    queries: Queries,
    keys: Keys,
    q0: int,
    q1: int,
    runs: tuple[Run, ...],
) -> None:
    """Compute all runs of a row block if :func:`is_plain` is true and exp needs no subtraction.

    The matrix products evict the interpreter's data from the CPU caches, so each Python statement costs microseconds.
    Reducing the number of statements saved a tenth of the time of a float32 pass.
    """
    q, k, v, ones = queries.q, keys.k, keys.v, queries.ones
    exponential = exponential_of(head.job)
    l, o, empty = np.zeros(state.l.shape), state.o, True
    part = SCRATCH.get("part", o.shape, q.dtype)
    for run in runs:
        start, stop = run.start, run.stop
        e = SCRATCH.get("s", (q1 - q0, stop - start), q.dtype)
        np.matmul(q, k[start:stop].T, out=e)
        exponential(e, out=e)
        if not run.whole:
            tile = tile_of(head, q0, q1, run)
            if tile is None:
                continue
            hide(e, tile, 0.0)
        l += np.matmul(e, ones[: stop - start])
        np.matmul(e, v[start:stop], out=o if empty else part)
        o += 0.0 if empty else part  # zeros are +0
        empty = False
    if empty:
        o[...] = 0.0
    state.m, state.l = np.where(l == 0, -np.inf, 0.0), l


def absorb(state: State, head: Head, queries: Queries, keys: Keys, tile: Tile) -> None:
    """Absorb one tile into the running softmax of the row block (rule SOFT-1)."""
    job = head.job
    e = SCRATCH.get("s", (queries.q.shape[0], tile.stop - tile.start), job.dtype)
    np.matmul(queries.q, keys.k[tile.start : tile.stop].T, out=e)
    if tile.bias is not None:
        e += tile.bias * job.unit  # FWD-1
    if job.terms.softcap is not None:  # FWD-3
        softcap = job.terms.softcap * job.unit
        np.divide(e, softcap, out=e)
        np.tanh(e, out=e)
        e *= job.dtype.type(softcap)
    bounded = bounded_rows(head, queries, keys, tile)
    m = None
    if bounded is None:
        exponential_of(job)(e, out=e)
        hide(e, tile, 0.0)
    else:
        m = shifted_exp(e, tile, bounded, job.unit)
    l = np.matmul(e, queries.ones[: e.shape[1]]).astype(np.float64)
    if tile.keep is not None:
        e *= tile.keep  # FWD-7: o, never l
    o = state.o if state.empty else SCRATCH.get("part", state.o.shape, job.dtype)
    product(e, keys.v[tile.start : tile.stop], tile, keys.finite, o)
    if state.empty:
        o += 0.0  # as in plain_rows
    add(state, m, l, o)


def bounded_rows(head: Head, queries: Queries, keys: Keys, tile: Tile) -> Booleans | None:
    """Return which rows have visible scores so small that exp(s) is safe without subtraction.

    The result is bool [n], or [1] if one value is valid for all rows; None means that all rows have small scores.
    """
    terms, limit = head.job.terms, queries.limit
    if terms.softcap is not None:  # the soft cap bounds the scores of every key, visible or hidden
        return None if terms.softcap * head.job.unit <= limit else np.array([False])
    if tile.bias is not None:
        return np.array([False])
    # A row within the limit over all keys is also within it over its visible keys, so its shift is 0 either way.
    if queries.peak * keys.peak(tile, head.job.sizes.granule) <= limit:  # False for NaN
        return None
    if tile.hidden is None:
        return np.array([False])
    norms = keys.norms[tile.start : tile.stop]
    seen = np.where(tile.hidden, norms.dtype.type(0), norms)
    bounded: Booleans = queries.norms * seen.max(axis=1) <= limit
    return None if bounded.all() else bounded


def hide(x: Floats, tile: Tile, value: float) -> None:
    if tile.hidden is not None:
        np.copyto(x[:, tile.first :], value, where=tile.hidden[:, tile.first :])


def shifted_exp(s: Floats, tile: Tile, bounded: Booleans, unit: float) -> Array:
    """Replace s by exp(s - m), with 0 at hidden pairs, and return m [n].

    m is 0 in the rows that ``bounded`` marks; in other rows m is the maximum over the visible keys. The scores s
    are multiplied by ``unit``; the returned m is not.
    """
    hide(s, tile, -np.inf)
    m = np.where(bounded, s.dtype.type(0), s.max(axis=1))
    shift = np.where(np.isneginf(m), m.dtype.type(0), m)
    s -= shift[:, None]
    hide(s, tile, 0.0)  # because exp of -inf is slow
    if unit == 1:
        np.exp(s, out=s)
    else:
        # exp2 is slow where it underflows, which can happen in rows with a shift.
        if bounded.any():
            np.exp2(s, out=s, where=bounded[:, None])
        shifted = ~bounded[:, None]
        np.divide(s, unit, out=s, where=shifted)
        np.exp(s, out=s, where=shifted)
    hide(s, tile, 0.0)
    return m.astype(np.float64) / unit


def exponential_of(job: Job) -> Callable[..., Floats]:
    """Return the function for exp of scores that are multiplied by ``Job.unit``: NumPy's exp or exp2."""
    return np.exp if job.unit == 1 else np.exp2


def add(state: State, m: Array | None, l: Array, o: Floats) -> None:
    """Merge a tile's (m, l, o) into the state; m None means 0 in every row."""
    if state.empty:
        state.m, state.l = np.zeros(l.shape) if m is None else m, l
    elif m is None and state.at_zero:
        np.add(state.l, l, out=state.l)
        np.add(state.o, o, out=state.o)
    else:
        # A row that has seen no key yet is empty, whatever its m is (SOFT-2).
        old_m = np.where(state.l == 0, -np.inf, state.m)
        new_m = np.where(l == 0, -np.inf, 0.0 if m is None else m)
        both = np.maximum(old_m, new_m)
        shift = np.where(np.isneginf(both), 0.0, both)
        old, new = np.exp(old_m - shift), np.exp(new_m - shift)
        state.m, state.l = both, old * state.l + new * l
        state.o *= old.astype(o.dtype)[:, None]
        o *= new.astype(o.dtype)[:, None]
        state.o += o
    state.at_zero = state.at_zero and m is None
    state.empty = False
