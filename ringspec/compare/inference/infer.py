"""Infer the arithmetic of a kernel: compare its errors with the noise that several recipes predict.

A recipe says where a kernel rounds, and to which formats. The noise (the rounding errors) shows how the kernel really
rounds: if it rounds dS twice, dq and dk have more noise than the recipe predicts, while o and dv do not. If it keeps P
in float32, it has less noise. If it truncates P, the errors have a mean as well.

The kernel is compared with *candidates*: the recipe that it declares, small changes of that recipe, and other recipes.
For each element, a candidate predicts the standard deviation sd and the mean m of the error; m is 0 except for
truncation. If e is the error of the element, the candidate's score in a tensor is a Gaussian quasi-log-likelihood::

    score = n * average over elements of ( -log sd - (e - m)^2 / (2 sd^2) )

(e - m)^2 / sd^2 is limited to :data:`CUT`, so that a few wrong elements do not decide which recipe fits. (Wrong
elements are found by the tests of :mod:`ringspec.compare.statistics.tests`.) The score is n times an average, not a sum
over all elements, because elements share errors, and because a predicted sd has a relative error of about
:data:`MODEL`. n is 1 / (2 MODEL^2) = 102, or the number of rows of the tensor if that is smaller.

Scores are measured in nats (the natural logarithm of a likelihood ratio). If a predicted sd is wrong by a factor 1 + x,
the score falls by about n x^2 nats for small x: by 1 for x = 10 %, which says little, and by 6 for the 25 % of a dS
that is rounded twice. For twice the noise it falls by about 50 nats.

The *best* candidate is the first one in the list whose score is within :data:`EVEN` nats of the highest. The list
begins with the declared recipe and the simplest changes, so of two equally good candidates the simpler is named. The
last digits of a machine's matrix products do not change the result. If a candidate predicts exactly what the declared
recipe predicts (as with rounded partial results and a single worker), the declared recipe is named.

A fit is *good* if the root mean square of error / sd (without the limit :data:`CUT`) is, in every tensor, in the range
that a correct kernel may have (:func:`~ringspec.compare.statistics.types.allowance_for`). If the best fit is not good,
the report names it as the nearest, and concludes nothing. The declared recipe is *contradicted* if its own fit is not
good and the best candidate scores at least :data:`CONTRADICTION` nats more. Only the batch and key head with the
largest errors are used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ringspec.compare.inference.candidates import (
    PARTIALS,
    Candidate,
    candidates_for,
    narrow_format,
)
from ringspec.compare.inference.merge_classes import merge_candidates
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

    ``name``: the candidate's name. ``margin``: how many nats its score is below the highest score. ``good``: whether
    the errors have the predicted size in every tensor. ``rms``, by tensor: the root mean square of (error - mean) / sd,
    where each element counts as at most sqrt(CUT) = 5. ``scores``: the score in each tensor.
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
        """Return the ``rms`` of each tensor as text."""
        ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in self.rms.items())
        return f"rms of error / predicted: {ratios}"


@dataclass(frozen=True)
class Inference:
    """The conclusion about one kernel.

    ``declared``: the fit of the declared recipe. ``best``: the fit of the best candidate, which may be the declared
    recipe. ``fits``: the fits of all candidates, the highest score first. ``contradicted``: whether the errors
    contradict the declared recipe.
    """

    declared: Fit
    best: Fit
    fits: tuple[Fit, ...]
    contradicted: bool

    @property
    def alike(self) -> tuple[Fit, ...]:
        """The fits within :data:`CONTRADICTION` nats of the best, which are hard to distinguish from it."""
        near = self.best.margin + CONTRADICTION
        return tuple(f for f in self.fits if f is not self.best and f.margin < near)

    def lines(self, was_declared: bool = True) -> list[str]:
        """Return lines of text: which candidate fits best, by how much, and whether the recipe is contradicted.

        ``was_declared``: False if the kernel declares no recipe, and the usual recipe of its input format was used.
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
    is not finite are ignored. ``predict``: the function :func:`ringspec.compare.noise.predict.predict`; ``attention``
    and ``geometry`` are its arguments. ``candidates``: the candidates to compare, the declared recipe first; None: the
    result of :func:`candidates_for`, and the classes of merge recipes, for several workers, if none of these fits or the best rounds
    partial results in another way than declared.
    """
    used = recipe_of(declared)
    usual = candidates_for(used) if candidates is None else tuple(candidates)
    attention, errors = worst_head(attention, errors, predict(attention, used, geometry))
    known = Errors(errors, attention, geometry, used, predict)
    found = known.fits(usual)
    best, several = concluded(found).best, geometry.workers > 1 and narrow_format(used) is not None
    if candidates is None and several and (not best.good or merges_otherwise(best, used)):
        more = merge_candidates(used, any(name in errors for name in ("dq", "dk", "dv")))
        found += known.fits(more)
    return concluded(found)


def merges_otherwise(fit: Fit, used: Recipe) -> bool:
    """Tell whether a candidate rounds partial results in another way than the recipe ``used``."""
    return any(
        getattr(recipe, point) != getattr(used, point)
        for _, recipe in fit.candidate.terms
        for point in (*PARTIALS, "merge")
    )


@dataclass(frozen=True)
class Errors:
    """The errors of one head, and the predictions with which candidates are compared with them."""

    errors: Mapping[str, Array]
    attention: Attention
    geometry: Geometry
    used: Recipe
    predict: Predictor
    predicted: dict[tuple[Recipe, tuple[str, ...]], Predicted] = field(default_factory=dict)

    def prediction(self, recipe: Recipe, truncated: tuple[str, ...] = ()) -> Predicted:
        """Return the prediction for a recipe, computed once."""
        key = (recipe, truncated)
        if key not in self.predicted:
            self.predicted[key] = self.predict(
                self.attention, recipe, self.geometry, truncated=truncated
            )
        return self.predicted[key]

    def fits(self, candidates: Sequence[Candidate]) -> list[Fit]:
        """Return the fit of each candidate."""
        return [self.fit(candidate) for candidate in candidates]

    def fit(self, candidate: Candidate) -> Fit:
        parts = [(x, self.prediction(recipe, candidate.truncated)) for x, recipe in candidate.terms]
        bands = self.used if len(parts) > 1 else candidate.terms[0][1]
        rms, scores, good = {}, {}, True
        for name in (name for name in TENSORS if name in self.errors):
            variance = np.asarray(sum(factor * noise.sd[name] ** 2 for factor, noise in parts))
            error = self.errors[name] - parts[0][1].mean.get(name, 0.0)
            declared_sd = self.prediction(self.used).sd[name]
            rms[name], scores[name] = score(error, variance, declared_sd)
            good = good and within(uncut_rms(error, variance, declared_sd), bands, name)
        return Fit(candidate, -sum(scores.values()), good, rms, scores)


def worst_head(
    attention: Attention, errors: Mapping[str, Array], noise: Predicted
) -> tuple[Attention, dict[str, Array]]:
    """Restrict the problem and the errors to the batch and key head with the largest errors relative to ``noise``.

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

    It uses the elements that have noise and a finite error. :data:`LEAST` times the square of the median sd is added to
    each variance, so that elements with almost no noise do not dominate.
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

    Such candidates differ only in the order in which results are merged. The order in which a processor adds changes
    the noise more than that. Without this step, the best candidate would therefore depend on the machine.
    """
    found: dict[tuple[object, ...], Fit] = {}
    for fit in fits:
        first = found.setdefault(fit.candidate.meaning, fit)
        if fit.margin < first.margin:
            found[fit.candidate.meaning] = dataclasses.replace(fit, candidate=first.candidate)
    return list(found.values())


def concluded(fits: Sequence[Fit]) -> Inference:
    """Sort the fits, find the best, and decide whether the declared recipe is contradicted; its fit comes first."""
    fits = one_per_meaning(fits)
    least = min(fit.margin for fit in fits)
    fits = [dataclasses.replace(fit, margin=fit.margin - least) for fit in fits]
    declared = fits[0]
    best = next(fit for fit in fits if fit.margin <= EVEN)
    contradicted = not declared.good and declared.margin - best.margin >= CONTRADICTION
    ordered = tuple(sorted(fits, key=lambda fit: fit.margin))
    return Inference(declared, best, ordered, contradicted)


def within(ratio: float, used: Recipe, tensor: str) -> bool:
    """Tell whether a correct kernel of recipe ``used`` may have this root mean square of error / sd (``ratio``)."""
    band = allowance_for(used, tensor)
    return band.low <= ratio <= band.high
