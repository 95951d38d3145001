"""Propose the faults of a forward pass that may explain what was read from the results of one problem.

A *row* [a, h, i] contains all pairs of one query in one head. The other terms are those of
:mod:`ringspec.conformance.readout.reader`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringspec.conformance.readout.choices import OF_ALL, Choices, Tiles
from ringspec.conformance.readout.effects import (
    AFTER_MERGES,
    OF_EARLIER_MERGES,
    OF_LSE,
    OF_O,
    OF_OTHER_ROWS,
    OF_ROW_SUMS,
    STORED,
)
from ringspec.conformance.readout.fault_sets import Attempt, Candidates, Predict, composed, explain
from ringspec.conformance.readout.kinds import Fault, Kind
from ringspec.conformance.readout.matches import (
    ZERO,
    Explanation,
    Match,
    alike,
    finite_size,
    in_halves,
    in_tiles,
    near,
    of_pairs,
    ratio_steady,
)
from ringspec.conformance.readout.merges import AT_FIRST, EMPTY, INFINITE, MERGES, OF_L
from ringspec.conformance.readout.model.blocks import blocks
from ringspec.conformance.readout.model.forward import Forward, forward_pass
from ringspec.conformance.readout.model.keeping import keep
from ringspec.conformance.readout.model.merging import weights_of_blocks
from ringspec.conformance.readout.model.scores import scores_of_pairs
from ringspec.conformance.readout.pairs import Seen
from ringspec.conformance.readout.part_search import lses_that_fit, of_lse
from ringspec.conformance.readout.places import FROM_STEP_1, Place, Places
from ringspec.conformance.readout.reader import PairsShown, Reader, of_feature, of_ranges
from ringspec.conformance.readout.starts import Start, starts_of, useful
from ringspec.problem.model import Array, Booleans

FAINT = 1e-3  # of weights below it in one tile, the ratios are not compared: some may count as 0
FEW = 6  # how many sets of blocks are tried for a rare kind of fault
Merging = tuple[Place, bytes | None]  # a place with the key of what a merge does there
MOST_STARTS = 6  # of a kind of evidence
OF_FORWARD = 2 / 3  # the share of the search in the forward pass, if a backward pass follows

# Places in which a kind that moves weights between blocks is tried, whatever the weights show.
OF_STEPS = (FROM_STEP_1, "in the last step", "in all but the last step")


def containing(pairs: Booleans) -> Callable[[Place], bool]:
    """Return a function that tells whether a place contains all ``pairs`` [a, b, h, i, j]."""
    return lambda place: not (pairs & ~place.table).any()


def touching(halves: Booleans) -> Callable[[Place], bool]:
    """Return a function that tells whether a place contains some pair of each of these ``halves`` of rows, [a, b, h, i, 2]."""

    def touches(place: Place) -> bool:
        shape = (*halves.shape[:4], place.table.shape[4])
        n = halves.shape[4]
        inside = np.broadcast_to(place.table, shape)
        there = in_halves(inside) if n == 2 and shape[4] > 1 else inside.any(axis=4, keepdims=True)
        return not (halves & ~there).any()

    return touches


def match_forward(reader: Reader, seen: Seen, ours: Forward) -> Match:
    weights, tolerance = ours.weights, reader.tolerance
    equal = {"A": near(seen.weights, weights, np.abs(weights), tolerance)}
    arrays = {"A": weights}
    if seen.lse is not None:
        size = np.maximum(1.0, finite_size(ours.lse))
        equal["lse"] = near(seen.lse, ours.lse, size, tolerance)
        arrays["lse"] = ours.lse
    size = np.abs(weights).sum(axis=(1, 4))[..., None] * reader.largest
    equal["V"] = near(seen.through, ours.through, size, tolerance)
    return Match(
        equal,
        lambda: arrays | {"V": ours.through},
        lambda: {"A": alike(seen.weights, weights, tolerance)},
    )


def explain_forward(
    reader: Reader, seen: Seen, known: Sequence[tuple[Fault, ...]] = ()
) -> tuple[Explanation, Choices]:
    """Explain the forward pass; return the explanation, and the choices of a ring with its faults.

    ``known``: sets of faults that other problems showed.
    """
    model = reader.model

    def predict(choices: Choices) -> Match:
        return match_forward(reader, seen, forward_pass(model, choices))

    reader.search_from(model.right)
    found = explain(
        model,
        functools.partial(keep, model),
        predict,
        model.right,
        lambda choices, match, last: forward_faults(
            reader, seen, predict, choices, match, last, reader.in_another_way(choices)
        ),
        reader.part(1.0 if seen.p is None else OF_FORWARD),
        lambda choices, match: forward_starts(reader, seen, choices, match),
        known=known,
        places=reader.places("forward").blocks,
    )
    every = found.faults, *found.others
    first, *others = (tuple(sorted(faults, key=of_storing)) for faults in every)
    found = dataclasses.replace(found, faults=first, others=tuple(others))
    return found, composed(model.right, found.faults)


def of_storing(fault: Fault) -> bool:
    """Return whether a fault is in how o and lse are returned or saved, which is told last: a backward pass may use them from before."""
    return bool(fault.kind.slots & set(STORED))


def forward_starts(
    reader: Reader, seen: Seen, choices: Choices, match: Match
) -> Iterator[Sequence[Start]]:
    """Yield faults that explain where the weights are 0, faults of o or lse alone, then sets of two for the zeros."""
    ours, there = (np.abs(x) > ZERO for x in (match.ours["A"], seen.weights))
    by_zeros = starts_of(reader, "forward", choices, ours, there)
    yield [one for one in by_zeros if len(one) == 1][:MOST_STARTS]
    yield from starts_of_o(reader, seen, choices, match)
    yield [one for one in by_zeros if len(one) > 1][:MOST_STARTS]


def starts_of_o(
    reader: Reader, seen: Seen, choices: Choices, match: Match
) -> Iterator[Sequence[Start]]:
    """Yield the faults that explain lse alone, then those that explain o if lse is ignored; none if one of them is right."""
    if seen.lse is None or match.equal["lse"].all() or match.equal["V"].all():
        return
    yield [(fault,) for fault in explaining_lse(reader, seen, choices)[:MOST_STARTS]]
    of_o = dataclasses.replace(seen, lse=None)

    def predict(choices: Choices) -> Match:
        return match_forward(reader, of_o, forward_pass(reader.model, choices))

    found = forward_faults(reader, of_o, predict, choices, predict(choices), True)
    whole = [fault for fault, got in found if got.whole]
    yield [(fault,) for fault in sorted(whole, key=lambda fault: fault.cost)[:MOST_STARTS]]


def explaining_lse(reader: Reader, seen: Seen, choices: Choices) -> list[Fault]:
    """Return the wrong merges and row sums that, made everywhere, explain lse, whatever the weights are."""
    kinds, places = reader.kinds("forward"), reader.places("forward")
    lses = functools.cache(functools.partial(lses_that_fit, reader, seen, choices))
    found = []
    for kind in itertools.takewhile(reader.model.may_go_on, kinds):
        of_part = of_lse(kind) and of_lse(kind) in lses("tiles" in kind.slots).lse
        if of_part or of_sums(kind) or kind.slots == {"merge"} or kind.names <= OF_LSE:
            fault = Fault("forward", kind, places.blocks[0])
            match = match_forward(reader, seen, forward_pass(reader.model, fault.applied(choices)))
            if match.equal["lse"].all():
                found.append(fault)
    return sorted(found, key=lambda fault: fault.cost)


@dataclass
class Attempts:
    """Predicts what a fault gives besides those in ``choices``; ``of_feature``: one of the problem's feature gives everything."""

    reader: Reader
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
            found = self.reader.once(what, fault.kind, self.choices, predicted)
        self.of_feature |= found.whole and of_feature(fault.kind)
        return found

    def may_go_on(self, kind: Kind) -> bool:
        """Tell whether a kind is still tried.

        A problem of a feature is run only if the ring is right without it, so other kinds would be refuted.
        """
        return self.reader.model.may_go_on() and (of_feature(kind) or not self.of_feature)


