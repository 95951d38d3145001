"""Infer the arithmetic of a kernel: compare its errors with the predicted noise of several recipes.

The noise of a kernel shows how it rounds (docs/conform/noise.md). A kernel that rounds dS twice has more noise in dq and
dk than its recipe predicts, and as much in o and dv. A kernel that keeps P in float32 has less noise. A kernel that
truncates P has a mean error as well.

Each candidate predicts a standard deviation sd and a mean m (0 except for truncation) for each
element. Its score in a tensor is a Gaussian quasi-log-likelihood::

    score = n * average over elements of ( -log sd - (e - m)^2 / (2 sd^2) )

e is the error of an element. (e - m)^2 / sd^2 is limited to :data:`CUT`, so that a few wrong elements do not decide
which recipe fits; the tests of :mod:`ringspec.compare.statistics.tests` find wrong elements. The score is n times an
average, not a sum over all elements, because elements share errors and predictions are accurate only to
:data:`MODEL`. n is 1 / (2 MODEL^2) = 102, or the number of rows of the tensor if that is smaller. If a predicted sd is
wrong by the factor 1 + x, the score falls by about n x^2 nats (natural logarithms of a likelihood ratio): by 1 for
10 %, which says little, by 6 for the 25 % of a dS rounded twice, by 50 for twice the noise.

The candidates are ordered: the declared recipe, small changes of it, other recipes. *The best* is the first
candidate within :data:`EVEN` nats of the highest score. So the result does not depend on the last digits of a machine's
products, and of two equally good candidates the simpler one is named.

A fit is *good* if in every tensor the root mean square of error / sd, without the limit, lies within the band of a
correct kernel. If no fit is good, the report names the nearest one and concludes nothing. Only the batch and key head
with the largest errors are used.

The declared recipe is *contradicted* if its own fit is not good and another recipe fits better by
:data:`CONTRADICTION` nats. The band of a correct kernel is that of
:func:`~ringspec.compare.statistics.types.allowance_for`. A candidate with the same prediction as the declared recipe
cannot be distinguished from it (for example, rounded partial results with one worker); the declared recipe is then
the best.
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

    ``name``: the candidate's name. ``margin``: by how many nats its score is below the highest one. ``good``:
    whether the errors have the predicted size in every tensor (see the module). ``rms``, by tensor: the root mean
    square of (error - mean) / sd, where an element counts at most sqrt(CUT) = 5. ``scores``: the score of each
    tensor.
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
        """The rms of each tensor, as text."""
        ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in self.rms.items())
        return f"rms of error / predicted: {ratios}"


@dataclass(frozen=True)
class Inference:
    """The conclusion about one kernel.

    ``fits``: all candidates, the highest score first. ``declared``: the fit of the declared recipe. ``best``: the fit
    that is named, possibly the declared one. ``contradicted``: whether the errors contradict the declared recipe.
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
        """Return lines that say which candidate fits best, by how much, and whether the recipe is contradicted.

        ``was_declared``: False if the target declares no recipe, so that the recipe of its input format was used.
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
    """Find the candidate whose predicted noise is most like the errors of a kernel in one problem.

    ``errors``: got - truth, float64, for any of o, lse, dq, dk and dv, in the shape of the tensor; elements whose error
    is not finite are ignored. ``predict``: :func:`ringspec.compare.noise.predict.predict`; ``attention`` and
    ``geometry`` are its arguments. ``candidates``: what to compare, with the declared recipe first; None: those of
    :func:`candidates_for`.
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
    """Return the problem and the errors of one batch and key head: those with the largest errors relative to ``noise``.

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
    """Return the root mean square of error / sd without the limit, over the elements that :func:`score` uses."""
    held, used = held_variance(error, variance, declared_sd)
    return float(np.sqrt((error[used] ** 2 / held).mean())) if used.any() else 1.0


def held_variance(
    error: Array, variance: Array, declared_sd: Array
) -> tuple[Array, NDArray[np.bool_]]:
    """Return the variances that :func:`score` uses, and a mask of the elements that it uses.

    Used are elements with noise and a finite error. :data:`LEAST` times the square of the median sd is added to each
    variance, so that elements with almost no noise do not dominate.
    """
    used = np.isfinite(error) & (declared_sd > 0)
    least = LEAST * float(np.median(declared_sd[used])) ** 2 if used.any() else 0.0
    return np.maximum(variance[used], 0.0) + least, used


def score(error: Array, variance: Array, declared_sd: Array) -> tuple[float, float]:
    """Return the root mean square of error / sd and the score of one tensor; (error / sd)^2 is limited to CUT."""
    held, used = held_variance(error, variance, declared_sd)
    if not used.any():
        return 1.0, 0.0
    square = error[used] ** 2 / held
    average = float((-0.5 * np.log(held) - 0.5 * np.minimum(square, CUT)).mean())
    worth = min(1.0 / (2.0 * MODEL**2), float(error.shape[0] * error.shape[1] * error.shape[2]))
    return float(np.sqrt(np.minimum(square, CUT).mean())), worth * average


def one_per_meaning(fits: Sequence[Fit]) -> list[Fit]:
    """Keep one fit for candidates with the same meaning: the first candidate, with the numbers of the best fit.

    Such candidates differ only in the order in which results are merged. This changes the noise less than the order in
    which a processor adds, so without this step the best candidate would depend on the machine.
    """
    found: dict[tuple[object, ...], Fit] = {}
    for fit in fits:
        first = found.setdefault(fit.candidate.meaning, fit)
        if fit.margin < first.margin:
            found[fit.candidate.meaning] = dataclasses.replace(fit, candidate=first.candidate)
    return list(found.values())


def concluded(fits: Sequence[Fit]) -> Inference:
    """Sort the fits, name the best, and decide whether the declared recipe, the first of them, is contradicted."""
    fits = one_per_meaning(fits)
    least = min(fit.margin for fit in fits)
    fits = [dataclasses.replace(fit, margin=fit.margin - least) for fit in fits]
    declared = fits[0]
    best = next(fit for fit in fits if fit.margin <= EVEN)
    contradicted = not declared.good and declared.margin - best.margin >= CONTRADICTION
    ordered = tuple(sorted(fits, key=lambda fit: fit.margin))
    return Inference(declared, best, ordered, contradicted)


def within(ratio: float, used: Recipe, tensor: str) -> bool:
    """Return whether a root mean square of error / sd is in the band of a correct kernel of recipe ``used``."""
    band = allowance_for(used, tensor)
    return band.low <= ratio <= band.high
