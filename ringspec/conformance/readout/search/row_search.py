"""Propose the faults of a forward pass that change whole rows: wrong merges of blocks, wrong row sums, wrong lse.

A *row* [a, h, i] contains all pairs of one query in one head. It does not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringspec.conformance.readout.faults.choices import OF_ALL, Choices
from ringspec.conformance.readout.faults.effects import (
    AFTER_MERGES,
    OF_EARLIER_MERGES,
    OF_OTHER_ROWS,
    OF_ROW_SUMS,
)
from ringspec.conformance.readout.faults.kinds import Fault, Kind
from ringspec.conformance.readout.faults.merges import (
    AT_FIRST,
    EMPTY,
    INFINITE,
    MERGES,
    OTHER_TOKENS,
)
from ringspec.conformance.readout.faults.places import Place, Places
from ringspec.conformance.readout.model.merging import weights_of_blocks
from ringspec.conformance.readout.problem.pairs import Seen
from ringspec.conformance.readout.search.context import SearchContext
from ringspec.conformance.readout.search.fault_sets import Attempt, Candidates
from ringspec.conformance.readout.search.matches import Match, finite_size, near
from ringspec.problem.model import Array, Booleans

FEW = 6  # how many sets of blocks are tried for a rare kind of fault
Merging = tuple[Place, bytes | None]  # a place with the key of what a merge does there


def shows_merges(context: SearchContext, choices: Choices) -> bool:
    """Return whether o and lse are what the merges of blocks give, with nothing changed afterwards."""
    right = context.model.right
    return not context.geometry.sinks and all(choices[x] is right[x] for x in AFTER_MERGES)


def for_rows(
    context: SearchContext,
    kind: Kind,
    seen: Seen,
    choices: Choices,
    match: Match,
    l: Array,
    shaped: Booleans,
    last: bool,
) -> list[Merging]:
    """Return the sets of blocks in which a kind that changes row sums may explain some rows; if ``last``, all rows.

    ``l`` [a, b, h, i]: row sums of the blocks. ``shaped`` [a, h, i]: rows whose weights are correct in every block
    up to one factor for the block.
    """
    wrong, of_merge = wrong_rows(context, match), "merge" in kind.slots
    heads = "v.head" in kind.slots
    able = wrong & (match.equal["A"].all(axis=(1, 4)) if heads else shaped)
    if not able.any():
        return []
    computed = joining(context, kind, l) if of_merge else l != 0
    if of_padding(context, kind) or of_sums(kind):
        computed = np.broadcast_to(differing(context, kind).any(axis=4), l.shape)
    # What dropout adds to the sums of some blocks may take the same from others of the row, which is then right.
    right = computed & ~wrong[:, None] & (not of_merge and "drop_l" not in kind.slots)
    at = context.places("forward").possible(computed & able[:, None], right)
    if heads:
        return [(x, None) for x in at]
    # Until the weights of each row are correct up to a factor, a wrong merge explains only a few rows.
    rare = "hidden_merge" in kind.slots and not of_empty(context, kind)
    few = at[:2] if (wrong & ~shaped).any() else at[:FEW] if rare else at
    return merging_well(context, kind, few, seen, choices, match, last)


def differing(context: SearchContext, kind: Kind) -> Booleans:
    """Return the pairs at which the mask of a kind differs from the correct mask."""
    number: Any = dict(kind.changes).get("mask", 0)
    return context.model.masks[number] ^ context.model.masks[0]


def of_padding(context: SearchContext, kind: Kind) -> bool:
    """Return whether a kind is a mask that is wrong only for padded keys, which change nothing but row sums."""
    if not context.geometry.padding or kind.slots != {"mask"}:
        return False
    at = differing(context, kind) & context.geometry.real[:, None, None, :, None]
    return bool(at.any() and not (at & context.geometry.real_pairs).any())


def of_factors(kind: Kind) -> bool:
    """Return whether a kind changes all weights of a row in a block by one factor."""
    count: Any = dict(kind.changes).get("count", 1.0)
    return bool(kind.slots & OF_ROW_SUMS) and np.ndim(count) == 0


def of_sums(kind: Kind) -> bool:
    """Return whether a kind is a mask that is wrong only in the row sums."""
    return kind.slots == {"mask", "value_mask"}


def of_empty(context: SearchContext, kind: Kind) -> bool:
    """Return whether a wrong merge affects only rows that see no key of a block."""
    return MERGES[int(np.asarray(dict(kind.changes).get("merge", 0)))] in (EMPTY, INFINITE)


def joining(context: SearchContext, kind: Kind, l: Array) -> Booleans:
    """Return which rows of each block, [a, b, h, i], a wrong merge can change."""
    here = l != 0
    changed: Any = dict(kind.changes)
    if of_empty(context, kind) or "mask" in changed:
        return ~here
    if "hidden_merge" in changed or MERGES[changed["merge"]] in AT_FIRST:
        return here
    first, found = context.geometry.steps("forward"), np.zeros_like(here)
    seen_before = np.zeros_like(here[:, 0])
    for step in range(context.geometry.workers):
        a, b = np.nonzero(first == step)
        found[a, b] = here[a, b] & seen_before[a]
        seen_before[a] |= here[a, b]
    return found


def merging_well(
    context: SearchContext,
    kind: Kind,
    places: Sequence[Place],
    seen: Seen,
    choices: Choices,
    match: Match,
    last: bool,
) -> list[Merging]:
    """Return the ``places`` at which a kind corrects the sums of a row: its weights summed over each block, or its lse.

    Each place has a key, which is equal only if the kind has the same effect there; None if this is not known.
    ``last``: return only those at which it corrects the sums of all rows that are wrong.
    """
    if not places:
        return []
    wrong = wrong_rows(context, match)
    c = Fault("forward", kind, context.places("forward").blocks[0]).applied(choices)
    exact = last and shows_merges(context, choices)
    if exact and len(places) > 1 and by_rows(choices) and by_rows(c):
        # Most places are ruled out by one query of each worker.
        one = worst_query(wrong)
        right, _, _ = corrected_rows(context, (choices, c), places, seen, match, one)
        well = np.asarray((right | ~wrong[..., one]).all(axis=(1, 2, 3)))
        places = [place for place, fits in zip(places, well, strict=True) if fits]
        if not places:
            return []
    right, better, keys = corrected_rows(context, (choices, c), places, seen, match, slice(None))
    well = np.asarray(better.any(axis=(1, 2, 3)))
    if exact:
        well &= (right | ~wrong).all(axis=(1, 2, 3))
    merges_alone = kind.slots <= {"merge", "hidden_merge"} and not any(
        np.any(choices[x]) for x in OF_EARLIER_MERGES
    )
    found = zip(places, keys, well, strict=True)
    return [(place, key if merges_alone else None) for place, key, fits in found if fits]


def by_rows(c: Choices) -> bool:
    """Return whether the merges of a row depend on no other row."""
    return (
        isinstance(c["hidden_merge"], bool) and not (c["merge"] == MERGES.index(OTHER_TOKENS)).any()
    )


def corrected_rows(
    context: SearchContext,
    both: tuple[Choices, Choices],
    places: Sequence[Place],
    seen: Seen,
    match: Match,
    slots: slice,
) -> tuple[Booleans, Booleans, list[bytes]]:
    """Return which rows [place, a, h, i] are right, and which are right but not in ``match``, in some query ``slots``.

    ``both``: the choices outside of each place, and those in it. The last result has a key for each place: where keys are
    equal, so are the merges.
    """
    there = np.array([x.table[..., 0] for x in places])
    p, weight, lse, keys = weights_of_blocks(context.model, *both, there, slots)
    total, known = seen.weights.sum(axis=4)[..., slots], match.equal["A"].all(axis=(1, 4))
    same = near(total, weight * p, np.abs(total), 4 * context.tolerance)
    right = np.asarray(same.all(axis=2))
    better = np.asarray(right & ~np.asarray(known)[..., slots])
    if seen.lse is not None:
        size = np.maximum(1.0, finite_size(lse))
        right &= near(seen.lse[..., slots], lse, size, context.tolerance)
        better |= right & ~match.equal["lse"][..., slots]
    return right, better, keys


def by_blocks(
    context: SearchContext,
    kind: Kind,
    places: Sequence[Merging],
    choices: Choices,
    attempt: Attempt,
    match: Match,
    last: bool,
) -> Candidates:
    """Try a kind that changes whole rows: in each of ``places``, and in only the rows and heads there that it corrects.

    ``choices`` and ``match`` belong to the faults found so far. ``last``: only if it corrects all rows that are wrong.
    """
    wrong = wrong_rows(context, match)
    alone = rows_alone(context, kind, choices)
    known: dict[bytes, Match] = {}
    for place, key in places:
        fault = Fault("forward", kind, place)
        got = known[key] if key in known else attempt(fault)
        if key is not None:
            known[key] = got
        if last and (wrong & wrong_rows(context, got)).any():
            continue
        good, bad = rows_corrected(context, match, got)
        if not good.any():
            continue
        if not bad.any():
            yield fault, got
        for part, rows in context.workers.parts_fitting(good, bad, place):
            one = Fault("forward", kind, part)
            yield one, in_rows_of(context, match, got, rows) if alone else attempt(one)


def in_rows(
    context: SearchContext, kind: Kind, attempt: Attempt, match: Match, last: bool
) -> Candidates:
    """Try a kind that workers choose for all their blocks, in the rows that it corrects; if ``last``, in all wrong rows."""
    everywhere = Fault("forward", kind, context.workers.blocks[0])
    got = attempt(everywhere)
    wrong = wrong_rows(context, match)
    if last and (wrong & wrong_rows(context, got)).any():
        return
    good, bad = rows_corrected(context, match, got)
    if good.any() and not bad.any():
        yield everywhere, got
    if good.any():
        able = containing(wrong[:, None, :, :, None]) if last else None
        yield from context.at_best(kind, context.workers, good, bad, attempt, able=able)


def in_whole_rows(
    context: SearchContext, kind: Kind, places: Places, attempt: Attempt, match: Match
) -> Candidates:
    """Try a kind that changes the weights and the values of rows in places that contain every wrong row."""
    everywhere = Fault("forward", kind, places.blocks[0])
    got, wrong = attempt(everywhere), wrong_rows(context, match)
    if (wrong & wrong_rows(context, got)).any():
        return
    good, bad = (
        np.broadcast_to(x, context.model.shape) for x in rows_corrected(context, match, got)
    )

    def in_place(fault: Fault) -> Match:
        whole, some = (which(fault.place.table, axis=(1, 4)) for which in (np.all, np.any))
        if np.array_equal(whole, some):
            return in_rows_of(context, match, got, whole)
        return attempt(fault)

    able = containing(wrong[:, None, :, :, None])
    yield from context.at_best(kind, places, good, bad, in_place, able=able)


def rows_alone(context: SearchContext, kind: Kind, choices: Choices) -> bool:
    """Return whether each row of o and lse depends only on what the ring does for this row, with a kind at any place."""
    right = context.model.right
    applied = Fault("forward", kind, context.workers.blocks[0]).applied(choices)
    return not kind.slots & set(OF_ALL) and all(applied[x] is right[x] for x in OF_OTHER_ROWS)


def in_rows_of(context: SearchContext, without: Match, applied: Match, rows: Booleans) -> Match:
    """Return the match that is ``applied`` in some ``rows`` [a, h, i], and ``without`` in the others."""
    context.model.evaluations += 1

    def selected(inside: dict[str, Any], outside: dict[str, Any]) -> dict[str, Any]:
        shaped = {3: rows, 4: rows[..., None], 5: rows[:, None, :, :, None]}
        return {name: np.where(shaped[x.ndim], inside[name], x) for name, x in outside.items()}

    return Match(
        selected(applied.equal, without.equal),
        lambda: selected(applied.ours, without.ours),
        lambda: selected(applied.alike, without.alike),
    )


def wrong_rows(context: SearchContext, match: Match) -> Booleans:
    """Return the rows, [a, h, i], in which anything disagrees."""
    wrong = ~match.equal["A"].all(axis=(1, 4)) | ~match.equal["V"].all(axis=3)
    return np.asarray(wrong | ~match.equal["lse"] if "lse" in match.equal else wrong)


def worst_query(wrong: Booleans) -> slice:
    """Return the slot of the query that is wrong in the most rows [a, h, i], as a slice."""
    slot = int(wrong.sum(axis=(0, 1)).argmax())
    return slice(slot, slot + 1)


def rows_corrected(context: SearchContext, before: Match, after: Match) -> tuple[Array, Array]:
    """Return how much of each row ``after`` corrects, and whether it makes the row wrong: two arrays [a, 1, h, i, j]."""
    shape = (context.geometry.workers, context.geometry.heads, context.geometry.slots)
    good, bad = np.zeros(shape), np.zeros(shape, bool)
    for name, was in before.equal.items():
        now = after.equal[name]
        if was.ndim > 3:
            was, now = np.asarray(was.all(axis=-1)), np.asarray(now.all(axis=-1))
        better, worse = np.asarray(now & ~was), np.asarray(was & ~now)
        if was.ndim == 4 and name == "A":
            better, worse = better.sum(axis=1), np.asarray(worse.any(axis=1))
        good, bad = good + better, bad | worse
    full = (shape[0], 1, shape[1], shape[2], shape[2])
    good, bad = good * ~bad, bad | False
    return (
        np.broadcast_to(good[:, None, :, :, None], full),
        np.broadcast_to(bad[:, None, :, :, None], full),
    )


def containing(pairs: Booleans) -> Callable[[Place], bool]:
    """Return a function that tells whether a place contains all ``pairs`` [a, b, h, i, j]."""
    return lambda place: not (pairs & ~place.table).any()
