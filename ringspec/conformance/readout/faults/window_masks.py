"""Wrong masks of calls with a window: it is too wide or too narrow, or counts tokens within a part of the sequence."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from ringspec.conformance.readout.faults.visible import (
    Mask,
    document_of,
    seen,
    within,
    within_documents,
)
from ringspec.conformance.readout.problem.geometry import (
    EVERY_OTHER,
    PER_DOCUMENT,
    Geometry,
    Window,
    tables,
)
from ringspec.problem.model import Booleans, Integers

PAIRED = 4  # workers of the readouts that rings of two groups of two workers claim
NEIGHBOURS, OTHERS = "0 and 1, 2 and 3", "0 and 2, 1 and 3"


def window_masks(geometry: Geometry, q: Integers, k: Integers, slot: Integers) -> Iterator[Mask]:
    assert geometry.window is not None
    see = within_documents(geometry)
    causal, (left, right) = geometry.causal, geometry.window
    if not causal:
        yield Mask("a causal mask is applied besides the window", see(q, k, True, geometry.window))
        yield Mask("a causal mask is applied in place of the window", see(q, k, True, None))
    if causal:
        yield Mask("the window is ignored", see(q, k, True, None))
        yield Mask(
            "the causal mask is ignored and the window kept", see(q, k, False, geometry.window)
        )
    local = see(q, k, causal, None) & see(slot, slot, False, geometry.window)
    yield Mask("the window compares slot numbers within a worker", local)
    for words, pattern in windows_of_blocks(geometry):
        yield Mask(f"the window counts {words}", pattern & see(q, k, causal, None))
    for words, pattern in chain(
        windows_of_exchanged_pairs(geometry), windows_of_document_chunks(geometry)
    ):
        yield Mask(words, pattern)
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


def moved(side: int | None, by: int) -> int | None:
    return None if side is None else side + by


def windows_of_blocks(geometry: Geometry) -> Iterator[tuple[str, Booleans]]:
    """Yield the pairs within a window that a kernel passes on unchanged with a part of the sequence, and the part in words.

    The part is what one worker, or a group of workers that exchange heads, computes at once.
    """
    assert geometry.window is not None
    window, layout, visible = geometry.window, geometry.layout, "within the visible part of a block"
    if layout == "striped" and geometry.causal:
        yield f"queries and keys {visible}", in_blocks(geometry, layout, geometry.position)
    if layout == "zigzag" and geometry.causal:
        for end in (True, False):
            edge = "last" if end else "first"
            yield (
                f"tokens {visible}, whose {edge} query and key have the same place",
                in_blocks(geometry, layout, geometry.position, end),
            )
    if layout in ("contiguous", "zigzag"):
        yield (
            f"tokens from the first query of a {'chunk' if layout == 'zigzag' else 'worker'} and the first key that it sees",
            from_first_keys(geometry, window),
        )
    if layout == "contiguous" and geometry.workers == PAIRED:
        yield (
            f"tokens within pairs of workers ({NEIGHBOURS})",
            in_blocks(geometry, layout, of_pairs(geometry, layout)),
        )
        for name in ("zigzag", "striped") if geometry.causal else ():
            yield (
                f"tokens {visible} of a {name} ring of two groups of workers",
                in_blocks(geometry, name, of_pairs(geometry, name)),
            )


def windows_of_exchanged_pairs(geometry: Geometry) -> Iterator[tuple[str, Booleans]]:
    """Yield the pairs within a window, in words, of a ring of two groups that each have every other worker's tokens."""
    if geometry.layout != "contiguous" or geometry.workers != PAIRED:
        return
    table = tables(PAIRED, geometry.slots)[EVERY_OTHER]
    order = np.argsort(table.ravel()).reshape(2, -1)
    words = f"the window counts tokens within pairs of workers ({OTHERS})"
    pattern = in_blocks(geometry, "contiguous", order)
    if geometry.causal:
        words += f", and the mask uses positions of the layout {EVERY_OTHER}"
        q, k = (np.broadcast_to(x, (PAIRED, *table.shape)) for x in (table[:, None], table[None]))
        pattern = pattern & seen(q, k, True, None)
    yield words, pattern


def of_pairs(geometry: Geometry, layout: str) -> Integers:
    """Return the positions [2, 2n] of the tokens of two groups of two workers, dealt under ``layout``."""
    return tables(2, 2 * geometry.slots)[layout]


