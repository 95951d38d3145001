"""Schedules as data: who computes with which block, and who sends what to whom (RING-1 to RING-7, RING-11).

A *block* is the queries of one worker, or the keys of one worker with their values. A schedule lists, for each step of
a ring, which travelling block every worker computes with and what is transferred afterwards. It is only data:
:mod:`ringspec.rings.lockstep` executes it in one process, ``ringspec.comm`` in several.

``KV ring, forward``   K, V travel; Q and its m, l, o stay
``KV ring, backward``  K, V travel, and dK, dV with their keys; Q, dY, LSE, row_term, dQ, dbias stay
``Q ring, backward``   Q, dY, LSE, row_term travel, and dQ, dbias with their queries; K, V, dK, dV stay
``gather``             K, V of all workers go to all before anything is computed; dK, dV are added at their owners

The circulation 'kv' or 'q' chooses the KV ring or the Q ring for the backward pass; the forward pass of both is a KV
ring. ``direction`` is 1 if worker r sends to r + 1, -1 if it sends to r - 1. After ``step`` hops worker r has the block
of owner (r - direction * step) mod W (RING-1). Gathering has no direction and takes one step more than a ring. For
W = 3, worker r computes in each step with the block of this owner::

    step                  0                 1      2      3
    ring, direction 1     r                 r - 1  r - 2
    gather                none: gather k v  r      r - 1  r - 2, then reduce_scatter dk dv

Tensors that are only read (*inputs*) make W - 1 hops. Gradients that are added to (*accumulators*) make W hops: the
last hop takes each accumulator to its owner (RING-4). A schedule is valid when every pair (query owner, key owner) is
computed once or declared as skipped (RING-2), the mask hides every skipped pair entirely (RING-11), every accumulator
ends at its owner, and each permute is a permutation of the workers (RING-3). :mod:`ringspec.rings.validator` verifies
these conditions. The schedules of this file skip nothing: a pair of blocks that the mask hides is computed and
contributes exactly 0. :func:`ringspec.rings.schedules.skip`, which ``ring(..., skip_masked=True)`` calls, omits such
pairs.

The data of a block travel with the block (RING-6). Keys have ``columns`` (positions, segments), and queries have
``rows`` (positions, segments, bounds, and rows of bias, mask and keep). In place of delta = <dy, o> and dlse, their
difference row_term = delta - dlse travels, because ds depends only on the difference (RING-7).

Sources: Liu et al., https://arxiv.org/abs/2310.01889 (KV ring); the backward of AWS's NKI library (Q ring); Llama 3
(gathered keys), https://arxiv.org/abs/2407.21783, section 3.3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

KEY_INPUTS = ("k", "v", "columns")
QUERY_INPUTS = ("q", "dy", "lse", "row_term", "rows")
KEY_ACCUMULATORS = ("dk", "dv")
QUERY_ACCUMULATORS = ("dq", "dbias")
CIRCULATIONS = ("kv", "q", "gather")

Pair = tuple[int, int]


@dataclass(frozen=True)
class Transfer:
    """One collective operation: its ``pairs`` (source, target), and the names of the tensors that it carries.

    ``kind`` is 'permute', 'gather' or 'reduce_scatter'. A 'gather' copies every worker's own block to all workers. In a
    'reduce_scatter', every worker sends its share of each accumulator to the owner of that block. The owner adds the
    shares in the order of the senders.
    """

    kind: str
    pairs: tuple[Pair, ...]
    carries: tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """One step: worker r computes with the visiting block of owner ``uses[r]``, or is idle if ``uses[r]`` is None.

    ``transfers`` take place after all workers have computed.
    """

    uses: tuple[int | None, ...]
    transfers: tuple[Transfer, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """The steps of one pass, forward or backward, of W = ``workers`` workers; ``moves`` is 'keys' or 'queries'.

    ``name`` is the label shown in output. ``inputs`` (only read) and ``accumulators`` (added to) are the names of the
    tensors that travel with a block. ``skipped`` lists the (query owner, key owner) pairs that no step computes because
    the mask hides them entirely.
    """

    name: str
    workers: int
    moves: str
    inputs: tuple[str, ...]
    accumulators: tuple[str, ...]
    steps: tuple[Step, ...]
    skipped: frozenset[Pair] = frozenset()

    def pair(self, step: int, worker: int) -> Pair | None:
        """Return (query owner, key owner) of the pair that a worker computes in a step; None if the worker is idle."""
        visitor = self.steps[step].uses[worker]
        if visitor is None:
            return None
        return (worker, visitor) if self.moves == "keys" else (visitor, worker)

    def pairs(self, step: int) -> list[tuple[int, Pair]]:
        """Return (worker, (query owner, key owner)) for each pair that is computed in a step."""
        pairs = [(r, self.pair(step, r)) for r in range(self.workers)]
        return [(r, pair) for r, pair in pairs if pair is not None]

    @property
    def hops(self) -> int:
        """The number of steps after which something travels."""
        return sum(1 for step in self.steps if step.transfers)


def visitor(worker: int, step: int, workers: int, direction: int = 1) -> int:
    """RING-1: return the owner of the block that ``worker`` holds after ``step`` hops; W = ``workers``.

    >>> [visitor(0, step, 4) for step in range(4)]
    [0, 3, 2, 1]
    """
    return (worker - direction * step) % workers


def ring_permute(workers: int, direction: int) -> tuple[Pair, ...]:
    """Return the pairs (source, target) of one hop: each worker r sends to worker r + direction mod W (RING-3)."""
    return tuple((r, (r + direction) % workers) for r in range(workers))


def ring_schedule(
    name: str,
    workers: int,
    moves: str,
    inputs: tuple[str, ...],
    accumulators: tuple[str, ...],
    direction: int = 1,
) -> Schedule:
    """Return the schedule of a ring: ``inputs`` make W - 1 hops; ``accumulators`` make W, back to their owner (RING-4)."""
    pairs = ring_permute(workers, direction)
    steps = []
    for step in range(workers):
        uses = tuple(visitor(r, step, workers, direction) for r in range(workers))
        carries = inputs + accumulators if step < workers - 1 else accumulators
        travels = bool(carries) and workers > 1
        steps.append(Step(uses, (Transfer("permute", pairs, carries),) if travels else ()))
    return Schedule(name, workers, moves, inputs, accumulators, tuple(steps))


def gather_schedule(name: str, workers: int, accumulators: tuple[str, ...]) -> Schedule:
    """Return the schedule of a pass that first copies the keys of all workers to every worker.

    A backward pass ends with a reduce-scatter of ``accumulators``; a forward pass has no accumulators.
    """
    steps = [Step((None,) * workers, (Transfer("gather", (), KEY_INPUTS),))]
    for step in range(workers):
        uses = tuple(visitor(r, step, workers) for r in range(workers))
        last = step == workers - 1 and bool(accumulators)
        steps.append(Step(uses, (Transfer("reduce_scatter", (), accumulators),) if last else ()))
    return Schedule(name, workers, "keys", KEY_INPUTS, accumulators, tuple(steps))


def forward_schedule(circulation: str, workers: int, direction: int = 1) -> Schedule:
    """Return the schedule of the forward pass: a KV ring for 'kv' and 'q', or gathered keys for 'gather'.

    >>> schedule = forward_schedule("kv", 3)
    >>> schedule.steps[1].uses, schedule.hops
    ((2, 0, 1), 2)
    """
    if circulation == "gather":
        return gather_schedule("gathered keys, forward", workers, ())
    return ring_schedule("KV ring, forward", workers, "keys", KEY_INPUTS, (), direction)


def backward_schedule(circulation: str, workers: int, direction: int = 1) -> Schedule:
    """Return the schedule of the backward pass: 'kv' (dk, dv travel), 'q' (dq travels, RING-5) or 'gather'.

    >>> backward_schedule("q", 3).hops  # dq needs one hop more than q, to return to its owner
    3
    """
    if circulation == "gather":
        return gather_schedule("gathered keys, backward", workers, KEY_ACCUMULATORS)
    if circulation == "kv":
        travel = "keys", KEY_INPUTS, KEY_ACCUMULATORS
        return ring_schedule("KV ring, backward", workers, *travel, direction)
    return ring_schedule(
        "Q ring, backward", workers, "queries", QUERY_INPUTS, QUERY_ACCUMULATORS, direction
    )
