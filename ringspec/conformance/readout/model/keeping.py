"""Keep what similar choices have in common, so that they are computed faster."""

from __future__ import annotations

from ringspec.conformance.readout.faults.choices import KERNELS, Choices
from ringspec.conformance.readout.model.blocks import OF_WEIGHTS, blocks
from ringspec.conformance.readout.model.forward import Forward
from ringspec.conformance.readout.model.ring import Model
from ringspec.conformance.readout.model.scores import OF_SCORES, scores_of_pairs
from ringspec.conformance.readout.model.shares import (
    OF_CORE,
    OF_DK,
    OF_DQ,
    OF_DV,
    core_of_pairs,
    shares_of_pairs,
)
from ringspec.problem.model import Array


def keep(model: Model, choices: Choices) -> None:
    """Keep the scores and blocks of these choices, so that similar choices are computed faster."""
    model.kept.clear()
    model.kept["scores"] = choices.several(OF_SCORES), scores_of_pairs(model, choices)
    model.kept["blocks"] = choices.several(OF_WEIGHTS), blocks(model, choices)


def keep_backward(model: Model, c: Choices, forward: Forward, lse: Array, products: Array) -> None:
    """Keep the results of the backward pass with these choices."""
    keep(model, c)
    given = forward, lse, products
    of_q, of_kv = (c.in_kernel(kernel) for kernel in KERNELS)
    core = core_of_pairs(model, of_q, *given)
    core_kv = core if of_kv is of_q else core_of_pairs(model, of_kv, *given)
    for kernel, x, now in zip(KERNELS, (of_q, of_kv), (core, core_kv), strict=True):
        model.kept[f"core of {kernel}"] = (*given, *x.several(OF_CORE)), now
    dv, dq, dk, _ = shares_of_pairs(model, c, *given)
    model.kept["dv"] = (core_kv, *of_kv.several(OF_DV)), dv
    model.kept["dq"] = (core, *of_q.several(OF_DQ)), dq
    model.kept["dk"] = (core_kv, *of_kv.several(OF_DK)), dk
