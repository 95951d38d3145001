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

from ringspec.fast.job import Floats, Head, Tile, norms_of, product, tile_of
from ringspec.fast.plan import Run
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


def forward_rows(head: Head, key_norms: Floats, q0: int, q1: int, runs: tuple[Run, ...]) -> State:
    """The softmax state of queries q0..q1-1 over all their runs; ``o`` is scratch of this thread.

    ``key_norms`` [n_k] holds every |k_j|.
    """
    job = head.job
    n, width = q1 - q0, job.v.shape[3]
    q = SCRATCH.get("q", (n, job.q.shape[3]), job.dtype)
    np.multiply(head.q[q0:q1], job.terms.scale, out=q, casting="same_kind")
    query_norms = norms_of(q)
    o = SCRATCH.get("o", (n, width), job.dtype)
    state = State(np.full(n, -np.inf), np.zeros(n), o)
    for run in runs:
        tile = tile_of(head, q0, q1, run)
        if tile is not None:
            absorb(state, head, q, tile, query_norms, key_norms[run.start : run.stop])
    if state.empty:
        o[...] = 0.0
    state.m[state.l == 0] = -np.inf
    return state


def absorb(
    state: State, head: Head, q: Floats, tile: Tile, query_norms: Floats, key_norms: Floats
) -> None:
    """One tile into the state (SOFT-1)."""
    job = head.job
    e = SCRATCH.get("s", (q.shape[0], tile.stop - tile.start), job.dtype)
    np.matmul(q, head.k[tile.start : tile.stop].T, out=e)
    if tile.bias is not None:
        e += tile.bias  # FWD-1
    if job.terms.softcap is not None:  # FWD-3
        np.divide(e, job.terms.softcap, out=e)
        np.tanh(e, out=e)
        e *= job.dtype.type(job.terms.softcap)
    bounded = bounded_rows(head, tile, query_norms, key_norms)
    m = None
    if bounded.all():
        np.exp(e, out=e)
        hide(e, tile, 0.0)
    else:
        m = shifted_exp(e, tile, bounded)
    ones = SCRATCH.get("ones", (e.shape[1],), job.dtype)
    ones[...] = 1.0
    l = (e @ ones).astype(np.float64)
    if tile.keep is not None:
        e *= tile.keep  # FWD-7: o, never l
    o = state.o if state.empty else SCRATCH.get("part", state.o.shape, job.dtype)
    product(e, head.v[tile.start : tile.stop], tile, job.finite, o)
    add(state, m, l, o)


def bounded_rows(head: Head, tile: Tile, query_norms: Floats, key_norms: Floats) -> Booleans:
    """[n], or [1] for all: rows of which no visible score is so large that exp needs a shift."""
    terms, limit = head.job.terms, BOUNDED[head.job.dtype.name]
    if terms.softcap is not None:
        return np.array([terms.softcap <= limit])  # true of every key, seen or not
    if tile.bias is not None:
        return np.array([False])
    all_keys = np.array([query_norms.max() * key_norms.max() <= limit])  # NaN is not
    if tile.hidden is None or all_keys[0]:  # then so is each row's bound over fewer keys
        return all_keys
    seen = np.where(tile.hidden, key_norms.dtype.type(0), key_norms)
    bounded: Booleans = query_norms * seen.max(axis=1) <= limit
    return bounded


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
        state.l += l
        state.o += o
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
