"""Bounds: the specification under each recipe stays within them, and mistakes do not."""

import dataclasses
import functools

import numpy as np
import pytest
from oracle.row_scale import row_scale
from refusals import refuses

import ringspec as rs
from ringspec.compare.bounds import (
    RECIPE_OF_FORMAT,
    RESULTS,
    Sizes,
    bound_factors,
    bound_floors,
    least_number,
    merge_factors,
    together,
    walk,
)
from ringspec.compare.verdict import judge_tensor
from ringspec.errors import OptionError
from ringspec.formats import round_to, store, unit_roundoff
from ringspec.recipes import RECIPES, ROUNDING_POINTS, recipe
from ringspec.spec import online_softmax

GRADIENTS = ("dq", "dk", "dv", "dsinks", "dbias")
SEEDS, MANY_SEEDS, SMALL = 10, 60, (0, 9, 11)
ENDS = {"o": "outputs", "lse": "lse", "dq": "gradients", "dk": "gradients", "dv": "gradients"}
TYPICAL = Sizes(workers=4, keys=64, head_dim=16, queries=64, condition=20.0)


@dataclasses.dataclass(frozen=True)
class Problem:
    """q, k, v, dy in global order, the ring and the options of one random problem."""

    tensors: tuple
    dlse: np.ndarray | None
    ring: dict
    options: dict

    def sizes(self, scale):
        q, k, v, _ = self.tensors
        return Sizes(
            workers=self.ring["workers"], keys=k.shape[2], head_dim=q.shape[3],
            value_dim=v.shape[3], queries=q.shape[2] * q.shape[1] // k.shape[1],
            batch=q.shape[1], softcap="softcap" in self.options,
            condition=float(scale.lse.max()), largest_lse=float(self.largest_lse()),
        )  # fmt: skip

    def largest_lse(self):
        lse = rs.attention(*self.tensors[:3], **self.options).lse
        return np.abs(lse[np.isfinite(lse)]).max(initial=0.0)

    def largest(self):
        named = dict(zip(("q", "k", "v", "dy"), self.tensors, strict=True))
        sizes = {name: np.abs(x).max() for name, x in named.items()}
        dlse = 0.0 if self.dlse is None else np.abs(self.dlse).max()
        dropout = 1.0 / (1.0 - self.options.get("dropout_p", 0.0))
        return sizes | {"dlse": dlse, "scale": self.tensors[0].shape[3] ** -0.5, "dropout": dropout}


@functools.cache
def problem(seed):
    """Flat to very peaked rows, every layout and circulation, W of 1 to 8, every feature."""
    random = np.random.default_rng([20, seed])
    workers, tokens = int(random.choice([1, 2, 4, 8])), int(random.choice([16, 32, 64]))
    width, values = int(random.choice([4, 16, 64])), int(random.choice([4, 16]))
    heads, key_heads = [(1, 1), (2, 1), (2, 2)][random.integers(3)]
    peak = float(random.choice([0.01, 0.3, 1.0, 3.0, 8.0]))
    spread = random.choice([0.0, 2.0])

    def draw(heads, width):
        rows = np.exp(spread * random.normal(size=(1, heads, tokens, 1)))
        return random.normal(size=(1, heads, tokens, width)) * rows

    tensors = (draw(heads, width) * peak, draw(key_heads, width), draw(key_heads, values),
               draw(heads, values))  # fmt: skip
    dlse = round_to(random.normal(size=(1, heads, tokens)), "float32")
    bias = round_to(random.normal(size=(1, heads, tokens, tokens)), "float32")
    offered = {"causal": True, "softcap": 5.0, "window": tokens // 3, "dropout_p": 0.25,
               "sinks": round_to(random.normal(size=(heads, 2)), "float32"), "bias": bias}  # fmt: skip
    options = {name: value for name, value in offered.items() if random.random() < 0.3}
    ring = {
        "workers": workers,
        "layout": str(random.choice(["contiguous", "striped", "zigzag"])),
        "circulation": str(random.choice(["kv", "q", "gather"])),
    }
    return Problem(tensors, dlse if random.random() < 0.3 else None, ring, options)


