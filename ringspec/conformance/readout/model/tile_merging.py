"""Wrong merges of the tiles of keys into which a kernel divides a block."""

from __future__ import annotations

import dataclasses

import numpy as np

from ringspec.conformance.readout.choices import Tiles
from ringspec.conformance.readout.merges import AT_FIRST, State, merge
from ringspec.conformance.readout.model.arrays import nonzero, where_changed
from ringspec.conformance.readout.model.ring import Model
from ringspec.problem.model import Array
from ringspec.spec.online_softmax import finite_shift


def in_tiles(model: Model, s: Array, tiles: Tiles) -> State:
    """Return m, l [a, b, h, i] and p [a, b, h, i, j] of blocks if tiles of keys are merged wrongly within a block."""
    if tiles.chunks:
        return in_chunks(model, s, tiles)
    parts = [keys for keys in tiles.of(model.geometry) if keys.start < s.shape[-1]]
    state = empty_state(s.shape[:-1], len(parts))
    p = np.zeros(s.shape)
    for u, keys in enumerate(parts):
        p[..., keys], state = tile_merged(model, s[..., keys], tiles.merge, state, u)
    m, l, omega = state
    for u, keys in enumerate(parts):
        p[..., keys] *= (omega[u] / nonzero(l))[..., None]
    return m, l, p


def in_chunks(model: Model, s: Array, tiles: Tiles) -> State:
    """Return the same if the tiles of each chunk are merged wrongly, and then the results of the chunks correctly."""
    run, inside = model.geometry.run, dataclasses.replace(tiles, chunks=False)
    starts = range(0, model.geometry.slots, run)
    parts = [in_tiles(model, s[..., x : x + run], inside) for x in starts]
    m = np.max([one[0] for one in parts], axis=0)
    weights = [np.exp(one[0] - finite_shift(m)) * one[1] for one in parts]
    l = np.sum(weights, axis=0)
    each = [one[2] * (x / nonzero(l))[..., None] for one, x in zip(parts, weights, strict=True)]
    return m, l, np.concatenate(each, axis=-1)


def through_tiles(model: Model, s: Array, tiles: Tiles) -> State:
    """Return the final m and l [a, h, i] and the weights of pairs if the tiles of all blocks are merged wrongly."""
    every = [(t, keys) for t in range(model.workers) for keys in tiles.of(model.geometry, t)]
    state = empty_state(s[:, 0].shape[:-1], len(every))
    p = np.zeros(s.shape)
    for number, (t, keys) in enumerate(every):
        of_tile = s[model.rows, model.order[:, t]][..., keys]
        kind = "right" if tiles.last and t < model.workers - 1 else tiles.merge
        found, state = tile_merged(model, of_tile, kind, state, number)
        p[model.rows, model.order[:, t], ..., keys] = found
    m, l, omega = state
    for number, (t, keys) in enumerate(every):
        weight = omega[number] / nonzero(l)
        p[model.rows, model.order[:, t], ..., keys] *= weight[..., None]
    return m, l, p


def tile_merged(
    model: Model, s: Array, kind: str, state: State, number: int
) -> tuple[Array, State]:
    """Merge a tile with the scores ``s`` [.., i, j] into the running state; return its normalised p and the new state."""
    m = s.max(axis=-1)
    e = np.exp(s - finite_shift(m)[..., None])
    l = e.sum(axis=-1)
    new = merge("right", *state, m, l, number, model.geometry)
    other = merge(kind, *state, m, l, number, model.geometry)
    changed = (l != 0) & ((state[1] != 0) | (kind in AT_FIRST))
    return e / nonzero(l)[..., None], where_changed(changed, other, new)


def empty_state(shape: tuple[int, ...], parts: int) -> State:
    """Return the state of the running softmax before any of its ``parts`` parts (blocks or tiles) is merged."""
    return np.full(shape, -np.inf), np.zeros(shape), np.zeros((parts, *shape))
