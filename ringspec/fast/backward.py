"""The backward pass of one key head: a loop over chunks of keys, row blocks and runs.

In the plain case -lse and -delta ride in the products as one more column (q | -lse times k | 1, dy | -delta
times v | 1), so the elementwise passes over a tile are exp and one multiplication: K = 129 costs less
than one hundredth more than 128.

A task owns its keys' dk and dv, and a dq of its own where several tasks share the rows; these are
added up in a fixed order. So nothing is atomic and no result depends on the threads.

Source: Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691 (algorithm 2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspec.fast.forward import hide
from ringspec.fast.job import Floats, Head, Job, Tile, head_of, product, tile_of
from ringspec.fast.plan import Run
from ringspec.fast.threads import SCRATCH
from ringspec.spec.block_attention import add_bias_gradient
from ringspec.spec.problem import Array

# exp(-NEVER) is 0, and NEVER is finite: the lse of a row without keys, whose p is 0 (BWD-10).
NEVER = 1e30


@dataclass(frozen=True)
class Seeds:
    """dy [B, H, n_q, Dv] in any float type; lse and delta [B, H, n_q] in float64."""

    dy: Floats
    lse: Array
    delta: Array


@dataclass(frozen=True)
class Shares:
    """Where gradients are added: dq [parts, B, H, n_q, D] without the factor scale, dk, dv of k's and v's
    shapes, in the job's type; dbias in float64, of the shape of the rows' bias."""

    dq: Floats
    dk: Floats
    dv: Floats
    dbias: Array | None


@dataclass(frozen=True)
class RowBlock:
    """A row block's operands: q | -lse and dy | -delta, and its share of dq."""

    q0: int
    q1: int
    q_lse: Floats
    dy_delta: Floats
    dq: Floats


def chunks(job: Job) -> list[tuple[int, int]]:
    n, size = job.k.shape[2], job.sizes.chunk
    return [(first, min(first + size, n)) for first in range(0, n, size)]


def backward_keys(
    job: Job, seeds: Seeds, shares: Shares, batch: int, key_head: int, part: int
) -> None:
    """All gradients of one key head's chunks part, part + parts, part + 2 parts, ..."""
    for first, stop in chunks(job)[part :: shares.dq.shape[0]]:
        k_one = with_column("k", job.k[batch, key_head, first:stop], 1.0, job.dtype)
        v_one = with_column("v", job.v[batch, key_head, first:stop], 1.0, job.dtype)
        group = job.terms.group
        for number in range(key_head * group, (key_head + 1) * group):
            head = head_of(job, batch, number)
            for (q0, q1), runs in zip(job.row_blocks(), job.runs_of(batch), strict=True):
                here = [run for run in runs if first <= run.start < stop]
                if here:
                    block = row_block(head, seeds, shares.dq[part, batch, number], q0, q1)
                    for run in here:
                        backward_run(head, block, shares, k_one, v_one, first, run)


def with_column(name: str, x: Floats, column: Array | float, dtype: np.dtype) -> Floats:
    """x [n, D] with one more column, in this thread's scratch."""
    wide = SCRATCH.get(name + " wide", (x.shape[0], x.shape[1] + 1), dtype)
    wide[:, :-1] = x
    wide[:, -1] = column
    return wide


def row_block(head: Head, seeds: Seeds, dq: Floats, q0: int, q1: int) -> RowBlock:
    """The operands of rows q0..q1-1, q times scale."""
    job, at = head.job, (head.batch, head.head, slice(q0, q1))
    lse = seeds.lse[at]
    q_lse = with_column("q", head.q[q0:q1], np.where(np.isneginf(lse), -NEVER, -lse), job.dtype)
    np.multiply(head.q[q0:q1], job.terms.scale, out=q_lse[:, :-1], casting="same_kind")
    dy_delta = with_column("dy", seeds.dy[at], -seeds.delta[at], job.dtype)
    return RowBlock(q0, q1, q_lse, dy_delta, dq[q0:q1])


