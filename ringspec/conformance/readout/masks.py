"""Patterns of visible pairs: the correct one, and those that kernels use by mistake.

A pair [a, b, h, i, j] is query i of worker a with key j of worker b in head h; i and j are slots, the places of tokens
on a worker. A *block* [a, b] contains all pairs of two workers. A *tile* is a block or a rectangular part of it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import numpy as np

from ringspec.conformance.readout.geometry import EXCHANGED, Geometry, Window, believed, relations
from ringspec.conformance.readout.last_tiles import short_tiles
from ringspec.conformance.readout.tile_rules import Rule, rules_of_tiles
from ringspec.problem.model import Booleans, Integers

# The size of a tile, or several sizes, as in '2 or 3 keys'.
SIZES = re.compile(r"\b(\d+)(?: or \d+)*\b(?= queries| keys)")


@dataclass(frozen=True)
class Mask:
    """A pattern [a, b, 1, i, j] that is True for visible pairs, and ``words`` that describe the mistake.

    The correct pattern, and the one that hides every pair, have no words. ``cost`` is lower for more usual mistakes.
    ``of_tiles``: the mistake is a rule about tiles.
    """

    words: str
    pattern: Booleans
    cost: float = 1.0
    of_tiles: bool = False

    @cached_property
    def key(self) -> tuple[tuple[int, ...], bytes]:
        """What is equal for equal patterns."""
        return key_of(self.pattern)


@lru_cache(maxsize=24)
def masks_of(geometry: Geometry) -> list[Mask]:
    """Return all masks, the correct one first; of masks with the same pattern, only the first is kept."""
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

    ``words`` are returned as they are if ``more`` is not the same rule for other sizes.
    """
    if SIZES.sub("", words) != SIZES.sub("", more):
        return words
    pairs = iter(zip(SIZES.finditer(words), SIZES.finditer(more), strict=True))

    def both(_: re.Match[str]) -> str:
        sizes = " or ".join(one[0] for one in next(pairs)).split(" or ")
        return " or ".join(dict.fromkeys(sizes))

    return SIZES.sub(both, words)


def of_first_sizes(words: str) -> str:
    """Return ``words`` with only the first of several sizes of tiles, as one mask has them."""
    return SIZES.sub(r"\1", words)


def numbers_of(masks: Sequence[Mask]) -> Callable[[Booleans], int | None]:
    """Return a function that gives the index of the first mask with a pattern; None if there is none."""
    numbers = {mask.key: number for number, mask in reversed(list(enumerate(masks)))}
    return lambda pattern: numbers.get(key_of(pattern))


def key_of(pattern: Booleans) -> tuple[tuple[int, ...], bytes]:
    return pattern.shape, pattern.tobytes()


def document_of(position: Integers, starts: Sequence[int]) -> Integers:
    """Return the number of the document of each position; ``starts``: the first position of each document."""
    return np.maximum(np.searchsorted(np.asarray(starts), position, "right") - 1, 0)


def same(of_q: Integers, of_k: Integers) -> Booleans:
    """Return the pairs [a, b, 1, i, j] of queries and keys, [a, b, n], with the same number."""
    return np.asarray(of_q[:, :, None, :, None] == of_k[:, :, None, None, :])


def seen(
    query: Integers,
    key: Integers,
    causal: bool,
    window: Window | None,
    reach: int = 0,
    documents: Sequence[int] | None = None,
) -> Booleans:
    """Return which keys are visible to which queries, [a, b, 1, i, j], for positions ``query`` and ``key`` [a, b, n].

    ``reach``: how many keys after its own position a query sees under a causal mask; -1 hides its own position, too.
    """
    gap = key[:, :, None, None, :] - query[:, :, None, :, None]
    pattern = np.ones(gap.shape, bool)
    if causal:
        pattern &= gap <= reach
    if window is not None:
        left, right = window
        if left is not None:
            pattern &= gap >= -left
        if right is not None:
            pattern &= gap <= right
    if documents is not None:
        pattern &= same(document_of(query, documents), document_of(key, documents))
    return pattern


def within_documents(geometry: Geometry) -> Callable[..., Booleans]:
    """Return :func:`seen`, whose patterns show only pairs of tokens of one document of the ring."""
    real = geometry.real_pairs
    if geometry.documents is None:
        return lambda *positions: seen(*positions) & real
    of = document_of(geometry.position, geometry.documents)
    of_one = same(of[:, None], of[None, :]) & real
    return lambda *positions: seen(*positions) & of_one


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
    if not geometry.parts:
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


def owners(geometry: Geometry, side: str) -> dict[str, Integers]:
    """Return the wrong owners that either pass may assume for the queries ('q') or keys ('k') of each block.

    The result maps a description of the owners to their worker numbers [a, b].
    """
    return relations(geometry, "forward", side, False) | relations(
        geometry, "backward", side, False
    )


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
    yield Mask("query positions lack the worker's offset", see(slot, k, True, window))
    yield Mask("key positions lack the worker's offset", see(q, slot, True, window))
    half = geometry.slots // 2
    if half:
        tile = "the causal mask compares slot numbers counted within half a block"
        yield Mask(tile, see(slot % half, slot % half, True, None))
    if geometry.layout == "zigzag":
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