@functools.cache
def in_format(seed, name):
    """A problem whose inputs are numbers of a format; E4M3 ends at 448."""
    case = problem(seed)
    tensors = tuple(round_to(np.clip(x, -448, 448), name) for x in case.tensors)
    return dataclasses.replace(case, tensors=tensors)


@functools.cache
def truth_in_format(seed, name):
    return truth(in_format(seed, name))


def truth(case):
    """Results in float64 by the dense definition, and their row scales."""
    q, k, v, dy = case.tensors
    want = rs.attention(q, k, v, **case.options)
    gradients = rs.attention_backward(q, k, v, dy, dlse=case.dlse, **case.options)
    results = {"o": want.o, "lse": want.lse} | {n: getattr(gradients, n) for n in GRADIENTS}
    scale = row_scale(q, k, v, dy, case.dlse, **case.options)
    return {name: x for name, x in results.items() if x is not None}, scale


def verdicts(seed, name):
    """One verdict a result of the specification's ring under a recipe."""
    case = in_format(seed, RECIPES[name].inputs)
    want, scale = truth_in_format(seed, RECIPES[name].inputs)
    run = rs.ring(*case.tensors, dlse=case.dlse, recipe=name, **case.ring, **case.options)
    results = {"o": run.o, "lse": run.lse} | {n: getattr(run.gradients, n) for n in GRADIENTS}
    factors = bound_factors(name, case.sizes(scale))
    floors = bound_floors(name, case.sizes(scale), case.largest())
    for tensor, due in want.items():
        format = getattr(recipe(name), ENDS.get(tensor, "statistics"))
        got = store(results[tensor], format)
        yield judge_tensor(
            tensor, got, due, round_to(due, format), getattr(scale, tensor), factors[tensor],
            floor=floors[tensor],
        )  # fmt: skip


# float64 has its own test, and nki_low cannot hold the lse of a peaked row in bfloat16.
@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ("float64", "nki_low")])
def test_every_recipe_stays_below_0_7_of_its_bounds(name):
    compared = 0
    for seed in range(SEEDS):
        for verdict in verdicts(seed, name):
            compared += 1
            assert verdict.ok and verdict.error <= 0.7, (seed, verdict)
    assert compared >= 5 * SEEDS


@pytest.mark.parametrize("name", ["bf16", "fp16", "bf16_partials", "float32"])
def test_bounds_are_not_far_from_what_a_recipe_does(name):
    """The largest error of each result over the problems is at least 1/200 of its bound.

    The limit holds with a margin of 2.5: over OpenBLAS's Nehalem, Haswell and SkylakeX kernels, one and
    two threads, and NumPy without SIMD dispatch, the least of these maxima is 1/79 (float32, dk; lse in
    16 bits 1/69). Ten problems do not suffice: in float32 the maximum of dk is then 1/151 to 1/224.
    """
    worst = dict.fromkeys(("o", "lse", "dq", "dk", "dv"), 0.0)
    for seed in range(MANY_SEEDS):
        for verdict in verdicts(seed, name):
            if verdict.tensor in worst:
                worst[verdict.tensor] = max(worst[verdict.tensor], verdict.error)
    assert min(worst.values()) >= 1 / 200, worst


def test_float64_stays_within_its_bounds_of_the_exact_truth():
    """Truth in float64 would hide half of the error here."""
    from ringspec import exact
    from ringspec.exact.keywords import problem_of
    from ringspec.problem.options import check

    for seed in SMALL:
        case = problem(seed)
        q, k, v, dy = case.tensors
        checked = problem_of(check(q, k, v, case.options))
        truth = exact.backward(checked, dy, case.dlse, scales=True)
        run = rs.ring(*case.tensors, dlse=case.dlse, **case.ring, **case.options)
        factors = bound_factors("float64", case.sizes(row_scale(q, k, v, dy, **case.options)))
        for name, due in truth.tensors.items():
            due = due["float64"]
            got = np.reshape(
                getattr(run, name, None) if hasattr(run, name) else getattr(run.gradients, name),
                due.shape,
            )
            verdict = judge_tensor(name, got, due, due, truth.scales[name], factors[name])
            assert verdict.ok and verdict.error <= 0.5, (seed, verdict)


