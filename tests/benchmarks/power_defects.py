"""Defects of a given size: what each adds to the true results.

A :class:`Defect` gives for a size x the error of every result, exact to float64, and its direction: the
derivative by x at 0, from which :func:`ringspec.compare.statistics.power.detectable` computes the smallest x.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from benchmarks.power_problem import Array, Named, Setting
from numpy.typing import NDArray

from ringspec.compare.noise.predict import predict
from ringspec.problem.options import check
from ringspec.truth.dense import rescaled, results_of

LARGEST = 10.0  # size of a defect that has no natural end


@dataclass(frozen=True)
class Defect:
    """One kind of defect.

    ``name``, ``words``, ``unit``   for a table
    ``pattern``     size -> error of each result
    ``direction``   the derivative of the pattern at 0
    ``most``        the largest size: 1 where the size is a share
    ``mass``        of a dropped hop: the mean share of a row's softmax that it holds
    """

    name: str
    words: str
    unit: str
    pattern: Callable[[float], Named]
    direction: Named
    most: float = LARGEST
    mass: float | None = None


def linear(direction: Named) -> Callable[[float], Named]:
    return lambda size: {name: size * x for name, x in direction.items()}


def defects_of(setting: Setting) -> list[Defect]:
    """The defects that have a size, those that the problem has."""
    found = [factor(setting), softmax_scale(setting), offset(setting)]
    if setting.asked.workers > 1:
        found.append(dropped_hop(setting))
    if any(x.any() for x in truncated(setting).values()):
        found.append(truncation(setting))
    return found


def factor(setting: Setting) -> Defect:
    """Every result but lse times 1 + x."""
    direction = {name: x for name, x in setting.truth.items() if name != "lse"}
    return Defect("factor", "all results times 1 + x", "x", linear(direction), direction)


def softmax_scale(setting: Setting) -> Defect:
    """The softmax scale times 1 + x."""

    @cache
    def pattern(size: float) -> Named:
        wrong = results_of(rescaled(setting.problem, 1.0 + size), setting.upstream)
        return {name: wrong[name] - x for name, x in setting.truth.items()}

    return Defect("scale", "softmax scale times 1 + x", "x", pattern, setting.directions)


def offset(setting: Setting) -> Defect:
    """x times the root mean square of each tensor added to all its elements; lse is left out.

    So is the first row of o and dq under a causal mask: it has one key, and its results are known exactly.
    """
    direction = {
        name: np.full(x.shape, float(np.sqrt(np.mean(x * x))))
        for name, x in setting.truth.items()
        if name != "lse"
    }
    for name in ("o", "dq"):
        if setting.asked.causal and name in direction:
            direction[name][:, :, 0] = 0.0
    return Defect("offset", "all results + x rms(truth)", "x", linear(direction), direction)


def dropped_hop(setting: Setting) -> Defect:
    """The keys of the last ring step are missing for every worker, in both passes; x of their effect."""
    geometry = setting.geometry
    last = geometry.order[:, -1][geometry.owner_q]  # whose keys each query does not see
    hop = last[:, None] == geometry.owner_k[None, :]
    options = {"causal": setting.asked.causal, "mask": ~hop[None, None]}
    q, k, v = setting.problem.q, setting.problem.k, setting.problem.v
    wrong = results_of(check(q, k, v, options), setting.upstream)
    with np.errstate(invalid="ignore"):
        direction = {name: wrong[name] - x for name, x in setting.truth.items()}
    direction = {name: np.nan_to_num(x, posinf=0.0, neginf=0.0) for name, x in direction.items()}
    mass = float((setting.attention.p * hop).sum(axis=3).mean())
    words = "share of a dropped ring step"
    return Defect("hop", words, "share", linear(direction), direction, 1.0, mass)


def truncated(setting: Setting) -> Named:
    """The systematic error of a kernel that cuts P and dS and does not round them."""
    points = ("p", "ds") if setting.upstream.dy is not None else ("p",)
    cut = predict(setting.attention, setting.recipe, setting.geometry, truncated=points)
    return {name: cut.mean[name] - setting.noise.mean[name] for name in setting.truth}


def truncation(setting: Setting) -> Defect:
    """A share x of the elements of P and dS is cut towards zero and not rounded to nearest."""
    direction = truncated(setting)
    words = "share of P and dS truncated"
    return Defect("truncation", words, "share", linear(direction), direction, 1.0)


def wrong_rows(setting: Setting, n: int) -> NDArray[np.int64]:
    """The last row and each n-th above it, in the second half, where one key of many is missed least."""
    tokens = setting.asked.tokens
    return np.arange(tokens - 1, (tokens - 1) // 2, -n)[::-1]


def wrong_diagonal(setting: Setting, n: int) -> Named:
    """The error of all results where one row in n of the second half does not see its own key.

    Rows do not mix but in dk and dv, where each adds a term, so that only the wrong rows are computed.
    """
    at, rows = setting.attention, wrong_rows(setting, n)
    own = at.p[:, :, rows, rows][..., None]
    found = {name: np.zeros(x.shape) for name, x in setting.truth.items()}
    o = (at.o[:, :, rows] - own * at.v[:, :, rows]) / (1.0 - own)
    found["o"][:, :, rows] = o - at.o[:, :, rows]
    found["lse"][:, :, rows] = np.log1p(-own[..., 0])
    if setting.upstream.dy is None:
        return found
    q, dy, p = at.q[:, :, rows], setting.upstream.dy[:, :, rows], at.p[:, :, rows]
    seen = p / (1.0 - own)
    seen[:, :, np.arange(rows.size), rows] = 0.0
    dp = dy @ at.v.swapaxes(2, 3)

    def ds(p: Array, o: Array) -> Array:
        return np.asarray(p * (dp - (dy * o).sum(axis=3, keepdims=True)))

    change = at.scale * (ds(seen, o) - ds(p, at.o[:, :, rows]))
    found["dq"][:, :, rows] = change @ at.k
    found["dk"] = change.swapaxes(2, 3) @ q
    found["dv"] = (seen - p).swapaxes(2, 3) @ dy
    return found
