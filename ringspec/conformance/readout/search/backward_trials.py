"""Propose the next fault of a backward pass, besides those found so far, each with what it explains.

A *share* is what one pair adds to a row of dq, dk or dv.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from operator import is_

import numpy as np

from ringspec.conformance.readout.faults.choices import KERNELS, OF_ALL, Choices
from ringspec.conformance.readout.faults.effects import (
    LANDING,
    OF_GRADIENTS,
    OF_ROW,
    OF_STORING,
    OF_WHOLE,
    PERHAPS,
    matrices,
)
from ringspec.conformance.readout.faults.kinds import Fault, Kind
from ringspec.conformance.readout.faults.places import Place
from ringspec.conformance.readout.faults.product_kinds import REPLACED
from ringspec.conformance.readout.model.backward import gradients_of_shares
from ringspec.conformance.readout.model.forward import Forward
from ringspec.conformance.readout.model.shares import Shares, shares_of_pairs
from ringspec.conformance.readout.problem.pairs import Seen
from ringspec.conformance.readout.search.backward_match import equal_sinks, match_backward, zeros_of
from ringspec.conformance.readout.search.context import PairsShown, SearchContext, of_ranges
from ringspec.conformance.readout.search.fault_sets import Attempt, Candidates
from ringspec.conformance.readout.search.matches import Match, alike, changes
from ringspec.conformance.readout.search.starts import useful
from ringspec.problem.model import Array, Booleans

# Choices of slots that change p, dp, lse or delta of the pairs that take them, and nothing else.
LOCAL_SLOTS = {f"{name}.slot" for name in ("q", "k", "v", "dy", "lse_of", "delta_o", "delta_dy")}
OF_COUNTS = {"dq_count", "dk_count", "dv_count", "dbias_count"}
HALF = 0.5  # a kind is tried in just the pairs that it explains if these are at least this part of the wrong ones


def backward_faults(
    context: SearchContext,
    seen: Seen,
    saved: tuple[Forward, Array, Array],
    choices: Choices,
    match: Match,
    last: bool,
    alone: str = "",
    of_way: bool = False,
) -> Candidates:
    """Yield faults that may explain more, each with its match.

    ``saved``: what the backward pass gets from the forward pass, as for :func:`ringspec.conformance.readout.model.backward.backward_pass`. ``choices`` and
    ``match`` belong to the faults found so far. ``last``: yield only faults that may explain all that is still wrong;
    ``alone``: the one matrix in which they may explain it; ``of_way``: of these, only those that depend on the ranges that
    a kernel computes.

    What a kind changes in one block does not depend on other blocks, unless it adds shares to
    wrong rows. So one evaluation with the kind applied everywhere shows which pairs it explains. A share that is
    added to a wrong row makes two elements wrong: the one where it is missing and the one where it is added.
    """
    kinds, places = context.kinds("backward"), context.places("backward")

    model = context.model
    here = shares_of_pairs(model, choices, *saved)
    wrong = {name: not x.all() for name, x in match.equal.items()}
    may_help = useful(context, "backward", kinds, choices, zeros_of(seen, match, choices))
    for kind in itertools.takewhile(model.may_go_on, may_help):
        touched = of_interest(kind, choices, wrong, last, alone)
        if not touched or (
            last
            and (
                (of_way and not of_ranges(kind))
                or not may_reach(context, kind, choices, match, touched)
            )
        ):
            continue
        everywhere = Fault("backward", kind, places.blocks[0])
        if last and is_loss(kind) and not in_place(context, choices):
            # The results show shares elsewhere than in the blocks where they are lost.
            lost = (Fault("backward", kind, place) for place in (*places.blocks, *places.heads))
            yield from (
                (fault, with_kind(context, seen, saved, fault.applied(choices))[1])
                for fault in lost
            )
            continue
        of_kind = functools.partial(with_kind, context, seen, saved, everywhere.applied(choices))
        there, got = context.once("kind", kind, choices, of_kind)
        attempt = kept_by_place(
            attempts(context, seen, saved, choices, (here, match), (there, got), everywhere)
        )
        if kind.slots & set(OF_ALL) or ("dsinks" in touched and len(touched) > 1):
            yield everywhere, got
            continue
        if touched == ["dsinks"]:
            yield from in_sinks(context, kind, attempt, match, got)
            continue
        moved = {LANDING[name] for name in kind.names if name in LANDING}
        stay = [name for name in touched if name not in moved and changes(match, got, name)]
        if not stay:
            if context.geometry.padding:  # tokens of some workers may have no padding to pass
                yield everywhere, got
            good, bad = context.movable(kind, match, moved)
            if good.any():
                yield from context.at_best(kind, places, good, bad, attempt, "backward", True)
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
        able = of_whole_sums(kind)
        for good, bad in judged:
            yield from context.at_best(kind, places, good, bad, attempt, "backward", able=able)
        right = np.all([match.equal[name] | got.equal[name] for name in stay], axis=0)
        pairs = np.asarray((every[0] > 0) & ~every[1] & right)
        if able is None and any(pairs.sum() >= HALF * (~match.equal[name]).sum() for name in stay):
            shown = PairsShown(pairs, np.asarray(every[0] > 0), ~every[1])
            yield from context.in_pairs("backward", kind, shown, attempt)


def may_reach(
    context: SearchContext, kind: Kind, choices: Choices, match: Match, touched: Sequence[str]
) -> bool:
    """Return whether a kind that takes other slots of an operand changes every wrong pair of the matrices that it touches.

    True for other kinds. It is seen without an evaluation, which one that may not explain everything would waste.
    """
    local = kind.slots <= LOCAL_SLOTS and is_local(context, kind, choices)
    if not (local and in_place(context, choices)):
        return True
    applied = Fault("backward", kind, context.places("backward").blocks[0]).applied(choices)
    now, then = (one.in_kernel(kind.only) for one in (applied, choices))
    changed = np.any(
        [np.broadcast_to(now[x] != then[x], context.model.shape) for x in kind.slots], axis=0
    )
    return not any((~match.equal[name] & ~changed).any() for name in touched if name != "dsinks")


def in_sinks(
    context: SearchContext, kind: Kind, attempt: Attempt, match: Match, got: Match
) -> Candidates:
    """Try a kind that changes only dsinks; ``got``: the match with the kind on all workers."""
    was, now = (np.all(x.equal["dsinks"], axis=2) for x in (match, got))
    good, bad = (
        x[:, None, :, None, None] & np.ones(context.model.shape, bool)[:, :1]
        for x in (now & ~was, was & ~now)
    )
    if good.any():
        yield from context.at_best(kind, context.workers, good, bad, attempt, "backward")


def of_whole_sums(kind: Kind) -> Callable[[Place], bool] | None:
    """Return a function that tells whether a place has all blocks of the sums that it has, if a kind needs that; else None.

    What is written over the sum of the blocks before also loses those that are outside of the place.
    """
    if REPLACED not in kind.words:
        return None
    axis = 1 if kind.slots <= {"dq_count"} else 0
    return lambda place: bool((place.table.any(axis=axis) == place.table.all(axis=axis)).all())


def is_loss(kind: Kind) -> bool:
    """Return whether a kind is the loss of shares of one or more gradients."""
    return kind.names <= OF_COUNTS and all(
        isinstance(x, float) and x == 0.0 for _, x in kind.changes
    )


def of_interest(
    kind: Kind, choices: Choices, wrong: Mapping[str, bool], last: bool, alone: str
) -> list[str]:
    """Return the matrices in which a kind is judged; none if it cannot help.

    ``wrong``: which matrices are wrong. ``choices``, ``last`` and ``alone`` are as for :func:`backward_faults`.
    """
    touched = [name for name in matrices(kind) if name in wrong]
    if kind.slots == {"mask"} and (choices["value_mask"] >= 0).any():
        touched = [name for name in touched if name != "P" or wrong["P"]]  # it has its own mask
    to_explain = [alone] if alone else [name for name in wrong if wrong[name]]
    if not any(wrong[name] for name in touched):
        return []
    if last and not set(to_explain) <= set(touched):
        return []
    if not kind.slots & PERHAPS and not all(wrong[name] for name in touched):
        return []
    return [alone] if alone else touched


def attempts(
    context: SearchContext,
    seen: Seen,
    saved: tuple[Forward, Array, Array],
    choices: Choices,
    without: tuple[Shares, Match],
    applied: tuple[Shares, Match],
    everywhere: Fault,
) -> Attempt:
    """Return the function that predicts what a kind gives at a place, in the cheapest way that is exact.

    ``without``: the shares and the match of ``choices``, without the kind. ``applied``: those with it ``everywhere``.
    """
    kind = everywhere.kind
    local = is_local(context, kind, choices)
    if local and "dsinks" not in matrices(kind) and in_place(context, everywhere.applied(choices)):
        return functools.partial(in_pairs_of, context, seen, without[1], applied[1])
    there = applied[0] if local else None
    return functools.partial(in_part, context, seen, saved, choices, without[0], there)


def kept_by_place(attempt: Attempt) -> Attempt:
    """Return ``attempt`` for faults of one kind, with one prediction for each place."""
    known: dict[str, Match] = {}

    def once(fault: Fault) -> Match:
        if fault.place.words not in known:
            known[fault.place.words] = attempt(fault)
        return known[fault.place.words]

    return once


def with_kind(
    context: SearchContext, seen: Seen, saved: tuple[Forward, Array, Array], choices: Choices
) -> tuple[Shares, Match]:
    """Return the shares of the gradients with these choices, and the match."""
    shares = shares_of_pairs(context.model, choices, *saved)
    return shares, match_backward(
        context, seen, gradients_of_shares(context.model, choices, shares, *saved)
    )


def is_local(context: SearchContext, kind: Kind, choices: Choices) -> bool:
    """Return whether a kind changes what a pair adds to the gradients only by being at this pair.

    ``choices`` are those with the faults found so far.
    """
    if "delta" in kind.slots and len(kind.slots) > 1:
        return False  # delta adds up the other pairs, which such a kind changes as well
    slots = OF_WHOLE if kind.names <= OF_GRADIENTS else (*OF_WHOLE, *OF_ROW)
    right = context.model.right
    return all(choices.in_kernel(kernel)[x] is right[x] for kernel in KERNELS for x in slots)


def in_place(context: SearchContext, choices: Choices) -> bool:
    """Return whether every gradient adds a pair's share only to the rows where it belongs."""
    right = context.model.right.several(OF_STORING)
    return not choices["exchanged"].any() and all(
        all(map(is_, choices.in_kernel(kernel).several(OF_STORING), right)) for kernel in KERNELS
    )


