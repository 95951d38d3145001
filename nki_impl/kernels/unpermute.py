"""Redistribute the rows of a striped sequence to the contiguous layout.

Each of W ranks holds s rows, one for each token. Ring position r holds tokens t * W + r and must receive tokens
r * s + j, for 0 <= t, j < s. These tokens are in the *window* of position r: rows floor(r * s / W) up to
ceil((r + 1) * s / W) of every position. Each rank sends window r of its rows to position r, which interleaves the
windows that it receives. A single all_to_all moves all of them.

If W divides s, the windows do not overlap. Only the rows that must move are sent, a fraction (W - 1) / W of all rows,
and no rank needs to know its position. Otherwise the interleaved windows begin with a few tokens of the previous rank,
which differ in number from rank to rank: the device looks this number up in a table.

The interface is that of
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/library/api/ring-attention-unpermute.html
"""

from __future__ import annotations

from typing import Any

from nki_impl.kernels.checks import check_groups
from nki_impl.kernels.ring import Ring, open_ring, owner_of, travelling_memory, wait_for_both_cores
from nki_impl.kernels.tiles import Tensor
from nki_impl.lang import ncc, nisa, nki, nl


@nki.jit  # type: ignore[untyped-decorator]
def ring_attention_unpermute(x: Tensor, replica_groups: Any = None, num_workers: int = 1) -> Tensor:
    """Return this rank's rows in the contiguous layout, [bs, s, d], from its rows x [bs, s, d] in the striped layout.

    x has any dtype; values are moved bit for bit. s, the length on this rank, is the same on all ranks. AWS's kernel
    requires that num_workers divides s; this one does not. ``replica_groups`` is as in the forward kernel. Invalid arguments raise AssertionError.

    >>> import numpy as np
    >>> from nki_impl.sim.machine.launch import run_ranks
    >>> striped = np.array([[0, 2], [1, 3]], np.int32).reshape(2, 1, 2, 1)
    >>> run = run_ranks(ring_attention_unpermute, [{"x": x, "num_workers": 2} for x in striped])
    >>> np.stack(run.results).reshape(2, 2).tolist()
    [[0, 1], [2, 3]]
    """
    bs, s, d = x.shape
    check_groups(replica_groups, num_workers)
    ring = open_ring(replica_groups, num_workers)
    length = window_length(s, num_workers)
    shape = (num_workers, bs, length, d)
    memory = travelling_memory(ring)
    sent = nl.ndarray(shape, dtype=x.dtype, buffer=memory, name="unpermute_sent")
    arrived = nl.ndarray(shape, dtype=x.dtype, buffer=memory, name="unpermute_arrived")
    out = nl.ndarray((bs, s, d), dtype=x.dtype, buffer=nl.shared_hbm)

    for target in range(ring.core, num_workers, ring.cores):
        start = window_start(target, s, num_workers)
        nisa.dma_copy(dst=sent[target], src=x[:, start : start + length, :])
    wait_for_both_cores(ring, (sent,))
    ncc.all_to_all(srcs=[sent], dsts=[arrived], replica_group=ring.group, collective_dim=0)
    if s % num_workers == 0:
        interleave(ring, arrived, out, ring.core, ring.cores)
    elif ring.core == 0:
        tokens = nl.ndarray((bs, num_workers * length, d), dtype=x.dtype, buffer=nl.private_hbm)
        interleave(ring, arrived, tokens, 0, 1)
        cut(ring, tokens, out)
    return out


def window_length(s: int, workers: int) -> int:
    """Return the number of rows of a window: the largest of all positions."""
    longest = 0
    for position in range(workers):
        end = ((position + 1) * s + workers - 1) // workers
        longest = max(longest, end - position * s // workers)
    return longest


def window_start(position: int, s: int, workers: int) -> int:
    """Return the first row of the window of a position; a window that would end after row s is moved back."""
    return min(position * s // workers, s - window_length(s, workers))


def interleave(ring: Ring, arrived: Tensor, tokens: Tensor, first: int, step: int) -> None:
    """Write the rows from position j, for j = first, first + step, .., to every W-th row of ``tokens`` from row j on."""
    rows = tokens.reshape_dim(1, (arrived.shape[2], ring.workers))
    for source in range(first, ring.workers, step):
        nisa.dma_copy(dst=rows[:, :, source, :], src=arrived[source])


def cut(ring: Ring, tokens: Tensor, out: Tensor) -> None:
    """Copy the tokens of this rank to ``out`` [bs, s, d]; ``tokens`` [bs, n, d] has a few before and after them."""
    s = out.shape[1]
    size = len(ring.ranks) * ring.workers
    surplus = nl.ndarray((1, size), dtype=nl.int32, buffer=nl.sbuf)
    for group in ring.ranks:
        for position in range(ring.workers):
            rank = group[position]
            before = position * s - window_start(position, s, ring.workers) * ring.workers
            nisa.memset(dst=surplus[:, rank : rank + 1], value=before)
    table = nl.ndarray((size, 1), dtype=nl.int32, buffer=nl.private_hbm)
    nisa.dma_copy(dst=table, src=surplus)
    mine = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=mine, src=table.select(0, owner_of(ring, 0)).reshape_dim(0, (1, 1)))
    bs, n, d = tokens.shape
    own = tokens.ap(pattern=[[n * d, bs], [d, s], [1, d]], scalar_offset=mine, indirect_dim=1)
    nisa.dma_copy(dst=out, src=own)
