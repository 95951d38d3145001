"""The recipe that a target declares: none, one for all input formats, or one for each.

A recipe says where a target rounds, and to which format. It is declared by its name, or by the rounding points and
tiles that differ from those of a named recipe (``base``, by default the recipe of the input format). A program in
another language declares it as JSON:
``{"bfloat16": {"base": "bf16", "tile_dq": "bfloat16", "tile_k": 512}, "float32": "float32"}``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ringspec.compare.bounds import RECIPE_OF_FORMAT
from ringspec.errors import OptionError, nearest, shown
from ringspec.formats import holds
from ringspec.recipes import RECIPES, Recipe
from ringspec.recipes import recipe as recipe_of

__all__ = ["declared_recipe"]

Declared = str | Mapping[str, str | Mapping[str, Any]] | None


def declared_recipe(declared: Declared, inputs: str) -> Recipe | None:
    """Return the recipe that is declared for the input format ``inputs``; None if none is declared.

    Raises :class:`~ringspec.errors.OptionError` if ``declared`` has another type, and the errors of
    :func:`ringspec.recipes.recipe` and :meth:`~ringspec.recipes.Recipe.replace`.

    >>> declared_recipe({"bfloat16": {"base": "bf16", "tile_k": 512}}, "bfloat16").name
    'bf16 with tile_k 512'
    >>> declared_recipe({"bfloat16": "bf16"}, "float32") is None
    True
    """
    one = declared.get(inputs) if isinstance(declared, Mapping) else declared
    if one is None:
        return None
    if isinstance(one, str):
        return recipe_of(one)
    if not isinstance(one, Mapping):
        raise OptionError(
            "a recipe's name, or a mapping of the rounding points and tiles that differ from its base",
            shown(one),
            'pass "bf16", or {"base": "bf16", "tile_k": 512}',
        )
    changes = dict(one)
    base = changes.pop("base", RECIPE_OF_FORMAT[inputs])
    told = ", ".join(f"{name} {value}" for name, value in changes.items() if name != "note")
    name = f"{base} with {told}" if told else str(base)
    return recipe_of(base).replace(**({"name": name} | changes))


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
