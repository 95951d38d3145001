"""Which faults give what was seen? Single faults first, then sets of two and three, the forward before the backward."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ringspec.conformance.readout.choices import OF_ALL, Choices
from ringspec.conformance.readout.geometry import dealt_otherwise
from ringspec.conformance.readout.masks import masks_of
from ringspec.conformance.readout.model import Forward, Model
from ringspec.conformance.readout.pairs import Pairs, Seen
from ringspec.conformance.readout.places import (
    Place,
    block_places,
    listed,
    part_places,
    worker_places,
)
from ringspec.conformance.readout.vocabulary import ONE_HEAD_MAP, Fault, Kind, kinds_of
from ringspec.problem.model import Array, Booleans

ZERO = 1e-6  # below it a weight counts as 0
KEPT = 4  # partial sets that are extended by another fault
MOST_FAULTS = 3
# What a backward may do besides computing the gradient of attention.
SAME = "The backward pass does the same."
GRADIENT = "The backward pass is the gradient of that forward."
SECONDS = 4.0  # of processor time for one pass of one problem
# Slots by which what one block does changes what is seen in another one.
MOVING = {"dy", "dv_to", "dq_to", "dk_to", "k", "q", "v", "dv_dy", "dk_q", "dq_k"}
OF_ROW_SUMS = {"merge", "count", "v", "o_times"}
CARRIED = (
    "q", "k", "v", "mask", "times", "count", "heads", "v_heads", "hidden_score", "q_slots", "k_slots", "v_slots",
)  # fmt: skip


@dataclass(frozen=True)
class Match:
    """How far a prediction agrees with what was seen.

    ``equal``: elements, by matrix. ``alike`` [a, b]: blocks whose rows have the correct shape. ``ours``: the prediction.
    ``zeros``: in a forward, where one of the two sees a pair and the other does not.
    """

    equal: dict[str, Booleans]
    alike: dict[str, Booleans]
    ours: dict[str, Array]
    zeros: Booleans | None = None

    @cached_property
    def whole(self) -> bool:
        return all(x.all() for x in self.equal.values())

    @cached_property
    def blocks(self) -> dict[str, Booleans]:
        """[a, b], or [a] of rows: what is equal in every element."""
        return {name: in_blocks(x, np.all) for name, x in self.equal.items()}

    @cached_property
    def score(self) -> float:
        found = sum(float(x.sum()) for x in self.blocks.values())
        return found + sum(
            0.5 * float((x & ~self.blocks[name]).sum()) for name, x in self.alike.items()
        )


@dataclass(frozen=True)
class Explanation:
    """Faults of a pass. ``whole``: they account for everything that was seen; ``others``: sets that do so as well.

    ``base``: what the backward does except for the faults, '' if it is the gradient of attention.
    """

    faults: tuple[Fault, ...]
    whole: bool
    match: Match
    others: tuple[tuple[Fault, ...], ...] = ()
    base: str = ""


def in_blocks(x: Booleans, which: Callable[..., Booleans]) -> Booleans:
    """[a, b] of pairs [a, b, h, i, j], [a] of rows."""
    return which(x, axis=tuple(range(2 if x.ndim == 5 else 1, x.ndim)))


def near(seen: Array, ours: Array, size: Array, tolerance: float) -> Booleans:
    """Where the two differ by at most ``tolerance`` of ``size``; NaN is never equal, the same infinity is."""
    with np.errstate(invalid="ignore"):
        close = np.abs(seen - ours) <= tolerance * size + ZERO
        return (close & np.isfinite(ours)) | (seen == ours)


def rows_alike(seen: Array, ours: Array, tolerance: float) -> Booleans:
    """[a, b]: the same zeros, and in each row one positive factor between the two."""
    with np.errstate(invalid="ignore", divide="ignore"):
        zeros = (np.abs(seen) <= ZERO) == (np.abs(ours) <= ZERO)
        ratio = np.where(np.abs(ours) <= ZERO, np.nan, seen / np.where(ours == 0, 1.0, ours))
        low = np.where(np.isnan(ratio), np.inf, ratio).min(axis=4)
        high = np.where(np.isnan(ratio), -np.inf, ratio).max(axis=4)
        steady = (high <= low * (1 + 2 * tolerance)) & (low > 0) | (high == -np.inf)
    return (zeros.all(axis=4) & steady).all(axis=(2, 3))


class Reader:
    """Explains what was seen of one problem, within ``tolerance`` of the size of a number's parts."""

    def __init__(self, pairs: Pairs, tolerance: float) -> None:
        geometry = pairs.geometry
        self.geometry, self.tolerance = geometry, tolerance
        self.masks = masks_of(geometry)
        self.model = Model(pairs, [mask.pattern for mask in self.masks], dealt_otherwise(geometry))
        self.at_workers = worker_places(geometry)
        self.kept: dict[str, tuple[list[Kind], list[Place], list[Place]]] = {}

    def tried(self, phase: str) -> tuple[list[Kind], list[Place], list[Place]]:
        """Kinds of a pass, sets of blocks, and parts of blocks."""
        if phase not in self.kept:
            places = block_places(self.geometry, phase, self.masks[0].pattern)
            kinds = kinds_of(self.geometry, phase, self.masks)
            self.kept[phase] = kinds, places, part_places(self.geometry, places)
        return self.kept[phase]

    def match_forward(self, seen: Seen, ours: Forward) -> Match:
        weights, tolerance = ours.weights, self.tolerance
        equal = {"A": near(seen.weights, weights, np.abs(weights), tolerance)}
        arrays = {"A": weights}
        if seen.lse is not None:
            equal["lse"] = near(
                seen.lse, ours.lse, np.maximum(1.0, finite_size(ours.lse)), tolerance
            )
            arrays["lse"] = ours.lse
        size = np.abs(weights).sum(axis=(1, 4))[..., None] * np.abs(self.model.pairs.g).max()
        equal["V"] = near(seen.through, ours.through, size, tolerance)
        zeros = (np.abs(seen.weights) <= ZERO) != (np.abs(weights) <= ZERO)
        return Match(
            equal,
            {"A": rows_alike(seen.weights, weights, tolerance)},
            arrays | {"V": ours.through},
            zeros,
        )

    def forward(self, seen: Seen) -> tuple[Explanation, Choices]:
        """The faults of the forward, and the choices with them."""
        model = self.model

        def predict(choices: Choices) -> Match:
            return self.match_forward(seen, model.forward(choices))

        found = explain(
            predict, model.right, lambda choices, match: self.forward_faults(seen, choices, match)
        )
        return found, composed(model.right, found.faults)

    def forward_faults(self, seen: Seen, choices: Choices, match: Match) -> Iterator[Fault]:
        """Faults that may account for more; those of a block's own weights only where these come right."""
        kinds, places, parts = self.tried("forward")
        parts = [one for one in parts if allows(one, match)]
        alike = match.alike["A"] | match.blocks["A"]
        for kind in kinds:
            if kind.of_workers or kind.slots & {*OF_ALL, *ONE_HEAD_MAP}:
                at = (
                    self.at_workers
                    if kind.of_workers
                    else places
                    if "merge" in kind.slots
                    else places[:1]
                )
                yield from (Fault("forward", kind, place) for place in at)
                continue
            at = [one for one in (*places, *parts) if set(one.parts) <= set(kind.parts)]
            if not kind.slots & {"merge", "count", "v"}:
                everywhere = Fault("forward", kind, places[0]).applied(choices)
                better = rows_alike(
                    seen.weights, self.model.forward(everywhere).weights, self.tolerance
                )
                at = [one for one in at if one.parts or gains(one, better, alike)]
                at += also(listed(better & ~alike, places))
            if dict(kind.changes).get("count") == 0.0:
                gone = in_blocks(np.abs(seen.weights) <= ZERO, np.all)
                gone = gone & in_blocks(np.abs(match.ours["A"]) > ZERO, np.any)
                at += also(listed(gone, places))
            yield from (Fault("forward", kind, place) for place in at)

    def backward(self, seen: Seen, choices: Choices, forward_is_whole: bool) -> Explanation:
        """The faults of the backward, from its own lse and delta.

        The backward may be the gradient of attention, that of the forward as it is, or have the forward's choices.
        """
        model = self.model
        forward = model.forward(choices)
        lse = forward.lse if seen.lse is None else seen.lse

        def predict(base: Choices) -> Match:
            return self.match_backward(seen, model.backward(base, forward, lse, seen.delta))

        bases = [("", model.right)]
        if choices is not model.right and forward_is_whole:
            gradient = self.match_backward(seen, model.gradient_of_forward(choices))
            if gradient.whole:
                return Explanation((), True, gradient, (), GRADIENT)
            kept = {slot: getattr(choices, slot) for slot in CARRIED}
            bases.append((SAME, dataclasses.replace(model.right, **kept)))
        found = []
        for words, base in bases:
            one = explain(
                predict, base, lambda now, match: self.backward_faults(predict, now, match)
            )
            found.append(dataclasses.replace(one, base=words))
            if one.whole and not one.faults:
                return found[-1]
        return max(found, key=lambda one: (one.whole, -len(one.faults), one.match.score))

    def match_backward(self, seen: Seen, ours: tuple[Array, Array, Array]) -> Match:
        assert seen.p is not None and seen.ds_of_dq is not None and seen.ds_of_dk is not None
        p, of_dq, of_dk = ours
        parts = np.abs(p) * (
            np.abs(self.model.pairs.g).max() + np.abs(seen.delta)[:, None, :, :, None]
        )
        equal = {
            "P": near(seen.p, p, np.abs(p), self.tolerance),
            "dS of dq": near(
                seen.ds_of_dq, of_dq, np.maximum(np.abs(of_dq), parts), self.tolerance
            ),
            "dS of dk": near(
                seen.ds_of_dk, of_dk, np.maximum(np.abs(of_dk), parts), self.tolerance
            ),
        }
        arrays = {"P": p, "dS of dq": of_dq, "dS of dk": of_dk}
        return Match(equal, {"P": rows_alike(seen.p, p, self.tolerance)}, arrays)

    def backward_faults(
        self, predict: Callable[[Choices], Match], choices: Choices, match: Match
    ) -> Iterator[Fault]:
        """Faults that may account for more.

        Unless it moves shares, a kind does in a block the same wherever else it is done: one evaluation shows in which
        blocks it gives the correct numbers.
        """
        kinds, places, parts = self.tried("backward")
        parts = [one for one in parts if allows(one, match)]
        before = match.equal
        for kind in kinds:
            if kind.slots & {*OF_ALL, *ONE_HEAD_MAP}:
                yield Fault("backward", kind, places[0])
                continue
            at = [one for one in (*places, *parts) if set(one.parts) <= set(kind.parts)]
            if kind.slots & MOVING:
                yield from (Fault("backward", kind, place) for place in at)
                continue
            after = predict(Fault("backward", kind, places[0]).applied(choices)).equal
            if not any((after[name] & ~before[name]).any() for name in before):
                continue
            was = {name: in_blocks(x, np.all) for name, x in before.items()}
            gained = np.sum(
                [in_blocks(after[n], np.all).astype(int) - was[n] for n in after], axis=0
            )
            for place in (*at, *also(listed(gained > 0, places))):
                now = {
                    name: in_blocks(np.where(place.table, after[name], x), np.all)
                    for name, x in before.items()
                }
                if sum(int(now[name].sum()) - int(was[name].sum()) for name in now) > 0:
                    yield Fault("backward", kind, place)


