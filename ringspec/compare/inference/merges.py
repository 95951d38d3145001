"""Infer with which merge recipe a kernel merges partial results, from its errors.

Merge recipes that round at the same points in the same order predict the same errors. They form one *class*, and no error
of a result in 16 bits tells them apart. A class is named only if all others fit worse by at least
:data:`~ringspec.compare.inference.infer.CONTRADICTION` nats; otherwise all classes that fit are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from ringspec.compare.inference.infer import CONTRADICTION, Fit, Predictor, infer
from ringspec.compare.inference.merge_classes import classes, merge_candidates
from ringspec.compare.noise.problem import Attention, Geometry
from ringspec.compare.statistics.types import Array
from ringspec.recipes import Recipe

__all__ = ["MergeInference", "infer_merge"]


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
