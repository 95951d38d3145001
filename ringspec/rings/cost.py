"""The cost of a ring: hops, bytes, visible pairs per worker and step, imbalance, a timeline.

Counts come from the schedule and the masks with which the ring runs. Only times are estimates, from rates that the
caller gives. Bytes are payload without headers. The recipe, which says where values are rounded, also gives the number
of bytes of each number that travels.

:mod:`ringspec.spec.schedule` says what travels (RING-4 to RING-7).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspec.errors import OptionError
from ringspec.formats import format_of
from ringspec.problem.checks import number
from ringspec.problem.model import Integers, Problem
from ringspec.recipes import Recipe
from ringspec.spec.layout import Layout
from ringspec.spec.masks import visible
from ringspec.spec.schedule import Schedule, Transfer


@dataclass(frozen=True)
class Cost:
    """The counts of one pass, forward or backward; ``name`` is the name of its schedule.

    ``pairs`` int64 [steps, W]: visible (query, key) pairs over all batches and query heads. ``sent`` int64 [steps, W]:
    payload bytes that each worker sends after each step. ``hops``: the number of steps after which something travels.
    ``copies``: B H if all heads and batch entries have the same mask, so that ``pairs // copies`` counts the pairs of
    one head; otherwise 1.
    """

    name: str
    pairs: Integers
    sent: Integers
    hops: int
    copies: int = 1

    @property
    def imbalance(self) -> float:
        """Total work of the busiest worker divided by the mean over workers; 1.0 is perfect balance."""
        return ratio(self.pairs.sum(axis=0))

    @property
    def lockstep_imbalance(self) -> float:
        """The imbalance if all workers wait for the busiest one in every step.

        Each step has a busiest worker, and a mean number of pairs over the workers. The imbalance is the sum of the
        busiest workers' pairs over all steps, divided by the sum of the means.
        """
        if self.pairs.sum() == 0:
            return 1.0
        return float(self.pairs.max(axis=1).sum() / self.pairs.mean(axis=1).sum())


def ratio(work: Integers) -> float:
    """Divide the largest entry of ``work`` (one entry per worker) by the mean entry; return 1 if there is no work."""
    return float(work.max() / work.mean()) if work.sum() else 1.0


def pairs_of_block(problem: Problem, layout_q: Layout, layout_k: Layout, a: int, b: int) -> int:
    """Count the visible pairs of queries of worker a and keys of worker b, over all batches and query heads."""
    rows, columns = problem.rows.take(layout_q.table[a]), problem.columns.take(layout_k.table[b])
    allowed = visible(rows, columns, problem.terms)
    batch, heads = problem.q.shape[:2]
    copies = (batch // allowed.shape[0]) * (heads // allowed.shape[1])
    return int(np.count_nonzero(allowed)) * copies


def copies_of(problem: Problem) -> int:
    """Return B H if all batch entries and heads have the same mask, else 1."""
    first = visible(problem.rows.take(problem.rows.index[:1]), problem.columns, problem.terms)
    batch, heads = problem.q.shape[:2]
    return batch * heads if first.shape[:2] == (1, 1) else 1


def pairs_text(copies: int) -> str:
    """Return the words for a number of pairs that is printed after division by ``copies``.

    >>> pairs_text(6), pairs_text(1)
    ('visible pairs per head, times B H = 6', 'visible pairs')
    """
    return "visible pairs" if copies == 1 else f"visible pairs per head, times B H = {copies}"


def token_bytes(name: str, problem: Problem, recipe: Recipe) -> float:
    """Return the payload bytes per slot of the travelling tensor ``name``, over all batches and heads.

    Positions, segments and bounds have 8 bytes each. For bias, mask and keep, a broadcast axis counts as length 1.
    """
    batch, heads, _, width = problem.q.shape
    kv_heads, value_width = problem.v.shape[1], problem.v.shape[3]
    size = {
        f: format_of(getattr(recipe, f)).dtype.itemsize
        for f in ("inputs", "carried_dq", "carried_dkv", "delta", "backward_lse")
    }
    rows, columns = problem.rows, problem.columns
    if name in ("q", "k"):
        return batch * (heads if name == "q" else kv_heads) * width * size["inputs"]
    if name in ("v", "dy"):
        return batch * (kv_heads if name == "v" else heads) * value_width * size["inputs"]
    if name == "dq":
        return batch * heads * width * size["carried_dq"]
    if name == "dk":
        return batch * kv_heads * width * size["carried_dkv"]
    if name == "dv":
        return batch * kv_heads * value_width * size["carried_dkv"]
    if name == "lse":
        return batch * heads * size["backward_lse"]
    if name == "row_term":
        return batch * heads * size["delta"]
    if name == "columns":
        parts = (columns.position, columns.segment)
        return sum(8 * x.shape[0] for x in parts if x is not None)
    if name == "dbias":
        return 0 if rows.bias is None else row_bytes(rows.bias)
    whole = (rows.position, rows.segment, rows.bound_min, rows.bound_max)
    pairwise = (rows.bias, rows.mask, rows.keep)
    return sum(8 * x.shape[0] for x in whole if x is not None) + sum(
        row_bytes(x) for x in pairwise if x is not None
    )


def row_bytes(x: np.ndarray) -> float:
    """Return the bytes of one query row of x [b, h, n, Sk]; 0 if n = 1, because every worker then has that row."""
    return 0.0 if x.shape[2] == 1 else float(x.shape[0] * x.shape[1] * x.shape[3] * x.itemsize)


def transfer_bytes(
    transfer: Transfer, slots: int, workers: int, problem: Problem, recipe: Recipe
) -> int:
    """Return the payload bytes that one worker sends to other workers in one transfer."""
    block = sum(token_bytes(name, problem, recipe) for name in transfer.carries) * slots
    copies = 1 if transfer.kind == "permute" else workers - 1
    return int(block * copies)


def cost(
    problem: Problem, schedule: Schedule, layout_q: Layout, layout_k: Layout, recipe: Recipe
) -> Cost:
    """Count the visible pairs, bytes and hops of a schedule, without computing the attention.

    ``problem`` gives shapes and masks, ``layout_q`` and ``layout_k`` the tokens of each worker, and
    ``recipe`` the number of bytes of each number that travels.
    """
    workers = schedule.workers
    pairs = np.zeros((len(schedule.steps), workers), dtype=np.int64)
    sent = np.zeros_like(pairs)
    slots = layout_k.slots if schedule.moves == "keys" else layout_q.slots
    for t, step in enumerate(schedule.steps):
        for worker, (a, b) in schedule.pairs(t):
            pairs[t, worker] = pairs_of_block(problem, layout_q, layout_k, a, b)
        for transfer in step.transfers:
            sent[t] += transfer_bytes(transfer, slots, workers, problem, recipe)
    return Cost(schedule.name, pairs, sent, schedule.hops, copies_of(problem))


@dataclass(frozen=True)
class Span:
    """One bar of a timeline: ``worker`` is busy with ``what`` in ``step`` from ``start`` to ``stop`` (seconds)."""

    worker: int
    step: int
    what: str
    start: float
    stop: float


def timeline(
    counted: Cost, *, pairs_per_second: float, bytes_per_second: float, overlap: bool = True
) -> tuple[Span, ...]:
    """Compute when each worker computes and sends, if all workers wait for the slowest after each step.

    ``counted`` is a result of :func:`cost`. Rates are per worker, times in seconds. With ``overlap``, everything that
    is sent after a step travels during the computation of that step. This is optimistic for gradients, which must be
    computed before they are sent. Raises :class:`~ringspec.errors.OptionError` for rates that are not above 0.

    >>> import numpy as np
    >>> c = Cost("x", np.array([[10, 20], [20, 10]]), np.array([[5, 5], [0, 0]]), 1)
    >>> max(s.stop for s in timeline(c, pairs_per_second=10, bytes_per_second=1))
    7.0
    """
    pairs_per_second = number(pairs_per_second, "pairs_per_second")
    bytes_per_second = number(bytes_per_second, "bytes_per_second")
    if not (pairs_per_second > 0 and bytes_per_second > 0):
        raise OptionError(
            "rates > 0",
            f"{pairs_per_second} pairs/s, {bytes_per_second} bytes/s",
            "pass positive rates",
        )
    spans, now = [], 0.0
    for t in range(counted.pairs.shape[0]):
        computed = now + counted.pairs[t] / pairs_per_second
        end = now
        for r in range(counted.pairs.shape[1]):
            begin = now if overlap else float(computed[r])
            sent = begin + counted.sent[t, r] / bytes_per_second
            spans.append(Span(r, t, "compute", now, float(computed[r])))
            if counted.sent[t, r]:
                spans.append(Span(r, t, "send", begin, float(sent)))
            end = max(end, float(computed[r]), float(sent))
        now = end
    return tuple(spans)
