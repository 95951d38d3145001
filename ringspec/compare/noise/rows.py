"""Compute the errors of o, lse and delta of each row from the rounding errors of the forward pass.

delta = <dy, o> - dlse is computed from the rounded o, so every error of o changes delta. The errors of the scores and
of the softmax sum l change both delta and lse. Let D = <dy, o> and X_ij = dp_ij - D_i. The errors sigma, eta, zeta,
lambda, gamma and omega, and u, are those of :mod:`~ringspec.compare.noise.forward`. Then the error of delta is::

    err delta_i = sum_j zeta_ij <dy_i, v_j> + sum_j p_ij (sigma + eta)_ij X_ij - D_i lambda_i
                + sum_n gamma_in <dy_i, u_in> + sum_d dy_id omega_id + its own roundings

All elements of a row of dS = p (dp - delta) use the same delta and the same lse. An error of delta or lse therefore
changes many elements of dq and dk at once. These errors are correlated, so the variance of a sum over a tensor is not
the sum of the variances.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from ringspec.compare.noise.problem import Array, Head
from ringspec.compare.noise.rounding import (
    Base,
    Error,
    Partial,
    partial,
    rounding,
    row_sum_error,
    spacing,
    sum_rounding,
    truncation,
)
from ringspec.compare.noise.worker import FUNCTION_ULPS, Sources
from ringspec.formats import narrower
from ringspec.merges import merge_recipe
from ringspec.merges.merge import LOG2_E
from ringspec.recipes import Recipe


@dataclass(frozen=True)
class RowNoise:
    """The errors of o and lse as the forward pass returns them.

    ``o`` [G, Sq, Dv] and ``lse`` [G, Sq]: the total errors. The other fields describe the error of o. ``mean`` and
    ``drift``: its predictable parts; ``explained``: the variance that ``drift`` explains. ``output``: the rest of the
    variance that an element shares with no other element. ``before``: the variance before the last rounding.
    ``gain``: the fraction of the errors before the last rounding that remains after it.
    """

    o: Error
    mean: Array
    drift: Array
    explained: Array
    output: Array
    gain: Array
    before: Array
    lse: Error


@dataclass(frozen=True)
class ReadNoise:
    """The errors of lse and delta [G, Sq] as the backward pass reads them, and their ``covariance``.

    ``mean`` and ``drift``: the predictable parts of delta's error; ``explained``: the variance that ``drift``
    explains.
    """

    lse: Error
    delta: Error
    covariance: Array
    mean: Array
    drift: Array
    explained: Array


def relative_variance(sources: Sources) -> Array:
    """Return the variance of the relative error of e = exp(s - m), from the scores and the roundings of e."""
    return sources.sigma.variance + sources.eta.variance


def relative_bound(sources: Sources) -> Array:
    with np.errstate(over="ignore"):
        return np.expm1(sources.sigma.bound) * (1 + sources.eta.bound) + sources.eta.bound


def row_noise(head: Head, recipe: Recipe, sources: Sources, truncated: tuple[str, ...]) -> RowNoise:
    """Predict the errors of o and lse as the forward pass returns them."""
    before = o_error(head, sources)
    on_grid = recipe.merge_order == "normalised" and head.sinks is None
    grid: Array | float = 0.0
    if on_grid:
        grid = np.maximum(spacing(head.o, recipe.carried_o), spacing(head.o, recipe.merge))
    keep_mean = sources.mean @ head.v
    made = partial(head.o + keep_mean, before, grid)
    made = dataclasses.replace(made, drift=sources.drift, explained=sources.explained)
    rounded = made.rounded(recipe.outputs, base_of_o(head, recipe, made))
    own = np.maximum(sources.omega.variance - sources.explained, 0.0)
    if "outputs" in truncated:
        local, mean = truncation(head.o, recipe.outputs, grid)
        rounded = dataclasses.replace(made, error=before + local)
        keep_mean = keep_mean + mean
    lse = lse_error(head, recipe, sources)
    return RowNoise(
        rounded.error,
        keep_mean,
        np.asarray(rounded.drift),
        np.asarray(rounded.explained),
        np.maximum(rounded.unshared(made, own), 0.0),
        rounded.gain + np.zeros(head.o.shape),
        made.unknown(),
        lse,
    )


def base_of_o(head: Head, recipe: Recipe, made: Partial) -> Base | None:
    """Return the o that is kept between ring steps, from which the result differs by a known amount, or None.

    If partial results are normalised and there are sinks, this o is rounded, and then multiplied by a factor that adds
    the sinks to the denominator. In all other cases the result is None.
    """
    if recipe.merge_order != "normalised" or head.sinks is None:
        return None
    mass = head.p.sum(axis=2, keepdims=True)
    safe = np.where(mass > 0, mass, 1.0)
    carried = (made.value + made.drift) / safe
    variance = made.unknown() / safe**2
    return Base(
        carried,
        spacing(carried, recipe.carried_o),
        (1 - mass) ** 2 * variance,
        -mass * (1 - mass) * variance,
    )


def o_error(head: Head, sources: Sources) -> Error:
    """Return the error of o before its last rounding: its first-order variance and a bound.

    The bound divides the worst numerator by the worst denominator: (N + dN) / (1 - dL).
    """
    v, o, p = head.v, head.o, head.p
    weight = relative_variance(sources) * p * p
    kept = weight if head.keep is None else weight * head.keep
    kept_twice = kept if head.keep is None else kept * head.keep
    variance = (sources.zeta.variance + kept_twice) @ (v * v) - 2 * o * (kept @ v)
    variance += o * o * (weight.sum(axis=2) + sources.lam.variance)[..., None]
    variance = np.maximum(variance, 0.0) + sources.omega.variance
    for one in sources.shared:
        variance += one.variance[..., None] * one.u**2
    relative = relative_bound(sources)
    p_bound = p * relative
    kept_bound = p_bound if head.keep is None else p_bound * head.keep
    operand = kept_bound + sources.zeta.bound * (1 + relative)
    top = operand @ np.abs(v) + sources.top + sources.omega.bound
    bottom = p_bound.sum(axis=2) + sources.lam.bound + sources.bottom
    bottom = np.minimum(bottom, 0.5)[..., None]
    return Error(variance, (top + np.abs(o) * bottom) / (1 - bottom))


def lse_error(head: Head, recipe: Recipe, sources: Sources) -> Error:
    """Return the error of lse as the forward pass returns it; 0 for an empty row."""
    weight = relative_variance(sources) * head.p**2
    variance = weight.sum(axis=2) + sources.lam.variance
    for one in sources.shared:
        variance = variance + one.variance * one.a**2
    bottom = (head.p * relative_bound(sources)).sum(axis=2)
    bottom = np.minimum(bottom + sources.lam.bound + sources.bottom, 0.5)
    lse = np.where(np.isneginf(head.lse), 0.0, head.lse)
    on_grid = recipe.merge_order == "normalised" and head.sinks is None
    carried = recipe.statistics
    if recipe.merge_recipe is not None:
        carried = narrower(carried, "float32")
    of_sum = recipe.statistics if on_grid else carried  # a normalised block has its own logarithm
    grid: Array | float = spacing(lse, carried) if on_grid else 0.0
    before = Error(variance, -np.log1p(-bottom))
    # log(l) is rounded before m is added. A sum m + log(l) in higher precision has less noise.
    high = np.where(head.seen, head.s, -np.inf).max(axis=2, initial=-np.inf)
    more = np.where(np.isneginf(high), 0.0, lse - high)
    of_log = rounding(more, of_sum)
    if recipe.merge_recipe is not None:
        of_log = Error(of_log.variance, of_log.bound * (2 * FUNCTION_ULPS + 1))
    before = before + of_log
    if recipe.merge_recipe is not None and not on_grid:  # m and log(l) are numbers of the format
        before = before + sum_rounding(lse - more, more, carried)
        grid = spacing(lse, carried)
    if recipe.merge_recipe is not None and merge_recipe(recipe.merge_recipe).natural_result:
        grid = 0.0  # a quotient, of a rounded constant
        off = np.abs(lse) * abs(float(LOG2_E) * math.log(2.0) - 1)
        before = before + Error(off * off, off)
    return partial(lse, before, grid).rounded(recipe.lse).error


def read_noise(head: Head, recipe: Recipe, sources: Sources, rows: RowNoise) -> ReadNoise:
    """Return the errors of lse and delta as the backward pass reads them; lse is rounded to ``backward_lse``."""
    assert head.dy is not None and head.dp is not None
    assert head.delta is not None and head.dlse is not None
    dy, let_through = head.dy, head.dy * rows.gain
    weight = relative_variance(sources) * head.p**2
    unkept, total = let_through @ head.v.T, (let_through * head.o).sum(axis=2)
    x = (unkept if head.keep is None else unkept * head.keep) - total[..., None]
    explained = (dy * dy * rows.explained).sum(axis=2)
    variance = (sources.zeta.variance * unkept**2).sum(axis=2) + explained
    variance += (weight * x * x).sum(axis=2) + total**2 * sources.lam.variance
    variance += (dy * dy * rows.output).sum(axis=2)
    covariance = (weight * x).sum(axis=2) - total * sources.lam.variance
    for one in sources.shared:
        along = (let_through * one.u).sum(axis=2)
        variance += one.variance * along**2
        covariance += one.variance * along * one.a
    before = Error(variance, (np.abs(dy) * rows.o.bound).sum(axis=2))
    lse = np.where(np.isneginf(head.lse), 0.0, head.lse)
    read = partial(lse, rows.lse, spacing(lse, recipe.lse)).rounded(recipe.backward_lse).error
    mean, drift = (dy * rows.mean).sum(axis=2), (dy * rows.drift).sum(axis=2)
    delta = delta_error(head, recipe, before, rows)
    return ReadNoise(read, delta, covariance, mean, drift, explained)


def delta_error(head: Head, recipe: Recipe, before: Error, rows: RowNoise) -> Error:
    """Return the error of delta = <dy, o> - dlse (rule BWD-1), given the error ``before`` that the errors of o cause.

    It adds the roundings of the products, of their sum, and of the subtraction of dlse where dlse is not 0.
    """
    assert head.dy is not None and head.delta is not None and head.dlse is not None
    dy, o, total = head.dy, head.o, head.delta + head.dlse
    products = dy * o
    grid = spacing(dy, recipe.inputs) * spacing(o, recipe.outputs)
    reach = np.abs(dy) * rows.o.bound
    of_products = rounding(products, recipe.dy_o_products, grid, dy**2 * rows.o.variance, reach)
    accumulator = "float64" if recipe.delta == "float64" else "float32"
    size = products**2 + dy**2 * rows.o.variance
    of_sum = row_sum_error(total, size.sum(axis=2), float(dy.shape[2]), accumulator)
    error = before + of_sum
    error = error + Error(of_products.variance.sum(axis=2), of_products.bound.sum(axis=2))
    rounded = partial(total, error, spacing(total, accumulator)).rounded(recipe.delta)
    again = rounding(head.delta, recipe.delta, upstream=error.variance, reach=rounded.error.bound)
    less = head.dlse != 0
    return Error(
        rounded.error.variance + np.where(less, again.variance, 0.0),
        rounded.error.bound + np.where(less, again.bound, 0.0),
    )
