"""Sinks that are ignored, counted once per block, or left out of the maximum, the lse or the gradient.

A bug replaces one or a few of the functions that compute a ring; these functions are called pieces and are listed in
:class:`~ringspec.conformance.diagnose.mutants.hooks.Hooks`. A sink is a logit without a key: it takes part in the
softmax and contributes nothing to o.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ringspec.conformance.diagnose.mutants.conditions import (
    attends,
    backward,
    forward,
    ring,
    tensor,
    when,
)
from ringspec.conformance.diagnose.mutants.hooks import At, Hooks, sink_share
from ringspec.conformance.diagnose.mutants.mutant import guise, mutant
from ringspec.conformance.target.protocol import Call
from ringspec.formats import round_to
from ringspec.problem.model import Array, Terms
from ringspec.recipes import Recipe
from ringspec.spec.online_softmax import SoftmaxState, finish


def no_sinks_in_forward(phase: str, terms: Terms) -> Terms:
    return dataclasses.replace(terms, sinks=None) if phase == "forward" else terms


def nothing(worker: int, sinks: Array, lse: Array, delta: Array) -> Array:
    return np.zeros(sinks.shape)


def with_sinks(state: SoftmaxState, sinks: Array) -> SoftmaxState:
    """Add the sinks to the softmax sum of a block."""
    m = np.maximum(state.m, sinks.max(axis=1)[None, :, None])
    c = np.exp(state.m - m)
    sink_sum = np.exp(sinks[None, :, None, :] - m[..., None]).sum(axis=3)
    return SoftmaxState(m, c * state.l + sink_sum, c[..., None] * state.o)


def sinks_in_every_block(call: Call, recipe: Recipe) -> Hooks:
    sinks = sinks_of(call)

    def part(at: At, state: SoftmaxState, recipe: Recipe) -> SoftmaxState:
        return with_sinks(state, sinks)

    def finished(
        worker: int, running: SoftmaxState, sinks: Array | None, recipe: Recipe
    ) -> tuple[Array, Array]:
        return finish(running, None, recipe)

    return Hooks(part=part, finish=finished)


def sinks_of(call: Call) -> Array:
    return np.asarray(call.worker("sinks", 0), dtype=np.float64)


def sinks_outside_maximum(
    worker: int, running: SoftmaxState, sinks: Array | None, recipe: Recipe
) -> tuple[Array, Array]:
    if sinks is None:
        return finish(running, None, recipe)
    e = np.exp(sinks[None, :, None, :] - running.m[..., None])
    l = round_to(running.l + round_to(e, recipe.statistics).sum(axis=3), recipe.statistics)
    o = round_to(running.o / l[..., None], recipe.outputs)
    return o, round_to(running.m + np.log(l), recipe.lse)


def lse_without_sinks(
    worker: int, running: SoftmaxState, sinks: Array | None, recipe: Recipe
) -> tuple[Array, Array]:
    o, _ = finish(running, sinks, recipe)
    return o, finish(running, None, recipe)[1]


def first_worker_alone(worker: int, sinks: Array, lse: Array, delta: Array) -> Array:
    share = sink_share(worker, sinks, lse, delta)
    return share if worker == 0 else np.zeros(share.shape)


def other_sign(worker: int, sinks: Array, lse: Array, delta: Array) -> Array:
    return -sink_share(worker, sinks, lse, delta)


def scaled_sinks(phase: str, terms: Terms) -> Terms:
    if terms.sinks is None:
        return terms
    return dataclasses.replace(terms, sinks=terms.sinks * terms.scale)


def first_of_several(phase: str, terms: Terms) -> Terms:
    if terms.sinks is None or phase == "backward":
        return terms
    return dataclasses.replace(terms, sinks=terms.sinks[:, :1])


def of_first_head(phase: str, terms: Terms) -> Terms:
    if terms.sinks is None:
        return terms
    return dataclasses.replace(terms, sinks=np.repeat(terms.sinks[:1], terms.heads, axis=0))


def of_first_head_in_forward(phase: str, terms: Terms) -> Terms:
    return of_first_head(phase, terms) if phase == "forward" else terms


SINKS = when(ring(1), tensor("sinks"))

BUGS = (
    mutant(
        "sink-dropped",
        "the sinks are ignored",
        "The ring calls a kernel for plain softmax: sinks get no weight, and their gradient is "
        "0. Sinks far below the scores hide the bug.",
        "NVIDIA/TransformerEngine/pull/3551",
        flags=("sink-dropped",),
        applies=SINKS,
        terms=no_sinks_in_forward,
        sink_share=nothing,
    ),
    mutant(
        "sink-per-block",
        "the sinks are counted once for each block",
        "Each ring step adds the sinks to its own softmax sum, so a row counts them W times. "
        "With one worker the bug has no effect.",
        flags=("sink-per-block",),
        applies=when(ring(2), tensor("sinks"), forward),
        hooks=sinks_in_every_block,
    ),
    mutant(
        "sink-outside-maximum",
        "the row maximum ignores the sinks",
        "A large sink overflows, and a row without visible keys is NaN.",
        "Dao-AILab/flash-attention/pull/2752",
        flags=("sink-outside-maximum",),
        applies=when(SINKS, forward),
        finish=sinks_outside_maximum,
    ),
    mutant(
        "lse-without-sinks",
        "lse does not include the sinks",
        "o is correct. In the backward pass p = exp(s - lse) sums to 1 over the keys, as if "
        "there were no sinks.",
        flags=("sink-dropped",),
        applies=when(SINKS, forward),
        finish=lse_without_sinks,
    ),
    mutant(
        "sink-gradient-local",
        "the gradient of the sinks covers the first worker's rows only",
        "The contributions of the other workers are not added.",
        "NVIDIA/Megatron-LM/issues/7452", "NVIDIA/Megatron-LM/pull/7530",
        flags=("sink-gradient-local",),
        applies=when(ring(2), tensor("sinks"), backward),
        sink_share=first_worker_alone,
    ),
    mutant(
        "sink-gradient-sign",
        "the gradient of the sinks has the wrong sign",
        "dsinks is the sum of p * delta instead of -p * delta, where p is the weight of the "
        "sink. All other results are correct.",
        flags=("sink-gradient-local",),
        applies=when(SINKS, backward),
        sink_share=other_sign,
    ),
    mutant(
        "sink-scaled",
        "the sinks are multiplied by the scale",
        "They are treated as scores that have not been scaled yet. A scale of 1 hides the bug.",
        flags=("sink-dropped",),
        applies=SINKS,
        terms=scaled_sinks,
    ),
    mutant(
        "first-sink-alone",
        "only the first of several sinks is counted",
        "One sink per head hides the bug.",
        flags=("sink-dropped",),
        applies=when(SINKS, forward, lambda call: call.worker("sinks", 0).shape[1] > 1),
        terms=first_of_several,
    ),
    mutant(
        "sinks-of-first-head",
        "all heads use the sinks of the first head",
        "Sinks that are equal in all heads hide the bug.",
        flags=("sink-dropped",),
        applies=when(SINKS, attends),
        terms=of_first_head,
        guises=(
            guise("in the forward pass only", when(SINKS, forward), terms=of_first_head_in_forward),
        ),
    ),
)  # fmt: skip
