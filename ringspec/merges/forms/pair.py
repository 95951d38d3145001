"""The pair form of vLLM and SGLang: two normalised parts, with both weights relative to the larger lse.

::

    m = max(L, l_i)    a = exp(L - m)    b = exp(l_i - m)    t = a + b
    o = N(o a/t + o_i b/t)    L = log(t) + m

N rounds to the carried format. The weights a/t and b/t do not come from a rounded lse. More than two parts are merged one
after the other. Two empty parts give NaN, unless ``all_empty`` says otherwise: then the earlier o stays, or o is 0. A
compiler may contract the sum to a fused multiply-add of either product (``fma``, ``fused``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringspec.merges.forms.all_parts import emptied
from ringspec.merges.forms.parts import Part
from ringspec.merges.functions import Functions
from ringspec.merges.numbers import Float32, fma, minus, quiet, stored
from ringspec.merges.recipe import MergeRecipe

__all__ = ["pair"]


def pair(
    parts: Sequence[Part], recipe: MergeRecipe, functions: Functions, own: str
) -> tuple[Float32, Float32]:
    """Merge ``parts`` one after the other; see the module for the formula."""
    carried = recipe.carried_in(own)
    exp, log = recipe.exponential(functions), recipe.logarithm(functions)
    first, *others = parts
    o, lse = first.o.astype(np.float32), first.lse
    with quiet():
        for part in others:
            old, given = part.at(lse), part.o.astype(np.float32)
            high = np.maximum(old, part.lse)
            a, b = exp(minus(old, high)), exp(minus(part.lse, high))
            total = a + b
            share = functions.divide(a, total)[..., None]
            weight = functions.divide(b, total)[..., None]
            kept = part.at(o)
            if not recipe.fma:
                new = kept * share + given * weight
            elif recipe.fused == "part":
                new = fma(given, weight, kept * share)
            else:
                new = fma(kept, share, given * weight)
            new_lse = log(total) + high
            if recipe.all_empty != "as_computed":
                empty = np.isneginf(high)
                instead = kept if recipe.empty_o == "first" else np.zeros_like(kept)
                new = np.where(empty[..., None], instead, new)
                new_lse = emptied(new_lse, empty, recipe.all_empty)
            o, lse = part.put(o, stored(new, carried)), part.put(lse, new_lse)
    return o, lse