def window_masks(geometry: Geometry, q: Integers, k: Integers, slot: Integers) -> Iterator[Mask]:
    assert geometry.window is not None
    see = within_documents(geometry)
    causal, (left, right) = geometry.causal, geometry.window
    if not causal:
        yield Mask("a causal mask is applied besides the window", see(q, k, True, geometry.window))
    if causal:
        yield Mask("the window is ignored", see(q, k, True, None))
        yield Mask(
            "the causal mask is ignored and the window kept", see(q, k, False, geometry.window)
        )
    local = see(q, k, causal, None) & see(slot, slot, False, geometry.window)
    yield Mask("the window compares slot numbers within a worker", local)
    if geometry.layout == "contiguous" and geometry.workers == 4:
        # As in a ring of two groups of two workers, which exchange heads inside a group.
        a, b = np.indices((4, 4))[..., None] % 2 * geometry.slots
        in_pairs = see(q, k, causal, None) & see(slot + a, slot + b, False, geometry.window)
        yield Mask("the window counts tokens within pairs of workers (0 and 1, 2 and 3)", in_pairs)
    if geometry.layout == "striped" and causal:
        # In the block of a later worker, the visible part begins at query 1.
        a, b = np.indices((geometry.workers, geometry.workers))[..., None]
        in_part = see(q, k, True, None) & see(slot - (b > a), slot, False, geometry.window)
        yield Mask("the window counts queries and keys within the visible part of a block", in_part)
    for where, more_left, more_right in (
        ("on the left", 1, 0),
        ("on the right", 0, 1),
        ("on both sides", 1, 1),
    ):
        for words, sign in (("wide", 1), ("narrow", -1)):
            changed = moved(left, sign * more_left), moved(right, sign * more_right)
            yield Mask(f"the window is one key too {words} {where}", see(q, k, causal, changed))
    yield Mask("the two sides of the window are swapped", see(q, k, causal, (right, left)))
    yield Mask("the left side of the window is ignored", see(q, k, causal, (None, right)))
    yield Mask("the right side of the window is ignored", see(q, k, causal, (left, None)))
    if left is not None:
        yield Mask(
            "the left side of the window is half as wide", see(q, k, causal, (left // 2, right))
        )
        yield Mask(
            "the left side of the window is twice as wide", see(q, k, causal, (2 * left, right))
        )


def document_masks(geometry: Geometry, q: Integers, k: Integers, slot: Integers) -> Iterator[Mask]:
    """Yield masks that treat the boundaries of documents wrongly."""
    starts = geometry.documents
    assert starts is not None
    alone = seen(q, k, geometry.causal, geometry.window)  # as if there were one document
    of_q, of_k = document_of(q, starts), document_of(k, starts)

    def within(of_q: Integers, of_k: Integers) -> Booleans:
        return alone & same(of_q, of_k)

    yield Mask("documents are ignored", alone)
    local = document_of(slot, starts)
    words = "the boundaries of documents are compared with slot numbers within a worker"
    yield Mask(words, within(local, local))
    everything = seen(slot, slot, geometry.causal, geometry.window, 0, starts)
    yield Mask("the mask and the documents use slot numbers within a worker", everything)
    numbered = (x - x.min(axis=2, keepdims=True) for x in (of_q, of_k))
    yield Mask("documents are numbered within each worker", within(*numbered))
    for by, words in ((1, "late"), (-1, "early")):
        moved_starts = tuple(x + by for x in starts)
        late = within(document_of(q, moved_starts), document_of(k, moved_starts))
        yield Mask(f"documents begin one token too {words}", late)
    q_inside, k_inside = (x - np.asarray(starts)[document_of(x, starts)] for x in (q, k))
    words = "positions are counted within documents, whose boundaries are ignored"
    yield Mask(words, seen(q_inside, k_inside, geometry.causal, geometry.window))
    first = (of_k == 0)[:, :, None, None, :]
    words = "the keys of the first document are visible to all documents"
    yield Mask(words, within(of_q, of_k) | (alone & first))
    q_first, k_first = (np.broadcast_to(x[:, :, :1], x.shape) for x in (of_q, of_k))
    words = "in each block count as of the document of the first"
    yield Mask(f"all queries {words}", within(q_first, of_k))
    yield Mask(f"all keys {words}", within(of_q, k_first))
    yield Mask(f"all queries and keys {words}", within(q_first, k_first))


def padding_masks(geometry: Geometry, q: Integers, k: Integers) -> Iterator[Mask]:
    """Yield masks that show padded keys, or take other slots for padding."""
    causal, real = geometry.causal, geometry.real
    slot = np.arange(geometry.tokens).reshape(real.shape)
    of_q, of_k = np.broadcast_arrays(slot[:, None], slot[None])
    by_slot = seen(of_q, of_k, causal, None)
    # Positions of padding are before all others, so that a causal mask does not hide padded keys.
    rows, by_position = real[:, None, None, :, None], seen(q, k, causal, None)
    yield Mask("the causal mask is ignored, and padding hidden", geometry.real_pairs)
    yield Mask("padded keys are visible to every query", by_position & rows, 0.9)
    yield Mask("padded keys are visible to the queries of later slots", by_slot & rows, 0.9)
    number = real.sum(axis=1, keepdims=True)
    at = np.arange(geometry.slots)
    taken = {
        "at the end of each worker": at < number,
        "at the start of each worker": at >= geometry.slots - number,
        "at the end of the last worker": slot < real.sum(),
        "at the start of worker 0": slot >= len(geometry.padding),
    }
    for words, table in taken.items():
        shown, words = table[None, :, None, None, :], f"padding is taken to be {words}"
        too = table[:, None, None, :, None]
        for more, pattern in (("", by_position), (" (masked by slot)", by_slot)):
            yield Mask(f"{words}, for keys{more}", pattern & rows & shown, 1.0)
            yield Mask(f"{words}{more}", pattern & too & shown, 1.0)
    for owner, of in owners(geometry, "k").items():
        shown = real[of][:, :, None, None, :]
        for more, pattern in (("", by_position), (" (masked by slot)", by_slot)):
            words = f"the padding is that of the keys of {owner}{more}"
            yield Mask(words, pattern & rows & shown, 1.1)


def moved(side: int | None, by: int) -> int | None:
    return None if side is None else side + by
