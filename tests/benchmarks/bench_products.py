"""The matrix products of a pass and nothing else: the time that no arrangement of the rest can beat.

The same tasks, tiles, shapes, strides and threads as in :mod:`ringspec.fast.passes`, on the same operands,
without exp, masks, sums and merging. What comes out is meaningless.
"""

from __future__ import annotations

import functools

import numpy as np

from ringspec.fast.backward import Operands, chunks
from ringspec.fast.job import Job
from ringspec.fast.plan import Run
from ringspec.fast.team import run_tasks
from ringspec.fast.threads import SCRATCH


def forward_products(job: Job, threads: int) -> None:
    """q k^T and p v of every tile."""

    def task(b: int, h: int, block: int, q0: int, q1: int) -> None:
        key_head = h // job.terms.group
        q = SCRATCH.get("q", (q1 - q0, job.q.shape[3]), job.dtype)
        q[...] = job.q[b, h, q0:q1]
        out = SCRATCH.get("o", (q1 - q0, job.v.shape[3]), job.dtype)
        for run in job.runs_of(b)[block]:
            s = SCRATCH.get("s", (q1 - q0, run.stop - run.start), job.dtype)
            np.matmul(q, job.k[b, key_head, run.start : run.stop].T, out=s)
            np.matmul(s, job.v[b, key_head, run.start : run.stop], out=out)

    run_tasks(
        [
            functools.partial(task, b, h, block, q0, q1)
            for block, (q0, q1) in reversed(list(enumerate(job.row_blocks())))
            for b, h in np.ndindex(*job.q.shape[:2])
        ],
        threads,
    )


def backward_products(
    job: Job, operands: dict[tuple[int, ...], Operands], parts: int, threads: int
) -> None:
    """The five products of every tile; the ``operands`` of each (batch, key head) are made before."""
    group = job.terms.group

    def task(b: int, h: int, part: int) -> None:
        for first, stop in chunks(job)[part::parts]:
            for head in range(h * group, (h + 1) * group):
                for (q0, q1), runs in zip(job.row_blocks(), job.runs_of(b), strict=True):
                    for run in runs:
                        if first <= run.start < stop:
                            five_products(operands[b, h], head % group, q0, q1, run, job)

    run_tasks(
        [
            functools.partial(task, b, h, part)
            for part in range(parts)
            for b, h in np.ndindex(*job.k.shape[:2])
        ],
        threads,
    )


def five_products(operands: Operands, of_group: int, q0: int, q1: int, run: Run, job: Job) -> None:
    """s, dp, dv, dk and dq of one tile, with the extra column where the pass has it."""
    q, dy = operands.q_lse[of_group, q0:q1], operands.dy_delta[of_group, q0:q1]
    k, v = operands.k_one[run.start : run.stop], operands.v_one[run.start : run.stop]
    s = SCRATCH.get("s", (q.shape[0], k.shape[0]), job.dtype)
    dp = SCRATCH.get("dp", s.shape, job.dtype)
    np.matmul(q, k.T, out=s)
    np.matmul(dy, v.T, out=dp)
    dv = SCRATCH.get("part", (v.shape[0], v.shape[1] - 1), job.dtype)
    np.matmul(s.T, dy[:, :-1], out=dv)
    dk = SCRATCH.get("part", (k.shape[0], k.shape[1] - 1), job.dtype)
    np.matmul(dp.T, q[:, :-1], out=dk)
    dq = SCRATCH.get("part", (q.shape[0], q.shape[1] - 1), job.dtype)
    np.matmul(dp, k[:, :-1], out=dq)
