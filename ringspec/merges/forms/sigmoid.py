"""The sigmoid form: the running result moves towards the next part by the part's share of the weight.

::

    o = o - sigmoid(lse_i - lse) (o - o_i)        lse = lse - logsigmoid(lse - lse_i)

It starts with the first part unchanged. The weights of a step are s and 1 - s, so they sum to 1 however large lse is. If
the first part is empty (lse = -inf) and a later one is not, the difference is infinite, and the row becomes NaN. A row of
two empty parts becomes NaN too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringspec.merges.forms.parts import Part
from ringspec.merges.functions import Functions
from ringspec.merges.numbers import Float32, minus, quiet, stored
from ringspec.merges.recipe import MergeRecipe

__all__ = ["sigmoid"]


def sigmoid(
    parts: Sequence[Part], recipe: MergeRecipe, functions: Functions, own: str
) -> tuple[Float32, Float32]:
    """Merge ``parts`` one after the other; see the module for the formula.

    With ``carried_o`` 'wider', parts keep their own format until type promotion widens them: the first difference o - o_i is
    rounded to ``own``, and the sum is float32 because the weight is.
    """
    first, *others = parts
    o, lse = first.o.astype(np.float32), first.lse
    narrow = own if recipe.carried_o == "wider" else "float32"
    with quiet():
        for part in others:
            old_o, old_lse = part.at(o), part.at(lse)
            # The carried o is narrow only before the first merge; after it, a difference is float32.
            difference = stored(old_o - part.o.astype(np.float32), narrow)
            share = functions.sigmoid(minus(part.lse, old_lse))
            new_o = old_o - share[..., None] * difference
            new_lse = minus(old_lse, functions.logsigmoid(minus(old_lse, part.lse)))
            o, lse = part.put(o, new_o), part.put(lse, new_lse)
            narrow = "float32"
    return o, lse
