"""TransformerEngine's lse, and the two forms that use it: two passes with the final lse, and rescaling in one pass.

The lse of all parts is a running one; it starts as that of the first part::

    high = max(L, l_i)    low = min(L, l_i)    L = high + log1p(exp(low - high))

*Two passes*: after all parts have changed L, each part gets its weight from the final L::

    o = N(o_0 exp(l_0 - L))    o = N(o + o_i exp(l_i - L))

*Rescaling*: each part changes L and o at once, where L is the lse before and L' after the part::

    o = o_0    o = N(o exp(L - L'))    o = N(o + o_i exp(l_i - L'))

N rounds to the carried format; a recipe may leave out the rounding of the earlier o (``earlier_rounded``). Two empty
parts give NaN, because -inf - (-inf) is NaN, and a row that is NaN stays NaN. The weights are exponentials of differences
of *rounded* lse, so their sum is not 1 if lse is large.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringspec.merges.forms.parts import Part
from ringspec.merges.functions import Functions
from ringspec.merges.numbers import Float32, fma, minus, quiet, stored
from ringspec.merges.recipe import MergeRecipe

__all__ = ["rescaling", "two_passes"]


def log_of_both(a: Float32, b: Float32, functions: Functions) -> Float32:
    """Return max + log1p(exp(min - max)) of two lse."""
    high, low = np.maximum(a, b), np.minimum(a, b)
    return high + functions.log1p(functions.exp(minus(low, high)))


def two_passes(
    parts: Sequence[Part], recipe: MergeRecipe, functions: Functions, own: str
) -> tuple[Float32, Float32]:
    """Merge ``parts``: first all lse, then all o with weights exp(l_i - L); see the module for the formula."""
    carried = recipe.carried_in(own)
    lse = parts[0].lse
    with quiet():
        for part in parts[1:]:
            lse = part.put(lse, log_of_both(part.at(lse), part.lse, functions))
        o = np.zeros_like(parts[0].o, dtype=np.float32)
        for number, part in enumerate(parts):
            weight = functions.exp(minus(part.lse, part.at(lse)))[..., None]
            if number == 0 and recipe.start == "first":
                o = stored(part.o.astype(np.float32) * weight, carried)
            else:
                o = part.put(o, added(part.at(o), part, weight, recipe, carried))
    return o, lse


def rescaling(
    parts: Sequence[Part], recipe: MergeRecipe, functions: Functions, own: str
) -> tuple[Float32, Float32]:
    """Merge ``parts`` one after the other, rescaling o at each step; see the module for the formula."""
    carried = recipe.carried_in(own)
    first, *others = parts
    o, lse = first.o.astype(np.float32), first.lse
    with quiet():
        for part in others:
            old = part.at(lse)
            new = log_of_both(old, part.lse, functions)
            rescaled = part.at(o) * functions.exp(minus(old, new))[..., None]
            if recipe.earlier_rounded:
                rescaled = stored(rescaled, carried)
            weight = functions.exp(minus(part.lse, new))[..., None]
            o = part.put(o, added(rescaled, part, weight, recipe, carried))
            lse = part.put(lse, new)
    return o, lse


def added(
    total: Float32, part: Part, weight: Float32, recipe: MergeRecipe, carried: str
) -> Float32:
    """Return total + weight * part.o with the recipe's roundings, contraction and skipped numbers."""
    o = part.o.astype(np.float32)
    if recipe.fma:
        new = fma(o, weight, total)
    else:
        product = o * weight
        new = total + (stored(product, carried) if recipe.products_rounded else product)
    new = stored(new, carried)
    if recipe.skips == "zero_o":
        new = np.where(o == 0, total, new)
    elif recipe.skips == "zero_weight":
        new = np.where(weight == 0, total + np.float32(0), new)
    return new
