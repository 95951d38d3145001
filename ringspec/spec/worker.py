"""What one worker holds before and after a step, what it sends and what it receives: frozen data (RING-6).

A worker's *state* has a *query side* and a *key side*: a block of queries and a block of keys, with the data and
gradients that belong to them. One side stays at the worker. The other side *visits*: it travels from worker to worker.
The schedule says which. A step reads only the worker's state, the schedule and the messages that the worker received.
Arrays are float64, with one row for each of the owner's n slots (places of tokens).

``ringspec.ring(..., record=True)`` keeps all states: ``run.state(worker, step, phase="backward", when="computed")``
returns one state. ``when`` is 'before' (nothing has arrived), 'during' (arrived, nothing computed), 'computed' or
'after' (sent). ``run.moment(worker, step).sent`` is what was sent.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeVar

import numpy as np

from ringspec.problem.model import Array, Columns, Rows, Terms
from ringspec.recipes import Recipe
from ringspec.spec.online_softmax import SoftmaxState
from ringspec.spec.schedule import Schedule, Transfer


@dataclass(frozen=True)
class QuerySide:
    """The queries of worker ``owner``, the data that belong to these queries, and their gradients.

    q [B, H, n, D]; dy [B, H, n, Dv]; lse and row_term [B, H, n], where row_term is delta - dlse (RING-7). dq
    [B, H, n, D] and dbias [B|1, H|1, n|1, Sk|1] (the block's rows, all keys) are accumulators, to which gradients are added. A
    tensor is None if the worker does not hold it.
    """

    owner: int
    q: Array | None = None
    rows: Rows | None = None
    dy: Array | None = None
    lse: Array | None = None
    row_term: Array | None = None
    dq: Array | None = None
    dbias: Array | None = None


@dataclass(frozen=True)
class KeySide:
    """The block of keys of worker ``owner``: k [B, Hkv, n, D], v [B, Hkv, n, Dv], and the accumulators dk, dv.

    ``columns`` are the positions and segments of the keys. A tensor is None if the worker does not hold it.
    """

    owner: int
    k: Array | None = None
    v: Array | None = None
    columns: Columns | None = None
    dk: Array | None = None
    dv: Array | None = None


Side = QuerySide | KeySide


@dataclass(frozen=True)
class Message:
    """A block in transit: ``side`` holds the tensors that the transfer carries (dbias only if there is a bias).

    ``kind`` is that of the transfer. ``source`` and ``target`` are the workers that send and receive the message.
    """

    source: int
    target: int
    kind: str
    side: Side


@dataclass(frozen=True)
class ForwardState:
    """The state of one worker at one moment of the forward pass.

    ``step`` is the current step. Sending adds 1, so a worker of a ring has finished when ``step`` is W. ``query`` holds
    the worker's own queries, which stay, and ``key`` the visiting keys. ``running`` is the softmax state of the
    queries over the keys seen so far. ``terms`` and ``recipe`` are the same on every worker. ``gathered`` holds the key
    blocks of all workers if keys were gathered, and is empty otherwise. ``state.q`` is short for ``state.query.q``, and
    so on.
    """

    worker: int
    step: int
    terms: Terms
    recipe: Recipe
    query: QuerySide
    key: KeySide
    running: SoftmaxState
    gathered: tuple[KeySide, ...] = ()

    q = property(attrgetter("query.q"))
    k = property(attrgetter("key.k"))
    v = property(attrgetter("key.v"))
    m = property(attrgetter("running.m"))
    l = property(attrgetter("running.l"))
    o = property(attrgetter("running.o"))
    lse = property(attrgetter("running.lse"))


@dataclass(frozen=True)
class BackwardState:
    """The state of one worker at one moment of the backward pass.

    ``query`` and ``key`` are the blocks that the worker holds, with their accumulators; the schedule says which of
    the two visits. ``dsinks`` [H, N] is the sum over this worker's own query rows (RING-12), which is known before the
    first step; None without sinks. All other fields and the short names are as in :class:`ForwardState`.
    """

    worker: int
    step: int
    terms: Terms
    recipe: Recipe
    query: QuerySide
    key: KeySide
    gathered: tuple[KeySide, ...] = ()
    dsinks: Array | None = None

    q = property(attrgetter("query.q"))
    k = property(attrgetter("key.k"))
    v = property(attrgetter("key.v"))
    dy = property(attrgetter("query.dy"))
    lse = property(attrgetter("query.lse"))
    row_term = property(attrgetter("query.row_term"))
    dq = property(attrgetter("query.dq"))
    dk = property(attrgetter("key.dk"))
    dv = property(attrgetter("key.dv"))


WorkerState = ForwardState | BackwardState
State = TypeVar("State", ForwardState, BackwardState)
Held = TypeVar("Held")


def held(x: Held | None) -> Held:
    """Return x, which must not be None: a valid schedule brings it to the worker before it is needed (RING-2)."""
    assert x is not None, (
        "a step needs a tensor that this worker does not hold; validate the schedule"
    )
    return x


def names_of(side: Side) -> tuple[str, ...]:
    """Return the names of the tensors that a side holds."""
    fields = [f.name for f in dataclasses.fields(side) if f.name != "owner"]
    return tuple(name for name in fields if getattr(side, name) is not None)


def only(side: Side, names: tuple[str, ...]) -> Side:
    """Return a copy of a side that keeps only the tensors called ``names`` (RING-6)."""
    dropped = {name: None for name in names_of(side) if name not in names}
    return dataclasses.replace(side, **dropped)  # type: ignore[arg-type]


def joined(side: Side, arrived: Side) -> Side:
    """Return ``side`` with its owner and tensors replaced by those of ``arrived``.

    Tensors that did not arrive stay, because a schedule may send the tensors of a block one by one.
    """
    came = {name: getattr(arrived, name) for name in names_of(arrived)}
    return dataclasses.replace(side, owner=arrived.owner, **came)


def visiting(state: WorkerState, schedule: Schedule) -> Side:
    """Return the side of a worker's state that travels under this schedule."""
    return state.key if schedule.moves == "keys" else state.query


def with_visiting(state: State, side: Side) -> State:
    """Return the state with ``side`` as its block of keys or of queries."""
    if isinstance(side, KeySide):
        return dataclasses.replace(state, key=side)
    return dataclasses.replace(state, query=side)


def send(state: State, schedule: Schedule) -> tuple[State, tuple[Message, ...]]:
    """Do all transfers of the worker's current step: return the state that stays, and the messages."""
    transfers = schedule.steps[state.step].transfers
    sent = tuple(one for transfer in transfers for one in messages(state, schedule, transfer))
    gone = {name for one in transfers if one.kind == "permute" for name in one.carries}
    side = visiting(state, schedule)
    stays = tuple(name for name in names_of(side) if name not in gone)
    return dataclasses.replace(with_visiting(state, only(side, stays)), step=state.step + 1), sent


def messages(state: WorkerState, schedule: Schedule, transfer: Transfer) -> tuple[Message, ...]:
    """Return the messages that one worker sends for one transfer."""
    r, block = state.worker, only(visiting(state, schedule), transfer.carries)
    if transfer.kind == "permute":
        return (Message(r, dict(transfer.pairs)[r], "permute", block),)
    if transfer.kind == "gather":
        return tuple(Message(r, to, "gather", block) for to in range(schedule.workers))
    parts = state.gathered if state.gathered else (visiting(state, schedule),)
    return tuple(
        Message(r, part.owner, "reduce_scatter", only(part, transfer.carries)) for part in parts
    )


def receive(state: State, schedule: Schedule, received: tuple[Message, ...]) -> State:
    """Return the state after receiving messages.

    The tensors of a permute replace those of the visiting side. Gathered blocks are added to ``gathered``.
    """
    for message in received:
        if message.kind == "gather" and isinstance(message.side, KeySide):
            state = dataclasses.replace(state, gathered=(*state.gathered, message.side))
        elif message.kind == "permute":
            state = with_visiting(state, joined(visiting(state, schedule), message.side))
    return state


def arrive(state: State, schedule: Schedule, received: tuple[Message, ...]) -> State:
    """Receive messages. If keys were gathered, the block that the current step uses becomes the visiting block."""
    state = receive(state, schedule, received)
    if schedule.accumulators:
        opened = tuple(map(with_accumulators, state.gathered))
        state = dataclasses.replace(state, gathered=opened)
    owner = schedule.steps[state.step].uses[state.worker]
    for side in state.gathered:
        if side.owner == owner:
            state = dataclasses.replace(state, key=side)
    return state


def with_accumulators(side: KeySide) -> KeySide:
    """Add dk = 0 and dv = 0 to a gathered block of keys, unless it has them: each worker sums its own share of them."""
    if side.dk is not None:
        return side
    k, v = held(side.k), held(side.v)
    return dataclasses.replace(side, dk=np.zeros(k.shape), dv=np.zeros(v.shape))
