"""Noise (rounding errors) of dq, dk and dv, which are sums over tiles and over the steps of a ring.

    dq_id = scale sum_j dz_ij k_jd,   dk_jd = scale sum_i dz_ij q_id,   dv_jd = sum_i P_ij keep_ij dy_id

dz is the gradient of the scores before the soft cap, and keep the dropout factor. The errors of P and dz, and the
symbols below, are those of :mod:`~ringspec.compare.noise.backward`. dk and dv are sums over query rows, whose errors
are independent, so their variances are added. dq is a sum over the pairs of one row, which share the errors of the
row's delta and lse, with the covariance cov_i. With "var" for the variance of the error of a number::

    var dq_id = scale^2 sum_j (private + x^2 var sigma)_ij k_jd^2 + g_id^2 var delta_i + h_id^2 var lse_i
              + 2 g h cov_i - 2 scale sum_j x p common (g X_ij + h) k_jd,
                g_id = scale sum_j y_ij k_jd,  h_id = scale sum_j dz_ij k_jd = dq_id

The :class:`~ringspec.compare.noise.problem.Geometry` gives the order of the sums: first the tiles of a block, then the
blocks in the order of the ring's steps. The error of each rounding depends on the size of the partial sum that is
rounded (rules NUM-2, RING-4, RING-5).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringspec.compare.noise.backward import PairNoise, derivatives
from ringspec.compare.noise.problem import Array, Geometry, Head, Integers
from ringspec.compare.noise.rounding import (
    Base,
    Error,
    Partial,
    no_error,
    partial,
    product_error,
    spacing,
    truncation,
)
from ringspec.compare.noise.rows import ReadNoise
from ringspec.compare.noise.worker import Sources
from ringspec.formats import narrower, unit_roundoff
from ringspec.merges import merge_recipe
from ringspec.recipes import Recipe


@dataclass(frozen=True)
class GradientNoise:
    """The noise of one gradient.

    ``value``: the true value. ``error``: the whole error. ``mean`` and ``drift``: the predictable parts of the error.
    ``before``: variance of all errors before the last rounding. ``gain``: the fraction of these errors that remains
    after the last rounding. ``local``: variance of the roundings of the gradient itself, without the part that
    ``drift`` explains.
    """

    value: Array
    error: Error
    local: Array
    mean: Array
    drift: Array
    gain: Array
    before: Array


@dataclass(frozen=True)
class Formats:
    """The formats to which one gradient is rounded on its way.

    ``products``: each tile's product. ``tile``: the sum of the tiles of a block. ``block``: a block's result.
    ``carried``: the sum of the blocks. ``reduced``: whether a block's result is rounded to ``carried`` as well, before
    it is added.
    """

    products: str
    tile: str
    block: str
    carried: str
    reduced: bool = False


def added_up(blocks: Iterable[list[Partial]], formats: Formats) -> Partial | None:
    """Add the tiles of each block, then the blocks, and round after every addition; None if there are no tiles."""
    total = None
    for tiles in blocks:
        run = None
        for tile in tiles:
            share = tile.rounded(formats.products)
            if run is None:
                run = share.rounded(formats.tile)
            else:
                run = joined(run, share, formats.tile)
        if run is None:
            continue
        run = run.rounded(formats.block)
        if formats.reduced:
            run = run.rounded(formats.carried)
        if total is None:
            total = run.rounded(formats.carried)
        else:
            total = joined(total, run, formats.carried)
    return total


def joined(total: Partial, share: Partial, name: str) -> Partial:
    """Add ``share`` to the accumulator ``total`` and round the sum to the format ``name``.

    ``total`` is already a number of this format, so the error of the rounding depends only on ``share``.
    """
    base = Base(total.value + total.drift, total.grid, share.unknown(), share.unknown())
    return total.plus(share).rounded(name, base)


def significant(x: Array, name: str, axis: int) -> Array:
    """Count the terms along ``axis`` that exceed the unit roundoff of the format times the largest term."""
    size = np.abs(x)
    return (size > unit_roundoff(name) * size.max(axis=axis, keepdims=True, initial=0.0)).sum(
        axis=axis
    )


def share_of(
    left: Array, right: Array, before: Error, factor: float, recipe: Recipe, grid: bool = False
) -> Partial:
    """Compute left [.., n, m] @ right [.., m, D] times ``factor``, with the error of the accumulation.

    ``before``: the error of the result that the errors of ``left`` cause. ``grid``: True if the product is a number of
    the accumulator's format, because it is neither scaled nor summed over heads afterwards.
    """
    value = left @ right
    count = significant(left, recipe.products, axis=-1)[..., None]
    squares = (left * left) @ (right * right)
    own = product_error(value, squares, count, recipe.products).times(factor)
    value = value * factor
    made = partial(value, before, spacing(value, recipe.products) if grid else 0.0)
    return Partial(made.value, made.grid, before + own, own)


class Sums:
    """One gradient of the whole problem, assembled from the part of each worker."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.value, self.drift, self.explained = (np.zeros(shape) for _ in range(3))
        self.grid = np.full(shape, np.inf)
        self.error, self.local = no_error(shape), no_error(shape)

    def put(self, place: Any, one: Partial) -> None:
        self.value[place], self.grid[place] = one.value, one.grid
        self.drift[place], self.explained[place] = one.drift, one.explained
        for mine, its in ((self.error, one.error), (self.local, one.local)):
            mine.variance[place], mine.bound[place] = its.variance, its.bound

    def partial(self) -> Partial:
        return Partial(self.value, self.grid, self.error, self.local, self.drift, self.explained)


