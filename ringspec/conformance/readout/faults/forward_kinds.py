"""The mistakes that only a forward pass can make: in inputs, in merges, and in the final o and lse."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from ringspec.conformance.readout.faults import merges
from ringspec.conformance.readout.faults.choices import (
    FINISHES,
    LSES_GIVEN,
    Tiles,
)
from ringspec.conformance.readout.faults.kinds import WITH_A_MASK, Kind, factors_beside_scores
from ringspec.conformance.readout.faults.last_tiles import clamped_kinds, copied_kinds, padded_kinds
from ringspec.conformance.readout.faults.masks import every_mask, numbers_of
from ringspec.conformance.readout.faults.merges import MERGES
from ringspec.conformance.readout.faults.operands import Operand, operand_kinds
from ringspec.conformance.readout.faults.part_results import begins_in, lses_in
from ringspec.conformance.readout.faults.sink_kinds import sink_kinds
from ringspec.conformance.readout.faults.sources import sources
from ringspec.conformance.readout.faults.tile_rules import LARGEST_TILE
from ringspec.conformance.readout.faults.visible import Mask
from ringspec.conformance.readout.problem.geometry import (
    EXCHANGED,
    LATER,
    SHORT,
    Geometry,
    believed,
)
from ringspec.problem.model import Integers

# The block whose o a row merges, of those in which it sees a key.
OTHER_O = {
    "first by next": "the o of a worker's first block is overwritten by that of its next block before it is merged (lse is not)",
    "next": "the o of each block is overwritten by that of the next block before it is merged (lse is not)",
    "last": "the o of the last block is merged in place of that of every block (lse is right)",
    "last of later": "the o of the last block is merged in place of that of every block but a worker's own (lse is right)",
    "previous": "each block's lse is merged with the o of the block before",
}
FINISH_WORDS = {
    "not divided": "o is not divided by l",
    "divided twice": "o is divided by l twice",
    "divided by the last block's l": "o is divided only by the l of the last block",
    "before the last merge": "o is the one from before the last step (lse is correct)",
    "divided by the first block's l": "o is divided only by the l of the first block",
    "multiplied by l": "o is multiplied by l instead of divided",
    "divided by l before the last merge": "o is divided by the l from before the last step (lse is correct)",
}

LSE_GIVEN_WORDS = {
    "maximum": "lse is only the row maximum",
    "log l": "lse is log l without the maximum",
    "base 2": "lse is in base 2",
    "last block": "lse is that of only the last block",
    "first block": "lse is that of only the first block",
    "log2 l": "lse is the maximum plus log2 l",
    "base 2 twice": "lse is divided by ln 2 twice",
    "times ln 2": "lse is multiplied by ln 2",
    "negative": "lse has the wrong sign",
    "last maximum": "lse is the maximum of the last block, not the running one, plus log l",
    "before the last merge": "lse is the one from before the last step (o is correct)",
    "l": "lse is l, not the maximum plus log l",
    "scaled maximum": "the maximum in lse, which is scaled already, is multiplied by the scale again",
    "twice the maximum": "lse contains the maximum twice",
    "unscaled maximum": "the maximum in lse is not scaled",
    "maximum plus l": "lse is the maximum plus l, not plus log l",
    "maximum minus log l": "lse is the maximum minus log l, not plus log l",
    "first maximum": "lse is the maximum of the first block, not the running one, plus log l",
    "maximum in base 2": "the maximum in lse is in base 2 (not multiplied by ln 2), and log l is natural",
    "maximum times ln 2": "the maximum in lse is multiplied by ln 2, and log l is not",
    "unscaled maximum in base 2": "the maximum in lse is divided by ln 2 and not scaled",
    "log l times ln 2": "the log l in lse is multiplied by ln 2, and the maximum is not",
    "log1p l": "lse is the maximum plus log(1 + l)",
    "old maximum": "the maximum in lse is the one from before the last step (o and l are correct)",
    "old l": "the l in lse is the one from before the last step (o and the maximum are correct)",
    "last l": "the l in lse is that of only the last block",
    "times scale": "lse is multiplied by the scale",
    "divided by scale": "lse is divided by the scale",
}


def sum_kinds(geometry: Geometry, masks: Sequence[Mask], distinct: bool) -> Iterator[Kind]:
    """Yield the masks that show too much, applied to the row sums alone. Padded keys change nothing else anyway."""
    hidden, number_of = ~masks[0].pattern & geometry.real_pairs, numbers_of(masks)
    for mask in masks if distinct else every_mask(geometry):
        if mask.of_tiles and not mask.words.endswith("masked in part are not masked"):
            continue
        more = (mask.pattern & hidden).any() or not hidden.any()
        if mask.words and (mask.pattern | ~masks[0].pattern).all() and more:
            words = f"the row sums (not o) are made as if {mask.words}"
            number = number_of(mask.pattern)
            yield Kind(words, (("mask", number), ("value_mask", 0)), mask.cost + 0.3)


def forward_parts(
    geometry: Geometry, masks: Sequence[Mask], distinct: bool
) -> Iterator[Iterator[Kind]]:
    """Yield the mistakes that only a forward pass can make, in parts: in inputs, in merges, and in the final o and lse."""
    yield operand_kinds(geometry, "forward", masks, distinct)
    yield sum_kinds(geometry, masks, distinct)
    yield merge_kinds(geometry, masks, distinct)
    yield part_kinds(geometry, distinct)
    yield tile_kinds(geometry, distinct)
    yield result_kinds(geometry)
    yield final_kinds(geometry, distinct)
    if geometry.sinks:
        yield sink_kinds(geometry)
    yield staying_kinds(geometry)
    yield state_kinds(geometry, masks)
    yield clamped_kinds(geometry, masks[0].pattern, "forward", distinct)
    yield padded_kinds(geometry, masks[0].pattern, distinct)
    yield copied_kinds(geometry, distinct)
    yield stored_kinds(geometry)


def beside(geometry: Geometry) -> tuple[tuple[str, Integers], ...]:
    """Return the next and the previous worker of each worker, with the words for them."""
    r = np.arange(geometry.workers)
    return ("next worker", (r + 1) % len(r)), ("previous worker", (r - 1) % len(r))


def final_kinds(geometry: Geometry, distinct: bool) -> Iterator[Kind]:
    """Yield the mistakes in the final o and lse, and in the rows that are returned."""
    if geometry.group > 1:
        words = "the row sum of each block is taken over all query heads of a key head"
        yield Kind(words, (("l_of_group", True),), 1.2)
    for name, words in FINISH_WORDS.items():
        yield Kind(words, (("finish", FINISHES.index(name)),), 1.0, True)
    for name, words in LSE_GIVEN_WORDS.items():
        yield Kind(words, (("lse_out", LSES_GIVEN.index(name)),), 1.0, True)
    for source in sources(geometry, "forward", "q", distinct):
        if source.of_rows:
            both = (Operand("lse and o", ("lse_row", "o_row")),) if geometry.padding else ()
            for operand in (Operand("lse", ("lse_row",)), Operand("o", ("o_row",), 1.1), *both):
                taken = operand.taken(source)
                yield Kind(f"the returned {taken.words}", taken.changes, taken.cost, True)
    for words, table in beside(geometry):
        at = (("lse_row.worker", table.reshape(-1, 1, 1, 1, 1)),)
        yield Kind(f"lse is that of the {words} (o is correct)", at, 1.1, True)
        at = (("o_row.worker", table.reshape(-1, 1, 1, 1, 1)),)
        yield Kind(f"o is that of the {words} (lse is correct)", at, 1.1, True)
    yield Kind("o is 0", (("o_times", 0.0),), 1.2, True)
    for words, value in factors_beside_scores(geometry, distinct):
        yield Kind(f"o is {words}", (("o_times", value),), 1.2, True)


def state_kinds(geometry: Geometry, masks: Sequence[Mask]) -> Iterator[Kind]:
    """Yield the mistakes in what the running softmax starts with, and in what it gets from a block."""
    yield Kind(
        "the running softmax starts as if a key with score 0 had been seen", (("started", True),)
    )
    for how, words in OTHER_O.items() if geometry.workers > 1 else ():
        yield Kind(words, (("other_o", how),), 1.15)
    nothing = next(n for n, mask in enumerate(masks) if not mask.pattern.any())
    words = "keys and values are 0 (the block counts with score 0)"
    yield Kind(words, (("times", 0.0), ("value_mask", nothing)), 1.2)


def stored_kinds(geometry: Geometry) -> Iterator[Kind]:
    """Yield the mistakes in where o and lse are stored, and in the order of their tokens."""
    for words, table in beside(geometry):
        yield Kind(f"o and lse are stored at the {words}", (("o_to", table),), 1.3, True)
    for number, layout in enumerate(believed(geometry), 1):
        if layout not in (LATER, SHORT):
            words = f"the rows of o are put in the order of their tokens as if they lay in the layout {layout}"
            # The halves of o are then exchanged on each worker, for which there are simpler words.
            cost = 1.4 if layout == EXCHANGED else 1.2
            yield Kind(words, (("o_tokens", number),), cost)
    words = "tokens of o are put back with the layout's permutation, not with its inverse"
    yield Kind(words, (("o_tokens", len(believed(geometry)) + 1),), 1.2)


def staying_kinds(geometry: Geometry) -> Iterator[Kind]:
    """Yield the mistakes of not sending the running softmax with the queries that travel."""
    if geometry.travels("forward") != "queries":
        return
    for names, what in (
        ("l", "l"),
        ("m", "m"),
        ("the running lse", "n"),
        ("l and m", "lm"),
        ("o", "o"),
        ("l, m and o", "lmo"),
    ):
        words = f"the values of {names}, not sent with the queries, are those that the worker computed for its previous visitor"
        yield Kind(words, (("stays", what),), 1.1)
    for names in ("l", "m", "lm"):
        words = f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not sent home (the worker's last visitor was another)"
        yield Kind(words, (("not_home", names),), 1.1)
    for name in ("m", "l", "o"):
        words = f"{name} is taken for 0 when queries arrive (it is not sent with them"
        yield Kind(f"{words}, nor home)", (("resets", (name, True)),), 1.15)
        yield Kind(f"{words}, but it is sent home)", (("resets", (name, False)),), 1.15)


def merge_kinds(geometry: Geometry, masks: Sequence[Mask], distinct: bool) -> Iterator[Kind]:
    """Yield the mistakes of merging a block's result into the running one."""
    rows = np.any(masks[0].pattern, axis=4)
    some_rows = bool((np.any(rows, axis=3) & ~np.all(rows, axis=3)).any())  # of a block see a key
    hidden = bool((~np.any(rows, axis=3)).any())  # whole blocks
    for number, name in enumerate(merges.WRONG, 1):
        words = merges.WRONG[name]
        if name == merges.EMPTY:
            yield Kind(words, (("merge", number), ("hidden_merge", True)), 1.05)
        elif name == merges.INFINITE:
            yield Kind(words, (("merge", number), ("hidden_merge", "computed")), 1.05)
            if not (geometry.sees_all and distinct):
                more = f"{words}{merges.HIDDEN_TOO}"
                yield Kind(more, (("merge", number), ("hidden_merge", True)), 1.1)
        else:
            yield Kind(words, (("merge", number),))
            if not distinct or (not geometry.sees_all and merges.depends_on_empty(name, geometry)):
                more = f"{words}{merges.HIDDEN_TOO}"
                if hidden or not distinct:
                    yield Kind(more, (("merge", number), ("hidden_merge", True)), 1.05)
                if some_rows or not distinct:
                    more = f"{words}, also in rows that see no key of the new block"
                    yield Kind(more, (("merge", number), ("hidden_merge", "rows")), 1.05)
    if not geometry.sees_all:
        everything = next(n for n, mask in enumerate(masks) if mask.pattern.all())
        words = "the block is merged into lse as if no pair were masked, and not into o: the running o stays as it was"
        kept = MERGES.index("o kept")
        yield Kind(words, (("mask", everything), ("merge", kept)), 1.15)


