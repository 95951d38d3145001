"""The running softmax of some rows: maximum m, sum l, accumulator o; and what all forwards end with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from correct_kernels.ring import Ring, Tile
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class State:
    """``m``, ``l`` [B, H, n, 1] and ``o`` [B, H, n, Dv], not normalised; m is -inf where no key was seen."""

    m: Array
    l: Array
    o: Array


def empty(ring: Ring, a: int, rows: slice) -> State:
    q = ring.q[a][:, :, rows]
    column, value_dim = q[..., :1], ring.v[a].shape[3]
    nothing = np.zeros((*q.shape[:3], value_dim), ring.dtype)
    return State(np.full_like(column, -np.inf), np.zeros_like(column), nothing)


def finite(m: Array) -> Array:
    """m, and 0 where it is -inf: no exponential of such a row is anything but 0."""
    return np.where(m == -np.inf, np.zeros_like(m), m)


def rescaled(ring: Ring, state: State, m: Array) -> State:
    """The same sums relative to another maximum."""
    factor = ring.exp(state.m - finite(m))
    return State(m, state.l * factor, state.o * factor)


def add(ring: Ring, state: State, tile: Tile, m: Array) -> State:
    """A tile added to a state, both relative to m. P is rounded where it becomes an operand."""
    e = ring.exp(tile.s - finite(m))
    old = state if m is state.m else rescaled(ring, state, m)
    o = old.o + ring.operand(tile.drop(e)) @ tile.v
    return State(m, old.l + e.sum(axis=3, keepdims=True), o)


def online(ring: Ring, state: State, tile: Tile) -> State:
    """A tile added relative to the larger of the state's and the tile's maximum."""
    return add(ring, state, tile, np.maximum(state.m, tile.s.max(axis=3, keepdims=True)))


def merged(ring: Ring, one: State, two: State) -> State:
    """Two states of different keys as one."""
    m = np.maximum(one.m, two.m)
    one, two = rescaled(ring, one, m), rescaled(ring, two, m)
    return State(m, one.l + two.l, one.o + two.o)


def normalised(ring: Ring, state: State) -> tuple[Array, Array]:
    """o [B, H, n, Dv] and lse [B, H, n, 1] in natural logarithms; 0 and -inf of a row without keys."""
    divisor = np.where(state.l > 0, state.l, np.ones_like(state.l))
    lse = ring.natural(finite(state.m) + ring.log(state.l))
    return state.o / divisor, lse


def with_sinks(ring: Ring, o: Array, lse: Array) -> tuple[Array, Array]:
    """The sinks' logits added to the denominator, once a row. Returns o and lse [B, H, n]."""
    if ring.sinks is not None:
        sinks = ring.sinks.astype(ring.dtype)[None, :, None, :]
        top = np.maximum(lse, sinks.max(axis=3, keepdims=True))
        total = np.exp(lse - top) + np.exp(sinks - top).sum(axis=3, keepdims=True)
        new = top + np.log(total)
        o, lse = o * np.exp(lse - new), new
    return o, lse[..., 0]
