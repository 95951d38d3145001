"""Compute what the noise model and the tests of whole tensors need from a call.

They need the correct results, the derivatives of these with respect to the softmax scale, and the geometry: which
worker holds which token. The correct results are computed by the definition in float64. Their error is far below the
noise of any recipe (declared rounding) that computes in float32 or a narrower format.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ringspec.compare.noise.problem import Attention, Geometry
from ringspec.conformance.target.protocol import Call, PerWorker
from ringspec.conformance.targets.reference import arrays_of, options_of
from ringspec.formats import load
from ringspec.problem.model import Problem
from ringspec.problem.options import check, check_gradients
from ringspec.rings.layouts import unshard
from ringspec.spec.dense_backward import over_group
from ringspec.spec.layout import Layout
from ringspec.truth.dense import Named, directions_of, results_of, weights_of
from ringspec.truth.problem import Upstream
from ringspec.truth.sharded import OF_KEYS

Array = NDArray[np.float64]
TENSORS = ("o", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Question:
    """A ring call with its correct results, in global token order, in float64.

    ``truth``       o, lse and with a backward pass dq, dk, dv
    ``directions``  derivatives of ``truth`` with respect to log(scale): the effect of a wrong softmax scale
    ``attention``   the input of the noise model
    """

    truth: Named
    directions: Named
    attention: Attention

    @cached_property
    def forward(self) -> Attention:
        """The field ``attention`` without the upstream gradients, for a noise model of the forward pass."""
        return dataclasses.replace(self.attention, dy=None)

    @cached_property
    def sizes(self) -> Named:
        """For each result, how much a relative error of 1 in the merge weights can change its rows.

        This is the sum of the absolute terms of the row times 1 + abs(lse): [B, H, S, 1], and [B, H, S] for lse.
        """
        at = self.attention
        lse = 1.0 + np.where(np.isneginf(at.lse), 0.0, np.abs(at.lse))
        p = at.p * lse[..., None]
        k, v = (np.repeat(largest(x), at.group, axis=1) for x in (at.k, at.v))
        sizes = {"o": (p @ v), "lse": lse}
        if at.dy is None:
            return sizes
        dp = np.abs(at.dy @ np.repeat(at.v, at.group, axis=1).swapaxes(2, 3))
        a = abs(at.scale) * p * (dp + np.abs((at.dy * at.o).sum(axis=3, keepdims=True)))
        turned = ((a.swapaxes(2, 3), largest(at.q)), (p.swapaxes(2, 3), largest(at.dy)))
        sizes["dq"] = a @ k
        sizes["dk"], sizes["dv"] = (over_group(x @ y, at.group) for x, y in turned)
        return sizes


def largest(x: Array) -> Array:
    """Return the largest magnitude of each row, [..., 1]."""
    return np.asarray(np.abs(x).max(axis=-1, keepdims=True))


def question_of(call: Call, truth: Mapping[str, Array] | None = None) -> Question:
    """Compute the correct results and the noise model's inputs of a ring call.

    ``truth``: the float64 results in global token order; None: they are computed. Errors in the inputs are raised
    unchanged.

    >>> from ringspec.conformance.cases.noise import noise_call
    >>> call = noise_call("example", "bf16", 2, tokens=16)
    >>> sorted(question_of(call).truth)
    ['dk', 'dq', 'dv', 'lse', 'o']
    """
    q, k, v, dy, dlse = arrays_of(call)
    problem = check(q, k, v, options_of(call))
    upstream = Upstream() if dy is None else Upstream(*check_gradients(problem, dy, dlse))
    found = results_of(problem, upstream) if truth is None else truth
    directions = directions_of(problem, upstream)
    names = [name for name in TENSORS if name in directions]
    known, by_scale = ({name: x[name] for name in names} for x in (found, directions))
    return Question(known, by_scale, attention_of(problem, known["o"], upstream))


def attention_of(problem: Problem, o: Array, upstream: Upstream | None = None) -> Attention:
    """Return the input of the noise model; without ``upstream`` gradients, only that of the forward pass."""
    at, terms = weights_of(problem), problem.terms
    dy, dlse = None, None
    if upstream is not None and upstream.dy is not None:
        dy, dlse = upstream.filled(problem)
    return Attention(
        problem.q,
        problem.k,
        problem.v,
        at.s,
        at.lse,
        at.p,
        o,
        terms.scale,
        dy,
        dlse,
        keep=at.keep if isinstance(at.keep, np.ndarray) else None,
        softcap=terms.softcap,
        tanh=at.t,
        sinks=terms.sinks,
        bias=problem.rows.bias,
    )


def geometry_of(call: Call) -> Geometry:
    """Return which worker holds which token, and the order in which the ring accumulates blocks."""
    assert call.index_q is not None and call.index_k is not None
    (owner_q, slot_q), (owner_k, slot_k) = (places(x) for x in (call.index_q, call.index_k))
    ring = Geometry.ring(owner_q, owner_k, call.workers, call.circulation, call.direction)
    return dataclasses.replace(ring, slot_q=slot_q, slot_k=slot_k)


def places(index: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the worker and the slot of each token; slot i of worker r is entry [r, i] of a layout table.

    >>> [x.tolist() for x in places(np.array([[0, 3], [2, 1]]))]
    [[0, 1, 1, 0], [0, 1, 0, 1]]
    """
    owner, slot = (np.zeros(int((index >= 0).sum()), dtype=np.int64) for _ in range(2))
    for worker, tokens in enumerate(index):
        held = tokens >= 0
        owner[tokens[held]] = worker
        slot[tokens[held]] = np.flatnonzero(held)
    return owner, slot


def in_order(call: Call, outputs: Mapping[str, PerWorker]) -> Named:
    """Return the outputs of all workers in the order of the tokens, float64."""
    gathered = {}
    for name in TENSORS:
        if name in outputs:
            index = call.index_k if name in OF_KEYS else call.index_q
            assert index is not None
            gathered[name] = unshard([load(x) for x in outputs[name]], Layout("table", index))
    return gathered
