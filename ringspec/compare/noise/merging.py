"""How the merges of partial results round: the specification's two, and those of a merge recipe.

A merge recipe (:mod:`ringspec.merges`) names a formula and its rounding points. In exact arithmetic all formulas agree;
they differ in what is rounded. For noise, three kinds suffice. c_i is the weight of part i, L the lse of all parts so far,
N the rounding to the carried format, and n(.) = N if products are rounded, else the identity:

- *step by step* ('sigmoid', 'pair', 'rescaling'): o = N(n(o c) + o_i c_i), with c and c_i relative to the new L. The rounding
  error of a carried o is rescaled by all later steps.
- *final weights* ('two_passes', 'all_parts'): o = N(o + n(o_i c_i)), with c_i = exp(l_i - L) relative to the final L. Earlier
  errors stay as they are.
- *unnormalised* ('state'): o = N(n(o a) + n(o_i b)), divided by the sum at the end.

An error of a rounded L changes the weights. If every later weight is relative to it, the sum of the weights changes, so it
acts as an error of the softmax sum (``Worker.note_sum``). Otherwise it changes the share of the parts merged so far
(``Worker.note_shared``). The arithmetic of a merge recipe is float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ringspec.compare.noise.p_relative_to import finite
from ringspec.compare.noise.problem import Array, Integers
from ringspec.compare.noise.rounding import (
    Error,
    Merged,
    Partial,
    larger_part,
    rounding,
    sum_rounding,
)
from ringspec.compare.noise.worker import State, Worker, empty_state, factor
from ringspec.merges import MergeRecipe, merge_recipe

__all__ = ["merged"]

FINAL_WEIGHTS = ("two_passes", "all_parts")
# A rounded L that scales o itself, not only the share of what was merged so far.
SCALES_ALL = ("two_passes", "rescaling", "all_parts")


def merged(work: Worker, queries: Integers, blocks: Sequence[State]) -> State:
    """Merge the results of a worker's blocks in their order, as its recipe says; record the rounding errors."""
    name = work.recipe.merge_recipe
    used = None if name is None else merge_recipe(name)
    if used is not None and used.form in FINAL_WEIGHTS:
        return with_final_weights(work, queries, blocks, used)
    state = empty_state(work.head, queries)
    for number, block in enumerate(blocks):
        if work.recipe.merge_order == "state":
            state = merge(work, queries, state, block, number == 0)
        else:
            state = merge_normalised(work, queries, state, block, number, used)
    return state


def merge(work: Worker, queries: Integers, a: State, b: State, first: bool) -> State:
    """Merge two unnormalised states (SOFT-1, NUM-3). Of their rescaling factors, at most one is neither 0 nor 1."""
    m = np.maximum(a.m, b.m)
    c_a, c_b = factor(a.m, m), factor(b.m, m)
    l = c_a * a.l + c_b * b.l
    if not first:
        one_sided = (a.l == 0) | (b.l == 0)
        grid = np.where(one_sided, np.inf, 0.0)
        work.note_sum(queries, m, rounding(l, work.of_lse, grid))
        for part, c in ((a, c_a), (b, c_b)):
            w = work.weight(queries, part.m)
            made = work.relative(c)
            work.note_shared(queries, made, w[..., None] * part.o.value, w * part.l)
            if work.recipe.merge_recipe is not None:  # the product of c and l is rounded too
                work.note_sum(queries, part.m, made.times(part.l))
    points = (work.recipe.merge,) * 3
    return State(m, l, joined(work, queries, m, (a.o, c_a), (b.o, c_b), points))


def joined(
    work: Worker,
    queries: Integers,
    m: Array,
    a: tuple[Partial, Array],
    b: tuple[Partial, Array],
    points: tuple[str, str, str],
    larger_a: NDArray[np.bool_] | None = None,
) -> Partial:
    """Add two rescaled partial results, each given as (o, factor), and round to the carried format (NUM-3).

    ``points``: the formats of the two products and of the sum. ``larger_a``: where a has the larger weight in the result;
    None: where it has the larger factor.
    """
    before = a[0].times(a[1]).plus(b[0].times(b[1]))
    one, other = Merged.of(*a, points[0]), Merged.of(*b, points[1])
    total, base = one.product.plus(other.product), larger_part(one, other, larger_a)
    o = total.rounded(points[2], base).rounded(work.recipe.carried_o, base)
    return work.noted(queries, m, o, before)


