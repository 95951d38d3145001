"""Propose the faults of a backward pass that may explain what was read from the results of one problem.

A *share* is what one pair adds to a row of dq, dk or dv. The other terms are those of
:mod:`ringspec.conformance.readout.reader`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import is_

import numpy as np

from ringspec.conformance.readout.choices import KERNELS, LSES, OF_ALL, Choices, components
from ringspec.conformance.readout.effects import (
    LANDING,
    OF_GRADIENTS,
    OF_ROW,
    OF_STORING,
    OF_WHOLE,
    PERHAPS,
    STORED,
    matrices,
)
from ringspec.conformance.readout.fault_sets import (
    MOST_FAULTS,
    Attempt,
    Candidates,
    composed,
    explain,
)
from ringspec.conformance.readout.kinds import Fault, Kind
from ringspec.conformance.readout.matches import (
    ZERO,
    Explanation,
    Match,
    alike,
    changes,
    near,
)
from ringspec.conformance.readout.model.backward import (
    Gradients,
    backward_pass,
    gradient_of_forward,
    gradients_of_shares,
)
from ringspec.conformance.readout.model.forward import Forward, forward_pass
from ringspec.conformance.readout.model.keeping import keep_backward
from ringspec.conformance.readout.model.scores import OF_DROP
from ringspec.conformance.readout.model.shares import Shares, shares_of_pairs
from ringspec.conformance.readout.pairs import Seen
from ringspec.conformance.readout.places import Place
from ringspec.conformance.readout.product_kinds import REPLACED
from ringspec.conformance.readout.reader import PairsShown, Reader, of_ranges
from ringspec.conformance.readout.starts import Start, starts_of, useful
from ringspec.problem.model import Array, Booleans

# What a backward pass may compute instead of the gradient of attention.
SAME = "The backward pass does the same."
GRADIENT = "The backward pass is the gradient of this wrong forward pass."
SAVED = "The backward pass uses o and lse from before this mistake."
ZERO_IF_EMPTY = LSES.index("zero if empty")
MOST_STARTS = 4  # of a kind of evidence
# Choices of slots that change p, dp, lse or delta of the pairs that take them, and nothing else.
LOCAL_SLOTS = {f"{name}.slot" for name in ("q", "k", "v", "dy", "lse_of", "delta_o", "delta_dy")}
OF_COUNTS = {"dq_count", "dk_count", "dv_count", "dbias_count"}
HALF = 0.5  # a kind is tried in just the pairs that it explains if these are at least this part of the wrong ones
CARRIED = (
    *components("q"), *components("k"), *components("v"), "mask", "times", "cap", "count", "hidden_score",
    *components("sink_of"), "sink_o", *components("bias_q"), *components("bias_k"), "bias_times", *OF_DROP,
)  # fmt: skip


def carried(right: Choices, forward: Choices) -> Choices:
    """Return the choices of a backward pass that does the same as the ``forward`` pass, and is ``right`` otherwise.

    Keys of a wrong head are also those of the product for dq.
    """
    same = right.taking(CARRIED, forward)
    if forward["k.head"] is right["k.head"]:
        return same
    return Choices({**same.of, "dq_k.head": forward["k.head"]})


# The matrices of the backward pass, and the names under which the model and Seen have them.
GRADIENTS_READ = {
    "P": "p", "dS of dq": "ds_of_dq", "dS of dk": "ds_of_dk", "dS of bias": "ds_of_bias", "dsinks": "dsinks",
}  # fmt: skip


def explain_backward(
    reader: Reader,
    seen: Seen,
    choices: Choices,
    forward_is_whole: bool,
    known: Sequence[tuple[Fault, ...]] = (),
) -> Explanation:
    """Explain the backward pass, given the lse and delta that the kernel's forward pass returned.

    ``known``: sets of faults that other problems showed.

    Apart from its faults, the backward pass may be the gradient of attention, the gradient of the wrong forward
    pass, or a pass that makes the same wrong choices as the forward pass. It may also use o and lse as they were
    before the forward pass stored them wrongly.
    """
    model = reader.model
    forward = forward_pass(model, choices)
    returned = forward.lse if seen.lse is None else seen.lse, seen.through

    def as_returned() -> Explanation:
        return backward_from(
            reader, seen, choices, forward_is_whole, forward, *returned, known=known
        )

    if not forward_is_whole or all(choices[x] is model.right[x] for x in STORED):
        return as_returned()
    # The backward pass may use o and lse as they were before they were stored wrongly.
    before = choices.taking(STORED, model.right)
    if all(x is model.right[slot] for slot, x in before.of.items()):
        before = model.right
    kept = forward_pass(model, before)

    def as_kept(most_faults: int) -> Explanation:
        found = backward_from(reader, seen, before, True, kept, kept.lse, kept.through, most_faults)
        return dataclasses.replace(found, base=SAVED, whole=found.whole and not found.base)

    plain, plain_kept = (
        match_backward(reader, seen, backward_pass(model, model.right, *saved))
        for saved in ((forward, *returned), (kept, kept.lse, kept.through))
    )
    if plain_kept.whole and not plain.whole:
        return Explanation((), True, plain_kept, (), SAVED)
    if plain_kept.score > plain.score:
        found = as_kept(MOST_FAULTS)
        return found if found.whole else as_returned()
    found = as_returned()
    if found.whole and not found.faults:
        return found
    other = as_kept(len(found.faults) - 1 if found.whole else MOST_FAULTS)
    return other if other.whole else found


def backward_from(
    reader: Reader,
    seen: Seen,
    choices: Choices,
    forward_is_whole: bool,
    forward: Forward,
    lse: Array,
    through: Array,
    most_faults: int = MOST_FAULTS,
    known: Sequence[tuple[Fault, ...]] = (),
) -> Explanation:
    """Explain the backward pass from given results of the forward pass.

    ``lse`` has the axes [a, h, i], and ``through`` contains the products of each row of o with every dy. ``most_faults``:
    the largest number of faults.
    """
    model = reader.model

    saved = forward, lse, through

    def predict(base: Choices) -> Match:
        return match_backward(reader, seen, backward_pass(model, base, *saved))

    def keep(base: Choices) -> None:
        keep_backward(model, base, *saved)
        reader.judged.clear()
        one = predict(base)
        reader.judged.update({name: (x, one) for name, x in one.ours.items()})

    bases = [("", model.right)]
    if choices is not model.right and forward_is_whole:
        gradient = match_backward(reader, seen, gradient_of_forward(model, choices))
        # With keys of a wrong head, dk and dv are not those of the heads that the forward pass read.
        own_heads = all(choices[x] is model.right[x] for x in ("k.head", "v.head"))
        if gradient.whole and own_heads:
            return Explanation((), True, gradient, (), GRADIENT)
        same = carried(model.right, choices)
        if any(x is not model.right[slot] for slot, x in same.of.items()):
            match = predict(same)
            if match.whole:
                return Explanation((), True, match, (), SAME)
            bases.append((SAME, same))
    found: list[tuple[Explanation, float]] = []
    # Single faults are tried under every base before the longer search for several.
    sizes = (1, most_faults) if len(bases) > 1 and most_faults > 1 else (most_faults,)
    tried = [(size, number) for size in sizes for number in range(len(bases))]
    for size, number in tried:
        words, base = bases[number]
        first = of_empty_rows(reader, base, lse, predict)
        base = composed(base, first)
        if size > 1 and any(one.whole for one, _ in found):
            break
        reader.search_from(base)
        one = explain(
            model,
            keep,
            predict,
            base,
            lambda now, match, last: backward_faults(
                reader, seen, saved, now, match, last, of_way=reader.in_another_way(now)
            ),
            reader.part(1 / (len(bases) - number)),
            lambda now, match: backward_starts(reader, seen, saved, now, match),
            size,
            known,
            size == sizes[0],
            reader.places("backward").blocks,
        )
        others = tuple((*first, *faults) for faults in one.others)
        one = Explanation((*first, *one.faults), one.whole, one.match, others, words)
        found.append((one, one.match.gain(found[0][0].match) if found else 0.0))
        if one.whole and len(one.faults) <= 1:
            return one  # no explanation under another base is simpler
    return max(found, key=lambda x: (x[0].whole, -len(x[0].faults), x[1]))[0]


def of_empty_rows(
    reader: Reader, base: Choices, lse: Array, predict: Callable[[Choices], Match]
) -> tuple[Fault, ...]:
    """Return the fault of taking an lse of -inf for 0, if that agrees better; it shows only if a row wrongly sees no key."""
    if not np.isneginf(lse).any():
        return ()
    kinds, places = reader.kinds("backward"), reader.places("backward")
    kind = next(one for one in kinds if dict(one.changes).get("lse") == ZERO_IF_EMPTY)
    fault = Fault("backward", kind, places.blocks[0])
    return (fault,) if predict(fault.applied(base)).score > predict(base).score else ()


def match_backward(reader: Reader, seen: Seen, ours: Gradients) -> Match:
    assert seen.p is not None
    was = {name: getattr(seen, of) for name, of in GRADIENTS_READ.items()}
    every = {name: getattr(ours, of) for name, of in GRADIENTS_READ.items()}
    arrays = {name: x for name, x in every.items() if x is not None and was[name] is not None}
    equal = {}
    parts: Array | None = None
    for name, x in arrays.items():
        known = reader.judged.get(name)
        if (
            known is not None
            and known[0] is x
            and (name == "P" or "P" in reader.judged and reader.judged["P"][0] is arrays["P"])
        ):
            equal[name] = known[1].equal[name]
        elif name == "P":
            equal[name] = near(seen.p, x, np.abs(x), reader.tolerance)
        elif name == "dsinks":
            equal[name] = equal_sinks(reader, seen, x, arrays["P"])
        else:
            if parts is None:
                largest = reader.largest + np.abs(seen.delta)[:, None, :, :, None]
                parts = np.abs(arrays["P"]) * largest
            equal[name] = near(was[name], x, np.maximum(np.abs(x), parts), reader.tolerance)
    known = reader.judged.get("P")
    if known is not None and known[0] is arrays["P"]:
        same = known[1]
        return Match(equal, lambda: arrays, lambda: same.alike)
    seen_p = seen.p
    return Match(equal, lambda: arrays, lambda: {"P": alike(seen_p, arrays["P"], reader.tolerance)})


def equal_sinks(reader: Reader, seen: Seen, ours: Array, p: Array) -> Booleans:
    """Return where the predicted dsinks [a, h, sink] agree; ``p`` has the predicted weights of the backward pass."""
    weight = np.abs(1 - p.sum(axis=(1, 4)))
    size = (weight * np.abs(seen.delta)).sum(axis=2)[..., None]
    return near(np.asarray(seen.dsinks), ours, np.maximum(np.abs(ours), size), reader.tolerance)


def backward_starts(
    reader: Reader,
    seen: Seen,
    saved: tuple[Forward, Array, Array],
    choices: Choices,
    match: Match,
) -> Iterator[Sequence[Start]]:
    """Yield faults that explain one of several wrong matrices, then sets of faults that explain where a matrix is 0."""
    by_zeros = [
        starts_of(reader, "backward", choices, ours, there, only)
        for only, (ours, there) in zeros_of(seen, match).items()
        if only != "dk"
    ]
    wrong = [name for name, x in match.equal.items() if not x.all()]
    for name in wrong if len(wrong) > 1 else ():
        found = backward_faults(reader, seen, saved, choices, match, True, name)
        whole = [fault for fault, got in found if got.equal[name].all()]
        yield [(fault,) for fault in sorted(whole, key=lambda fault: fault.cost)[:MOST_STARTS]]
    yield from ([one for one in starts if len(one) == 1][:MOST_STARTS] for starts in by_zeros)
    yield from ([one for one in starts if len(one) > 1][:MOST_STARTS] for starts in by_zeros)


def zeros_of(
    seen: Seen, match: Match, choices: Choices | None = None
) -> dict[str, tuple[Booleans, Booleans]]:
    """Return the pairs that are not 0, as predicted and as observed, in a matrix of both kernels (''), of each, and in dk.

    ``choices``: if the product for dv has its own mask there, the matrix of both is dS, in which other masks show.
    """
    p, ds, of_dk = (
        (np.abs(match.ours[name]) > ZERO, np.abs(np.asarray(was)) > ZERO)
        for name, was in (("P", seen.p), ("dS of dq", seen.ds_of_dq), ("dS of dk", seen.ds_of_dk))
    )
    own = choices is not None and (choices["value_mask"] >= 0).any()
    return {"": ds if own else p, KERNELS[1]: p, KERNELS[0]: ds, "dk": of_dk}


def backward_faults(
    reader: Reader,
    seen: Seen,
    saved: tuple[Forward, Array, Array],
    choices: Choices,
    match: Match,
    last: bool,
    alone: str = "",
    of_way: bool = False,
) -> Candidates:
    """Yield faults that may explain more, each with its match.

    ``saved``: what the backward pass gets from the forward pass, as for :func:`backward_pass`. ``choices`` and
    ``match`` belong to the faults found so far. ``last``: yield only faults that may explain all that is still wrong;
    ``alone``: the one matrix in which they may explain it; ``of_way``: of these, only those that depend on the ranges that
    a kernel computes.

    What a kind changes in one block does not depend on other blocks, unless it adds shares to
    wrong rows. So one evaluation with the kind applied everywhere shows which pairs it explains. A share that is
    added to a wrong row makes two elements wrong: the one where it is missing and the one where it is added.
    """
    kinds, places = reader.kinds("backward"), reader.places("backward")

    model = reader.model
    here = shares_of_pairs(model, choices, *saved)
    wrong = {name: not x.all() for name, x in match.equal.items()}
    may_help = useful(reader, "backward", kinds, choices, zeros_of(seen, match, choices))
    for kind in itertools.takewhile(model.may_go_on, may_help):
        touched = of_interest(kind, choices, wrong, last, alone)
        if not touched or (
            last
            and (
                (of_way and not of_ranges(kind))
                or not may_reach(reader, kind, choices, match, touched)
            )
        ):
            continue
        everywhere = Fault("backward", kind, places.blocks[0])
        if last and is_loss(kind) and not in_place(reader, choices):
            # The results show shares elsewhere than in the blocks where they are lost.
            lost = (Fault("backward", kind, place) for place in (*places.blocks, *places.heads))
            yield from (
                (fault, with_kind(reader, seen, saved, fault.applied(choices))[1]) for fault in lost
            )
            continue
        of_kind = functools.partial(with_kind, reader, seen, saved, everywhere.applied(choices))
        there, got = reader.once("kind", kind, choices, of_kind)
        attempt = kept_by_place(
            attempts(reader, seen, saved, choices, (here, match), (there, got), everywhere)
        )
        if kind.slots & set(OF_ALL) or ("dsinks" in touched and len(touched) > 1):
            yield everywhere, got
            continue
        if touched == ["dsinks"]:
            yield from in_sinks(reader, kind, attempt, match, got)
            continue
        moved = {LANDING[name] for name in kind.names if name in LANDING}
        stay = [name for name in touched if name not in moved and changes(match, got, name)]
        if not stay:
            if reader.geometry.padding:  # tokens of some workers may have no padding to pass
                yield everywhere, got
            good, bad = reader.movable(kind, match, moved)
            if good.any():
                yield from reader.at_best(kind, places, good, bad, attempt, "backward", True)
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
            yield from reader.at_best(kind, places, good, bad, attempt, "backward", able=able)
        right = np.all([match.equal[name] | got.equal[name] for name in stay], axis=0)
        pairs = np.asarray((every[0] > 0) & ~every[1] & right)
        if able is None and any(pairs.sum() >= HALF * (~match.equal[name]).sum() for name in stay):
            shown = PairsShown(pairs, np.asarray(every[0] > 0), ~every[1])
            yield from reader.in_pairs("backward", kind, shown, attempt)


def may_reach(
    reader: Reader, kind: Kind, choices: Choices, match: Match, touched: Sequence[str]
) -> bool:
    """Return whether a kind that takes other slots of an operand changes every wrong pair of the matrices that it touches.

    True for other kinds. It is seen without an evaluation, which one that may not explain everything would waste.
    """
    local = kind.slots <= LOCAL_SLOTS and is_local(reader, kind, choices)
    if not (local and in_place(reader, choices)):
        return True
    applied = Fault("backward", kind, reader.places("backward").blocks[0]).applied(choices)
    now, then = (one.in_kernel(kind.only) for one in (applied, choices))
    changed = np.any(
        [np.broadcast_to(now[x] != then[x], reader.model.shape) for x in kind.slots], axis=0
    )
    return not any((~match.equal[name] & ~changed).any() for name in touched if name != "dsinks")


def in_sinks(reader: Reader, kind: Kind, attempt: Attempt, match: Match, got: Match) -> Candidates:
    """Try a kind that changes only dsinks; ``got``: the match with the kind on all workers."""
    was, now = (np.all(x.equal["dsinks"], axis=2) for x in (match, got))
    good, bad = (
        x[:, None, :, None, None] & np.ones(reader.model.shape, bool)[:, :1]
        for x in (now & ~was, was & ~now)
    )
    if good.any():
        yield from reader.at_best(kind, reader.workers, good, bad, attempt, "backward")


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
    reader: Reader,
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
    local = is_local(reader, kind, choices)
    if local and "dsinks" not in matrices(kind) and in_place(reader, everywhere.applied(choices)):
        return functools.partial(in_pairs_of, reader, seen, without[1], applied[1])
    there = applied[0] if local else None
    return functools.partial(in_part, reader, seen, saved, choices, without[0], there)


def kept_by_place(attempt: Attempt) -> Attempt:
    """Return ``attempt`` for faults of one kind, with one prediction for each place."""
    known: dict[str, Match] = {}

    def once(fault: Fault) -> Match:
        if fault.place.words not in known:
            known[fault.place.words] = attempt(fault)
        return known[fault.place.words]

    return once


def with_kind(
    reader: Reader, seen: Seen, saved: tuple[Forward, Array, Array], choices: Choices
) -> tuple[Shares, Match]:
    """Return the shares of the gradients with these choices, and the match."""
    shares = shares_of_pairs(reader.model, choices, *saved)
    return shares, match_backward(
        reader, seen, gradients_of_shares(reader.model, choices, shares, *saved)
    )


def is_local(reader: Reader, kind: Kind, choices: Choices) -> bool:
    """Return whether a kind changes what a pair adds to the gradients only by being at this pair.

    ``choices`` are those with the faults found so far.
    """
    if "delta" in kind.slots and len(kind.slots) > 1:
        return False  # delta adds up the other pairs, which such a kind changes as well
    slots = OF_WHOLE if kind.names <= OF_GRADIENTS else (*OF_WHOLE, *OF_ROW)
    right = reader.model.right
    return all(choices.in_kernel(kernel)[x] is right[x] for kernel in KERNELS for x in slots)


def in_place(reader: Reader, choices: Choices) -> bool:
    """Return whether every gradient adds a pair's share only to the rows where it belongs."""
    right = reader.model.right.several(OF_STORING)
    return not choices["exchanged"].any() and all(
        all(map(is_, choices.in_kernel(kernel).several(OF_STORING), right)) for kernel in KERNELS
    )


