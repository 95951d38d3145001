"""The loop over steps and workers, in one process: every worker computes its step, then all messages are delivered.

The specification defines a step as a pure function of one worker's state and messages. This file calls that function
for every worker, possibly in parallel, records the states, and makes inputs immutable (RING-1). Arrays are float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringspec.errors import OptionError
from ringspec.problem.model import Array
from ringspec.spec.schedule import Schedule
from ringspec.spec.worker import Message, State, WorkerState, arrive, send

# The states that a moment records, in order of time.
WHEN = ("before", "during", "computed", "after")


@dataclass(frozen=True)
class Moment:
    """The record of one step of one worker: the worker's states, and the messages that it received and sent.

    ``phase`` is 'forward' or 'backward'. ``pair`` is the (query owner, key owner) that was computed, None if the worker
    was idle. The states, in order of time, are ``before`` (nothing has arrived), ``during`` (everything has arrived,
    and nothing is computed), ``computed`` (the worker has not sent yet) and ``after`` (the worker no longer holds what
    it sent).
    """

    phase: str
    step: int
    worker: int
    pair: tuple[int, int] | None
    before: WorkerState
    received: tuple[Message, ...]
    during: WorkerState
    computed: WorkerState
    after: WorkerState
    sent: tuple[Message, ...]


Observer = Callable[[Moment], None]
# A function like ``map``: it returns the function's results for all values, in order.
Each = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


def lockstep(
    phase: str,
    one_step: Callable[..., State],
    states: list[State],
    schedule: Schedule,
    block: Callable[..., Any],
    observer: Observer,
    each: Each = map,
) -> tuple[list[State], list[tuple[Message, ...]]]:
    """Run all steps: in each, all workers compute, then everything that they sent is delivered.

    Returns the last states, and the messages that have not been received yet. ``one_step`` is ``forward_step`` or
    ``backward_step``, and ``block`` is the function that it calls for one block. ``observer`` is called with every
    :class:`Moment`. No worker needs a result that another computes in the same step, so ``each`` may run the workers in
    parallel.
    """
    states = list(states)
    inboxes: list[tuple[Message, ...]] = [() for _ in states]

    def turn(r: int) -> State:
        return one_step(states[r], schedule, inboxes[r], block)

    for step in range(len(schedule.steps)):
        outboxes = []
        for r, computed in enumerate(of_all(schedule.workers, turn, each)):
            before, inbox = states[r], inboxes[r]
            during = arrive(before, schedule, inbox)
            after, sent = send(computed, schedule)
            pair = schedule.pair(step, r)
            observer(Moment(phase, step, r, pair, before, inbox, during, computed, after, sent))
            states[r] = after
            outboxes.append(sent)
        inboxes = deliver(outboxes, schedule.workers)
    return states, inboxes


def of_all(workers: int, function: Callable[[int], Any], each: Each) -> Iterator[Any]:
    """Yield ``function(r)`` for workers r = 0 to W - 1, in this order; ``each`` is a function like ``map``."""
    results, missing = iter(each(function, range(workers))), object()
    for r in range(workers):
        result = next(results, missing)
        if result is missing:
            raise OptionError(
                "each(function, values) with one result for every value, as map has",
                f"{r} results for {workers} workers",
                "pass map, or map of an executor",
            )
        yield result


def deliver(outboxes: list[tuple[Message, ...]], workers: int) -> list[tuple[Message, ...]]:
    """Return each worker's incoming messages, in the order of the senders."""
    inboxes: list[list[Message]] = [[] for _ in range(workers)]
    for outbox in outboxes:
        for message in outbox:
            inboxes[message.target].append(message)
    return [tuple(inbox) for inbox in inboxes]


def with_immutable_inputs(state: State) -> State:
    """Return the initial state of a worker with immutable copies of its inputs.

    Messages carry these copies. Values derived from an immutable array may be cached as long as the array lives;
    ``ringspec.fast`` does this.
    """
    query = {name: getattr(state.query, name) for name in ("q", "dy", "lse", "row_term")}
    key = {name: getattr(state.key, name) for name in ("k", "v")}
    return dataclasses.replace(
        state,
        query=dataclasses.replace(state.query, **read_only_values(query)),
        key=dataclasses.replace(state.key, **read_only_values(key)),
    )


def read_only_values(arrays: dict[str, Array | None]) -> dict[str, Any]:
    """Return a dict with immutable copies of the arrays that are not None."""
    return {name: read_only(x) for name, x in arrays.items() if x is not None}


def read_only(x: Array) -> Array:
    """Return a read-only copy of an array, which cannot be made writable again."""
    return np.ndarray(x.shape, x.dtype, x.tobytes())
