"""Count the bytes that each worker sends after each step, and the bytes that it holds.

The counts follow from the list of arrays that a pass sends; ``ringspec.rings.cost`` gives the size of each array. A hop
is one transfer from a worker to its neighbour.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from ringspec.formats import format_of
from ringspec.plan.pairs import Integers
from ringspec.plan.workload import Workload
from ringspec.rings.cost import token_bytes
from ringspec.spec.schedule import (
    KEY_ACCUMULATORS,
    KEY_INPUTS,
    QUERY_ACCUMULATORS,
    QUERY_INPUTS,
)


@dataclass(frozen=True)
class Movement:
    """What travels between workers in one pass.

    ``name``: the name of the schedule. ``moves``: the side that travels, 'keys' or 'queries'. ``inputs``: the arrays
    that travel unchanged, such as k and v. ``accumulators``: the travelling arrays to which each step adds, such as dk,
    dv.
    """

    name: str
    moves: str
    inputs: tuple[str, ...]
    accumulators: tuple[str, ...]


FORWARD = {
    "kv": Movement("KV ring, forward", "keys", KEY_INPUTS, ()),
    "gather": Movement("gathered keys, forward", "keys", KEY_INPUTS, ()),
}
FORWARD["q"] = FORWARD["kv"]
BACKWARD = {
    "kv": Movement("KV ring, backward", "keys", KEY_INPUTS, KEY_ACCUMULATORS),
    "q": Movement("Q ring, backward", "queries", QUERY_INPUTS, QUERY_ACCUMULATORS),
    "gather": Movement("gathered keys, backward", "keys", KEY_INPUTS, KEY_ACCUMULATORS),
}


def movement(circulation: str, backward: bool) -> Movement:
    return (BACKWARD if backward else FORWARD)[circulation]


def block_bytes(names: tuple[str, ...], work: Workload) -> int:
    """Return the bytes of one worker's block of the arrays ``names``, over all batch entries and heads."""
    return int(slot_bytes(names, work.resized(1, 1)) * work.tokens)


@functools.lru_cache(maxsize=256)
def slot_bytes(names: tuple[str, ...], single: Workload) -> float:
    """Return the bytes of one token in the arrays ``names``, over all batch entries and heads of ``single``."""
    one = single.one_token()
    return sum(token_bytes(name, one, single.recipe) for name in names)


@dataclass(frozen=True)
class Traffic:
    """The number of bytes that each worker sends after each step, int64 [steps]; it is the same for all workers.

    ``inputs``: arrays that the step does not change, so they can travel while the step computes. ``accumulators``:
    arrays to which the step adds, so they travel after the step. ``hops``: number of steps after which something is
    sent.
    """

    inputs: Integers
    accumulators: Integers
    hops: int

    @property
    def sent(self) -> Integers:
        total: Integers = self.inputs + self.accumulators
        return total


def traffic(circulation: str, backward: bool, work: Workload) -> Traffic:
    """Count the bytes sent in one pass: inputs make W - 1 hops, accumulators W hops (rule RING-4).

    If keys are gathered, each worker sends its block to all W - 1 other workers at once.

    >>> from ringspec.plan.workload import workload
    >>> work = workload(24, 3, heads=1, head_dim=4, recipe_name="float64")
    >>> [x.tolist() for x in (traffic("kv", True, work).inputs, traffic("kv", True, work).accumulators)]
    [[576, 576, 0], [512, 512, 512]]
    """
    moved, workers = movement(circulation, backward), work.workers
    inputs, added = block_bytes(moved.inputs, work), block_bytes(moved.accumulators, work)
    if circulation == "gather":
        arriving = np.zeros(workers + 1, dtype=np.int64)
        leaving = arriving.copy()
        arriving[0], leaving[workers] = inputs * (workers - 1), added * (workers - 1)
        return Traffic(arriving, leaving, 2 if moved.accumulators else 1)
    arriving = np.full(workers, inputs if workers > 1 else 0, dtype=np.int64)
    arriving[workers - 1] = 0
    leaving = np.full(workers, added if workers > 1 else 0, dtype=np.int64)
    return Traffic(arriving, leaving, int(np.count_nonzero(arriving + leaving)))


@dataclass(frozen=True)
class Memory:
    """The largest number of bytes that one worker holds during a pass, in four parts.

    ``inputs``: the worker's own q, k, v, and in a backward pass also dy, lse and row_term = delta - dlse.
    ``accumulators``: the sums that stay on the worker, m, l and o in a forward pass, and dq, or dk and dv, in a
    backward pass. ``buffers``: two copies of each block that travels, one in use and one arriving. ``gathered``: if
    keys are gathered, k and v of all W workers, and in a backward pass also their dk and dv; otherwise 0.
    """

    inputs: int
    accumulators: int
    buffers: int
    gathered: int

    @property
    def total(self) -> int:
        """The sum of the four parts."""
        return self.inputs + self.accumulators + self.buffers + self.gathered


def memory(circulation: str, backward: bool, work: Workload) -> Memory:
    """Count the bytes that one worker holds in a pass.

    Results need no memory of their own, because they replace the accumulators.
    """
    moved = movement(circulation, backward)
    held = block_bytes(("q", "k", "v"), work)
    own = softmax_state(work)
    if backward:
        held += block_bytes(("dy", "lse", "row_term"), work)
        stays = QUERY_ACCUMULATORS if moved.moves == "keys" else KEY_ACCUMULATORS
        own = block_bytes(stays, work)
    travels = block_bytes(moved.inputs + moved.accumulators, work)
    if work.workers == 1:
        alone = block_bytes(moved.accumulators, work)
        return Memory(held, own + alone, 0, 0)
    if circulation == "gather":
        return Memory(held, own, 0, travels * work.workers)
    return Memory(held, own, 2 * travels, 0)


def softmax_state(work: Workload) -> int:
    """Count the bytes of the running softmax of one worker: m and l [B, H, n], and o [B, H, n, Dv]."""
    size = {
        f: format_of(getattr(work.recipe, f)).dtype.itemsize for f in ("statistics", "carried_o")
    }
    row = 2 * size["statistics"] + work.value_dim * size["carried_o"]
    return work.copies * work.tokens * row


def streamed_bytes(backward: bool, work: Workload) -> int:
    """Count the bytes that a kernel reads and writes in the device's memory in one ring step.

    Each block counts once: inputs are read, and accumulators are read and written.
    """
    if backward:
        inputs = block_bytes(("q", "dy", "lse", "row_term", "k", "v"), work)
        return inputs + 2 * block_bytes(("dq", "dk", "dv"), work)
    return block_bytes(("q", "k", "v"), work) + 2 * softmax_state(work)
