"""Explain the backward pass of one problem: what it computes apart from its faults, and these faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ringspec.conformance.readout.faults.choices import LSES, Choices, components
from ringspec.conformance.readout.faults.effects import STORED
from ringspec.conformance.readout.faults.kinds import Fault
from ringspec.conformance.readout.model.backward import backward_pass, gradient_of_forward
from ringspec.conformance.readout.model.forward import Forward, forward_pass
from ringspec.conformance.readout.model.keeping import keep_backward
from ringspec.conformance.readout.model.scores import OF_DROP
from ringspec.conformance.readout.problem.pairs import Seen
from ringspec.conformance.readout.reading import GRADIENT, SAME, SAVED
from ringspec.conformance.readout.search.backward_match import match_backward, zeros_of
from ringspec.conformance.readout.search.backward_trials import backward_faults
from ringspec.conformance.readout.search.context import SearchContext
from ringspec.conformance.readout.search.fault_sets import MOST_FAULTS, composed, explain
from ringspec.conformance.readout.search.matches import Explanation, Match
from ringspec.conformance.readout.search.starts import Start, starts_of
from ringspec.problem.model import Array

ZERO_IF_EMPTY = LSES.index("zero if empty")
MOST_STARTS = 4  # of a kind of evidence
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


def explain_backward(
    context: SearchContext,
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
    model = context.model
    forward = forward_pass(model, choices)
    returned = forward.lse if seen.lse is None else seen.lse, seen.through

    def as_returned() -> Explanation:
        return backward_from(
            context, seen, choices, forward_is_whole, forward, *returned, known=known
        )

    if not forward_is_whole or all(choices[x] is model.right[x] for x in STORED):
        return as_returned()
    # The backward pass may use o and lse as they were before they were stored wrongly.
    before = choices.taking(STORED, model.right)
    if all(x is model.right[slot] for slot, x in before.of.items()):
        before = model.right
    kept = forward_pass(model, before)

    def as_kept(most_faults: int) -> Explanation:
        found = backward_from(
            context, seen, before, True, kept, kept.lse, kept.through, most_faults
        )
        return dataclasses.replace(found, base=SAVED, whole=found.whole and not found.base)

    plain, plain_kept = (
        match_backward(context, seen, backward_pass(model, model.right, *saved))
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
    context: SearchContext,
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
    model = context.model

    saved = forward, lse, through

    def predict(base: Choices) -> Match:
        return match_backward(context, seen, backward_pass(model, base, *saved))

    def keep(base: Choices) -> None:
        keep_backward(model, base, *saved)
        context.judged.clear()
        one = predict(base)
        context.judged.update({name: (x, one) for name, x in one.ours.items()})

    bases = [("", model.right)]
    if choices is not model.right and forward_is_whole:
        gradient = match_backward(context, seen, gradient_of_forward(model, choices))
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
        first = of_empty_rows(context, base, lse, predict)
        base = composed(base, first)
        if size > 1 and any(one.whole for one, _ in found):
            break
        context.search_from(base)
        one = explain(
            model,
            keep,
            predict,
            base,
            lambda now, match, last: backward_faults(
                context, seen, saved, now, match, last, of_way=context.in_another_way(now)
            ),
            context.part(1 / (len(bases) - number)),
            lambda now, match: backward_starts(context, seen, saved, now, match),
            size,
            known,
            size == sizes[0],
            context.places("backward").blocks,
        )
        others = tuple((*first, *faults) for faults in one.others)
        one = Explanation((*first, *one.faults), one.whole, one.match, others, words)
        found.append((one, one.match.gain(found[0][0].match) if found else 0.0))
        if one.whole and len(one.faults) <= 1:
            return one  # no explanation under another base is simpler
    return max(found, key=lambda x: (x[0].whole, -len(x[0].faults), x[1]))[0]


def of_empty_rows(
    context: SearchContext, base: Choices, lse: Array, predict: Callable[[Choices], Match]
) -> tuple[Fault, ...]:
    """Return the fault of taking an lse of -inf for 0, if that agrees better; it shows only if a row wrongly sees no key."""
    if not np.isneginf(lse).any():
        return ()
    kinds, places = context.kinds("backward"), context.places("backward")
    kind = next(one for one in kinds if dict(one.changes).get("lse") == ZERO_IF_EMPTY)
    fault = Fault("backward", kind, places.blocks[0])
    return (fault,) if predict(fault.applied(base)).score > predict(base).score else ()


def backward_starts(
    context: SearchContext,
    seen: Seen,
    saved: tuple[Forward, Array, Array],
    choices: Choices,
    match: Match,
) -> Iterator[Sequence[Start]]:
    """Yield faults that explain one of several wrong matrices, then sets of faults that explain where a matrix is 0."""
    by_zeros = [
        starts_of(context, "backward", choices, ours, there, only)
        for only, (ours, there) in zeros_of(seen, match).items()
        if only != "dk"
    ]
    wrong = [name for name, x in match.equal.items() if not x.all()]
    for name in wrong if len(wrong) > 1 else ():
        found = backward_faults(context, seen, saved, choices, match, True, name)
        whole = [fault for fault, got in found if got.equal[name].all()]
        yield [(fault,) for fault in sorted(whole, key=lambda fault: fault.cost)[:MOST_STARTS]]
    yield from ([one for one in starts if len(one) == 1][:MOST_STARTS] for starts in by_zeros)
    yield from ([one for one in starts if len(one) > 1][:MOST_STARTS] for starts in by_zeros)
