"""What the searches for the faults of one problem share: its model ring, the kinds and places that are tried, and the best places of a kind.

A *pair* [a, b, h, i, j] is query i of worker a with key j of worker b in head h. A *block* [a, b] contains all pairs of
two workers. A *kind* is a mistake, such as a wrong mask. A *fault* is a kind at a *place*, which is a set of pairs. The
*choices* of a ring say what it does for each pair, and every fault changes some of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ringspec.conformance.readout.faults.choices import OF_ALL, Choices, components
from ringspec.conformance.readout.faults.effects import (
    GOALS,
)
from ringspec.conformance.readout.faults.kinds import Fault, Kind
from ringspec.conformance.readout.faults.masks import masks_of
from ringspec.conformance.readout.faults.places import (
    Amounts,
    Place,
    Places,
    block_places,
    listed,
    pairs_listed,
    worker_places,
)
from ringspec.conformance.readout.faults.tile_places import tiles_fitting
from ringspec.conformance.readout.model.ring import Model
from ringspec.conformance.readout.problem.geometry import dealt_otherwise
from ringspec.conformance.readout.problem.pairs import Pairs
from ringspec.conformance.readout.search.fault_sets import Attempt, Candidates
from ringspec.conformance.readout.search.matches import (
    ZERO,
    Match,
)
from ringspec.conformance.readout.search.read_factors import number_of, of_one_number, same_effect
from ringspec.conformance.readout.search.vocabulary import kinds_of, with_number
from ringspec.problem.model import Array, Booleans

# Of tables over all pairs, in all searches for the faults of one problem; about 15 s of processor time, which only
# results that stay unexplained take.
EVALUATIONS = 33_000
# How the names of the choices about features begin.
OF_FEATURES = ("cap", "dlse", "sink", "dsink", "bias", "dbias", "drop")
# Choices of how often a share is added to the gradient that a matrix is read from.
COUNTS = {
    "P": "dv_count",
    "dS of dq": "dq_count",
    "dS of dk": "dk_count",
    "dS of bias": "dbias_count",
}
# Choices whose effect depends on the ranges of a block that a kernel computes.
OF_RANGES = ("tiles", "begins", "padded", "computed", "uncleared", "dq_form", "dk_form", "dv_form")
# How many places of a kind are tried: those that explain everything, and those that do not.
MOST_WHOLE, MOST_PARTIAL = 40, 3


def of_feature(kind: Kind) -> bool:
    """Return whether a kind changes a choice about the soft cap, dlse, sinks, a bias or dropout."""
    return any(slot.startswith(OF_FEATURES) for slot in kind.slots)


def of_ranges(kind: Kind) -> bool:
    """Return whether the effect of a kind may depend on which parts of a block a kernel computes as one range."""
    in_words = kind.of_tiles or "tile" in kind.words or "chunk" in kind.words
    return in_words or not kind.slots.isdisjoint(OF_RANGES)


class PairsShown(NamedTuple):
    """Pairs [a, b, h, i, j] that show a kind: those that are ``sure``, those that ``may`` have it, and those to list."""

    listed: Booleans
    sure: Booleans
    may: Booleans


class SearchContext:
    """What the searches for the faults of one problem share.

    ``tolerance``: the largest difference that counts as equal, relative to the size of an element's terms.
    ``evaluations``: the most that all searches together may compute, in tables over all pairs.
    ``refuted``: the words of a kind that is not tried; '' if all are.
    """

    def __init__(
        self, pairs: Pairs, tolerance: float, evaluations: float = EVALUATIONS, refuted: str = ""
    ) -> None:
        geometry, self.refuted = pairs.geometry, refuted
        self.geometry, self.tolerance, self.evaluations = geometry, tolerance, evaluations
        self.masks = masks_of(geometry)
        self.model = Model(pairs, [mask.pattern for mask in self.masks], dealt_otherwise(geometry))
        self.largest = float(np.abs(pairs.g).max())
        self.workers = Places(geometry, worker_places(geometry), True)
        self.kinds_of_pass: dict[str, list[Kind]] = {}
        self.factors: dict[str, list[str]] = {}  # of each pass, in words; see read_factors
        self.places_of_pass: dict[str, Places] = {}
        self.judged: dict[str, tuple[Array, Match]] = {}
        self.base: Choices | None = None
        self.of_base: dict[tuple[str, int], Any] = {}
        self.shown: dict[str, tuple[list[int], Any]] = {}  # of starts.of_use
        self.patterns: dict[tuple[str, int], Booleans | None] = {}  # of starts.shown_by
        self.lses: dict[bool, tuple[Any, Any]] = {}  # of part_search.lses_of_parts

    def part(self, share: float) -> float:
        """Return how many evaluations a search may make that gets ``share`` of those that are left."""
        return share * max(0.0, self.evaluations - self.model.evaluations)

    def search_from(self, base: Choices) -> None:
        """Forget what :meth:`once` keeps, and keep it for a search that begins at ``base``."""
        self.base, self.of_base = base, {}

    def in_another_way(self, choices: Choices) -> bool:
        """Return whether single faults are tried that the search for a ring that computes its blocks in the usual way has tried."""
        return choices is self.base and bool(self.geometry.parts)

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

    def kinds(self, phase: str) -> list[Kind]:
        """Return the kinds of faults that are tried in a pass."""
        if phase not in self.kinds_of_pass:
            kinds = kinds_of(self.geometry, phase, self.masks)
            kinds += self.kinds_of_factors(phase, kinds)
            kinds = [kind for kind in kinds if kind.words != self.refuted]
            # Those of a feature are the reason for its problem; those of the whole ring take one evaluation.
            kinds.sort(key=lambda kind: (not of_feature(kind), not kind.slots & set(OF_ALL)))
            self.kinds_of_pass[phase] = kinds
        return self.kinds_of_pass[phase]

    def kinds_of_factors(self, phase: str, usual: Sequence[Kind]) -> list[Kind]:
        """Return the faults of factors that were read from the results, without those that are ``usual`` faults, too."""
        read = self.factors.get(phase, ())
        kinds = [kind for x in read for kind in with_number(phase, x, number_of(x))]
        known = [kind for kind in usual if of_one_number(kind)]
        return [x for x in kinds if not any(same_effect(x, y) for y in known)]

    def places(self, phase: str) -> Places:
        """Return the places at which faults are tried in a pass."""
        if phase not in self.places_of_pass:
            blocks = block_places(self.geometry, phase, self.masks[0].pattern)
            self.places_of_pass[phase] = Places(self.geometry, blocks)
        return self.places_of_pass[phase]

    def in_pairs(self, phase: str, kind: Kind, pairs: PairsShown, attempt: Attempt) -> Candidates:
        """Try a kind at exactly the pairs that show it, if a short list describes them, and in the tiles that contain these."""
        masks = [value for slot, value in kind.changes if slot in ("mask", "value_mask")]
        patterns = [self.model.masks[int(np.asarray(x))] for x in masks if np.asarray(x) >= 0]
        if not all(x.all() or not x.any() for x in patterns):
            return  # pairs show only a mask that hides all of them or none
        listed = pairs_listed(self.geometry, pairs.listed, self.places(phase).blocks)
        places = [] if listed is None else [listed]
        if not (self.geometry.sees_all or kind.of_tiles) and pairs.sure.any():
            places += tiles_fitting(self.geometry, self.model.masks[0], pairs.sure, pairs.may)
        for place in places:
            fault = Fault(phase, kind, place)
            yield fault, attempt(fault)

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
        of_rows = "result_of" in kind.names
        parts = places.whole_rows if of_rows else places.of_heads if kind.of_tiles else None
        fitting = places.fitting(good, bad, MOST_WHOLE, loosely, parts)
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
            if name in COUNTS:  # a share that is lost does not show where it would be moved
                may = np.where(there[COUNTS[name]] == 0, wrong, may)
            good = good + (share & may & ~stays)
            bad = bad | (share & ~may & ~stays)
        return good, bad
