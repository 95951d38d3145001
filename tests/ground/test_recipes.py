"""Recipes: each rounding point is applied, once, where its name says."""

import dataclasses

import numpy as np
import pytest
from oracle.row_scale import row_scale, worst_row_error
from refusals import refuses

import ringspec as rs
from ringspec.errors import OptionError
from ringspec.formats import round_to, unit_roundoff
from ringspec.recipes import RECIPES, ROUNDING_POINTS, Recipe, recipe
from ringspec.spec.online_softmax import SoftmaxState, merge, merge_normalised

NARROW = "bfloat16"


def tensors(seed: int = 0, S: int = 24, D: int = 8):
    random = np.random.default_rng(seed)
    return tuple(random.normal(size=(1, 2, S, D)) for _ in range(4))


def results(run) -> dict:
    return {name: getattr(run, name) for name in ("o", "lse", "dq", "dk", "dv")}


# Which results each rounding point must reach; all others must stay as they were.
REACH = {
    "inputs": {"o", "lse", "dq", "dk", "dv"},
    "scores": {"o", "lse", "dq", "dk", "dv"},
    "statistics": {"o", "lse", "dq", "dk", "dv"},
    "delta": {"dq", "dk"},
    "p": {"o", "dq", "dk", "dv"},
    "block_o": {"o", "dq", "dk"},
    "merge": {"o", "dq", "dk"},
    "carried_o": {"o", "dq", "dk"},
    "outputs": {"o", "dq", "dk"},
    "lse": {"lse", "dq", "dk", "dv"},
    "backward_lse": {"dq", "dk", "dv"},
    "dy_o_products": {"dq", "dk"},
    "ds": {"dq", "dk"},
    "tile_dq": {"dq"},
    "tile_dkv": {"dk", "dv"},
    "block_gradients": {"dq", "dk", "dv"},
    "carried_dq": {"dq"},
    "carried_dkv": {"dk", "dv"},
    "gradients": {"dq", "dk", "dv"},
}


@pytest.mark.rule("NUM-1", "NUM-2", "NUM-3")
@pytest.mark.parametrize("point", [p for p in ROUNDING_POINTS if p != "products"])
def test_each_rounding_point_reaches_what_it_must_and_nothing_else(point):
    q, k, v, dy = tensors()
    exact = results(rs.ring(q, k, v, dy, workers=3))
    used = Recipe("one point").replace(**{point: NARROW})
    rounded = results(rs.ring(q, k, v, dy, workers=3, recipe=used))
    changed = {name for name in exact if not (exact[name] == rounded[name]).all()}
    assert changed == REACH[point]


@pytest.mark.rule("NUM-2")
def test_float32_products_reach_every_result():
    q, k, v, dy = tensors()
    exact = results(rs.ring(q, k, v, dy, workers=3))
    used = results(rs.ring(q, k, v, dy, workers=3, recipe=Recipe("products", products="float32")))
    for name, x in exact.items():
        assert 0 < np.abs(used[name] - x).max() <= 1e-5


@pytest.mark.rule("NUM-1")
@pytest.mark.parametrize("name", RECIPES)
def test_results_are_numbers_of_the_declared_formats(name):
    q, k, v, dy = tensors()
    used, run = RECIPES[name], rs.ring(*tensors(), workers=3, recipe=name)
    assert (round_to(run.o, used.outputs) == run.o).all()
    assert (round_to(run.lse, used.lse) == run.lse).all()
    for gradient in (run.dq, run.dk, run.dv):
        assert (round_to(gradient, used.gradients) == gradient).all()


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_every_recipe_stays_within_its_own_precision_of_the_truth(name, layout):
    """A sanity bound per row: a few roundings of the widest rounding point, never max-scaled."""
    used = RECIPES[name]
    q, k, v, dy = tensors()
    run = rs.ring(q, k, v, dy, workers=3, layout=layout, recipe=name, causal=True)
    q, k, v, dy = (round_to(x, used.inputs) for x in (q, k, v, dy))
    want = rs.attention(q, k, v, causal=True)
    gradients = rs.attention_backward(q, k, v, dy, causal=True)
    scale = row_scale(q, k, v, dy, causal=True)
    unit = max(unit_roundoff(getattr(used, p)) for p in ROUNDING_POINTS if p != "inputs")
    unit = max(unit, 2e-16)
    for got, expected, bound in (
        (run.o, want.o, scale.o), (run.lse, want.lse, scale.lse), (run.dq, gradients.dq, scale.dq),
        (run.dk, gradients.dk, scale.dk), (run.dv, gradients.dv, scale.dv),
    ):  # fmt: skip
        assert worst_row_error(got, expected, bound) <= 6 * unit


def rms_error(workers: int, name: str) -> float:
    random = np.random.default_rng(3)
    q, k, v = (random.normal(size=(1, 4, 256, 16)) for _ in range(3))
    run = rs.ring(q, k, v, workers=workers, recipe=name)
    q, k, v = (round_to(x, NARROW) for x in (q, k, v))
    return float(np.sqrt(np.mean((run.o - rs.attention(q, k, v).o) ** 2)))


