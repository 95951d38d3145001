"""Permute schedules as data, who holds what, the causal offset of a pair of blocks.

A schedule lists, for each ring step, which visiting block every worker computes with and what is
transferred afterwards. It moves nothing itself: the lockstep loop, and MPI, carry it out.
:mod:`ringspec.rings.validator` proves any schedule (RING-1 to RING-5).

Sources: Liu et al., https://arxiv.org/abs/2310.01889 (KV ring); the backward of AWS's NKI library
(Q ring); Llama 3 (gathered keys), https://arxiv.org/abs/2407.21783, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ringspec.errors import LayoutError, OptionError, UnknownNameError, nearest, shown
from ringspec.problem.checks import check_workers, integer, length_of

KEY_INPUTS = ("k", "v", "columns")
QUERY_INPUTS = ("q", "dy", "lse", "delta", "rows")
KEY_ACCUMULATORS = ("dk", "dv")
QUERY_ACCUMULATORS = ("dq", "dbias")
SIDES = {
    "keys": (KEY_INPUTS, KEY_ACCUMULATORS),
    "queries": (QUERY_INPUTS, QUERY_ACCUMULATORS),
}
CIRCULATIONS = ("kv", "q", "gather")
KINDS = ("permute", "gather", "reduce_scatter")

Pair = tuple[int, int]


@dataclass(frozen=True)
class Transfer:
    """One collective: ``pairs`` (source, target) of a permute, and the names that it carries.

    ``kind`` is 'permute', 'gather' or 'reduce_scatter'. A 'gather' copies every worker's own block to all; a 'reduce_scatter' sends each worker's
    accumulators for an owner to that owner, where they are added in the order of the senders.
    """

    kind: str
    pairs: tuple[Pair, ...]
    carries: tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """``uses[r]``: owner of the visiting block that worker r computes with, None = none.

    ``transfers`` are what travels after it.
    """

    uses: tuple[int | None, ...]
    transfers: tuple[Transfer, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """A whole pass of W = ``workers``. ``moves`` says which side visits: 'keys' or 'queries'.

    ``name`` is for people; ``inputs`` and ``accumulators`` are the tensors that travel with a visitor,
    read only and added to; ``steps`` say when. ``skipped`` lists (query owner, key owner) pairs that no step computes because the mask leaves
    them wholly invisible.
    """

    name: str
    workers: int
    moves: str
    inputs: tuple[str, ...]
    accumulators: tuple[str, ...]
    steps: tuple[Step, ...]
    skipped: frozenset[Pair] = frozenset()

    def pair(self, worker: int, visitor: int) -> Pair:
        """(query owner, key owner) when that worker computes with that ``visitor``, a block's owner."""
        return (worker, visitor) if self.moves == "keys" else (visitor, worker)

    def pairs(self, step: int) -> list[tuple[int, Pair]]:
        """(worker, (query owner, key owner)) of all that is computed in a step."""
        uses = self.steps[step].uses
        return [(r, self.pair(r, b)) for r, b in enumerate(uses) if b is not None]

    @property
    def hops(self) -> int:
        """Number of steps after which something travels."""
        return sum(1 for step in self.steps if step.transfers)

    def travelling(self, step: int) -> str:
        """What travels after a step, and where to: 'k v columns: r -> r+1 mod 4'."""
        parts = []
        for transfer in self.steps[step].transfers:
            where = {"gather": "to all", "reduce_scatter": "to owners"}.get(transfer.kind)
            if where is None:
                shift = (transfer.pairs[0][1] - transfer.pairs[0][0]) % self.workers
                ring = all((a + shift) % self.workers == b for a, b in transfer.pairs)
                where = f"r -> r+{shift} mod {self.workers}" if ring else str(transfer.pairs)
            parts.append(f"{' '.join(transfer.carries)}: {where}")
        return "; ".join(parts) or "nothing"

    def __str__(self) -> str:
        """One line per step: the visitor at each worker, and what travels afterwards."""
        lines = [f"{self.name}, {self.workers} workers, {self.moves} move"]
        for t, step in enumerate(self.steps):
            owners = " ".join("-" if b is None else str(b) for b in step.uses)
            lines.append(f"step {t}: visitors {owners}; then {self.travelling(t)}")
        return "\n".join(lines)


