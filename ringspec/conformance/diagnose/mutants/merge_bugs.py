"""Partial results that are merged with wrong weights, or in a way that overflows.

A bug replaces one or a few of the functions that compute a ring; these functions are called pieces and are listed in
:class:`~ringspec.conformance.diagnose.mutants.hooks.Hooks`. A softmax state holds m, l and o: the running maximum, the
sum of exponentials, and the output before the division by l. It is empty if no key was visible. ``running`` is the
state of all earlier blocks, ``part`` that of the new one.
"""

from __future__ import annotations

import math

import numpy as np

from ringspec.conformance.diagnose.mutants.conditions import attends, forward, merges, ring, when
from ringspec.conformance.diagnose.mutants.hooks import At, Hooks, merged
from ringspec.conformance.diagnose.mutants.mutant import guise, mutant
from ringspec.conformance.target.protocol import Call
from ringspec.formats import round_to
from ringspec.problem.model import Array
from ringspec.recipes import Recipe
from ringspec.spec.online_softmax import SoftmaxState, finish

LN2 = math.log(2.0)


def normal(state: SoftmaxState, factor: float = 1.0) -> SoftmaxState:
    """Normalise a state to (m = lse * factor, l = 1, o / l); empty rows keep l = 0."""
    empty = state.l == 0
    o = state.o / np.where(empty, 1.0, state.l)[..., None]
    return SoftmaxState(state.lse * factor, np.where(empty, 0.0, 1.0), o)


def with_weights(
    a: SoftmaxState, b: SoftmaxState, c_a: Array, c_b: Array, m: Array, recipe: Recipe
) -> SoftmaxState:
    """Combine two states as c_a * a + c_b * b, with running maximum ``m``."""
    l = round_to(c_a * a.l + c_b * b.l, recipe.statistics)
    return SoftmaxState(m, l, c_a[..., None] * a.o + c_b[..., None] * b.o)


def weights(a: SoftmaxState, b: SoftmaxState) -> tuple[Array, Array, Array]:
    m = np.maximum(a.m, b.m)
    shift = np.where(np.isneginf(m), 0.0, m)
    return np.exp(a.m - shift), np.exp(b.m - shift), m


def base_2_part(at: At, part: SoftmaxState, recipe: Recipe) -> SoftmaxState:
    return normal(part, 1 / LN2)


def natural_at_last(
    worker: int, running: SoftmaxState, sinks: Array | None, recipe: Recipe
) -> tuple[Array, Array]:
    return finish(normal(running, LN2), sinks, recipe)


def base_2_weights_of_o(
    at: At, running: SoftmaxState, part: SoftmaxState, recipe: Recipe
) -> SoftmaxState:
    """Merge lse correctly, but weight o by exp(lse / ln 2)."""
    right = merged(at, running, part, recipe)
    a, b = normal(running, 1 / LN2), normal(part, 1 / LN2)
    c_a, c_b, _ = weights(a, b)
    total = np.where(c_a * a.l + c_b * b.l == 0, 1.0, c_a * a.l + c_b * b.l)
    o = (c_a * a.l / total)[..., None] * a.o + (c_b * b.l / total)[..., None] * b.o
    return SoftmaxState(right.m, right.l, o * right.l[..., None])


def powers_of_two(
    at: At, running: SoftmaxState, part: SoftmaxState, recipe: Recipe
) -> SoftmaxState:
    """Merge with the weights 2**lse instead of exp(lse)."""
    return normal(merged(at, normal(running, LN2), normal(part, LN2), recipe), 1 / LN2)


def not_rescaled(at: At, running: SoftmaxState, part: SoftmaxState, recipe: Recipe) -> SoftmaxState:
    _, c_b, m = weights(running, part)
    return with_weights(running, part, np.ones(m.shape), c_b, m, recipe)


def exchanged(at: At, running: SoftmaxState, part: SoftmaxState, recipe: Recipe) -> SoftmaxState:
    if not running.l.any():
        return merged(at, running, part, recipe)
    c_a, c_b, m = weights(running, part)
    return with_weights(running, part, c_b, c_a, m, recipe)