def forward_faults(
    reader: Reader,
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
    kinds, places = reader.kinds("forward"), reader.places("forward")
    attempt = Attempts(reader, seen, predict, choices)
    _, l, _, _ = blocks(reader.model, choices)
    nothing = (np.abs(seen.weights) <= ZERO).all(axis=4)
    shaped = np.asarray(np.all(match.alike["A"].all(axis=4) | nothing, axis=1))
    wrong = wrong_rows(reader, match)
    misshapen = not match.alike["A"].all()
    ours, there = (np.abs(x) > ZERO for x in (match.ours["A"], seen.weights))
    alike_in: dict[int, bool] = {}
    lses = functools.cache(functools.partial(lses_that_fit, reader, seen, choices))
    kinds_of_use = useful(reader, "forward", kinds, choices, {"": (ours, there)})
    for kind in itertools.takewhile(attempt.may_go_on, kinds_of_use):
        if last and of_way and not of_ranges(kind):
            continue
        changes = kind.slots
        lse = of_lse(kind)
        if (
            (lse and lse not in lses("tiles" in changes))
            or ("tiles" in changes and not tiles_of_use(reader, kind, seen, match, alike_in))
            or ("padded" in changes and last and misshapen)  # it changes only row sums
        ):
            continue
        pairs = read_pairs(reader, kind, seen, choices, ours, there) if misshapen else None
        if pairs is not None:
            yield from reader.in_pairs("forward", kind, pairs, attempt)
        of_moved = changes & {"merge", "tiles"} and not reader.model.correct(choices, "v")
        if of_moved or (changes & {*OF_ALL, "o_to"} and "merge" not in changes):
            one = Fault("forward", kind, places.blocks[0])
            yield one, attempt(one)
        elif kind.of_workers:
            if may_help(reader, kind, match, last):
                yield from in_rows(reader, kind, attempt, match, last)
        elif is_loss(kind):
            gone = (np.abs(seen.weights) <= ZERO) & (np.abs(match.ours["A"]) > ZERO)
            there = np.abs(seen.weights) > ZERO
            able = containing(gone & ~match.equal["A"]) if last else None
            yield from reader.at_best(kind, places, gone, there, attempt, able=able)
        elif changes & {"v.worker", "v.slot"}:
            yield from in_moved(reader, kind, places, attempt, match, seen)
        elif last and {"k.head", "v.head"} <= changes and rows_alone(reader, kind, choices):
            yield from in_whole_rows(reader, kind, places, attempt, match)
        elif of_factors(kind) or of_padding(reader, kind) or of_sums(kind):
            if not (last and (wrong & ~shaped).any()):
                at = for_rows(reader, kind, seen, choices, match, l, shaped, last)
                yield from by_blocks(reader, kind, at, choices, attempt, match, last)
        elif misshapen:
            after = alike_everywhere(reader, kind, seen, choices)
            before = match.alike["A"]
            slots = reader.geometry.slots
            better, worse = of_pairs(after & ~before, slots), of_pairs(before & ~after, slots)
            # A half whose weights are all 0 in a block may be small in the whole row.
            faint = ~in_halves(there)
            if better.any() and not (last and not (after | before | faint).all()):
                able = touching(in_halves(~match.equal["A"]) & ~before) if last else None
                yield from reader.at_best(kind, places, better, worse, attempt, able=able)


def alike_everywhere(reader: Reader, kind: Kind, seen: Seen, choices: Choices) -> Booleans:
    """Return which halves of rows agree up to a factor, [a, b, h, i, 2], with a kind in all blocks."""

    def compute() -> Booleans:
        everywhere = Fault("forward", kind, reader.places("forward").blocks[0])
        p = blocks(reader.model, everywhere.applied(choices))[3]
        return alike(seen.weights, p, reader.tolerance)

    found: Booleans = reader.once("alike", kind, choices, compute)
    return found


def for_rows(
    reader: Reader,
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
    wrong, of_merge = wrong_rows(reader, match), "merge" in kind.slots
    heads = "v.head" in kind.slots
    able = wrong & (match.equal["A"].all(axis=(1, 4)) if heads else shaped)
    if not able.any():
        return []
    computed = joining(reader, kind, l) if of_merge else l != 0
    if of_padding(reader, kind) or of_sums(kind):
        computed = np.broadcast_to(differing(reader, kind).any(axis=4), l.shape)
    # What dropout adds to the sums of some blocks may take the same from others of the row, which is then right.
    right = computed & ~wrong[:, None] & (not of_merge and "drop_l" not in kind.slots)
    at = reader.places("forward").possible(computed & able[:, None], right)
    if heads:
        return [(x, None) for x in at]
    # Until the weights of each row are correct up to a factor, a wrong merge explains only a few rows.
    rare = "hidden_merge" in kind.slots and not of_empty(reader, kind)
    few = at[:2] if (wrong & ~shaped).any() else at[:FEW] if rare else at
    return merging_well(reader, kind, few, seen, choices, match, last)


def differing(reader: Reader, kind: Kind) -> Booleans:
    """Return the pairs at which the mask of a kind differs from the correct mask."""
    number: Any = dict(kind.changes).get("mask", 0)
    return reader.model.masks[number] ^ reader.model.masks[0]


def of_padding(reader: Reader, kind: Kind) -> bool:
    """Return whether a kind is a mask that is wrong only for padded keys, which change nothing but row sums."""
    if not reader.geometry.padding or kind.slots != {"mask"}:
        return False
    at = differing(reader, kind) & reader.geometry.real[:, None, None, :, None]
    return bool(at.any() and not (at & reader.geometry.real_pairs).any())


def tiles_of_use(
    reader: Reader, kind: Kind, seen: Seen, match: Match, known: dict[int, bool]
) -> bool:
    """Return whether a wrong merge of tiles may help; ``known``: results of :func:`tiles_alike` by size of the tiles."""
    tiles: Any = dict(kind.changes)["tiles"]
    if tiles.size not in known:
        known[tiles.size] = tiles_alike(reader, tiles, seen.weights, match.ours["A"])
    # Rows are compared in halves: a wrong merge of these leaves the halves right.
    halves = 2 * tiles.size == reader.geometry.slots
    return known[tiles.size] and (halves or tiles.merge in OF_L or not match.alike["A"].all())


def is_loss(kind: Kind) -> bool:
    """Return whether the pairs are not computed at all."""
    count: Any = dict(kind.changes).get("count", 1.0)
    return np.ndim(count) == 0 and count == 0.0


def of_factors(kind: Kind) -> bool:
    """Return whether a kind changes all weights of a row in a block by one factor."""
    count: Any = dict(kind.changes).get("count", 1.0)
    return bool(kind.slots & OF_ROW_SUMS) and np.ndim(count) == 0


def of_sums(kind: Kind) -> bool:
    """Return whether a kind is a mask that is wrong only in the row sums."""
    return kind.slots == {"mask", "value_mask"}


def tiles_alike(reader: Reader, tiles: Tiles, seen: Array, ours: Array) -> bool:
    """Return whether, in every tile, each row is correct up to a factor, as after a wrong merge of these tiles."""
    n, runs = reader.geometry.slots, {reader.geometry.run, reader.geometry.own_run}
    starts = sorted({keys.start for run in runs for keys in tiles.in_ranges(n, run)})
    parts = [(seen[..., x:y], ours[..., x:y]) for x, y in itertools.pairwise((*starts, n))]
    return all(
        (ratio_steady(x, y, reader.tolerance) | (np.abs(x) <= FAINT).all(axis=-1)).all()
        for x, y in parts
    )


def read_pairs(
    reader: Reader, kind: Kind, seen: Seen, choices: Choices, ours: Booleans, there: Booleans
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
        pattern = reader.model.masks[int(np.asarray(changes[masks.pop()]))]
        if pattern.all():
            return PairsShown(added, added, added | ours)
        if not pattern.any():
            return PairsShown(missing, missing, missing | ~ours)
    times, count = changes.get("times", 1.0), changes.get("count", 1.0)
    if not (isinstance(times, float) and isinstance(count, float)):
        return None
    if times * count != 1.0 and seen.lse is not None:
        s = scores_of_pairs(reader.model, choices)
        e = seen.weights * np.exp(seen.lse)[:, None, ..., None]
        once, other = np.exp(s), count * np.exp(times * s)
        right, fits = (near(e, x, x, 2 * reader.tolerance) & there & ours for x in (once, other))
        sure, either = fits & ~right, fits & right
        listed = in_tiles(sure, ours & ~fits, either)
        # Beside weights that are too large, others are too small to be read.
        faint = ~there & (other <= ZERO * np.exp(seen.lse)[:, None, ..., None])
        return PairsShown(listed, sure, fits | faint | ~ours)
    return None


def shows_merges(reader: Reader, choices: Choices) -> bool:
    """Return whether o and lse are what the merges of blocks give, with nothing changed afterwards."""
    right = reader.model.right
    return not reader.geometry.sinks and all(choices[x] is right[x] for x in AFTER_MERGES)


def may_help(reader: Reader, kind: Kind, match: Match, last: bool) -> bool:
    """Return whether a kind changes o or lse where something is wrong; if ``last``, everything that is wrong."""
    wrong = {name for name, x in match.equal.items() if not x.all()}
    names = kind.names
    if names <= OF_LSE:
        return wrong == {"lse"} if last else "lse" in wrong
    if names <= OF_O:
        return "lse" not in wrong if last else wrong != {"lse"}
    return True


def merging_well(
    reader: Reader,
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
    everywhere = reader.places("forward").blocks[0]
    c = Fault("forward", kind, everywhere).applied(choices)
    there = np.array([x.table[..., 0] for x in places])
    p, weight, lse, keys = weights_of_blocks(reader.model, choices, c, there)
    total = seen.weights.sum(axis=4)
    right = near(total, weight * p, np.abs(total), 4 * reader.tolerance).all(axis=2)
    better = np.asarray(right & ~match.equal["A"].all(axis=(1, 4)))
    if seen.lse is not None:
        same = near(seen.lse, lse, np.maximum(1.0, finite_size(lse)), reader.tolerance)
        right &= same
        better |= right & ~match.equal["lse"]
    well = np.asarray(better.any(axis=(1, 2, 3)))
    if last and shows_merges(reader, choices):
        well &= (right | ~wrong_rows(reader, match)).all(axis=(1, 2, 3))
    merges_alone = kind.slots <= {"merge", "hidden_merge"} and not any(
        np.any(choices[x]) for x in OF_EARLIER_MERGES
    )
    found = zip(places, keys, well, strict=True)
    return [(place, key if merges_alone else None) for place, key, one in found if one]


def wrong_rows(reader: Reader, match: Match) -> Booleans:
    """Return the rows, [a, h, i], in which anything disagrees."""
    wrong = ~match.equal["A"].all(axis=(1, 4)) | ~match.equal["V"].all(axis=3)
    return np.asarray(wrong | ~match.equal["lse"] if "lse" in match.equal else wrong)


def of_empty(reader: Reader, kind: Kind) -> bool:
    """Return whether a wrong merge affects only rows that see no key of a block."""
    return MERGES[int(np.asarray(dict(kind.changes).get("merge", 0)))] in (EMPTY, INFINITE)


def joining(reader: Reader, kind: Kind, l: Array) -> Booleans:
    """Return which rows of each block, [a, b, h, i], a wrong merge can change."""
    here = l != 0
    changed: Any = dict(kind.changes)
    if of_empty(reader, kind) or "mask" in changed:
        return ~here
    if "hidden_merge" in changed or MERGES[changed["merge"]] in AT_FIRST:
        return here
    first, found = reader.geometry.steps("forward"), np.zeros_like(here)
    seen_before = np.zeros_like(here[:, 0])
    for step in range(reader.geometry.workers):
        a, b = np.nonzero(first == step)
        found[a, b] = here[a, b] & seen_before[a]
        seen_before[a] |= here[a, b]
    return found


def in_rows(reader: Reader, kind: Kind, attempt: Attempt, match: Match, last: bool) -> Candidates:
    """Try a kind that workers choose for all their blocks, in the rows that it corrects; if ``last``, in all wrong rows."""
    everywhere = Fault("forward", kind, reader.workers.blocks[0])
    got = attempt(everywhere)
    wrong = wrong_rows(reader, match)
    if last and (wrong & wrong_rows(reader, got)).any():
        return
    good, bad = rows_corrected(reader, match, got)
    if good.any() and not bad.any():
        yield everywhere, got
    if good.any():
        able = containing(wrong[:, None, :, :, None]) if last else None
        yield from reader.at_best(kind, reader.workers, good, bad, attempt, able=able)


def in_moved(
    reader: Reader, kind: Kind, places: Places, attempt: Attempt, match: Match, seen: Seen
) -> Candidates:
    """Try a kind that moves weights to other columns in the places whose weights it may have moved.

    The weights of two steps may be in the same columns afterwards, which shows neither, so whole steps are tried, too.
    """
    for place in places.blocks if "v.worker" in kind.slots else ():
        if place.words in OF_STEPS:
            one = Fault("forward", kind, place)
            yield one, attempt(one)
    good, bad = reader.movable(kind, match, ("A",), "forward", seen.weights)
    if good.any():
        yield from reader.at_best(kind, places, good, bad, attempt, "forward", True)


def in_whole_rows(
    reader: Reader, kind: Kind, places: Places, attempt: Attempt, match: Match
) -> Candidates:
    """Try a kind that changes the weights and the values of rows in places that contain every wrong row."""
    everywhere = Fault("forward", kind, places.blocks[0])
    got, wrong = attempt(everywhere), wrong_rows(reader, match)
    if (wrong & wrong_rows(reader, got)).any():
        return
    good, bad = (np.broadcast_to(x, reader.model.shape) for x in rows_corrected(reader, match, got))

    def in_place(fault: Fault) -> Match:
        whole, some = (which(fault.place.table, axis=(1, 4)) for which in (np.all, np.any))
        if np.array_equal(whole, some):
            return in_rows_of(reader, match, got, whole)
        return attempt(fault)

    able = containing(wrong[:, None, :, :, None])
    yield from reader.at_best(kind, places, good, bad, in_place, able=able)


def by_blocks(
    reader: Reader,
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
    wrong = wrong_rows(reader, match)
    alone = rows_alone(reader, kind, choices)
    known: dict[bytes, Match] = {}
    for place, key in places:
        fault = Fault("forward", kind, place)
        got = known[key] if key in known else attempt(fault)
        if key is not None:
            known[key] = got
        if last and (wrong & wrong_rows(reader, got)).any():
            continue
        good, bad = rows_corrected(reader, match, got)
        if not good.any():
            continue
        if not bad.any():
            yield fault, got
        for part, rows in reader.workers.parts_fitting(good, bad, place):
            one = Fault("forward", kind, part)
            yield one, in_rows_of(reader, match, got, rows) if alone else attempt(one)


def rows_alone(reader: Reader, kind: Kind, choices: Choices) -> bool:
    """Return whether each row of o and lse depends only on what the ring does for this row, with a kind at any place."""
    right = reader.model.right
    applied = Fault("forward", kind, reader.workers.blocks[0]).applied(choices)
    return not kind.slots & set(OF_ALL) and all(applied[x] is right[x] for x in OF_OTHER_ROWS)


def in_rows_of(reader: Reader, without: Match, applied: Match, rows: Booleans) -> Match:
    """Return the match that is ``applied`` in some ``rows`` [a, h, i], and ``without`` in the others."""
    reader.model.evaluations += 1

    def selected(inside: dict[str, Any], outside: dict[str, Any]) -> dict[str, Any]:
        shaped = {3: rows, 4: rows[..., None], 5: rows[:, None, :, :, None]}
        return {name: np.where(shaped[x.ndim], inside[name], x) for name, x in outside.items()}

    return Match(
        selected(applied.equal, without.equal),
        lambda: selected(applied.ours, without.ours),
        lambda: selected(applied.alike, without.alike),
    )


def rows_corrected(reader: Reader, before: Match, after: Match) -> tuple[Array, Array]:
    """Return how much of each row ``after`` corrects, and whether it makes the row wrong: two arrays [a, 1, h, i, j]."""
    shape = (reader.geometry.workers, reader.geometry.heads, reader.geometry.slots)
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
