"""What one worker holds before and after a step, and what it sends: plain, frozen data.

A worker has a query side and a key side. The schedule says which of them visits; the worker's step
sees only this object, the schedule and the messages that it received. Arrays are float64, in the
order of the owner's slots: n of them.

Source: DESIGN section 3.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from ringspec.problem.model import Array, Columns, Rows, Terms
from ringspec.recipes import Recipe
from ringspec.spec.online_softmax import SoftmaxState
from ringspec.spec.schedule import Schedule, Transfer


@dataclass(frozen=True)
class QuerySide:
    """A block of queries of worker ``owner``, all that its rows need, and their gradients.

    q [B, H, n, D]; dy [B, H, n, Dv]; lse, delta [B, H, n] (delta is dy_o_sum - dlse, RING-7); the
    accumulators dq [B, H, n, D] and dbias (rows of this block, global keys). None = not held.
    """

    owner: int
    q: Array | None = None
    rows: Rows | None = None
    dy: Array | None = None
    lse: Array | None = None
    delta: Array | None = None
    dq: Array | None = None
    dbias: Array | None = None


@dataclass(frozen=True)
class KeySide:
    """A block of keys of worker ``owner``: k [B, Hkv, n, D], v [B, Hkv, n, Dv], and dk, dv.

    ``columns`` are their positions and segments. None = not held.
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
    """A block on its way: ``side`` holds exactly the names that the transfer carries.

    ``kind`` is that of the transfer, from worker ``source`` to worker ``target``.
    """

    source: int
    target: int
    kind: str
    side: Side


@dataclass(frozen=True)
class WorkerState:
    """One worker at one moment. ``step`` counts the steps that it has done.

    ``query`` [B, H, n, ..] and ``key`` [B, Hkv, n, ..] are the blocks that it holds, ``terms`` and
    ``recipe`` what it knows. ``running`` is the softmax state (forward only). ``gathered`` holds every
    block when keys were gathered, else nothing. Short names reach into the parts: ``m``, ``l``, ``o``,
    ``lse``, ``q``, ``k``, ``v``, ``dy``, ``delta``, ``dq``, ``dk``, ``dv``; None = not held.
    """

    worker: int
    step: int
    terms: Terms
    recipe: Recipe
    query: QuerySide
    key: KeySide
    running: SoftmaxState | None = None
    gathered: tuple[KeySide, ...] = ()

    @property
    def query_owner(self) -> int:
        """Whose queries are here."""
        return self.query.owner

    @property
    def key_owner(self) -> int:
        """Whose keys are here."""
        return self.key.owner

    @property
    def m(self) -> Array | None:
        """Running row maximum [B, H, n]; None in a backward pass."""
        return None if self.running is None else self.running.m

    @property
    def l(self) -> Array | None:  # noqa: E743 - the symbol of the field
        """Running sum of exp(s - m) [B, H, n]."""
        return None if self.running is None else self.running.l

    @property
    def o(self) -> Array | None:
        """Running unnormalised o [B, H, n, Dv]."""
        return None if self.running is None else self.running.o

    @property
    def lse(self) -> Array | None:
        """Forward: lse of the keys seen so far. Backward: lse of the whole row, as received."""
        return self.query.lse if self.running is None else self.running.lse

    @property
    def q(self) -> Array | None:
        return self.query.q

    @property
    def k(self) -> Array | None:
        return self.key.k

    @property
    def v(self) -> Array | None:
        return self.key.v

    @property
    def dy(self) -> Array | None:
        return self.query.dy

    @property
    def delta(self) -> Array | None:
        return self.query.delta

    @property
    def dq(self) -> Array | None:
        return self.query.dq

    @property
    def dk(self) -> Array | None:
        return self.key.dk

    @property
    def dv(self) -> Array | None:
        return self.key.dv


@dataclass(frozen=True)
class Moment:
    """One worker's step on record: everything that went in and everything that came out.

    ``phase`` is 'forward' or 'backward'; ``pair`` the (query owner, key owner) that met, None where the
    worker was idle; ``received`` and ``sent`` are messages, ``before`` and ``after`` states. ``during`` is the state when everything has arrived and before it computes: it holds the block
    that the step works on, which ``after`` no longer does once it was sent on.
    """

    phase: str
    step: int
    worker: int
    pair: tuple[int, int] | None
    before: WorkerState
    received: tuple[Message, ...]
    during: WorkerState
    after: WorkerState
    sent: tuple[Message, ...]


def names_of(side: Side) -> tuple[str, ...]:
    """The names of what a side holds."""
    fields = [f.name for f in dataclasses.fields(side) if f.name != "owner"]
    return tuple(name for name in fields if getattr(side, name) is not None)