def weights_of_o_exchanged(
    at: At, running: SoftmaxState, part: SoftmaxState, recipe: Recipe
) -> SoftmaxState:
    """Merge lse correctly, but swap the two weights of o."""
    right = merged(at, running, part, recipe)
    if not running.l.any():
        return right
    a, b = normal(running), normal(part)
    c_a, c_b, _ = weights(a, b)
    total = np.where(c_a * a.l + c_b * b.l == 0, 1.0, c_a * a.l + c_b * b.l)
    o = (c_b * b.l / total)[..., None] * a.o + (c_a * a.l / total)[..., None] * b.o
    return SoftmaxState(right.m, right.l, o * right.l[..., None])


def equal_weights(
    at: At, running: SoftmaxState, part: SoftmaxState, recipe: Recipe
) -> SoftmaxState:
    """Merge lse correctly, but make o the mean over the blocks."""
    right = merged(at, running, part, recipe)
    a, b = normal(running), normal(part)
    mean = a.o + (b.o - a.o) / (at.step + 1)
    return SoftmaxState(right.m, right.l, mean * right.l[..., None])


def already_normal(
    at: At, running: SoftmaxState, part: SoftmaxState, recipe: Recipe
) -> SoftmaxState:
    """Merge the o of the new block after dividing it by l, although the result is divided again at the end."""
    return merged(at, running, SoftmaxState(part.m, part.l, normal(part).o), recipe)


def exponentials_of_lse(
    at: At, running: SoftmaxState, part: SoftmaxState, recipe: Recipe
) -> SoftmaxState:
    """Merge with exp(lse) itself, which overflows to infinity or underflows to 0 if lse is far from 0."""
    a, b = normal(running), normal(part)
    e_a, e_b = (round_to(np.exp(x.m), recipe.statistics) for x in (a, b))
    total = round_to(e_a + e_b, recipe.statistics)
    never = (running.l == 0) & (part.l == 0)
    share = np.where(never, 1.0, total)
    o = (e_a / share)[..., None] * a.o + (e_b / share)[..., None] * b.o
    return SoftmaxState(np.log(total), np.where(never, 0.0, 1.0), o)


def log_of_one_plus(
    at: At, running: SoftmaxState, part: SoftmaxState, recipe: Recipe
) -> SoftmaxState:
    """Merge with lse + log(1 + exp(block lse - lse)), from the second block on."""
    if not running.l.any():
        return merged(at, running, part, recipe)
    a, b = normal(running), normal(part)
    gap = np.where(np.isneginf(b.m), -np.inf, b.m - a.m)
    lse = a.m + np.log(round_to(1.0 + round_to(np.exp(gap), recipe.statistics), recipe.statistics))
    o = np.exp(a.m - lse)[..., None] * a.o + np.exp(b.m - lse)[..., None] * b.o
    return SoftmaxState(lse, np.where((a.l == 0) & (b.l == 0), 0.0, 1.0), o)


def unguarded(at: At, running: SoftmaxState, part: SoftmaxState, recipe: Recipe) -> SoftmaxState:
    """Merge without a guard against (-inf) - (-inf), which occurs where both states are empty."""
    m = np.maximum(running.m, part.m)
    return with_weights(running, part, np.exp(running.m - m), np.exp(part.m - m), m, recipe)


def o_unguarded(at: At, running: SoftmaxState, part: SoftmaxState, recipe: Recipe) -> SoftmaxState:
    """Merge lse correctly, but give NaN in o where both states are empty."""
    right = merged(at, running, part, recipe)
    both = ((running.l == 0) & (part.l == 0))[..., None]
    spoilt = both | np.isnan(running.o) | np.isnan(part.o)
    return SoftmaxState(right.m, right.l, np.where(spoilt, np.nan, right.o))


def last_worker_unnormalised(call: Call, recipe: Recipe) -> Hooks:
    def finished(
        worker: int, running: SoftmaxState, sinks: Array | None, recipe: Recipe
    ) -> tuple[Array, Array]:
        o, lse = finish(running, sinks, recipe)
        if worker == call.workers - 1:
            o = round_to(running.o, recipe.outputs)
        return o, lse

    return Hooks(finish=finished)


