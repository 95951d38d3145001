"""The rounding points that a merge recipe implies for a recipe of rounding points."""

from __future__ import annotations

from ringspec.formats import narrower
from ringspec.merges.merge import merge_recipe
from ringspec.recipes import Recipe

__all__ = ["with_merges"]


def with_merges(recipe: Recipe, name: str) -> Recipe:
    """Return a copy of a recipe of rounding points that merges and adds gradients as the merge recipe ``name`` does.

    The own format of the parts, in which blocks return o and gradients, is ``recipe.outputs``, or float32 if that is
    wider. The copy has the name ``name`` and the field ``merge_recipe``, so that the prediction of rounding errors follows
    the formula of the merge recipe. Raises OptionError for a name that is no merge recipe.

    >>> from ringspec.recipes import RECIPES
    >>> te = with_merges(RECIPES["bf16"], "te_p2p")
    >>> te.block_o, te.carried_o, te.carried_dq, te.merge
    ('bfloat16', 'bfloat16', 'bfloat16', 'float32')
    """
    used = merge_recipe(name)
    own = narrower(recipe.outputs, "float32")
    carried = used.carried_in(own)
    # A sum that rescales the earlier o rounds a product as well.
    products = used.products_rounded or (used.form == "rescaling" and used.earlier_rounded)
    points = {
        "block_o": own,
        "merge": carried if products else "float32",
        "carried_o": carried,
        "merge_order": "state" if used.form == "state" else "normalised",
        "merge_recipe": used.name,
    }
    for how, point in ((used.dq, "carried_dq"), (used.dkv, "carried_dkv")):
        if how is not None:
            points["block_gradients"] = own
            points[point] = own if how.carried == "own" else "float32"
            if how.result == "carried":
                points["gradients"] = points[point]
    return recipe.replace(name=used.name, **points)
