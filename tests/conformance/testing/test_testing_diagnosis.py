"""The text of ``assert_ring_attention`` names the bug, and a diagnosis never hides a mismatch."""

import dataclasses

import numpy as np
import pytest
from ranks.ringcases import FEATURES, W, inputs, option

import ringspec as rs
from ringspec.conformance.diagnose import given
from ringspec.conformance.diagnose.given import call_of_problem, declared, diagnosis_of
from ringspec.conformance.judge.recipe import recipe_for
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.targets.reference import ring_results
from ringspec.formats import round_to
from ringspec.problem.options import check
from ringspec.recipes import RECIPES
from ringspec.recipes import recipe as recipe_of
from ringspec.rings.layouts import make_layout
from ringspec.testing import assert_ring_attention
from ringspec.truth.problem import Upstream
from ringspec.truth.sharded import Tables

RESULTS = ("o", "lse", "dq", "dk", "dv")
ZIGZAG = {"workers": 4, "layout": "zigzag", "causal": True}
SCALE = "the scale is left out of dk [scale-missing-in-dk]"


def drawn(tokens=16, format="bfloat16"):
    return {name: round_to(x[:1], format) for name, x in inputs(3, tokens).items()}


def ring_of(x, **keywords):
    run = rs.ring(x["q"], x["k"], x["v"], dy=x["dy"], **keywords)
    return {name: np.asarray(getattr(run, name)) for name in RESULTS}


def text_of(got, x, **keywords):
    with pytest.raises(AssertionError) as caught:
        assert_ring_attention(got, **x, **keywords)
    return str(caught.value)


@pytest.mark.parametrize("recipe", ["bf16", "float64"])
def test_the_text_names_the_bug_below_the_mismatch(recipe):
    x = drawn()
    got = ring_of(x, recipe=recipe, **ZIGZAG)
    text = text_of(got | {"dk": got["dk"] * np.sqrt(8)}, x, recipe=recipe, **ZIGZAG)
    lines = text.splitlines()
    assert lines[0].endswith("against exact values: mismatch") and "dk of worker 0" in lines[1]
    assert f"  diagnosis: {SCALE}" in lines[2:]
    without = ring_of(x, recipe=recipe, **ZIGZAG | {"causal": False})
    assert "diagnosis: no mask is applied [mask-ignored-in-ring]" in text_of(
        without, x, recipe=recipe, **ZIGZAG
    )


def test_arrays_per_worker_and_an_lse_to_base_2_get_the_same_diagnosis():
    x = drawn()
    got = ring_of(x, **ZIGZAG)
    got |= {"dk": got["dk"] * np.sqrt(8), "lse": got["lse"] / np.log(2.0)}
    table = make_layout("zigzag", 16, 4).table
    held = {name: [y[:, :, tokens] for tokens in table] for name, y in got.items()}
    for one in (got, held):
        text = text_of(one, x, recipe="bf16", lse="base2", **ZIGZAG)
        assert SCALE in text and "lse of worker" not in text


def test_without_a_known_bug_the_text_says_so_and_where_it_is_wrong():
    x, ring = drawn(8), ZIGZAG | {"workers": 2}
    got = ring_of(x, **ring)
    got["o"] = got["o"].copy()
    got["o"][0, 1, 5, 3] += 3.0
    text = text_of({"o": got["o"]}, x | {"dy": None}, **ring)
    assert "diagnosis: no known bug gives these results" in text
    assert "o: 1 of 32 rows; head 1 of 4; worker 1 of 2" in text.replace("batch 0 of 1; ", "")


def test_both_circulations_are_tried_and_the_one_that_names_a_bug_counts(monkeypatch):
    tried = []
    real = given.diagnose

    def of_q_alone(claims, calls, outputs):
        tried.append(calls[0].circulation)
        found = real(claims, calls, outputs)
        return found if tried[-1] == "q" else dataclasses.replace(found, named=None)

    monkeypatch.setattr(given, "diagnose", of_q_alone)
    x = drawn()
    got = ring_of(x, **ZIGZAG)
    assert SCALE in text_of(got | {"dk": got["dk"] * np.sqrt(8)}, x, **ZIGZAG)
    assert tried == ["kv", "q"]


def test_an_exception_in_the_diagnosis_leaves_the_mismatch(monkeypatch):
    def broken(*arguments):
        raise ZeroDivisionError("in a mutant")

    monkeypatch.setattr(given, "diagnose", broken)
    x = drawn()
    text = text_of(ring_of(x, **ZIGZAG | {"causal": False}), x, **ZIGZAG)
    assert "o of worker 0: " in text
    assert text.endswith("diagnosis: none, because it ended with ZeroDivisionError: in a mutant")