def causal_ring(name):
    random = np.random.default_rng(4)
    tensors = tuple(
        round_to(random.normal(size=(1, 2, 64, 16)), RECIPES[name].inputs) for _ in range(4)
    )
    ring = {"workers": 4, "layout": "contiguous", "circulation": "kv"}
    return Problem(tensors, None, ring, {"causal": True})


def rows_found(case, name, wrong):
    """How many rows of each wrong result are beyond their bound."""
    want, scale = truth(case)
    factors = bound_factors(name, case.sizes(scale))
    found = {}
    for tensor, got in wrong.items():
        due = want[tensor]
        verdict = judge_tensor(tensor, got, due, due, getattr(scale, tensor), factors[tensor])
        found[tensor] = verdict.rows
    return found


WIDE = ["float32", "bf16", "fp16", "bf16_partials", "nki"]


@pytest.mark.parametrize("name", WIDE)
def test_rows_of_the_next_worker_are_beyond_the_bounds_in_every_result(name):
    case = causal_ring(name)
    run = rs.ring(*case.tensors, **case.ring, **case.options, recipe=name)
    wrong = {x: np.roll(getattr(run, x), 16, axis=2) for x in ("o", "lse", "dq", "dk", "dv")}
    found = rows_found(case, name, wrong)
    assert min(found.values()) >= 16, found


@pytest.mark.parametrize("name", WIDE)
def test_a_mask_that_is_off_by_one_is_beyond_the_bounds_in_every_result(name):
    case = causal_ring(name)
    run = rs.ring(*case.tensors, **case.ring, **case.options, recipe=name, q_offset=1)
    wrong = {x: getattr(run, x) for x in ("o", "lse", "dq", "dk", "dv")}
    found = rows_found(case, name, wrong)
    assert min(found.values()) >= 1 and found["o"] >= 8 and found["lse"] >= 64, found


@pytest.mark.parametrize("name", ["float32", "bf16", "bf16_partials", "fp16"])
@pytest.mark.parametrize("order", ["merge", "merge_normalised"])
def test_merges_stay_within_their_bounds(name, order):
    used, random = RECIPES[name], np.random.default_rng(5)
    for parts in (1, 2, 8):
        for spread in (0.1, 3.0, 30.0):
            o = round_to(random.normal(size=(parts, 1, 2, 8, 4)), used.inputs)
            lse = round_to(spread * random.normal(size=(parts, 1, 2, 8)), "float32")
            lse[0, 0, 0, 0] = -np.inf
            whole = rs.merge_partials(list(zip(o, lse, strict=True)))
            state = online_softmax.start(1, 2, 8, 4)
            for part, weight in zip(o, lse, strict=True):
                one = np.where(np.isneginf(weight), 0.0, 1.0)
                part = online_softmax.SoftmaxState(weight, one, part * one[..., None])
                state = getattr(online_softmax, order)(state, part, used)
            got_o, got_lse = online_softmax.finish(state, None, used)
            kappa = 1.0 + np.abs(np.where(np.isneginf(lse), 0.0, lse)).max(axis=0)
            size = np.where(np.isneginf(whole.lse), 0.0, np.abs(whole.lse))
            weights = np.exp(lse - np.where(np.isneginf(whole.lse), 0.0, whole.lse))
            scale_o = kappa * (weights[..., None] * np.abs(o)).sum(axis=0).max(axis=3)
            factors = merge_factors(used, parts, outputs=used.outputs, statistics="float32")
            for tensor, got, want, scale in (
                ("o", got_o, whole.o, scale_o), ("lse", got_lse, whole.lse, kappa + size),
            ):  # fmt: skip
                rounded = round_to(want, getattr(used, ENDS[tensor]))
                verdict = judge_tensor(tensor, got, want, rounded, scale, factors[tensor])
                assert verdict.ok and verdict.error <= 0.8, (parts, spread, verdict)


