"""The arithmetic of multisets, with which the executor proves that a scheme is right.

In place of numbers, a query or key says which cell it is, and a result lists the *triples* (query, query head, key) that
it contains. A triple has the step and the rank that computed it. To add or to merge is to join the lists. A tensor is an
object array [1, heads, tokens].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringspec.problem.model import Booleans, Problem
from ringspec.schemes.execute import Arithmetic, Parts, RankState
from ringspec.schemes.parts import Part, Tensors
from ringspec.schemes.scheme import INPUTS, Scheme
from ringspec.schemes.sharding import Shard
from ringspec.spec.masks import visible


class Met(NamedTuple):
    """One triple that a result contains: the query and the key that met, and the step and rank that computed it."""

    query: int
    head: int
    key: int
    key_head: int
    step: int
    rank: int

    @property
    def triple(self) -> tuple[int, int, int, int]:
        """Query, query head, key and key head."""
        return self[:4]


# Whether query head h of query i attends to key j: [h, i, j], with 1 head if all heads have the same mask.
Visible = Booleans


def mask_of(problem: Problem) -> Visible:
    """Return which query attends to which key in any batch: [H or 1, Sq, Sk]."""
    return np.any(visible(problem.rows, problem.columns, problem.terms), axis=0)


def is_visible(visible: Visible, head: int, query: int, key: int) -> bool:
    """Return whether a query attends to a key; padding slots (-1) never do."""
    if query < 0 or key < 0:
        return False
    return bool(visible[head if visible.shape[0] > 1 else 0, query, key])


def filled(shard: Shard, content: Callable[[int, int], object]) -> NDArray[np.object_]:
    """Return an object array [1, heads, tokens] with content(token, head) for each cell of a shard."""
    tensor = np.empty((1, len(shard.heads), len(shard.tokens)), dtype=object)
    for h, head in enumerate(shard.heads):
        for t, token in enumerate(shard.tokens):
            tensor[0, h, t] = content(token, head)
    return tensor


def nothing(thing: str, shard: Shard) -> Part:
    """Return a part with an empty list for each cell, or with padding as each input."""
    empty = (-1, -1) if thing in INPUTS else ()
    return Part(shard, {thing: filled(shard, lambda token, head: empty)})


def unite(thing: str, a: Tensors, b: Tensors) -> Tensors:
    """Join the lists of triples."""
    return {thing: a[thing] + b[thing]}


@dataclass(frozen=True)
class Meeting:
    """Computes lists of triples; ``visible`` is the mask, ``group`` is G = H / Hkv."""

    visible: Visible
    group: int

    def forward(self, step: int, rank: int, q: Part, k: Part) -> Parts:
        """Return the state of some queries over some keys: for each query, the triples that it takes part in."""
        state = nothing("state", q.shard)
        for h, t, _, _, met in self.pairs(step, rank, q, k):
            state.tensors["state"][0, h, t] += (met,)
        return {"state": state}

    def backward(self, step: int, rank: int, q: Part, k: Part) -> Parts:
        """Return the gradients of some queries and some keys: for each of them, the triples that it takes part in."""
        dq, dk = nothing("dq", q.shard), nothing("dk", k.shard)
        for h, t, g, j, met in self.pairs(step, rank, q, k):
            dq.tensors["dq"][0, h, t] += (met,)
            dk.tensors["dk"][0, g, j] += (met,)
        return {"dq": dq, "dk": dk}

    def pairs(self, step: int, rank: int, q: Part, k: Part) -> list[tuple[int, int, int, int, Met]]:
        """Return slots and triple of each pair that a rank takes as visible.

        The rank looks at the numbers that its shards give the tokens. Which cells meet depends on what is really there.
        """
        met = []
        for h, head in enumerate(q.shard.heads):
            g = k.shard.heads.index(head // self.group)
            for t, query in enumerate(q.shard.tokens):
                for j, key in enumerate(k.shard.tokens):
                    if is_visible(self.visible, head, query, key):
                        real, real_head = q.tensors["q"][0, h, t]
                        real_key, real_key_head = k.tensors["k"][0, g, j]
                        one = Met(real, real_head, real_key, real_key_head, step, rank)
                        met.append((h, t, g, j, one))
        return met


def multiset_arithmetic(scheme: Scheme, phase: str, visible: Visible) -> Arithmetic:
    """Return the arithmetic of multisets for a pass of a scheme."""
    meeting = Meeting(visible, scheme.group)
    compute: Callable[[int, int, Part, Part], Parts] = (
        meeting.forward if phase == "forward" else meeting.backward
    )
    return Arithmetic(compute, nothing, unite)


def multiset_inputs(scheme: Scheme) -> list[RankState]:
    """Return what every rank holds at the start of a pass: its cells at home."""
    states = []
    for r, homes in enumerate(zip(scheme.home_q.shards, scheme.home_k.shards, strict=True)):
        named = zip(INPUTS, homes, strict=True)
        parts = {x: Part(home, {x: filled(home, lambda t, h: (t, h))}) for x, home in named}
        states.append(RankState(r, parts))
    return states