def ring_permute(workers: int, direction: int) -> tuple[Pair, ...]:
    """(source, target) of each of ``workers`` workers to its neighbour r + direction (RING-3)."""
    return tuple((r, (r + direction) % workers) for r in range(workers))


def visitor(worker: int, step: int, workers: int, direction: int = 1) -> int:
    """RING-1: owner of the block that a worker of ``workers`` holds after ``step`` hops in ``direction``.

    >>> [visitor(0, t, 4) for t in range(4)]
    [0, 3, 2, 1]
    """
    return (worker - direction * step) % workers


def check_direction(direction: Any) -> int:
    whole = isinstance(direction, (int, np.integer)) and not isinstance(direction, bool)
    if not whole or direction not in (1, -1):
        raise OptionError(
            "direction 1 (r to r + 1) or -1 (r to r - 1)", shown(direction), "pass direction=1"
        )
    return int(direction)


def ring_schedule(
    name: str,
    workers: int,
    moves: str,
    inputs: tuple[str, ...],
    accumulators: tuple[str, ...],
    direction: int = 1,
) -> Schedule:
    """A ring: ``inputs`` take W - 1 hops, ``accumulators`` W, the last brings them home (RING-4).

    W = ``workers``; ``moves`` is 'keys' or 'queries', ``direction`` 1 or -1, ``name`` for people."""
    pairs = ring_permute(workers, direction)
    steps = []
    for t in range(workers):
        uses = tuple(visitor(r, t, workers, direction) for r in range(workers))
        carries = inputs + accumulators if t < workers - 1 else accumulators
        worth = bool(carries) and workers > 1
        steps.append(Step(uses, (Transfer("permute", pairs, carries),) if worth else ()))
    return Schedule(name, workers, moves, inputs, accumulators, tuple(steps))


def gather_schedule(name: str, workers: int, accumulators: tuple[str, ...]) -> Schedule:
    """All keys are gathered first; gradients of keys are reduced and scattered last.

    W = ``workers``; ``accumulators`` are the gradients, () in a forward pass; ``name`` is for people.
    """
    everybody = Transfer("gather", (), KEY_INPUTS)
    steps = [Step((None,) * workers, (everybody,))]
    for t in range(workers):
        uses = tuple(visitor(r, t, workers) for r in range(workers))
        last = t == workers - 1 and bool(accumulators)
        home = (Transfer("reduce_scatter", (), accumulators),) if last else ()
        steps.append(Step(uses, home))
    return Schedule(name, workers, "keys", KEY_INPUTS, accumulators, tuple(steps))


def forward_schedule(circulation: str, workers: int, direction: int = 1) -> Schedule:
    """The forward pass: a KV ring, or gathered keys.

    ``circulation`` is 'kv' or 'q' (the same forward) or 'gather', W = ``workers``; ``direction`` 1: worker
    r sends to r + 1, -1: to r - 1. Raises UnknownNameError, WorkerCountError or OptionError.

    >>> schedule = forward_schedule("kv", 3)
    >>> schedule.steps[1].uses, schedule.hops
    ((2, 0, 1), 2)
    """
    check_circulation(circulation)
    workers, direction = check_workers(workers), check_direction(direction)
    if circulation == "gather":
        return gather_schedule("gathered keys, forward", workers, ())
    return ring_schedule("KV ring, forward", workers, "keys", KEY_INPUTS, (), direction)


def backward_schedule(circulation: str, workers: int, direction: int = 1) -> Schedule:
    """The backward pass: 'kv' (dk, dv travel), 'q' (dq travels, RING-5) or 'gather'.

    ``circulation``, ``workers``, ``direction`` and errors as in :func:`forward_schedule`.

    >>> backward_schedule("q", 3).hops  # dq needs one more to come home
    3
    """
    check_circulation(circulation)
    workers, direction = check_workers(workers), check_direction(direction)
    if circulation == "gather":
        return gather_schedule("gathered keys, backward", workers, KEY_ACCUMULATORS)
    if circulation == "kv":
        return ring_schedule(
            "KV ring, backward", workers, "keys", KEY_INPUTS, KEY_ACCUMULATORS, direction
        )
    return ring_schedule(
        "Q ring, backward", workers, "queries", QUERY_INPUTS, QUERY_ACCUMULATORS, direction
    )