# The results that a narrow rounding point reaches in the simulation (tests/ground/test_recipes.py).
REACH = {
    "inputs": set(),
    "scores": {"o", "lse", "dq", "dk", "dv", "dsinks", "dbias"},
    "statistics": {"o", "lse", "dq", "dk", "dv", "dsinks", "dbias"},
    "products": {"o", "lse", "dq", "dk", "dv", "dsinks", "dbias"},
    "p": {"o", "dq", "dk", "dv", "dsinks", "dbias"},
    "block_o": {"o", "dq", "dk", "dsinks", "dbias"},
    "merge": {"o", "dq", "dk", "dsinks", "dbias"},
    "carried_o": {"o", "dq", "dk", "dsinks", "dbias"},
    "outputs": {"o", "dq", "dk", "dsinks", "dbias"},
    "lse": {"lse", "dq", "dk", "dv", "dsinks", "dbias"},
    "backward_lse": {"dq", "dk", "dv", "dsinks", "dbias"},
    "dy_o_products": {"dq", "dk", "dsinks", "dbias"},
    "delta": {"dq", "dk", "dsinks", "dbias"},
    "ds": {"dq", "dk", "dbias"},
    "tile_dq": {"dq"},
    "tile_dkv": {"dk", "dv"},
    "block_gradients": {"dq", "dk", "dv"},
    "carried_dq": {"dq"},
    "carried_dkv": {"dk", "dv"},
    "gradients": {"dq", "dk", "dv", "dbias"},
}


@pytest.mark.parametrize("point", ROUNDING_POINTS)
def test_each_rounding_point_widens_the_bounds_of_what_it_reaches(point):
    narrow = "float32" if point == "products" else "bfloat16"
    exact = bound_factors("float64", TYPICAL)
    widened = bound_factors(RECIPES["float64"].replace(name="one", **{point: narrow}), TYPICAL)
    changed = {name for name in RESULTS if widened[name] > 2 * exact[name]}
    assert changed == REACH[point]


def test_factors_have_the_size_of_their_precision():
    sizes = {name: bound_factors(name, TYPICAL) for name in RECIPES}
    for name, low, high in (
        ("float64", 1e-15, 6e-14),
        ("float32", 1e-6, 3e-5),
        ("fp16", 1e-3, 5e-3),
        ("bf16", 8e-3, 4e-2),
    ):
        assert all(low <= sizes[name][x] <= high for x in ("o", "dq", "dk", "dv")), sizes[name]
    assert sizes["bf16"]["lse"] <= 1e-5  # its statistics are float32


def test_partials_that_are_rounded_get_more_room_with_every_worker_and_others_do_not():
    def at(name, workers):
        return bound_factors(name, dataclasses.replace(TYPICAL, workers=workers))["o"]

    assert at("bf16", 16) <= 1.01 * at("bf16", 1)
    assert at("bf16_partials", 2) < at("bf16_partials", 4) < at("bf16_partials", 16)


def test_results_of_a_call_in_a_narrower_format_are_rounded_once_more():
    wide = bound_factors("float32", TYPICAL)
    narrow = bound_factors("float32", TYPICAL, outputs="bfloat16", statistics="float32")
    assert narrow["o"] - wide["o"] >= unit_roundoff("bfloat16")
    assert narrow["lse"] == wide["lse"]
    assert bound_factors("bf16", TYPICAL, outputs="bfloat16") == bound_factors("bf16", TYPICAL)


def test_a_large_exponent_that_a_narrow_lse_spoils_is_amplified_as_exp_does_it():
    small, large = (
        bound_factors("nki_low", dataclasses.replace(TYPICAL, largest_lse=x))["dv"]
        for x in (1, 1500)
    )
    assert large > 10 * small
    beyond = bound_factors("nki_low", dataclasses.replace(TYPICAL, largest_lse=1e6))["dv"]
    assert beyond == np.inf


