"""Problems with exact blocks whose merge is to be inferred from the errors of o."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from compare.noise_problems import attention_of, draw, geometry_of

from ringspec.compare.inference.merges import MergeInference, infer_merge
from ringspec.compare.noise.predict import predict
from ringspec.formats import load
from ringspec.merges import MERGES, merge
from ringspec.problem.options import check
from ringspec.recipes import RECIPES
from ringspec.rings.layouts import unshard
from ringspec.rings.replay_as import replayed
from ringspec.rings.ring import layouts_for

EXACT = RECIPES["float64"].replace(
    name="exact blocks", inputs="bfloat16", outputs="bfloat16", gradients="bfloat16", lse="float32"
)


def inferred(
    name: str,
    workers: int,
    seed: int,
    merger: Callable | None = None,
    tokens: int = 64,
    scale: float = 1.0,
) -> MergeInference:
    """What the errors of ``merger`` (default: the recipe ``name``) imply, over the parts of a ring in the order of ``name``.

    ``scale`` is a factor of the errors.
    """
    case = draw(
        np.random.default_rng((seed, workers, 7)), EXACT, workers, n=tokens, width=32, heads=(1, 1), features=()
    )  # fmt: skip
    attention, merges = dataclasses.replace(attention_of(case), dy=None), MERGES[name]
    problem = check(case.q, case.k, case.v, {})
    layouts = layouts_for(problem, case.layout, workers, {})
    ring = replayed(problem, layouts, None, merges, "bfloat16")
    own = [load((merger or of_recipe(name))(list(parts))) for parts in ring.parts]
    error = scale * (unshard(own, layouts[0]) - attention.o)
    return infer_merge({"o": error}, attention, geometry_of(case), EXACT, predict)


def of_recipe(name: str) -> Callable:
    return lambda parts: merge(parts, name)[0]


def label(found: MergeInference) -> list[str]:
    """The first recipe of each class that fits."""
    return [words.rpartition("(")[2].partition(",")[0].rstrip(")") for words in found.words]
