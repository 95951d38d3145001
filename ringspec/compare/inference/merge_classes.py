"""Classes of merge recipes that predict the same errors in 16 bits, as candidates of an inference."""

from __future__ import annotations

from typing import Any

from ringspec.compare.inference.candidates import Candidate
from ringspec.merges import MERGES, GradientSum, MergeRecipe, with_merges
from ringspec.recipes import Recipe
from ringspec.recipes import recipe as recipe_of

__all__ = ["classes", "kind_of", "merge_candidates"]

HOW = {
    "once": "o is rounded once, after a merge in float32",
    "first": "only the first difference of two parts is rounded",
    "state": "unnormalised parts are merged in float32, and o is rounded once",
    "final": "o is rounded at every step, with the final weights",
    "step": "o is rounded at every step, and rescaled by later ones",
    "twice": "o is rounded twice at every step, and rescaled by later ones",
    "products": "each weighted part and each sum of them are rounded",
    "state products": "unnormalised parts: each product and each sum are rounded",
}


def kind_of(merge: MergeRecipe) -> str:
    """Return which roundings of o a merge recipe has, a key of :data:`HOW`; for parts in 16 bits."""
    if merge.carried_o == "wider":
        return "first"
    if merge.form == "state":
        return "state products" if merge.carried_o == "own" else "state"
    if merge.carried_o != "own":
        return "once"
    if merge.products_rounded:
        return "products"
    if merge.form == "rescaling" and merge.earlier_rounded:
        return "twice"
    return "step" if merge.form in ("pair", "sigmoid", "rescaling") else "final"


def class_of(merge: MergeRecipe, gradients: bool) -> tuple[Any, ...]:
    """Return a key that is equal for merge recipes that predict the same errors; ``gradients``: of dq, dk and dv too."""
    kind = kind_of(merge)
    # With one rounding at the end, the order of a float32 sum does not matter in 16 bits.
    key: tuple[Any, ...] = (kind, None if kind in ("once", "state") else merge.order)
    return (*key, sum_of(merge.dq), sum_of(merge.dkv)) if gradients else key


def sum_of(how: GradientSum | None) -> tuple[str, ...] | None:
    if how is None:
        return None
    narrow = how.carried == "own"
    return (how.carried, how.order if narrow else "", "carried" if how.result == "carried" else "")


def merge_candidates(base: str | Recipe, gradients: bool = False) -> tuple[Candidate, ...]:
    """Return a candidate for each class of merge recipes, for blocks that round as ``base`` says.

    ``gradients``: whether classes differ in the sums of gradients as well; then merge recipes without a backward pass are
    left out. The recipes of a class are in the words of its candidate.

    >>> [candidate.name for candidate in merge_candidates("bf16")][:3]
    ['torch_cp', 'torch_cp_narrow', 'te_p2p']
    """
    used = recipe_of(base)
    found = []
    for names in classes(gradients).values():
        words = f"{HOW[kind_of(MERGES[names[0]])]} ({', '.join(names)})"
        found.append(Candidate(names[0], words, ((1.0, with_merges(used, names[0])),)))
    return tuple(found)


def classes(gradients: bool) -> dict[tuple[Any, ...], list[str]]:
    """Return the names of the merge recipes of each class."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for name, merge in MERGES.items():
        if not gradients or merge.dq is not None or merge.dkv is not None:
            found.setdefault(class_of(merge, gradients), []).append(name)
    return found