def also(place: Place | None) -> list[Place]:
    return [] if place is None else [place]


def finite_size(x: Array) -> Array:
    return np.where(np.isfinite(x), np.abs(x), 0.0)


def gains(place: Place, better: Booleans, alike: Booleans) -> bool:
    """Tell whether blocks come right in ``place`` and none goes wrong there."""
    inside = place.blocks
    return bool((inside & better & ~alike).any()) and not (inside & ~better & alike).any()


def allows(place: Place, plain: Match) -> bool:
    """Tell whether everything wrong lies in the rows, heads and keys of ``place``.

    A forward spreads what is wrong with one key over its row: there keys are judged by zeros.
    """
    for name, equal in plain.equal.items():
        if name == "V":
            continue
        wrong = ~equal if equal.ndim == 5 else (~equal)[:, None, :, :, None]
        if "j" in place.parts and plain.zeros is not None:
            if not plain.zeros.any():
                return False
            if name == "lse":
                continue
            wrong = plain.zeros
        axes = tuple(
            axis for axis, part in ((2, "h"), (3, "i"), (4, "j")) if part not in place.parts
        )
        if (wrong & ~place.table).any(axis=axes).any():
            return False
    return True


def composed(choices: Choices, faults: Sequence[Fault]) -> Choices:
    for fault in faults:
        choices = fault.applied(choices)
    return choices


