"""Explain the forward pass of one problem: propose faults, and compare what they give with what was read.

A *row* [a, h, i] contains all pairs of one query in one head. The other terms are those of
:mod:`ringspec.conformance.readout.search.context`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringspec.conformance.readout.faults.choices import OF_ALL, Choices
from ringspec.conformance.readout.faults.effects import OF_LSE, OF_O, STORED
from ringspec.conformance.readout.faults.kinds import Fault, Kind
from ringspec.conformance.readout.faults.places import FROM_STEP_1, Place, Places
from ringspec.conformance.readout.model.blocks import blocks
from ringspec.conformance.readout.model.forward import Forward, forward_pass
from ringspec.conformance.readout.model.keeping import keep
from ringspec.conformance.readout.model.scores import scores_of_pairs
from ringspec.conformance.readout.problem.pairs import Seen
from ringspec.conformance.readout.search.context import (
    PairsShown,
    SearchContext,
    of_feature,
    of_ranges,
)
from ringspec.conformance.readout.search.fault_sets import (
    Attempt,
    Candidates,
    Predict,
    composed,
    explain,
)
from ringspec.conformance.readout.search.matches import (
    ZERO,
    Explanation,
    Match,
    alike,
    finite_size,
    in_halves,
    in_tiles,
    near,
    of_pairs,
)
from ringspec.conformance.readout.search.part_search import lses_that_fit, of_lse
from ringspec.conformance.readout.search.row_search import (
    by_blocks,
    containing,
    for_rows,
    in_rows,
    in_whole_rows,
    of_factors,
    of_padding,
    of_sums,
    rows_alone,
    wrong_rows,
)
from ringspec.conformance.readout.search.starts import Start, starts_of, useful
from ringspec.conformance.readout.search.tile_search import fitting_sample, tiles_of_use
from ringspec.problem.model import Booleans

MOST_STARTS = 6  # of a kind of evidence
OF_FORWARD = 2 / 3  # the share of the search in the forward pass, if a backward pass follows

# Places in which a kind that moves weights between blocks is tried, whatever the weights show.
OF_STEPS = (FROM_STEP_1, "in the last step", "in all but the last step")


def touching(halves: Booleans) -> Callable[[Place], bool]:
    """Return a function that tells whether a place contains some pair of each of these ``halves`` of rows, [a, b, h, i, 2]."""

    def touches(place: Place) -> bool:
        shape = (*halves.shape[:4], place.table.shape[4])
        n = halves.shape[4]
        inside = np.broadcast_to(place.table, shape)
        there = in_halves(inside) if n == 2 and shape[4] > 1 else inside.any(axis=4, keepdims=True)
        return not (halves & ~there).any()

    return touches


def match_forward(context: SearchContext, seen: Seen, ours: Forward) -> Match:
    weights, tolerance = ours.weights, context.tolerance
    equal = {"A": near(seen.weights, weights, np.abs(weights), tolerance)}
    arrays = {"A": weights}
    if seen.lse is not None:
        size = np.maximum(1.0, finite_size(ours.lse))
        equal["lse"] = near(seen.lse, ours.lse, size, tolerance)
        arrays["lse"] = ours.lse
    size = np.abs(weights).sum(axis=(1, 4))[..., None] * context.largest
    equal["V"] = near(seen.through, ours.through, size, tolerance)
    return Match(
        equal,
        lambda: arrays | {"V": ours.through},
        lambda: {"A": alike(seen.weights, weights, tolerance)},
    )


def explain_forward(
    context: SearchContext, seen: Seen, known: Sequence[tuple[Fault, ...]] = ()
) -> tuple[Explanation, Choices]:
    """Explain the forward pass; return the explanation, and the choices of a ring with its faults.

    ``known``: sets of faults that other problems showed.
    """
    model = context.model

    def predict(choices: Choices) -> Match:
        return match_forward(context, seen, forward_pass(model, choices))

    context.search_from(model.right)
    found = explain(
        model,
        functools.partial(keep, model),
        predict,
        model.right,
        lambda choices, match, last: forward_faults(
            context, seen, predict, choices, match, last, context.in_another_way(choices)
        ),
        context.part(1.0 if seen.p is None else OF_FORWARD),
        lambda choices, match: forward_starts(context, seen, choices, match),
        known=known,
        places=context.places("forward").blocks,
    )
    every = found.faults, *found.others
    first, *others = (tuple(sorted(faults, key=of_storing)) for faults in every)
    found = dataclasses.replace(found, faults=first, others=tuple(others))
    return found, composed(model.right, found.faults)


def of_storing(fault: Fault) -> bool:
    """Return whether a fault is in how o and lse are returned or saved, which is told last: a backward pass may use them from before."""
    return bool(fault.kind.slots & set(STORED))


def forward_starts(
    context: SearchContext, seen: Seen, choices: Choices, match: Match
) -> Iterator[Sequence[Start]]:
    """Yield faults that explain where the weights are 0, faults of o or lse alone, then sets of two for the zeros."""
    ours, there = (np.abs(x) > ZERO for x in (match.ours["A"], seen.weights))
    by_zeros = starts_of(context, "forward", choices, ours, there)
    yield [one for one in by_zeros if len(one) == 1][:MOST_STARTS]
    yield from starts_of_o(context, seen, choices, match)
    yield [one for one in by_zeros if len(one) > 1][:MOST_STARTS]


def starts_of_o(
    context: SearchContext, seen: Seen, choices: Choices, match: Match
) -> Iterator[Sequence[Start]]:
    """Yield the faults that explain lse alone, then those that explain o if lse is ignored; none if one of them is right."""
    if seen.lse is None or match.equal["lse"].all() or match.equal["V"].all():
        return
    yield [(fault,) for fault in explaining_lse(context, seen, choices)[:MOST_STARTS]]
    of_o = dataclasses.replace(seen, lse=None)

    def predict(choices: Choices) -> Match:
        return match_forward(context, of_o, forward_pass(context.model, choices))

    found = forward_faults(context, of_o, predict, choices, predict(choices), True)
    whole = [fault for fault, got in found if got.whole]
    yield [(fault,) for fault in sorted(whole, key=lambda fault: fault.cost)[:MOST_STARTS]]


def explaining_lse(context: SearchContext, seen: Seen, choices: Choices) -> list[Fault]:
    """Return the wrong merges and row sums that, made everywhere, explain lse, whatever the weights are."""
    kinds, places = context.kinds("forward"), context.places("forward")
    lses = functools.cache(functools.partial(lses_that_fit, context, seen, choices))
    found = []
    for kind in itertools.takewhile(context.model.may_go_on, kinds):
        of_part = of_lse(kind) and of_lse(kind) in lses("tiles" in kind.slots).lse
        if of_part or of_sums(kind) or kind.slots == {"merge"} or kind.names <= OF_LSE:
            fault = Fault("forward", kind, places.blocks[0])
            match = match_forward(
                context, seen, forward_pass(context.model, fault.applied(choices))
            )
            if match.equal["lse"].all():
                found.append(fault)
    return sorted(found, key=lambda fault: fault.cost)


@dataclass
class Attempts:
    """Predicts what a fault gives besides those in ``choices``; ``of_feature``: one of the problem's feature gives everything."""

    context: SearchContext
    seen: Seen
    predict: Predict
    choices: Choices
    of_feature: bool = False

    def __call__(self, fault: Fault) -> Match:
        def predicted() -> Match:
            return self.predict(fault.applied(self.choices))

        if fault.place.words:
            found = predicted()
        else:
            what = "o" if self.seen.lse is None else "match"
            found = self.context.once(what, fault.kind, self.choices, predicted)
        self.of_feature |= found.whole and of_feature(fault.kind)
        return found

    def may_go_on(self, kind: Kind) -> bool:
        """Tell whether a kind is still tried.

        A problem of a feature is run only if the ring is right without it, so other kinds would be refuted.
        """
        return self.context.model.may_go_on() and (of_feature(kind) or not self.of_feature)


