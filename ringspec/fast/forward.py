"""The forward pass of one row block of one head: a loop over its runs of keys.

Softmax needs no maximum where no score can leave the range in which exp neither overflows nor gives
a subnormal. By Cauchy and Schwarz |s_ij| <= |q_i| max |k_j|; where that is at most :data:`BOUNDED`, a
tile takes exp(s) as it is: one pass over the scores where the textbook has three (maximum, difference,
exp). Elsewhere a row's shift is its maximum. A row must not depend on keys that it does not see, so in a mixed
tile the bound of each row is over its visible keys alone, and rows within it keep the shift 0 beside rows that
are not: subtracting 0 and multiplying by exp(0) change no bit.

Sources: Milakov and Gimelshein, https://arxiv.org/abs/1805.02867; Dao, FlashAttention-2,
https://arxiv.org/abs/2307.08691 (algorithm 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspec.fast.job import Floats, Head, Job, Tile, norms_of, product, tile_of
from ringspec.fast.plan import Run, starts
from ringspec.fast.threads import SCRATCH
from ringspec.spec.problem import Array, Booleans

# exp(-BOUNDED) is a normal number with room to spare, and 2**40 times exp(BOUNDED) is finite.
BOUNDED = {"float32": 40.0, "float64": 300.0}


@dataclass
class State:
    """A row block's running softmax: ``m``, ``l`` [n] in float64, ``o`` [n, Dv] in the job's type.

    ``at_zero``: so far every tile took exp(s) without a shift, so m is 0 in every row.
    """

    m: Array
    l: Array
    o: Floats
    at_zero: bool = True
    empty: bool = True


@dataclass(frozen=True)
class Keys:
    """All keys of one key head: k [n, D] and v [n, Dv] in the job's type, every |k_j| [n], and the greatest
    of these in each granule (infinity where one is NaN)."""

    k: Floats
    v: Floats
    norms: Floats
    peaks: list[float]

    def peak(self, tile: Tile, granule: int) -> float:
        return max(self.peaks[tile.start // granule : -(-tile.stop // granule)])


def keys_of(job: Job, batch: int, key_head: int) -> Keys:
    at = batch, key_head
    k, v = typed(job, job.k, at), typed(job, job.v, at)

    def lengths() -> tuple[Floats, list[float]]:
        norms = norms_of(k)
        peaks = np.maximum.reduceat(norms, starts(norms.size, job.sizes.granule))
        return norms, np.where(np.isnan(peaks), np.inf, peaks).tolist()

    key = "lengths", job.dtype.name, job.sizes.granule, at
    return Keys(k, v, *job.kept.get((job.k,), key, lengths))


def typed(job: Job, x: Floats, at: tuple[int, int]) -> Floats:
    """One head of x [B, H, n, D] in the job's type."""
    if x.dtype == job.dtype:
        return np.ascontiguousarray(x[at])
    key = "typed", job.dtype.name, at
    return job.kept.get((x,), key, lambda: np.ascontiguousarray(x[at], job.dtype))