Chain = tuple[tuple[Fault, ...], Match]


def explain(
    predict: Callable[[Choices], Match],
    base: Choices,
    proposed: Callable[[Choices, Match], Iterable[Fault]],
) -> Explanation:
    """The smallest set of faults that accounts for everything, the simplest first, or what a partial set shows."""
    started = time.thread_time()
    plain = predict(base)
    if plain.whole:
        return Explanation((), True, plain)
    beam: list[Chain] = [((), plain)]
    for _ in range(MOST_FAULTS):
        tried: list[Chain] = []
        for faults, match in beam:
            choices = composed(base, faults)
            for fault in proposed(choices, match):
                if time.thread_time() - started > SECONDS:
                    break
                if any(fault.kind is one.kind for one in faults):
                    continue
                got = predict(fault.applied(choices))
                if got.whole or got.score > match.score:
                    tried.append(((*faults, fault), got))
        whole = sorted((x for x in tried if x[1].whole), key=cost)
        if whole:
            return Explanation(whole[0][0], True, whole[0][1], tuple(x[0] for x in whole[1:]))
        if not tried:
            break
        tried.sort(key=lambda x: (-x[1].score, cost(x)))
        beam = tried[:KEPT]
    for faults, match in beam:
        supported = tuple(f for f in faults if holds(predict, base, faults, f, match))
        if supported:
            return Explanation(supported, False, predict(composed(base, supported)))
    return Explanation((), False, plain)


def cost(chain: Chain) -> float:
    return sum(fault.cost for fault in chain[0])


def holds(
    predict: Callable[[Choices], Match],
    base: Choices,
    faults: Sequence[Fault],
    fault: Fault,
    match: Match,
) -> bool:
    """Tell whether a fault of a partial set accounts for every block that it changes.

    In every matrix of a forward, in some matrix of a backward; or, for what a block does by itself, in the shape of
    its rows.
    """
    without = predict(composed(base, [one for one in faults if one is not fault]))
    equal = []
    for name, ours in match.ours.items():
        changed = ~near(ours, without.ours[name], finite_size(ours), 1e-9)
        if not changed.any():
            continue
        blocks = in_blocks(changed, np.any)
        equal.append(
            bool(match.blocks[name][blocks].all() and not without.blocks[name][blocks].all())
        )
        if name in match.alike and not fault.kind.of_workers and not fault.kind.slots & OF_ROW_SUMS:
            inside = blocks & fault.place.blocks
            if (
                inside.any()
                and match.alike[name][inside].all()
                and not without.alike[name][inside].any()
            ):
                return True
    return bool(equal) and (all(equal) if fault.phase == "forward" else any(equal))
