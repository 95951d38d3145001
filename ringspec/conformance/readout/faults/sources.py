"""Wrong tokens that a kernel may use for a query or a key: those of another worker, head, slot or layout.

A pair [a, b, h, i, j] consists of query i of worker a and key j of worker b, in query head h. i and j are *slots*:
places of tokens on a worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringspec.conformance.readout.faults.visible import within_documents
from ringspec.conformance.readout.problem.geometry import (
    LATER,
    SHORT,
    Geometry,
    believed,
    packed,
    relations,
)
from ringspec.problem.model import Integers


@dataclass(frozen=True)
class Source:
    """A wrong token for each pair: ``tables`` gives the token's 'worker', 'head' or 'slot' as arrays [a, b, h, i, j].

    ``words`` complete a sentence that ends in 'are those'. If the tokens are the correct ones in another order,
    ``words`` complete a sentence that ends in 'are taken', and ``added`` a sentence that ends in 'the shares are
    added'.
    """

    words: str
    tables: tuple[tuple[str, Any], ...]
    cost: float = 0.0
    added: str = ""

    @property
    def of_rows(self) -> bool:
        """Whether a query takes the same query of its own worker in all blocks."""
        return all(slot != "worker" and np.shape(x)[1] == 1 for slot, x in self.tables)


def sources(geometry: Geometry, phase: str, side: str, distinct: bool) -> list[Source]:
    """Return the wrong tokens for queries ('q') or keys ('k').

    ``distinct``: leave out tokens that equal the correct ones or an earlier entry.
    """
    found: list[Source] = []
    right = own(geometry, side)
    for one in every_source(geometry, phase, side):
        if distinct and (same(one, right) or any(same(one, other) for other in found)):
            continue
        found.append(one)
    return found


def same(one: Source, other: Source) -> bool:
    mine, its = dict(one.tables), dict(other.tables)
    return all(
        component in its and np.array_equal(table, its[component])
        for component, table in mine.items()
    ) and (len(mine) == len(its) or not other.words)


def own(geometry: Geometry, side: str) -> Source:
    W, H, n = geometry.workers, geometry.heads, geometry.slots
    a, b, h, i, j = np.ogrid[:W, :W, :H, :n, :n]
    worker, head, slot = (a, h, i) if side == "q" else (b, h // geometry.group, j)
    worker = np.broadcast_to(worker, (W, W, 1, 1, 1))
    return Source("", (("worker", worker), ("head", head), ("slot", slot)))


def every_source(geometry: Geometry, phase: str, side: str) -> Iterator[Source]:
    for owner, table in relations(geometry, phase, side, False).items():
        yield Source(f"of {owner}", (("worker", table[:, :, None, None, None]),))
    if (side == "q") == (geometry.travels(phase) == "queries"):
        W = geometry.workers
        a, b = np.indices((W, W))
        for words, by in (("earlier", 2), ("later", -2)):
            table = ((a if side == "q" else b) + by * geometry.direction) % W
            at = table[:, :, None, None, None]
            yield Source(f"of the visitor two steps {words}", (("worker", at),), 0.05)
    n, half = geometry.slots, max(geometry.slots // 2, 1)
    i = np.arange(n)
    orders = (
        (
            "with the two halves of a block exchanged",
            "with its two halves exchanged",
            (i + half) % n,
        ),
        (
            "with the first half of a block in both halves",
            "to the slots of the first half for both halves",
            i % half,
        ),
        (
            "with the second half of a block in both halves",
            "to the slots of the second half for both halves",
            np.minimum(half + i % half, n - 1),
        ),
        (
            "with the first quarter of a block in all four",
            "with its other quarters at the first",
            i % max(n // 4, 1),
        ),
        (
            "from the next slot (in the last slot, from the first)",
            "to the next slot (those of the last slot to the first)",
            (i + 1) % n,
        ),
        (
            "from the slot before (in the first slot, from the last)",
            "to the slot before (those of the first slot to the last)",
            (i - 1) % n,
        ),
        ("in reversed order", "in reversed order", i[::-1]),
    )
    axes = (1, 1, 1, n, 1) if side == "q" else (1, 1, 1, 1, n)
    for words, added, order in orders:
        yield Source(words, (("slot", order.reshape(axes)),), 0.2, added)
    yield from of_tiles(geometry, side)
    for which, order in packed(geometry).items() if geometry.padding else ():
        axes = (-1, 1, 1, n, 1) if side == "q" else (1, -1, 1, 1, n)
        into = f"without padding between them, in a worker's {which} slots"
        out = f"as if they were without padding between them in a worker's {which} slots"
        yield Source(into, (("slot", order.reshape(axes)),), 0.1, out)
        order = np.argsort(order, axis=1)
        yield Source(out, (("slot", order.reshape(axes)),), 0.1, into)
    h = np.arange(geometry.heads)
    for words, of in (query_heads(geometry) if side == "q" else key_heads(geometry)).items():
        yield Source(f"of {words}", (("head", of[h].reshape(1, 1, -1, 1, 1)),), 0.05)
    token_slot = np.argsort(geometry.position.ravel())
    for name, table in believed(geometry).items():
        if name not in (LATER, SHORT):
            worker, slot = np.divmod(token_slot[table.ravel()].reshape(table.shape), n)
            axes = (-1, 1, 1, n, 1) if side == "q" else (1, -1, 1, 1, n)
            tables = ("worker", worker.reshape(axes)), ("slot", slot.reshape(axes))
            words = f"as in the layout {name}"
            yield Source(words, tables, 0.15, words)
    yield from memory_orders(geometry, side)


def of_tiles(geometry: Geometry, side: str) -> Iterator[Source]:
    """Yield what a kernel reads in a wrong tile of queries ('q') or keys: the one before, or one that ends earlier."""
    i, start, length = ranges(geometry, side)
    inside = i - start
    for size in range(2, geometry.run):
        words = f"of the tile before, in tiles of {size} tokens (the first tile is right)"
        yield Source(words, (("slot", np.where(inside >= size, i - size, i)),), 0.2)
        missing = -length % size
        short = (missing > 0) & (length > size) & (inside >= length - (size - missing))
        words = (
            f"of the last {size} tokens in a short last tile of {size} "
            "(its load begins earlier, its mask does not)"
        )
        if short.any():
            yield Source(words, (("slot", np.where(short, i - missing, i)),), 0.25)


def first_tiles(geometry: Geometry) -> Iterator[Source]:
    """Yield what a kernel reads that divides its queries into tiles and always begins at the first tile."""
    i, start, _ = ranges(geometry, "q")
    for size in range(3, geometry.run):
        order = np.minimum(start + (i - start) % size, geometry.slots - 1)
        yield Source(f"of the first tile, in tiles of {size} queries", (("slot", order),), 0.25)


def ranges(geometry: Geometry, side: str) -> tuple[Integers, Integers, Integers]:
    """Return the slot of each query ('q') or key of a block, and the first slot and the length of the range that a kernel divides into tiles.

    The arrays have the axes [a, b, 1, i, 1] or [a, b, 1, 1, j]; the last two have an axis of length 1 in place of equal
    entries.
    """
    n, run = geometry.slots, geometry.run
    axes = (1, 1, 1, n, 1) if side == "q" else (1, 1, 1, 1, n)
    i = np.arange(n).reshape(axes)
    if not geometry.of_visible_parts:
        return i, i - i % run, np.full_like(i, run)
    q, k = geometry.position[:, None], geometry.position[None, :]
    pattern = within_documents(geometry)(q, k, geometry.causal, geometry.window)
    there = pattern.any(axis=4 if side == "q" else 3, keepdims=True)
    axis = 3 if side == "q" else 4
    start = there.argmax(axis=axis, keepdims=True)
    length = there.sum(axis=axis, keepdims=True)
    own, of_own = geometry.own_blocks, geometry.own_run
    return i, np.where(own, i - i % of_own, start), np.where(own, of_own, length)


def query_heads(geometry: Geometry) -> dict[str, Any]:
    H, group = geometry.heads, geometry.group
    h, kv = np.arange(H), H // group
    return {
        "the first query head of each key head": h // group * group,
        "the last query head of each key head": h // group * group + group - 1,
        "the next head": (h + 1) % H,
        "the previous head": (h - 1) % H,
        "head 0": 0 * h,
        "head h // group (the number of the key head)": h // group,
        "the heads in another order (h mod group, then h // group)": h % group * kv + h // group,
        "the heads in another order (h mod Hkv, then h // Hkv)": h % kv * group + h // kv,
        "the heads in reversed order": H - 1 - h,
    }


def key_heads(geometry: Geometry) -> dict[str, Any]:
    H, group = geometry.heads, geometry.group
    h, kv = np.arange(H), H // group
    # With two key heads, the next is also the previous.
    previous = {"the previous key head": (h // group - 1) % kv} if kv > 2 else {}
    return previous | {
        "key head h mod Hkv": h % kv,
        "key head 0": 0 * h,
        "key head min(h, Hkv - 1)": np.minimum(h, kv - 1),
        "key head (h + 1) // group": np.minimum((h + 1) // group, kv - 1),
        "the next key head": (h // group + 1) % kv,
        "the last key head": 0 * h + kv - 1,
        "the key heads in reversed order": kv - 1 - h // group,
    }


def memory_orders(geometry: Geometry, side: str) -> Iterator[Source]:
    """Yield the tokens that are used if a worker's memory is read or written with the axes token and head exchanged.

    A kernel that packs the query heads of a key head has one row for each of its tokens and query heads, so that only
    these heads are exchanged.
    """
    n, H, group = geometry.slots, geometry.heads, geometry.group
    of_query, i = np.ogrid[:H, :n]
    kinds = [(H, "head")] if side == "q" else [(H // group, "head")]
    if side == "q" and 1 < group < H:
        kinds.insert(0, (group, "query head of a key head"))
    shape = (1, 1, H, n, 1) if side == "q" else (1, 1, H, 1, n)
    for heads, name in kinds:
        number = of_query if side == "q" else of_query // group
        first, h = number // heads * heads, number % heads
        read = np.divmod(i * heads + h, n)
        written = np.divmod(h * n + i, heads)[::-1]
        for how, (head, slot) in (("read", read), ("written", written)):
            words = f"as if {how} in the order (token, {name})"
            tables = ("head", (first + head).reshape(shape)), ("slot", slot.reshape(shape))
            yield Source(words, tables, 0.1 if name == "head" else 0.12, words)
