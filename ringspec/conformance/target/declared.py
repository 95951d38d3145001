"""The recipe that a target declares: none, one for all input formats, or one for each.

A recipe says where a target rounds, and to which format. It is declared by its name, or by the rounding points and
tiles that differ from those of a named recipe (``base``, by default the recipe of the input format). A program in
another language declares it as JSON:
``{"bfloat16": {"base": "bf16", "tile_dq": "bfloat16", "tile_k": 512}, "float32": "float32"}``.

The name of a merge recipe (:data:`ringspec.merges.MERGES`), such as 'te_p2p', declares its merges and its sums of
gradients, together with the recipe of the input format. With ``merge_recipe``, they are declared together with the rounding
points of ``base``. Merge recipes are defined for :data:`MERGED`; for other input formats, such a name declares nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ringspec.compare.bounds import RECIPE_OF_FORMAT
from ringspec.errors import OptionError, nearest, shown
from ringspec.formats import holds
from ringspec.merges import MERGES, with_merges
from ringspec.recipes import RECIPES, Recipe
from ringspec.recipes import recipe as recipe_of

__all__ = ["declared_recipe"]

MERGED = ("bfloat16", "float16", "float32")
Declared = str | Mapping[str, str | Mapping[str, Any]] | None


def declared_recipe(declared: Declared, inputs: str) -> Recipe | None:
    """Return the recipe that is declared for the input format ``inputs``; None if none is declared.

    Raises :class:`~ringspec.errors.OptionError` if ``declared`` has another type, and the errors of
    :func:`ringspec.recipes.recipe` and :meth:`~ringspec.recipes.Recipe.replace`.

    >>> declared_recipe({"bfloat16": {"base": "bf16", "tile_k": 512}}, "bfloat16").name
    'bf16 with tile_k 512'
    >>> declared_recipe({"bfloat16": "bf16"}, "float32") is None
    True
    >>> declared_recipe("te_p2p", "float16").carried_o
    'float16'
    """
    one = declared.get(inputs) if isinstance(declared, Mapping) else declared
    if isinstance(one, str) and one in MERGES:
        one = {"merge_recipe": one}
    if one is None:
        return None
    if isinstance(one, str):
        refuse_misspelt_merge(one)
        return recipe_of(one)
    if not isinstance(one, Mapping):
        raise OptionError(
            "a recipe's name, or a mapping of the rounding points and tiles that differ from its base",
            shown(one),
            'pass "bf16", or {"base": "bf16", "tile_k": 512}',
        )
    changes = dict(one)
    base = changes.pop("base", RECIPE_OF_FORMAT[inputs])
    merges = changes.pop("merge_recipe", None)
    if merges is not None and inputs not in MERGED:
        return None
    used = recipe_of(base) if merges is None else with_merges(recipe_of(base), merges)
    changed = ", ".join(f"{name} {value}" for name, value in changes.items() if name != "note")
    label = base if merges is None else f"{base} with merges of {merges}"
    if changed:
        label = f"{label}, {changed}" if merges is not None else f"{label} with {changed}"
    return used.replace(**({"name": str(label)} | changes))


def refuse_misspelt_merge(name: str) -> None:
    """Raise OptionError if ``name`` resembles the name of a merge recipe, and that of no recipe."""
    close = nearest(name, MERGES)
    if (
        name not in RECIPES
        and close.startswith("write")
        and not nearest(name, RECIPES).startswith("write")
    ):
        expected = "the name of a recipe or of a merge recipe"
        raise OptionError(expected, shown(name), close, code="unknown-name")


def base_recipe(declared: Declared, inputs: str) -> Recipe:
    """Return the declared recipe if it reads ``inputs`` without rounding, else the recipe of the input format.

    In the second case, the declared recipe may round partial results between ring steps. Then the variant of the input
    format's recipe that also does so is returned.
    """
    default = RECIPE_OF_FORMAT[inputs]
    one = declared_recipe(declared, inputs)
    if one is None:
        return RECIPES[default]
    if holds(one.inputs, inputs):
        return one
    sibling = f"{default}_partials"
    return RECIPES[sibling if "partials" in one.name and sibling in RECIPES else default]


def check_name(expected: str, name: object, known: Collection[str]) -> None:
    """Raise :class:`~ringspec.errors.OptionError` for a name that is not ``known``."""
    if name not in known:
        raise OptionError(expected, shown(name), nearest(name, known), code="unknown-name")


def check_declared(declared: Declared) -> None:
    """Raise the error that :func:`declared_recipe` would raise for some input format, if any."""
    for inputs in declared if isinstance(declared, Mapping) else ():
        check_name("an input format in recipe", inputs, RECIPE_OF_FORMAT)
    for inputs in RECIPE_OF_FORMAT:
        declared_recipe(declared, inputs)