def forward_faults(
    context: SearchContext,
    seen: Seen,
    predict: Predict,
    choices: Choices,
    match: Match,
    last: bool,
    of_way: bool = False,
) -> Candidates:
    """Yield faults that may explain more, each with its match.

    ``choices`` and ``match`` belong to the faults found so far. ``last``: yield only faults that may explain all
    that is still wrong; ``of_way``: of these, only those that depend on the ranges that a kernel computes.

    A row does not depend on other rows, and the ratios between the weights of a row within a
    block do not depend on other blocks. So one evaluation with a kind applied everywhere shows where it helps.
    """
    kinds, places = context.kinds("forward"), context.places("forward")
    attempt = Attempts(context, seen, predict, choices)
    _, l, _, _ = blocks(context.model, choices)
    nothing = (np.abs(seen.weights) <= ZERO).all(axis=4)
    shaped = np.asarray(np.all(match.alike["A"].all(axis=4) | nothing, axis=1))
    misshapen = not match.alike["A"].all()
    uneven = bool((wrong_rows(context, match) & ~shaped).any())
    ours, there = (np.abs(x) > ZERO for x in (match.ours["A"], seen.weights))
    kinds_of_use = useful(context, "forward", kinds, choices, {"": (ours, there)})
    ruled_out = explaining_nothing(context, seen, choices, match, last, uneven)
    for kind in itertools.takewhile(attempt.may_go_on, kinds_of_use):
        if (last and of_way and not of_ranges(kind)) or ruled_out(kind):
            continue
        changes = kind.slots
        pairs = read_pairs(context, kind, seen, choices, ours, there) if misshapen else None
        if pairs is not None:
            yield from context.in_pairs("forward", kind, pairs, attempt)
        of_moved = changes & {"merge", "tiles"} and not context.model.correct(choices, "v")
        if of_moved or (changes & {*OF_ALL, "o_to"} and "merge" not in changes):
            one = Fault("forward", kind, places.blocks[0])
            yield one, attempt(one)
        elif kind.of_workers:
            if may_help(context, kind, match, last):
                yield from in_rows(context, kind, attempt, match, last)
        elif is_loss(kind):
            gone = (np.abs(seen.weights) <= ZERO) & (np.abs(match.ours["A"]) > ZERO)
            there = np.abs(seen.weights) > ZERO
            able = containing(gone & ~match.equal["A"]) if last else None
            yield from context.at_best(kind, places, gone, there, attempt, able=able)
        elif changes & {"v.worker", "v.slot"}:
            yield from in_moved(context, kind, places, attempt, match, seen)
        elif last and {"k.head", "v.head"} <= changes and rows_alone(context, kind, choices):
            yield from in_whole_rows(context, kind, places, attempt, match)
        elif of_factors(kind) or of_padding(context, kind) or of_sums(kind):
            if not (last and uneven):
                at = for_rows(context, kind, seen, choices, match, l, shaped, last)
                yield from by_blocks(context, kind, at, choices, attempt, match, last)
        elif misshapen:
            after = alike_everywhere(context, kind, seen, choices)
            before = match.alike["A"]
            slots = context.geometry.slots
            better, worse = of_pairs(after & ~before, slots), of_pairs(before & ~after, slots)
            # A half whose weights are all 0 in a block may be small in the whole row.
            faint = ~in_halves(there)
            if better.any() and not (last and not (after | before | faint).all()):
                able = touching(in_halves(~match.equal["A"]) & ~before) if last else None
                yield from context.at_best(kind, places, better, worse, attempt, able=able)


