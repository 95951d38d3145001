"""Where a fault may be: sets of blocks, parts of blocks, and sets of workers, each with words for it.

A *block* [a, b] contains the pairs of all queries of worker a with all keys of worker b. A pair [a, b, h, i, j] is
query i and key j of that block in query head h. A *place* is any set of pairs that words describe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ringspec.conformance.readout.problem.geometry import Geometry
from ringspec.problem.model import Array, Booleans

MOST_LISTED = 8
CHANCE = 0.35  # fraction of numbers that may be equal by chance
Amounts = Array | Booleans
OWN_BLOCKS = "in the blocks of a worker's own keys (step 0)"
FROM_STEP_1 = "from step 1 on"
LISTED = "in the blocks (queries of worker, keys of worker)"
MOST_RECTANGLES = 12
PAIRS = "for the pairs of"  # of slots in a block, counted from 0
RECTANGLE = re.compile(r"(?:query|queries) (?P<queries>[\d, -]+) with keys? (?P<keys>[\d, -]+)")
RUN = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
GROUP = re.compile(
    rf"((?P<blocks>(?!in heads? \d).+?), )?(in heads? (?P<heads>[\d, -]+), )?{PAIRS} (?P<rectangles>.+)"
)


@dataclass(frozen=True)
class Place:
    """A set of pairs of tokens: the boolean ``table`` [a, b, h, i, j], and the ``words`` that describe it.

    A table may have an axis of length 1 in place of equal entries. ``cost`` is lower for places that are simpler to
    describe.
    """

    words: str
    table: Booleans
    cost: float

    @property
    def blocks(self) -> Booleans:
        """Booleans [a, b], True for each block that contains some of the pairs."""
        return np.asarray(self.table.any(axis=(2, 3, 4)))


def everywhere(geometry: Geometry) -> Place:
    return Place("", np.ones((geometry.workers, geometry.workers, 1, 1, 1), bool), 0.0)


def block_places(
    geometry: Geometry, phase: str, visible: Booleans, distinct: bool = True
) -> list[Place]:
    """Return sets of blocks that words describe, such as 'in the last step' or 'on worker 1'.

    ``visible`` [a, b, 1, i, j] is the correct mask. ``distinct``: leave out sets that equal an earlier one.
    """
    W = geometry.workers
    a, b = np.indices((W, W))
    step = geometry.steps(phase)
    computing = b if geometry.travels(phase) == "queries" else a
    found = [everywhere(geometry)]

    def add(words: str, blocks: Booleans, cost: float) -> None:
        table = blocks[:, :, None, None, None]
        known = distinct and any(np.array_equal(table, x.table) for x in found)
        if blocks.any() and not known:
            found.append(Place(words, table, cost))

    add(OWN_BLOCKS, step == 0, 0.3)
    add(FROM_STEP_1, step > 0, 0.3)
    add("in the last step", step == W - 1, 0.5)
    add("in all but the last step", step < W - 1, 0.5)
    for number in range(1, W):
        add(f"in step {number}", step == number, 0.6)
        add(f"from step {number} on", step >= number, 0.6)
    add("for keys of later workers", b > a, 0.5)
    add("for keys of earlier workers", b < a, 0.5)
    add("for keys of earlier workers and of the worker itself", b <= a, 0.55)
    add("for keys of later workers and of the worker itself", b >= a, 0.55)
    add_by_mask(geometry, phase, visible, add)
    for r in range(W):
        add(f"on worker {r}", computing == r, 0.7)
    for r in range(W):
        add(f"on all workers but {r}", computing != r, 0.75)
        add(f"for queries of worker {r}", a == r, 0.8)
        add(f"for keys of worker {r}", b == r, 0.8)
        add(f"for queries of all workers but {r}", a != r, 0.85)
        add(f"for keys of all workers but {r}", b != r, 0.85)
    add("on odd-numbered workers", computing % 2 == 1, 0.9)
    add("in odd-numbered steps", step % 2 == 1, 0.9)
    for number in range(W):
        for r in range(W):
            add(f"on worker {r} in step {number}", (computing == r) & (step == number), 1.2)
    return found


def add_by_mask(
    geometry: Geometry, phase: str, visible: Booleans, add: Callable[[str, Booleans, float], None]
) -> None:
    """Add the sets of blocks that depend on the mask, such as the blocks that it hides entirely or in part."""
    W = geometry.workers
    seen = np.asarray(visible.any(axis=(2, 3, 4)))
    whole = np.asarray(visible.all(axis=(2, 3, 4)))
    step = geometry.steps(phase)
    add("in fully masked blocks", ~seen, 0.4)
    add("in partly masked blocks", seen & ~whole, 0.45)
    add("in blocks without any masked pair", whole, 0.45)
    for words, x, when in (("that a query sees", seen, step), ("that sees a key", seen.T, step.T)):
        order = np.argsort(when, axis=1)
        first, last = np.zeros_like(x), np.zeros_like(x)
        for r in range(W):
            visited = [y for y in order[r] if x[r, y]]
            if visited:
                first[r, visited[0]], last[r, visited[-1]] = True, True
        if words == "that sees a key":
            x, first, last = x.T, first.T, last.T
        add(f"in the last block {words}", last, 0.6)
        add(f"in all but the last block {words}", x & ~last, 0.6)
        add(f"in the first block {words}", first, 0.65)
        add(f"in all but the first block {words}", x & ~first, 0.6)
        if words == "that a query sees" and not seen.all():
            # A worker computes its own block first.
            place = "in the last block of another worker that the mask shows to a query"
            add(place, last & ~np.eye(W, dtype=bool), 0.65)
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
        "in blocks after which the accumulators pass a fully masked block",
        lost & seen,
        0.8,
    )


def part_places(geometry: Geometry) -> list[Place]:
    """Return parts of a block, as tables [1, 1, h, i, j]: some of its heads, queries or keys, or a quarter of it.

    The first place is the whole block.
    """
    n, H, group = geometry.slots, geometry.heads, geometry.group
    i, h = np.arange(n), np.arange(H)
    found = [Place("", np.ones((1, 1, 1, 1, 1), bool), 0.0)]

    def add(words: str, part: Booleans, cost: float) -> None:
        if part.any() and not part.all():
            found.append(Place(words, part, cost))

    for one, many, shape in (
        ("query", "queries", (1, 1, 1, n, 1)),
        ("key", "keys", (1, 1, 1, 1, n)),
    ):
        at = i.reshape(shape)
        add(f"for the second half of a worker's {many}", at >= n // 2, 0.6)
        add(f"for the first half of a worker's {many}", at < n // 2, 0.6)
        add(f"for the last {one} of a worker", at == n - 1, 0.7)
        add(f"for the first {one} of a worker", at == 0, 0.7)
        add(f"for all but the first {one} of a worker", at > 0, 0.8)
        add(f"for all but the last {one} of a worker", at < n - 1, 0.8)
        for few in range(2, min(n - 1, 8)):
            if few != n // 2:
                add(f"for the last {few} {many} of a worker", at >= n - few, 0.9)
                add(f"for the first {few} {many} of a worker", at < few, 0.9)
        add(f"for the odd-numbered {many} of a worker", at % 2 == 1, 1.0)
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
            ("in all but the last query head of each key head", h % group != group - 1, 0.7),
            ("in the first query head of each key head", h % group == 0, 0.75),
            ("in the last query head of each key head", h % group == group - 1, 0.8),
        ]
    heads += [
        ("in odd-numbered heads", h % 2 == 1, 0.9),
        ("in the second half of the heads", h >= H // 2, 0.9),
        ("in the first half of the heads", h < H // 2, 0.9),
    ]
    for words, part, cost in heads:
        add(words, part.reshape(1, 1, -1, 1, 1), cost)
    which, half = ("first", "second"), i >= n // 2
    for of_q in (0, 1):
        for of_k in (0, 1):
            part = (half == of_q)[:, None] & (half == of_k)[None, :]
            words = f"for the {which[of_q]} half of a worker's queries and the {which[of_k]} half of its keys"
            add(words, part[None, None, None], 1.0)
    return found


def worker_places(geometry: Geometry) -> list[Place]:
    """Return sets of workers, as tables [a, 1, 1, 1, 1]: all workers, each worker, all but each worker."""
    r = np.arange(geometry.workers).reshape(-1, 1, 1, 1, 1)
    found = [Place("", r >= 0, 0.0)]
    if geometry.workers > 1:
        found += [Place(f"on worker {w}", r == w, 0.7) for w in range(geometry.workers)]
        found += [Place(f"on all workers but {w}", r != w, 0.75) for w in range(geometry.workers)]
    return found


def joined(place: Place, part: Place) -> Place:
    """Return the place that consists of ``part`` of each block in ``place``."""
    if not part.words:
        return place
    words = f"{place.words}, {part.words}" if place.words else part.words
    return Place(words, place.table & part.table, place.cost + part.cost)


def parts_of_blocks(geometry: Geometry, of_rows: bool) -> list[Place]:
    """Return the parts of :func:`part_places`; with ``of_rows``, only those that are whole rows."""
    return [x for x in part_places(geometry) if not of_rows or x.table.shape[4] == 1]


class Places:
    """All places that consist of the same part of each block in one of the sets ``blocks``.

    ``of_rows``: the sets are sets of workers, and the parts are whole rows (queries with all their keys).
    """

    def __init__(self, geometry: Geometry, blocks: Sequence[Place], of_rows: bool = False) -> None:
        W, H, n = geometry.workers, geometry.heads, geometry.slots
        self.blocks, self.parts = blocks, parts_of_blocks(geometry, of_rows)
        rows = blocks[0].table.shape[1] if len(blocks) else 1
        tables = [np.broadcast_to(x.table, (W, rows, 1, 1, 1)).ravel() for x in blocks]
        self.of_blocks = np.array(tables, np.float32)
        tables = [np.broadcast_to(x.table, (1, 1, H, n, n)).ravel() for x in self.parts]
        self.of_parts = np.array(tables, np.float32).T
        rows = [x.table[..., :1] for x in self.parts if x.table.shape[4] == 1]
        rows_of = [np.broadcast_to(x, (1, 1, H, n, 1)).ravel() for x in rows]
        self.of_rows = np.array(rows_of, np.float32).T
        self.whole_rows = np.array([x.table.shape[4] == 1 for x in self.parts])
        self.of_heads = np.array([x.table.shape[3:] == (1, 1) for x in self.parts])
        self.cost = np.add.outer([x.cost for x in self.blocks], [x.cost for x in self.parts])

    @property
    def heads(self) -> list[Place]:
        """The places that consist of some heads of every block."""
        return [x for x, heads in zip(self.parts[1:], self.of_heads[1:], strict=True) if heads]

    def fitting(
        self,
        good: Amounts,
        bad: Amounts,
        most: int,
        loosely: bool = False,
        parts: Booleans | None = None,
    ) -> Iterator[tuple[float, Place]]:
        """Yield the places that contain some of ``good`` and none of ``bad``, those with the most ``good`` first.

        ``good`` and ``bad`` [a, b, h, i, j] say how much each pair counts for and against a place. ``most`` is the
        largest number of places. ``loosely``: a fraction of the pairs may be bad, because numbers can be
        equal by chance. ``parts``: which of ``self.parts`` may limit the blocks; None for all.
        """
        shape = (self.of_blocks.shape[1], self.of_parts.shape[0])
        gain = self.of_blocks @ (good.reshape(shape).astype(np.float32) @ self.of_parts)
        harm = self.of_blocks @ (bad.reshape(shape).astype(np.float32) @ self.of_parts)
        if parts is not None:
            gain = gain * parts
        fits = np.argwhere((gain > 0) & (harm <= (CHANCE * gain if loosely else 0)))
        total, cost = (x[fits[:, 0], fits[:, 1]] for x in (gain - 2 * harm, self.cost))
        first = np.lexsort((cost, -total))[:most]
        for x in first:
            yield float(total[x]), joined(self.blocks[fits[x, 0]], self.parts[fits[x, 1]])

    def possible(self, good: Amounts, bad: Amounts) -> list[Place]:
        """Return the sets of blocks that, limited to some rows and heads, contain some of ``good`` and none of ``bad``.

        ``good`` and ``bad`` [a, b, h, i] say how much each query of a block counts for and against a set.
        """
        shape2 = (self.of_blocks.shape[1], -1)
        gain = self.of_blocks @ (good.reshape(shape2).astype(np.float32) @ self.of_rows)
        harm = self.of_blocks @ (bad.reshape(shape2).astype(np.float32) @ self.of_rows)
        fits = ((gain > 0) & (harm == 0)).any(axis=1)
        return [place for place, fit in zip(self.blocks, fits, strict=True) if fit]

    def parts_fitting(
        self, good: Amounts, bad: Amounts, place: Place
    ) -> list[tuple[Place, Booleans]]:
        """Return ``place`` limited to some of its rows and heads: one result for each best choice of them.

        Each result comes with the rows [1, h, i] to which the place is limited.

        ``good`` and ``bad`` [a, 1, h, i, j] say how much counts for and against a choice. The best choices contain
        nothing ``bad`` on any worker, and the most ``good``.
        """
        count, shape = self.of_blocks.shape[1], (self.of_blocks.shape[1], self.of_parts.shape[0])
        gain = np.ones(count) @ (good.reshape(shape).astype(np.float32) @ self.of_parts)
        harm = np.ones(count) @ (bad.reshape(shape).astype(np.float32) @ self.of_parts)
        fits = [
            x
            for x in np.flatnonzero((harm == 0) & (gain > 0))
            if x and self.parts[x].table.shape[4] == 1
        ]
        most = max((gain[x] for x in fits), default=0.0)
        best = [self.parts[x] for x in fits if gain[x] == most]
        return [(joined(place, part), part.table[:, 0, :, :, 0]) for part in best]


def listed(blocks: Booleans, known: Sequence[Place]) -> Place | None:
    """Return a place whose words list the blocks one by one.

    None if there are no blocks, if there are more than MOST_LISTED, or if a place in ``known`` has the same blocks.
    """
    table = blocks[:, :, None, None, None]
    if not 0 < blocks.sum() <= MOST_LISTED:
        return None
    if any(np.array_equal(table, one.table) for one in known):
        return None
    names = ", ".join(f"({a}, {b})" for a, b in zip(*np.nonzero(blocks), strict=True))
    return Place(f"{LISTED} {names}", table, 1.5)


def pairs_listed(geometry: Geometry, table: Booleans, known: Sequence[Place]) -> Place | None:
    """Return a place whose words list the pairs in ``table`` [a, b, h, i, j]: for each block, queries with their keys.

    None if there are no pairs, or if the list would be too long. ``known`` are places whose words can stand for sets of
    blocks.
    """
    W, H, n = geometry.workers, geometry.heads, geometry.slots
    table = np.broadcast_to(table, (W, W, H, n, n))
    groups: dict[tuple[str, bytes], Booleans] = {}  # blocks with the same pairs in the same heads
    for a, b in zip(*np.nonzero(table.any(axis=(2, 3, 4))), strict=True):
        patterns = {table[a, b, h].tobytes() for h in range(H)}
        for pattern in sorted(patterns):
            heads = [h for h in range(H) if table[a, b, h].tobytes() == pattern]
            if any(pattern):
                key = (f"in {counted('head', 'heads', heads)}" if len(heads) < H else "", pattern)
                groups.setdefault(key, np.zeros((W, W), bool))[a, b] = True
    found, count = [], 0
    for (heads_text, pattern), blocks in groups.items():
        rows = np.frombuffer(pattern, bool).reshape(n, n)
        with_keys: dict[bytes, list[int]] = {}
        for i in np.flatnonzero(rows.any(axis=1)):
            with_keys.setdefault(rows[i].tobytes(), []).append(int(i))
        count += len(with_keys)
        same = [x for x in known if np.array_equal(x.table, blocks[:, :, None, None, None])]
        place = same[0] if same else listed(blocks, ())
        if place is None or count > MOST_RECTANGLES:
            return None
        rectangles = " and ".join(
            f"{counted('query', 'queries', of)} with "
            f"{counted('key', 'keys', np.flatnonzero(np.frombuffer(keys, bool)).tolist())}"
            for keys, of in with_keys.items()
        )
        parts = (place.words, heads_text, f"{PAIRS} {rectangles}")
        found.append(", ".join(part for part in parts if part))
    return Place("; ".join(found), table, 1.6 + 0.1 * count) if found else None


def counted(one: str, many: str, numbers: Sequence[int]) -> str:
    """Join ascending whole numbers after their noun, as in 'queries 0-2, 5'."""
    runs: list[list[int]] = []
    for x in numbers:
        if runs and x == runs[-1][1] + 1:
            runs[-1][1] = int(x)
        else:
            runs.append([int(x), int(x)])
    noun = one if len(numbers) == 1 else many
    return f"{noun} " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def numbers_of(text: str, end: int) -> list[int] | None:
    """Return the numbers in the text that :func:`counted` writes after the noun.

    None if the text, which may come from a file, is malformed or has a number that is not below ``end``.
    """
    found: list[int] = []
    for run in text.split(", "):
        parsed = RUN.fullmatch(run)
        if parsed is None or max(map(int, parsed.groups("0"))) >= end:
            return None
        first, last = int(parsed[1]), int(parsed[2] or parsed[1])
        found += range(first, last + 1)
    return found or None


def pairs_named(geometry: Geometry, phase: str, visible: Booleans, words: str) -> Place | None:
    """Return the place whose ``words`` are those of :func:`pairs_listed`; None if this ring has no such pairs."""
    H, n = geometry.heads, geometry.slots
    table = np.zeros((geometry.workers, geometry.workers, H, n, n), bool)
    for group in words.split("; "):
        parsed = GROUP.fullmatch(group)
        if parsed is None:
            return None
        place = place_named(geometry, phase, visible, parsed["blocks"] or "", False)
        heads = numbers_of(parsed["heads"], H) if parsed["heads"] else list(range(H))
        if place is None or heads is None:
            return None
        for rectangle in RECTANGLE.finditer(parsed["rectangles"].replace(" and ", "; ")):
            rows, keys = numbers_of(rectangle["queries"], n), numbers_of(rectangle["keys"], n)
            if rows is None or keys is None:
                return None
            part = np.zeros((H, n, n), bool)
            part[np.ix_(heads, rows, keys)] = True
            table |= place.table & part
    return Place(words, table, 1.6)


def place_named(
    geometry: Geometry, phase: str, visible: Booleans, words: str, of_workers: bool
) -> Place | None:
    """Return the place that ``words`` describe in a ring; None if the ring has no such place.

    ``of_workers``: the words describe a set of workers, or some of their queries.
    """
    if not of_workers and PAIRS in words:
        return pairs_named(geometry, phase, visible, words)
    if not of_workers and words.startswith(LISTED):
        numbers = [int(x) for x in re.findall(r"\d+", words)]
        table = np.zeros((geometry.workers, geometry.workers), bool)
        if max(numbers) >= geometry.workers:
            return None
        table[numbers[::2], numbers[1::2]] = True
        return listed(table, ())
    if not words and not of_workers:
        return everywhere(geometry)
    places = (
        worker_places(geometry) if of_workers else block_places(geometry, phase, visible, False)
    )
    parts = parts_of_blocks(geometry, of_workers)[1:]
    for place in places:
        if place.words == words:
            return place
        if not place.words or words.startswith(f"{place.words}, "):
            rest = words.removeprefix(f"{place.words}, ") if place.words else words
            for part in parts:
                if part.words == rest:
                    return joined(place, part)
    return None