def merge_normalised(
    work: Worker, queries: Integers, a: State, b: State, number: int, used: MergeRecipe | None
) -> State:
    """Merge two normalised states (SOFT-3); their weights exp(lse_n - lse) and the new lse are rounded."""
    m = np.maximum(a.m, b.m)
    e_a, e_b = factor(a.m, m), factor(b.m, m)
    empty = e_a + e_b == 0
    total = np.where(empty, 1.0, e_a + e_b)
    lse = np.where(empty, -np.inf, finite(m) + np.log(total))
    c_a, c_b = e_a / total, e_b / total
    w = work.weight(queries, lse)
    sigmoid = used is not None and used.form == "sigmoid"
    if sigmoid:  # the weights 1 - c_b and c_b have one error
        share = (w * c_b)[..., None] * (b.o.value - a.o.value)
        work.note_shared(queries, work.relative(c_b), share, w * c_b, of_sum=False)
    else:
        for part, c in ((a, c_a), (b, c_b)):
            share = (w * c)[..., None] * part.o.value
            work.note_shared(queries, work.relative(c), share, w * c, of_sum=False)
    grid = np.where((c_a == 0) | (c_b == 0), np.inf, 0.0)
    made = rounding(np.where(empty, 0.0, lse), work.of_lse, grid)
    if used is not None:
        more = np.log(total)
        # The sigmoid form adds to the lse so far, the others to the larger of two.
        added = np.where(np.isneginf(a.m), more, finite(lse) - finite(a.m)) if sigmoid else more
        if not sigmoid:
            made = of_sum(work, finite(m), more)
        made = small(made, added) + of_logarithm(work, added) + of_exponential(work, more)
    if sigmoid:
        assert used is not None
        narrow = used.carried_o == "wider" and number == 1
        difference = work.recipe.block_o if narrow else "float32"
        o = moved_towards(work, queries, lse, a.o, (b.o, c_b), difference)
    else:
        own, wide = work.recipe.carried_o, work.recipe.merge
        twice = used is not None and used.form == "rescaling" and used.earlier_rounded
        points = (own, "float32", "float32") if twice else (wide,) * 3
        o = joined(work, queries, lse, (a.o, c_a), (b.o, c_b), points)
    if used is not None and used.form in SCALES_ALL:
        work.note_sum(queries, lse, made)
    else:
        work.note_shared(queries, made, w[..., None] * o.value, w)
    return State(lse, np.where(empty, 0.0, 1.0), o)


def moved_towards(
    work: Worker, queries: Integers, m: Array, a: Partial, b: tuple[Partial, Array], name: str
) -> Partial:
    """Return a + c (b - a), with ``b`` given as (b, c): the difference is rounded to the format ``name``, the rest to float32."""
    part, c = b
    before = a.times(1 - c).plus(part.times(c))
    difference = part.plus(negated(a))
    rounded = difference.rounded(name)
    share = rounded.times(c).rounded("float32")
    made = Error(
        share.local.variance - difference.local.variance * c[..., None] ** 2,
        share.local.bound - difference.local.bound * c[..., None],
    )
    total = Partial(
        before.value,
        np.where(c[..., None] == 0, a.grid, np.where(c[..., None] == 1, part.grid, 0.0)),
        before.error + made,
        before.local + made,
        before.drift + share.drift - difference.drift * c[..., None],
        before.explained + share.explained - difference.explained * c[..., None] ** 2,
    )
    o = total.rounded("float32").rounded(work.recipe.carried_o)
    return work.noted(queries, m, o, before)


def negated(x: Partial) -> Partial:
    return dataclasses.replace(x, value=-x.value, drift=-np.asarray(x.drift))


