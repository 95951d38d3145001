"""The backward pass of one worker, step by step: RECEIVE, DIFFERENTIATE, ADD; then SEND, which is ``worker.send``.

The KV ring (keys travel) and the Q ring (queries travel) share these functions; the schedule says which ring it is.
The gradients of the tensors that travel (*accumulators*) travel, too. They make one hop more than the tensors that are
only read: the last hop brings them to their owner (RING-4, RING-5).

The tables show a ring of W = 3 at worker r in direction 1; in direction -1 read r + 1 for r - 1 and r + 2 for r - 2.
(a, b) is the contribution of the queries of worker a and the keys of worker b. ``columns`` and ``rows`` are the
positions and other data of keys and of queries, and row_term is delta - dlse. A KV ring::

    step  holds the keys of  dk, dv of these keys after the step  then sends
    0     r                  (r, r)                               k v columns, dk dv
    1     r - 1              (r-1, r-1) + (r, r-1)                k v columns, dk dv
    2     r - 2              all three contributions              dk dv, which are then at their owner

After step 2, dq of worker r has the contributions of keys r, r - 1 and r - 2, added in this order. A Q ring::

    step  holds the queries of  dq of these queries after the step  then sends
    0     r                     (r, r)                              q dy lse row_term rows, dq dbias
    1     r - 1                 (r-1, r-1) + (r-1, r)               q dy lse row_term rows, dq dbias
    2     r - 2                 all three contributions             dq dbias, which are then at their owner

After step 2, dk and dv of worker r have the contributions of queries r, r - 1 and r - 2, added in this order.

The backward pass takes o and lse as given and never recomputes them. They are those of the whole row, over all keys
(RING-13). Each worker's dsinks is a partial sum over its own query rows, and the caller adds the sums of all workers.
If all rows share the bias, each worker's dbias is a partial sum as well. Otherwise dbias has the worker's own rows, and
the caller puts the rows of all workers in global order (RING-12). dbias is float64 and never rounded.

Arrays are float64, in a worker's local order. Sources: ring-flash-attention, ejkernel (KV ring); AWS NKI library (Q ring).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from ringspec.formats import round_to
from ringspec.problem.model import Array, Problem, Tile
from ringspec.recipes import Recipe
from ringspec.spec.block import BlockBackward, BlockGradients
from ringspec.spec.dense_backward import dy_o_sum, sink_gradient
from ringspec.spec.schedule import Schedule
from ringspec.spec.worker import BackwardState, KeySide, Message, QuerySide, arrive, held, receive

Accumulate = Callable[[Array, Array, str], Array]


def plus(total: Array, share: Array, accumulator: str) -> Array:
    """Return total + share, rounded to the number format ``accumulator`` (NUM-2)."""
    return round_to(total + share, accumulator)


def backward_start(
    worker: int, shard: Problem, dy: Array, dlse: Array, o: Array, lse: Array, recipe: Recipe
) -> BackwardState:
    """Return a worker's initial state: its shard, o and lse of the whole row as given (RING-13), and zero accumulators.

    ``shard`` and ``recipe`` are as in :func:`~ringspec.spec.ring_forward.forward_start`; dy and o [B, H, n, Dv], dlse
    and lse [B, H, n].
    """
    q, k = recipe.to_inputs(shard.q, "q"), recipe.to_inputs(shard.k, "k")
    v, dy = recipe.to_inputs(shard.v, "v"), recipe.to_inputs(dy, "dy")
    # ds needs delta and dlse only as their difference: one number per row (RING-7).
    row_term = recipe.to_delta(dy_o_sum(dy, o, recipe) - dlse)
    lse = recipe.to_backward_lse(lse)
    rows, sinks = shard.rows, shard.terms.sinks
    dbias = None if rows.bias is None else np.zeros(rows.bias.shape)
    query = QuerySide(worker, q, rows, dy, lse, row_term, np.zeros(q.shape), dbias)
    key = KeySide(worker, k, v, shard.columns, np.zeros(k.shape), np.zeros(v.shape))
    dsinks = None if sinks is None else sink_gradient(sinks, lse, row_term)  # RING-12
    return BackwardState(worker, 0, shard.terms, recipe, query, key, dsinks=dsinks)


def backward_step(
    state: BackwardState,
    schedule: Schedule,
    received: tuple[Message, ...],
    compute: BlockBackward,
    accumulate: Accumulate = plus,
) -> BackwardState:
    """Return one worker's state after it has computed a step and before it sends.

    ``received`` are the messages that the worker received under ``schedule``. ``compute`` computes the gradients of one
    block, as ``spec.block.block_backward`` does. ``accumulate`` adds a contribution to a total, as :func:`plus` does.
    """
    # RECEIVE
    state = arrive(state, schedule, received)
    # DIFFERENTIATE
    share = differentiate_block(state, schedule, compute)
    # ADD
    return state if share is None else add_block(state, share, accumulate)


def differentiate_block(
    state: BackwardState, schedule: Schedule, compute: BlockBackward
) -> BlockGradients | None:
    """Return what the two blocks at this worker contribute to the gradients; None if the worker is idle in this step.

    Accumulators are not read, so a program may receive them at the same time.
    """
    if schedule.pair(state.step, state.worker) is None:
        return None
    query, key = state.query, state.key
    tile = Tile(held(query.rows), held(key.columns), state.terms, state.recipe)
    q, dy, lse, row_term = (held(x) for x in (query.q, query.dy, query.lse, query.row_term))
    return compute(q, held(key.k), held(key.v), dy, lse, row_term, tile)


def add_block(
    state: BackwardState, share: BlockGradients, accumulate: Accumulate = plus
) -> BackwardState:
    """Add the contributions of one step to the accumulators at this worker, rounding each addition (NUM-2)."""
    query, key, recipe = state.query, state.key, state.recipe
    dbias = query.dbias
    if share.dbias is not None:
        dbias = accumulate(held(dbias), share.dbias, "float64")
    dq = accumulate(held(query.dq), share.dq, recipe.carried_dq)
    query = dataclasses.replace(query, dq=dq, dbias=dbias)
    dk = accumulate(held(key.dk), share.dk, recipe.carried_dkv)
    dv = accumulate(held(key.dv), share.dv, recipe.carried_dkv)
    key = dataclasses.replace(key, dk=dk, dv=dv)
    gathered = tuple(key if side.owner == key.owner else side for side in state.gathered)
    return dataclasses.replace(state, query=query, key=key, gathered=gathered)


def backward_finish(
    state: BackwardState,
    schedule: Schedule,
    received: tuple[Message, ...],
    accumulate: Accumulate = plus,
) -> BackwardState:
    """Receive the accumulators of the last transfer, which belong to this worker, and round the results.

    ``state`` is the state after the last step of ``schedule``. The result holds dq, dbias, dk and dv of the worker's
    own tokens. If keys were gathered, every worker has sent its share of dk and dv; ``accumulate`` adds the shares in
    the order of the senders.
    """
    # Drop the inputs, some of which belong to the last visitor: the accumulators that arrive now have another owner.
    query = QuerySide(state.query.owner, dq=state.query.dq, dbias=state.query.dbias)
    key = KeySide(state.key.owner, dk=state.key.dk, dv=state.key.dv)
    state = receive(dataclasses.replace(state, query=query, key=key), schedule, received)
    query, key, recipe = state.query, state.key, state.recipe
    returned = [message.side for message in received if message.kind == "reduce_scatter"]
    if returned:
        first, *others = (side for side in returned if isinstance(side, KeySide))
        dk, dv = held(first.dk), held(first.dv)
        for side in others:
            dk = accumulate(dk, held(side.dk), recipe.carried_dkv)
            dv = accumulate(dv, held(side.dv), recipe.carried_dkv)
        key = KeySide(state.worker, dk=dk, dv=dv)
    # + 0.0: zeros are +0
    dq, dk, dv = (recipe.to_gradients(held(x)) + 0.0 for x in (query.dq, key.dk, key.dv))
    query = QuerySide(state.worker, dq=dq, dbias=query.dbias)
    key = KeySide(state.worker, dk=dk, dv=dv)
    return dataclasses.replace(state, query=query, key=key)
