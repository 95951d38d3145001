"""Wrong masks of context parallelism: positions, documents, padding and prefixes.

Each function returns a change of a call's blocks, or None where the bug cannot occur.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.diagnose.scheme_answers import Change
from ringspec.conformance.diagnose.scheme_world import Floats, World

Made = Change | None
Integers = NDArray[np.int64]
LINK = "https://github.com/"


def each(world: World, visible: Callable[[int], Any]) -> Change:
    """Return the change in which ``visible(rank)`` replaces what the rows of a rank see."""
    return Change([world.blocks(rank, visible=visible(rank)) for rank in world.ranks])


def masked(world: World) -> bool:
    return bool(world.terms.get("causal")) or "window" in world.terms


def rows_of(world: World, rank: int) -> Integers:
    """Return the rows that a rank computes, in order of slots, with -1 for padding."""
    if world.call.scheme in ("dcp", "all_gather", "pcp"):
        return world.tokens_q[rank]
    return np.concatenate(
        [world.tokens_q[rank][: world.text], world.exchanged(rank, world.tokens_q)]
    )


def by_slot(values: Integers, slots: Integers, size: int) -> Integers:
    """Return [size]: the value of each token in ``slots``, 0 for all others."""
    found = np.zeros(size, dtype=np.int64)
    real = slots >= 0
    found[slots[real]] = values[real]
    return found


def with_places(
    world: World,
    of_row: Callable[[Integers], Integers],
    of_key: Callable[[Integers, int, int], Integers],
) -> Made:
    """Return the change in which positions are functions of the slots; ``of_key`` gets keys, owner and rank."""
    if not masked(world):
        return None

    def visible(rank: int) -> Callable[[int, Integers], Floats]:
        rows = rows_of(world, rank)
        place_q = by_slot(of_row(rows), rows, world.q.shape[2])

        def seen(owner: int, columns: Integers) -> Floats:
            place_k = by_slot(of_key(columns, owner, rank), columns, world.k.shape[2])
            return world.visible(place_q=place_q, place_k=place_k)

        return seen

    return each(world, visible)


def slots_as_positions(world: World) -> Made:
    return with_places(
        world, lambda rows: np.arange(len(rows)), lambda keys, *_: np.arange(len(keys))
    )


def sorted_places(slots: Integers, place: Integers, real: NDArray[np.bool_]) -> Integers:
    """Return the positions of the slots as if they were in the order of tokens; padding keeps its own."""
    found = np.where(real, place[np.maximum(slots, 0)], -1)
    found[np.flatnonzero(real)] = np.sort(found[real])
    return found


def in_token_order(rows_too: bool) -> Callable[[World], Made]:
    def make(world: World) -> Made:
        if rows_too and world.mesh.size("ulysses") == 1:
            return None

        def of_key(keys: Integers, *_: int) -> Integers:
            return sorted_places(keys, world.place_k, keys < world.keys)

        def of_row(rows: Integers) -> Integers:
            if rows_too:
                return sorted_places(rows, world.place_q, rows >= 0)
            return world.place_q[np.maximum(rows, 0)]

        return with_places(world, of_row, of_key)

    return make


def other_neighbour(world: World) -> Made:
    """The keys that arrive are masked as if they came from the other neighbour."""
    if world.mesh.size("ring") < 3:
        return None

    def visible(rank: int) -> Callable[[int, Integers], Floats]:
        def seen(owner: int, columns: Integers) -> Floats:
            hops = world.mesh.coordinate(rank, "ring") - world.mesh.coordinate(owner, "ring")
            assumed = columns if owner < 0 else world.block_of(world.mesh.moved(rank, "ring", hops))
            place_k = by_slot(world.place_k[assumed], columns, world.k.shape[2])
            real = np.zeros(world.k.shape[2])
            real[columns] = np.where(assumed < world.keys, 1.0, 0.0)
            return world.visible(place_k=place_k, pads=True) * real

        return seen

    return each(world, visible)


def by_coordinate(world: World) -> Made:
    """Blocks of earlier coordinates are visible, later ones are not; the own one is causal."""
    if world.mesh.size("ring") == 1 or not world.terms.get("causal"):
        return None
    causal = np.where(world.place_k <= world.place_q[:, None], 1.0, 0.0)
    real = np.where(np.arange(world.k.shape[2]) < world.keys, 1.0, 0.0)

    def visible(rank: int) -> Callable[[int, Integers], Floats]:
        def seen(owner: int, columns: Integers) -> Floats:
            if owner == rank:
                return causal * real
            here, there = (world.mesh.coordinate(r, "ring") for r in (rank, owner))
            return np.ones_like(causal) * real * (there < here)

        return seen

    return each(world, visible)


def positions_from_zero(world: World) -> Made:
    if world.call.scheme not in ("pcp", "dcp") or not world.terms.get("causal"):
        return None
    starts = world.terms.get("cu_seqlens", (0, world.q.shape[2]))
    of_k = world.terms.get("cu_seqlens_k", starts)
    place = world.place_q.copy()
    for (first, stop), first_k in zip(pairwise(starts), of_k, strict=False):
        place[first:stop] -= world.place_q[first] - first_k if stop > first else 0
    return each(world, lambda rank: world.visible(place_q=place))


def cache_slots(world: World) -> Made:
    """The number of a key in the rank's part of the cache is taken for its position."""
    if world.call.scheme != "dcp" or not world.terms.get("causal"):
        return None
    starts = world.terms.get("cu_seqlens_k", (0, world.keys))
    place = world.place_k.copy()
    for columns in world.columns[: world.mesh.size("dcp")]:
        for document, first in enumerate(starts[:-1]):
            mine = columns[(world.documents[1][columns] == document) & (columns < world.keys)]
            place[mine] = first + np.arange(len(mine))
    return each(world, lambda rank: world.visible(place_k=place))


