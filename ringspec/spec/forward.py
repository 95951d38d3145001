"""The forward pass of one worker, step by step: RECEIVE, SCORE, ABSORB, SEND.

:func:`forward_step` is a pure function of the worker's own state, the schedule and the messages
that it received. The lockstep loop calls it for every worker in turn; a message-passing program
calls the same function once per process.

Source: Liu, Zaharia, Abbeel, Ring Attention, https://arxiv.org/abs/2310.01889 (algorithm 1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ringspec.errors import OptionError
from ringspec.problem.model import Array, Block, Columns, Rows, Terms
from ringspec.recipes import Recipe
from ringspec.spec.block import BlockForward
from ringspec.spec.online_softmax import SoftmaxState, finish, merge, merge_normalised, start
from ringspec.spec.schedule import Schedule
from ringspec.spec.worker import (
    KeySide,
    Message,
    Moment,
    QuerySide,
    WorkerState,
    arrive,
    deliver,
    met,
    read_only,
    send,
)

Observer = Callable[[Moment], None]
Absorb = Callable[[SoftmaxState, SoftmaxState, Recipe], SoftmaxState]
# As ``map``: the function's results for all values, in their order.
Each = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


def forward_start(
    worker: int,
    q: Array,
    k: Array,
    v: Array,
    rows: Rows,
    columns: Columns,
    terms: Terms,
    recipe: Recipe,
) -> WorkerState:
    """A worker with its own shards, rounded to the recipe's input format, and an empty softmax.

    q [B, H, n, D], k [B, Hkv, n, D], v [B, Hkv, n, Dv], float64; ``rows`` and ``columns`` of its
    slots, ``terms`` of the problem.
    """
    q, k, v = (recipe.to_inputs(x, n) for x, n in ((q, "q"), (k, "k"), (v, "v")))
    q, k, v = (read_only(x) for x in (q, k, v))
    batch, heads, n_q, _ = q.shape
    running = start(batch, heads, n_q, v.shape[3])
    return WorkerState(
        worker,
        0,
        terms,
        recipe,
        QuerySide(worker, q, rows),
        KeySide(worker, k, v, columns),
        running,
    )


def absorb_block(running: SoftmaxState, part: SoftmaxState, recipe: Recipe) -> SoftmaxState:
    """Merge one block's result into the running state, in the recipe's way."""
    if recipe.merge_order == "normalised":
        return merge_normalised(running, part, recipe)
    return merge(running, part, recipe)


def forward_step(
    state: WorkerState,
    schedule: Schedule,
    received: tuple[Message, ...],
    block: BlockForward,
    absorb: Absorb = absorb_block,
) -> tuple[WorkerState, tuple[Message, ...]]:
    """One worker's step: the state after it, and the messages that it sends.

    ``received`` are the messages that ``schedule`` has brought to it; ``block`` computes, as
    ``spec.block.block_forward`` does; ``absorb`` merges the block's state into the running
    one, as :func:`absorb_block` does.
    """
    # RECEIVE
    state = arrive(state, schedule, received)
    # SCORE
    part = forward_part(state, schedule, block)
    # ABSORB
    if part is not None:
        state = absorb_part(state, part, absorb)
    # SEND
    return send(state, schedule)


def forward_part(
    state: WorkerState, schedule: Schedule, block: BlockForward
) -> SoftmaxState | None:
    """The softmax state of the pair of blocks at this worker alone; None where none is met."""
    if met(schedule, state.step, state.worker) is None:
        return None
    query, key = state.query, state.key
    assert query.q is not None and query.rows is not None
    assert key.k is not None and key.v is not None and key.columns is not None
    return block(query.q, key.k, key.v, Block(query.rows, key.columns, state.terms, state.recipe))


def absorb_part(
    state: WorkerState, part: SoftmaxState, absorb: Absorb = absorb_block
) -> WorkerState:
    """Merge one block's softmax state into the running one."""
    assert state.running is not None
    return dataclasses.replace(state, running=absorb(state.running, part, state.recipe))


def forward_finish(state: WorkerState) -> tuple[Array, Array]:
    """The worker's local o [B, H, n, Dv] and lse [B, H, n], float64, from its last ``state``."""
    assert state.running is not None
    return finish(state.running, state.terms.sinks, state.recipe)


def lockstep(
    phase: str,
    one_step: Callable[..., tuple[WorkerState, tuple[Message, ...]]],
    states: list[WorkerState],
    schedule: Schedule,
    block: Callable[..., Any],
    observer: Observer,
    each: Each = map,
) -> tuple[list[WorkerState], list[tuple[Message, ...]]]:
    """All workers do step t, then everything that they sent is delivered; then step t + 1.

    Returns the last states and what is still to be received. It serves both passes: ``one_step`` is
    :func:`forward_step` or ``backward_step``. No worker's step depends on another's in the same t, so
    ``each`` may do them side by side.
    """
    states = list(states)
    inboxes: list[tuple[Message, ...]] = [() for _ in states]

    def turn(r: int) -> tuple[WorkerState, tuple[Message, ...]]:
        return one_step(states[r], schedule, inboxes[r], block)

    for t in range(len(schedule.steps)):
        outboxes = []
        for r, (after, sent) in enumerate(of_all(schedule.workers, turn, each)):
            before = states[r]
            during = arrive(before, schedule, inboxes[r])
            pair = met(schedule, t, r)
            observer(Moment(phase, t, r, pair, before, inboxes[r], during, after, sent))
            states[r] = after
            outboxes.append(sent)
        inboxes = deliver(outboxes, schedule.workers)
    return states, inboxes


def of_all(workers: int, function: Callable[[int], Any], each: Each) -> Iterator[Any]:
    """``function`` of every worker's number, in their order."""
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
