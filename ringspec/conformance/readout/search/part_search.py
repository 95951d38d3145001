"""Read from results which lse each part of a row was merged with, and which wrong lse that may be.

A *part* is a block, or a chunk of its keys (:mod:`ringspec.conformance.readout.faults.part_results`). In each row, the weights of
a part add up to exp(L - lse), where L is the lse with which the part was merged. So the weights show every L of a row but
for one common constant, and lse shows the log-sum-exp of all L.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ringspec.conformance.readout.faults.choices import Choices
from ringspec.conformance.readout.faults.kinds import Kind
from ringspec.conformance.readout.faults.part_results import PART_LSES, lses_in
from ringspec.conformance.readout.model.arrays import log_of
from ringspec.conformance.readout.model.part_results import wrong_lse
from ringspec.conformance.readout.model.scores import OF_SCORES, scores_of_pairs
from ringspec.conformance.readout.model.tile_merging import softmax_of
from ringspec.conformance.readout.problem.pairs import Seen
from ringspec.conformance.readout.search.context import SearchContext
from ringspec.conformance.readout.search.matches import ZERO, near
from ringspec.problem.model import Array, Booleans

MOST = 12  # wrong lse that are tried
AS_GOOD = 0.5  # of the rows that the best one explains
WORK = 12  # of computing all wrong lse, in evaluations of a table over all pairs


@dataclass(frozen=True)
class LsesThatFit:
    """The numbers in PART_LSES of the mistakes that ``weights`` show, or that explain ``lse`` in all rows; best first."""

    weights: tuple[int, ...]
    lse: tuple[int, ...]

    def __contains__(self, number: int) -> bool:
        return number in self.weights or number in self.lse


def of_lse(kind: Kind) -> int:
    """Return the number in PART_LSES of the lse with which a kind merges parts; 0 if it is correct."""
    changed: dict[str, Any] = dict(kind.changes)
    return int(changed.get("part_lse", 0))


def lses_that_fit(
    context: SearchContext, seen: Seen, choices: Choices, chunks: bool
) -> LsesThatFit:
    """Return the wrong lse of blocks, or of chunks of keys, that explain rows that ``choices`` do not."""
    numbers, parts = lses_of_parts(context, choices, chunks)
    run = context.geometry.run if chunks else context.geometry.slots
    total = seen.weights.reshape(*seen.weights.shape[:4], -1, run).sum(axis=5)
    with np.errstate(invalid="ignore", divide="ignore"):
        read = np.log(total) - parts
        low, high = (np.where(total > ZERO, read, x) for x in (np.inf, -np.inf))
        steady = ~(high.max(axis=(2, 5)) - low.min(axis=(2, 5)) > 4 * context.tolerance)
    right, others = steady[0], steady[1:]
    gain = (others & ~right).sum(axis=(1, 2, 3)) - (right & ~others).sum(axis=(1, 2, 3))
    best = np.argsort(-gain, kind="stable")[:MOST]
    least = max(1.0, AS_GOOD * float(gain.max(initial=0)))
    by_weights = tuple(numbers[x] for x in best if gain[x] >= least)
    return LsesThatFit(by_weights, explaining(context, seen, numbers, parts))


def explaining(
    context: SearchContext, seen: Seen, numbers: list[int], parts: Array
) -> tuple[int, ...]:
    """Return the numbers of the wrong lse that explain the returned lse in all rows."""
    if seen.lse is None:
        return ()
    whole = np.logaddexp.reduce(np.logaddexp.reduce(parts, axis=5), axis=2)
    given = seen.lse
    right: list[Booleans] = [
        near(given, x, np.maximum(1.0, np.abs(np.nan_to_num(x, neginf=0.0))), context.tolerance)
        for x in whole
    ]
    if right[0].all():
        return ()
    return tuple(number for number, fits in zip(numbers, right[1:], strict=True) if fits.all())


def lses_of_parts(
    context: SearchContext, choices: Choices, chunks: bool
) -> tuple[list[int], Array]:
    """Return numbers of wrong lse; and the lse [x, a, b, h, i, part] that parts have correctly (x is 0), or with each of them."""
    model, given = context.model, (chunks, *choices.several(OF_SCORES))
    known = context.lses.get(chunks)
    if known is not None and all(x is y for x, y in zip(known[0], given, strict=True)):
        return known[1]
    model.evaluations += WORK
    run = context.geometry.run if chunks else context.geometry.slots
    s = scores_of_pairs(model, choices)
    numbers = [number for number, _ in lses_in(context.geometry, True)]
    every = []
    for start in range(0, context.geometry.slots, run):
        keys = s[..., start : start + run]
        m, l, _ = softmax_of(keys)
        right = log_of(m, l)
        found = [right]
        for number in numbers:
            lse = wrong_lse(model, PART_LSES[number], keys, m, l)
            found.append(np.where((l != 0) & np.isfinite(lse), lse, right))
        every.append(np.stack(found))
    context.lses[chunks] = given, (numbers, np.stack(every, axis=-1))
    return context.lses[chunks][1]
