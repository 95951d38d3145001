"""Where a fault may be: sets of blocks, parts of blocks, and workers, in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ringspec.conformance.readout.geometry import Geometry
from ringspec.problem.model import Booleans

MOST_LISTED = 8
LISTED = "in the blocks (queries of worker, keys of worker)"


@dataclass(frozen=True)
class Place:
    """Pairs [a, b, h, i, j] (an axis of length 1 stands for all), or workers [a], in ``words``.

    ``cost`` is lower for simpler words. ``parts``: the axes within a block that matter, of 'h', 'i' and 'j'.
    """

    words: str
    table: Booleans
    cost: float
    parts: str = ""

    @property
    def blocks(self) -> Booleans:
        """[a, b]: the blocks that it touches."""
        return np.asarray(self.table.any(axis=(2, 3, 4)))


def block_places(
    geometry: Geometry, phase: str, visible: Booleans, distinct: bool = True
) -> list[Place]:
    """Sets of blocks, the simplest words first; ``visible`` [a, b, 1, i, j] is the right mask.

    ``distinct``: no set twice.
    """
    W = geometry.workers
    a, b = np.indices((W, W))
    step = geometry.steps(phase)
    computing = b if geometry.travels(phase) == "queries" else a
    found = [Place("", np.ones((W, W, 1, 1, 1), bool), 0.0)]

    def add(words: str, blocks: Booleans, cost: float) -> None:
        table = blocks[:, :, None, None, None]
        known = distinct and any(np.array_equal(table, x.table) for x in found)
        if blocks.any() and not known:
            found.append(Place(words, table, cost))

    add("in the blocks of a worker's own keys (step 0)", step == 0, 0.3)
    add("from step 1 on", step > 0, 0.3)
    add("in the last step", step == W - 1, 0.5)
    add("in all but the last step", step < W - 1, 0.5)
    for number in range(1, W):
        add(f"in step {number}", step == number, 0.6)
        add(f"from step {number} on", step >= number, 0.6)
    add("for keys of later workers", b > a, 0.5)
    add("for keys of earlier workers", b < a, 0.5)
    add("for keys of earlier workers and a worker's own", b <= a, 0.55)
    add("for keys of later workers and a worker's own", b >= a, 0.55)
    add_by_mask(geometry, phase, visible, add)
    for r in range(W):
        add(f"on worker {r}", computing == r, 0.7)
    for r in range(W):
        add(f"on all workers but {r}", computing != r, 0.75)
        add(f"in blocks of queries of worker {r}", a == r, 0.8)
        add(f"in blocks of keys of worker {r}", b == r, 0.8)
        add(f"in blocks of queries of all workers but {r}", a != r, 0.85)
        add(f"in blocks of keys of all workers but {r}", b != r, 0.85)
    add("on workers of odd number", computing % 2 == 1, 0.9)
    add("in steps of odd number", step % 2 == 1, 0.9)
    for number in range(W):
        for r in range(W):
            add(f"on worker {r} in step {number}", (computing == r) & (step == number), 1.2)
    return found


def add_by_mask(
    geometry: Geometry, phase: str, visible: Booleans, add: Callable[[str, Booleans, float], None]
) -> None:
    """Sets of blocks by what the mask shows of them."""
    W = geometry.workers
    seen = np.asarray(visible.any(axis=(2, 3, 4)))
    whole = np.asarray(visible.all(axis=(2, 3, 4)))
    if seen.all() and whole.all():
        return
    step = geometry.steps(phase)
    add("in blocks that the mask hides wholly", ~seen, 0.4)
    add("in blocks that the mask shows in part", seen & ~whole, 0.45)
    add("in blocks that the mask shows wholly", whole, 0.45)
    order = np.argsort(step, axis=1)
    first, last = np.zeros_like(seen), np.zeros_like(seen)
    for r in range(W):
        visited = [x for x in order[r] if seen[r, x]]
        if visited:
            first[r, visited[0]], last[r, visited[-1]] = True, True
    add("in the last block that a query sees", last, 0.6)
    add("in all but the last block that a query sees", seen & ~last, 0.6)
    add("in all but the first block that a query sees", seen & ~first, 0.6)
    lost = np.zeros_like(seen)
    queries = geometry.travels(phase) == "queries"
    along = np.argsort(step, axis=1 if queries else 0)
    for r in range(W):
        hidden_later = False
        for number in reversed(range(W)):
            at = (r, along[r, number]) if queries else (along[number, r], r)
            lost[at] = hidden_later
            hidden_later = hidden_later or not seen[at]
    add(
        "in blocks that a later, hidden block follows on the way of the accumulators",
        lost & seen,
        0.8,
    )


def part_places(geometry: Geometry, places: Sequence[Place]) -> list[Place]:
    """Parts of blocks (heads, rows, keys, chunks), of all blocks and of those of ``places``."""
    n, H, group = geometry.slots, geometry.heads, geometry.group
    i, h = np.arange(n), np.arange(H)
    every = places[0].table
    found: list[Place] = []

    def add(words: str, part: Booleans, axes: str, cost: float) -> None:
        if part.all() or not part.any():
            return
        table = every & part
        found.append(Place(words, table, cost, axes))
        for place in places[1:]:
            found.append(
                Place(f"{place.words}, {words}", table & place.table, cost + place.cost, axes)
            )

    for one, many, axis in (("query", "queries", "i"), ("key", "keys", "j")):
        shape = (n, 1) if axis == "i" else (1, n)

        def rows(part: Booleans, shape: tuple[int, int] = shape) -> Booleans:
            return part.reshape(shape)

        add(f"for the second half of a worker's {many}", rows(i >= n // 2), axis, 0.6)
        add(f"for the first half of a worker's {many}", rows(i < n // 2), axis, 0.6)
        add(f"for the last {one} of a worker", rows(i == n - 1), axis, 0.7)
        add(f"for the first {one} of a worker", rows(i == 0), axis, 0.7)
        add(f"for all but the first {one} of a worker", rows(i > 0), axis, 0.8)
        for few in range(2, min(n - 1, 8)):
            if few != n // 2:
                add(f"for the last {few} {many} of a worker", rows(i >= n - few), axis, 0.9)
                add(f"for the first {few} {many} of a worker", rows(i < few), axis, 0.9)
    heads: list[tuple[str, Booleans, float]] = []
    for head in range(H):
        heads += [
            (f"in head {head}", h == head, 0.6),
            (f"in all heads but head {head}", h != head, 0.7),
        ]
    if group > 1:
        for head in range(H // group):
            heads.append((f"in the query heads of key head {head}", h // group == head, 0.6))
        heads += [
            ("in all but the first query head of each key head", h % group != 0, 0.65),
            ("in the first query head of each key head", h % group == 0, 0.75),
            ("in the last query head of each key head", h % group == group - 1, 0.8),
        ]
    heads += [
        ("in heads of odd number", h % 2 == 1, 0.9),
        ("in the second half of the heads", h >= H // 2, 0.9),
    ]
    for words, part, cost in heads:
        add(words, part[:, None, None], "h", cost)
    return found + chunk_places(geometry, places)


def chunk_places(geometry: Geometry, places: Sequence[Place]) -> list[Place]:
    """Quarters of blocks: halves of queries against halves of keys, which are the chunks of a zigzag."""
    half = np.arange(geometry.slots) >= geometry.slots // 2
    which = ("first", "second")
    found = []
    for of_q in (0, 1):
        for of_k in (0, 1):
            table = (half == of_q)[:, None] & (half == of_k)[None, :]
            words = f"for the {which[of_q]} half of a worker's queries and the {which[of_k]} half of its keys"
            for place in places:
                told = f"{place.words}, {words}" if place.words else words
                found.append(Place(told, place.table & table, 1.0 + place.cost, "ij"))
    return found


def worker_places(geometry: Geometry) -> list[Place]:
    """Sets of workers [a]."""
    r = np.arange(geometry.workers)
    found = [Place("", np.ones(geometry.workers, bool), 0.0)]
    found += [Place(f"on worker {w}", r == w, 0.7) for w in r]
    return found + [Place(f"on all workers but {w}", r != w, 0.75) for w in r]


def listed(blocks: Booleans, known: Sequence[Place]) -> Place | None:
    """A list of blocks as a place; None if it is empty, long, or a place that is known."""
    table = blocks[:, :, None, None, None]
    same = any(np.array_equal(table, one.table) for one in known)
    if same or not 0 < blocks.sum() <= MOST_LISTED:
        return None
    names = ", ".join(f"({a}, {b})" for a, b in zip(*np.nonzero(blocks), strict=True))
    return Place(f"{LISTED} {names}", table, 1.5)


def place_named(
    geometry: Geometry, phase: str, visible: Booleans, words: str, of_workers: bool
) -> Place | None:
    """The place with these words in a geometry; None if it has no such place."""
    if of_workers:
        return of_name(worker_places(geometry), words)
    if words.startswith(LISTED):
        numbers = [int(x) for x in re.findall(r"\d+", words)]
        table = np.zeros((geometry.workers, geometry.workers), bool)
        if max(numbers) >= geometry.workers:
            return None
        table[numbers[::2], numbers[1::2]] = True
        return listed(table, ())
    places = block_places(geometry, phase, visible, False)
    around = [one for one in places[1:] if words.startswith(f"{one.words}, ")]
    return of_name([*places, *part_places(geometry, [places[0], *around])], words)


def of_name(places: Sequence[Place], words: str) -> Place | None:
    return next((one for one in places if one.words == words), None)
