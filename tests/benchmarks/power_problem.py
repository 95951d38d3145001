"""One random problem to be measured: its truth, its predicted noise, a correct kernel's results.

The correct kernel is ``ringspec.ring`` under the recipe. Its results are kept as they are before their last
rounding, so that a defect is added where a kernel would have it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.compare.noise.predict import predict
from ringspec.compare.noise.problem import Attention, Geometry
from ringspec.compare.statistics.power import Remembered
from ringspec.compare.statistics.strata import Stratum, strata_for
from ringspec.compare.statistics.types import Allowance, Predicted, allowance_for
from ringspec.conformance.judge.noise_inputs import attention_of, places
from ringspec.errors import OptionError, shown
from ringspec.formats import round_to
from ringspec.problem.model import Problem
from ringspec.problem.options import check
from ringspec.recipes import Recipe
from ringspec.recipes import recipe as recipe_of
from ringspec.rings.layouts import make_layout
from ringspec.rings.ring import ring
from ringspec.truth.dense import directions_of, results_of
from ringspec.truth.problem import Upstream

Array = NDArray[np.float64]
Named = dict[str, Array]
MAX_PAIRS = 1 << 25


@dataclass(frozen=True)
class Asked:
    """What to measure: a self-attention of one batch, H = Hkv, D = Dv."""

    recipe: str = "bf16"
    tokens: int = 2048
    head_dim: int = 128
    heads: int = 1
    workers: int = 4
    layout: str = "zigzag"
    causal: bool = True
    gradients: bool = True
    power: float = 0.999
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "head_dim", "heads", "workers"):
            if getattr(self, name) < 1:
                raise OptionError(
                    f"{name} of at least 1", shown(getattr(self, name)), "ask for more"
                )
        if not 0.5 <= self.power < 1:
            raise OptionError("power from 0.5 to below 1", shown(self.power), "pass power=0.999")
        pairs = self.heads * self.tokens**2
        if pairs > MAX_PAIRS:
            raise OptionError(
                f"at most {MAX_PAIRS} pairs of a query and a key over all heads",
                shown(pairs),
                "choose fewer tokens or heads: matrices of all pairs are held",
            )
        used = recipe_of(self.recipe)
        if used.products == "float64":
            raise OptionError(
                "a recipe with rounding noise, such as bf16, fp16 or float32",
                shown(self.recipe),
                "a float64 kernel is compared with a bound instead",
            )


@dataclass(frozen=True)
class Setting:
    """The problem and all that its defects are measured with.

    ``truth``, ``directions`` (by log scale), ``wide`` (a correct kernel's results before their last
    rounding): o and lse, and with gradients dq, dk, dv, in global order, float64.
    """

    asked: Asked
    recipe: Recipe
    problem: Problem
    upstream: Upstream
    truth: Named
    directions: Named
    attention: Attention
    geometry: Geometry
    noise: Predicted
    strata: Mapping[str, tuple[Stratum, ...]]
    wide: Named

    def format_of(self, name: str) -> str:
        """The format in which a kernel stores a result."""
        if name == "lse":
            return self.recipe.lse
        return self.recipe.outputs if name == "o" else self.recipe.gradients

    def got(self, pattern: Mapping[str, Array] | None = None, wide: Named | None = None) -> Named:
        """Results with an error added before their last rounding, by the names in ``pattern``."""
        wide = self.wide if wide is None else wide
        names = wide if pattern is None else [name for name in wide if name in pattern]
        added = {} if pattern is None else pattern
        return {
            name: round_to(wide[name] + added.get(name, 0.0), self.format_of(name))
            for name in names
        }

    def allowance(self, name: str) -> Allowance:
        return allowance_for(self.recipe, name, self.asked.workers)

    def simulated(self, scale: float | None = None) -> Named:
        """A correct kernel's results before their last rounding; ``scale``: with another scale."""
        asked, problem = self.asked, self.problem
        return simulated(asked, self.recipe, problem, self.upstream, scale)


def inputs_of(asked: Asked) -> list[Array]:
    """q, k, v, dy [1, H, S, D]: normal deviates in the recipe's input format."""
    shape = (1, asked.heads, asked.tokens, asked.head_dim)
    rng = np.random.default_rng([asked.seed, 5])
    return [round_to(rng.standard_normal(shape), recipe_of(asked.recipe).inputs) for _ in range(4)]


def simulated(
    asked: Asked,
    recipe: Recipe,
    problem: Problem,
    upstream: Upstream,
    scale: float | None = None,
) -> Named:
    """o and lse of a forward that leaves them wide, gradients of a backward that reads them rounded."""
    options: dict[str, Any] = {"causal": asked.causal, "scale": scale}
    options |= {"workers": asked.workers, "layout": asked.layout}
    q, k, v = problem.q, problem.k, problem.v
    forward = ring(q, k, v, recipe=recipe.replace(outputs="float64"), **options)
    found = {"o": forward.o, "lse": forward.lse}
    if upstream.dy is not None:
        both = ring(q, k, v, upstream.dy, recipe=recipe.replace(gradients="float64"), **options)
        assert both.dq is not None and both.dk is not None and both.dv is not None
        found |= {"dq": both.dq, "dk": both.dk, "dv": both.dv}
    return found


def setting_of(asked: Asked) -> Setting:
    """Draw the problem, compute its truth, predict its noise, run the correct kernel."""
    recipe = recipe_of(asked.recipe)
    q, k, v, dy = inputs_of(asked)
    layout = make_layout(asked.layout, asked.tokens, asked.workers, None)
    problem = check(q, k, v, {"causal": asked.causal})
    upstream = Upstream(dy if asked.gradients else None)
    truth, directions = results_of(problem, upstream), directions_of(problem, upstream)
    attention = attention_of(problem, truth["o"], upstream)
    owner, slot = places(layout.table)
    geometry = Geometry.ring(owner, owner, asked.workers)
    geometry = dataclasses.replace(geometry, slot_q=slot, slot_k=slot)
    noise = Remembered(predict(attention, recipe, geometry))
    strata = strata_for(geometry, attention.p, asked.heads)
    wide = simulated(asked, recipe, problem, upstream)
    return Setting(
        asked,
        recipe,
        problem,
        upstream,
        truth,
        directions,
        attention,
        geometry,
        noise,
        strata,
        wide,
    )
