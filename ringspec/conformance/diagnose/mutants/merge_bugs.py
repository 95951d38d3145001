"""Partial results that are merged with wrong weights, or in a way that overflows."""

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
    """The state as (o, lse), with lse times a factor; the empty state as it is."""
    empty = state.l == 0
    o = state.o / np.where(empty, 1.0, state.l)[..., None]
    return SoftmaxState(state.lse * factor, np.where(empty, 0.0, 1.0), o)


def with_weights(
    a: SoftmaxState, b: SoftmaxState, c_a: Array, c_b: Array, m: Array, recipe: Recipe
) -> SoftmaxState:
    """c_a a + c_b b, on the running maximum m."""
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
    """lse is merged rightly; o takes the natural exponentials of lse / ln 2 for weights."""
    right = merged(at, running, part, recipe)
    a, b = normal(running, 1 / LN2), normal(part, 1 / LN2)
    c_a, c_b, _ = weights(a, b)
    total = np.where(c_a * a.l + c_b * b.l == 0, 1.0, c_a * a.l + c_b * b.l)
    o = (c_a * a.l / total)[..., None] * a.o + (c_b * b.l / total)[..., None] * b.o
    return SoftmaxState(right.m, right.l, o * right.l[..., None])


def powers_of_two(
    at: At, running: SoftmaxState, part: SoftmaxState, recipe: Recipe
) -> SoftmaxState:
    """Weights 2**lse: natural exponentials of lse * ln 2."""
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
    """lse is right."""
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
    """o is the mean over the blocks; lse is right."""
    right = merged(at, running, part, recipe)
    a, b = normal(running), normal(part)
    mean = a.o + (b.o - a.o) / (at.step + 1)
    return SoftmaxState(right.m, right.l, mean * right.l[..., None])


def already_normal(
    at: At, running: SoftmaxState, part: SoftmaxState, recipe: Recipe
) -> SoftmaxState:
    """o of the block is normalised, and is taken for the sum that belongs to l."""
    return merged(at, running, SoftmaxState(part.m, part.l, normal(part).o), recipe)


def exponentials_of_lse(
    at: At, running: SoftmaxState, part: SoftmaxState, recipe: Recipe
) -> SoftmaxState:
    """exp(lse) as it is: infinite beyond the range of the statistics, 0 below it."""
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
    """lse + log(1 + exp(block lse - lse)), after the first block."""
    if not running.l.any():
        return merged(at, running, part, recipe)
    a, b = normal(running), normal(part)
    gap = np.where(np.isneginf(b.m), -np.inf, b.m - a.m)
    lse = a.m + np.log(round_to(1.0 + round_to(np.exp(gap), recipe.statistics), recipe.statistics))
    o = np.exp(a.m - lse)[..., None] * a.o + np.exp(b.m - lse)[..., None] * b.o
    return SoftmaxState(lse, np.where((a.l == 0) & (b.l == 0), 0.0, 1.0), o)


def unguarded(at: At, running: SoftmaxState, part: SoftmaxState, recipe: Recipe) -> SoftmaxState:
    """(-inf) - (-inf) where both are empty."""
    m = np.maximum(running.m, part.m)
    return with_weights(running, part, np.exp(running.m - m), np.exp(part.m - m), m, recipe)


def o_unguarded(at: At, running: SoftmaxState, part: SoftmaxState, recipe: Recipe) -> SoftmaxState:
    """The weights of o take (-inf) - (-inf); lse is -inf, as it should be."""
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
        "The kernel returns lse / ln 2, and the merge takes exp of it, which sharpens the weights "
        "of the parts. Parts of equal weight hide it in o; with a single part only lse shows it.",
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
        "The merge expects base 2 and gets a natural lse, which flattens the weights of the parts.",
        "sgl-project/sglang/pull/33065",
        flags=("natural-lse-as-log2",),
        applies=when(merges, forward),
        merge=powers_of_two,
    ),
    mutant(
        "running-part-not-rescaled",
        "the running o and l are not rescaled when the maximum rises",
        "The factor exp(m_old - m_new) is not applied to what was accumulated earlier. Rows whose "
        "maximum is in their first block are right.",
        applies=when(merges, forward),
        merge=not_rescaled,
    ),
    mutant(
        "merge-weights-exchanged",
        "the two weights of a merge are swapped",
        "The running part gets the weight of the block, and the block that of the running part. Equal "
        "maxima hide it.",
        applies=when(merges, forward),
        merge=exchanged,
        guises=(guise("lse is right", when(merges, forward), merge=weights_of_o_exchanged),),
    ),
    mutant(
        "merge-averages",
        "partial results are averaged",
        "o is the plain mean over the blocks, whatever their lse; lse itself is right.",
        applies=when(merges, forward),
        merge=equal_weights,
    ),
    mutant(
        "normalised-part-as-sum",
        "a normalised block result is merged as an unnormalised one",
        "The block result is already divided by its sum, and the merge divides it again.",
        applies=when(attends, forward),
        merge=already_normal,
    ),
    mutant(
        "merge-overflow",
        "a merge takes exp of lse itself",
        "exp(lse) overflows for scores of several hundred and underflows below about -100; in "
        "between the merge is right.",
        "NVIDIA/TransformerEngine/pull/716", "SHI-Labs/NATTEN/pull/202",
        flags=("merge-overflow",),
        applies=when(merges, forward),
        merge=exponentials_of_lse,
    ),
    mutant(
        "merge-overflow-of-difference",
        "a merge takes exp(block lse - lse), which overflows",
        "log(1 + exp(x)) is infinite where the lse of the new block exceeds the running lse by "
        "more than the exponent range.",
        "zhuzilin/ring-flash-attention/pull/30",
        flags=("merge-overflow",),
        applies=when(merges, forward),
        merge=log_of_one_plus,
    ),
    mutant(
        "empty-merge-nan",
        "two empty parts are merged into NaN",
        "The merge computes (-inf) - (-inf) where neither part has seen a key for a row.",
        "vllm-project/vllm/pull/39148", "flashinfer-ai/flashinfer/issues/4051",
        flags=("empty-merge-nan",),
        applies=when(merges, forward),
        merge=unguarded,
        guises=(guise("lse is right", when(merges, forward), merge=o_unguarded),),
    ),
    mutant(
        "last-worker-unnormalised",
        "the last worker does not divide o by its sum",
        "The loop of one worker ends on another code path. A test that checks only the first "
        "worker sees nothing.",
        applies=when(attends, forward),
        hooks=last_worker_unnormalised,
    ),
)  # fmt: skip