@pytest.mark.parametrize("wrong", ["nothing", "asked not to", "wrong dtype", "wrong shape"])
def test_a_diagnosis_is_made_of_numbers_that_are_wrong_alone(monkeypatch, wrong):
    monkeypatch.setattr(given, "diagnose", lambda *arguments: pytest.fail("it was made"))
    x = drawn()
    got = ring_of(x, **ZIGZAG)
    if wrong == "nothing":
        assert_ring_attention(got, **x, **ZIGZAG)
        return
    changed = {
        "asked not to": ({"dv": -got["dv"]}, "dv of worker 0: 24 of 24 rows"),
        "wrong dtype": ({"o": got["o"].astype(np.float16)}, "o of worker 0: wrong dtype"),
        "wrong shape": ({"o": got["o"][:, :, :8]}, "o of worker 0: wrong shape"),
    }
    more, said = changed[wrong]
    text = text_of(got | more, x, **ZIGZAG, diagnose=wrong != "asked not to")
    assert said.partition(":")[0] in text and "diagnosis" not in text


LAYOUT = make_layout("striped", 24, W)
# Where the call has a feature that is not called as the option is.
NAMES = {"documents": "cu_seqlens", "dropout": "dropout_p", "segments": "segments_q"}
NAMES |= {"bounds": "bound_max", "positions": "q"}


@pytest.mark.parametrize(
    "feature", [f for f in FEATURES if f not in ("bf16", "nki", "skip_masked")]
)
def test_the_call_stands_for_the_problem(feature):
    """The reference gives for the call, bit for bit, what the ring gives for the problem."""
    x, options = inputs(5), option(feature)
    dlse = options.pop("dlse", None)
    run = rs.ring(
        *(x[n] for n in ("q", "k", "v", "dy")), dlse=dlse, workers=W, layout="striped", **options
    )
    tables = Tables(LAYOUT.table, LAYOUT.table)
    problem = check(x["q"], x["k"], x["v"], options)
    exact = RECIPES["float64"]
    call = call_of_problem(problem, Upstream(x["dy"], dlse), tables, "striped", exact, options)
    results = ring_results(call, exact)
    for name in RESULTS:
        for r in range(W):
            assert np.array_equal(results[name][r], getattr(run.worker(r), name)), (name, r)
    told = set(call.terms) | set(call.tensors)
    assert NAMES.get(feature, feature.split()[0]) in told


OTHER = RECIPES["bf16"].replace(name="ours", tile_k=8, carried_dq="bfloat16")


@pytest.mark.parametrize(
    "recipe",
    [
        *("float32", "fp16_partials", OTHER),
        *(pytest.param(recipe, marks=pytest.mark.slow) for recipe in ("bf16", "nki")),
    ],
)
def test_the_right_program_fits_under_the_recipe_of_the_assertion(recipe):
    used = recipe_of(recipe)
    x = drawn(8, used.inputs)
    got = ring_of(x, recipe=used, workers=2, causal=True)
    layout = make_layout("contiguous", 8, 2)
    problem = check(x["q"], x["k"], x["v"], {"causal": True})
    outputs = {name: tuple(y[:, :, t] for t in layout.table) for name, y in got.items()}
    made = (Tables(layout.table, layout.table), "contiguous", used, {"causal": True})
    lines = diagnosis_of(problem, Upstream(x["dy"]), *made, outputs, ["o"])
    assert lines[0].endswith("; they differ from the correct results by rounding only"), lines


def test_a_recipe_of_ones_own_is_declared_by_what_differs():
    assert declared(RECIPES["nki"]) == "nki"
    made = declared(OTHER)["bfloat16"]
    assert made == {"base": "bf16", "name": "ours", "tile_k": 8, "carried_dq": "bfloat16"}
    claims = Capabilities(recipe=declared(OTHER))
    formats = dict.fromkeys(("inputs", "outputs", "statistics"), "bfloat16")
    assert recipe_for(claims, formats).carried_dq == "bfloat16"


def test_a_recipe_of_8_bits_has_no_diagnosis():
    x = drawn(16, "float8_e4m3fn")
    got = ring_of(x, recipe="fp8_e4m3", **ZIGZAG)
    text = text_of(got | {"dv": -got["dv"]}, x, recipe="fp8_e4m3", **ZIGZAG)
    assert "dv of worker 3" in text and "diagnosis" not in text