def with_final_weights(
    work: Worker, queries: Integers, blocks: Sequence[State], used: MergeRecipe
) -> State:
    """Merge normalised states with their weights exp(l_i - L) in the final lse; see the module for the formula."""
    m = np.max([block.m for block in blocks], axis=0)
    relative = [factor(block.m, m) for block in blocks]
    total = np.sum(relative, axis=0)
    empty = total == 0
    safe = np.where(empty, 1.0, total)
    lse = np.where(empty, -np.inf, finite(m) + np.log(safe))
    note_final_lse(work, queries, blocks, used, lse)
    product = work.recipe.carried_o if used.products_rounded else "float32"
    state = empty_state(work.head, queries)
    o, mass = state.o, np.zeros(m.shape)
    for block, e in zip(blocks, relative, strict=True):
        c = e / safe
        w = work.weight(queries, lse)
        share = (w * c)[..., None] * block.o.value
        work.note_shared(queries, work.relative(c), share, w * c, of_sum=used.weights != "lse")
        seen = np.where(mass > 0, 1.0, 0.0)  # nothing to add to: the product is the result
        points = ("float32", product, "float32")
        o = joined(work, queries, lse, (o, seen), (block.o, c), points, mass >= c)
        mass = mass + c
    return State(lse, np.where(empty, 0.0, 1.0), o)


def note_final_lse(
    work: Worker, queries: Integers, blocks: Sequence[State], used: MergeRecipe, lse: Array
) -> None:
    """Record the rounding errors of the lse of all parts, a running one or that of a sum over all parts."""
    if used.form == "two_passes":
        running = blocks[0].m
        for block in blocks[1:]:
            high, low = np.maximum(running, block.m), np.minimum(running, block.m)
            added = np.log1p(factor(low, high))
            running = np.where(np.isneginf(high), -np.inf, finite(high) + added)
            made = small(of_sum(work, finite(high), added), added)
            made = made + of_logarithm(work, added) + of_exponential(work, added)
            work.note_sum(queries, running, made)
        return
    high = np.max([block.m for block in blocks], axis=0)
    more = np.where(np.isneginf(lse), 0.0, finite(lse) - finite(high))
    made = small(of_sum(work, finite(high), more), more) + of_logarithm(work, more)
    summed = np.zeros(more.shape)
    for block in blocks:  # each exponential, and each sum after the first
        e = factor(block.m, high)
        summed = summed + e
        share = e / np.exp(more)
        if used.weights == "lse":
            made = made + work.relative(e).times(share)
        if block is not blocks[0]:
            grid = np.where((e == 0) | (summed == e), np.inf, 0.0)
            made = made + rounding(summed, work.of_lse, grid).times(1 / np.exp(more))
    if used.weights == "lse":
        work.note_sum(queries, lse, made)
        return
    # The weights come from the sum itself, so only lse changes.
    u, a = np.zeros(work.head.o.shape), np.zeros(work.head.lse.shape)
    a[:, queries] = work.weight(queries, lse)
    work.note_errors(queries, made, u, a)
    work.sources.bottom[:, queries] += made.bound * a[:, queries]


def of_logarithm(work: Worker, y: Array) -> Error:
    """Return the error of a logarithm ``y`` >= 0 of a sum, from its own rounding."""
    return work.of_function(work.rounded_lse(y))


def of_sum(work: Worker, high: Array, added: Array) -> Error:
    """Return the error of rounding the sum of an lse ``high`` and of the logarithm ``added``, both natural."""
    made = sum_rounding(high / work.unit, added / work.unit, work.of_lse)
    return made.times(work.unit)


def of_exponential(work: Worker, y: Array) -> Error:
    """Return the error of y = log(1 + e) that the rounding of the exponential e and of the sum causes."""
    e, total = np.expm1(y), np.exp(y)
    return work.relative(e).times(e / total) + rounding(total, work.of_lse).times((e > 0) / total)


def small(made: Error, added: Array) -> Error:
    """Return the error of rounding a sum of a number of the format and of ``added``, which is at most about ``added``."""
    return Error(np.minimum(made.variance, np.square(added)), made.bound)
