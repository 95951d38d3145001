"""Merges of partial results as public implementations compute them, operation by operation.

1. ``recipe``     a merge as data: :class:`MergeRecipe`, and the order in which a worker visits the parts
2. ``forms``      one file for each formula
3. ``functions``  the elementary functions, which the caller may supply
4. ``table``      the recipes of public implementations: :data:`MERGES`
5. ``merge``      computes the bits from partial results and a recipe
6. ``gradients``  sums of the gradients
7. ``intervals``, ``enclosures``  all results that operations can have when elementary functions are not known exactly
8. ``certified``  which bits of a merge do not depend on the elementary functions
9. ``points``     the rounding points that a merge recipe implies

docs/reference/merges.md says what a recipe promises, and what not.
"""

from ringspec.merges.certified import Certain, certain
from ringspec.merges.forms.parts import Part
from ringspec.merges.functions import NUMPY, Functions
from ringspec.merges.gradients import add_gradients
from ringspec.merges.merge import FORMS, merge, merge_recipe
from ringspec.merges.points import with_merges
from ringspec.merges.recipe import GradientSum, MergeRecipe, visits
from ringspec.merges.table import MERGES

__all__ = [
    "FORMS",
    "MERGES",
    "NUMPY",
    "Certain",
    "Functions",
    "GradientSum",
    "MergeRecipe",
    "Part",
    "add_gradients",
    "certain",
    "merge",
    "merge_recipe",
    "visits",
    "with_merges",
]
