"""Noise (rounding errors) of P and dS in the backward pass, for each pair of a query i and a key j.

The backward pass recomputes P = exp(s - lse) from the lse of the forward pass, and computes dS = P (dp - delta) with
dp = <dy, v> and delta = <dy, o> - dlse. dz = dS (1 - t^2) is the gradient of the score before the soft cap, where t is
the tanh of the soft cap, or 0 without a soft cap. If "err" stands for the error of a number, then to first order::

    err P_ij  = P_ij (sigma_ij - err lse_i + its own roundings)
    err dz_ij = x_ij sigma_ij - dz_ij err lse_i - y_ij err delta_i + private_ij,
                y = p (1 - t^2),  x = dz - 2 t ds / softcap

sigma is the error of a score. ``private`` contains the other errors that belong to one pair: the rounding of exp and
the accumulation of dp. The errors of lse and delta are the same for the whole row.

If the scores of both passes are equal bit for bit, sigma also contributes to the errors of lse and delta:
cov(sigma_ij, err lse_i) = p var sigma and cov(sigma_ij, err delta_i) = p X var sigma with X_ij = dp_ij - <dy_i, o_i>.
In a peaked row most of the error then cancels. In the code, ``common`` stands for var sigma in these covariances; it is
0 if the scores of the two passes differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspec.compare.noise.problem import Array, Head
from ringspec.compare.noise.rounding import (
    Error,
    product_error,
    rounding,
    spacing,
    truncated_to,
    truncation,
)
from ringspec.compare.noise.rows import ReadNoise
from ringspec.compare.noise.worker import Sources
from ringspec.formats import format_of, round_to
from ringspec.recipes import Recipe


@dataclass(frozen=True)
class PairNoise:
    """Errors of dz and P for a key head and its G query heads, each [G, Sq, Sk].

    ``private``: the part of dz's error that belongs to one pair. ``dz``: the whole error of dz. Both are errors before
    dz is rounded as an operand of the products dq and dk; ``of_ds`` is the error of that rounding. ``kept``: the error
    of P times the dropout factor as an operand of dv, without the errors of score and lse. ``mean_dz``, ``mean_p``: the
    predictable parts of the errors of dz and P. ``growth`` [G, Sq]: the largest relative change of P by the error of
    lse, e^|err lse| - 1. The bounds of ``private`` and ``kept`` include the terms of higher order in the errors of lse
    and delta.
    """

    private: Error
    of_ds: Error
    kept: Error
    dz: Error
    mean_dz: Array
    mean_p: Array
    growth: Array


def derivatives(head: Head) -> tuple[Array, Array]:
    """Return the derivatives of dz with respect to its score (x) and to -delta (y)."""
    assert head.ds is not None and head.dz is not None
    if head.damping is None:
        return head.dz, head.p
    assert head.tanh is not None and head.softcap is not None
    return head.dz - 2 * head.tanh * head.ds / head.softcap, head.p * head.damping


def pair_noise(
    head: Head,
    recipe: Recipe,
    sources: Sources,
    read: ReadNoise,
    truncated: tuple[str, ...] = (),
    inner: float = 1.0,
) -> PairNoise:
    """Compute the errors of dz and of P for one head; ``inner`` multiplies the variance of accumulating dp."""
    assert head.ds is not None and head.dz is not None and head.dp is not None
    p, ds, dz, sigma = head.p, head.ds, head.dz, sources.sigma
    own = own_error(head, recipe)
    of_dp = dp_error(head, recipe, inner)
    x, y = derivatives(head)
    with np.errstate(over="ignore"):
        growth = np.expm1(read.lse.bound)
        mine = np.expm1(sigma.bound) * (1 + own.bound) + own.bound
    both = mine + growth[..., None] * (1 + mine)
    # The bound covers all of dz's error except dz * growth and y times the error of delta.
    bound = np.abs(dz) * mine * (1 + growth[..., None])
    bound += y * ((1 + both) * of_dp.bound + both * read.delta.bound[..., None])
    if head.tanh is not None:
        assert head.softcap is not None
        of_tanh = sigma.bound / head.softcap
        reached = np.abs(ds) * (1 + both)
        reached += p * (1 + both) * (of_dp.bound + read.delta.bound[..., None])
        bound += reached * (2 * np.abs(head.tanh) * of_tanh + of_tanh**2)
    private = Error(dz**2 * own.variance + y**2 * of_dp.variance, bound)
    before = whole_variance(head, sources, read, private.variance, x, y)
    reach = bound + np.abs(dz) * growth[..., None] + y * read.delta.bound[..., None]
    of_ds, mean_ds = operand_rounding(dz, recipe.ds, before, reach, "ds" in truncated)
    mean_dz = mean_ds - y * read.mean[..., None]
    kept, mean_p = kept_noise(head, recipe, own, mine, growth, "p" in truncated)
    return PairNoise(private, of_ds, kept, Error(before, reach), mean_dz, mean_p, growth)


def own_error(head: Head, recipe: Recipe) -> Error:
    """Return the relative error of p = exp(s - lse) that the rounding of s - lse and of p causes; p = 1 is exact."""
    p = head.p
    lse = np.where(np.isneginf(head.lse), 0.0, head.lse)
    of_argument = rounding(np.where(p > 0, head.s - lse[..., None], 0.0), recipe.statistics)
    error = rounding(p, recipe.statistics).relative_to(p) + of_argument
    exact = (p == 0) | (p == 1)
    return Error(np.where(exact, 0.0, error.variance), error.bound)


def dp_error(head: Head, recipe: Recipe, inner: float) -> Error:
    """Return the error of accumulating <dy, v>, times the dropout factor; ``inner`` multiplies its variance."""
    assert head.dy is not None and head.dp is not None
    total = head.dp if head.keep is None else head.dy @ head.v.T
    squares = (head.dy**2) @ (head.v**2).T
    width, digits = float(head.v.shape[1]), 2 * format_of(recipe.inputs).precision
    error = product_error(total, squares, width, recipe.products, digits)
    error = Error(inner * error.variance, error.bound)
    return error if head.keep is None else error.times(head.keep)


def whole_variance(
    head: Head, sources: Sources, read: ReadNoise, private: Array, x: Array, y: Array
) -> Array:
    """Return the variance of the whole error of dz for each pair, including the errors of its row's lse and delta."""
    assert head.dz is not None and head.dp is not None
    assert head.delta is not None and head.dlse is not None
    dz, total = head.dz, head.delta + head.dlse
    variance = private + sources.sigma.variance * x * x
    variance -= 2 * sources.common * x * head.p * (y * (head.dp - total[..., None]) + dz)
    variance += dz**2 * read.lse.variance[..., None] + y**2 * read.delta.variance[..., None]
    variance += 2 * y * dz * read.covariance[..., None]
    return np.maximum(variance, 0.0)


