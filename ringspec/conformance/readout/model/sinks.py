"""The sinks in o and lse."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ringspec.conformance.readout.faults.choices import SINKS, Choices
from ringspec.conformance.readout.faults.merge_formulas import LN2
from ringspec.conformance.readout.model.arrays import chosen, log_sum, of_workers
from ringspec.conformance.readout.model.ring import Model
from ringspec.problem.model import Array
from ringspec.spec.online_softmax import finite_shift


def with_sinks(
    model: Model, c: Choices, weights: Array, bare: Array, maximum: Array, block_lse: Array
) -> tuple[Array, Array]:
    """Return the weights of pairs and lse with the sinks, given those without (``weights`` and ``bare``)."""
    if model.sinks is None:
        return weights, bare
    of_o, lse = (
        np.logaddexp(bare, log_sum(sink_logits(model, c, name, maximum, block_lse)))
        for name in ("sink_o", "sink_lse")
    )
    share = np.where(np.isneginf(bare), 0.0, np.exp(finite_shift(bare) - finite_shift(of_o)))
    return weights * share[:, None, ..., None], lse


def sink_logits(model: Model, c: Choices, name: str, maximum: Array, block_lse: Array) -> Array:
    """Return the sinks of each row, [a, h, i, sink], in the form that the choice ``name`` selects."""
    assert model.sinks is not None
    head = np.broadcast_to(c["sink_of.head"], (model.workers, 1, *model.shape[2:4], 1))
    x = model.sinks[head[:, 0, :, :, 0]]
    seen = (~np.isneginf(block_lse)).sum(axis=1)[..., None]
    scale, first = model.geometry.scale, np.arange(x.shape[3]) == 0
    of: dict[str, Callable[[], Array]] = {
        "right": lambda: x, "none": lambda: np.full_like(x, -np.inf), "every step": lambda: x + np.log(model.workers),
        "every block": lambda: x + np.log(seen), "times scale": lambda: x * scale, "divided by scale": lambda: x / scale,
        "times ln 2": lambda: x * LN2, "divided by ln 2": lambda: x / LN2, "first": lambda: np.where(first, x, -np.inf),
        "unshifted": lambda: x + maximum[..., None], "negated": lambda: -x,
        "not exponentiated": lambda: np.log(x) + maximum[..., None],
    }  # fmt: skip
    with np.errstate(divide="ignore", invalid="ignore"):
        return chosen(of_workers(c[name])[..., None], SINKS, of)
