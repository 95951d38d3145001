"""An lse that is incomplete, in the wrong base or with the wrong order of axes, while o is correct.

A bug replaces one or a few of the functions that compute a ring; these functions are called pieces and are listed in
:class:`~ringspec.conformance.diagnose.mutants.hooks.Hooks`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from ringspec.conformance.diagnose.mutants.conditions import (
    attends,
    backward,
    forward,
    grouped,
    when,
)
from ringspec.conformance.diagnose.mutants.hooks import Hooks, Results, probabilities
from ringspec.conformance.diagnose.mutants.mutant import mutant
from ringspec.conformance.target.protocol import Call
from ringspec.problem.model import Array
from ringspec.recipes import Recipe
from ringspec.spec.online_softmax import SoftmaxState, finish
from ringspec.spec.worker import QuerySide

LN2 = math.log(2.0)


def lse_times(factor: float) -> Callable[[Results], Results]:
    def changed(results: Results) -> Results:
        if "lse" not in results:
            return results
        return results | {"lse": [x * factor for x in results["lse"]]}

    return changed


def heads_and_rows_exchanged(x: Array) -> Array:
    """Write [B, H, n] as [B, n, H] and read the memory as [B, H, n]."""
    return x.swapaxes(1, 2).reshape(x.shape)


def lse_layout(results: Results) -> Results:
    if "lse" not in results:
        return results
    return results | {"lse": [heads_and_rows_exchanged(x) for x in results["lse"]]}


def lse_read_exchanged(phase: str, side: QuerySide) -> QuerySide:
    if phase == "forward" or side.lse is None:
        return side
    lse = heads_and_rows_exchanged(side.lse)
    return dataclasses.replace(side, lse=lse)


def lse_of_first_heads(call: Call, recipe: Recipe) -> Hooks:
    """Return pieces that write lse only for the first query head of each group, and 0 for the others."""
    group = call.worker("q", 0).shape[1] // call.worker("k", 0).shape[1]

    def first_heads(results: Results) -> Results:
        if "lse" not in results:
            return results
        written = (np.arange(results["lse"][0].shape[1]) % group == 0)[None, :, None]
        return results | {"lse": [np.where(written, x, 0.0) for x in results["lse"]]}

    return Hooks(results=first_heads)


def log_alone(
    worker: int, running: SoftmaxState, sinks: Array | None, recipe: Recipe
) -> tuple[Array, Array]:
    """Finish with lse = log(l), without the maximum."""
    o, lse = finish(running, sinks, recipe)
    return o, np.where(np.isneginf(lse), lse, lse - np.where(running.l == 0, 0.0, running.m))


def read_as_base_2(s: Array, lse: Array, recipe: Recipe) -> Array:
    """Compute p = 2**(s log2(e) - lse) although lse is natural."""
    return probabilities(s, lse * LN2, recipe)


def several_heads(call: Call) -> bool:
    if call.operation == "merge":
        return bool(call.worker("parts_lse", 0).shape[2] > 1)
    return bool(call.worker("q", 0).shape[1] > 1)


BUGS = (
    mutant(
        "lse-returned-in-base-2",
        "lse is returned in base 2",
        "The kernel computes with 2**x and returns its lse without conversion. o is correct, but "
        "a caller that merges this lse as a natural one gets wrong results.",
        "lightseekorg/tokenspeed/pull/364", "meta-pytorch/attention-gym/pull/205",
        flags=("log2-lse",),
        applies=forward,
        results=lse_times(1 / LN2),
    ),
    mutant(
        "lse-rebased-twice",
        "lse is converted from base 2 to natural twice",
        "Two functions convert the base; the second one gets an lse that is already natural.",
        "sgl-project/sglang/pull/33926",
        flags=("log2-lse",),
        applies=forward,
        results=lse_times(LN2),
    ),
    mutant(
        "natural-lse-in-base-2-backward",
        "the backward pass reads a natural lse as if it were in base 2",
        "p = 2**(s log2(e) - lse), so every p is multiplied by (e / 2)**lse. The forward pass is "
        "correct.",
        "meta-pytorch/attention-gym/pull/200",
        flags=("log2-lse",),
        applies=when(attends, backward),
        probabilities=read_as_base_2,
    ),
    mutant(
        "lse-without-maximum",
        "lse is log(l), without the running maximum",
        "The running maximum is missing from the lse that is returned and that the backward pass "
        "reads; o is correct.",
        applies=when(attends, forward),
        finish=log_alone,
    ),
    mutant(
        "lse-only-first-head",
        "lse is written for the first query head of each group only",
        "o is correct for all heads. One query head per key head hides the bug.",
        "NVIDIA/cudnn-frontend/issues/1083",
        flags=("lse-only-first-head",),
        applies=when(grouped, forward),
        hooks=lse_of_first_heads,
    ),
    mutant(
        "lse-layout",
        "lse is written in the order batch, token, head",
        "The memory is read in the order batch, head, token. A single head hides the bug, and so "
        "do checks that look only for NaN.",
        "flashinfer-ai/flashinfer/pull/3838", "zhuzilin/ring-flash-attention/pull/47",
        flags=("lse-layout",),
        applies=when(several_heads, forward),
        results=lse_layout,
    ),
    mutant(
        "lse-layout-in-backward",
        "the backward pass reads lse in the order batch, token, head",
        "p = exp(s - lse) uses the lse of other rows and heads; o and lse are correct.",
        "NVIDIA/TransformerEngine/issues/1467", "zhuzilin/ring-flash-attention/pull/47",
        flags=("lse-layout",),
        applies=when(several_heads, backward),
        queries=lse_read_exchanged,
    ),
)  # fmt: skip
