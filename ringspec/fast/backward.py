"""The backward pass of one key head.

A row block is an interval of queries, a run an interval of keys, and a tile all pairs of a row block and a run
(:mod:`ringspec.fast.plan`). A chunk consists of one or more runs. The pass is a loop over the chunks, over the query
heads that share the key head, and over the tiles.

Let ``x | c`` mean the matrix x with a column c appended, and row_term = delta - dlse. The product of q | -lse and k | 1
is s - lse, and the product of dy | -row_term and v | 1 is dp - row_term. Without soft cap, dropout and bias, the
elementwise work on a tile is then only exp and one multiplication. A product over 129 columns costs less than 1 % more
than a product over 128 columns.

A :class:`~ringspec.fast.job.Job` holds q, k and v, the mask and the tiles. The job's type, float64 or float32, is the
type of the computation.

Chunks are divided among tasks, which run on threads. Each task adds only to dk and dv of the keys that it owns. If several tasks
add to dq of the same rows, each has its own copy of dq, and the copies are added in a fixed order. No update needs to
be atomic, and no result depends on the number of threads.

Source: Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691 (algorithm 2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringspec.fast.forward import hide
from ringspec.fast.job import Floats, Head, Job, Tile, head_of, is_finite, product, tile_of
from ringspec.fast.threads import SCRATCH
from ringspec.problem.model import Array
from ringspec.spec.dense_backward import add_bias_gradient

# In a row without keys -NEVER replaces lse: NEVER is finite, and exp(-NEVER) is 0, so p is 0 (BWD-10).
NEVER = 1e30


@dataclass(frozen=True)
class Seeds:
    """The inputs of the backward pass besides q, k and v.

    ``dy`` [B, H, n_q, Dv] in any float type; ``lse`` and ``row_term`` = delta - dlse, [B, H, n_q] in float64.
    """

    dy: Floats
    lse: Array
    row_term: Array


@dataclass(frozen=True)
class Shares:
    """The accumulators of the gradients.

    ``dq``: for each of the tasks that share the keys of a head, an array [B, H, n_q, D] that is not yet multiplied by
    the softmax scale. ``dk`` and ``dv`` have the shapes of k and v. dq, dk and dv have the job's type. ``dbias`` is
    float64, in the shape of the bias.
    """

    dq: list[Floats]
    dk: Floats
    dv: Floats
    dbias: Array | None


@dataclass(frozen=True)
class Operands:
    """The operands of the products of one key head and its G query heads, in the job's type.

    ``q_lse``: (q times scale) | -lse [G, n_q, D + 1]. ``dy_delta``: dy | -row_term [G, n_q, Dv + 1]. ``k_one``: k | 1
    [n_k, D + 1]. ``v_one``: v | 1 [n_k, Dv + 1]. ``finite`` is False if k was searched for NaN and infinity and
    contains either.
    """

    q_lse: Floats
    dy_delta: Floats
    k_one: Floats
    v_one: Floats
    finite: bool


def operands_of(job: Job, seeds: Seeds, batch: int, key_head: int) -> Operands:
    """Build the operands of one key head.

    They are built once and cached, because a ring uses the same queries with the keys of every worker.
    """
    group, scale = job.terms.group, job.terms.scale
    heads = slice(key_head * group, (key_head + 1) * group)  # FWD-10

    def q_lse() -> Floats:
        lse = seeds.lse[batch, heads]
        made = wide(job.q[batch, heads], np.where(np.isneginf(lse), -NEVER, -lse), job)
        np.multiply(made[..., :-1], job.dtype.type(scale), out=made[..., :-1])
        return made

    def dy_delta() -> Floats:
        return wide(seeds.dy[batch, heads], -seeds.row_term[batch, heads], job)

    def kept(name: str, arrays: tuple[Floats, ...], make: Callable[[], Any]) -> Any:
        return job.kept.get(arrays, (name, job.dtype.name, scale, group, batch, key_head), make)

    k_one = kept("k | 1", (job.k,), lambda: wide(job.k[batch, key_head], 1.0, job))
    return Operands(
        kept("q | -lse", (job.q, seeds.lse), q_lse),
        kept("dy | -delta", (seeds.dy, seeds.row_term), dy_delta),
        k_one,
        kept("v | 1", (job.v,), lambda: wide(job.v[batch, key_head], 1.0, job)),
        not job.look or kept("k is finite", (job.k,), lambda: is_finite(k_one)),
    )


def wide(x: Floats, column: Array | float, job: Job) -> Floats:
    """Return x [..., D] with ``column`` appended, [..., D + 1], in the job's type."""
    made = np.empty((*x.shape[:-1], x.shape[-1] + 1), job.dtype)
    made[..., :-1] = x
    made[..., -1] = column
    return made


def chunks(job: Job) -> list[tuple[int, int]]:
    n, size = job.k.shape[2], job.sizes.chunk
    return [(first, min(first + size, n)) for first in range(0, n, size)]


