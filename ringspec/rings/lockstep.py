"""The loop over workers and steps, in one process: every worker's step, then every message delivered.

A step is a pure function of the specification; here is what may run the workers' steps side by side, what
records them, and what makes their inputs immutable. Source: RING-1; arrays are float64.
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

# The states of a moment, in their order.
WHEN = ("before", "during", "computed", "after")


@dataclass(frozen=True)
class Moment:
    """One worker's step on record: everything that went in and everything that came out.

    ``phase`` is 'forward' or 'backward'; ``pair`` the (query owner, key owner) that was computed, None where the
    worker was idle; ``received`` and ``sent`` are messages. The states, in their order: ``before`` anything arrives;
    ``during``, when everything has arrived and nothing is computed; ``computed``; and ``after``, when the worker has
    sent, and no longer holds what it sent.
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
# As ``map``: the function's results for all values, in their order.
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
    """All workers do one step, then everything that they sent is delivered; then the next step.

    Returns the last states and what is still to be received. It serves both passes: ``one_step`` is
    ``forward_step`` or ``backward_step``. A worker needs nothing that another computes in the same step, so
    ``each`` may do them side by side.
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
    """The results of ``function`` for workers 0 to W - 1, in this order, computed by ``each``."""
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
    """Each worker's messages, in the order of the senders."""
    inboxes: list[list[Message]] = [[] for _ in range(workers)]
    for outbox in outboxes:
        for message in outbox:
            inboxes[message.target].append(message)
    return [tuple(inbox) for inbox in inboxes]


def with_immutable_inputs(state: State) -> State:
    """A worker at its start, whose inputs nobody can write to, wherever they travel.

    What is made of an immutable array may be kept as long as the array lives; ``ringspec.fast`` does.
    """
    query = {name: getattr(state.query, name) for name in ("q", "dy", "lse", "row_term")}
    key = {name: getattr(state.key, name) for name in ("k", "v")}
    return dataclasses.replace(
        state,
        query=dataclasses.replace(state.query, **read_only_values(query)),
        key=dataclasses.replace(state.key, **read_only_values(key)),
    )


def read_only_values(arrays: dict[str, Array | None]) -> dict[str, Any]:
    """Copy the arrays that are there, by name, so that nobody can write to the copies."""
    return {name: read_only(x) for name, x in arrays.items() if x is not None}


def read_only(x: Array) -> Array:
    """A copy of an array in memory that nobody can write to."""
    return np.ndarray(x.shape, x.dtype, x.tobytes())
