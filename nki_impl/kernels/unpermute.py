"""Redistribute the rows of a striped sequence to the contiguous layout.

Each of W ranks holds s rows, one for each token. Ring position r holds tokens t * W + r and must receive tokens
r * s + j, for 0 <= t, j < s. Token r * s + j is on position j % W, among the rows r * s / W .. (r + 1) * s / W - 1 of
that position. So each rank cuts its rows into W chunks and sends chunk r to position r, which interleaves the chunks
that it receives. A single all_to_all moves only the rows that must move, a fraction (W - 1) / W of all rows. No rank
needs to know its position.

The interface is that of
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/library/api/ring-attention-unpermute.html
"""

from __future__ import annotations

from typing import Any

from nki_impl.kernels.checks import check_groups
from nki_impl.kernels.ring import open_ring, travelling_memory, wait_for_both_cores
from nki_impl.kernels.tiles import Tensor
from nki_impl.lang import ncc, nisa, nki, nl


@nki.jit  # type: ignore[untyped-decorator]
def ring_attention_unpermute(x: Tensor, replica_groups: Any = None, num_workers: int = 1) -> Tensor:
    """Return this rank's rows in the contiguous layout, [bs, s, d], from its rows x [bs, s, d] in the striped layout.

    x has any dtype; values are moved bit for bit. s, the length on this rank, must be divisible by num_workers.
    ``replica_groups`` is as in the forward kernel. Invalid arguments raise AssertionError.

    >>> import numpy as np
    >>> from nki_impl.sim.machine.launch import run_ranks
    >>> striped = np.array([[0, 2], [1, 3]], np.int32).reshape(2, 1, 2, 1)
    >>> run = run_ranks(ring_attention_unpermute, [{"x": x, "num_workers": 2} for x in striped])
    >>> np.stack(run.results).reshape(2, 2).tolist()
    [[0, 1], [2, 3]]
    """
    bs, s, d = x.shape
    check_groups(replica_groups, num_workers)
    assert s % num_workers == 0, f"expected s divisible by {num_workers}, got {s}: pad the sequence"
    ring = open_ring(replica_groups, num_workers)
    chunk = s // num_workers
    shape = (num_workers, bs, chunk, d)
    memory = travelling_memory(ring)
    sent = nl.ndarray(shape, dtype=x.dtype, buffer=memory, name="unpermute_sent")
    arrived = nl.ndarray(shape, dtype=x.dtype, buffer=memory, name="unpermute_arrived")
    out = nl.ndarray((bs, s, d), dtype=x.dtype, buffer=nl.shared_hbm)

    for target in range(ring.core, num_workers, ring.cores):
        nisa.dma_copy(dst=sent[target], src=x[:, target * chunk : (target + 1) * chunk, :])
    wait_for_both_cores(ring, (sent,))
    ncc.all_to_all(srcs=[sent], dsts=[arrived], replica_group=ring.group, collective_dim=0)
    rows = out.reshape_dim(1, (chunk, num_workers))
    for source in range(ring.core, num_workers, ring.cores):
        nisa.dma_copy(dst=rows[:, :, source, :], src=arrived[source])
    return out
