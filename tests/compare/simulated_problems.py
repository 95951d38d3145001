"""Random problems run under the recipe simulation, with all that a prediction of their noise needs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

import ringspec as rs
from ringspec.compare.noise import Attention, Geometry
from ringspec.formats import round_to
from ringspec.recipes import recipe as recipe_of
from ringspec.spec.attention import normalise, scores
from ringspec.spec.dropout import keep_factor
from ringspec.spec.layout import make_layout
from ringspec.spec.options import check

STEP = 1e-3  # relative step of the scale, for the derivative
LAYOUTS = ("contiguous", "striped", "zigzag")
CIRCULATIONS = ("kv", "q", "gather")
RECIPES = ("bf16", "bf16_partials", "fp16", "fp16_partials", "float32", "nki", "fp8_e4m3")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Inputs as the kernel sees them, and the ring that it runs on."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dy: np.ndarray
    options: dict[str, Any]
    workers: int
    layout: str
    circulation: str
    recipe: str


def random_problem(seed: int, recipe: str | None = None, **fixed: Any) -> Problem:
    """A problem with all of it drawn at random; ``fixed``: workers, length, width, heads, spread, ...."""
    rng = np.random.default_rng([77, seed])
    drawn = {
        "recipe": str(rng.choice(RECIPES)) if recipe is None else recipe,
        "workers": int(rng.choice((1, 2, 4, 8))),
        "length": int(rng.choice((32, 64, 64, 128, 128, 256))),
        "width": int(rng.choice((16, 32, 64))),
        "heads": int(rng.choice((1, 2, 4))),
        "group": int(rng.choice((1, 2))),
        "layout": str(rng.choice(LAYOUTS)),
        "circulation": str(rng.choice(CIRCULATIONS)),
        "spread": float(rng.choice((0.05, 0.5, 1.0, 1.0, 2.0, 3.0))),
        "unlike": bool(rng.random() < 0.3),
    }
    mask = rng.choice(("full", "causal", "causal", "window", "softcap", "sinks", "dropout"))
    drawn |= fixed
    group = drawn["group"] if drawn["heads"] % drawn["group"] == 0 else 1
    shape = (1, drawn["heads"], drawn["length"], drawn["width"])
    small = (1, drawn["heads"] // group, drawn["length"], drawn["width"])
    root = math.sqrt(drawn["spread"])
    q, dy = root * rng.standard_normal(shape), rng.standard_normal(shape)
    k, v = root * rng.standard_normal(small), rng.standard_normal(small)
    if drawn["unlike"]:
        q, k, v, dy = (
            x * np.exp(0.7 * rng.standard_normal((*x.shape[:3], 1))) for x in (q, k, v, dy)
        )
    options: dict[str, Any] = {
        "full": {},
        "causal": {"causal": True},
        "window": {"causal": True, "window": (drawn["length"] // 4, 0)},
        "softcap": {"softcap": 5.0},
        "sinks": {"sinks": rng.standard_normal((drawn["heads"], 1))},
        "dropout": {"dropout_p": 0.2, "dropout_seed": seed},
    }[fixed.get("mask", mask)]
    used = recipe_of(drawn["recipe"])
    q, k, v, dy = (round_to(x, used.inputs) for x in (q, k, v, dy))
    return Problem(
        q,
        k,
        v,
        dy,
        dict(options),
        drawn["workers"],
        drawn["layout"],
        drawn["circulation"],
        drawn["recipe"],
    )


def run(problem: Problem, scale_error: float = 0.0, recipe: Any = None) -> dict[str, np.ndarray]:
    """What the simulated kernel gives."""
    options = dict(problem.options)
    options["scale"] = scale_of(problem) * (1.0 + scale_error)
    result = rs.ring(
        problem.q,
        problem.k,
        problem.v,
        problem.dy,
        workers=problem.workers,
        layout=problem.layout,
        circulation=problem.circulation,
        recipe=problem.recipe if recipe is None else recipe,
        **options,
    )
    return {name: getattr(result, name) for name in ("o", "lse", "dq", "dk", "dv")}


def scale_of(problem: Problem) -> float:
    return float(problem.options.get("scale", 1.0 / math.sqrt(problem.q.shape[3])))


def truth(problem: Problem, scale_error: float = 0.0) -> dict[str, np.ndarray]:
    """float64 attention: its error is far below the noise of every recipe here."""
    options = dict(problem.options)
    options["scale"] = scale_of(problem) * (1.0 + scale_error)
    forward = rs.attention(problem.q, problem.k, problem.v, **options)
    gradients = rs.attention_backward(problem.dy, problem.q, problem.k, problem.v, **options)
    return {
        "o": forward.o,
        "lse": forward.lse,
        "dq": gradients.dq,
        "dk": gradients.dk,
        "dv": gradients.dv,
    }


def directions(problem: Problem) -> dict[str, np.ndarray]:
    """d result / d log scale, by a central difference."""
    up, down = truth(problem, STEP), truth(problem, -STEP)
    with np.errstate(invalid="ignore"):
        return {name: (up[name] - down[name]) / (2 * STEP) for name in up}


def attention_of(problem: Problem) -> Attention:
    """What the prediction starts from."""
    options = dict(problem.options)
    options["scale"] = scale_of(problem)
    whole = check(problem.q, problem.k, problem.v, options)
    s, t = scores(whole)
    lse, p = normalise(whole, s)
    terms = whole.terms
    keep = None
    if terms.dropout_p:
        keep = keep_factor(whole.rows, whole.columns, terms, problem.q.shape[0])
    return Attention(
        problem.q,
        problem.k,
        problem.v,
        s,
        lse,
        p,
        rs.attention(problem.q, problem.k, problem.v, **options).o,
        options["scale"],
        dy=problem.dy,
        keep=keep,
        softcap=terms.softcap,
        tanh=t,
        sinks=terms.sinks,
    )


def geometry_of(problem: Problem) -> Geometry:
    length = problem.q.shape[2]
    layout = make_layout(problem.layout, length, problem.workers, None)
    owner = np.empty(length, dtype=np.int64)
    for r in range(problem.workers):
        owner[layout.table[r]] = r
    return Geometry.ring(owner, owner, problem.workers, problem.circulation)
