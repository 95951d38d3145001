"""Forms that first reduce the lse of all parts, and then weight each part once.

With m the largest l_i, e_i = exp(l_i - m) and t = sum e_i, added in the order of ``sum_tree``::

    L = log(t) + m

``weights`` says how o is formed:

=============  ==========================================================
'lse'          o = sum o_i exp(l_i - L)
'ratio'        o = sum o_i (e_i / t)
'reciprocal'   o = sum o_i (e_i (1 / t))
'end'          o = (sum o_i e_i) / t
=============  ==========================================================

In base 2, exp and log are exp2 and log2. The recipe 'flashmla' then returns L / log2(e), a natural logarithm, while its
weights are exp2(l_i - L).

The sum runs over the parts in their order, from 0 or from the first product. It is carried in float32 and rounded once, or
each product and each sum is rounded to the format of the parts, as in a reduce-scatter in that format. 'lse' exponentiates
a rounded L, so its weights do not sum to 1 if L is large; the others do not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ringspec.merges.forms.parts import Part
from ringspec.merges.forms.running_lse import added
from ringspec.merges.functions import Functions
from ringspec.merges.numbers import Float32, minus, quiet, stored
from ringspec.merges.recipe import MergeRecipe

__all__ = ["all_parts", "tree_sum"]


def all_parts(
    parts: Sequence[Part], recipe: MergeRecipe, functions: Functions, own: str
) -> tuple[Float32, Float32]:
    """Merge ``parts``, all of which must cover all rows; see the module for the formula."""
    carried = recipe.carried_in(own)
    exp, log = recipe.exponential(functions), recipe.logarithm(functions)
    with quiet():
        high = parts[0].lse
        for part in parts[1:]:
            high = np.maximum(high, part.lse)
        # Where every part is empty, exp(-inf - 0) is 0, not NaN.
        shift = np.where(np.isneginf(high), np.float32(0), high)
        relative = [exp(minus(part.lse, shift)) for part in parts]
        total = tree_sum(relative, recipe.sum_tree)
        lse = log(total) + shift
        weights = [
            weight_of(part.lse, e, total, lse, recipe, functions)
            for part, e in zip(parts, relative, strict=True)
        ]
        o: Float32 = np.zeros(parts[0].o.shape, np.float32)
        for number, (part, weight) in enumerate(zip(parts, weights, strict=True)):
            if number == 0 and recipe.start == "first":
                o = stored(part.o.astype(np.float32) * weight[..., None], carried)
                if recipe.skips == "zero_weight":
                    o = np.where(weight[..., None] == 0, np.float32(0), o)
            else:
                o = added(o, part, weight[..., None], recipe, carried)
        if recipe.weights == "end":
            divisor: Float32 = np.where(total == 0, np.float32(1), total)
            o = functions.divide(o, divisor[..., None])
    return o, emptied(lse, total == 0, recipe.all_empty)


def weight_of(
    lse: Float32,
    relative: Float32,
    total: Float32,
    merged: Float32,
    recipe: MergeRecipe,
    functions: Functions,
) -> Float32:
    """Return the weight of one part: ``relative`` is exp(lse - m), ``total`` the sum of these, ``merged`` the lse of all.

    A row without any key has weight 0.
    """
    if recipe.weights == "end":
        return relative
    if recipe.weights == "ratio":
        weight = functions.divide(relative, total)
    elif recipe.weights == "reciprocal":
        weight = relative * functions.divide(np.float32(1), total)
    else:
        weight = recipe.exponential(functions)(minus(lse, merged))
    return np.where(total == 0, np.float32(0), weight)


def emptied(lse: Float32, empty: NDArray[np.bool_], all_empty: str) -> Float32:
    """Return lse with the recipe's value in the rows ``empty``, which no part saw; 'as_computed' keeps lse."""
    values = {"-inf": -np.inf, "inf": np.inf, "0": 0.0}
    return (
        lse if all_empty == "as_computed" else np.where(empty, np.float32(values[all_empty]), lse)
    )


def tree_sum(values: Sequence[Float32], tree: str) -> Float32:
    """Add float32 arrays in the order of ``tree``.

    'sequential': ((v_0 + v_1) + v_2) + ...; 'halves': v_i + v_(i + n/2) with n a power of two, then the same with the sums, as
    a butterfly over lanes with offsets n/2, ..., 2, 1; 'neighbours': v_2i + v_(2i+1), as one with offsets 1, 2, .... Absent
    values are 0.
    """
    if tree == "sequential":
        total = values[0]
        for value in values[1:]:
            total = total + value
        return total
    left = list(values)
    size = 1 << (len(left) - 1).bit_length()
    left += [np.zeros_like(left[0])] * (size - len(left))
    while len(left) > 1:
        n = len(left) // 2
        ends = (
            zip(left[:n], left[n:], strict=True)
            if tree == "halves"
            else zip(left[::2], left[1::2], strict=True)
        )
        left = [a + b for a, b in ends]
    return left[0]
