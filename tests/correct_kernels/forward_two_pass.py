"""Forward passes that go round the ring twice: what P is relative to is known before the second."""

from __future__ import annotations

from typing import Any

import numpy as np
from correct_kernels.forward_states import ALL, Outputs, unzipped
from correct_kernels.ring import Ring, Sizes, Tile, cuts, owner, tile_of
from correct_kernels.state import State, add, empty, finite, normalised, with_sinks
from numpy.typing import NDArray

Array = NDArray[Any]


def tiles(ring: Ring, worker: int, sizes: Sizes) -> list[Tile]:
    """The tiles of one worker's rows, in the order of the ring."""
    found = []
    for block in (owner(ring, worker, step) for step in range(ring.workers)):
        for columns in cuts(ring.k[block].shape[2], sizes):
            found.append(tile_of(ring, worker, block, ALL, columns))
    return found


def maximum(seen: list[Tile], start: Array) -> Array:
    m = start
    for tile in seen:
        m = np.maximum(m, tile.s.max(axis=3, keepdims=True))
    return m


def global_maximum(ring: Ring, sizes: Sizes) -> Outputs:
    """First the maximum of each row over all keys, then the sums relative to it."""
    outputs = []
    for worker in range(ring.workers):
        seen, start = tiles(ring, worker, sizes), empty(ring, worker, ALL)
        m = maximum(seen, start.m)
        state = State(m, start.l, start.o)
        for tile in seen:
            state = add(ring, state, tile, m)
        outputs.append(with_sinks(ring, *normalised(ring, state)))
    return unzipped(outputs)


def normalised_p(ring: Ring, sizes: Sizes) -> Outputs:
    """First m and l over all keys; then P = exp(s - m) / l is rounded and multiplied by V."""
    outputs = []
    for worker in range(ring.workers):
        seen, start = tiles(ring, worker, sizes), empty(ring, worker, ALL)
        m, l, o = maximum(seen, start.m), start.l, start.o
        for tile in seen:
            l = l + ring.exp(tile.s - finite(m)).sum(axis=3, keepdims=True)
        divisor = np.where(l > 0, l, np.ones_like(l))
        for tile in seen:
            p = ring.exp(tile.s - finite(m)) / divisor
            o = o + ring.operand(tile.drop(p)) @ tile.v
        lse = ring.natural(finite(m) + ring.log(l))
        outputs.append(with_sinks(ring, o, lse))
    return unzipped(outputs)