def dq_noise(
    head: Head,
    recipe: Recipe,
    geometry: Geometry,
    sources: Sources,
    read: ReadNoise,
    pairs: PairNoise,
    truncated: tuple[str, ...],
) -> GradientNoise:
    """Predict the noise of dq [G, Sq, D]."""
    formats = Formats(recipe.products, recipe.tile_dq, recipe.block_gradients, recipe.carried_dq)
    of_dz = RowErrors(head, sources, read, pairs)
    sums = Sums(head.q.shape)
    for r in range(geometry.workers):
        queries = geometry.queries(r)
        blocks = (
            [
                dq_share(head, recipe, queries, keys, of_dz)
                for keys in geometry.key_tiles(int(b), recipe.tile_k)
            ]
            for b in geometry.order_dq[r]
            if b >= 0 and queries.size
        )
        total = added_up(blocks, formats)
        if total is not None:
            sums.put((slice(None), queries), total)
    every = np.arange(head.q.shape[1]), np.arange(head.k.shape[0])
    error = of_dz.in_dq(*every) + sums.local
    # Errors of delta that cancel between blocks do not cancel if each block rounded them away.
    error = Error(np.maximum(error.variance, sums.drift**2), error.bound)
    before = dataclasses.replace(sums.partial(), error=error)
    y = derivatives(head)[1]
    mean, g = head.scale * (pairs.mean_dz @ head.k), head.scale * (y @ head.k)
    passed_on = Passed(-read.drift[..., None] * g, read.explained[..., None] * g * g)
    return ended(before, recipe.replace(gradients=dq_format(recipe)), mean, passed_on, truncated)


def dq_format(recipe: Recipe) -> str:
    """Return the format of the final dq, which a merge recipe may name for all formats of inputs."""
    how = None if recipe.merge_recipe is None else merge_recipe(recipe.merge_recipe).dq
    if how is None or how.result in ("own", "carried"):
        return recipe.gradients
    return narrower(recipe.gradients, how.result)


def dq_share(
    head: Head, recipe: Recipe, queries: Integers, keys: Integers, of_dz: RowErrors
) -> Partial:
    assert head.dz is not None
    index = np.ix_(np.arange(head.q.shape[0]), queries, keys)
    before = of_dz.in_dq(queries, keys)
    return share_of(head.dz[index], head.k[keys], before, head.scale, recipe)


@dataclass(frozen=True)
class RowErrors:
    """The errors of dz, of which the pairs of a row share those of delta and lse."""

    head: Head
    sources: Sources
    read: ReadNoise
    pairs: PairNoise

    def in_dq(self, queries: Integers, keys: Integers) -> Error:
        """Return the error of scale sum_j dz_ij k_jd over ``keys`` [G, queries, D], by the formula in the module's docstring.

        The errors of delta and lse largely cancel where the sum of y k or of dz k over the keys is near 0.
        """
        head, read = self.head, self.read
        assert head.dz is not None and head.dp is not None
        assert head.delta is not None and head.dlse is not None
        at = np.ix_(np.arange(head.q.shape[0]), queries, keys)
        x, y = (one[at] for one in derivatives(head))
        dz, k, scale = head.dz[at], head.k[keys], head.scale
        private = self.pairs.private + self.pairs.of_ds
        alone = private.variance[at] + x * x * self.sources.sigma.variance[at]
        g, h = scale * (y @ k), scale * (dz @ k)
        direct = x * head.p[at] * self.sources.common[at]
        total = (head.delta + head.dlse)[:, queries, None]
        of_delta, of_lse = (
            Error(one.variance[:, queries, None], one.bound[:, queries, None])
            for one in (read.delta, read.lse)
        )
        variance = scale**2 * (alone @ (k * k))
        variance += g * g * of_delta.variance + h * h * of_lse.variance
        variance += 2 * g * h * read.covariance[:, queries, None]
        variance -= 2 * scale * (g * ((direct * (head.dp[at] - total)) @ k) + h * (direct @ k))
        bound = abs(scale) * (private.bound[at] @ np.abs(k))
        bound += np.abs(h) * self.pairs.growth[:, queries, None] + np.abs(g) * of_delta.bound
        return Error(np.maximum(variance, 0.0), bound)


@dataclass(frozen=True)
class Passed:
    """The error of a gradient that the known error of delta causes (``drift``), and the variance that it explains."""

    drift: Array
    explained: Array