def right_aligned(world: World) -> Made:
    if world.call.scheme != "dcp" or not world.terms.get("causal"):
        return None

    def seen(owner: int, columns: Integers) -> Floats:
        allowed = np.zeros((world.q.shape[2], world.k.shape[2]))
        of_q, of_k = world.documents
        for document in sorted(set(of_q.tolist())):
            rows = np.flatnonzero(of_q == document)
            mine = columns[(of_k[columns] == document) & (columns < world.keys)]
            for number, row in enumerate(rows):
                allowed[row, mine[: max(len(mine) - len(rows) + 1 + number, 0)]] = 1.0
        return allowed

    return each(world, lambda rank: seen)


def documents_ignored(world: World) -> Made:
    if "cu_seqlens" not in world.terms:
        return None
    one = tuple(0 * x for x in world.documents)
    return each(world, lambda rank: world.visible(documents=one))


def documents_by_rooms(world: World) -> Made:
    if "cu_seqlens_padded" not in world.terms:
        return None
    stops = world.terms["cu_seqlens_padded"][1:]
    of_q, of_k = (np.searchsorted(stops, np.arange(len(x)), side="right") for x in world.documents)
    return each(world, lambda rank: world.visible(documents=(of_q, of_k)))


def padding_attended(world: World) -> Made:
    if (world.tokens_k >= 0).all() or world.terms.get("causal"):
        return None
    return each(world, lambda rank: world.visible(pads=True))


def floor_length(world: World) -> Made:
    if "cu_seqlens_padded" not in world.terms:
        return None
    count = len(world.ranks)
    rooms, lengths = (
        [(b - a) // count for a, b in pairwise(world.terms[name])]
        for name in ("cu_seqlens_padded", "cu_seqlens")
    )
    offsets = np.concatenate([np.arange(n) for n in rooms])
    dropped = offsets >= np.repeat(lengths, rooms)
    seen = world.visible()
    seen[:, world.columns[:, dropped].ravel()] = 0.0
    return each(world, lambda rank: seen)


def prefix_of(world: World) -> NDArray[np.bool_]:
    """Return which keys are those of a cached prefix: no query has their position and document."""
    of_q, of_k = world.documents
    queries = set(zip(world.place_q.tolist(), of_q.tolist(), strict=True))
    pairs = zip(world.place_k.tolist(), of_k.tolist(), strict=True)
    return np.array([pair not in queries for pair in pairs])


def prefix_ignored(world: World) -> Made:
    if world.call.scheme != "pcp":
        return None
    return each(world, lambda rank: world.visible() * ~prefix_of(world))


def prefix_local(world: World) -> Made:
    if world.call.scheme != "pcp":
        return None
    far = prefix_of(world)

    def visible(rank: int) -> Floats:
        own = np.isin(np.arange(world.k.shape[2]), world.columns[rank])
        return world.visible() * (own | ~far)

    return each(world, visible)


BUGS: tuple[tuple[str, str, Callable[[World], Made], tuple[str, ...]], ...] = (
    ("scheme-slots", "masks use slots in place of positions, as when is_causal is passed to each block unchanged", slots_as_positions, ()),
    ("scheme-token-order", "exchanged rows and keys are masked as if they were in the order of tokens", in_token_order(True), ()),
    ("scheme-gathered-order", "gathered keys are masked as if they were in the order of tokens", in_token_order(False), ()),
    ("scheme-other-neighbour", "keys are masked as if they came from the other neighbour", other_neighbour, ()),
    ("scheme-by-coordinate", "whole blocks are skipped or used by their coordinate in the ring, which does not follow the order of tokens", by_coordinate, ()),
    ("scheme-positions-from-zero", "the positions of queries after cached keys begin at 0", positions_from_zero, ()),
    ("scheme-cache-slots", "the number of a key in the rank's part of the cache is taken for its position", cache_slots, ()),
    ("scheme-right-aligned", "the last queries see a right-aligned triangle of the rank's keys", right_aligned, (f"{LINK}vllm-project/vllm/pull/46076", f"{LINK}vllm-project/vllm/pull/47181", f"{LINK}vllm-project/vllm/issues/50391")),
    ("scheme-documents-ignored", "documents or requests see each other", documents_ignored, ()),
    ("scheme-documents-by-rooms", "the padded lengths say to which document a token belongs", documents_by_rooms, ()),
    ("scheme-padding", "padding slots are used as keys", padding_attended, (f"{LINK}NVIDIA/TransformerEngine/issues/1930",)),
    ("scheme-floor-length", "of each document, a rank uses the first n // W slots", floor_length, (f"{LINK}NVIDIA/TransformerEngine/issues/1930", f"{LINK}NVIDIA/TransformerEngine/issues/3331")),
    ("scheme-prefix-ignored", "the cached prefix is not used", prefix_ignored, (f"{LINK}sgl-project/sglang/issues/23415",)),
    ("scheme-prefix-local", "each rank uses only its own part of the cached prefix", prefix_local, ()),
)  # fmt: skip
