"""Compute the time of one pass of a ring, and the smallest sizes for which the computation hides the transfers.

A transfer is hidden if the computation that runs at the same time takes at least as long. Inputs are the tensors that
travel unchanged, such as k and v. Accumulators are the tensors to which each step adds, such as dk and dv. There are
two models of the time:

``timeline_seconds`` is the simpler model, that of ``ringspec.rings.cost.timeline`` with a latency added. All workers
wait for the slowest worker after each step, and everything that a step sends travels while the step computes. A real
ring cannot do that, because a step cannot send sums that it has not finished.

``seconds`` takes into account when data is ready. While a step computes, the inputs of the next step travel.
Accumulators can only be sent after the step has added to them. They travel during the computation of the next step, on
the same link as the inputs, and are hidden if they arrive before that computation ends. The accumulators of the last
step travel when nothing is computed. If keys are gathered, the gather ends before the computation begins, and the
reduction of dk and dv begins after the computation; with W workers, each takes W - 1 hops (transfers to a neighbour).

In neither model does a transfer slow the computation down.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringspec.plan.hardware import Hardware, Link
from ringspec.plan.pairs import Integers, StepPairs, blocks, step_pairs, worker_pairs
from ringspec.plan.traffic import Memory, Traffic, memory, movement, streamed_bytes, traffic
from ringspec.plan.workload import Workload

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class Counts:
    """Exact counts for one pass.

    ``steps``: visible pairs of one head in each step. ``workers``: visible pairs of one head on each worker, int64 [W].
    ``traffic``: bytes that each worker sends.
    """

    steps: StepPairs
    workers: Integers
    traffic: Traffic


def counts(layout: str, circulation: str, backward: bool, work: Workload) -> Counts:
    """Count visible pairs for each step and each worker, and bytes; if keys are gathered, step 0 is the gather."""
    moves = movement(circulation, backward).moves
    form = blocks(layout, work.workers, work.tokens, work.mask)
    steps = step_pairs(form, moves)
    if circulation == "gather":
        none = np.zeros(1, dtype=np.int64)
        parts = (steps.most, steps.least, steps.total)
        steps = StepPairs(*(np.concatenate((none, x)) for x in parts))
    return Counts(steps, worker_pairs(form, moves), traffic(circulation, backward, work))


@dataclass(frozen=True)
class Pass:
    """The cost of one pass, for one layout and one circulation.

    Counts: ``pairs``, visible pairs of all workers, over all batch entries and heads; ``bytes_sent``, bytes that one
    worker sends; ``hops``, number of steps after which something is sent; ``working_steps``, number of steps in which
    any pair is visible; ``counted``, pairs of one head and bytes in each step. ``imbalance``: the work of the busiest
    worker divided by the mean; ``lockstep_imbalance``: the same ratio if all workers wait for the busiest in each step.
    ``name``: the name of the schedule. ``memory``: bytes that one worker holds.

    Times in seconds: ``compute_seconds``, mean computing time of the workers; ``waiting_seconds``, mean time for which
    a worker waits for the busiest worker of each step; ``exposed_seconds``, time in which all workers wait for
    transfers; ``seconds``, the sum of these three times, which is the duration of the pass; ``timeline_seconds``, the
    duration by the simpler model; ``transfer_seconds``, the time of all transfers. Arrays [steps]: ``step_compute``,
    computing time of the busiest worker; ``step_transfer``, time of the transfers after the step.

    ``idle``: 1 - compute_seconds / seconds. ``hides_from``: the fewest tokens per worker for which every transfer that
    can overlap with a computation is hidden, with the same number of workers; None if there is no such number.
    ``streaming_bound``: True if reading and writing a step's blocks once in the device's memory takes longer than the
    products of the busiest step.
    """

    name: str
    counted: Counts
    step_compute: Seconds
    step_transfer: Seconds
    pairs: int
    bytes_sent: int
    hops: int
    working_steps: int
    imbalance: float
    lockstep_imbalance: float
    compute_seconds: float
    waiting_seconds: float
    exposed_seconds: float
    seconds: float
    timeline_seconds: float
    transfer_seconds: float
    hides_from: int | None
    memory: Memory
    streaming_bound: bool

    @property
    def idle(self) -> float:
        return 1.0 - self.compute_seconds / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Rates:
    """The rates of a pass: visible pairs that a worker computes per second, and the link between workers."""

    pairs: float
    link: Link

    def compute(self, pairs: Integers, work: Workload) -> Seconds:
        time: Seconds = pairs.astype(np.float64) * (work.copies / self.pairs)
        return time

    def transfer(self, sent: Integers, hops: int = 1) -> Seconds:
        """Return the time of each transfer in seconds; 0 where ``sent`` is 0 bytes."""
        time: Seconds = sent / self.link.bytes_per_second.value
        return np.where(sent > 0, time + hops * self.link.latency.value, 0.0)


def rates(backward: bool, work: Workload, hardware: Hardware) -> Rates:
    """Return the rates of one device.

    The number of pairs per second is the peak rate times the efficiency, divided by the operations for one pair. The
    peak rate depends on the number format of P, an operand of the product P V.
    """
    flops = hardware.peak(work.recipe.p).value * hardware.efficiency(backward).value
    return Rates(flops / work.flops(backward), hardware.link(work.workers))


def exposed(compute: Seconds, moved: Traffic, speed: Rates, gathered: bool, overlap: bool) -> float:
    """Return the time in seconds for which all workers wait for transfers, in the model ``seconds``."""
    if gathered:
        hops = compute.size - 2  # W - 1: the first step computes nothing
        alone = speed.transfer(moved.inputs, hops) + speed.transfer(moved.accumulators, hops)
        return float(alone.sum())
    if not overlap:
        return float(speed.transfer(moved.sent).sum())
    late = np.concatenate((np.zeros(1, dtype=np.int64), moved.accumulators))
    beside = speed.transfer(moved.inputs + late[:-1])
    return float(np.maximum(beside - compute, 0.0).sum() + speed.transfer(late[-1:]).sum())


def simple(compute: Seconds, moved: Traffic, speed: Rates, gathered: bool, overlap: bool) -> float:
    """Return the duration of a pass in the simpler model, ``timeline_seconds``."""
    hops = compute.size - 2 if gathered else 1
    send = speed.transfer(moved.sent, hops)
    return float((np.maximum(compute, send) if overlap else compute + send).sum())


def plan_pass(
    layout: str,
    circulation: str,
    backward: bool,
    work: Workload,
    hardware: Hardware,
    overlap: bool = True,
) -> Pass:
    """Compute the counts, times and memory of one pass."""
    counted, speed = counts(layout, circulation, backward, work), rates(backward, work, hardware)
    gathered, copies = circulation == "gather", work.copies
    busiest = speed.compute(counted.steps.most, work)
    pairs = sum(counted.steps.total.tolist())
    most = sum(counted.steps.most.tolist())
    mean, unit = pairs / work.workers, copies / speed.pairs
    waiting = (most * work.workers - pairs) / work.workers * unit
    bare = exposed(busiest, counted.traffic, speed, gathered, overlap)
    stream = streamed_bytes(backward, work) / hardware.memory_bytes_per_second.value
    transfers = speed.transfer(counted.traffic.sent, work.workers - 1 if gathered else 1)
    return Pass(
        name=movement(circulation, backward).name,
        counted=counted,
        step_compute=busiest,
        step_transfer=transfers,
        pairs=pairs * copies,
        bytes_sent=sum(counted.traffic.sent.tolist()),
        hops=counted.traffic.hops,
        working_steps=int(np.count_nonzero(counted.steps.total)),
        imbalance=float(counted.workers.max()) / mean,
        lockstep_imbalance=most / mean,
        compute_seconds=mean * unit,
        waiting_seconds=waiting,
        exposed_seconds=bare,
        seconds=mean * unit + waiting + bare,
        timeline_seconds=simple(busiest, counted.traffic, speed, gathered, overlap),
        transfer_seconds=float(transfers.sum()),
        hides_from=None
        if gathered or not overlap
        else hides_from(layout, circulation, backward, work, speed),
        memory=memory(circulation, backward, work),
        streaming_bound=bool(stream > busiest.max()),
    )


LARGEST_BLOCK = 1 << 30


def hides(layout: str, circulation: str, backward: bool, work: Workload, speed: Rates) -> bool:
    """Return whether in every step the computation takes at least as long as the transfers during it."""
    moved = traffic(circulation, backward, work)
    form = blocks(layout, work.workers, work.tokens, work.mask)
    steps = step_pairs(form, movement(circulation, backward).moves)
    late = np.concatenate((np.zeros(1, dtype=np.int64), moved.accumulators[:-1]))
    beside = speed.transfer(moved.inputs + late)
    return bool((beside <= speed.compute(steps.most, work)).all())


def hides_from(
    layout: str, circulation: str, backward: bool, work: Workload, speed: Rates
) -> int | None:
    """Return n*, the fewest tokens per worker for which all transfers are hidden; None if there is no such number.

    With n tokens per worker and no window, the busiest worker of a step computes n**2, n (n + 1) / 2 or n**2 / 2 pairs
    and sends a multiple of n bytes. If transfers are hidden for n tokens, they are therefore also hidden for more.
    Every step is like the first, the second or the last step, so a ring of three workers has all kinds of steps.
    Without a mask, with a latency of 0 and as many key heads as query heads, n* is the ratio F / B of Liu et al.,
    https://arxiv.org/abs/2310.01889, section 3. With a window some steps may compute nothing, so the result is None.
    """
    if work.window is not None:
        return None
    way = circulation if backward else "kv"  # the forward pass of a Q ring is a KV ring
    return fewest_tokens(layout, way, backward, work.resized(min(work.workers, 3), 2), speed)


@functools.lru_cache(maxsize=256)
def fewest_tokens(
    layout: str, circulation: str, backward: bool, few: Workload, speed: Rates
) -> int | None:
    """Find the result of :func:`hides_from` by bisection.

    ``few`` is the attention layer on at most three workers; its number of tokens has no effect.
    """
    unit = 2 if layout == "zigzag" else 1

    def hidden(units: int) -> bool:
        resized = few.resized(few.workers, units * unit)
        return hides(layout, circulation, backward, resized, speed)

    low, high = 0, LARGEST_BLOCK // unit
    if not hidden(high):
        return None
    while high - low > 1:  # hidden with high, not with low
        middle = (low + high) // 2
        low, high = (low, middle) if hidden(middle) else (middle, high)
    return high * unit


def largest_ring(
    layout: str, circulation: str, work: Workload, hardware: Hardware, backward: bool
) -> int | None:
    """Return the largest number of workers for which every transfer is hidden, with the same number of tokens in all.

    The fewest tokens per worker (:func:`hides_from`) depend on the link, and the link depends on the number of workers.
    The result need not divide the number of tokens. It is None for gathered keys, and if not even two workers hide
    their transfers.
    """
    if circulation == "gather":
        return None
    pairs, best = rates(backward, work, hardware).pairs, None
    for link in hardware.links:
        three = work.resized(3, 2)
        fewest = hides_from(layout, circulation, backward, three, Rates(pairs, link))
        if fewest is None:
            continue
        most = work.length // fewest
        most = most if link.workers is None else min(most, link.workers)
        if most >= 2 and hardware.link(most) is link:
            best = max(most, best or 0)
    return best