def test_a_bfloat16_lse_of_1000_widens_the_bounds_of_gradients_by_what_exp_makes_of_2():
    """bfloat16 has 8 bits: half a step of 1000 is 2, and (e^2 - 1) / 2 is 3.2."""
    plain, spoilt = (
        bound_factors("nki_low", dataclasses.replace(TYPICAL, condition=0.0, largest_lse=x))
        for x in (0.0, 1000.0)
    )
    assert spoilt["o"] == plain["o"] and spoilt["lse"] == plain["lse"]
    for name in ("dq", "dk", "dv"):
        assert 1.5 < spoilt[name] / plain[name] < 8.0, name


def test_an_lse_that_is_handed_over_brings_no_error_of_the_forward():
    given = bound_factors("bf16", dataclasses.replace(TYPICAL, given_lse=4.0))
    own = bound_factors("bf16", TYPICAL)
    assert given["dq"] < own["dq"] and given["dv"] < own["dv"]
    low = bound_factors("float32", dataclasses.replace(TYPICAL, given_lse=500.0))
    assert low["dv"] > bound_factors("float32", TYPICAL)["dv"]


def test_floors_cover_what_underflows_and_nothing_that_is_visible():
    largest = {"q": 3.0, "k": 3.0, "v": 3.0, "dy": 3.0, "scale": 0.25}
    assert all(x <= 1e-32 for x in bound_floors("bf16", TYPICAL, largest).values())
    assert max(bound_floors("float64", TYPICAL, largest).values()) <= 1e-300
    assert max(bound_floors("fp16", TYPICAL, largest).values()) <= 1e-3
    assert bound_floors("float32", TYPICAL, largest, outputs="float16")["o"] >= 2.0**-25
    assert least_number("float16") == 2.0**-25 and least_number("float32") == 2.0**-126


def test_a_key_that_float16_weights_lose_needs_the_floor():
    """p is 2e-9 for the second key: float16 makes it 0, and dv of that key with it."""
    q = np.full((1, 1, 1, 1), 1.0)
    k = np.array([20.0, 0.0]).reshape(1, 1, 2, 1)
    v = dy = np.ones((1, 1, 2, 1))
    run = rs.ring(q, k, v, dy[:, :, :1], workers=1, scale=1.0, recipe="fp16")
    want = rs.attention_backward(q, k, v, dy[:, :, :1], scale=1.0).dv
    scale = row_scale(q, k, v, dy[:, :, :1], scale=1.0).dv
    assert run.dv[0, 0, 1, 0] == 0.0 < want[0, 0, 1, 0]
    sizes = Sizes(workers=1, keys=2, head_dim=1, queries=1)
    factor = bound_factors("fp16", sizes)["dv"]
    largest = {"q": 1, "k": 20, "v": 1, "dy": 1}
    floor = bound_floors("fp16", sizes, largest)["dv"]
    got, rounded = np.float16(run.dv), np.full(want.shape, np.nan)
    assert not judge_tensor("dv", got, want, rounded, scale, factor).ok
    assert judge_tensor("dv", got, want, rounded, scale, factor, floor=floor).ok


def test_arithmetic_of_sources():
    assert walk(0) == 0 and walk(3) == 3 and walk(400) == 40
    assert together(()) == 0 and together((1.0, 2.0)) == 3.0
    assert together((1.0,) * 100) == 20.0


def test_names_and_counts_are_checked():
    assert set(RECIPE_OF_FORMAT.values()) <= set(RECIPES)
    with refuses((OptionError, "unknown-name"), match="recipe"):
        bound_factors("bf61", TYPICAL)
    with pytest.raises(OptionError, match="keys"):
        Sizes(workers=1, keys=-1, head_dim=4)
    with pytest.raises(OptionError, match="workers"):
        Sizes(workers=2.0, keys=1, head_dim=4)
