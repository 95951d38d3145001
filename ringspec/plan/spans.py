"""Compute when each worker of a small ring computes and sends, for ``ringspec.render.figures.cost_timeline``."""

from __future__ import annotations

import numpy as np

from ringspec.plan.hardware import Hardware, Link
from ringspec.plan.pairs import Integers, blocks
from ringspec.plan.times import Counts, Rates, counts, rates
from ringspec.plan.traffic import movement
from ringspec.plan.workload import Workload
from ringspec.rings.cost import Span
from ringspec.spec.schedule import visitor


def pairs_by_worker(layout: str, circulation: str, backward: bool, work: Workload) -> Integers:
    """Count the pairs of one head that each of the W workers computes in each step, int64 [steps, W].

    This takes O(W * W) operations, so W should be small.

    >>> from ringspec.plan.workload import workload
    >>> pairs_by_worker("contiguous", "kv", False, workload(12, 3, heads=1)).tolist()
    [[10, 10, 10], [0, 16, 16], [0, 0, 16]]
    """
    moves = movement(circulation, backward).moves
    form = blocks(layout, work.workers, work.tokens, work.mask)
    worker = np.arange(work.workers, dtype=np.int64)
    steps = []
    for t in range(work.workers):
        met = np.array([visitor(r, t, work.workers) for r in range(work.workers)], dtype=np.int64)
        steps.append(form.pairs(worker, met) if moves == "keys" else form.pairs(met, worker))
    if circulation == "gather":
        steps.insert(0, np.zeros(work.workers, dtype=np.int64))
    return np.array(steps)


def ring_spans(
    layout: str,
    circulation: str,
    backward: bool,
    work: Workload,
    hardware: Hardware,
    link: Link | None = None,
) -> tuple[Span, ...]:
    """Return the bars of a timeline of one pass: (worker, step, 'compute' or 'send', start, stop), times in seconds.

    ``layout``, ``circulation`` and ``backward`` select the pass of the attention layer ``work``. ``link`` None: the
    link of ``hardware`` for a ring of this size.

    After each step all workers wait for the slowest worker. The inputs of the next step travel during a step; the
    accumulators to which a step has added travel during the next step, or after the last step
    (:mod:`ringspec.plan.times`).
    """
    speed = Rates(rates(backward, work, hardware).pairs, link or hardware.link(work.workers))
    counted = counts(layout, circulation, backward, work)
    pairs = pairs_by_worker(layout, circulation, backward, work)
    beside, after = travelling(counted, circulation == "gather")
    hops = work.workers - 1 if circulation == "gather" else 1
    spans, now = [], 0.0
    for t in range(pairs.shape[0]):
        computing = speed.compute(pairs[t], work)
        sending = float(speed.transfer(beside[t : t + 1], hops)[0])
        for r in range(work.workers):
            spans.append(Span(r, t, "compute", now, now + float(computing[r])))
            if sending:
                spans.append(Span(r, t, "send", now, now + sending))
        now += max(float(computing.max()), sending)
    last = float(speed.transfer(after, hops)[0])
    if last:
        final = pairs.shape[0] - 1
        spans += [Span(r, final, "send", now, now + last) for r in range(work.workers)]
    return tuple(spans)


def travelling(counted: Counts, gathered: bool) -> tuple[Integers, Integers]:
    """Return the number of bytes that travel during each step, int64 [steps], and after the last step, int64 [1]."""
    moved = counted.traffic
    if gathered:
        return moved.inputs, moved.accumulators[-1:]
    late = np.concatenate((np.zeros(1, dtype=np.int64), moved.accumulators))
    return moved.inputs + late[:-1], late[-1:]
