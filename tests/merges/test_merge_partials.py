"""``ringspec.merge_partials`` with a recipe: the bits of the specification's ring, of float32, and errors."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from merges.partials import Case, same_bits

import ringspec as rs
from ringspec.errors import DtypeError, OptionError, ShapeError
from ringspec.formats import store
from ringspec.merges import (
    FORMS,
    MERGES,
    Functions,
    GradientSum,
    MergeRecipe,
    Part,
    add_gradients,
    merge,
    visits,
)
from ringspec.merges.enclosures import ROUNDED
from ringspec.recipes import RECIPES
from ringspec.rings.layouts import make_layout, shard
from ringspec.spec.block import block_forward

LAYOUTS = ("contiguous", "zigzag")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_of_rounding_points_gives_the_bits_of_the_specifications_ring(name, layout):
    random = np.random.default_rng(7)
    q, k, v = random.normal(0, 0.4, (3, 1, 2, 24, 8))
    for workers in (1, 3, 4):
        states = []

        def kept(*arguments, states=states):
            states.append(block_forward(*arguments))
            return states[-1]

        run = rs.ring(
            q, k, v, workers=workers, layout=layout, causal=True, recipe=name, block_forward=kept
        )
        wanted_o, wanted_lse = (
            shard(x, make_layout(layout, 24, workers)) for x in (run.o, run.lse)
        )
        for worker in range(workers):
            parts = [Part(s.o, s.m, sums=s.l) for s in states[worker::workers]]
            merged = rs.merge_partials(parts, recipe=name)
            assert same_bits(merged.o, wanted_o[worker]), (workers, worker)
            assert same_bits(merged.lse, wanted_lse[worker]), (workers, worker)


def test_normalised_pairs_give_the_bits_of_the_ring_that_merges_normalised_parts():
    parts = [(part.o, part.lse) for part in Case(4, 0, False, "bfloat16", 0.3).parts("BHS")]
    as_states = [
        Part(o, lse, sums=np.where(np.isneginf(lse), 0, 1).astype(np.float32)) for o, lse in parts
    ]
    a, b = (rs.merge_partials(one, recipe="bf16_partials") for one in (parts, as_states))
    assert same_bits(a.o, b.o) and same_bits(a.lse, b.lse)


def test_without_a_recipe_merge_partials_is_the_exact_form_in_float64():
    o, lse = np.ones((1, 1, 1, 2)), np.zeros((1, 1, 1))
    merged = rs.merge_partials([(o, lse), (3 * o, lse + np.log(3.0))])
    assert merged.o.dtype == merged.lse.dtype == np.float64
    assert merged.o.tolist() == [[[[2.5, 2.5]]]]


@pytest.mark.parametrize("name", sorted(MERGES))
@pytest.mark.parametrize("fmt", ["float32", "bfloat16"])
def test_every_merge_recipe_is_close_to_the_exact_merge(name, fmt):
    case = Case(5, 2, False, fmt, spread=2.0)
    parts = case.parts("BHS")
    exact = rs.merge_partials([(part.o, part.lse) for part in parts])
    given, merged = (np.float32(x) for x in (MERGES[name].unit, MERGES[name].result_unit))
    got = rs.merge_partials([(part.o, part.lse / given) for part in parts], recipe=name)
    assert got.o.dtype == parts[0].o.dtype and got.lse.dtype == np.float32
    # Five parts of size 1: each of at most 2 roundings a step is at most half a unit of 2 or less.
    bound = 1e-5 if fmt == "float32" else 10 * 2.0**-8 * 2
    assert np.abs(got.o.astype(np.float64) - exact.o).max() <= bound
    assert np.abs(got.lse * merged - exact.lse).max() <= 1e-5


def flashmla_row(lse, o):
    """One row as FlashMLA's combine kernel computes it: 32 lanes that each add their splits, then a butterfly."""
    f = np.float32
    lanes = [[x for n, x in enumerate(lse) if n % 32 == lane] for lane in range(32)]
    high = max(lse)
    high = f(0) if high == -np.inf else high
    sums = [f(0)] * 32
    for lane, own in enumerate(lanes):
        for x in own:
            sums[lane] = sums[lane] + f(np.exp2(float(x - high)))
    for offset in (16, 8, 4, 2, 1):
        sums = [sums[lane] + sums[lane ^ offset] for lane in range(32)]
    total = f(np.inf) if sums[0] == 0 else f(np.log2(float(sums[0]))) + high
    row = [f(0)] * o.shape[1]
    for one, x in zip(lse, o, strict=True):
        weight = f(np.exp2(float(one - total)))
        row = [f(float(weight) * float(v) + float(r)) for v, r in zip(x, row, strict=True)]
    return row, total / f(1.4426950408889634)