def explaining_nothing(
    context: SearchContext, seen: Seen, choices: Choices, match: Match, last: bool, uneven: bool
) -> Callable[[Kind], bool]:
    """Return a function that tells whether a kind explains nothing, or, if ``last``, not all that is still wrong.

    ``uneven``: whether in some wrong row the weights of a block are wrong by more than one factor.
    """
    alike_in: dict[int, bool] = {}
    lses = functools.cache(functools.partial(lses_that_fit, context, seen, choices))
    fits = fitting_sample(context, seen, choices, wrong_rows(context, match)) if last else None
    misshapen = not match.alike["A"].all()

    def ruled_out(kind: Kind) -> bool:
        of_tiles, lse = "tiles" in kind.slots, of_lse(kind)
        if lse and ((last and uneven and not of_tiles) or lse not in lses(of_tiles)):
            return True
        if of_tiles and not tiles_of_use(context, kind, seen, match, alike_in):
            return True
        if last and "padded" in kind.slots and misshapen:
            return True  # it changes only row sums
        return fits is not None and not fits(kind)

    return ruled_out


def alike_everywhere(context: SearchContext, kind: Kind, seen: Seen, choices: Choices) -> Booleans:
    """Return which halves of rows agree up to a factor, [a, b, h, i, 2], with a kind in all blocks."""

    def compute() -> Booleans:
        everywhere = Fault("forward", kind, context.places("forward").blocks[0])
        p = blocks(context.model, everywhere.applied(choices))[3]
        return alike(seen.weights, p, context.tolerance)

    found: Booleans = context.once("alike", kind, choices, compute)
    return found


