"""Noise of dq, dk and dv: the products of P and dS, and their sums over tiles and ring steps.

    dq_id = scale sum_j dz_ij k_jd,   dk_jd = scale sum_i dz_ij q_id,   dv_jd = sum_i P_ij keep_ij dy_id

What a pair brings (:mod:`noise_backward`) is squared and summed; rows are independent, so dk and dv add
variances over rows as they stand, while one row of dq shares the errors of its delta and lse::

    var dq_id = scale^2 sum_j (private + x^2 var sigma)_ij k_jd^2 + g_id^2 var delta_i + h_id^2 var lse_i
              + 2 g h cov_i - 2 scale sum_j x p common (g X_ij + h) k_jd,
                g_id = scale sum_j y_ij k_jd,  h_id = scale sum_j dz_ij k_jd = dq_id

The sums follow the geometry: the tiles of a block, then blocks in the order of the ring's steps, each rounding
at the size of the partial sum that is there (rules NUM-2, RING-4, RING-5).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ringspec.compare.noise_backward import PairNoise, derivatives
from ringspec.compare.noise_forward import Sources, truncation
from ringspec.compare.noise_problem import Array, Geometry, Head, Integers
from ringspec.compare.noise_rounding import (
    Base,
    Error,
    Partial,
    partial,
    product_error,
    spacing,
)
from ringspec.compare.noise_rows import ReadNoise
from ringspec.formats import unit_roundoff
from ringspec.recipes import Recipe


@dataclass(frozen=True)
class GradientNoise:
    """Of one gradient: true ``value``, all its ``error``, the variance of its own roundings, known parts."""

    value: Array
    error: Error
    local: Array
    mean: Array
    drift: Array


@dataclass(frozen=True)
class Formats:
    """Where one gradient is rounded, from the product to what is carried between ring steps."""

    products: str
    tile: str
    block: str
    carried: str
    reduced: bool = False


def added_up(blocks: Iterable[list[Partial]], formats: Formats) -> Partial | None:
    """The tiles of each block, then the blocks, every sum rounded; None without any."""
    total = None
    for tiles in blocks:
        run = None
        for tile in tiles:
            share = tile.rounded(formats.products)
            if run is None:
                run = share.rounded(formats.tile)
            else:
                run = run.plus(share).rounded(formats.tile, Base(run.value, run.grid))
        if run is None:
            continue
        run = run.rounded(formats.block)
        if formats.reduced:
            run = run.rounded(formats.carried)
        if total is None:
            total = run.rounded(formats.carried)
        else:
            total = total.plus(run).rounded(formats.carried, Base(total.value, total.grid))
    return total


def significant(x: Array, name: str, axis: int) -> Array:
    """How many terms of a sum along an axis reach its last bit: smaller ones are lost, not rounded."""
    size = np.abs(x)
    return (size > unit_roundoff(name) * size.max(axis=axis, keepdims=True, initial=0.0)).sum(
        axis=axis
    )


def share_of(
    left: Array, right: Array, upstream: Error, factor: float, recipe: Recipe, grid: bool = False
) -> Partial:
    """left [.., n, m] @ right [.., m, D] times factor, with the errors of left and of the accumulation.

    ``grid``: the product leaves the accumulator as it is, so it lies on that format's grid.
    """
    value = left @ right
    squares = right * right
    count = significant(left, recipe.products, axis=-1)[..., None]
    own = product_error(value, (left * left) @ squares, count, recipe.products).times(factor)
    before = Error(upstream.variance @ squares, upstream.bound @ np.abs(right)).times(factor)
    value = value * factor
    made = partial(value, before, spacing(value, recipe.products) if grid else 0.0)
    return Partial(made.value, made.grid, before + own, own)


def dq_noise(
    head: Head,
    recipe: Recipe,
    geometry: Geometry,
    sources: Sources,
    read: ReadNoise,
    pairs: PairNoise,
    truncated: tuple[str, ...],
) -> GradientNoise:
    """dq [G, Sq, D], with what its rows share."""
    assert head.dz is not None
    x, y = derivatives(head)
    sigma = sources.sigma.variance
    private = pairs.private + pairs.of_ds
    alone = Error(private.variance + x * x * sigma, private.bound)
    formats = Formats(recipe.products, recipe.tile_dq, recipe.block_gradients, recipe.carried_dq)
    whole = error_of_dq(head, sources, read, pairs, alone, x, y)
    value, grid = np.zeros(head.q.shape), np.full(head.q.shape, np.inf)
    made, drift = Error(np.zeros(value.shape), np.zeros(value.shape)), np.zeros(value.shape)
    for r in range(geometry.workers):
        queries = geometry.queries(r)
        blocks = (
            [
                dq_share(head, recipe, queries, keys, alone)
                for keys in geometry.key_tiles(int(b), recipe.tile_k)
            ]
            for b in geometry.order_dq[r]
            if b >= 0 and queries.size
        )
        total = added_up(blocks, formats)
        if total is not None:
            value[:, queries], grid[:, queries] = total.value, total.grid
            made.variance[:, queries] = total.local.variance
            made.bound[:, queries] = total.local.bound
            drift[:, queries] = total.drift
    before = Partial(value, grid, whole + made, made, drift)
    mean = head.scale * (pairs.mean_dz @ head.k)
    passed_on = -head.scale * read.drift[..., None] * (y @ head.k)
    return ended(before, recipe, mean, passed_on, truncated)


def dq_share(
    head: Head, recipe: Recipe, queries: Integers, keys: Integers, alone: Error
) -> Partial:
    assert head.dz is not None
    index = np.ix_(np.arange(head.q.shape[0]), queries, keys)
    upstream = Error(alone.variance[index], alone.bound[index])
    return share_of(head.dz[index], head.k[keys], upstream, head.scale, recipe)


def error_of_dq(
    head: Head,
    sources: Sources,
    read: ReadNoise,
    pairs: PairNoise,
    alone: Error,
    x: Array,
    y: Array,
) -> Error:
    """What P and dS bring to dq: the formula in the module's docstring."""
    assert head.dz is not None and head.dp is not None
    assert head.delta is not None and head.dlse is not None
    k, scale, total = head.k, head.scale, head.delta + head.dlse
    g, h = scale * (y @ k), scale * (head.dz @ k)
    direct = x * head.p * sources.common
    variance = scale**2 * (alone.variance @ (k * k))
    variance += g * g * read.delta.variance[..., None] + h * h * read.lse.variance[..., None]
    variance += 2 * g * h * read.covariance[..., None]
    variance -= 2 * scale * (g * ((direct * (head.dp - total[..., None])) @ k) + h * (direct @ k))
    bound = abs(scale) * (alone.bound @ np.abs(k))
    bound += np.abs(h) * pairs.growth[..., None] + np.abs(g) * read.delta.bound[..., None]
    return Error(np.maximum(variance, 0.0), bound)