def ended(
    before: Partial, recipe: Recipe, mean: Array, passed_on: Passed, truncated: tuple[str, ...]
) -> GradientNoise:
    """Return the noise of a gradient after its last rounding."""
    drift, explained = before.drift + passed_on.drift, before.explained + passed_on.explained
    if "gradients" in truncated:
        made, lost = truncation(before.value, recipe.gradients, before.grid)
        local = before.local.variance + made.variance - before.explained
        one = np.ones(mean.shape)
        error, unknown = before.error + made, before.unknown()
        return GradientNoise(before.value, error, local, mean + lost, drift, one, unknown)
    shifted = Partial(
        before.value + mean, before.grid, before.error, before.local, drift, explained
    )
    after = shifted.rounded(recipe.gradients)
    own = np.maximum(before.local.variance - before.explained, 0.0)
    local, gain = after.unshared(shifted, own), after.gain + np.zeros(mean.shape)
    drift = np.asarray(after.drift)
    return GradientNoise(before.value, after.error, local, mean, drift, gain, shifted.unknown())


def dkv_noise(
    head: Head,
    recipe: Recipe,
    geometry: Geometry,
    read: ReadNoise,
    pairs: PairNoise,
    of_kept: Error,
    truncated: tuple[str, ...],
) -> tuple[GradientNoise, GradientNoise]:
    """Predict the noise of dk [Sk, D] and dv [Sk, Dv], which are sums over the query heads of a key head (BWD-6)."""
    assert head.dz is not None and head.dy is not None
    kept = head.p if head.keep is None else head.p * head.keep
    of_dz = pairs.dz + pairs.of_ds
    mean_dk = head.scale * (pairs.mean_dz.swapaxes(1, 2) @ head.q).sum(axis=0)
    mean_dv = (pairs.mean_p.swapaxes(1, 2) @ head.dy).sum(axis=0)
    dk = key_side(head, recipe, geometry, head.dz, head.q, of_dz, head.scale)
    dv = key_side(head, recipe, geometry, kept, head.dy, of_kept, 1.0)
    weight = head.scale * derivatives(head)[1].swapaxes(1, 2)
    passed_on = Passed(
        -(weight @ (read.drift[..., None] * head.q)).sum(axis=0),
        (weight**2 @ (read.explained[..., None] * head.q**2)).sum(axis=0),
    )
    nothing = Passed(np.zeros(dv.value.shape), np.zeros(dv.value.shape))
    return (
        ended(dk, recipe, mean_dk, passed_on, truncated),
        ended(dv, recipe, mean_dv, nothing, truncated),
    )


def kept_error(head: Head, sources: Sources, read: ReadNoise, pairs: PairNoise) -> Error:
    """Return the error of P * keep as an operand of dv: its own roundings, and the errors of its score and lse."""
    kept = head.p if head.keep is None else head.p * head.keep
    shared = sources.sigma.variance - 2 * head.p * sources.common + read.lse.variance[..., None]
    variance = pairs.kept.variance + kept**2 * np.maximum(shared, 0.0)
    return Error(variance, pairs.kept.bound + kept * pairs.growth[..., None])


def key_side(
    head: Head,
    recipe: Recipe,
    geometry: Geometry,
    left: Array,
    right: Array,
    upstream: Error,
    factor: float,
) -> Partial:
    """Compute ``factor`` * sum over heads and queries i of left_ij right_id, in the order of the geometry."""
    sums = Sums((head.k.shape[0], right.shape[2]))
    formats = Formats(
        recipe.products,
        recipe.tile_dkv,
        recipe.block_gradients,
        recipe.carried_dkv,
        geometry.reduced_dkv,
    )
    for b in range(geometry.workers):
        keys = geometry.keys(b)
        blocks = (
            [
                key_share(recipe, queries, keys, left, right, upstream, factor)
                for queries in geometry.query_tiles(int(a), recipe.tile_q)
            ]
            for a in geometry.order_dkv[b]
            if a >= 0 and keys.size
        )
        total = added_up(blocks, formats)
        if total is not None:
            sums.put(keys, total)
    return sums.partial()


def key_share(
    recipe: Recipe,
    queries: Integers,
    keys: Integers,
    left: Array,
    right: Array,
    upstream: Error,
    factor: float,
) -> Partial:
    """Return the contribution of one tile, summed over the query heads of the key head."""
    index = np.ix_(np.arange(left.shape[0]), queries, keys)
    turned = Error(upstream.variance[index].swapaxes(1, 2), upstream.bound[index].swapaxes(1, 2))
    single = left.shape[0] == 1 and factor == 1.0
    on = right[:, queries]
    before = Error(turned.variance @ (on * on), turned.bound @ np.abs(on)).times(factor)
    each = share_of(left[index].swapaxes(1, 2), on, before, factor, recipe, grid=single)
    return Partial(
        each.value.sum(axis=0),
        each.grid[0] if single else np.where(each.value.sum(axis=0) == 0, np.inf, 0.0),
        Error(each.error.variance.sum(axis=0), each.error.bound.sum(axis=0)),
        Error(each.local.variance.sum(axis=0), each.local.bound.sum(axis=0)),
    )
