"""The forward pass of one worker, step by step: RECEIVE, SCORE, MERGE; then SEND, which is ``worker.send``.

:func:`forward_step` is a pure function of a worker's state, the schedule and the messages that the worker
received. :mod:`ringspec.rings.lockstep` calls it for every worker in turn; a message-passing program
calls the same function in every process.

In step t worker r computes attention of its own queries to the keys of worker (r - t) mod W. Then, except in the last
step, all workers send at once: ``k[r], v[r] = k[r - 1], v[r - 1]``, where worker 0 receives from worker W - 1. So after
step W - 1 each worker has merged the results of all W blocks of keys. This describes direction 1; in direction -1,
read r + t for r - t and r + 1 for r - 1.

Source: Liu, Zaharia, Abbeel, Ring Attention, https://arxiv.org/abs/2310.01889 (algorithm 1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ringspec.problem.model import Array, Problem, Tile
from ringspec.recipes import Recipe
from ringspec.spec import online_softmax
from ringspec.spec.block import BlockForward
from ringspec.spec.online_softmax import SoftmaxState, finish, start
from ringspec.spec.schedule import Schedule
from ringspec.spec.worker import ForwardState, KeySide, Message, QuerySide, arrive, held

Merge = Callable[[SoftmaxState, SoftmaxState, Recipe], SoftmaxState]


def forward_start(worker: int, shard: Problem, recipe: Recipe) -> ForwardState:
    """Return a worker's initial state: its own shard, rounded to the recipe's input format, and an empty softmax state.

    ``shard`` is ``problem.take(..)`` for the worker's slots: q [B, H, n, D], k [B, Hkv, n, D], v [B, Hkv, n, Dv]. The
    softmax state is the running maximum, sum and output of each query row. ``recipe`` says where values are rounded.
    """
    q, k = recipe.to_inputs(shard.q, "q"), recipe.to_inputs(shard.k, "k")
    v = recipe.to_inputs(shard.v, "v")
    query, key = QuerySide(worker, q, shard.rows), KeySide(worker, k, v, shard.columns)
    batch, heads, n_q, _ = q.shape
    running = start(batch, heads, n_q, v.shape[3])
    return ForwardState(worker, 0, shard.terms, recipe, query, key, running)


def merge_states(running: SoftmaxState, part: SoftmaxState, recipe: Recipe) -> SoftmaxState:
    """Merge a block's state into the running one, in the recipe's ``merge_order``."""
    if recipe.merge_order == "normalised":
        return online_softmax.merge_normalised(running, part, recipe)
    return online_softmax.merge(running, part, recipe)


def forward_step(
    state: ForwardState,
    schedule: Schedule,
    received: tuple[Message, ...],
    compute: BlockForward,
    merge: Merge = merge_states,
) -> ForwardState:
    """Return one worker's state after it has computed a step and before it sends.

    ``received`` are the messages that the worker received under ``schedule``. ``compute`` computes the softmax state of
    one block, as ``spec.block.block_forward`` does. ``merge`` merges this state into the running one.
    """
    # RECEIVE
    state = arrive(state, schedule, received)
    # SCORE
    part = score_block(state, schedule, compute)
    # MERGE
    return state if part is None else merge_block(state, part, merge)


def score_block(
    state: ForwardState, schedule: Schedule, compute: BlockForward
) -> SoftmaxState | None:
    """Return the softmax state of the worker's queries over the visiting keys alone; None if the worker is idle."""
    if schedule.pair(state.step, state.worker) is None:
        return None
    query, key = state.query, state.key
    tile = Tile(held(query.rows), held(key.columns), state.terms, state.recipe)
    return compute(held(query.q), held(key.k), held(key.v), tile)


def merge_block(
    state: ForwardState, part: SoftmaxState, merge: Merge = merge_states
) -> ForwardState:
    """Return the worker's state after the softmax state of one block is merged into its running one."""
    return dataclasses.replace(state, running=merge(state.running, part, state.recipe))


def forward_finish(state: ForwardState) -> tuple[Array, Array]:
    """Return the worker's local o [B, H, n, Dv] and lse [B, H, n], float64, from its last ``state``."""
    return finish(state.running, state.terms.sinks, state.recipe)
