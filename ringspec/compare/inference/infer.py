"""Infer the arithmetic of a kernel: compare its errors with the predicted noise of several recipes.

Compared with the declared recipe, a kernel that rounds dS twice has more noise in dq and dk and the same in o and dv;
one that keeps P in float32 has less; one that truncates P has a mean error as well. So noise is a fingerprint
(docs/conform/noise.md).

Each candidate predicts a standard deviation sd and a mean m (0 except for truncation) for each
element. Its score in a tensor is a Gaussian quasi-log-likelihood::

    score = n * average over elements of ( -log sd - (e - m)^2 / (2 sd^2) )

(e - m)^2 / sd^2 is cut at :data:`CUT`, so that a few wrong elements do not choose a recipe; the tests of
:mod:`ringspec.compare.statistics.tests` find those. The score is an average times n, not a sum over elements,
because predictions are accurate only to :data:`MODEL` and elements share errors. A million elements therefore say no
more about a recipe than n = 1 / (2 MODEL^2) = 102 independent ones, or the tensor's rows if these are fewer. A
prediction that is off by the factor 1 + x then loses 102 x^2 nats: 1 for 10 %, which says little, 6 for the
25 % of a dS rounded twice, 50 for twice the noise. Margins are in nats: e^-margin is a likelihood ratio
that takes the model's own error into account.

Candidates have an order: the declared recipe, small changes of it, other recipes. *The best* is the first of those
within :data:`EVEN` nats of the best score. So the result does not depend on the last digits of a machine's products,
and of two candidates with the same meaning the simpler one is named.

A fit is *good* if in every tensor the rms of error / predicted, uncut, lies within the band of a correct kernel.
If no fit is good, the nearest one is named as such, and nothing is concluded. Only the batch and key head with the
largest errors are used.

The declared recipe is *contradicted* if another one fits better by :data:`CONTRADICTION` nats and the
declared one's own rms of error / predicted is outside the band of
:func:`~ringspec.compare.statistics.types.allowance_for` in some tensor. A candidate with the same prediction
as the declared one cannot be distinguished from it (rounded partials with one worker, for example); the
declared one is then the best.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ringspec.compare.inference.candidates import (
    Candidate,
    candidates_for,
    predictions_of,
)
from ringspec.compare.noise.problem import Attention, Geometry
from ringspec.compare.statistics.types import Array, Predicted, allowance_for
from ringspec.recipes import Recipe
from ringspec.recipes import recipe as recipe_of

__all__ = ["Fit", "Inference", "infer"]

MODEL = 0.07  # relative error of a predicted standard deviation
CUT = 25.0
CONTRADICTION = 4.0
EVEN = 1.0  # nats by which a candidate must beat the earlier ones to be named
LEAST = 1e-2  # this fraction of the declared median variance is added to every candidate's variance
TENSORS = ("o", "lse", "dq", "dk", "dv")
Predictor = Callable[..., Predicted]


@dataclass(frozen=True)
class Fit:
    """How well one ``candidate`` fits the errors of a kernel.

    ``name``: that of the candidate. ``margin``: nats below the best one. ``rms`` by tensor: the root
    mean square of (error - mean) / sd, where an element counts at most sqrt(CUT) = 5. ``scores`` by
    tensor. ``good``: whether every rms is in the band of a kernel with this arithmetic.
    """

    candidate: Candidate
    margin: float
    good: bool = True
    rms: Mapping[str, float] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.candidate.name

    def seen(self) -> str:
        """Describe the rms ratios."""
        ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in self.rms.items())
        return f"rms of error / predicted: {ratios}"


@dataclass(frozen=True)
class Inference:
    """All ``fits`` from the best to the worst; ``declared`` and ``best`` are two of them, possibly the same.

    ``contradicted``: whether the errors contradict the declared recipe.
    """

    declared: Fit
    best: Fit
    fits: tuple[Fit, ...]
    contradicted: bool

    @property
    def alike(self) -> tuple[Fit, ...]:
        """The fits that are hard to distinguish from the best: those within :data:`CONTRADICTION` nats of it."""
        near = self.best.margin + CONTRADICTION
        return tuple(f for f in self.fits if f is not self.best and f.margin < near)

    def lines(self, was_declared: bool = True) -> list[str]:
        """Say what fits best, by how much, and whether the declared recipe is contradicted.

        ``was_declared``: False if the target declares no recipe, and that of its input format was used.
        """
        name = f"the declared recipe {self.declared.name}"
        if not was_declared:
            name = f"recipe {self.declared.name}, used because none is declared,"
        others = [fit.candidate.words for fit in self.alike if fit.good]
        if not self.best.good:
            nearest = name if self.best is self.declared else self.best.candidate.words
            return [
                "no arithmetic that was tried has this noise",
                f"the nearest, which does not fit: {nearest} ({self.best.seen()})",
            ]
        if self.best is self.declared:
            return [f"the size of the noise is that of {name} ({self.best.seen()})"]
        verdict = "contradicted" if self.contradicted else "not contradicted"
        by = self.declared.margin - self.best.margin
        lines = [
            f"{name} is {verdict} ({self.declared.seen()})",
            f"{self.best.candidate.words}: fits better by {by:.1f} nats ({self.best.seen()})",
        ]
        return [*lines, f"hard to distinguish from it: {'; '.join(others)}"] if others else lines


def infer(
    errors: Mapping[str, Array],
    attention: Attention,
    geometry: Geometry,
    declared: str | Recipe,
    predict: Predictor,
    candidates: Sequence[Candidate] | None = None,
) -> Inference:
    """Find the candidate whose noise is most like the errors of one problem.

    ``errors``: got - truth by tensor, float64 in its shape (o [B, H, Sq, Dv], lse, dq, dk, dv: those that
    exist). ``attention`` and ``geometry``: arguments of ``predict``, which is
    :func:`ringspec.compare.noise.predict.predict`. ``candidates``: the declared recipe first (None:
    :func:`candidates_for` it). Elements whose error is not finite are ignored.
    """
    used = recipe_of(declared)
    candidates = candidates_for(used) if candidates is None else tuple(candidates)
    names = [name for name in TENSORS if name in errors]
    attention, errors = worst_head(attention, errors, predict(attention, used, geometry))
    predicted = {
        (recipe, truncated): predict(attention, recipe, geometry, truncated=truncated)
        for recipe, truncated in predictions_of(candidates)
    }
    fits = []
    for candidate in candidates:
        parts = [(x, predicted[recipe, candidate.truncated]) for x, recipe in candidate.terms]
        bands = used if len(parts) > 1 else candidate.terms[0][1]
        rms, scores, good = {}, {}, True
        for name in names:
            variance = np.asarray(sum(factor * noise.sd[name] ** 2 for factor, noise in parts))
            error = errors[name] - parts[0][1].mean.get(name, 0.0)
            declared_sd = predicted[used, ()].sd[name]
            rms[name], scores[name] = score(error, variance, declared_sd)
            good = good and within(uncut_rms(error, variance, declared_sd), bands, name)
        fits.append(Fit(candidate, -sum(scores.values()), good, rms, scores))
    return concluded(fits)


def worst_head(
    attention: Attention, errors: Mapping[str, Array], noise: Predicted
) -> tuple[Attention, dict[str, Array]]:
    """Select the batch and key head with the largest errors in units of ``noise``, as a problem of one key head.

    One head has enough rows to distinguish recipes, and takes less time.
    """
    size = np.zeros(attention.k.shape[:2])
    for name in (x for x in TENSORS if x in errors):
        sd, error = noise.sd[name], errors[name]
        used = np.isfinite(error) & (sd > 0)
        square = np.where(used, np.minimum((error / np.where(used, sd, 1.0)) ** 2, CUT), 0.0)
        size += square.reshape(*size.shape, -1).mean(axis=2)
    b, h = (int(x) for x in np.unravel_index(int(size.argmax()), size.shape))
    one, heads = slice(b, b + 1), slice(h * attention.group, (h + 1) * attention.group)

    def of_queries(x: Array | None) -> Array | None:
        if x is None or x.ndim < 3:
            return x
        return x[one if x.shape[0] > 1 else slice(None), heads if x.shape[1] > 1 else slice(None)]

    fields = {x.name: getattr(attention, x.name) for x in dataclasses.fields(attention)}
    changed = {name: of_queries(x) for name, x in fields.items() if isinstance(x, np.ndarray)}
    changed |= {name: fields[name][one, h : h + 1] for name in ("k", "v")}
    if attention.sinks is not None:
        changed["sinks"] = attention.sinks[heads]
    chosen = {
        name: x[one, h : h + 1] if name in ("dk", "dv") else x[one, heads]
        for name, x in errors.items()
    }
    return dataclasses.replace(attention, **changed), chosen  # type: ignore[arg-type]


def uncut_rms(error: Array, variance: Array, declared_sd: Array) -> float:
    """Return the rms of error / sd without a cut, over the elements that :func:`score` uses."""
    held, used = held_variance(error, variance, declared_sd)
    return float(np.sqrt((error[used] ** 2 / held).mean())) if used.any() else 1.0


def held_variance(
    error: Array, variance: Array, declared_sd: Array
) -> tuple[Array, NDArray[np.bool_]]:
    """Return the variance of the elements that are used, and a mask of them.

    A hundredth of the declared median is added, so that elements almost without noise do not dominate.
    """
    used = np.isfinite(error) & (declared_sd > 0)
    least = LEAST * float(np.median(declared_sd[used])) ** 2 if used.any() else 0.0
    return np.maximum(variance[used], 0.0) + least, used


def score(error: Array, variance: Array, declared_sd: Array) -> tuple[float, float]:
    """Return the rms of error / sd, where an element counts at most sqrt(CUT), and the score of one tensor."""
    held, used = held_variance(error, variance, declared_sd)
    if not used.any():
        return 1.0, 0.0
    square = error[used] ** 2 / held
    average = float((-0.5 * np.log(held) - 0.5 * np.minimum(square, CUT)).mean())
    worth = min(1.0 / (2.0 * MODEL**2), float(error.shape[0] * error.shape[1] * error.shape[2]))
    return float(np.sqrt(np.minimum(square, CUT).mean())), worth * average


def one_per_meaning(fits: Sequence[Fit]) -> list[Fit]:
    """Keep one fit for each meaning: the first candidate, with the numbers of the one that fits best.

    Different orders of merging change the noise less than the order in which a processor adds. If they were separate,
    the name of the best would depend on the machine.
    """
    found: dict[tuple[object, ...], Fit] = {}
    for fit in fits:
        first = found.setdefault(fit.candidate.meaning, fit)
        if fit.margin < first.margin:
            found[fit.candidate.meaning] = dataclasses.replace(fit, candidate=first.candidate)
    return list(found.values())


def concluded(fits: Sequence[Fit]) -> Inference:
    """Sort the fits, name the best, and decide whether the first, the declared recipe, is contradicted."""
    fits = one_per_meaning(fits)
    least = min(fit.margin for fit in fits)
    fits = [dataclasses.replace(fit, margin=fit.margin - least) for fit in fits]
    declared = fits[0]
    best = next(fit for fit in fits if fit.margin <= EVEN)
    contradicted = not declared.good and declared.margin - best.margin >= CONTRADICTION
    ordered = tuple(sorted(fits, key=lambda fit: fit.margin))
    return Inference(declared, best, ordered, contradicted)


def within(ratio: float, used: Recipe, tensor: str) -> bool:
    """Return whether an rms of error / predicted is in the band of a kernel that computes by this recipe."""
    band = allowance_for(used, tensor)
    return band.low <= ratio <= band.high