@pytest.mark.parametrize("splits", [2, 5, 40])
def test_flashmla_gives_the_bits_of_its_kernel_written_row_by_row(splits):
    random = np.random.default_rng(splits)
    lse = random.normal(4, 3, (splits, 2, 6)).astype(np.float32)
    lse[random.random(lse.shape) < 0.2] = -np.inf
    lse[:, 0, 0] = -np.inf
    o = np.where(np.isneginf(lse)[..., None], 0, random.normal(0, 1, (splits, 2, 6, 4))).astype(
        "f4"
    )
    got_o, got_lse = merge(list(zip(o, lse, strict=True)), "flashmla", ROUNDED)
    assert np.isposinf(got_lse[0, 0]) and not got_o[0, 0].any()
    for index in np.ndindex(2, 6):
        row, total = flashmla_row(lse[(slice(None), *index)], o[(slice(None), *index)])
        assert got_o[index].tolist() == row and got_lse[index] == total, index


def test_one_part_is_its_own_merge():
    for name, recipe in MERGES.items():
        (part,) = Case(1, 0, False, "bfloat16").parts("BHS")
        o, lse = merge([part], name)
        if recipe.form in ("sigmoid", "rescaling"):
            assert same_bits(o, part.o) and same_bits(lse, part.lse), name


CHANGES = [
    ("te_p2p", {"carried_o": "float32"}, "bfloat16"),
    ("te_p2p", {"products_rounded": True}, "bfloat16"),
    ("te_p2p", {"fma": True}, "float32"),
    ("te_p2p", {"form": "rescaling"}, "bfloat16"),
    ("te_p2p_2_20", {"fma": False}, "float32"),
    ("te_p2p_2_20", {"earlier_rounded": False}, "bfloat16"),
    ("torch_cp", {"carried_o": "wider"}, "bfloat16"),
    ("torch_cp", {"form": "two_passes"}, "float32"),
]


@pytest.mark.parametrize(("name", "changes", "fmt"), CHANGES)
def test_each_field_of_a_merge_recipe_decides_some_bits(name, changes, fmt):
    parts = Case(4, 0, False, fmt).parts("BHS")
    changed = MERGES[name].replace(name="changed", **changes)
    assert not same_bits(merge(parts, name)[0], merge(parts, changed)[0])


def test_the_order_of_the_parts_decides_some_bits():
    parts = Case(4, 0, False, "float32").parts("BHS")
    assert not same_bits(merge(parts, "torch_cp")[0], merge(parts[::-1], "torch_cp")[0])


@pytest.mark.parametrize(
    ("changes", "names"),
    [({"carried": "own"}, "bf16"), ({"start": "zeros"}, "zero"), ({"result": "float32"}, "dtype")],
)
def test_each_field_of_a_gradient_sum_decides_some_bits(changes, names):
    how = GradientSum("down", "float32", "first")
    random = np.random.default_rng(3)
    shares = [store(random.normal(0, 1, 50), "bfloat16") for _ in range(4)]
    for share in shares:
        share[0] = -0.0
    changed = dataclasses.replace(how, **changes)
    assert not same_bits(add_gradients(shares, how, (50,)), add_gradients(shares, changed, (50,)))


def test_a_gradient_is_the_sum_of_its_contributions_in_their_rows():
    how = GradientSum("down", "float32", "first")
    total = add_gradients([O[0, 0], (2 * O[0, 0, 2:], slice(2, None))], how, (4, 3))
    assert total.tolist() == [[1.0] * 3] * 2 + [[3.0] * 3] * 2
    alone = add_gradients([(O[0, 0, :1], slice(0, 1))], how, (4, 3))
    assert alone.tolist() == [[1.0] * 3] + [[0.0] * 3] * 3


def test_the_elementary_functions_are_those_supplied():
    called = []
    exp = Functions(exp=lambda x: called.append("exp") or np.exp(x))
    merge(Case(2, 0, False, "float32").parts("BHS"), "te_p2p", exp)
    assert called == ["exp"] * 3  # one for the lse, and one for the weight of each part


def test_a_contraction_of_the_earlier_o_differs_from_one_of_the_part():
    parts = Case(2, 0, False, "float32").parts("BHS")
    recipes = [
        MERGES["vllm_merge"].replace(name=name, fma=fma, fused=fused)
        for name, fma, fused in (
            ("none", False, "part"),
            ("a", True, "part"),
            ("b", True, "earlier"),
        )
    ]
    none, part, earlier = (merge(parts, recipe)[0] for recipe in recipes)
    assert not same_bits(none, part) and not same_bits(part, earlier)
    swapped = merge(parts[::-1], recipes[1])[0]
    assert same_bits(swapped, earlier)


@pytest.mark.parametrize("name", ["vllm_merge", "fa3", "sglang_dcp_a2a", "tokamax"])
def test_a_supplied_division_decides_some_bits(name):
    halved = Functions(divide=lambda a, b: np.asarray(a / b / 2, np.float32))
    parts = Case(3, 0, False, "float32").parts("BHS")
    o, lse = merge(parts, name)
    other, same = merge(parts, name, halved)
    assert not same_bits(o, other) and same_bits(lse, same)