def in_pairs_of(
    context: SearchContext, seen: Seen, without: Match, everywhere: Match, fault: Fault
) -> Match:
    """Return the match with a fault whose share at each pair is known.

    ``without``: the match without the fault, which holds outside its place. ``everywhere``: the match with the same
    mistake at all pairs, which holds in its place.
    """
    context.model.evaluations += 1
    table = fault.place.table

    def predicted() -> dict[str, Array]:
        return {
            name: x if x is everywhere.ours[name] else np.where(table, everywhere.ours[name], x)
            for name, x in without.ours.items()
        }

    equal = {
        name: x if x is everywhere.equal[name] else np.where(table, everywhere.equal[name], x)
        for name, x in without.equal.items()
        if name != "dsinks"
    }
    if "dsinks" in without.equal:
        p = np.where(table, everywhere.ours["P"], without.ours["P"])
        equal["dsinks"] = equal_sinks(context, seen, without.ours["dsinks"], p)
    found = Match(
        equal, predicted, lambda: alike_in_part(context, seen, without, everywhere, table, found)
    )
    return found


def alike_in_part(
    context: SearchContext,
    seen: Seen,
    without: Match,
    everywhere: Match,
    table: Booleans,
    found: Match,
) -> dict[str, Booleans]:
    """Return which halves of rows agree up to a factor in the match of :func:`in_pairs_of`."""
    if everywhere.ours["P"] is without.ours["P"]:
        return without.alike
    if table.shape[4] == 1:
        return {"P": np.where(table, everywhere.alike["P"], without.alike["P"])}
    assert seen.p is not None
    return {"P": alike(seen.p, found.ours["P"], context.tolerance)}


def in_part(
    context: SearchContext,
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
        return with_kind(context, seen, saved, applied)[1]
    context.model.evaluations += 1
    table = fault.place.table
    shares = [
        was if was is None or now is None or was is now else np.where(table, now, was)
        for was, now in zip(here, there, strict=True)
    ]
    gradients = gradients_of_shares(context.model, applied, Shares._make(shares), *saved)
    return match_backward(context, seen, gradients)