def in_pairs_of(
    reader: Reader, seen: Seen, without: Match, everywhere: Match, fault: Fault
) -> Match:
    """Return the match with a fault whose share at each pair is known.

    ``without``: the match without the fault, which holds outside its place. ``everywhere``: the match with the same
    mistake at all pairs, which holds in its place.
    """
    reader.model.evaluations += 1
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
        equal["dsinks"] = equal_sinks(reader, seen, without.ours["dsinks"], p)
    found = Match(
        equal, predicted, lambda: alike_in_part(reader, seen, without, everywhere, table, found)
    )
    return found


def alike_in_part(
    reader: Reader, seen: Seen, without: Match, everywhere: Match, table: Booleans, found: Match
) -> dict[str, Booleans]:
    """Return which halves of rows agree up to a factor in the match of :func:`in_pairs_of`."""
    if everywhere.ours["P"] is without.ours["P"]:
        return without.alike
    if table.shape[4] == 1:
        return {"P": np.where(table, everywhere.alike["P"], without.alike["P"])}
    assert seen.p is not None
    return {"P": alike(seen.p, found.ours["P"], reader.tolerance)}


def in_part(
    reader: Reader,
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
        return with_kind(reader, seen, saved, applied)[1]
    reader.model.evaluations += 1
    table = fault.place.table
    shares = [
        was if was is None or now is None or was is now else np.where(table, now, was)
        for was, now in zip(here, there, strict=True)
    ]
    gradients = gradients_of_shares(reader.model, applied, Shares._make(shares), *saved)
    return match_backward(reader, seen, gradients)