def in_blocks(geometry: Geometry, layout: str, held: Integers, end: bool = True) -> Booleans:
    """Return the pairs [a, b, 1, i, j] within the window, counted within the visible parts of the blocks of a ring.

    ``held`` [G, m]: the positions of the tokens that each member of the ring has, under ``layout``. ``end``: a part of
    a zigzag block that has more queries than keys, or fewer, ends with a query and a key of the same place; otherwise
    it begins with them.
    """
    member, place = (np.empty(held.size, np.int64) for _ in range(2))
    member[held], place[held] = np.indices(held.shape)
    of_q, of_k = member[:, None], member[None, :]
    gap = place[None, :] - place[:, None]
    if layout == "striped":  # the visible part of the block of a later member begins at query 1
        gap = gap + (of_k > of_q)
    if (
        layout == "zigzag"
    ):  # it is the first half of an earlier member's keys, or the second half of the queries
        gap = gap + held.shape[1] // 2 * (of_k < of_q if end else of_k > of_q)
    return paired(geometry, within(gap, geometry.window or (None, None)))


def from_first_keys(geometry: Geometry, window: Window) -> Booleans:
    """Return the pairs [a, b, 1, i, j] within a window that is laid from the first query of a run and the first key it sees.

    A run is a worker's shard or, in the layout zigzag, a chunk of it. The kernel gets the keys that the run sees, and a
    window that is right if the last query and the last key are on its diagonal.
    """
    size = geometry.slots // 2 if geometry.layout == "zigzag" else geometry.slots
    token = np.arange(geometry.tokens)
    begin = token // size * size
    left, right = window
    right = 0 if geometry.causal else right
    first = np.zeros_like(token) if left is None else np.maximum(0, begin - left)
    after = geometry.tokens - begin - size  # keys after the run
    more = after if right is None else np.minimum(after, right)
    gap = (token[None, :] - first[:, None]) - (token - begin)[:, None]
    pattern = (token[None, :] >= first[:, None]) & (token[None, :] < (begin + size + more)[:, None])
    return paired(geometry, pattern & within(gap + more[:, None], (left, right)))


def windows_of_document_chunks(geometry: Geometry) -> Iterator[tuple[str, Booleans]]:
    """Yield the pairs within a window, in words, of a kernel that computes each chunk of a document by itself.

    The kernel gets the queries of one chunk and the keys of its document, up to the last one that the chunk sees.
    """
    if geometry.layout != PER_DOCUMENT or geometry.documents is None:
        return
    longest = "is computed from the length of the longest document"
    first = "counts tokens from the first query of a chunk and the first key of its document"
    yield f"the window of each document {longest}", in_document_chunks(geometry, True, True)
    yield f"the window {first}", in_document_chunks(geometry, False, False)
    yield f"the window {first}, and {longest}", in_document_chunks(geometry, False, True)


def in_document_chunks(geometry: Geometry, at_end: bool, for_longest: bool) -> Booleans:
    """Return the pairs [a, b, 1, i, j] within a window that is adjusted for the keys that a chunk gets.

    The adjusted window is right if the last query and the last key are on its diagonal, and the numbers of keys are those
    of the chunk's own document. ``at_end``: they are on its diagonal; otherwise the first query and the first key are.
    ``for_longest``: the numbers of keys are those of the same chunk of the longest document.
    """
    assert geometry.documents is not None and geometry.window is not None
    starts, token = np.array(geometry.documents), np.arange(geometry.tokens)
    of = document_of(token, geometry.documents)
    length = np.diff([*starts, geometry.tokens])[of]
    size, inside = length // (2 * geometry.workers), token - starts[of]  # of a chunk
    chunk, place = np.divmod(inside, size)
    left, right = geometry.window
    right = 0 if geometry.causal else right
    far = geometry.tokens  # further than any token

    def keys(size: Integers | int, length: Integers | int) -> Integers:
        return np.minimum(length, size * (chunk + 1) + (far if right is None else right))

    own = keys(size, length)
    counted = (size.max(), length.max()) if for_longest else (size, length)
    more = keys(*counted) - counted[0] * (chunk + 1)  # keys after the chunk
    diagonal = own - size + place if at_end else place
    gap = inside[None, :] - diagonal[:, None]
    pattern = (of[:, None] == of[None, :]) & (inside[None, :] < own[:, None])
    return paired(geometry, pattern & within(gap + more[:, None], (left, right)))


def paired(geometry: Geometry, pattern: Booleans) -> Booleans:
    """Return a pattern of positions [T, T] as one of pairs [a, b, 1, i, j]."""
    at = geometry.position
    return np.asarray(pattern[at[:, None, None, :, None], at[None, :, None, None, :]])
