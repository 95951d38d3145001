"""The sizes of the elements of results, and whether results agree with the expected ones relative to these."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ringspec.conformance.readout.faults.masks import right_mask
from ringspec.conformance.readout.model.forward import forward_pass
from ringspec.conformance.readout.model.ring import Model
from ringspec.conformance.readout.model.scores import drop_factors, scores_of_pairs
from ringspec.conformance.readout.problem.problems import Problem
from ringspec.conformance.readout.search.matches import near
from ringspec.problem.model import Array


def agrees(
    results: Mapping[str, Array], expected: Mapping[str, tuple[Array, Array]], tolerance: float
) -> bool:
    """Return whether results are the expected ones.

    ``expected`` has, by name, the expected values and the sizes of their elements. The size of an element is the sum of
    the absolute values of its terms. ``tolerance`` is relative to this size.
    """
    return all(near(x, *expected[name], tolerance).all() for name, x in results.items())


def sizes_of(problem: Problem) -> dict[str, Array]:
    """Return the sizes of all elements: the sums that define them, with the absolute value of each term.

    The result has o, dq [W, H, n, d], dk, dv [W, Hkv, n, d] and lse [W, H, n].
    """
    pairs, geometry = problem.pairs, problem.pairs.geometry
    model = Model(pairs, [right_mask(geometry).pattern], [])
    forward = forward_pass(model, model.right)
    inputs, dim = problem.inputs, problem.call.worker("q", 0).shape[3]
    q, k, v, dy = (np.abs(inputs[name]) for name in ("q", "k", "v", "dy"))
    k, v = (np.repeat(x, geometry.group, axis=1) for x in (k, v))
    weights, g = forward.weights, np.abs(model.of_heads("g"))
    delta = (weights * g).sum(axis=(1, 4))
    p = np.exp(scores_of_pairs(model, model.right) - forward.lse[:, None, ..., None])
    ds = p * (g * drop_factors(model, model.right) + delta[:, None, ..., None])
    if pairs.dlse is not None:
        ds = ds + p * np.abs(pairs.dlse)[:, None, ..., None]
    more: dict[str, Array] = {}
    per_head = {
        "dk": geometry.scale * np.einsum("abhij,ahid->bhjd", ds, q),
        "dv": np.einsum("abhij,ahid->bhjd", weights, dy),
    }
    if pairs.sinks is not None:
        weight = np.exp(pairs.sinks[None, :, None] - forward.lse[..., None])
        per_sink = weight * delta[..., None]
        more["dsinks"] = per_sink.sum(axis=2).reshape(-1, pairs.sinks.shape[1])
    if pairs.bias is not None:
        of_keys = ds.transpose(0, 2, 3, 1, 4).reshape(pairs.bias.shape)
        more["dbias"] = of_keys[..., np.argsort(geometry.position.ravel())]
    shape = (geometry.workers, -1, geometry.group, geometry.slots, dim)
    return more | {
        "o": np.einsum("abhij,bhjd->ahid", weights, v),
        "lse": np.maximum(1.0, np.abs(forward.lse)),
        "dq": geometry.scale * np.einsum("abhij,bhjd->ahid", ds, k),
        **{name: x.reshape(shape).sum(axis=2) for name, x in per_head.items()},
    }