def tile_kinds(geometry: Geometry, distinct: bool) -> Iterator[Kind]:
    """Yield the mistakes in merging tiles of keys, within each block or across all blocks."""
    of_blocks = {} if distinct and geometry.sees_all else WITH_A_MASK
    inside = [("a block", "", False), *((f"a block {x}", y, False) for y, x in of_blocks.items())]
    inside += [("a chunk", "", True)] if geometry.run < geometry.slots else []
    every = [(Tiles(0, "", True), "of all blocks", 1.2)]
    for where, blocks, chunks in inside:
        tiles = Tiles(0, "", False, chunks=chunks, blocks=blocks)
        every.append((tiles, f"within {where}", 1.25 if blocks else 1.2))
    sizes = range(2, min(LARGEST_TILE + 1, geometry.run))
    for size, name in itertools.product(sizes, merges.IN_TILES):
        for tiles, where, cost in every:
            # The last of two tiles is often a short one, which a kernel may leave out.
            for backwards in (False, True) if 2 * size <= geometry.run else (False,):
                order = ", from the last to the first" if backwards else ""
                words = f"between tiles of {size} keys {where}{order}, {merges.WRONG[name]}"
                made = dataclasses.replace(tiles, size=size, merge=name, backwards=backwards)
                yield Kind(words, (("tiles", made),), cost + 0.1 * backwards)
    if geometry.run < geometry.slots:
        for name in ("lse not updated", "lse of block"):
            words = f"in the last step, between the results of chunks of keys, {merges.WRONG[name]}"
            yield Kind(words, (("tiles", Tiles(geometry.run, name, True, last=True)),), 1.2)
        for name, wrong in merges.WRONG.items():
            if name in (merges.EMPTY, merges.INFINITE):
                continue
            words = f"between the results of chunks of keys, {wrong}"
            yield Kind(words, (("tiles", Tiles(geometry.run, name, True)),), 1.15)
            words = (
                f"between the results of blocks, and of the chunks of a worker's own block, {wrong}"
            )
            yield Kind(words, (("tiles", Tiles(geometry.run, name, True, True)),), 1.2)