def operand_rounding(
    x: Array, name: str, upstream: Array, reach: Array, truncated: bool
) -> tuple[Error, Array]:
    """Return the error of rounding (or, if ``truncated``, truncating) an operand, and the mean of this error."""
    if not truncated:
        return rounding(x, name, upstream=upstream, reach=reach), np.zeros(x.shape)
    made, mean = truncation(x, name, 0.0)
    return made, mean


def kept_noise(
    head: Head, recipe: Recipe, own: Error, mine: Array, growth: Array, truncated: bool
) -> tuple[Error, Array]:
    """Return the error of P times the dropout factor as an operand of dv, and the mean of this error.

    In a row of equal scores all P have the same rounding error; this common error is the mean.
    """
    p = head.p
    kept = p if head.keep is None else p * head.keep
    grid = spacing(p, recipe.statistics) if head.keep is None else 0.0
    bound = kept * mine * (1 + growth[..., None])
    if truncated:
        made, known = truncation(kept, recipe.p, grid)
    else:
        reach = bound + kept * growth[..., None]
        made, known = rounding(kept, recipe.p, grid, reach=reach), np.zeros(p.shape)
    low = head.s.min(axis=2, where=head.seen, initial=np.inf)
    high = head.s.max(axis=2, where=head.seen, initial=-np.inf)
    flat = (low == high)[..., None]
    if flat.any():
        certain = (truncated_to if truncated else round_to)(kept, recipe.p) - kept
        known = np.where(flat, certain, known)
        made = Error(np.where(flat, 0.0, made.variance), made.bound)
    return Error(kept**2 * own.variance + made.variance, bound + made.bound), known
