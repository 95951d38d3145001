"""Five invariants of context parallelism, checked on a recorded run: what a ring may not do to tokens.

:data:`INVARIANTS` names them. The validator of schedules (:mod:`ringspec.rings.validator`) proves the first for blocks, before
a run; here each is checked for tokens, on what the workers computed. cudnn-frontend's pull request 1142 asks for the same
five of a reference for merges.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ringspec.errors import NotRecordedError
from ringspec.problem.model import Array, Integers
from ringspec.rings.lockstep import Moment
from ringspec.rings.run import Run
from ringspec.spec.layout import Layout, unshard
from ringspec.spec.masks import visible
from ringspec.spec.ring_backward import backward_step
from ringspec.spec.ring_forward import forward_step
from ringspec.spec.schedule import Schedule
from ringspec.spec.worker import (
    ForwardState,
    KeySide,
    QuerySide,
    WorkerState,
    held,
)

__all__ = ["INVARIANTS", "Broken", "broken_invariants"]

INVARIANTS = {
    "coverage without duplicates": "each visible pair of a query and a key is computed exactly once in each pass",
    "unique slots": "each token is in exactly one slot of the workers",
    "order independent of arrival": "a step has the same bits in whatever order its messages arrive",
    "global order restored": "the results in global order are those of the slots of each token",
    "no padding read as valid": "the contents of padding slots change no bit of a token's result, and get no result",
}
AnySide = TypeVar("AnySide", QuerySide, KeySide)
POISON = 3.0  # a number in padding slots, which moves every score that reads it


@dataclass(frozen=True)
class Broken:
    """An invariant that does not hold: its ``name`` in :data:`INVARIANTS`, and ``where``, in words."""

    name: str
    where: str

    def __str__(self) -> str:
        return f"{self.name}: {self.where}"


def broken_invariants(run: Run) -> list[Broken]:
    """Return the invariants that a recorded run breaks, with the first place of each; an empty list if all hold.

    The run needs ``record=True``; NotRecordedError is raised otherwise. Each recorded step is computed again, twice.

    >>> import numpy as np
    >>> from ringspec import ring
    >>> x = np.ones((1, 1, 6, 2))
    >>> broken_invariants(ring(x, x, x, workers=3, layout="striped", causal=True, record=True))
    []
    """
    if not run.moments:
        raise NotRecordedError("a recorded run", "none", "call ring(..., record=True)")
    checks = (coverage, unique_slots, arrival, global_order, padding)
    found = []
    for name, check in zip(INVARIANTS, checks, strict=True):
        found += [Broken(name, where) for where in list(check(run))[:1]]
    return found


def coverage(run: Run) -> Iterator[str]:
    """Count how often each pair of tokens was computed, by the tokens in the recorded blocks."""
    at = run.problem
    pairs = visible(at.rows, at.columns, at.terms)
    seen = np.broadcast_to(pairs, (*pairs.shape[:2], at.q.shape[2], at.k.shape[2])).any(axis=(0, 1))
    for phase in dict.fromkeys(moment.phase for moment in run.moments):
        count = np.zeros(seen.shape, np.int64)
        for moment in run.moments:
            if moment.phase == phase and moment.pair is not None:
                queries, keys = tokens_of(moment.computed)
                real = np.ix_(queries[queries >= 0], keys[keys >= 0])
                np.add.at(count, real, 1)
        for query, key in np.argwhere(seen & (count != 1)):
            yield f"{phase}: query {query} and key {key} meet {count[query, key]} times"


def unique_slots(run: Run) -> Iterator[str]:
    """Count the slots of each token in both layouts."""
    lengths = (run.problem.q.shape[2], run.problem.k.shape[2])
    for what, layout, length in zip(
        ("query", "key"), (run.layout_q, run.layout_k), lengths, strict=True
    ):
        real = layout.table[layout.table >= 0]
        count = np.bincount(real, minlength=length)
        for token in np.flatnonzero(count != 1):
            yield f"{what} {token} is in {count[token]} slots"


def arrival(run: Run) -> Iterator[str]:
    """Compute each step again with its messages in the opposite order."""
    for moment in run.moments:
        if len(moment.received) > 1:
            again = computed(run, moment, moment.before, moment.received[::-1])
            pairs = zip(results(again), results(moment.computed), strict=True)
            if not all(same(a, b) for a, b in pairs):
                yield f"{moment.phase} step {moment.step} of worker {moment.worker}"


def global_order(run: Run) -> Iterator[str]:
    """Compare each result in global order with the workers' results."""
    for name in ("o", "lse", "dq", "dk", "dv"):
        whole = getattr(run, name)
        if whole is None:
            continue
        index = "index_k" if name in ("dk", "dv") else "index_q"
        table = np.stack([getattr(worker, index) for worker in run.workers])
        parts = [getattr(worker, name) for worker in run.workers]
        slots = unshard(parts, Layout("recorded", table), 2)
        for token in np.unique(np.argwhere(~equal(slots, whole))[:, 2]):
            yield f"{name} of token {token} is not that of its slot"


