"""Every choice that a ring makes, as data: the correct ones, and how one is changed somewhere.

Blocks are [a, b]: query worker a, key worker b. Choices of pairs have the axes [a, b, h, i, j], those of rows
[a, b, h, i], of blocks [a, b, h], of workers [a]; an axis of length 1 stands for all.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringspec.problem.model import Array, Booleans, Integers


@dataclass(frozen=True)
class Choices:
    """What each block, row, pair or worker uses. Sources are numbers of workers.

    Blocks:   ``q``, ``k``, ``v``, ``dy``  whose block is used; ``dv_dy``, ``dk_q``, ``dq_k``  whose the last product uses;
              ``dq_to``, ``dk_to``, ``dv_to``  whose gradient gets it; ``lse_of``, ``delta_of``  whose row constants;
              ``heads``, ``v_heads``  number of a map of heads, the same in all blocks (0: as heads)
    Pairs:    ``mask``  number of a pattern; ``value_mask``  that of the products with v and dy, -1: the same;
              ``hidden_score``  score of a hidden pair; ``times``  factor on the score; ``count``  how often a pair is computed;
              ``q_slots`` to ``dv_slots``  number of a map of slots within a block;
              ``ds_times``  factor on dS; ``dq_count``, ``dk_count``, ``dv_count``  how often a share is added
    Rows:     ``lse``, ``delta``  kind of the row constant of the backward; ``delta_times``; ``merge``  how a block's
              result enters the running one
    Workers:  ``o_to``  where results are stored; ``o_times``; ``finish``, ``lse_out``  how a worker ends
    All:      ``put_back``  a result whose tokens are put back by another layout; ``stays``  what of 'l', 'm', 'o' a Q ring does not send; ``dy_tokens``  layout by which dy is dealt;
              ``hidden_merge``  whether blocks without a visible pair are merged; ``started``  whether the running softmax starts with l = 1; ``dy_ones``  whether dy is 1 everywhere;
              ``turned``  bits: dS is not transposed for dk (1), P is not transposed for dv (2)
    """

    q: Integers
    k: Integers
    v: Integers
    dy: Integers
    mask: Integers
    times: Array
    count: Array
    merge: Integers
    heads: Integers
    v_heads: Integers
    o_to: Integers
    o_times: Array
    finish: Integers
    lse_out: Integers
    lse: Integers
    lse_of: Integers
    delta: Integers
    delta_of: Integers
    delta_times: Array
    ds_times: Array
    dq_count: Array
    dk_count: Array
    dv_count: Array
    dq_to: Integers
    dk_to: Integers
    dv_to: Integers
    q_slots: Integers
    k_slots: Integers
    v_slots: Integers
    dy_slots: Integers
    dq_slots: Integers
    dk_slots: Integers
    dv_slots: Integers
    value_mask: Integers
    hidden_score: Array
    dv_dy: Integers
    dk_q: Integers
    dq_k: Integers
    stays: str = ""
    dy_tokens: int = 0
    put_back: tuple[str, int] = ("", 0)
    hidden_merge: bool = False
    started: bool = False
    dy_ones: bool = False
    turned: int = 0

    @property
    def map_of_heads(self) -> int:
        """The number of the map of heads, which all blocks have."""
        return int(self.heads.flat[0])

    @property
    def map_of_values(self) -> int:
        """The number of the map of heads of the values."""
        return int(self.v_heads.flat[0]) or self.map_of_heads

    def with_value(self, slot: str, where: Booleans, value: Any) -> Choices:
        """The same choices but ``value`` in the slot where ``where``, [a, b, h, i, j] or [a]."""
        if slot in OF_ALL:
            changed: dict[str, Any] = {slot: value}
            return dataclasses.replace(self, **changed)
        if slot in OF_ROWS:
            where = where[..., 0]
        elif slot in OF_BLOCKS:
            where = where[..., 0, 0]
            value = value[..., None] if np.ndim(value) == 2 else value
        changed = {slot: np.where(where, value, getattr(self, slot))}
        return dataclasses.replace(self, **changed)


# The kinds of row constants and endings that choices number; the correct one is number 0.
FINISHES = (
    "right", "not divided", "divided twice", "divided by the last block's l", "before the last merge",
)  # fmt: skip
LSES_GIVEN = (
    "right", "maximum", "log l", "base 2", "last block", "first block", "log2 l", "read token first",
    "written token first", "base 2 twice", "times ln 2", "negative", "last maximum", "first of group",
)  # fmt: skip
LSES = (
    "right", "block", "base 2", "times ln 2", "maximum", "zero", "log l", "last block", "read token first",
    "written token first", "first block", "so far", "first of group", "next head", "group first", "halves exchanged",
)  # fmt: skip
DELTAS = (
    "right", "block", "none", "block's own p", "times p", "first block", "last block", "read token first",
    "written token first", "block's own o", "first of group", "next head", "used dy", "group first", "halves exchanged",
)  # fmt: skip
SLOT_MAPS = (
    "right", "halves exchanged", "second at first", "first at second", "shifted", "shifted back", "reversed",
)  # fmt: skip
HEAD_MAPS = ("right", "modulo", "first", "own number", "last reads first")

OF_ALL = ("hidden_merge", "started", "dy_ones", "turned", "stays", "dy_tokens", "put_back")
OF_ROWS = ("lse", "delta", "delta_times", "merge")
OF_BLOCKS = (
    "q", "k", "v", "dy", "heads", "v_heads", "lse_of", "delta_of", "dq_to", "dk_to", "dv_to", "dv_dy", "dk_q", "dq_k",
)  # fmt: skip


def right_choices(workers: int) -> Choices:
    """What a correct ring does."""
    a, b = np.indices((workers, workers))[..., None]
    heads, row = np.zeros((workers, workers, 1), int), np.zeros((workers, workers, 1, 1), int)
    number, one = row[..., None], np.ones((workers, workers, 1, 1, 1))
    sources = {
        "q": a,
        "k": b,
        "v": b,
        "dy": a,
        "dv_dy": a,
        "dk_q": a,
        "dq_k": b,
        "lse_of": a,
        "delta_of": a,
    }
    goals = {"dq_to": a, "dk_to": b, "dv_to": b}
    slots = {f"{name}_slots": number for name in ("q", "k", "v", "dy", "dq", "dk", "dv")}
    counts = dict.fromkeys(("times", "count", "ds_times", "dq_count", "dk_count", "dv_count"), one)
    given: dict[str, Any] = {**sources, **goals, **slots, **counts}
    return Choices(
        **given,
        mask=number,
        value_mask=number - 1,
        hidden_score=np.full(one.shape, -np.inf),
        heads=heads,
        v_heads=heads,
        merge=row,
        lse=row,
        delta=row,
        delta_times=one[..., 0],
        o_to=np.arange(workers),
        o_times=np.ones(workers),
        finish=np.zeros(workers, int),
        lse_out=np.zeros(workers, int),
    )