@pytest.mark.rule("NUM-2", "NUM-3")
def test_partials_rounded_between_steps_lose_more_with_every_worker_and_others_do_not():
    """ring-flash-attention issue 42: the error grows with W; with float32 partials it must not."""
    assert rms_error(16, "bf16") <= 1.1 * rms_error(1, "bf16")
    grown = [rms_error(W, "bf16_partials") for W in (1, 4, 16)]
    assert grown[0] < 0.8 * grown[1] < 0.8 * 0.8 * grown[2]
    assert rms_error(16, "nki") > 2 * rms_error(1, "nki")


@pytest.mark.rule("NUM-3")
@pytest.mark.parametrize("merged", [merge, merge_normalised])
def test_a_merge_rounds_each_product_and_the_sum(merged):
    """One element by hand: neither product and not the sum is a bfloat16 number."""
    used = Recipe("narrow merge", merge=NARROW)
    one = np.ones((1, 1, 1))
    a = SoftmaxState(0.7 * one, one, np.full((1, 1, 1, 1), 1.3))
    b = SoftmaxState(0.2 * one, one, np.full((1, 1, 1, 1), 5.1))
    e = [1.0, float(np.exp(-0.5))]
    weights = e if merged is merge else [x / sum(e) for x in e]
    parts = [float(round_to(c * o, NARROW)) for c, o in zip(weights, (1.3, 5.1), strict=True)]
    want = float(round_to(sum(parts), NARROW))
    assert float(merged(a, b, used).o[0, 0, 0, 0]) == want
    assert float(merged(b, a, used).o[0, 0, 0, 0]) == want
    unrounded = weights[0] * 1.3 + weights[1] * 5.1
    for less in (unrounded, parts[0] + weights[1] * 5.1, weights[0] * 1.3 + parts[1], sum(parts)):
        assert float(merged(a, b, used).o[0, 0, 0, 0]) != less


@pytest.mark.rule("NUM-2")
def test_tiles_change_the_order_of_sums_and_not_the_function():
    q, k, v, dy = tensors()
    whole = results(rs.ring(q, k, v, dy, workers=3, causal=True))
    used = Recipe("tiles", tile_q=3, tile_k=5)
    tiled = results(rs.ring(q, k, v, dy, workers=3, causal=True, recipe=used))
    scale = row_scale(q, k, v, dy, causal=True)
    for name in whole:
        assert worst_row_error(tiled[name], whole[name], getattr(scale, name)) <= 1e-14
    assert any(not (tiled[name] == whole[name]).all() for name in whole)


def test_the_backward_reads_the_rounded_o_and_lse_of_the_forward():
    q, k, v, dy = tensors()
    used = Recipe("o in bf16", outputs=NARROW)
    run = rs.ring(q, k, v, dy, workers=3, recipe=used, record=True)
    state = run.state(worker=1, step=0, phase="backward", when="before")
    rows = slice(8, 16)
    assert np.abs(state.row_term - (dy * run.o)[:, :, rows].sum(axis=3)).max() <= 1e-15 * 8


@pytest.mark.parametrize(
    ("format", "own"),
    [("bfloat16", "bf16"), ("torch.bfloat16", "bf16"), ("BF16", "bf16"), ("float16", "fp16"),
     ("half", "fp16"), ("fp32", "float32"), ("fp64", "float64"), ("double", "float64"),
     ("float8_e4m3fn", "fp8_e4m3"), ("float8_e5m2", "fp8_e5m2")],
)  # fmt: skip
def test_the_name_of_a_format_is_refused_with_the_recipe_of_that_format(format, own):
    with refuses((OptionError, "unknown-name")) as refused:
        recipe(format)
    assert refused.value.fix == f"write {own!r}"
    assert recipe(own).name == own


def test_every_input_format_has_the_recipe_that_its_name_suggests():
    for one in {known.inputs for known in RECIPES.values()} - set(RECIPES):
        with refuses((OptionError, "unknown-name")) as refused:
            recipe(one)
        assert recipe(refused.value.fix.split("'")[1]).inputs == one


def test_recipes_are_data_that_refuses_what_it_does_not_know():
    assert dataclasses.asdict(recipe("nki"))["merge"] == NARROW
    assert recipe(RECIPES["bf16"]) is RECIPES["bf16"]
    with refuses((OptionError, "unknown-name"), match="'bf16'"):
        recipe("bf61")
    with refuses((OptionError, "unknown-name"), match="rounding point"):
        RECIPES["bf16"].replace(pp="float32")
    with refuses((OptionError, "unknown-name"), match="bfloat16"):
        Recipe("wrong", p="bfloat")
    with pytest.raises(OptionError, match="products"):
        Recipe("wrong", products="float16")
    with pytest.raises(OptionError, match="tile_k"):
        Recipe("wrong", tile_k=0)
    with refuses((OptionError, "unknown-name"), match="merge order"):
        Recipe("wrong", merge_order="tree")
