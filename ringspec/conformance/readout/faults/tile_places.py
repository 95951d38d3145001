"""Places that consist of tiles: many kernels compute tiles that a mask hides in part by other code than the others."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from ringspec.conformance.readout.faults.places import Place
from ringspec.conformance.readout.faults.tile_rules import Tiling, sizes_in
from ringspec.conformance.readout.problem.geometry import Geometry
from ringspec.problem.model import Booleans

IN_TILES = "in tiles of"  # the first words of such a place
SIZE = re.compile(rf"{IN_TILES} (\d{{1,9}}) queries and (\d{{1,9}}) keys that ")
COST = 1.0
MOST_FITTING = 4  # different sizes may have the same tiles in one problem


def tile_places(geometry: Geometry, right: Booleans) -> tuple[Place, ...]:
    """Return the tiles of each size that need no mask, and those that are masked in part; ``right``: the correct mask."""
    same = dataclasses.replace(geometry, scale=1.0, usual_scale=None)
    return kept_places(same, right.tobytes(), right.shape)


@lru_cache(maxsize=16)
def kept_places(geometry: Geometry, right: bytes, shape: tuple[int, ...]) -> tuple[Place, ...]:
    """Return the same for a mask with these bytes and this shape. They are needed several times for each problem."""
    return tuple(made_places(geometry, np.frombuffer(right, bool).reshape(shape)))


def made_places(geometry: Geometry, right: Booleans) -> Iterator[Place]:
    """Yield the places of :func:`tile_places`."""
    for rows, keys in itertools.product(sizes_in(geometry.run), repeat=2):
        if not rows == keys == geometry.slots:
            yield from places_of_size(geometry, right, rows, keys)


def places_of_size(geometry: Geometry, right: Booleans, rows: int, keys: int) -> Iterator[Place]:
    """Yield the tiles of one size that need no mask, and those that are masked in part; none if whole blocks are, which have other names."""
    tiles = f"{IN_TILES} {rows} queries and {keys} keys"
    if geometry.sees_all:
        yield Place(f"{tiles} that need no mask", np.ones_like(right), COST)
        return
    some, whole = some_and_all(geometry, right, rows, keys)
    for words, table in (("need no mask", whole), ("are masked in part", some & ~whole)):
        blocks = table.any(axis=(2, 3, 4), keepdims=True)
        if (table & right).any() and not np.array_equal(table & right, blocks & right):
            yield Place(f"{tiles} that {words}", table, COST)


def tile_place_named(geometry: Geometry, right: Booleans, words: str) -> Place | None:
    """Return the place of tiles that ``words`` describe; None if this ring has no such tiles."""
    parsed = SIZE.match(words)
    if parsed is None:
        return None
    rows, keys = map(int, parsed.groups())
    if not {rows, keys} <= set(sizes_in(geometry.run)):
        return None
    places = places_of_size(geometry, right, rows, keys)
    return next((one for one in places if one.words == words), None)


def some_and_all(
    geometry: Geometry, right: Booleans, rows: int, keys: int
) -> tuple[Booleans, Booleans]:
    """Return the pairs of tiles with a visible pair, and those of tiles in which all pairs are visible, [a, b, 1, i, j].

    A kernel that computes the visible part of a block divides this part into tiles.
    """
    n = geometry.slots
    some, whole = Tiling(n, geometry.own_run, rows, keys).some_and_all(right)
    if not geometry.of_visible_parts:
        return some, whole
    a, b = np.indices((geometry.workers, geometry.workers))[..., None, None, None]
    if geometry.layout == "zigzag":  # the visible parts of other workers' blocks need no mask
        return np.where(a == b, some, right), np.where(a == b, whole, right)
    later = np.zeros_like(right), np.zeros_like(right)
    part = Tiling(n - 1, min(geometry.run, n - 1), rows, keys).some_and_all(right[..., 1:, :-1])
    for of_later, of_part in zip(later, part, strict=True):
        of_later[..., 1:, :-1] = of_part
    return np.where(b > a, later[0], some), np.where(b > a, later[1], whole)


def tiles_fitting(
    geometry: Geometry, right: Booleans, sure: Booleans, may: Booleans
) -> list[Place]:
    """Return the places of tiles that contain all pairs that are ``sure`` [a, b, h, i, j], and no visible one that ``may`` not be there."""
    never = right & ~may
    fitting = (
        place
        for place in tile_places(geometry, right)
        if not (sure & ~place.table).any() and not (never & place.table).any()
    )
    return list(itertools.islice(fitting, MOST_FITTING))