def packed(side: Side, carries: tuple[str, ...]) -> Side:
    """A copy of a side that holds only the names that a transfer carries (RING-6)."""
    dropped = {name: None for name in names_of(side) if name not in carries}
    return dataclasses.replace(side, **dropped)  # type: ignore[arg-type]


def left_behind(side: Side, carries: tuple[str, ...]) -> Side:
    """What stays of a side when the carried names have gone."""
    gone = {name: None for name in names_of(side) if name in carries}
    return dataclasses.replace(side, **gone)  # type: ignore[arg-type]


def joined(side: Side, arrived: Side) -> Side:
    """A side with the names that arrived; the block's owner is that of what arrived."""
    came = {name: getattr(arrived, name) for name in names_of(arrived)}
    return dataclasses.replace(side, owner=arrived.owner, **came)


def visiting(state: WorkerState, schedule: Schedule) -> Side:
    """The side that travels under this schedule."""
    return state.key if schedule.moves == "keys" else state.query


def with_visiting(state: WorkerState, schedule: Schedule, side: Side) -> WorkerState:
    field = "key" if schedule.moves == "keys" else "query"
    return dataclasses.replace(state, **{field: side})  # type: ignore[arg-type]


def send(state: WorkerState, schedule: Schedule) -> tuple[WorkerState, tuple[Message, ...]]:
    """Do all transfers of the worker's current step: the state that stays, and the messages."""
    transfers = schedule.steps[state.step].transfers
    sent: tuple[Message, ...] = ()
    for transfer in transfers:
        sent += messages(state, schedule, transfer)
    for transfer in transfers:
        if transfer.kind == "permute":
            side = left_behind(visiting(state, schedule), transfer.carries)
            state = with_visiting(state, schedule, side)
    return dataclasses.replace(state, step=state.step + 1), sent


def messages(state: WorkerState, schedule: Schedule, transfer: Transfer) -> tuple[Message, ...]:
    """The messages of one worker for one transfer."""
    side = packed(visiting(state, schedule), transfer.carries)
    if transfer.kind == "permute":
        target = dict(transfer.pairs)[state.worker]
        return (Message(state.worker, target, "permute", side),)
    if transfer.kind == "gather":
        return tuple(
            Message(state.worker, target, "gather", side) for target in range(schedule.workers)
        )
    parts = state.gathered if state.gathered else (visiting(state, schedule),)
    return tuple(
        Message(state.worker, part.owner, "reduce_scatter", packed(part, transfer.carries))
        for part in parts
    )


def receive(state: WorkerState, schedule: Schedule, received: tuple[Message, ...]) -> WorkerState:
    """Put what arrived in the place of the visiting block; gathered blocks stand side by side."""
    for message in received:
        if message.kind == "gather":
            assert isinstance(message.side, KeySide)
            state = dataclasses.replace(state, gathered=(*state.gathered, message.side))
        elif message.kind == "permute":
            side = joined(visiting(state, schedule), message.side)
            state = with_visiting(state, schedule, side)
    return state


def arrive(state: WorkerState, schedule: Schedule, received: tuple[Message, ...]) -> WorkerState:
    """The state with everything that was received, turned to the block of the current step."""
    state = receive(state, schedule, received)
    if schedule.accumulators:
        state = open_accumulators(state)
    owner = schedule.steps[state.step].uses[state.worker]
    return state if owner is None else select(state, owner)


def open_accumulators(state: WorkerState) -> WorkerState:
    """Gathered keys arrive without accumulators: every worker opens one for each owner."""
    opened = []
    for side in state.gathered:
        if side.dk is None:
            assert side.k is not None and side.v is not None
            side = dataclasses.replace(side, dk=np.zeros(side.k.shape), dv=np.zeros(side.v.shape))
        opened.append(side)
    return dataclasses.replace(state, gathered=tuple(opened))


def met(schedule: Schedule, step: int, worker: int) -> tuple[int, int] | None:
    """(query owner, key owner) that a worker computes in a step, or None."""
    owner = schedule.steps[step].uses[worker]
    return None if owner is None else schedule.pair(worker, owner)


def select(state: WorkerState, owner: int) -> WorkerState:
    """With gathered keys: turn to the block of one owner."""
    for side in state.gathered:
        if side.owner == owner:
            return dataclasses.replace(state, key=side)
    return state


def read_only(x: Array) -> Array:
    """A copy in memory that nobody can write to: a worker's inputs stay as they are, wherever they travel."""
    return np.ndarray(x.shape, x.dtype, x.tobytes())


def deliver(outboxes: list[tuple[Message, ...]], workers: int) -> list[tuple[Message, ...]]:
    """Each worker's messages, in the order of the senders: the lockstep stand-in for a network."""
    inboxes: list[list[Message]] = [[] for _ in range(workers)]
    for outbox in outboxes:
        for message in outbox:
            inboxes[message.target].append(message)
    return [tuple(inbox) for inbox in inboxes]
