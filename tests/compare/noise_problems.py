"""Random problems for noise and statistics: the specification's ring as the kernel, float64 as the truth.

:func:`random_case` draws them for the calibration of the noise model, :func:`random_problem` for the
statistics. The truth of a recipe without float64 products is float64's; that of 'float64' itself is computed in
extended precision (64 significant bits), where the machine has it.
"""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from ringspec.compare.noise.predict import predict
from ringspec.compare.noise.problem import Attention, Geometry
from ringspec.compare.statistics.types import allowance_for
from ringspec.conformance.judge import noise_inputs
from ringspec.formats import load, round_to
from ringspec.merges import MERGES, Functions, with_merges
from ringspec.problem.options import check
from ringspec.recipes import RECIPES, Recipe, recipe
from ringspec.rings.layouts import make_layout
from ringspec.rings.replay_as import replayed
from ringspec.rings.ring import layouts_for, ring
from ringspec.spec.dense_backward import over_group
from ringspec.truth.dense import results_of
from ringspec.truth.problem import Upstream

STEP = 1e-3  # relative step of the scale, for the derivative
RESULTS = ("o", "lse", "dq", "dk", "dv")


@dataclass
class Case:
    """Inputs of one problem, already numbers of the recipe's input format."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dy: np.ndarray
    dlse: np.ndarray | None
    workers: int
    layout: str
    circulation: str
    recipe: Recipe
    options: dict


def scale_of(case: Case) -> float:
    return float(case.options.get("scale", 1.0 / math.sqrt(case.q.shape[3])))


def options_of(case: Case, scale_error: float) -> dict:
    if scale_error == 0.0:
        return case.options
    return case.options | {"scale": scale_of(case) * (1.0 + scale_error)}


def attention_of(case: Case, scale_error: float = 0.0) -> Attention:
    """The truth quantities of a problem, in float64."""
    problem = check(case.q, case.k, case.v, options_of(case, scale_error))
    upstream = Upstream(case.dy, case.dlse)
    return noise_inputs.attention_of(problem, results_of(problem, upstream)["o"], upstream)


def run_whole(case: Case, scale_error: float = 0.0, other: Any = None, **blocks: Any):
    """What the ring gives; ``other``: under another recipe than its own, ``blocks``: with other blocks.

    With a recipe that names a merge recipe, it is a ring with these merges and with blocks that round as the recipe says.
    """
    used = case.recipe if other is None else recipe(other)
    if used.merge_recipe is not None:
        return run_merged(case, used, options_of(case, scale_error))
    return ring(
        case.q,
        case.k,
        case.v,
        case.dy,
        dlse=case.dlse,
        workers=case.workers,
        layout=case.layout,
        circulation=case.circulation,
        recipe=case.recipe if other is None else other,
        **blocks,
        **options_of(case, scale_error),
    )


def run_merged(
    case: Case, used: Recipe, options: dict, functions: Functions | None = None
) -> SimpleNamespace:
    """The ring of a merge recipe: float64 results, with lse as a natural logarithm; None where the recipe has no sum."""
    merges = MERGES[used.merge_recipe]
    problem = check(case.q, case.k, case.v, dict(options))
    layouts = layouts_for(problem, case.layout, case.workers, options)
    got = replayed(problem, layouts, case.dy, merges, used.block_o, functions, used)
    found = {name: getattr(got, name) for name in RESULTS}
    found = {name: None if x is None else load(x) for name, x in found.items()}
    return SimpleNamespace(**(found | {"lse": found["lse"] * merges.result_unit}))


def run(case: Case, scale_error: float = 0.0, other: Any = None, **blocks: Any) -> dict:
    """The results of :func:`run_whole` by name."""
    result = run_whole(case, scale_error, other, **blocks)
    return {name: getattr(result, name) for name in RESULTS if getattr(result, name) is not None}


def geometry_of(case: Case) -> Geometry:
    """How the ring cuts the problem."""
    layout = make_layout(case.layout, case.q.shape[2], case.workers, None)
    owner, slot = noise_inputs.places(layout.table)
    made = Geometry.ring(owner, owner, case.workers, case.circulation)
    return Geometry(**(vars(made) | {"slot_q": slot, "slot_k": slot}))


def truth_of(case: Case, scale_error: float = 0.0) -> dict:
    """o, lse, dq, dk, dv; their error is far below the noise of every recipe but float64."""
    results = truth(attention_of(case, scale_error))
    return {name: results[name] for name in RESULTS}


def directions(case: Case) -> dict:
    """d result / d log scale, by a central difference."""
    up, down = truth_of(case, STEP), truth_of(case, -STEP)
    with np.errstate(invalid="ignore"):
        return {name: (up[name] - down[name]) / (2 * STEP) for name in up}


def truth(attention: Attention) -> dict:
    """Results of the definition, in the precision of the arrays that are given."""
    at = attention
    group = at.q.shape[1] // at.k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (at.k, at.v))
    keep = 1 if at.keep is None else at.keep
    dlse = 0 if at.dlse is None else at.dlse
    dp = product(at.dy, v.swapaxes(2, 3)) * keep
    delta = (at.dy * at.o).sum(axis=3) - dlse
    dz = at.p * (dp - delta[..., None])
    if at.tanh is not None:
        dz = dz * (1 - at.tanh * at.tanh)
    results = {
        "o": at.o,
        "lse": at.lse,
        "dq": at.scale * product(dz, k),
        "dk": over_group(at.scale * product(dz.swapaxes(2, 3), at.q), group),
        "dv": over_group(product((at.p * keep).swapaxes(2, 3), at.dy), group),
    }
    if at.sinks is not None:
        sink_p = np.exp(at.sinks[None, :, None, :] - at.lse[..., None])
        results["dsinks"] = -(sink_p * delta[..., None]).sum(axis=(0, 2))
    if at.bias is not None:
        axes = tuple(n for n in range(4) if at.bias.shape[n] == 1 and dz.shape[n] != 1)
        results["dbias"] = dz.sum(axis=axes, keepdims=True)
    return results


def product(a, b):
    """Matrix product; NumPy has none of its own for extended precision that is fast, and none is needed."""
    return a @ b


def extended(attention: Attention) -> Attention:
    """o, lse and p again in extended precision, for problems without dropout."""
    at = attention
    wide = {n: getattr(at, n).astype(np.longdouble) for n in ("q", "k", "v", "dy")}
    group = at.q.shape[1] // at.k.shape[1]
    k, v = (np.repeat(wide[n], group, axis=1) for n in ("k", "v"))
    z = np.longdouble(at.scale) * (wide["q"] @ k.swapaxes(2, 3))
    if at.bias is not None:
        z = z + np.where(np.isneginf(at.bias), 0, at.bias)
    t = None
    if at.softcap is not None:
        t = np.tanh(z / at.softcap)
        z = at.softcap * t
    s = np.where(np.isneginf(at.s), -np.inf, z)
    m = s.max(axis=3)
    if at.sinks is not None:
        m = np.maximum(m, at.sinks.max(axis=1)[None, :, None])
    shift = np.where(np.isneginf(m), 0, m)
    e = np.exp(s - shift[..., None])
    total = e.sum(axis=3)
    if at.sinks is not None:
        total = total + np.exp(at.sinks[None, :, None, :] - shift[..., None]).sum(axis=3)
    safe = np.where(total == 0, 1, total)
    p = e / safe[..., None]
    keep = 1 if at.keep is None else at.keep
    lse = np.where(total == 0, -np.inf, shift + np.log(safe))
    dlse = None if at.dlse is None else at.dlse.astype(np.longdouble)
    return SimpleNamespace(
        **wide, s=s, lse=lse, p=p, o=(p * keep) @ v, scale=np.longdouble(at.scale), dlse=dlse,
        keep=at.keep, softcap=at.softcap, tanh=t, sinks=at.sinks, bias=at.bias,
    )  # fmt: skip


def draw(
    rng: np.random.Generator,
    used: str | Recipe,
    workers: int,
    layout: str = "contiguous",
    circulation: str = "kv",
    n: int = 64,
    width: int = 32,
    heads: tuple[int, int] = (2, 1),
    spread: float = 1.0,
    features: tuple[str, ...] = ("causal",),
) -> Case:
    """A problem whose logits have the standard deviation ``spread``."""
    used = recipe(used)
    h, h_k = heads
    amount = np.sqrt(spread)

    def normal(*shape, by=1.0):
        return round_to(rng.normal(size=shape) * by, used.inputs)

    q, k = normal(1, h, n, width, by=amount), normal(1, h_k, n, width, by=amount)
    v, dy = normal(1, h_k, n, width), normal(1, h, n, width)
    options: dict = {}
    if "causal" in features:
        options["causal"] = True
    if "window" in features:
        options["window"] = (n // 3, n // 4)
    if "softcap" in features:
        options["softcap"] = 5.0
    if "sinks" in features:
        options["sinks"] = rng.normal(size=(h, 2))
    if "bias" in features:
        options["bias"] = rng.normal(size=(1, h, n, n)) * 0.5
    if "dropout" in features:
        options |= {"dropout_p": 0.2, "dropout_seed": 7}
    dlse = rng.normal(size=(1, h, n)) if "dlse" in features else None
    return Case(q, k, v, dy, dlse, workers, layout, circulation, used, options)


def solve(case: Case):
    """(attention, geometry, errors by name): result of the ring less truth, float64."""
    attention = attention_of(case)
    result, geometry = run_whole(case), geometry_of(case)
    wide = extended(attention) if case.recipe.products == "float64" else attention
    want = truth(wide)
    got = {name: getattr(result, name) for name in RESULTS}
    got |= {name: getattr(result, name) for name in ("dsinks", "dbias") if name in want}
    errors = {}
    for name, value in want.items():
        value = np.asarray(value)
        same = np.isneginf(value)
        with np.errstate(invalid="ignore"):
            error = np.where(same, 0, got[name].reshape(value.shape) - value)
        errors[name] = error.astype(np.float64)
    return attention, geometry, errors


LAYOUTS = ("contiguous", "striped", "zigzag")
CIRCULATIONS = ("kv", "q", "gather")
FEATURES = (
    (), ("causal",), ("causal",), ("window",), ("causal", "softcap"), ("causal", "sinks"),
    ("bias",), ("causal", "dropout"), ("dlse",), ("causal", "sinks", "dlse", "softcap", "bias"),
)  # fmt: skip
SPREADS = (0.01, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0)


def random_case(number: int, seed: int) -> tuple[Case, dict]:
    """Problem ``number``: recipes in turn, all else at random."""
    rng = np.random.default_rng((seed, number))
    names = list(RECIPES)
    chosen = {
        "used": names[number % len(names)],
        "workers": int(rng.choice((1, 2, 4, 8))),
        "layout": str(rng.choice(LAYOUTS)),
        "circulation": str(rng.choice(CIRCULATIONS)),
        "n": int(rng.choice((64, 128, 192))),
        "width": int(rng.choice((16, 32, 64))),
        "heads": ((2, 1), (2, 2), (4, 2))[rng.integers(3)],
        "spread": float(rng.choice(SPREADS)),
        "features": FEATURES[rng.integers(len(FEATURES))],
    }
    tiled = rng.integers(3) == 0
    described = dict(chosen)
    if tiled:
        chosen["used"] = recipe(chosen["used"]).replace(tile_q=16, tile_k=16)
        described["tile"] = 16
    return draw(rng, **chosen), described


DRAWN = ("bf16", "bf16_partials", "fp16", "fp16_partials", "float32", "nki", "fp8_e4m3")


def random_problem(seed: int, declared: str | None = None, **fixed: Any) -> Case:
    """A problem with all of it drawn at random; ``fixed``: workers, length, width, heads, spread, ...."""
    rng = np.random.default_rng([77, seed])
    drawn = {
        "recipe": str(rng.choice(DRAWN)) if declared is None else declared,
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
    if drawn["recipe"] in MERGES:
        # A replay adds no sinks, and its sums of gradients are those of a ring whose keys travel.
        drawn["circulation"], mask = "kv", "causal" if mask == "sinks" else mask
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
    used = recipe_called(drawn["recipe"])
    q, k, v, dy = (round_to(x, used.inputs) for x in (q, k, v, dy))
    return Case(
        q,
        k,
        v,
        dy,
        None,
        drawn["workers"],
        drawn["layout"],
        drawn["circulation"],
        used,
        dict(options),
    )


def recipe_called(name: str) -> Recipe:
    """A recipe of rounding points, or bf16 with the merges of the merge recipe of this name."""
    return with_merges(RECIPES["bf16"], name) if name in MERGES else recipe(name)


def limits(used: str | Recipe, name: str) -> tuple[float, float]:
    """What rms of error / predicted must keep to: narrow where 16-bit rounding dominates."""
    allowance = allowance_for(used, name)
    return allowance.low, allowance.high


def compare(case: Case) -> dict[str, tuple[float, float, float]]:
    """For each tensor: the ratio, the worst error in units of its bound, the worst where sd is 0."""
    with np.errstate(over="ignore", invalid="ignore"):
        attention, geometry, errors = solve(case)
        noise = predict(attention, case.recipe, geometry)
    figures = {}
    for name, error in errors.items():
        sd, bound = noise.sd[name], noise.bound[name]
        about = error - noise.mean[name]
        noisy = sd > 0
        ratio = np.sqrt(np.mean((about[noisy] / sd[noisy]) ** 2)) if noisy.any() else 1.0
        worst = (np.abs(error) / np.where(bound > 0, bound, 1.0)).max()
        exact = np.abs(about[~noisy]).max(initial=0.0)
        figures[name] = (float(ratio), float(worst), float(exact))
    return figures
