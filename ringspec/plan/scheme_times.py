"""Compute the time of one pass of a scheme, with the model of :mod:`ringspec.plan.times`.

All ranks wait for the slowest after each step. Hops of k travel while a step computes, hops of dk while the next one does.
Everything else ends before the first step or begins after the last: nothing hides it. A transfer along an axis is as fast
as the slowest link that its groups cross, and waits once for each message.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ringspec.plan.hardware import Hardware, Link
from ringspec.plan.moves import Move, Movements, Split, is_input
from ringspec.plan.pairs import Blocks, Integers, blocks, step_pairs, worker_pairs
from ringspec.plan.times import Rates, rates
from ringspec.plan.workload import Workload
from ringspec.schemes.mesh import Mesh

# A double ring pairs blocks in an order of its own, which is counted pair by pair.
MOST_RANKS_COUNTED = 1024


@dataclass(frozen=True)
class Times:
    """Seconds of one pass: computing and waiting of the mean rank, and the time in which all ranks wait for transfers."""

    compute: float
    waiting: float
    exposed: float

    @property
    def total(self) -> float:
        """The duration of the pass."""
        return self.compute + self.waiting + self.exposed


def link_of(mesh: Mesh, axis: str, hardware: Hardware) -> Link:
    """Return the slowest link that a group along an axis crosses: it spans size times stride neighbouring ranks.

    If this span does not divide the ranks of a link, some groups cross its end.
    """
    size, stride = mesh.along[axis]
    for link in hardware.links:
        most = link.workers
        if most is None or mesh.ranks <= most or most % (size * stride) == 0:
            return link
    return hardware.link(mesh.ranks)


@functools.lru_cache(maxsize=1)  # the counts of both passes are equal, unless there is text
def step_counts(
    split: Split, layout: str, work: Workload, text_rows_once: bool
) -> tuple[Integers, float] | None:
    """Return the pairs of one head in each step on the busiest rank, and the sum over the steps on the mean rank.

    None if there is no formula: for serving schemes, masked joint attention, and layouts whose ring blocks are of another
    form.
    """
    masked = work.causal or work.window is not None
    mesh, name = split.mesh, split.scheme
    if name == "dcp" or (name == "pcp" and split.tokens * mesh.ranks != work.length):
        return None
    if name == "joint":
        return None if masked else joint_counts(split, text_rows_once)
    if name in ("all_gather", "pcp"):
        pairs = worker_pairs(blocks(layout, mesh.ranks, split.tokens, work.mask), "keys")
        return pairs.max(keepdims=True), float(pairs.mean())
    size = mesh.ranks if name == "double_ring" else mesh.size("ring")
    parts = mesh.ranks // size
    if size > 1 < parts and masked and (layout == "striped" or mesh.names[0] != "ring"):
        return None
    if name == "double_ring" and mesh.ranks > MOST_RANKS_COUNTED:
        return None
    form = blocks(layout if size > 1 else "contiguous", size, split.tokens * parts, work.mask)
    if name == "double_ring":
        return double_ring_counts(form, mesh)
    counted = step_pairs(form, "keys")
    return counted.most, sum(counted.total.tolist()) / size


def joint_counts(split: Split, text_rows_once: bool) -> tuple[Integers, float]:
    """Count without a mask: text keys in the first step, text rows of the backward pass at one coordinate of the ring."""
    size, block = split.mesh.size("ring"), split.tokens * split.mesh.size("ulysses")
    keys = np.full(size, block, dtype=np.int64)
    keys[0] += split.text
    rows = split.text / size if text_rows_once else split.text
    return (split.text + block) * keys, float((rows + block) * keys.sum())


def double_ring_counts(form: Blocks, mesh: Mesh) -> tuple[Integers, float]:
    """Count the pairs of the busiest rank in each step (a, b): rank (o, i) computes with the block of (o - a, i - b)."""
    outer, inner = mesh.size("outer"), mesh.size("inner")
    rank = np.arange(mesh.ranks, dtype=np.int64)
    o, i = rank // inner, rank % inner
    a, b = o[:, None], i[:, None]  # one row for each step
    pairs = form.pairs(rank[None, :], (o - a) % outer * inner + (i - b) % inner)
    return pairs.max(axis=1), float(pairs.sum()) / mesh.ranks


def scheme_times(
    split: Split,
    moved: Movements,
    each: dict[str, int],
    layout: str,
    work: Workload,
    hardware: Hardware,
    backward: bool,
    overlap: bool,
) -> Times | None:
    """Return the times of one pass; None if the pairs of its steps have no formula (:func:`step_counts`)."""
    counted = step_counts(split, layout, work, backward and split.text > 0)
    if counted is None:
        return None
    most, mean = counted
    heads = replace(work, heads=split.heads // split.mesh.size("ulysses"))
    unit = heads.copies / rates(backward, work, hardware).pairs
    busiest = most.astype(np.float64) * unit
    exposed = exposed_seconds(moved.moves, each, busiest, split.mesh, hardware, overlap)
    return Times(mean * unit, max(0.0, float(busiest.sum()) - mean * unit), exposed)


def exposed_seconds(
    moves: tuple[Move, ...],
    each: dict[str, int],
    compute: NDArray[np.float64],
    mesh: Mesh,
    hardware: Hardware,
    overlap: bool,
) -> float:
    """Return the time in which all ranks wait for transfers."""
    alone = 0.0
    beside, late = np.zeros(compute.size + 1), np.zeros(compute.size + 1)
    for one in moves:
        size = np.array([one.cells * each[one.thing]])
        speed = Rates(1.0, link_of(mesh, one.axis, hardware))
        seconds = float(speed.transfer(size, one.messages)[0])
        if one.kind != "permute":
            alone += seconds
        elif is_input(one):
            beside[after(one)] += seconds
        else:
            late[1:][after(one)] += seconds
    if not overlap:
        return alone + float((beside + late).sum())
    hidden = np.append(compute, 0.0)
    return alone + float(np.maximum(beside + late - hidden, 0.0).sum())


def after(move: Move) -> slice:
    """Return the steps after which a move takes place, as an index."""
    return slice(move.steps.start, move.steps.stop, move.steps.step)