def is_loss(kind: Kind) -> bool:
    """Return whether the pairs are not computed at all."""
    count: Any = dict(kind.changes).get("count", 1.0)
    return np.ndim(count) == 0 and count == 0.0


def read_pairs(
    context: SearchContext,
    kind: Kind,
    seen: Seen,
    choices: Choices,
    ours: Booleans,
    there: Booleans,
) -> PairsShown | None:
    """Return the pairs whose weights alone show this mistake of the forward pass.

    None if the weights cannot show this kind. ``ours`` and ``there``: pairs whose weight is not 0, as predicted and
    as observed.
    """
    changes = dict(kind.changes)
    masks = {"mask", "value_mask"} & changes.keys()
    missing, added = ours & ~there, there & ~ours
    if is_loss(kind):
        return PairsShown(missing, missing, missing | ~ours)
    if changes.keys() == {"hidden_score"}:
        return PairsShown(added, added, added | ours)
    if masks and len(changes) == 1:
        pattern = context.model.masks[int(np.asarray(changes[masks.pop()]))]
        if pattern.all():
            return PairsShown(added, added, added | ours)
        if not pattern.any():
            return PairsShown(missing, missing, missing | ~ours)
    times, count = changes.get("times", 1.0), changes.get("count", 1.0)
    if not (isinstance(times, float) and isinstance(count, float)):
        return None
    if times * count != 1.0 and seen.lse is not None:
        s = scores_of_pairs(context.model, choices)
        e = seen.weights * np.exp(seen.lse)[:, None, ..., None]
        once, other = np.exp(s), count * np.exp(times * s)
        right, fits = (near(e, x, x, 2 * context.tolerance) & there & ours for x in (once, other))
        sure, either = fits & ~right, fits & right
        listed = in_tiles(sure, ours & ~fits, either)
        # Beside weights that are too large, others are too small to be read.
        faint = ~there & (other <= ZERO * np.exp(seen.lse)[:, None, ..., None])
        return PairsShown(listed, sure, fits | faint | ~ours)
    return None


def may_help(context: SearchContext, kind: Kind, match: Match, last: bool) -> bool:
    """Return whether a kind changes o or lse where something is wrong; if ``last``, everything that is wrong."""
    wrong = {name for name, x in match.equal.items() if not x.all()}
    names = kind.names
    if names <= OF_LSE:
        return wrong == {"lse"} if last else "lse" in wrong
    if names <= OF_O:
        return "lse" not in wrong if last else wrong != {"lse"}
    return True


def in_moved(
    context: SearchContext, kind: Kind, places: Places, attempt: Attempt, match: Match, seen: Seen
) -> Candidates:
    """Try a kind that moves weights to other columns in the places whose weights it may have moved.

    The weights of two steps may be in the same columns afterwards, which shows neither, so whole steps are tried, too.
    """
    for place in places.blocks if "v.worker" in kind.slots else ():
        if place.words in OF_STEPS:
            one = Fault("forward", kind, place)
            yield one, attempt(one)
    good, bad = context.movable(kind, match, ("A",), "forward", seen.weights)
    if good.any():
        yield from context.at_best(kind, places, good, bad, attempt, "forward", True)