def backward_keys(
    job: Job, operands: Operands, shares: Shares, batch: int, key_head: int, part: int
) -> bool:
    """Run task number ``part`` of one key head: add the gradients of its chunks; return whether dk and dv are finite.

    P = ``len(shares.dq)`` tasks share the chunks of a head; this one computes chunks part, part + P, part + 2 P, and so
    on. First it sets its accumulators to 0: ``shares.dq[part]`` of its head, and dk and dv of its chunks.
    """
    group = job.terms.group
    numbers = range(key_head * group, (key_head + 1) * group)
    heads = [head_of(job, batch, number) for number in numbers]
    shares.dq[part][batch, numbers.start : numbers.stop] = 0.0
    finite = True
    for first, stop in chunks(job)[part :: len(shares.dq)]:
        dk, dv = (x[batch, key_head, first:stop] for x in (shares.dk, shares.dv))
        dk[...], dv[...] = 0.0, 0.0
        for head in heads:
            for (q0, q1), runs in zip(job.row_blocks(), job.runs_of(batch), strict=True):
                for run in runs:
                    if first <= run.start < stop:
                        tile = tile_of(head, q0, q1, run)
                        if tile is not None:
                            backward_tile(head, operands, shares, q0, q1, tile, part)
        finite = finite and is_finite(dk) and is_finite(dv)
    return finite


def backward_tile(
    head: Head, operands: Operands, shares: Shares, q0: int, q1: int, tile: Tile, part: int
) -> None:
    """Add one tile's contributions to dq, dk, dv and dbias (rules BWD-2 to BWD-8)."""
    job, rows, keys = head.job, slice(q0, q1), slice(tile.start, tile.stop)
    key_head, of_group = divmod(head.head, job.terms.group)
    of_rows, of_keys = (head.batch, head.head, rows), (head.batch, key_head, keys)
    q_lse, dy_delta = operands.q_lse[of_group, rows], operands.dy_delta[of_group, rows]
    k_one, v_one = operands.k_one[keys], operands.v_one[keys]
    plain = tile.keep is None and tile.bias is None and job.terms.softcap is None
    differentiate = plain_tile if plain else featured_tile
    p, dz = differentiate(job, q_lse, dy_delta, k_one, v_one, tile)
    one = SCRATCH.get("part", (tile.stop - tile.start, job.v.shape[3]), job.dtype)
    dv = shares.dv[of_keys]
    np.add(dv, np.matmul(p.T, dy_delta[:, :-1], out=one), out=dv)  # BWD-7
    one = SCRATCH.get("part", (tile.stop - tile.start, job.k.shape[3]), job.dtype)
    dk = shares.dk[of_keys]
    np.add(dk, np.matmul(dz.T, q_lse[:, :-1], out=one), out=dk)  # BWD-6: q includes the scale
    one = SCRATCH.get("part", (q1 - q0, job.q.shape[3]), job.dtype)
    dq = shares.dq[part][of_rows]
    np.add(dq, product(dz, k_one[:, :-1], tile, operands.finite, one), out=dq)  # BWD-5
    if shares.dbias is not None:
        columns = head.columns.slice(tile.start, tile.stop)
        one_head = bias_of(shares.dbias, head)
        add_bias_gradient(one_head, dz[None, None].astype(np.float64), q0, q1, columns)


def bias_of(dbias: Array, head: Head) -> Array:
    """Return a view of the entries of dbias that belong to one head."""
    batch = head.batch if dbias.shape[0] > 1 else 0
    number = head.head if dbias.shape[1] > 1 else 0
    return dbias[batch : batch + 1, number : number + 1]


def plain_tile(
    job: Job, q_lse: Floats, dy_delta: Floats, k_one: Floats, v_one: Floats, tile: Tile
) -> tuple[Floats, Floats]:
    """Compute P and the gradient dz of the scores of a tile, without soft cap, dropout and bias."""
    shape = (q_lse.shape[0], k_one.shape[0])
    p = SCRATCH.get("s", shape, job.dtype)
    np.matmul(q_lse, k_one.T, out=p)
    np.exp(p, out=p)
    hide(p, tile, 0.0)
    dz = SCRATCH.get("dp", shape, job.dtype)
    np.matmul(dy_delta, v_one.T, out=dz)
    np.multiply(dz, p, out=dz)
    hide(dz, tile, 0.0)
    return p, dz


def featured_tile(
    job: Job, q_lse: Floats, dy_delta: Floats, k_one: Floats, v_one: Floats, tile: Tile
) -> tuple[Floats, Floats]:
    """Compute P times the dropout factor, and dz, the gradient of the scores before the soft cap, with all features."""
    shape = (q_lse.shape[0], k_one.shape[0])
    p = SCRATCH.get("s", shape, job.dtype)
    np.matmul(q_lse[:, :-1], k_one[:, :-1].T, out=p)
    if tile.bias is not None:
        p += tile.bias
    t = None
    if job.terms.softcap is not None:
        np.divide(p, job.terms.softcap, out=p)
        t = np.tanh(p, out=SCRATCH.get("t", shape, job.dtype))
        np.multiply(t, job.dtype.type(job.terms.softcap), out=p)
    p += q_lse[:, -1:]
    hide(p, tile, 0.0)
    np.exp(p, out=p)
    hide(p, tile, 0.0)
    dz = SCRATCH.get("dp", shape, job.dtype)
    np.matmul(dy_delta[:, :-1], v_one[:, :-1].T, out=dz)
    if tile.keep is not None:
        dz *= tile.keep  # BWD-2
    dz += dy_delta[:, -1:]
    dz *= p  # BWD-3
    if t is not None:
        np.square(t, out=t)
        np.subtract(1.0, t, out=t)
        dz *= t  # BWD-4
    hide(dz, tile, 0.0)
    if tile.keep is not None:
        p *= tile.keep
    return p, dz
