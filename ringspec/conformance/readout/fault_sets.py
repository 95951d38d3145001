"""Find the smallest set of faults that explains everything: single faults first, then sets of two and three.

A *fault* is a kind of mistake at a place, which is a set of pairs of tokens. The *choices* of a ring say what it does for
each pair, and every fault changes some of them. A *chain* is a set of faults with the match that it gives.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ringspec.conformance.readout.choices import Choices
from ringspec.conformance.readout.effects import OF_GRADIENTS, OF_ROW_SUMS, matrices, names_of
from ringspec.conformance.readout.kinds import Fault
from ringspec.conformance.readout.matches import Explanation, Match, finite_size, in_blocks, near
from ringspec.conformance.readout.model import Model
from ringspec.conformance.readout.places import (
    LISTED,
    PAIRS,
)

KEPT = (
    10,
    5,
)  # how many partial sets of one fault, and of two faults, are extended by another fault

MOST_FAULTS = 3

NOTHING = 0.05  # a smaller factor cannot be told from 0 in every pair

MOST_ALONE = (
    24  # how many single faults are tried as the explanation of a part, after the sets of faults
)

Candidates = Iterator[tuple[Fault, Match]]

Predict = Callable[[Choices], Match]

Attempt = Callable[[Fault], Match]  # predicts what a fault gives, besides those found so far


def composed(choices: Choices, faults: Sequence[Fault]) -> Choices:
    for fault in faults:
        choices = fault.applied(choices)
    return choices


Chain = tuple[tuple[Fault, ...], Match]


def explain(
    model: Model,
    keep: Callable[[Choices], None],
    predict: Predict,
    base: Choices,
    proposed: Callable[[Choices, Match, bool], Candidates],
    evaluations: float,
) -> Explanation:
    """Return the smallest set of faults that explains everything; if none is found, a set that explains a part.

    Of sets with equally many faults, the simplest is returned. Each fault of a partial set explains the blocks that it
    changes.

    The search ends when ``model`` has computed as many ``evaluations``. ``keep`` stores what similar choices have in common, so that they are predicted faster. ``predict``
    compares a prediction with what was read, and ``proposed`` yields the faults to try. ``base`` are the choices without
    faults.
    """
    model.most = model.evaluations + evaluations
    keep(base)
    plain = predict(base)
    if plain.whole:
        return Explanation((), True, plain)
    beam: list[Chain] = [((), plain)]
    best: list[list[Chain]] = []

    def extended(last: bool) -> tuple[list[Chain], list[Chain]]:
        """Return the sets with one more fault: those that explain everything, and those that explain more than before."""
        whole: list[Chain] = []
        tried: list[Chain] = []
        for faults, _ in beam:
            choices = composed(base, faults)
            keep(choices)
            match = predict(choices)
            before = match.gain(plain)
            for fault, got in proposed(choices, match, last):
                if got.whole:
                    whole.append(((*faults, fault), got))
                elif not last and got.gain(plain) > before:
                    tried.append(((*faults, fault), got))
                if not model.may_go_on():
                    return whole, tried
            if whole and faults:
                break
        return whole, tried

    for depth in range(MOST_FAULTS):
        # Faults that may explain everything are tried first: for a single fault, this is a sixth of the work.
        whole, tried = extended(True)
        if not whole and depth + 1 < MOST_FAULTS:
            whole, tried = extended(False)
        if whole:
            whole.sort(key=cost)
            return Explanation(whole[0][0], True, whole[0][1], tuple(x[0] for x in whole[1:]))
        if not tried:
            break
        tried.sort(key=lambda x: (-x[1].gain(plain), cost(x)))
        beam = varied(tried, KEPT[depth])
        best.insert(0, beam)
        if not depth:
            simple = [x for x in tried if not x[0][0].place.words.startswith((LISTED, PAIRS))]
            best.append(varied(simple, MOST_ALONE))
    for faults, match in itertools.chain(*best):
        supported, shown = faults, match
        while supported:
            left = tuple(f for f in supported if holds(predict, base, supported, f, shown))
            if left == supported:
                return Explanation(supported, shown.whole, shown)
            supported, shown = left, predict(composed(base, left))
    return Explanation((), False, plain)


def varied(tried: Sequence[Chain], most: int) -> list[Chain]:
    """Return the first ``most`` sets, without those that predict the same as an earlier set or are part of one."""
    found: list[Chain] = []
    for chain in tried:
        same = any(
            part_of(chain[0], one[0])
            or all(np.array_equal(one[1].ours[name], x) for name, x in chain[1].ours.items())
            for one in found
        )
        if not same:
            found.append(chain)
        if len(found) == most:
            break
    return found


def part_of(faults: Sequence[Fault], others: Sequence[Fault]) -> bool:
    """Return whether each of ``faults`` has a fault of the same kind in ``others``, at a place that contains its own."""
    return all(
        one.kind is other.kind and not (one.place.table & ~other.place.table).any()
        for one, other in zip(faults, others, strict=True)
    )


def loses(value: object) -> bool:
    """Return whether a factor removes all, or nearly all, of a share somewhere."""
    factors = np.asarray(value)
    return factors.dtype.kind == "f" and bool((np.abs(factors) < NOTHING).any())


def empties(after: Match, before: Match) -> bool:
    """Return whether, in some block, everything that differs between two matches nearly vanishes in the first."""
    for name, ours in after.ours.items():
        was = before.ours[name]
        changed = ~near(ours, was, finite_size(ours), 1e-9)
        left = changed & ~(np.abs(ours) <= NOTHING * np.abs(was))
        if (in_blocks(changed, np.any) & ~in_blocks(left, np.any)).any():
            return True
    return False


def cost(chain: Chain) -> float:
    return sum(fault.cost for fault in chain[0])


def holds(
    predict: Predict,
    base: Choices,
    faults: Sequence[Fault],
    fault: Fault,
    match: Match,
) -> bool:
    """Return whether a fault of a partial set explains every block that it changes.

    The fault must not make anything wrong. If it removes shares, every matrix that it may change must agree everywhere.
    The blocks that it changes must agree. For a fault in the forward pass, or only in the products for dq, dk and dv,
    they must agree in every matrix; for other faults, in at least one. For a fault whose effect on a block does not depend on
    other blocks, it is enough that the block's rows agree up to a factor.
    """
    without = predict(composed(base, [one for one in faults if one is not fault]))
    if any((x & ~match.equal[name]).any() for name, x in without.equal.items()):
        return False
    if any(loses(value) for _, value in fault.kind.changes) or empties(match, without):
        # While anything is unexplained elsewhere, a share that is missing here may have been moved there.
        names = matrices(fault.kind) if fault.phase == "backward" else tuple(match.ours)
        if not all(match.equal[name].all() for name in names if name in match.equal):
            return False
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
            shaped, was = (in_blocks(x.alike[name], np.all) for x in (match, without))
            if inside.any() and shaped[inside].all() and not was[inside].any():
                return True
    strictly = fault.phase == "forward" or names_of(fault.kind) <= OF_GRADIENTS
    return bool(equal) and (all(equal) if strictly else any(equal))
