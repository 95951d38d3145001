"""Forward passes that keep (m, l, o): a fresh state a block, one carried state, a tree, a lazy one.

Each takes a ring and the sizes of key tiles, and returns o [B, H, n, Dv] and natural lse [B, H, n] of each
worker, in the dtype of the inputs and not rounded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from correct_kernels.ring import LN_2, Ring, Sizes, Tile, cuts, owner, tile_of
from correct_kernels.state import (
    State,
    add,
    empty,
    finite,
    merged,
    normalised,
    online,
    with_sinks,
)
from numpy.typing import NDArray

Array = NDArray[Any]
Outputs = tuple[list[Array], list[Array]]
ALL = slice(None)
LAZY_LOG2 = 8  # FlashAttention-4 rescales where the maximum rises by more than this, in log2 units


def block_state(ring: Ring, a: int, b: int, sizes: Sizes) -> State:
    """A fresh state over the tiles of one block of keys."""
    state = empty(ring, a, ALL)
    for columns in cuts(ring.k[b].shape[2], sizes):
        state = online(ring, state, tile_of(ring, a, b, ALL, columns))
    return state


def fresh(ring: Ring, sizes: Sizes) -> Outputs:
    """Each block of keys starts its own state; blocks are merged by (m, l, o)."""
    outputs = []
    for worker in range(ring.workers):
        state = empty(ring, worker, ALL)
        for step in range(ring.workers):
            block = block_state(ring, worker, owner(ring, worker, step), sizes)
            state = merged(ring, state, block)
        outputs.append(with_sinks(ring, *normalised(ring, state)))
    return unzipped(outputs)


def carried(ring: Ring, sizes: Sizes) -> Outputs:
    """One state goes through the tiles of all blocks, as in the ring attention paper."""
    outputs = []
    for worker in range(ring.workers):
        state = empty(ring, worker, ALL)
        for step in range(ring.workers):
            block = owner(ring, worker, step)
            for columns in cuts(ring.k[block].shape[2], sizes):
                state = online(ring, state, tile_of(ring, worker, block, ALL, columns))
        outputs.append(with_sinks(ring, *normalised(ring, state)))
    return unzipped(outputs)


def backwards(ring: Ring, sizes: Sizes) -> Outputs:
    """One carried state; blocks and the tiles in them are visited from the last to the first."""
    outputs = []
    for worker in range(ring.workers):
        state = empty(ring, worker, ALL)
        for step in reversed(range(ring.workers)):
            block = owner(ring, worker, step)
            for columns in reversed(list(cuts(ring.k[block].shape[2], sizes))):
                state = online(ring, state, tile_of(ring, worker, block, ALL, columns))
        outputs.append(with_sinks(ring, *normalised(ring, state)))
    return unzipped(outputs)


def lazy(ring: Ring, sizes: Sizes) -> Outputs:
    """One carried state whose maximum is stale: it follows only rises of more than 8 in log2 units.

    An exponential may therefore reach 256. A row that has seen no key takes the first maximum.
    """
    limit = ring.dtype.type(LAZY_LOG2 if ring.base2 else LAZY_LOG2 * LN_2)
    outputs = []
    for worker in range(ring.workers):
        state = empty(ring, worker, ALL)
        for step in range(ring.workers):
            block = owner(ring, worker, step)
            for columns in cuts(ring.k[block].shape[2], sizes):
                tile = tile_of(ring, worker, block, ALL, columns)
                state = add(ring, state, tile, stale_maximum(state, tile, limit))
        outputs.append(with_sinks(ring, *normalised(ring, state)))
    return unzipped(outputs)


def stale_maximum(state: State, tile: Tile, limit: Any) -> Array:
    top = np.maximum(state.m, tile.s.max(axis=3, keepdims=True))
    follows = (state.m == -np.inf) | (top - finite(state.m) > limit)
    return np.where(follows, top, state.m)


def tree(ring: Ring, sizes: Sizes) -> Outputs:
    """Split keys: each tile of each block has its own state; neighbours are merged pair by pair."""
    outputs = []
    for worker in range(ring.workers):
        states = []
        for block in (owner(ring, worker, step) for step in range(ring.workers)):
            for columns in cuts(ring.k[block].shape[2], sizes):
                tile = tile_of(ring, worker, block, ALL, columns)
                states.append(online(ring, empty(ring, worker, ALL), tile))
        while len(states) > 1:
            pairs = [states[i : i + 2] for i in range(0, len(states), 2)]
            states = [merged(ring, *pair) if len(pair) == 2 else pair[0] for pair in pairs]
        outputs.append(with_sinks(ring, *normalised(ring, states[0])))
    return unzipped(outputs)


def unzipped(outputs: list[tuple[Array, Array]]) -> Outputs:
    return [o for o, _ in outputs], [lse for _, lse in outputs]
