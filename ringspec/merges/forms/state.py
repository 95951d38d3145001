"""The state form: the maximum m and the sum l are carried, and o is normalised at the end.

A part is (m_i, l_i, o_i) with o_i unnormalised (:class:`~ringspec.merges.Part` with ``sums``), or normalised, that is m_i =
lse, l_i = 1::

    m' = max(m, m_i)    a = exp(m - m')    b = exp(m_i - m')
    l = l a + l_i b     o = N(N(o a) + N(o_i b))
    at the end: o = o (1 / l)    L = m + log(l)

N rounds to the carried format; the products are rounded only if the recipe says so. No rounded lse is
exponentiated, so a large lse costs no accuracy. m is at least half the lowest float32, so that a difference of two empty parts
is 0 and not NaN; a row of empty parts has l = 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringspec.merges.forms.all_parts import emptied
from ringspec.merges.forms.parts import Part
from ringspec.merges.functions import Functions
from ringspec.merges.numbers import Float32, fma, minus, quiet, stored
from ringspec.merges.recipe import MergeRecipe

__all__ = ["state"]


def state(
    parts: Sequence[Part], recipe: MergeRecipe, functions: Functions, own: str
) -> tuple[Float32, Float32]:
    """Merge ``parts`` one after the other and normalise at the end; see the module for the formula."""
    carried = recipe.carried_in(own)
    first, *others = parts
    # A finite lowest maximum, as public kernels use it for masked rows: then no difference is NaN.
    lowest = np.float32(np.finfo(np.float32).min / 2)
    o, m, l = first.o.astype(np.float32), np.maximum(first.lse, lowest), counted(first)
    with quiet():
        for part in others:
            old, given, total = part.at(m), part.o.astype(np.float32), counted(part)
            high = np.maximum(old, np.maximum(part.lse, lowest))
            a, b = functions.exp(minus(old, high)), functions.exp(minus(part.lse, high))
            kept, added_o = part.at(o) * a[..., None], given * b[..., None]
            if recipe.products_rounded:
                new = stored(kept, carried) + stored(added_o, carried)
            else:
                new = fma(given, b[..., None], kept) if recipe.fma else kept + added_o
            o = part.put(o, stored(new, carried))
            m, l = part.put(m, high), part.put(l, part.at(l) * a + total * b)
        safe: Float32 = np.where(l == 0, np.float32(1), l)
        lse = emptied(m + functions.log(safe), l == 0, recipe.all_empty)
        return o * functions.divide(np.float32(1), safe)[..., None], lse


def counted(part: Part) -> Float32:
    """Return the sum of exponentials of a part, 0 where it is empty."""
    return np.where(np.isneginf(part.lse), np.float32(0), part.total)