def padding(run: Run) -> Iterator[str]:
    """Compute each step again with other numbers in padding slots, and look at the results in these slots."""
    for moment in run.moments:
        queries, keys = tokens_of(moment.computed)
        if moment.pair is None or min(queries.min(initial=0), keys.min(initial=0)) >= 0:
            continue
        again = computed(run, moment, poisoned(moment.during), ())
        for a, b in zip(results(again), results(moment.computed), strict=True):
            slots = queries if b.shape[2] == len(queries) else keys
            if not same(a[:, :, slots >= 0], b[:, :, slots >= 0]):
                yield f"{moment.phase} step {moment.step} of worker {moment.worker}"
    for worker in run.workers:
        if not (worker.o[:, :, worker.index_q < 0] == 0).all():
            yield f"o in a padding slot of worker {worker.worker}"


def tokens_of(state: WorkerState) -> tuple[Integers, Integers]:
    """Return the global tokens of the queries and keys that a worker holds, -1 in padding slots."""
    return held(state.query.rows).index, held(state.key.columns).index


def computed(run: Run, moment: Moment, before: WorkerState, received: tuple) -> WorkerState:
    """Compute a step again from another state and other messages."""
    forward, backward, merged, added = run.blocks
    if isinstance(before, ForwardState):
        return forward_step(before, run.schedule, received, forward, merged)
    schedule: Schedule = held(run.backward_schedule)
    return backward_step(before, schedule, received, backward, added)


def results(state: WorkerState) -> list[Array]:
    """Return what a step computes: the running o, l and m, or the gradients that the worker holds."""
    if isinstance(state, ForwardState):
        return [state.running.o, state.running.l, state.running.m]
    return [x for x in (state.dq, state.dk, state.dv) if x is not None]


def poisoned(state: WorkerState) -> WorkerState:
    """Return a state with :data:`POISON` in the padding slots of q, dy, k and v."""
    changed = dataclasses.replace(
        state,
        query=poisoned_side(state.query, ("q", "dy"), held(state.query.rows).index),
        key=poisoned_side(state.key, ("k", "v"), held(state.key.columns).index),
        gathered=tuple(
            poisoned_side(side, ("k", "v"), held(side.columns).index) for side in state.gathered
        ),
    )
    return changed


def poisoned_side(side: AnySide, names: tuple[str, ...], index: Integers) -> AnySide:
    changes: dict[str, Any] = {}
    for name in names:
        x = getattr(side, name)
        if x is not None:
            changes[name] = np.where((index < 0)[:, None], POISON, x)
    return dataclasses.replace(side, **changes)


def equal(a: Array, b: Array) -> NDArray[np.bool_]:
    """Return where two arrays are equal, NaN equal to NaN."""
    return np.asarray((a == b) | (np.isnan(a) & np.isnan(b)))


def same(a: Array, b: Array) -> bool:
    return bool(equal(a, b).all())
