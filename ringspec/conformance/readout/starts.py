"""Faults that pairs of tokens show by being 0 or not: from these, a search for several faults starts.

Most faults leave the zeros of a matrix where they are: only masks, blocks that are not computed, and shares in wrong
places change them. So the zeros show such a fault even if another one changes all other numbers. These faults are found
by comparing patterns, without evaluating the model.

A *pattern* [a, b, h, i, j] is True for pairs that are not 0. A *start* is a set of faults that gives the observed
pattern. The other terms are those of :mod:`ringspec.conformance.readout.reader`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ringspec.conformance.readout.choices import Choices, components
from ringspec.conformance.readout.effects import names_of
from ringspec.conformance.readout.kinds import Fault, Kind
from ringspec.conformance.readout.model.storing import landed
from ringspec.conformance.readout.places import Place, pairs_listed
from ringspec.conformance.readout.reader import Reader
from ringspec.problem.model import Booleans

MOST_OF_A_KIND = 2  # places of a kind
EXTENDED = 6  # starts that are extended by a second fault
FEW_PLACES = 8  # sets of blocks in which shares are tried in wrong places
OF_ZEROS = {"mask", "count", "value_mask", "dv_count"}  # choices by which pairs are 0 in A or P
# Choices by which a share of a matrix lands in another row or column.
MOVES = {"forward": {"v"}, "backward": {"dv_dy", "dv_to"}}

Start = tuple[Fault, ...]


def starts_of(
    reader: Reader, phase: str, base: Choices, ours: Booleans, there: Booleans, only: str = ""
) -> list[Start]:
    """Return the starts for a matrix, those of one fault first.

    ``ours`` and ``there``: the patterns with the choices ``base``, and as observed. ``only``: the kernel of the
    backward pass that made the matrix, '' for a forward pass or both.
    """
    if np.array_equal(ours, there):
        return []
    kinds = [kind for kind in reader.tried(phase)[0] if kind.only == only]
    whole: list[Start] = []
    some: list[tuple[int, Fault, Booleans]] = []
    for fault, pattern in changed_by(reader, phase, kinds, ours, there):
        left = int((pattern != there).sum())
        if left:
            some.append((left, fault, pattern))
        else:
            whole.append((fault,))
    whole += moved_by(reader, phase, kinds, base, ours, there)
    whole.sort(key=lambda one: one[0].cost)
    pairs: list[Start] = []
    some.sort(key=lambda one: (one[0], one[1].cost))
    for _, first, pattern in some[:EXTENDED]:
        for second, both in changed_by(reader, phase, kinds, pattern, there):
            if np.array_equal(both, there):
                pairs.append((first, second))
    pairs.sort(key=lambda one: sum(fault.cost for fault in one))
    return [*whole, *pairs]


def changed_by(
    reader: Reader, phase: str, kinds: list[Kind], ours: Booleans, there: Booleans
) -> Iterator[tuple[Fault, Booleans]]:
    """Yield faults that bring the pattern ``ours`` nearer to ``there``, with the pattern that each of them gives."""
    places, wrong = reader.tried(phase)[1], ours != there
    if not wrong.any():
        return
    for kind in kinds:
        shown = shown_by(reader, phase, kind)
        if shown is None:
            continue
        shown = np.broadcast_to(shown, ours.shape)
        good, bad = wrong & (shown == there), ~wrong & (shown != there)
        if not good.any():
            continue
        parts = places.of_heads if kind.of_tiles else None
        found = [place for _, place in places.fitting(good, bad, MOST_OF_A_KIND, parts=parts)]
        if (shown.all() or not shown.any()) and kind.slots & {"mask", "count"}:
            listed = pairs_listed(reader.geometry, widened(good, bad), places.blocks)
            found += [] if listed is None else [listed]
        for place in found:
            yield Fault(phase, kind, place), np.where(place.table, shown, ours)


def shown_by(reader: Reader, phase: str, kind: Kind) -> Booleans | None:
    """Return the pattern that a kind gives where it is made; None if it leaves the zeros where they are, or moves them."""
    changes: dict[str, Any] = dict(kind.changes)
    if names_of(kind) & MOVES[phase] or not changes.keys() & OF_ZEROS:
        return None
    if changes.keys() & {"count", "dv_count"}:
        count = np.asarray(changes["count" if "count" in changes else "dv_count"])
        return np.zeros((1, 1, 1, 1, 1), bool) if count.size == 1 and not count.any() else None
    number = int(np.asarray(changes.get("value_mask", changes.get("mask"))))
    return reader.model.masks[number] if number >= 0 else None


def without_idle_masks(
    reader: Reader,
    phase: str,
    kinds: Iterable[Kind],
    choices: Choices,
    zeros: Mapping[str, tuple[Booleans, Booleans]],
) -> Iterator[Kind]:
    """Yield the kinds without the masks that correct no zero, so that they explain nothing, without an evaluation.

    ``zeros``: for each kernel, and '' for both, the patterns with these ``choices`` and as observed.
    """
    for kind in kinds:
        if not moves_no_zero(reader, phase, kind, choices, *zeros[kind.only]):
            yield kind


def moves_no_zero(
    reader: Reader, phase: str, kind: Kind, choices: Choices, ours: Booleans, there: Booleans
) -> bool:
    """Return whether a kind is a mask that corrects no zero of a matrix, so that it cannot explain anything.

    ``ours`` and ``there``: the patterns with these ``choices``, and as observed.
    """
    if "mask" not in kind.slots or "value_mask" in kind.slots or reader.geometry.padding:
        return False
    right = reader.model.right
    if any(choices[x] is not right[x] for name in MOVES[phase] for x in components(name)):
        return False
    shown = shown_by(reader, phase, kind)
    return shown is not None and not ((ours != there) & (shown == there)).any()


def moved_by(
    reader: Reader, phase: str, kinds: list[Kind], base: Choices, ours: Booleans, there: Booleans
) -> list[Start]:
    """Return the starts that consist of one kind by which shares land in wrong columns or rows of their own head."""
    found: list[Start] = []
    row, column = ("q", "v") if phase == "forward" else ("dv_dy", "dv_to")
    places: list[Place] = list(reader.tried(phase)[1].blocks[:FEW_PLACES])
    for kind in kinds:
        moves = {slot for slot in kind.slots if slot.split(".")[0] in MOVES[phase]}
        if not moves or any(slot.endswith("head") for slot in moves) or "mask" in kind.slots:
            continue
        for place in places:
            fault = Fault(phase, kind, place)
            c = fault.applied(base)
            to = c[f"{column}.worker"], c[f"{column}.slot"]
            if np.array_equal(landed(reader.model, ours.astype(float), row, c, *to) > 0, there):
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