def ended(
    before: Partial,
    recipe: Recipe,
    mean: Array,
    drift: Array | float,
    truncated: tuple[str, ...],
    near: Base | None = None,
) -> GradientNoise:
    """The last rounding, to the format of gradients."""
    if "gradients" in truncated:
        made, lost = truncation(before.value, recipe.gradients, before.grid)
        local = before.local.variance + made.variance
        drift = drift + before.drift + np.zeros(mean.shape)
        return GradientNoise(before.value, before.error + made, local, mean + lost, drift)
    after = before.rounded(recipe.gradients, near)
    drift = drift + after.drift + np.zeros(mean.shape)
    return GradientNoise(after.value, after.error, after.local.variance, mean, drift)


def dkv_noise(
    head: Head,
    recipe: Recipe,
    geometry: Geometry,
    read: ReadNoise,
    pairs: PairNoise,
    of_kept: Error,
    truncated: tuple[str, ...],
) -> tuple[GradientNoise, GradientNoise]:
    """dk [Sk, D] and dv [Sk, Dv] of a key head, summed over its query heads (BWD-6)."""
    assert head.dz is not None and head.dy is not None
    kept = head.p if head.keep is None else head.p * head.keep
    of_dz = pairs.dz + pairs.of_ds
    mean_dk = head.scale * (pairs.mean_dz.swapaxes(1, 2) @ head.q).sum(axis=0)
    mean_dv = (pairs.mean_p.swapaxes(1, 2) @ head.dy).sum(axis=0)
    dk = key_side(head, recipe, geometry, head.dz, head.q, of_dz, head.scale)
    dv = key_side(head, recipe, geometry, kept, head.dy, of_kept, 1.0)
    _, y = derivatives(head)
    drift_dk = -head.scale * (y.swapaxes(1, 2) @ (read.drift[..., None] * head.q)).sum(axis=0)
    near = near_gradient(head, recipe, kept, dv)
    return (
        ended(dk, recipe, mean_dk, drift_dk, truncated),
        ended(dv, recipe, mean_dv, 0.0, truncated, near),
    )


def near_gradient(head: Head, recipe: Recipe, kept: Array, dv: Partial) -> Base:
    """The dy of the query that gives a key the largest P: dv of a key with one such query is near it."""
    assert head.dy is not None
    group, n_q, n_k = kept.shape
    best = kept.reshape(group * n_q, n_k).argmax(axis=0)
    value = head.dy.reshape(group * n_q, -1)[best]
    return Base(value, spacing(value, recipe.inputs), dv.error.variance)


def kept_error(head: Head, sources: Sources, read: ReadNoise, pairs: PairNoise) -> Error:
    """All of the error of P * keep as operand of dv: its own, that of its score, and that of lse."""
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
    """factor * sum over heads and queries of left_ij right_id, in the order of the geometry."""
    width = right.shape[2]
    value, grid = np.zeros((head.k.shape[0], width)), np.full((head.k.shape[0], width), np.inf)
    error, local = (Error(np.zeros(value.shape), np.zeros(value.shape)) for _ in range(2))
    drift = np.zeros(value.shape)
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
            value[keys], grid[keys] = total.value, total.grid
            error.variance[keys], error.bound[keys] = total.error.variance, total.error.bound
            local.variance[keys], local.bound[keys] = total.local.variance, total.local.bound
            drift[keys] = total.drift
    return Partial(value, grid, error, local, drift)


def key_share(
    recipe: Recipe,
    queries: Integers,
    keys: Integers,
    left: Array,
    right: Array,
    upstream: Error,
    factor: float,
) -> Partial:
    """One tile's share, the query heads of the key head added."""
    index = np.ix_(np.arange(left.shape[0]), queries, keys)
    turned = Error(upstream.variance[index].swapaxes(1, 2), upstream.bound[index].swapaxes(1, 2))
    single = left.shape[0] == 1 and factor == 1.0
    each = share_of(
        left[index].swapaxes(1, 2), right[:, queries], turned, factor, recipe, grid=single
    )
    return Partial(
        each.value.sum(axis=0),
        each.grid[0] if single else np.where(each.value.sum(axis=0) == 0, np.inf, 0.0),
        Error(each.error.variance.sum(axis=0), each.error.bound.sum(axis=0)),
        Error(each.local.variance.sum(axis=0), each.local.bound.sum(axis=0)),
    )
