"""Both passes over a whole job: the tasks, their order, and where their results lie."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from ringspec.fast.backward import Seeds, Shares, backward_keys, chunks
from ringspec.fast.forward import State, forward_rows
from ringspec.fast.job import Floats, Job, head_of, norms_of
from ringspec.fast.threads import run_tasks
from ringspec.spec.problem import Array

Store = Callable[[tuple[int, int, slice], State], None]

# A backward has at least so many tasks where there are that many chunks of keys. It does not depend
# on the threads: the sums would.
LEAST_TASKS = 8


def forward_state(job: Job, threads: int) -> tuple[Array, Array, Floats]:
    """m, l [B, H, n_q] in float64 and o [B, H, n_q, Dv], unnormalised, in the job's type."""
    m, l, o = results(job)

    def store(at: tuple[int, int, slice], state: State) -> None:
        m[at], l[at], o[at] = state.m, state.l, state.o

    run_forward(job, store, threads)
    return m, l, o


def forward_result(job: Job, threads: int) -> tuple[Floats, Array]:
    """o [B, H, n_q, Dv] in the job's type and lse [B, H, n_q] in float64 (FWD-4 to FWD-9)."""
    lse, _, o = results(job)
    sinks = job.terms.sinks

    def store(at: tuple[int, int, slice], state: State) -> None:
        m, l = state.m, state.l
        factor = np.ones(m.shape)
        if sinks is not None:  # FWD-5
            of_head = sinks[at[1]]
            m = np.maximum(state.m, of_head.max())
            factor = np.exp(state.m - m)
            l = factor * state.l + np.exp(of_head[None, :] - m[:, None]).sum(axis=1)
        empty = l == 0
        safe = np.where(empty, 1.0, l)
        lse[at] = np.where(empty, -np.inf, np.where(empty, 0.0, m) + np.log(safe)) + 0.0
        if job.dtype == np.float64 and sinks is None:
            np.divide(state.o, safe[:, None], out=o[at])
        else:
            np.multiply(state.o, (factor / safe)[:, None], out=o[at], casting="same_kind")
        o[at] += 0.0  # zeros are +0

    run_forward(job, store, threads)
    return o, lse


def results(job: Job) -> tuple[Array, Array, Floats]:
    shape = job.q.shape[:3]
    return np.empty(shape), np.empty(shape), np.empty((*shape, job.v.shape[3]), job.dtype)


def run_forward(job: Job, store: Store, threads: int) -> None:
    """One task for each head and row block, those with most keys first."""
    batch, heads = job.q.shape[:2]
    norms = norms_of(job.k)

    def task(b: int, h: int, block: int, q0: int, q1: int) -> None:
        state = forward_rows(
            head_of(job, b, h), norms[b, h // job.terms.group], q0, q1, job.runs_of(b)[block]
        )
        store((b, h, slice(q0, q1)), state)

    tasks = []
    for b in range(batch):
        for block, (q0, q1) in enumerate(job.row_blocks()):
            keys = sum(run.stop - run.start for run in job.runs_of(b)[block])
            for h in range(heads):
                tasks.append((-keys * (q1 - q0), functools.partial(task, b, h, block, q0, q1)))
    tasks.sort(key=lambda pair: pair[0])
    run_tasks([run for _, run in tasks], threads)


def backward_result(
    job: Job, seeds: Seeds, threads: int
) -> tuple[Floats, Floats, Floats, Array | None]:
    """dq, dk, dv in the job's type, and dbias in float64 (None without bias)."""
    batch, key_heads = job.k.shape[:2]
    parts = parts_of(job)
    dbias = None
    if job.rows.bias is not None:
        dbias, threads = np.zeros(job.rows.bias.shape), bias_threads(job, parts, threads)
    shares = Shares(
        np.zeros((parts, *job.q.shape), job.dtype),
        np.zeros(job.k.shape, job.dtype),
        np.zeros(job.v.shape, job.dtype),
        dbias,
    )
    tasks = [
        functools.partial(backward_keys, job, seeds, shares, b, h, part)
        for part in range(parts)
        for b in range(batch)
        for h in range(key_heads)
    ]
    run_tasks(tasks, threads)

    def finish(b: int, h: int) -> None:
        dq = shares.dq[:, b, h]
        for part in range(1, parts):
            dq[0] += dq[part]
        dq[0] *= job.dtype.type(job.terms.scale)
        dq[0] += 0.0  # zeros are +0; those of dk and dv are, as sums that began with +0

    run_tasks(
        [functools.partial(finish, b, h) for b in range(batch) for h in range(job.q.shape[1])],
        threads,
    )
    if dbias is not None:
        dbias += 0.0
    dq = shares.dq[0] if parts == 1 else shares.dq[0].copy()
    return dq, shares.dk, shares.dv, dbias


def parts_of(job: Job) -> int:
    """How many tasks share one key head's keys."""
    heads = job.k.shape[0] * job.k.shape[1]
    return max(1, min(-(-LEAST_TASKS // heads), len(chunks(job))))


def bias_threads(job: Job, parts: int, threads: int) -> int:
    """dbias is summed in place: by one thread, unless every task has entries of its own."""
    assert job.rows.bias is not None
    own = job.rows.bias.shape[:2] == job.q.shape[:2] and parts == 1
    return threads if own else 1