BUGS = (
    mutant(
        "log2-lse",
        "a base-2 lse is merged as a natural one",
        "The kernel returns lse / ln 2, and the merge takes its natural exponential. This "
        "exaggerates the differences between the weights. If all parts have equal weight, o is "
        "correct; with a single part only lse is wrong.",
        "vllm-project/vllm/pull/47079", "flashinfer-ai/flashinfer/issues/2113",
        "sgl-project/sglang/issues/40903",
        flags=("log2-lse",),
        applies=when(attends, forward),
        part=base_2_part,
        guises=(
            guise(
                "the merged lse is converted back to natural",
                when(ring(1), forward),
                part=base_2_part,
                finish=natural_at_last,
            ),
            guise(
                "only o is wrong; lse is merged correctly",
                when(merges, forward),
                merge=base_2_weights_of_o,
            ),
        ),
    ),
    mutant(
        "natural-lse-as-log2",
        "a natural lse is merged with weights 2**lse",
        "The merge expects base 2 and gets a natural lse. This reduces the differences between "
        "the weights.",
        "sgl-project/sglang/pull/33065",
        flags=("natural-lse-as-log2",),
        applies=when(merges, forward),
        merge=powers_of_two,
    ),
    mutant(
        "running-part-not-rescaled",
        "the running o and l are not rescaled when the maximum rises",
        "The factor exp(m_old - m_new) is not applied to what was accumulated earlier. Rows "
        "whose maximum is in their first block are correct.",
        applies=when(merges, forward),
        merge=not_rescaled,
    ),
    mutant(
        "merge-weights-exchanged",
        "the two weights of a merge are swapped",
        "The running result gets the weight of the new block, and the new block that of the "
        "running result. Equal maxima hide the bug.",
        applies=when(merges, forward),
        merge=exchanged,
        guises=(guise("lse is correct", when(merges, forward), merge=weights_of_o_exchanged),),
    ),
    mutant(
        "merge-averages",
        "partial results are averaged",
        "o is the plain mean over the blocks, whatever their lse; lse itself is correct.",
        applies=when(merges, forward),
        merge=equal_weights,
    ),
    mutant(
        "normalised-part-as-sum",
        "a normalised block result is merged as if it were unnormalised",
        "The block result has already been divided by its softmax sum, and is divided again "
        "after the merge.",
        applies=when(attends, forward),
        merge=already_normal,
    ),
    mutant(
        "merge-overflow",
        "the merge computes exp(lse), which overflows",
        "In float32, exp(lse) overflows for an lse above about 88 and underflows below about "
        "-103; in between the merge is correct.",
        "NVIDIA/TransformerEngine/pull/716", "SHI-Labs/NATTEN/pull/202",
        flags=("merge-overflow",),
        applies=when(merges, forward),
        merge=exponentials_of_lse,
    ),
    mutant(
        "merge-overflow-of-difference",
        "the merge computes exp(block lse - running lse), which overflows",
        "In float32, log(1 + exp(x)) is infinite if the lse of the new block exceeds the running "
        "lse by more than about 88.",
        "zhuzilin/ring-flash-attention/pull/30",
        flags=("merge-overflow",),
        applies=when(merges, forward),
        merge=log_of_one_plus,
    ),
    mutant(
        "empty-merge-nan",
        "merging two empty parts gives NaN",
        "The merge computes (-inf) - (-inf) for a row that has no visible key in either part.",
        "vllm-project/vllm/pull/39148", "flashinfer-ai/flashinfer/issues/4051",
        flags=("empty-merge-nan",),
        applies=when(merges, forward),
        merge=unguarded,
        guises=(guise("lse is correct", when(merges, forward), merge=o_unguarded),),
    ),
    mutant(
        "last-worker-unnormalised",
        "the last worker does not divide o by the softmax sum",
        "On this worker the loop ends in a different code path. A test that checks only the "
        "first worker passes.",
        applies=when(attends, forward),
        hooks=last_worker_unnormalised,
    ),
)  # fmt: skip