def part_kinds(geometry: Geometry, distinct: bool) -> Iterator[Kind]:
    """Yield the mistakes in a block's lse and in where its softmax begins; and those in a chunk's, if chunks are merged."""
    found: list[tuple[str, tuple[str, object], float]] = [
        (f"the new block's lse {one.words}", ("part_lse", number), 1.0 + 0.2 * bool(one.rows or one.keys))
        for number, one in lses_in(geometry, distinct)
    ]  # fmt: skip
    found += [(one.words, ("begins", one), 1.2) for one in begins_in(geometry)]
    for words, change, cost in found:
        yield Kind(words, (change,), cost)
        if geometry.run < geometry.slots:
            words = f"between the results of chunks of keys, {words}"
            yield Kind(words, (("tiles", Tiles(geometry.run, "right", True)), change), cost + 0.15)


def result_kinds(geometry: Geometry) -> Iterator[Kind]:
    """Yield the mistakes of merging a block's result into the running results of other rows."""
    n, half = geometry.slots, max(geometry.slots // 2, 1)
    i, h = np.arange(n), np.arange(geometry.heads)
    for words, rows in (
        ("of the second half of the queries is merged into the rows of the first half", np.where(i < half, (i + half) % n, -1)),
        ("of the first half of the queries is merged into the rows of the second half", np.where(i < half, -1, i - half)),
        ("is merged into the rows with the two halves exchanged", (i + half) % n),
        ("is merged into the rows one slot too early", np.where(i < n - 1, i + 1, -1)),
        ("is merged into the rows one slot too late", i - 1),
        ("is merged into the rows in reversed order", i[::-1]),
    ):  # fmt: skip
        yield Kind(
            f"the block's result {words}", (("result_of.slot", rows.reshape(1, 1, 1, n, 1)),), 1.15
        )
    if geometry.heads > 1:
        for words, heads in (("next head", np.roll(h, 1)), ("previous head", np.roll(h, -1))):
            head, of_values = (x.reshape(1, 1, -1, 1, 1) for x in (heads, heads // geometry.group))
            moved: list[tuple[str, object]] = [("result_of.head", head)]
            if geometry.group < geometry.heads:
                moved.append(("v.head", of_values))
            words = f"the block's result is merged into the rows of the {words}"
            yield Kind(words, tuple(moved), 1.25)