def backward_run(
    head: Head,
    block: RowBlock,
    shares: Shares,
    k_one: Floats,
    v_one: Floats,
    first: int,
    run: Run,
) -> None:
    """One tile's shares of dq, dk, dv and dbias (BWD-2 to BWD-8)."""
    job = head.job
    tile = tile_of(head, block.q0, block.q1, run)
    if tile is None:
        return
    keys = slice(run.start - first, run.stop - first)
    k_one, v_one = k_one[keys], v_one[keys]
    plain = tile.keep is None and tile.bias is None and job.terms.softcap is None
    differentiate = plain_tile if plain else featured_tile
    p, dz = differentiate(head, block, k_one, v_one, tile)
    key_head = head.head // job.terms.group
    into = (head.batch, key_head, slice(run.start, run.stop))
    part = SCRATCH.get("part dv", (run.stop - run.start, job.v.shape[3]), job.dtype)
    shares.dv[into] += np.matmul(p.T, block.dy_delta[:, :-1], out=part)  # BWD-7
    part = SCRATCH.get("part dk", (run.stop - run.start, job.k.shape[3]), job.dtype)
    shares.dk[into] += np.matmul(dz.T, block.q_lse[:, :-1], out=part)  # BWD-6: q holds scale
    part = SCRATCH.get("part dq", block.dq.shape, job.dtype)
    block.dq[...] += product(dz, k_one[:, :-1], tile, job.finite, part)  # BWD-5
    if shares.dbias is not None:
        columns = head.columns.slice(run.start, run.stop)
        one_head = bias_of(shares.dbias, head)
        add_bias_gradient(one_head, dz[None, None].astype(np.float64), block.q0, block.q1, columns)


def bias_of(dbias: Array, head: Head) -> Array:
    """The entries of dbias that belong to one head, a view."""
    batch = head.batch if dbias.shape[0] > 1 else 0
    number = head.head if dbias.shape[1] > 1 else 0
    return dbias[batch : batch + 1, number : number + 1]


def plain_tile(
    head: Head, block: RowBlock, k_one: Floats, v_one: Floats, tile: Tile
) -> tuple[Floats, Floats]:
    """p and dz of a tile without soft cap, dropout and bias: two products, exp, one multiplication."""
    shape = (block.q1 - block.q0, tile.stop - tile.start)
    p = SCRATCH.get("s", shape, head.job.dtype)
    np.matmul(block.q_lse, k_one.T, out=p)
    hide(p, tile, 0.0)
    np.exp(p, out=p)
    hide(p, tile, 0.0)
    dz = SCRATCH.get("dp", shape, head.job.dtype)
    np.matmul(block.dy_delta, v_one.T, out=dz)
    dz *= p
    hide(dz, tile, 0.0)
    return p, dz


def featured_tile(
    head: Head, block: RowBlock, k_one: Floats, v_one: Floats, tile: Tile
) -> tuple[Floats, Floats]:
    """p times keep, and dz, with soft cap, dropout and bias."""
    shape, job = (block.q1 - block.q0, tile.stop - tile.start), head.job
    p = SCRATCH.get("s", shape, job.dtype)
    np.matmul(block.q_lse[:, :-1], k_one[:, :-1].T, out=p)
    if tile.bias is not None:
        p += tile.bias
    t = None
    if job.terms.softcap is not None:
        np.divide(p, job.terms.softcap, out=p)
        t = np.tanh(p, out=SCRATCH.get("t", shape, job.dtype))
        np.multiply(t, job.dtype.type(job.terms.softcap), out=p)
    p += block.q_lse[:, -1:]
    hide(p, tile, 0.0)
    np.exp(p, out=p)
    hide(p, tile, 0.0)
    dz = SCRATCH.get("dp", shape, job.dtype)
    np.matmul(block.dy_delta[:, :-1], v_one[:, :-1].T, out=dz)
    if tile.keep is not None:
        dz *= tile.keep  # BWD-2
    dz += block.dy_delta[:, -1:]
    dz *= p  # BWD-3
    if t is not None:
        np.square(t, out=t)
        np.subtract(1.0, t, out=t)
        dz *= t  # BWD-4
    hide(dz, tile, 0.0)
    if tile.keep is not None:
        p *= tile.keep
    return p, dz