def check_circulation(circulation: str) -> None:
    if not isinstance(circulation, str) or circulation not in CIRCULATIONS:
        raise UnknownNameError(
            "a circulation ('kv', 'q' or 'gather')",
            shown(circulation),
            nearest(circulation, CIRCULATIONS),
        )


def skip(schedule: Schedule, invisible: Iterable[Pair]) -> Schedule:
    """The same schedule with these (query owner, key owner) pairs declared as skipped."""
    skipped = frozenset(invisible)
    steps = []
    for step in schedule.steps:
        uses = tuple(
            None if b is None or schedule.pair(r, b) in skipped else b
            for r, b in enumerate(step.uses)
        )
        steps.append(replace(step, uses=uses))
    return replace(schedule, steps=tuple(steps), skipped=skipped)


def cp_offset(
    layout: str, a: int, b: int, *, workers: int, n_q: int, n_k: int, q_offset: int = 0
) -> int:
    """Offset of the causal diagonal between queries of worker a and keys of worker b.

    With local indices i and j the pair is visible iff j <= i + offset. RING-8 for 'contiguous',
    RING-9 for 'striped'; 'zigzag' has four offsets, see :func:`zigzag_offsets`.
    ``n_q`` and ``n_k`` are tokens of one of W = ``workers`` workers; query i of all has the position
    i + ``q_offset``. Raises UnknownNameError for another ``layout``.

    >>> cp_offset("contiguous", 2, 1, workers=4, n_q=8, n_k=8)
    8
    >>> [cp_offset("striped", a, 1, workers=4, n_q=8, n_k=8) for a in range(4)]
    [-1, 0, 0, 0]
    """
    workers, a, b = check_workers(workers), integer(a, "a"), integer(b, "b")
    n_q, n_k, q_offset = length_of(n_q, "n_q"), length_of(n_k, "n_k"), integer(q_offset, "q_offset")
    check_owners(workers, a, b)
    if layout == "contiguous":
        return a * n_q - b * n_k + q_offset
    if layout == "striped":
        return (a + q_offset - b) // workers
    raise UnknownNameError(
        "a layout with one offset per pair of workers: 'contiguous' or 'striped'",
        shown(layout),
        "use zigzag_offsets for 'zigzag', and positions for any other layout",
    )


def check_owners(workers: int, a: int, b: int) -> None:
    if not (0 <= a < workers and 0 <= b < workers):
        raise OptionError(
            f"workers a and b in 0..{workers - 1}", f"{shown(a)} and {shown(b)}", "count from 0"
        )


def zigzag_offsets(
    a: int, b: int, *, workers: int, n_q: int, n_k: int, q_offset: int = 0
) -> tuple[tuple[int, int], tuple[int, int]]:
    """RING-10: offsets [query chunk][key chunk] of the two chunks that each worker holds.

    Local indices count from the start of each chunk, which is n/2 long.
    """
    workers, a, b = check_workers(workers), integer(a, "a"), integer(b, "b")
    n_q, n_k, q_offset = length_of(n_q, "n_q"), length_of(n_k, "n_k"), integer(q_offset, "q_offset")
    check_owners(workers, a, b)
    if n_q % 2 or n_k % 2:
        raise LayoutError("n_q and n_k even, two chunks each", f"{n_q} and {n_k}", "pad the blocks")
    chunk_q, chunk_k = n_q // 2, n_k // 2
    low, high = (
        tuple(c * chunk_q - d * chunk_k + q_offset for d in (b, 2 * workers - 1 - b))
        for c in (a, 2 * workers - 1 - a)
    )
    return (low[0], low[1]), (high[0], high[1])