@dataclass(frozen=True)
class Queries:
    """A row block's queries times scale, every |q_i|, and the greatest.

    ``limit`` is that of :data:`BOUNDED`, ``ones`` as many as a run has keys at most.
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
    job = head.job
    q = np.empty((q1 - q0, job.q.shape[3]), job.dtype)
    np.multiply(head.q[q0:q1], job.terms.scale, out=q, casting="same_kind")
    norms = norms_of(q)
    ones = np.ones(job.sizes.keys, job.dtype)
    return Queries(q, norms, float(norms.max()), BOUNDED[job.dtype.name], ones)


def forward_rows(head: Head, keys: Keys, q0: int, q1: int, runs: tuple[Run, ...]) -> State:
    """The softmax state of queries q0..q1-1 over all their runs; ``o`` is scratch of this thread."""
    job = head.job
    n, width = q1 - q0, job.v.shape[3]
    queries = queries_of(head, q0, q1)
    o = SCRATCH.get("o", (n, width), job.dtype)
    state = State(np.full(n, -np.inf), np.zeros(n), o)
    if is_plain(head) and queries.peak * max(keys.peaks, default=0.0) <= queries.limit:
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
    """Whether scores are q k^T, nothing but positions hides any, and 0 times what is hidden is 0."""
    terms, rows = head.job.terms, head.rows
    dense = (rows.mask, rows.bias, rows.keep)
    features = (
        terms.softcap is not None or terms.dropout_p != 0 or any(x is not None for x in dense)
    )
    return head.job.finite and not features


def plain_rows(
    state: State,
    head: Head,
    queries: Queries,
    keys: Keys,
    q0: int,
    q1: int,
    runs: tuple[Run, ...],
) -> None:
    """All runs of a row block without features, of scores for which exp needs no shift.

    The products leave nothing of the interpreter's own in the caches, so that each step of Python costs
    microseconds here: to take few of them was worth a tenth of a pass in float32.
    """
    q, k, v, ones = queries.q, keys.k, keys.v, queries.ones
    l, o = np.zeros(state.l.shape), state.o
    o[...] = 0.0
    part = SCRATCH.get("part", o.shape, q.dtype)
    for run in runs:
        start, stop = run.start, run.stop
        e = SCRATCH.get("s", (q1 - q0, stop - start), q.dtype)
        np.matmul(q, k[start:stop].T, out=e)
        np.exp(e, out=e)
        if not run.whole:
            tile = tile_of(head, q0, q1, run)
            if tile is None:
                continue
            hide(e, tile, 0.0)
        l += np.matmul(e, ones[: stop - start])
        np.matmul(e, v[start:stop], out=part)
        o += part
    state.m, state.l = np.where(l == 0, -np.inf, 0.0), l


def absorb(state: State, head: Head, queries: Queries, keys: Keys, tile: Tile) -> None:
    """One tile into the state (SOFT-1)."""
    job = head.job
    e = SCRATCH.get("s", (queries.q.shape[0], tile.stop - tile.start), job.dtype)
    np.matmul(queries.q, keys.k[tile.start : tile.stop].T, out=e)
    if tile.bias is not None:
        e += tile.bias  # FWD-1
    if job.terms.softcap is not None:  # FWD-3
        np.divide(e, job.terms.softcap, out=e)
        np.tanh(e, out=e)
        e *= job.dtype.type(job.terms.softcap)
    bounded = bounded_rows(head, queries, keys, tile)
    m = None
    if bounded is None:
        np.exp(e, out=e)
        hide(e, tile, 0.0)
    else:
        m = shifted_exp(e, tile, bounded)
    l = np.matmul(e, queries.ones[: e.shape[1]]).astype(np.float64)
    if tile.keep is not None:
        e *= tile.keep  # FWD-7: o, never l
    o = state.o if state.empty else SCRATCH.get("part", state.o.shape, job.dtype)
    product(e, keys.v[tile.start : tile.stop], tile, job.finite, o)
    if state.empty:
        o += 0.0  # zeros are +0, as in plain_rows
    add(state, m, l, o)


def bounded_rows(head: Head, queries: Queries, keys: Keys, tile: Tile) -> Booleans | None:
    """Rows of which no visible score is so large that exp needs a shift: [n], or [1] for all of them;
    None where that is every row."""
    terms, limit = head.job.terms, queries.limit
    if terms.softcap is not None:  # true of every key, seen or not
        return None if terms.softcap <= limit else np.array([False])
    if tile.bias is not None:
        return np.array([False])
    # A row within the limit over all keys is so over those that it sees: its shift is 0 either way.
    if queries.peak * keys.peak(tile, head.job.sizes.granule) <= limit:  # NaN is not
        return None
    if tile.hidden is None:
        return np.array([False])
    norms = keys.norms[tile.start : tile.stop]
    seen = np.where(tile.hidden, norms.dtype.type(0), norms)
    bounded: Booleans = queries.norms * seen.max(axis=1) <= limit
    return None if bounded.all() else bounded


def hide(x: Floats, tile: Tile, value: float) -> None:
    if tile.hidden is not None:
        np.copyto(x, value, where=tile.hidden)


def shifted_exp(s: Floats, tile: Tile, bounded: Booleans) -> Array:
    """exp(s - m) in place of s, 0 at hidden pairs; m [n] is 0 in bounded rows, and in others the
    maximum over the visible keys."""
    hide(s, tile, -np.inf)
    m = np.where(bounded, s.dtype.type(0), s.max(axis=1))
    shift = np.where(np.isneginf(m), m.dtype.type(0), m)
    s -= shift[:, None]
    hide(s, tile, 0.0)  # exp of -inf is slow
    np.exp(s, out=s)
    hide(s, tile, 0.0)
    return m.astype(np.float64)


def add(state: State, m: Array | None, l: Array, o: Floats) -> None:
    """Merge a tile's (m, l, o) into the state; m None means 0 in every row."""
    if state.empty:
        state.m, state.l = np.zeros(l.shape) if m is None else m, l
    elif m is None and state.at_zero:
        np.add(state.l, l, out=state.l)
        np.add(state.o, o, out=state.o)
    else:
        # A row that has seen no key yet is empty, whatever its m says (SOFT-2).
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