@pytest.mark.parametrize(("kept", "want"), [("first", 5.0), ("zero", 0.0)])
def test_a_row_that_no_part_saw_keeps_the_first_o_or_is_0(kept, want):
    recipe = MERGES["vllm_merge"].replace(name="x", all_empty="-inf", empty_o=kept)
    empty = np.full((1, 1), -np.inf, np.float32)
    o, lse = merge([(np.full((1, 1, 2), x, np.float32), empty) for x in (5, 7)], recipe)
    assert o.tolist() == [[[want] * 2]] and lse.tolist() == [[-np.inf]]


def test_names_of_merge_recipes_and_of_rounding_points_are_disjoint():
    assert not set(MERGES) & set(RECIPES)
    assert all(name == recipe.name and recipe.form in FORMS for name, recipe in MERGES.items())


def test_each_merge_recipe_states_its_source():
    for recipe in MERGES.values():
        assert recipe.source and recipe.versions and recipe.note
        assert recipe.compared_with is None or len(recipe.compared_with) > 20


def test_visits_go_once_to_every_worker():
    for order in ("down", "up", "by_rank", "up_own_last", "down_own_last"):
        for worker in range(5):
            assert sorted(visits(order, worker, 5)) == list(range(5))
    assert visits("down_own_last", 1, 4) == (0, 3, 2, 1)


O, LSE = np.ones((1, 2, 4, 3), np.float32), np.zeros((1, 2, 4), np.float32)
REFUSED = {
    "an unknown recipe": (lambda: rs.merge_partials([(O, LSE)], "te"), OptionError),
    "functions without a recipe": (
        lambda: rs.merge_partials([(O, LSE)], functions=Functions()), OptionError),
    "functions with rounding points": (
        lambda: rs.merge_partials([(O, LSE)], "bf16", Functions()), OptionError),
    "functions of another kind": (
        lambda: rs.merge_partials([(O, LSE)], "te_p2p", np.exp), OptionError),
    "no parts": (lambda: rs.merge_partials([], "te_p2p"), ShapeError),
    "float64 parts": (lambda: rs.merge_partials([(O.astype(float), LSE)], "te_p2p"), DtypeError),
    "float64 lse": (lambda: rs.merge_partials([(O, LSE.astype(float))], "te_p2p"), DtypeError),
    "lse of another shape": (lambda: rs.merge_partials([(O, LSE[0])], "te_p2p"), ShapeError),
    "parts of two shapes": (
        lambda: rs.merge_partials([(O, LSE), (O[:, :1], LSE[:, :1])], "te_p2p"), ShapeError),
    "a first part of some rows": (
        lambda: merge([Part(O, LSE, slice(None))], "te_p2p"), ShapeError),
    "an exp of another dtype": (
        lambda: merge([(O, LSE)] * 2, "te_p2p", Functions(exp=lambda x: np.exp(x, dtype=float))),
        DtypeError),
    "an exp of another shape": (
        lambda: merge([(O, LSE)] * 2, "te_p2p", Functions(exp=lambda x: x[0])), ShapeError),
    "an exp that is no function": (lambda: Functions(exp=3), OptionError),
    "an unknown field": (lambda: MERGES["te_p2p"].replace(order2="up"), OptionError),
    "an unknown form": (lambda: merge([(O, LSE)], MergeRecipe("x", "y", "up")), OptionError),
    "no contribution": (lambda: add_gradients([], MERGES["te_p2p"].dq, (1,)), ShapeError),
    "a sum that is none": (lambda: add_gradients([O], MERGES["diffusers"].dkv, O.shape), OptionError),
    "a contribution of another shape": (
        lambda: add_gradients([O], MERGES["te_p2p"].dq, (1, 2, 4, 4)), ShapeError),
    "contributions of two dtypes": (
        lambda: add_gradients([O, store(O, "bfloat16")], MERGES["te_p2p"].dq, O.shape), DtypeError),
    "a part of rows where all are needed": (
        lambda: merge([(O, LSE), Part(O, LSE, slice(None))], "vllm_dcp_a2a"), OptionError),
    "an unnormalised part where none is known": (
        lambda: merge([Part(O, LSE, sums=LSE)], "te_p2p"), OptionError),
    "an unknown order": (lambda: MergeRecipe("x", "sigmoid", "sideways"), OptionError),
    "a natural result of a natural lse": (
        lambda: MERGES["fa3"].replace(natural_result=True), OptionError),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_argument_is_refused_with_a_remedy(what):
    call, error = REFUSED[what]
    with pytest.raises(error, match=r"expected .*; got .*\. Fix: "):
        call()
