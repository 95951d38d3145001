"""The recipe by which a call is judged.

A target declares one recipe, or one for each input format. One recipe holds for every call whose inputs
it can read without rounding. Other calls, and all calls of a target that declares none, are judged by
the recipe of their input format:

========  ====================  =========================================
bfloat16  bf16                  16-bit operands P and dS, float32 elsewhere
float16   fp16                  the same in float16
float32   float32               float32 throughout
float64   float64               float64 throughout
========  ====================  =========================================

or by its sibling with partial results rounded between ring steps, where the declared recipe does
that. Results are rounded at last to the formats that the call asks for.
"""

from __future__ import annotations

from collections.abc import Mapping

from ringspec.compare.bounds import RECIPE_OF_FORMAT
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.declared import declared_recipe
from ringspec.formats import format_of
from ringspec.recipes import RECIPES, Recipe


def recipe_for(claims: Capabilities, formats: Mapping[str, str]) -> Recipe:
    """The recipe that a call with these ``formats`` is judged by.

    >>> claims = Capabilities(recipe="bf16_partials")
    >>> [recipe_for(claims, dict.fromkeys(("inputs", "outputs", "statistics"), name)).name
    ...  for name in ("bfloat16", "float16", "float32")]
    ['bf16_partials', 'fp16_partials', 'float32']
    """
    base = base_recipe(claims, formats["inputs"])
    outputs, statistics = formats["outputs"], formats["statistics"]
    return base.replace(
        outputs=narrower(base.outputs, outputs),
        gradients=narrower(base.gradients, outputs),
        lse=narrower(base.lse, statistics),
    )


def base_recipe(claims: Capabilities, inputs: str) -> Recipe:
    """The declared recipe where it holds, else that of the input format."""
    default = RECIPE_OF_FORMAT[inputs]
    declared = declared_recipe(claims.recipe, inputs)
    if declared is None:
        return RECIPES[default]
    if holds(declared.inputs, inputs):
        return declared
    sibling = f"{default}_partials"
    return RECIPES[sibling if "partials" in declared.name and sibling in RECIPES else default]


def holds(wide: str, narrow: str) -> bool:
    """Whether every number of one format is one of another.

    >>> holds("float32", "bfloat16"), holds("bfloat16", "float16")
    (True, False)
    """
    a, b = format_of(wide), format_of(narrow)
    return (
        a.precision >= b.precision
        and a.largest >= b.largest
        and a.smallest_subnormal <= b.smallest_subnormal
    )


def narrower(one: str, other: str) -> str:
    """The format with fewer significant bits."""
    return min(one, other, key=lambda name: format_of(name).precision)
