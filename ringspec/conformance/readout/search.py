"""Propose the faults that may explain what was read from the results of one problem, pass by pass.

The forward pass is explained before the backward pass. A *pair* [a, b, h, i, j] is query i of worker a with key j of
worker b in head h. A *block* [a, b] contains all pairs of two workers, and a *row* [a, h, i] all pairs of one query in
one head. A *kind* is a mistake, such as a wrong mask. A *fault* is a kind at a *place*, which is a set of pairs. The
*choices* of a ring say what it does for each pair, and every fault changes some of them. A *share* is what one pair
adds to a row of o, dq, dk or dv.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ringspec.conformance.readout.choices import KERNELS, OF_ALL, Choices, Tiles, components
from ringspec.conformance.readout.effects import (
    AFTER_MERGES,
    GOALS,
    LANDING,
    OF_GRADIENTS,
    OF_LSE,
    OF_O,
    OF_ROW,
    OF_ROW_SUMS,
    OF_WHOLE,
    PERHAPS,
    STORED,
    matrices,
    names_of,
)
from ringspec.conformance.readout.fault_sets import Attempt, Candidates, Predict, composed, explain
from ringspec.conformance.readout.geometry import dealt_otherwise
from ringspec.conformance.readout.kinds import Fault, Kind
from ringspec.conformance.readout.masks import masks_of
from ringspec.conformance.readout.matches import (
    ZERO,
    Explanation,
    Match,
    alike,
    changes,
    finite_size,
    in_halves,
    in_tiles,
    near,
    of_pairs,
    ratio_steady,
)
from ringspec.conformance.readout.merges import AT_FIRST, EMPTY, MERGES
from ringspec.conformance.readout.model import OF_DROP, Forward, Gradients, Model, Shares
from ringspec.conformance.readout.pairs import Pairs, Seen
from ringspec.conformance.readout.places import (
    Amounts,
    Place,
    Places,
    block_places,
    listed,
    pairs_listed,
    worker_places,
)
from ringspec.conformance.readout.vocabulary import kinds_of
from ringspec.problem.model import Array, Booleans

FAINT = 1e-3  # of weights below it in one tile, the ratios are not compared: some may count as 0

# What a backward pass may compute instead of the gradient of attention.
SAME = "The backward pass does the same."

GRADIENT = "The backward pass is the gradient of this wrong forward pass."

SAVED = "The backward pass uses o and lse as they are before this."

HALF = 0.5  # a kind is tried in just the pairs that it explains if these are at least this part of the wrong ones

FEW = 6  # how many sets of blocks are tried for a rare kind of fault

# Of tables over all pairs, in all searches for the faults of one problem; about 6 s of processor time, which only
# results that stay unexplained take.
EVALUATIONS = 33_000

OF_FORWARD = 2 / 3  # the share of the search in the forward pass, if a backward pass follows

MOST_WHOLE, MOST_PARTIAL = (
    40,
    3,
)  # how many places of a kind are tried: those that explain everything, and those that do not

CARRIED = (
    *components("q"), *components("k"), *components("v"), "mask", "times", "cap", "count", "hidden_score",
    *components("sink_of"), "sink_o", *components("bias_q"), *components("bias_k"), "bias_times", *OF_DROP,
)  # fmt: skip


def carried(right: Choices, forward: Choices) -> Choices:
    """Return the choices of a backward pass that does the same as the ``forward`` pass, and is ``right`` otherwise.

    Keys of a wrong head are also those of the product for dq.
    """
    same = right.taking(CARRIED, forward)
    return Choices({**same.of, "dq_k.head": forward["k.head"]})


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


class Reader:
    """Explains the results of one problem.

    ``tolerance``: the largest difference that counts as equal, relative to the size of an element's terms.
    ``evaluations``: the most that all searches together may compute, in tables over all pairs.
    """

    def __init__(self, pairs: Pairs, tolerance: float, evaluations: float = EVALUATIONS) -> None:
        geometry = pairs.geometry
        self.geometry, self.tolerance, self.evaluations = geometry, tolerance, evaluations
        self.masks = masks_of(geometry)
        self.model = Model(pairs, [mask.pattern for mask in self.masks], dealt_otherwise(geometry))
        self.largest = float(np.abs(pairs.g).max())
        self.workers = Places(geometry, worker_places(geometry), True)
        self.kept: dict[str, tuple[list[Kind], Places]] = {}
        self.judged: dict[str, tuple[Array, Match]] = {}
        self.base: Choices | None = None
        self.of_base: dict[tuple[str, int], Any] = {}

    def part(self, share: float) -> float:
        """Return how many evaluations a search may make that gets ``share`` of those that are left."""
        return share * max(0.0, self.evaluations - self.model.evaluations)

    def search_from(self, base: Choices) -> None:
        """Forget what :meth:`once` keeps, and keep it for a search that begins at ``base``."""
        self.base, self.of_base = base, {}

    def once(self, what: str, kind: Kind, choices: Choices, compute: Callable[[], Any]) -> Any:
        """Return ``compute()``, a result for ``choices`` and ``kind``, computed once if no fault has been found yet.

        A search goes through all kinds twice: first for those that explain everything, then for those that help.
        """
        if choices is not self.base:
            return compute()
        key = what, id(kind)
        if key not in self.of_base:
            self.of_base[key] = compute()
        return self.of_base[key]

    def tried(self, phase: str) -> tuple[list[Kind], Places]:
        """Return the kinds of faults and the places that are tried in a pass."""
        if phase not in self.kept:
            blocks = block_places(self.geometry, phase, self.masks[0].pattern)
            kinds = kinds_of(self.geometry, phase, self.masks)
            kinds.sort(key=lambda kind: not kind.slots & set(OF_ALL))  # these take one evaluation
            self.kept[phase] = kinds, Places(self.geometry, blocks)
        return self.kept[phase]

    def match_forward(self, seen: Seen, ours: Forward) -> Match:
        weights, tolerance = ours.weights, self.tolerance
        equal = {"A": near(seen.weights, weights, np.abs(weights), tolerance)}
        arrays = {"A": weights}
        if seen.lse is not None:
            size = np.maximum(1.0, finite_size(ours.lse))
            equal["lse"] = near(seen.lse, ours.lse, size, tolerance)
            arrays["lse"] = ours.lse
        size = np.abs(weights).sum(axis=(1, 4))[..., None] * self.largest
        equal["V"] = near(seen.through, ours.through, size, tolerance)
        return Match(
            equal,
            arrays | {"V": ours.through},
            lambda: {"A": alike(seen.weights, weights, tolerance)},
        )

    def forward(self, seen: Seen) -> tuple[Explanation, Choices]:
        """Explain the forward pass; return the explanation, and the choices of a ring with its faults."""
        model = self.model

        def predict(choices: Choices) -> Match:
            return self.match_forward(seen, model.forward(choices))

        self.search_from(model.right)
        found = explain(
            model,
            model.keep,
            predict,
            model.right,
            lambda choices, match, last: self.forward_faults(seen, predict, choices, match, last),
            self.part(1.0 if seen.p is None else OF_FORWARD),
        )
        return found, composed(model.right, found.faults)

    def forward_faults(
        self, seen: Seen, predict: Predict, choices: Choices, match: Match, last: bool
    ) -> Candidates:
        """Yield faults that may explain more, each with its match.

        ``choices`` and ``match`` belong to the faults found so far. ``last``: yield only faults that may explain all
        that is still wrong.

        A row does not depend on other rows, and the ratios between the weights of a row within a
        block do not depend on other blocks. So one evaluation with a kind applied everywhere shows where it helps.
        """
        kinds, places = self.tried("forward")

        def attempt(fault: Fault) -> Match:
            def predicted() -> Match:
                return predict(fault.applied(choices))

            if fault.place.words:
                return predicted()
            found: Match = self.once("match", fault.kind, choices, predicted)
            return found

        _, l, _, _ = self.model.blocks(choices)
        nothing = (np.abs(seen.weights) <= ZERO).all(axis=4)
        shaped = np.asarray(np.all(match.alike["A"].all(axis=4) | nothing, axis=1))
        wrong = self.wrong_rows(match)
        misshapen = not match.alike["A"].all()
        ours, there = (np.abs(x) > ZERO for x in (match.ours["A"], seen.weights))
        alike_in: dict[int, bool] = {}
        for kind in itertools.takewhile(self.model.may_go_on, kinds):
            changes = kind.slots
            if "tiles" in changes:
                tiles: Any = dict(kind.changes)["tiles"]
                if tiles.size not in alike_in:
                    alike_in[tiles.size] = self.tiles_alike(tiles, seen.weights, match.ours["A"])
                # Rows are compared in halves: a wrong merge of these leaves the halves right.
                if not alike_in[tiles.size] or not (
                    misshapen or 2 * tiles.size == self.geometry.slots
                ):
                    continue
            pairs = self.read_pairs(kind, seen, choices, ours, there) if misshapen else None
            if pairs is not None:
                yield from self.in_pairs("forward", kind, pairs, attempt)
            if changes & {*OF_ALL, "o_to"} and "merge" not in changes:
                one = Fault("forward", kind, places.blocks[0])
                yield one, attempt(one)
            elif kind.of_workers:
                if self.may_help(kind, match, last):
                    yield from self.in_rows(kind, attempt, match, last)
            elif dict(kind.changes).get("count") == 0.0:
                gone = (np.abs(seen.weights) <= ZERO) & (np.abs(match.ours["A"]) > ZERO)
                there = np.abs(seen.weights) > ZERO
                able = containing(gone & ~match.equal["A"]) if last else None
                yield from self.at_best(kind, places, gone, there, attempt, able=able)
            elif changes & {"v.worker", "v.slot"}:
                good, bad = self.movable(kind, match, ("A",), "forward", seen.weights)
                if good.any():
                    yield from self.at_best(kind, places, good, bad, attempt, "forward", True)
            elif changes & OF_ROW_SUMS or self.of_padding(kind):
                if not (last and (wrong & ~shaped).any()):
                    at = self.for_rows(kind, seen, choices, match, l, shaped, last)
                    yield from self.by_blocks(kind, at, attempt, match, last)
            elif misshapen:
                after = self.alike_everywhere(kind, seen, choices)
                before = match.alike["A"]
                slots = self.geometry.slots
                better, worse = of_pairs(after & ~before, slots), of_pairs(before & ~after, slots)
                if better.any() and not (last and not (after | before).all()):
                    able = touching(in_halves(~match.equal["A"]) & ~before) if last else None
                    yield from self.at_best(kind, places, better, worse, attempt, able=able)

    def alike_everywhere(self, kind: Kind, seen: Seen, choices: Choices) -> Booleans:
        """Return which halves of rows agree up to a factor, [a, b, h, i, 2], with a kind in all blocks."""

        def compute() -> Booleans:
            everywhere = Fault("forward", kind, self.tried("forward")[1].blocks[0])
            p = self.model.blocks(everywhere.applied(choices))[3]
            return alike(seen.weights, p, self.tolerance)

        found: Booleans = self.once("alike", kind, choices, compute)
        return found

    def for_rows(
        self,
        kind: Kind,
        seen: Seen,
        choices: Choices,
        match: Match,
        l: Array,
        shaped: Booleans,
        last: bool,
    ) -> list[Place]:
        """Return the sets of blocks in which a kind that changes row sums may explain some rows; if ``last``, all rows.

        ``l`` [a, b, h, i]: row sums of the blocks. ``shaped`` [a, h, i]: rows whose weights are correct in every block
        up to one factor for the block.
        """
        wrong, of_merge = self.wrong_rows(match), "merge" in kind.slots
        heads = "v.head" in kind.slots
        able = wrong & (match.equal["A"].all(axis=(1, 4)) if heads else shaped)
        if not able.any():
            return []
        computed = self.joining(kind, l) if of_merge else l != 0
        if self.of_padding(kind):
            computed = np.broadcast_to(self.differing(kind).any(axis=4), l.shape)
        right = computed & ~wrong[:, None] & (not of_merge)
        at = self.tried("forward")[1].possible(computed & able[:, None], right)
        if heads:
            return at
        # Until the weights of each row are correct up to a factor, a wrong merge explains only a few rows.
        rare = "hidden_merge" in kind.slots and not self.of_empty(kind)
        few = at[:2] if (wrong & ~shaped).any() else at[:FEW] if rare else at
        return self.merging_well(kind, few, seen, choices, match, last)

    def differing(self, kind: Kind) -> Booleans:
        """Return the pairs at which the mask of a kind differs from the correct mask."""
        number: Any = dict(kind.changes).get("mask", 0)
        return self.model.masks[number] ^ self.model.masks[0]

    def of_padding(self, kind: Kind) -> bool:
        """Return whether a kind is a mask that is wrong only for padded keys, which change nothing but row sums."""
        if not self.geometry.padding or kind.slots != {"mask"}:
            return False
        at = self.differing(kind) & self.geometry.real[:, None, None, :, None]
        return bool(at.any() and not (at & self.geometry.real_pairs).any())

    def tiles_alike(self, tiles: Tiles, seen: Array, ours: Array) -> bool:
        """Return whether, in every tile, each row is correct up to a factor, as after a wrong merge of these tiles."""
        parts = [(seen[..., keys], ours[..., keys]) for keys in tiles.of(self.geometry)]
        return all(
            (ratio_steady(x, y, self.tolerance) | (np.abs(x) <= FAINT).all(axis=-1)).all()
            for x, y in parts
        )

    def read_pairs(
        self, kind: Kind, seen: Seen, choices: Choices, ours: Booleans, there: Booleans
    ) -> Booleans | None:
        """Return the pairs [a, b, h, i, j] whose weights alone show this mistake of the forward pass.

        None if the weights cannot show this kind. ``ours`` and ``there``: pairs whose weight is not 0, as predicted and
        as observed.
        """
        changes = dict(kind.changes)
        masks = {"mask", "value_mask"} & changes.keys()
        if changes.get("count") == 0.0:
            return ours & ~there
        if masks and len(changes) == 1:
            pattern = self.model.masks[int(np.asarray(changes[masks.pop()]))]
            if pattern.all():
                return there & ~ours
            if not pattern.any():
                return ours & ~there
        times, count = changes.get("times", 1.0), changes.get("count", 1.0)
        if not (isinstance(times, float) and isinstance(count, float)):
            return None
        if times * count != 1.0 and seen.lse is not None:
            s = self.model.scores(choices)
            e = seen.weights * np.exp(seen.lse)[:, None, ..., None]
            once, other = np.exp(s), count * np.exp(times * s)
            fits = [near(e, x, x, 2 * self.tolerance) & there & ours for x in (once, other)]
            return in_tiles(fits[1] & ~fits[0], ours & ~fits[1], fits[0] & fits[1])
        return None

    def in_pairs(self, phase: str, kind: Kind, pairs: Booleans, attempt: Attempt) -> Candidates:
        """Try a kind at exactly the pairs that show it, if a short list describes them."""
        masks = [value for slot, value in kind.changes if slot in ("mask", "value_mask")]
        patterns = [self.model.masks[int(np.asarray(x))] for x in masks if np.asarray(x) >= 0]
        if not all(x.all() or not x.any() for x in patterns):
            return  # pairs show only a mask that hides all of them or none
        place = pairs_listed(self.geometry, pairs, self.tried(phase)[1].blocks)
        if place is not None:
            fault = Fault(phase, kind, place)
            yield fault, attempt(fault)

    def shows_merges(self, choices: Choices) -> bool:
        """Return whether o and lse are what the merges of blocks give, with nothing changed afterwards."""
        right = self.model.right
        return not self.geometry.sinks and all(choices[x] is right[x] for x in AFTER_MERGES)

    def may_help(self, kind: Kind, match: Match, last: bool) -> bool:
        """Return whether a kind changes o or lse where something is wrong; if ``last``, everything that is wrong."""
        wrong = {name for name, x in match.equal.items() if not x.all()}
        names = names_of(kind)
        if names <= OF_LSE:
            return wrong == {"lse"} if last else "lse" in wrong
        if names <= OF_O:
            return "lse" not in wrong if last else wrong != {"lse"}
        return True

    def merging_well(
        self,
        kind: Kind,
        places: Sequence[Place],
        seen: Seen,
        choices: Choices,
        match: Match,
        last: bool,
    ) -> list[Place]:
        """Return the ``places`` at which a kind corrects the sums of a row: its weights summed over each block, or its lse.

        ``last``: return only those at which it corrects the sums of all rows that are wrong.
        """
        if not places:
            return []
        everywhere = self.tried("forward")[1].blocks[0]
        c = Fault("forward", kind, everywhere).applied(choices)
        there = np.array([x.table[..., 0] for x in places])
        p, weight, lse = self.model.weights_of_blocks(choices, c, there)
        total = seen.weights.sum(axis=4)
        right = near(total, weight * p, np.abs(total), 4 * self.tolerance).all(axis=2)
        found = right & ~match.equal["A"].all(axis=(1, 4))
        if seen.lse is not None:
            same = near(seen.lse, lse, np.maximum(1.0, finite_size(lse)), self.tolerance)
            right &= same
            found |= right & ~match.equal["lse"]
        well = found.any(axis=(1, 2, 3))
        if last and self.shows_merges(choices):
            well &= (right | ~self.wrong_rows(match)).all(axis=(1, 2, 3))
        return [x for x, one in zip(places, well, strict=True) if one]

    def wrong_rows(self, match: Match) -> Booleans:
        """Return the rows, [a, h, i], in which anything disagrees."""
        wrong = ~match.equal["A"].all(axis=(1, 4)) | ~match.equal["V"].all(axis=3)
        return np.asarray(wrong | ~match.equal["lse"] if "lse" in match.equal else wrong)

    def of_empty(self, kind: Kind) -> bool:
        """Return whether a wrong merge affects only rows that see no key of a block."""
        return MERGES[int(np.asarray(dict(kind.changes).get("merge", 0)))] == EMPTY

    def joining(self, kind: Kind, l: Array) -> Booleans:
        """Return which rows of each block, [a, b, h, i], a wrong merge can change."""
        here = l != 0
        changed: Any = dict(kind.changes)
        if self.of_empty(kind):
            return ~here
        if "hidden_merge" in changed or MERGES[changed["merge"]] in AT_FIRST:
            return here
        first, found = self.geometry.steps("forward"), np.zeros_like(here)
        seen_before = np.zeros_like(here[:, 0])
        for step in range(self.geometry.workers):
            a, b = np.nonzero(first == step)
            found[a, b] = here[a, b] & seen_before[a]
            seen_before[a] |= here[a, b]
        return found

    def at_best(
        self,
        kind: Kind,
        places: Places,
        good: Amounts,
        bad: Amounts,
        attempt: Attempt,
        phase: str = "forward",
        loosely: bool = False,
        able: Callable[[Place], bool] | None = None,
    ) -> Candidates:
        """Try a kind in the places that contain most of ``good`` and nothing of ``bad``.

        ``loosely``: a place may contain a little of ``bad``. ``able``: whether a place may explain everything, if only
        such places are of use.
        """
        fitting = places.fitting(good, bad, MOST_WHOLE, loosely, "result_of" in names_of(kind))
        gained, lost = (np.asarray(x, float).sum(axis=(2, 3, 4)) for x in (good, bad))
        blocks = np.asarray((gained > 0) & (lost <= (0.5 * gained if loosely else 0)))
        more = listed(blocks, places.blocks)
        if more is not None:
            total = float(np.asarray(good * more.table).sum())
            fitting = heapq.merge(fitting, [(total, more)], key=lambda one: (-one[0], one[1].cost))
        left, whole, most = MOST_PARTIAL, False, 0.0
        for gain, place in fitting:
            if whole and gain < most:
                break
            whole, most = False, gain
            if able is None or able(place):
                fault = Fault(phase, kind, place)
                got = attempt(fault)
                whole = got.whole
                yield fault, got
            left -= not whole
            if not left:
                break

    def in_rows(self, kind: Kind, attempt: Attempt, match: Match, last: bool) -> Candidates:
        """Try a kind that workers choose for all their blocks, in the rows that it corrects; if ``last``, in all wrong rows."""
        everywhere = Fault("forward", kind, self.workers.blocks[0])
        got = attempt(everywhere)
        wrong = self.wrong_rows(match)
        if last and (wrong & self.wrong_rows(got)).any():
            return
        good, bad = self.rows(match, got)
        if good.any() and not bad.any():
            yield everywhere, got
        if good.any():
            able = containing(wrong[:, None, :, :, None]) if last else None
            yield from self.at_best(kind, self.workers, good, bad, attempt, able=able)

    def by_blocks(
        self,
        kind: Kind,
        places: Sequence[Place],
        attempt: Attempt,
        match: Match,
        last: bool,
    ) -> Candidates:
        """Try a kind that changes whole rows: in each of ``places``, and in only the rows and heads there that it corrects.

        ``last``: only if it corrects all rows that are wrong.
        """
        wrong = self.wrong_rows(match)
        for place in places:
            fault = Fault("forward", kind, place)
            got = attempt(fault)
            if last and (wrong & self.wrong_rows(got)).any():
                continue
            good, bad = self.rows(match, got)
            if not good.any():
                continue
            if not bad.any():
                yield fault, got
            for part in self.workers.parts_fitting(good, bad, place):
                one = Fault("forward", kind, part)
                yield one, attempt(one)

    def rows(self, before: Match, after: Match) -> tuple[Array, Array]:
        """Return how much of each row ``after`` corrects, and whether it makes the row wrong: two arrays [a, 1, h, i, j]."""
        shape = (self.geometry.workers, self.geometry.heads, self.geometry.slots)
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

    def backward(self, seen: Seen, choices: Choices, forward_is_whole: bool) -> Explanation:
        """Explain the backward pass, given the lse and delta that the kernel's forward pass returned.

        Apart from its faults, the backward pass may be the gradient of attention, the gradient of the wrong forward
        pass, or a pass that makes the same wrong choices as the forward pass. It may also use o and lse as they were
        before the forward pass stored them wrongly.
        """
        forward = self.model.forward(choices)
        returned = forward.lse if seen.lse is None else seen.lse, seen.through
        found = self.backward_from(seen, choices, forward_is_whole, forward, *returned)
        if (
            (found.whole and not found.faults)
            or not forward_is_whole
            or all(choices[x] is self.model.right[x] for x in STORED)
        ):
            return found
        # The backward pass may use o and lse as they were before they were stored wrongly.
        before = choices.taking(STORED, self.model.right)
        if all(x is self.model.right[slot] for slot, x in before.of.items()):
            before = self.model.right
        kept = self.model.forward(before)
        other = self.backward_from(seen, before, True, kept, kept.lse, kept.through)
        simpler = len(other.faults) < len(found.faults) or not found.whole
        if other.whole and not other.base and simpler:
            return dataclasses.replace(other, base=SAVED)
        return found

    def backward_from(
        self,
        seen: Seen,
        choices: Choices,
        forward_is_whole: bool,
        forward: Forward,
        lse: Array,
        through: Array,
    ) -> Explanation:
        """Explain the backward pass from given results of the forward pass.

        ``lse`` has the axes [a, h, i], and ``through`` contains the products of each row of o with every dy.
        """
        model = self.model

        saved = forward, lse, through

        def predict(base: Choices) -> Match:
            return self.match_backward(seen, model.backward(base, *saved))

        def keep(base: Choices) -> None:
            model.keep_backward(base, *saved)
            self.judged.clear()
            one = predict(base)
            self.judged.update({name: (x, one) for name, x in one.ours.items()})

        bases = [("", model.right)]
        if choices is not model.right and forward_is_whole:
            gradient = self.match_backward(seen, model.gradient_of_forward(choices))
            if gradient.whole:
                return Explanation((), True, gradient, (), GRADIENT)
            bases.append((SAME, carried(model.right, choices)))
        found: list[tuple[Explanation, float]] = []
        for number, (words, base) in enumerate(bases):
            self.search_from(base)
            one = explain(
                model,
                keep,
                predict,
                base,
                lambda now, match, last: self.backward_faults(seen, saved, now, match, last),
                self.part(1 / (len(bases) - number)),
            )
            one = Explanation(one.faults, one.whole, one.match, one.others, words)
            found.append((one, one.match.gain(found[0][0].match) if found else 0.0))
            if one.whole and not one.faults:
                return one
        return max(found, key=lambda x: (x[0].whole, -len(x[0].faults), x[1]))[0]

    def match_backward(self, seen: Seen, ours: Gradients) -> Match:
        assert seen.p is not None
        was = {name: getattr(seen, of) for name, of in GRADIENTS_READ.items()}
        every = {name: getattr(ours, of) for name, of in GRADIENTS_READ.items()}
        arrays = {name: x for name, x in every.items() if x is not None and was[name] is not None}
        equal = {}
        parts: Array | None = None
        for name, x in arrays.items():
            known = self.judged.get(name)
            if (
                known is not None
                and known[0] is x
                and (name == "P" or "P" in self.judged and self.judged["P"][0] is arrays["P"])
            ):
                equal[name] = known[1].equal[name]
            elif name == "P":
                equal[name] = near(seen.p, x, np.abs(x), self.tolerance)
            elif name == "dsinks":
                weight = np.abs(1 - arrays["P"].sum(axis=(1, 4)))
                size = (weight * np.abs(seen.delta)).sum(axis=2)[..., None]
                equal[name] = near(was[name], x, np.maximum(np.abs(x), size), self.tolerance)
            else:
                if parts is None:
                    largest = self.largest + np.abs(seen.delta)[:, None, :, :, None]
                    parts = np.abs(arrays["P"]) * largest
                equal[name] = near(was[name], x, np.maximum(np.abs(x), parts), self.tolerance)
        known = self.judged.get("P")
        if known is not None and known[0] is arrays["P"]:
            same = known[1]
            return Match(equal, arrays, lambda: same.alike)
        seen_p = seen.p
        return Match(equal, arrays, lambda: {"P": alike(seen_p, arrays["P"], self.tolerance)})

    def backward_faults(
        self,
        seen: Seen,
        saved: tuple[Forward, Array, Array],
        choices: Choices,
        match: Match,
        last: bool,
    ) -> Candidates:
        """Yield faults that may explain more, each with its match.

        ``saved``: what the backward pass gets from the forward pass, as for :meth:`Model.backward`. ``choices`` and
        ``match`` belong to the faults found so far. ``last``: yield only faults that may explain all that is still wrong.

        What a kind changes in one block does not depend on other blocks, unless it adds shares to
        wrong rows. So one evaluation with the kind applied everywhere shows which pairs it explains. A share that is
        added to a wrong row makes two elements wrong: the one where it is missing and the one where it is added.
        """
        kinds, places = self.tried("backward")

        model = self.model
        here = model.shares(choices, *saved)
        wrong = {name: not x.all() for name, x in match.equal.items()}
        for kind in itertools.takewhile(model.may_go_on, kinds):
            touched = [name for name in matrices(kind) if name in wrong]
            if not any(wrong[name] for name in touched):
                continue
            if last and not all(name in touched for name in wrong if wrong[name]):
                continue
            if not kind.slots & PERHAPS and not all(wrong[name] for name in touched):
                continue
            everywhere = Fault("backward", kind, places.blocks[0])
            of_kind = functools.partial(self.with_kind, seen, saved, everywhere.applied(choices))
            there, got = self.once("kind", kind, choices, of_kind)
            local = self.is_local(kind, choices)
            attempt = functools.partial(
                self.in_part, seen, saved, choices, here, there if local else None
            )
            if kind.slots & set(OF_ALL) or ("dsinks" in touched and len(touched) > 1):
                yield everywhere, got
                continue
            if touched == ["dsinks"]:
                was, now = (np.all(x.equal["dsinks"], axis=2) for x in (match, got))
                good, bad = (
                    x[:, None, :, None, None] & np.ones(self.model.shape, bool)[:, :1]
                    for x in (now & ~was, was & ~now)
                )
                if good.any():
                    yield from self.at_best(kind, self.workers, good, bad, attempt, "backward")
                continue
            moved = {LANDING[name] for name in names_of(kind) if name in LANDING}
            stay = [name for name in touched if name not in moved and changes(match, got, name)]
            if not stay:
                if self.geometry.padding:  # tokens of some workers may have no padding to pass
                    yield everywhere, got
                good, bad = self.movable(kind, match, moved)
                if good.any():
                    yield from self.at_best(kind, places, good, bad, attempt, "backward", True)
                continue
            better = {name: got.equal[name] & ~match.equal[name] for name in stay}
            worse = {name: match.equal[name] & ~got.equal[name] for name in stay}
            if not any(x.any() for x in better.values()):
                continue
            every = np.sum(list(better.values()), axis=0), np.any(list(worse.values()), axis=0)
            judged = [every]
            if last and not all((match.equal[name] | got.equal[name]).all() for name in stay):
                continue
            if every[1].any() and not last:
                judged += [(better[name], worse[name]) for name in stay if better[name].any()]
            for good, bad in judged:
                yield from self.at_best(kind, places, good, bad, attempt, "backward")
            right = np.all([match.equal[name] | got.equal[name] for name in stay], axis=0)
            pairs = np.asarray((every[0] > 0) & ~every[1] & right)
            if any(pairs.sum() >= HALF * (~match.equal[name]).sum() for name in stay):
                yield from self.in_pairs("backward", kind, pairs, attempt)

    def with_kind(
        self, seen: Seen, saved: tuple[Forward, Array, Array], choices: Choices
    ) -> tuple[Shares, Match]:
        """Return the shares of the gradients with these choices, and the match."""
        shares = self.model.shares(choices, *saved)
        return shares, self.match_backward(seen, self.model.gradients(choices, shares, *saved))

    def is_local(self, kind: Kind, choices: Choices) -> bool:
        """Return whether a kind changes what a pair adds to the gradients only by being at this pair.

        ``choices`` are those with the faults found so far.
        """
        slots = OF_WHOLE if names_of(kind) <= OF_GRADIENTS else (*OF_WHOLE, *OF_ROW)
        right = self.model.right
        return all(choices.in_kernel(kernel)[x] is right[x] for kernel in KERNELS for x in slots)

    def in_part(
        self,
        seen: Seen,
        saved: tuple[Forward, Array, Array],
        choices: Choices,
        here: Shares,
        there: Shares | None,
        fault: Fault,
    ) -> Match:
        """Return the match with a fault besides those in ``choices``.

        ``here`` and ``there``: the shares of the gradients without the fault, and with it at all pairs. They give the
        shares with the fault at its place. ``there`` is None if they do not.
        """
        applied = fault.applied(choices)
        if there is None:
            return self.with_kind(seen, saved, applied)[1]
        self.model.evaluations += 1
        shares = (
            was if was is None or was is now else np.where(fault.place.table, now, was)
            for was, now in zip(here, there, strict=True)
        )
        gradients = self.model.gradients(applied, Shares(*shares), *saved)
        return self.match_backward(seen, gradients)

    def movable(
        self,
        kind: Kind,
        match: Match,
        moved: Iterable[str],
        phase: str = "backward",
        seen: Array | None = None,
    ) -> tuple[Array, Booleans]:
        """Return how many shares of each pair this kind may have moved.

        A share may have been moved if something is wrong both where it belongs and where the kind would move it.

        The second array marks the pairs with a share that cannot have been moved. ``moved``: the matrices with moved
        shares. ``seen``: the weights that were read, for a forward pass.
        """
        model, shape = self.model, self.model.shape
        home = model.right
        there = Fault(phase, kind, self.workers.blocks[0]).applied(home)
        good, bad = np.zeros(shape), np.zeros(shape, bool)
        for name in moved:
            row, column = GOALS[name]
            worker, head, slot = (there[x] for x in components(row))
            b, c, j = (there[x] for x in components(column))
            at = (((worker * shape[0] + b) * shape[2] + head) * shape[3] + slot) * shape[4] + j
            at = np.broadcast_to(at, shape)
            stays = at == np.arange(at.size).reshape(shape)
            if name in ("P", "dS of dk"):
                stays = stays & (head // model.group == c)
            wrong = ~match.equal[name]
            share = np.abs(match.ours[name]) > ZERO
            may_be_wrong = wrong | ~self.geometry.real_pairs  # no result shows pairs with padding
            may = wrong & may_be_wrong.ravel()[at]
            # Where a share was moved away, the weight is 0, unless another share landed there.
            if seen is not None:
                lands = np.bincount(at[share & ~stays], minlength=at.size).reshape(shape) > 0
                may = may & ((np.abs(seen) <= ZERO) | lands)
            good = good + (share & may & ~stays)
            bad = bad | (share & ~may & ~stays)
        return good, bad


# The matrices of the backward pass, and the names under which the model and Seen have them.
GRADIENTS_READ = {
    "P": "p", "dS of dq": "ds_of_dq", "dS of dk": "ds_of_dk", "dS of bias": "ds_of_bias", "dsinks": "dsinks",
}  # fmt: skip
