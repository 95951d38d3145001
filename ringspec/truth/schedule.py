"""Show a ring's schedule as two tables: whose block each worker computes with, and where it sends, in each step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ringspec.rings.schedules import backward_schedule, forward_schedule
from ringspec.spec.schedule import Schedule

NOBODY, EVERYBODY = -1, -2


def schedule_of(name: str, circulation: str, workers: int, direction: int) -> Schedule:
    """Return the schedule of the pass ``name``, 'forward' or 'backward'.

    ``circulation`` says what travels: 'kv', 'q' or 'gather'. With 'q', only the backward pass differs from 'kv',
    because keys and values travel in the forward pass in both cases (rule RING-5).
    """
    made = forward_schedule if name == "forward" else backward_schedule
    return made(circulation, workers, direction)


def visitors(schedule: Schedule) -> NDArray[np.int64]:
    """Return [steps, W]: the worker whose block each worker computes with in each step; -1 if it is idle.

    >>> visitors(schedule_of("forward", "kv", 3, 1)).tolist()
    [[0, 1, 2], [2, 0, 1], [1, 2, 0]]
    """
    rows = [[NOBODY if owner is None else owner for owner in step.uses] for step in schedule.steps]
    return np.array(rows, dtype=np.int64)


def targets(schedule: Schedule) -> NDArray[np.int64]:
    """Return [steps, W]: the worker to which each worker sends after the step.

    -1: nothing is sent. -2: the worker sends to several workers, in a gather or a reduce-scatter.
    """
    table = np.full((len(schedule.steps), schedule.workers), NOBODY, dtype=np.int64)
    for row, step in zip(table, schedule.steps, strict=True):
        for transfer in step.transfers:
            if transfer.kind != "permute":
                row[:] = EVERYBODY
            for source, target in transfer.pairs:
                row[source] = target
    return table
