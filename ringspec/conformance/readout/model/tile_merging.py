"""Wrong merges of the tiles of keys into which a kernel divides a block."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ringspec.conformance.readout.faults.choices import Choices, Tiles
from ringspec.conformance.readout.faults.merges import AT_FIRST, State, merge
from ringspec.conformance.readout.model.arrays import nonzero, numbers_of_blocks, where_changed
from ringspec.conformance.readout.model.part_results import begun, with_lse
from ringspec.conformance.readout.model.ring import Model
from ringspec.problem.model import Array, Booleans, Integers
from ringspec.spec.online_softmax import finite_shift


def in_tiles(model: Model, s: Array, tiles: Tiles) -> State:
    """Return m, l [a, b, h, i] and p [a, b, h, i, j] of blocks if tiles of keys are merged wrongly within a block."""
    if tiles.chunks:
        return in_chunks(model, s, tiles, model.geometry.run)
    if tiles.blocks:
        here = model.blocks_with(tiles.blocks)
        return chosen_of(
            here, in_tiles(model, s, dataclasses.replace(tiles, blocks="")), softmax_of(s)
        )
    run = model.geometry.own_run
    if run < model.geometry.run and s.shape[-1] > run:
        of_chunks = in_chunks(model, s, dataclasses.replace(tiles, chunks=True), run)
        return chosen_of(
            model.geometry.own_blocks[..., 0], of_chunks, in_one_range(model, s, tiles)
        )
    return in_one_range(model, s, tiles)


def chosen_of(here: Booleans, state: State, other: State) -> State:
    """Return ``state`` in the blocks ``here`` [a, b, 1, 1], and ``other`` elsewhere."""
    m, l, p = zip(state, other, strict=True)
    return np.where(here, *m), np.where(here, *l), np.where(here[..., None], *p)


def in_one_range(model: Model, s: Array, tiles: Tiles) -> State:
    """Return the same if all keys of ``s`` are one range."""
    parts = [keys for keys in tiles.of(model.geometry) if keys.start < s.shape[-1]]
    state = empty_state(s.shape[:-1], len(parts))
    p = np.zeros(s.shape)
    for u, keys in enumerate(parts):
        m, l, p[..., keys] = softmax_of(s[..., keys])
        state = part_merged(model, m, l, tiles.merge, state, u)
    m, l, omega = state
    for u, keys in enumerate(parts):
        p[..., keys] *= (omega[u] / nonzero(l))[..., None]
    return m, l, p


def in_chunks(model: Model, s: Array, tiles: Tiles, run: int) -> State:
    """Return the same if the tiles of each ``run`` keys are merged wrongly, and then the results of these chunks correctly."""
    inside = dataclasses.replace(tiles, chunks=False)
    starts = range(0, model.geometry.slots, run)
    return joined([in_tiles(model, s[..., x : x + run], inside) for x in starts])


def joined(parts: Sequence[State]) -> State:
    """Merge the results of parts of the keys correctly."""
    m = np.max([one[0] for one in parts], axis=0)
    weights = [np.exp(one[0] - finite_shift(m)) * one[1] for one in parts]
    l = np.sum(weights, axis=0)
    each = [one[2] * (x / nonzero(l))[..., None] for one, x in zip(parts, weights, strict=True)]
    return m, l, np.concatenate(each, axis=-1)


def through_tiles(model: Model, s: Array, c: Choices) -> State:
    """Return the final m and l [a, h, i] and the weights of pairs if the tiles of all blocks are merged one by one."""
    tiles, lse = c["tiles"], numbers_of_blocks(model, c["part_lse"])
    every = [(t, keys) for t in range(model.workers) for keys in tiles.of(model.geometry, t)]
    state = empty_state(s[:, 0].shape[:-1], len(every))
    p = np.zeros(s.shape)
    for number, (t, keys) in enumerate(every):
        at = model.rows, model.order[:, t]
        kind = "right" if tiles.last and t < model.workers - 1 else tiles.merge
        m, l, found = of_part(model, s[at][..., keys], c, lse[at])
        p[(*at, ..., keys)] = found
        state = part_merged(model, m, l, kind, state, number)
    m, l, omega = state
    for number, (t, keys) in enumerate(every):
        weight = omega[number] / nonzero(l)
        p[model.rows, model.order[:, t], ..., keys] *= weight[..., None]
    return m, l, p


def of_part(model: Model, s: Array, c: Choices, lse: Integers) -> State:
    """Return m, l [a, h, i] and normalised p [a, h, i, j] of a tile or chunk of keys with the scores ``s``.

    ``lse`` [a, h, i]: with which lse it is merged, as numbers in PART_LSES.
    """
    m, l, p = softmax_of(s)
    if c["begins"]:
        m, l, (p,) = begun(model, c["begins"], m, l, p)
    return (with_lse(model, lse, s, m, l) if lse.any() else m), l, p


def softmax_of(s: Array) -> State:
    """Return m and l [..], and normalised p [.., j], of the scores ``s`` [.., j]."""
    m = s.max(axis=-1)
    e = np.exp(s - finite_shift(m)[..., None])
    l = e.sum(axis=-1)
    return m, l, e / nonzero(l)[..., None]


def part_merged(model: Model, m: Array, l: Array, kind: str, state: State, number: int) -> State:
    """Merge the part with the number ``number``, of which m and l [.., i] are known, into the running state."""
    new = merge("right", *state, m, l, number, model.geometry)
    changed = (l != 0) & (True if kind in AT_FIRST else state[1] != 0)
    if kind == "right" or not changed.any():
        return new
    other = merge(kind, *state, m, l, number, model.geometry)
    return where_changed(changed, other, new)


def empty_state(shape: tuple[int, ...], parts: int) -> State:
    """Return the state of the running softmax before any of its ``parts`` parts (blocks or tiles) is merged."""
    return np.full(shape, -np.inf), np.zeros(shape), np.zeros((parts, *shape))
