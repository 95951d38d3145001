"""The recipe by which a call is judged: where the target rounds, and to which format.

The target is the program under test. It may declare one recipe, or one for each input format. A single recipe applies
to every call whose inputs it reads without rounding. All other calls are judged by the recipe of their input format:

========  ====================  =========================================
bfloat16  bf16                  bfloat16 operands P and dS, float32 elsewhere
float16   fp16                  the same in float16
float32   float32               float32 throughout
float64   float64               float64 throughout
========  ====================  =========================================

If the declared recipe rounds partial results between ring steps, variants of these recipes that also do so apply to the
other calls. The final rounding is to the formats that the call requests.
"""

from __future__ import annotations

from collections.abc import Mapping

from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.declared import base_recipe
from ringspec.formats import narrower
from ringspec.recipes import Recipe


def recipe_for(claims: Capabilities, formats: Mapping[str, str]) -> Recipe:
    """Return the recipe by which a call with these ``formats`` is judged.

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
