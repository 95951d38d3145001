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

from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.declared import base_recipe
from ringspec.formats import narrower
from ringspec.recipes import Recipe


def recipe_for(claims: Capabilities, formats: Mapping[str, str]) -> Recipe:
    """The recipe that a call with these ``formats`` is judged by.

    >>> claims = Capabilities(recipe="bf16_partials")
    >>> [recipe_for(claims, dict.fromkeys(("inputs", "outputs", "statistics"), name)).name
    ...  for name in ("bfloat16", "float16", "float32")]
    ['bf16_partials', 'fp16_partials', 'float32']
    """
    base = base_recipe(claims.recipe, formats["inputs"])
    outputs, statistics = formats["outputs"], formats["statistics"]
    return base.replace(
        outputs=narrower(base.outputs, outputs),
        gradients=narrower(base.gradients, outputs),
        lse=narrower(base.lse, statistics),
    )
