"""Faults that pairs of tokens show by being 0 or not: from these, a search for several faults starts.

Most faults leave the zeros of a matrix where they are: only masks, blocks that are not computed, and shares in wrong
places change them. So the zeros show such a fault even if another one changes all other numbers. These faults are found
by comparing patterns, without evaluating the model.

A *pattern* [a, b, h, i, j] is True for pairs that are not 0. A *start* is a set of faults that gives the observed
pattern. The other terms are those of :mod:`ringspec.conformance.readout.search.context`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ringspec.conformance.readout.faults.choices import KERNELS, Choices, components
from ringspec.conformance.readout.faults.kinds import Fault, Kind
from ringspec.conformance.readout.faults.places import Place, pairs_listed
from ringspec.conformance.readout.model.storing import landed
from ringspec.conformance.readout.search.context import SearchContext
from ringspec.problem.model import Array, Booleans

MOST_OF_A_KIND = 2  # places of a kind
EXTENDED = 6  # starts that are extended by a second fault
MOST_OF_TILES = 12  # rules about tiles, for each matrix
FEW_PLACES = 8  # sets of blocks in which shares are tried in wrong places
OF_ZEROS = {
    "mask",
    "count",
    "value_mask",
    "dv_count",
    "dq_count",
    "dk_count",
}  # choices by which pairs are 0 in A or P
# Choices by which a share of a matrix lands in another row or column.
MOVES = {"forward": {"v"}, "backward": {"dv_dy", "dv_to"}}

Start = tuple[Fault, ...]


def starts_of(
    context: SearchContext,
    phase: str,
    base: Choices,
    ours: Booleans,
    there: Booleans,
    only: str = "",
) -> list[Start]:
    """Return the starts for a matrix, those of one fault first.

    ``ours`` and ``there``: the patterns with the choices ``base``, and as observed. ``only``: the kernel of the
    backward pass that made the matrix, '' for a forward pass or both.
    """
    if np.array_equal(ours, there):
        return []
    kinds = [kind for kind in context.kinds(phase) if kind.only == only]
    whole: list[Start] = []
    some: list[tuple[int, Fault, Booleans]] = []
    for fault, pattern in changed_by(context, phase, kinds, ours, there):
        left = int((pattern != there).sum())
        if left:
            some.append((left, fault, pattern))
        else:
            whole.append((fault,))
    whole += moved_by(context, phase, kinds, base, ours, there)
    whole.sort(key=lambda one: one[0].cost)
    pairs: list[Start] = []
    some.sort(key=lambda one: (one[0], one[1].cost))
    for _, first, pattern in some[:EXTENDED]:
        for second, both in changed_by(context, phase, kinds, pattern, there):
            if np.array_equal(both, there):
                pairs.append((first, second))
    pairs.sort(key=lambda one: sum(fault.cost for fault in one))
    return [*whole, *pairs]


def changed_by(
    context: SearchContext, phase: str, kinds: list[Kind], ours: Booleans, there: Booleans
) -> Iterator[tuple[Fault, Booleans]]:
    """Yield faults that bring the pattern ``ours`` nearer to ``there``, with the pattern that each of them gives.

    ``kinds``: those of the kernel that made the matrix.
    """
    places, wrong = context.places(phase), ours != there
    if not wrong.any():
        return
    for kind in of_use(context, phase, kinds, {"": (ours, there)}, True):
        shown = shown_by(context, phase, kind)
        assert shown is not None
        shown = np.broadcast_to(shown, ours.shape)
        good, bad = wrong & (shown == there), ~wrong & (shown != there)
        if not good.any():
            continue
        parts = places.of_heads if kind.of_tiles else None
        found = [place for _, place in places.fitting(good, bad, MOST_OF_A_KIND, parts=parts)]
        if (shown.all() or not shown.any()) and kind.slots & {"mask", "count"}:
            listed = pairs_listed(context.geometry, widened(good, bad), places.blocks)
            found += [] if listed is None else [listed]
        for place in found:
            yield Fault(phase, kind, place), np.where(place.table, shown, ours)


def shown_by(context: SearchContext, phase: str, kind: Kind) -> Booleans | None:
    """Return the pattern that a kind gives where it is made; None if it leaves the zeros where they are, or moves them."""
    key = phase, id(kind)
    if key not in context.patterns:
        context.patterns[key] = pattern_of(context, phase, kind)
    return context.patterns[key]


def pattern_of(context: SearchContext, phase: str, kind: Kind) -> Booleans | None:
    changes: dict[str, Any] = dict(kind.changes)
    if kind.names & MOVES[phase] or not changes.keys() & OF_ZEROS:
        return None
    counts = [np.asarray(x) for slot, x in changes.items() if slot.endswith("count")]
    if counts:
        if counts[0].size > 1 and kind.of_tiles:
            return (
                np.asarray(counts[0] > 0) & context.model.masks[0]
            )  # a count shows no hidden pair
        one = counts[0].size == 1 and not counts[0].any()
        return np.zeros((1, 1, 1, 1, 1), bool) if one else None
    if {"mask", "value_mask"} <= changes.keys() or {"mask", "merge"} <= changes.keys():
        return None  # a mask of the row sums or of lse alone
    number = int(np.asarray(changes.get("value_mask", changes.get("mask"))))
    return context.model.masks[number] if number >= 0 else None


def of_use(
    context: SearchContext,
    phase: str,
    kinds: Sequence[Kind],
    zeros: Mapping[str, tuple[Booleans, Booleans]],
    alone: bool = False,
) -> Iterator[Kind]:
    """Yield the kinds without those that correct no zero, so that they explain nothing, without an evaluation.

    Of the many rules about tiles, only those that correct the most zeros, and break the fewest, are yielded. ``zeros``:
    for each matrix, the patterns with the choices so far and as observed (:func:`ringspec.conformance.readout.search.backward_match.zeros_of`).
    ``alone``: all kinds are of one matrix, and only those that change zeros are yielded.
    """
    if kinds is context.kinds(phase):
        if phase not in context.shown:
            context.shown[phase] = patterns_of(context, phase, kinds)
        at, patterns = context.shown[phase]
    else:
        at, patterns = patterns_of(context, phase, kinds)
    use: dict[int, tuple[bool, float]] = {}
    for name, (ours, there) in zeros.items():
        gain, loss = (
            x.sum(axis=3).astype(np.float32).reshape(2, -1) for x in told_apart(ours, there)
        )
        good, bad = (patterns @ x[0] + (1 - patterns) @ x[1] for x in (gain, loss))
        for n, more, less in zip(at, good, bad, strict=True):
            if alone or matrix_of(kinds[n]) == name:
                use[n] = bool(more > 0), float(more - less)
    ranked = sorted(
        (n for n, (good, _) in use.items() if good and kinds[n].of_tiles), key=lambda n: -use[n][1]
    )
    best = set(ranked[:MOST_OF_TILES])
    for n, kind in enumerate(kinds):
        if n not in use:
            if not alone:
                yield kind
        elif use[n][0] and (n in best or not kind.of_tiles):
            yield kind


def patterns_of(context: SearchContext, phase: str, kinds: Sequence[Kind]) -> tuple[list[int], Any]:
    """Return the numbers of the kinds that change zeros, and their patterns, one in each row."""
    shown = [shown_by(context, phase, kind) for kind in kinds]
    W, n = context.geometry.workers, context.geometry.slots
    rows = [np.broadcast_to(x, (W, W, 1, n, n)).ravel() for x in shown if x is not None]
    at = [number for number, pattern in enumerate(shown) if pattern is not None]
    return at, np.array(rows, np.float32).reshape(len(rows), -1)


def told_apart(ours: Booleans, there: Booleans) -> tuple[Array, Array]:
    """Return what a pattern gains, and what it loses, by showing each pair and by hiding it: [2, a, b, h, i, j] each."""
    return np.stack([~ours & there, ours & ~there]), np.stack([~ours & ~there, ours & there])


def matrix_of(kind: Kind) -> str:
    """Return the matrix whose zeros a kind changes, by the name that the zeros have."""
    slots = kind.slots
    if slots & {"dq_count"}:
        return KERNELS[0]
    if slots == {"dk_count"}:
        return "dk"
    return KERNELS[1] if slots & {"dv_count"} else kind.only


def useful(
    context: SearchContext,
    phase: str,
    kinds: Sequence[Kind],
    choices: Choices,
    zeros: Mapping[str, tuple[Booleans, Booleans]],
) -> Iterable[Kind]:
    """Return the kinds that :func:`of_use` yields; all of them if zeros show nothing, because shares are moved or padded."""
    right = context.model.right
    moved = any(choices[x] is not right[x] for name in MOVES[phase] for x in components(name))
    return kinds if moved or context.geometry.padding else of_use(context, phase, kinds, zeros)


def moved_by(
    context: SearchContext,
    phase: str,
    kinds: list[Kind],
    base: Choices,
    ours: Booleans,
    there: Booleans,
) -> list[Start]:
    """Return the starts that consist of one kind by which shares land in wrong columns or rows of their own head."""
    found: list[Start] = []
    row, column = ("q", "v") if phase == "forward" else ("dv_dy", "dv_to")
    places: list[Place] = list(context.places(phase).blocks[:FEW_PLACES])
    for kind in kinds:
        moves = {slot for slot in kind.slots if slot.split(".")[0] in MOVES[phase]}
        if not moves or any(slot.endswith("head") for slot in moves) or "mask" in kind.slots:
            continue
        for place in places:
            fault = Fault(phase, kind, place)
            c = fault.applied(base)
            to = c[f"{column}.worker"], c[f"{column}.slot"]
            if np.array_equal(landed(context.model, ours.astype(float), row, c, *to) > 0, there):
                found.append((fault,))
                break
    return found


def widened(good: Booleans, bad: Booleans) -> Booleans:
    """Return a set of pairs with all of ``good`` and none of ``bad`` that is simpler to describe than ``good``.

    What is neither good nor bad, such as masked pairs, may be in it. The same pairs in all blocks and heads are simplest,
    and among these whole columns, whole rows, or a rectangle.
    """
    every = np.ones(good.shape[:2], bool)
    for blocks in (every, np.asarray(good.any(axis=(2, 3, 4)))):
        here = blocks[:, :, None, None, None]
        inside = np.asarray(good.any(axis=(0, 1, 2)))
        outside = np.asarray((bad & here).any(axis=(0, 1, 2)))
        if (inside & outside).any():
            continue
        rows, keys = inside.any(axis=1, keepdims=True), inside.any(axis=0, keepdims=True)
        for simple in (keys, rows, rows & keys, inside):
            table = np.broadcast_to(simple, inside.shape)
            if not (table & outside).any():
                return np.asarray(here & table)
    return good
