"""Derive the tensors of a merge: correctly rounded results, and the bits that merge recipes give.

The bits of a recipe are stored where :func:`ringspec.merges.certain` shows that they do not depend on the elementary
functions (exp, log and others, each within :data:`ULPS` ulp), and are 0 elsewhere. Without these zeros the bytes would
depend on the machine that derived them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringspec.errors import OptionError, nearest, shown
from ringspec.formats import load
from ringspec.truth.exactly import Truth, Wanted
from ringspec.truth.partials import merge_parts
from ringspec.vectors.format.case import Case

if TYPE_CHECKING:
    from ringspec.merges import MergeRecipe, Part

__all__ = ["ULPS", "parts_of", "recipe_bits", "truth_of_merge"]

ULPS = 4
Tensors = dict[str, NDArray[Any]]


def truth_of_merge(case: Case, inputs: Tensors, wanted: Wanted) -> Truth:
    """Return the correctly rounded results of a merge case from its inputs."""
    o, lse = load(inputs["parts_o"], "parts_o"), load(inputs["parts_lse"], "parts_lse")
    sums = load(inputs["parts_sum"], "parts_sum") if "parts_sum" in inputs else None
    mark = np.inf if "empty_lse" in case.terms else -np.inf
    base = case.terms.get("lse_base")
    return merge_parts(o, lse, sums, empty_lse=mark, base=base, wanted=wanted)


def recipe_bits(case: Case, inputs: Tensors) -> Tensors:
    """Return ``bits.<recipe>.o`` and ``.lse`` and where they are ``certain.``, for each recipe of a merge case."""
    from ringspec.merges import MERGES, certain  # here: only cases with recipes need it

    tensors: Tensors = {}
    parts, known = parts_of(inputs), {}
    for name in case.recipes:
        if name not in MERGES:
            fix = nearest(name, MERGES)
            raise OptionError("the name of a merge recipe", shown(name), fix, code="unknown-name")
        same = arithmetic(MERGES[name])
        if same not in known:
            known[same] = certain(parts, same, ULPS)
        for tensor in ("o", "lse"):
            bits, sure = getattr(known[same], tensor), getattr(known[same], f"{tensor}_certain")
            tensors[f"bits.{name}.{tensor}"] = only(bits, sure)
            tensors[f"certain.{name}.{tensor}"] = sure
    return tensors


def arithmetic(recipe: MergeRecipe) -> MergeRecipe:
    """Return what determines the bits of a merge of given parts; several recipes share it."""
    return recipe.replace(
        name="", order="by_rank", dq=None, dkv=None, source="", versions="", note=""
    )


def parts_of(inputs: Tensors) -> list[Part]:
    """Return the inputs of a merge case as the parts that :func:`ringspec.merges.merge` takes."""
    from ringspec.merges import Part

    sums = inputs.get("parts_sum", [None] * len(inputs["parts_o"]))
    each = zip(inputs["parts_o"], inputs["parts_lse"], sums, strict=True)
    return [Part(o, lse, sums=one) for o, lse, one in each]


def only(x: NDArray[Any], known: NDArray[np.bool_]) -> NDArray[Any]:
    """Return ``x`` where it is known, with one pattern of bits for every NaN, and 0 elsewhere."""
    kept = np.where(known, x, np.zeros_like(x))
    kept[kept != kept] = np.array(np.nan).astype(x.dtype)
    return kept
