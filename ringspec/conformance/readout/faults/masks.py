"""Patterns of visible pairs: the correct one, and those that kernels use by mistake.

A pair [a, b, h, i, j] is query i of worker a with key j of worker b in head h; i and j are slots, the places of tokens
on a worker. A *block* [a, b] contains all pairs of two workers. A *tile* is a block or a rectangular part of it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial

import numpy as np

from ringspec.conformance.readout.faults.document_masks import document_masks, padding_masks
from ringspec.conformance.readout.faults.last_tiles import short_tiles
from ringspec.conformance.readout.faults.tile_rules import Rule, needs_mask, rules_of_tiles
from ringspec.conformance.readout.faults.visible import (
    Mask,
    key_of,
    owners,
    seen,
    within_documents,
)
from ringspec.conformance.readout.faults.window_masks import window_masks
from ringspec.conformance.readout.problem.geometry import EXCHANGED, Geometry, believed
from ringspec.problem.model import Booleans, Integers

# The size of a tile, or several sizes, as in '2 or 3 keys'.
SIZES = re.compile(r"\b(\d+)(?: or \d+)*\b(?= queries| keys)")


def masks_of(geometry: Geometry) -> list[Mask]:
    """Return all masks, the correct one first; of masks with the same pattern, only the first is kept."""
    # Masks do not depend on the scale, in which a readout and its proof differ.
    return made_masks(dataclasses.replace(geometry, scale=1.0, usual_scale=None))


def right_mask(geometry: Geometry) -> Mask:
    """Return the correct mask."""
    return next(every_mask(geometry))


@lru_cache(maxsize=24)
def made_masks(geometry: Geometry) -> list[Mask]:
    """Make the masks of :func:`masks_of`."""
    left: list[Mask] = []
    known: dict[tuple[tuple[int, ...], bytes], int] = {}
    for mask in every_mask(geometry):
        number = known.setdefault(mask.key, len(left))
        if number == len(left):
            left.append(mask)
        elif mask.of_tiles:
            words = with_more_sizes(left[number].words, mask.words)
            left[number] = dataclasses.replace(left[number], words=words)
    return left


def with_more_sizes(words: str, more: str) -> str:
    """Return a rule about tiles with the sizes of another one added, as in 'tiles of 5 queries and 2 or 3 keys'.

    ``words`` are returned as they are if ``more`` is not the same rule for other sizes, or if both numbers would have
    several sizes: '2 or 3 queries and 2 or 3 keys' would say that all four combinations fit.
    """
    if SIZES.sub("", words) != SIZES.sub("", more):
        return words
    every = [
        dict.fromkeys(" or ".join((one[0], other[0])).split(" or "))
        for one, other in zip(SIZES.finditer(words), SIZES.finditer(more), strict=True)
    ]
    if sum(len(sizes) > 1 for sizes in every) > 1:
        return words
    joined = iter(" or ".join(sizes) for sizes in every)
    return SIZES.sub(lambda _: next(joined), words)


def of_first_sizes(words: str) -> str:
    """Return ``words`` with only the first of several sizes of tiles, as one mask has them."""
    return SIZES.sub(r"\1", words)


def in_single_sizes(words: str) -> list[str]:
    """Return a rule about tiles with each of its sizes alone; ``words`` themselves if they have no several sizes.

    >>> in_single_sizes("tiles of 5 queries and 2 or 3 keys are skipped")
    ['tiles of 5 queries and 2 keys are skipped', 'tiles of 5 queries and 3 keys are skipped']
    """
    several = next((one for one in SIZES.finditer(words) if " or " in one[0]), None)
    if several is None:
        return [words]
    before, after = words[: several.start()], words[several.end() :]
    return [f"{before}{size}{after}" for size in several[0].split(" or ")]


def shares_sizes(words: str, others: str) -> bool:
    """Return whether two rules about tiles differ only in their sizes, and have a size of each side in common."""
    sizes = [[{*re.findall(r"\d+", one[0])} for one in SIZES.finditer(x)] for x in (words, others)]
    same = SIZES.sub("", words) == SIZES.sub("", others)
    return same and all(x & y for x, y in zip(*sizes, strict=True))


def numbers_of(masks: Sequence[Mask]) -> Callable[[Booleans], int | None]:
    """Return a function that gives the index of the first mask with a pattern; None if there is none."""
    numbers = {mask.key: number for number, mask in reversed(list(enumerate(masks)))}
    return lambda pattern: numbers.get(key_of(pattern))


def every_mask(geometry: Geometry) -> Iterator[Mask]:
    W, n = geometry.workers, geometry.slots
    causal, window = geometry.causal, geometry.window
    see = within_documents(geometry)
    q = np.broadcast_to(geometry.position[:, None, :], (W, W, n))
    k = np.broadcast_to(geometry.position[None, :, :], (W, W, n))
    slot = np.broadcast_to(np.arange(n), (W, W, n))
    right = see(q, k, causal, window)
    yield Mask("", right)
    yield Mask("", np.zeros_like(right))
    for words, pattern in short_tiles(right):
        yield Mask(words, pattern, 1.95, True)
    if geometry.sees_all:
        yield Mask("a causal mask is applied although the call has none", see(q, k, True, None))
        yield Mask(
            "a causal mask that compares slot numbers is applied although the call has none",
            see(slot, slot, True, None),
        )
        return
    yield Mask("no pair is masked", np.ones_like(right))
    local = "the mask compares slot numbers within a worker, not global positions"
    yield Mask(local, see(slot, slot, causal, window))
    yield Mask("the mask is inverted", ~right)
    if geometry.layout == "contiguous":
        words = "the offset between the positions of two workers has the wrong sign in the mask"
        yield Mask(words, see(geometry.position[None], geometry.position[:, None], causal, window))
    if causal:
        yield from causal_masks(geometry, q, k, slot)
    if window is not None:
        yield from window_masks(geometry, q, k, slot)
    if geometry.documents is not None:
        yield from document_masks(geometry, q, k, slot)
    if geometry.padding:
        yield from padding_masks(geometry, q, k)
    for words, pattern, cost in patterns_of_tiles(geometry, right):
        yield Mask(words, pattern, cost, True)
    for name, table in believed(geometry).items():
        q_there = np.broadcast_to(table[:, None, :], (W, W, n))
        k_there = np.broadcast_to(table[None, :, :], (W, W, n))
        layout = f"of the layout {name}"
        # Exchanged chunks are a slip in a zigzag kernel; elsewhere they hide or show the same pairs by chance.
        cost = 1.5 if name == EXCHANGED and geometry.layout != "zigzag" else 1.0
        yield Mask(f"the mask uses positions {layout}", see(q_there, k_there, causal, window), cost)
        yield Mask(f"the mask uses key positions {layout}", see(q, k_there, causal, window), cost)
        yield Mask(f"the mask uses query positions {layout}", see(q_there, k, causal, window), cost)
    keys, queries = owners(geometry, "k"), owners(geometry, "q")
    see = partial(seen, documents=geometry.documents)  # the mask of other documents, too
    for owner, table in keys.items():
        pattern = see(q, geometry.position[table], causal, window) & geometry.real_pairs
        yield Mask(f"the mask is the one for keys of {owner}", pattern, 1.5)
    for owner, table in queries.items():
        pattern = see(geometry.position[table], k, causal, window) & geometry.real_pairs
        yield Mask(f"the mask is the one for queries of {owner}", pattern, 1.5)


def patterns_of_tiles(geometry: Geometry, right: Booleans) -> Iterator[Rule]:
    """Yield what is visible under each wrong rule about tiles.

    A kernel that computes the visible part of a block by itself masks nothing in the parts of another zigzag shard. In a
    striped block of a later worker, query 0 and the last key have no visible pair, and its tiles begin at query 1.
    """
    causal = geometry.causal and geometry.window is None
    rules = rules_of_tiles(right, geometry.own_run, causal)
    a, b = np.indices((geometry.workers, geometry.workers))[..., None, None, None]
    if not geometry.of_visible_parts:
        yield from rules
    elif geometry.layout == "zigzag":
        for words, pattern, cost in rules:
            yield words, np.where(a == b, pattern, right), cost
    else:
        parts = rules_of_tiles(right[..., 1:, :-1], geometry.run, causal, geometry.slots)
        for (words, pattern, cost), (_, part, _) in zip(rules, parts, strict=True):
            later = np.zeros_like(right)
            later[..., 1:, :-1] = part
            yield words, np.where(b > a, later, pattern), cost


def with_a_visible_pair(right: Booleans, half: int) -> Booleans:
    """Return all pairs [a, b, 1, i, j] of each chunk of queries and chunk of keys, of ``half`` tokens, that see any key."""
    W = len(right)
    chunks = right.reshape(W, W, 1, 2, half, 2, half).any(axis=(4, 6))
    return np.asarray(np.repeat(np.repeat(chunks, half, axis=3), half, axis=4))


def moved(pattern: Booleans, by: int) -> Booleans:
    """Return the causal pattern [a, b, 1, i, j] of blocks whose diagonal lies ``by`` keys, 1 or -1, further to the right."""
    found = np.zeros_like(pattern)
    if by == 1:
        found[..., 1:] |= pattern[..., :-1]
        found[..., :-1, :] |= pattern[..., 1:, :]
        return found | pattern
    found[..., :-1] |= pattern[..., 1:]
    found[..., 1:, :] |= pattern[..., :-1, :]
    return found & pattern


def causal_masks(geometry: Geometry, q: Integers, k: Integers, slot: Integers) -> Iterator[Mask]:
    window = geometry.window
    see = within_documents(geometry)
    a, b = np.indices((geometry.workers, geometry.workers))[..., None, None, None]
    shape = see(q, k, True, window).shape
    own = "the causal mask hides each query's own position (key < query)"
    yield Mask(own, see(q, k, True, window, -1))
    yield Mask(
        "the causal mask shows one key too many (key <= query + 1)", see(q, k, True, window, 1)
    )
    right, inside = see(q, k, True, None), see(q, k, False, window and (window[0], None))
    for how, by in (("shows one key too many", 1), ("hides one key too many", -1)):
        pattern = np.where(needs_mask(right), moved(right, by), right) & inside
        yield Mask(f"the mask of a block that needs one {how} in each row", pattern, 1.6)
    yield Mask("the causal mask is reversed (key >= query)", see(-q, -k, True, window))
    yield Mask("the causal mask is reversed (key > query)", see(-q, -k, True, window, -1))
    strict = "the causal mask compares slot numbers strictly (slot of key < slot of query)"
    yield Mask(strict, see(slot, slot, True, None, -1))
    yield Mask(
        "the causal mask compares slot numbers and shows one key too many",
        see(slot, slot, True, None, 1),
    )
    for sign, table in (("<=", b <= a), ("<", b < a)):
        words = f"the causal mask compares only worker numbers (key's worker {sign} query's)"
        yield Mask(words, np.broadcast_to(table, shape), 1.5)
    yield Mask(
        "the mask compares the slot numbers of queries with the positions of keys",
        see(slot, k, True, window),
    )
    yield Mask(
        "the mask compares the positions of queries with the slot numbers of keys",
        see(q, slot, True, window),
    )
    half = geometry.slots // 2
    if half:
        tile = "the causal mask compares slot numbers counted within half a block"
        yield Mask(tile, see(slot % half, slot % half, True, None))
    if geometry.layout == "zigzag":
        seen_of_chunks = with_a_visible_pair(see(q, k, True, window), half)
        more = "the causal mask shows one key too many (key <= query + 1) in pairs of chunks that it does not hide"
        yield Mask(more, see(q, k, True, window, 1) & seen_of_chunks)
        if window is None:
            unmasked = "no pair is masked in pairs of chunks that the mask does not hide"
            yield Mask(unmasked, see(q, k, False, None) & seen_of_chunks)
        for of, positions in (("key", k), ("query", q)):
            for number, which in enumerate(("first", "second")):
                for by, words in ((half, "late"), (-half, "early")):
                    moved_by = positions + by * ((slot >= half) == number)
                    pattern = (
                        see(q, moved_by, True, window)
                        if of == "key"
                        else see(moved_by, k, True, window)
                    )
                    yield Mask(
                        f"{of} positions of the {which} chunk are one chunk too {words}", pattern
                    )
        second = np.arange(geometry.slots) >= half
        second_queries = np.broadcast_to(second[:, None], shape)
        first_keys = np.broadcast_to(~second[None, :], shape)
        swapped = np.where(
            b < a, second_queries, np.where(b > a, first_keys, see(q, k, True, window))
        )
        yield Mask(
            "the masks for keys of an earlier and of a later zigzag worker are swapped", swapped
        )
