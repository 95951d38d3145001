"""Infer with which merge recipe a kernel merges partial results, from its errors.

Merge recipes that round at the same points in the same order predict the same errors. They form one *class*, and no error
of a result in 16 bits tells them apart. A class is named only if all others fit worse by at least
:data:`~ringspec.compare.inference.infer.CONTRADICTION` nats; otherwise all classes that fit are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ringspec.compare.inference.candidates import Candidate
from ringspec.compare.inference.infer import CONTRADICTION, Fit, Predictor, infer
from ringspec.compare.noise.problem import Attention, Geometry
from ringspec.compare.statistics.types import Array
from ringspec.merges import MERGES, GradientSum, MergeRecipe, with_merges
from ringspec.recipes import Recipe
from ringspec.recipes import recipe as recipe_of

__all__ = ["MergeInference", "infer_merge", "merge_candidates"]

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


@dataclass(frozen=True)
class MergeInference:
    """The merge recipes that explain the errors of a kernel.

    ``names``: the recipes of the classes that fit, the best class first; empty if none fits. ``words``: what these classes
    round, one sentence for each. ``fits``: the fit of every class, the best first.
    """

    names: tuple[str, ...]
    words: tuple[str, ...]
    fits: tuple[Fit, ...]

    def lines(self) -> list[str]:
        """Return the conclusion as text."""
        if not self.words:
            return ["no merge recipe that is known has this noise"]
        if len(self.words) == 1:
            return [f"the noise is that of {self.words[0]}"]
        return ["the errors cannot tell these merges apart:", *self.words]


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
    if merge.form == "rescaling":
        return "twice"
    return "step" if merge.form in ("pair", "sigmoid") else "final"


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


def infer_merge(
    errors: Mapping[str, Array],
    attention: Attention,
    geometry: Geometry,
    base: str | Recipe,
    predict: Predictor,
) -> MergeInference:
    """Find the merge recipes whose predicted noise is that of a kernel in one problem.

    ``errors``, ``attention``, ``geometry`` and ``predict`` are those of :func:`~ringspec.compare.inference.infer.infer`;
    ``base`` says where the kernel's blocks round. lse is not used, because its noise depends on elementary functions.
    """
    used = {name: x for name, x in errors.items() if name != "lse"}
    gradients = any(name in used for name in ("dq", "dk", "dv"))
    if not gradients:
        attention = dataclasses.replace(attention, dy=None)
    candidates = merge_candidates(base, gradients)
    found = infer(used, attention, geometry, candidates[0].terms[0][1], predict, candidates)
    # If even the most likely class has not the predicted size, nothing is concluded.
    known = found.fits if found.fits[0].good else ()
    near = [fit for fit in known if fit.good and fit.margin <= CONTRADICTION]
    members = {names[0]: names for names in classes(gradients).values()}
    names = tuple(name for fit in near for name in members[fit.name])
    return MergeInference(names, tuple(fit.candidate.words for fit in near), found.fits)
