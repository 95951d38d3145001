"""Forward passes that merge blocks by their normalised (o, lse), as rings around a finished kernel do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from correct_kernels.forward_states import ALL, Outputs, block_state, unzipped
from correct_kernels.ring import Ring, Sizes, owner, tile_of
from correct_kernels.state import finite, normalised, with_sinks
from numpy.typing import NDArray

Array = NDArray[Any]
Part = tuple[Array, Array]


def by_weights(one: Part, two: Part) -> Part:
    """lse = log(exp(lse_1) + exp(lse_2)); o = sum of exp(lse_n - lse) o_n. lse is [..., n, 1]."""
    lse = np.logaddexp(one[1], two[1])
    first, second = (np.exp(x - finite(lse)) for x in (one[1], two[1]))
    return first * one[0] + second * two[0], lse


def by_sigmoid(one: Part, two: Part) -> Part:
    """o - sigmoid(lse_new - lse) (o - o_new) and lse - logsigmoid(lse - lse_new).

    This is the form of ring-flash-attention. Rows that one part does not see have a difference of
    infinities, which is replaced by its limit.
    """
    (o, lse), (new_o, new_lse) = one, two
    with np.errstate(invalid="ignore", over="ignore"):
        rise = new_lse - lse
        merged_o = o - (o - new_o) / (1 + np.exp(-rise))
        merged_lse = lse + np.logaddexp(np.zeros_like(rise), rise)
    nothing_old, nothing_new = lse == -np.inf, new_lse == -np.inf
    merged_o = np.where(nothing_old, new_o, np.where(nothing_new, o, merged_o))
    merged_lse = np.where(nothing_old, new_lse, np.where(nothing_new, lse, merged_lse))
    return np.where(nothing_old & nothing_new, np.zeros_like(merged_o), merged_o), merged_lse


def merge_all(combine: Callable[[Part, Part], Part], parts: list[Part]) -> Part:
    """Parts with lse [..., n, 1], merged one after the other."""
    merged = parts[0]
    for part in parts[1:]:
        merged = combine(merged, part)
    return merged


def ring_of_parts(
    ring: Ring, combine: Callable[[Part, Part], Part], part: Callable[[int, int], Part]
) -> Outputs:
    """The parts of each worker's steps, merged in their order."""
    outputs = []
    for worker in range(ring.workers):
        visited = [owner(ring, worker, step) for step in range(ring.workers)]
        merged = merge_all(combine, [part(worker, block) for block in visited])
        outputs.append(with_sinks(ring, *merged))
    return unzipped(outputs)


def weighted(ring: Ring, sizes: Sizes) -> Outputs:
    """Blocks merged by weights exp(lse_n - lse)."""
    return ring_of_parts(
        ring, by_weights, lambda a, b: normalised(ring, block_state(ring, a, b, sizes))
    )


def sigmoid(ring: Ring, sizes: Sizes) -> Outputs:
    """Blocks merged in the sigmoid form."""
    return ring_of_parts(
        ring, by_sigmoid, lambda a, b: normalised(ring, block_state(ring, a, b, sizes))
    )


def normalised_blocks(ring: Ring, sizes: Sizes) -> Outputs:
    """P of each block is divided by the block's own sum, then rounded: a plain softmax for each block."""

    def part(a: int, b: int) -> Part:
        tile = tile_of(ring, a, b, ALL, ALL)
        m = tile.s.max(axis=3, keepdims=True)
        e = ring.exp(tile.s - finite(m))
        l = e.sum(axis=3, keepdims=True)
        p = e / np.where(l > 0, l, np.ones_like(l))
        o = ring.operand(tile.drop(p)) @ tile.v
        return o, ring.natural(finite(m) + ring.log(l))

    return ring_of_parts(ring, by_weights, part)
