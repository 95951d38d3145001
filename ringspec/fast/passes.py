"""The forward and the backward pass over all heads: the tasks, their order, and the result arrays.

A :class:`~ringspec.fast.job.Job` holds the queries and keys of a dense problem or of one block of a ring. A task is a
function that :mod:`ringspec.fast.team` runs on a thread. A row block is an interval of queries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ringspec.fast.backward import Seeds, Shares, backward_keys, chunks, operands_of
from ringspec.fast.forward import State, forward_rows, keys_of
from ringspec.fast.job import Floats, Job, head_of, is_finite
from ringspec.fast.team import run_tasks
from ringspec.fast.threads import Once
from ringspec.problem.model import Array

Store = Callable[[tuple[int, int, slice], State], None]

# A backward pass has at least this many tasks if there are as many chunks of keys. The number must not depend
# on the number of threads, because the order of the sums depends on it.
LEAST_TASKS = 8


def forward_state(job: Job, threads: int) -> tuple[Array, Array, Floats]:
    """Compute the softmax state of a job: m and l [B, H, n_q] in float64, and o [B, H, n_q, Dv] in the job's type.

    o is not yet divided by l.
    """
    m, l, o = results(job)

    def store(at: tuple[int, int, slice], state: State) -> None:
        m[at], l[at], o[at] = state.m, state.l, state.o

    run_forward(job, store, threads)
    return m, l, o


def forward_result(job: Job, threads: int) -> tuple[Floats, Array, bool]:
    """Compute the results of the forward pass of a job (rules FWD-4 to FWD-9).

    Returns o [B, H, n_q, Dv] in the job's type, lse [B, H, n_q] in float64, and a bool. The bool is True only if
    o contains neither NaN nor infinity, and k and v were found finite if they were searched.
    """
    lse, _, o = results(job)
    finite: list[bool] = []
    sinks = job.terms.sinks

    def store(at: tuple[int, int, slice], state: State) -> None:
        m, l, of_rows = state.m, state.l, o[at]
        if sinks is not None:  # FWD-5
            of_head = sinks[at[1]]
            m = np.maximum(state.m, of_head.max())
            factor = np.exp(state.m - m)
            l = factor * state.l + np.exp(of_head[None, :] - m[:, None]).sum(axis=1)
        safe = l
        if not l.all():
            m, safe = np.where(l == 0, 0.0, m), np.where(l == 0, 1.0, l)
        lse[at] = m + np.log(safe) + 0.0
        if safe is not l:
            lse[at][l == 0] = -np.inf
        if sinks is None:
            np.divide(state.o, safe.astype(job.dtype)[:, None], out=of_rows)
        else:
            np.multiply(state.o, (factor / safe).astype(job.dtype)[:, None], out=of_rows)
        np.add(of_rows, 0.0, out=of_rows)  # zeros are +0
        finite.append(state.finite and is_finite(of_rows))

    run_forward(job, store, threads)
    return o, lse, all(finite)


def results(job: Job) -> tuple[Array, Array, Floats]:
    shape = job.q.shape[:3]
    return np.empty(shape), np.empty(shape), np.empty((*shape, job.v.shape[3]), job.dtype)


def run_forward(job: Job, store: Store, threads: int) -> None:
    """Run one task for each head and row block; tasks with the most pairs start first."""
    heads = job.q.shape[1]
    keys = Once(functools.partial(keys_of, job))

    def task(b: int, h: int, block: int, q0: int, q1: int) -> None:
        of_head = keys.get(b, h // job.terms.group)
        state = forward_rows(head_of(job, b, h), of_head, q0, q1, job.runs_of(b)[block])
        store((b, h, slice(q0, q1)), state)

    tasks = []
    for b in range(job.q.shape[0]):
        for block, (q0, q1) in enumerate(job.row_blocks()):
            seen = sum(run.stop - run.start for run in job.runs_of(b)[block])
            for h in range(heads):
                tasks.append((-seen * (q1 - q0), functools.partial(task, b, h, block, q0, q1)))
    tasks.sort(key=lambda pair: pair[0])
    run_tasks([run for _, run in tasks], threads)


@dataclass(frozen=True)
class Backward:
    """The result of a backward pass: dq, dk, dv in the job's type, and dbias in float64 (None without bias).

    ``finite``: True if dq, dk and dv contain neither NaN nor infinity.
    """

    dq: Floats
    dk: Floats
    dv: Floats
    dbias: Array | None
    finite: bool


def backward_result(job: Job, seeds: Seeds, threads: int) -> Backward:
    batch, key_heads = job.k.shape[:2]
    parts, group = parts_of(job), job.terms.group
    dbias = None
    if job.rows.bias is not None:
        dbias, threads = np.zeros(job.rows.bias.shape), bias_threads(job, parts, threads)
    shares = Shares(
        [np.empty(job.q.shape, job.dtype) for _ in range(parts)],
        np.empty(job.k.shape, job.dtype),
        np.empty(job.v.shape, job.dtype),
        dbias,
    )
    operands = Once(functools.partial(operands_of, job, seeds))
    finite: list[bool] = []

    def differentiate(b: int, h: int, part: int) -> None:
        finite.append(backward_keys(job, operands.get(b, h), shares, b, h, part))
        if parts == 1:
            finish(b, h)

    def finish(b: int, h: int) -> None:
        heads = slice(h * group, (h + 1) * group)
        dq = shares.dq[0][b, heads]
        for other in shares.dq[1:]:
            np.add(dq, other[b, heads], out=dq)
        np.multiply(dq, job.dtype.type(job.terms.scale), out=dq)
        # Zeros are +0; those of dk and dv already are, because their sums began with +0.
        np.add(dq, 0.0, out=dq)
        finite.append(is_finite(dq))

    run_tasks(
        [
            functools.partial(differentiate, b, h, part)
            for part in range(parts)
            for b in range(batch)
            for h in range(key_heads)
        ],
        threads,
    )
    if parts > 1:
        run_tasks([functools.partial(finish, *at) for at in np.ndindex(batch, key_heads)], threads)
    if dbias is not None:
        dbias += 0.0
    return Backward(shares.dq[0], shares.dk, shares.dv, dbias, all(finite))


def parts_of(job: Job) -> int:
    """Return the number of tasks among which the keys of one head are divided."""
    heads = job.k.shape[0] * job.k.shape[1]
    return max(1, min(-(-LEAST_TASKS // heads), len(chunks(job))))


def bias_threads(job: Job, parts: int, threads: int) -> int:
    """Return 1 if several tasks add to the same entries of dbias, else ``threads``."""
    assert job.rows.bias is not None
    own = job.rows.bias.shape[:2] == job.q.shape[:2] and parts == 1
    return threads if own else 1
