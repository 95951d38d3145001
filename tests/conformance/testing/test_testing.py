"""``assert_ring_attention``: right rings pass in every form, wrong ones fail with worker and place."""

import importlib.util

import ml_dtypes
import numpy as np
import pytest
from refusals import refuses

import ringspec as rs
from ringspec import testing
from ringspec.errors import (
    DtypeError,
    LayoutError,
    OptionError,
    ShapeError,
    UndecidedError,
    UnknownKeywordError,
)
from ringspec.formats import round_to
from ringspec.problem.options import check
from ringspec.rings.layouts import make_layout
from ringspec.testing import assert_ring_attention
from ringspec.truth import dense, expected
from ringspec.truth.expected import expected_of
from ringspec.truth.problem import Upstream
from ringspec.truth.sharded import Tables


@pytest.fixture(autouse=True)
def without_diagnosis(monkeypatch):
    """Here it is of no interest, and takes seconds; test_testing_diagnosis.py is about it."""
    monkeypatch.setattr(testing, "diagnosis_of", lambda *arguments: [])


SHAPE = (2, 4, 24, 8)
RESULTS = ("o", "lse", "dq", "dk", "dv")


def drawn(seed=0, shape=SHAPE, kv_heads=2, format="bfloat16"):
    generator = np.random.default_rng(seed)
    shapes = {"q": shape, "k": (shape[0], kv_heads, *shape[2:])}
    shapes |= {"v": shapes["k"], "dy": shape}
    return {n: round_to(generator.standard_normal(s), format) for n, s in shapes.items()}


def ring_of(x, recipe="bf16", **options):
    run = rs.ring(x["q"], x["k"], x["v"], dy=x["dy"], recipe=recipe, **options)
    return {name: np.asarray(getattr(run, name)) for name in RESULTS}


RINGS = [
    {"workers": 2, "layout": "contiguous", "causal": True},
    {"workers": 3, "layout": "striped", "causal": True, "window": (5, 0)},
    {"workers": 4, "layout": "zigzag", "causal": True, "softcap": 4.0},
    {"workers": 4, "layout": "zigzag"},
    {"workers": 2, "layout": "zigzag_per_document", "cu_seqlens": [0, 7, 24], "causal": True},
]


@pytest.mark.parametrize("recipe", ["bf16", "float64", "float32"])
@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_a_right_ring_passes_under_its_own_recipe(ring, recipe):
    x = drawn()
    assert_ring_attention(ring_of(x, recipe, **ring), **x, recipe=recipe, **ring)


def sharded(x, ring):
    """Every tensor as one array a worker, in slot order; padding slots hold rubbish."""
    table = make_layout(ring["layout"], 24, ring["workers"], ring.get("cu_seqlens")).table
    return [
        np.ascontiguousarray(np.where((t < 0).reshape(-1, *[1] * (x.ndim - 3)), 99.0, x[:, :, t]))
        for t in table
    ]


@pytest.mark.parametrize("ring", RINGS, ids=str)
@pytest.mark.parametrize("stacked", [False, True])
def test_arrays_per_worker_pass_as_gathered_ones_do(ring, stacked):
    x = drawn()
    got = {name: sharded(y, ring) for name, y in ring_of(x, **ring).items()}
    local = {name: sharded(y, ring) for name, y in x.items()}
    if stacked:
        got, local = ({n: np.stack(y) for n, y in z.items()} for z in (got, local))
    assert_ring_attention(got, **local, **ring)
    got["dk"][1][..., 0, 0] += 1.0
    with pytest.raises(AssertionError, match="dk of worker 1"):
        assert_ring_attention(got, **local, **ring)


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("worker", range(4))
def test_one_wrong_element_of_one_worker_is_found_and_named(name, worker):
    ring, x = RINGS[2], drawn()
    got = {one: sharded(y, ring) for one, y in ring_of(x, **ring).items()}
    flat = got[name][worker].reshape(-1)
    flat[5] += 3.0
    with pytest.raises(AssertionError, match=f"{name} of worker {worker}: 1 of") as caught:
        assert_ring_attention(got, **x, **ring)
    assert str(caught.value).count(" of worker ") == 1
    assert "W = 4, zigzag, causal, softcap, recipe bf16, against exact values" in str(caught.value)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_never_pass(bad):
    x, ring = drawn(), RINGS[0]
    got = ring_of(x, **ring)
    got["dv"] = np.array(got["dv"])
    got["dv"][1, 0, 17, 3] = bad
    with pytest.raises(AssertionError, match="dv of worker 1"):
        assert_ring_attention(got, **x, **ring)


def test_the_causal_mask_and_the_layout_are_those_that_were_asked_for():
    x = drawn()
    got = ring_of(x, workers=4, layout="zigzag", causal=True)
    for other in ({"causal": False}, {"causal": True, "window": 3}):
        with pytest.raises(AssertionError):
            assert_ring_attention(got, **x, workers=4, layout="zigzag", **other)
    shards = {n: sharded(y, {"layout": "zigzag", "workers": 4}) for n, y in got.items()}
    with pytest.raises(AssertionError):
        assert_ring_attention(shards, **x, workers=4, layout="contiguous", causal=True)


def test_o_alone_is_compared_without_dy_and_rows_without_a_key_are_minus_infinity():
    x = drawn()
    del x["dy"]
    mask = np.ones((24, 24), dtype=bool)
    mask[3] = False
    run = rs.ring(**x, workers=2, layout="contiguous", mask=mask)
    options = {"workers": 2, "mask": mask, "recipe": "float64"}
    assert_ring_attention(np.asarray(run.o), **x, **options)
    lse = np.array(run.lse)
    assert_ring_attention({"o": run.o, "lse": lse}, **x, **options)
    lse[0, 0, 3] = -1e30
    with pytest.raises(AssertionError, match="finite number where -inf is expected"):
        assert_ring_attention({"o": run.o, "lse": lse}, **x, **options)


def test_results_in_bfloat16_arrays_are_taken_as_they_are():
    x = drawn()
    got = {
        name: y.astype(ml_dtypes.bfloat16) if name != "lse" else y.astype(np.float32)
        for name, y in ring_of(x, **RINGS[0]).items()
    }
    local = {name: y.astype(ml_dtypes.bfloat16) for name, y in x.items()}
    assert_ring_attention(got, **local, **RINGS[0])


def test_a_large_problem_is_compared_with_float64_and_the_text_says_so(monkeypatch):
    monkeypatch.setattr("ringspec.truth.dense.PART", 1 << 12)
    x = drawn(shape=(1, 2, 512, 16), kv_heads=1)
    ring = {"workers": 4, "layout": "striped", "causal": True}
    got = ring_of(x, **ring)
    assert_ring_attention(got, **x, **ring)
    got["dq"] = got["dq"] * 2
    with pytest.raises(AssertionError, match="float64, 4 rows checked against exact"):
        assert_ring_attention(got, **x, **ring)


def test_float64_truth_agrees_with_the_exact_one_to_its_last_digits():
    x = drawn(shape=(1, 2, 40, 8), kv_heads=1)
    problem = check(x["q"], x["k"], x["v"], {"causal": True})
    exact, rough = (expected_of(problem, Upstream(x["dy"]), limit=n) for n in (None, 0))
    assert exact.source == "exact" and rough.source.startswith("float64")
    for name, want in exact.values.items():
        row = exact.scale[name]
        bound = 1e-15 * (row if name == "lse" else row[..., None])
        assert (np.abs(rough.values[name] - want) <= bound).all(), name


# Sinks, biases, and an lse that is differentiated

SINKS = np.array([0.5, -1.0, 2.0, 0.0])
BIASES = {
    "for all queries": (1, 4, 1, 24),
    "own rows": (2, 1, 24, 24),
    "two axes": (24, 24),
    "one axis": (24,),
}
RAGGED = np.array([[0, 5, 7, 1] + [-1] * 8, [-1] * 12, [*range(8, 20)], [2, 3, 4, 6, *range(20, 24)] + [-1] * 4])  # fmt: skip


def with_parameters(bias_shape=None, recipe="bf16", **ring):
    """Inputs, a ring's results with dsinks (and dbias), and its options."""
    x = drawn()
    generator = np.random.default_rng(7)
    dlse = round_to(generator.standard_normal(SHAPE[:3]), "float32")
    options = {"causal": True, "sinks": SINKS}
    if bias_shape is not None:
        options["bias"] = round_to(generator.standard_normal(bias_shape), "float32")
    run = rs.ring(**x, dlse=dlse, recipe=recipe, **ring, **options)
    got = {name: np.asarray(getattr(run, name)) for name in RESULTS}
    got["dsinks"] = run.gradients.dsinks
    if bias_shape is not None:
        got["dbias"] = run.gradients.dbias
    return got, x | {"dlse": dlse, "recipe": recipe} | ring | options


# A ragged table has all that a regular one has, so a regular one is tried with few shapes.
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        (None, "zigzag"),
        (BIASES["own rows"], "zigzag"),
        *((shape, RAGGED) for shape in BIASES.values()),
    ],
    ids=lambda x: "ragged" if isinstance(x, np.ndarray) else str(x),
)
def test_gradients_of_sinks_and_bias_and_of_lse_are_compared(shape, layout):
    got, given = with_parameters(shape, "float32", workers=4, layout=layout)
    assert_ring_attention(got, **given)
    for name in ("dsinks", "dbias") if shape else ("dsinks",):
        spoilt = np.array(got[name])
        spoilt.reshape(-1)[1] += 1.0
        with pytest.raises(AssertionError, match=f"{name}(, summed over all workers| of worker)"):
            assert_ring_attention(got | {name: spoilt}, **given)
    with pytest.raises(AssertionError, match="dq of worker"):
        assert_ring_attention(got, **given | {"dlse": None})


@pytest.mark.parametrize(
    ("shape", "layout"),
    [(BIASES["own rows"], "striped"), *((shape, RAGGED) for shape in BIASES.values())],
    ids=lambda x: "ragged" if isinstance(x, np.ndarray) else str(x),
)
def test_dsinks_and_dbias_of_each_worker_are_its_own_share(shape, layout):
    got, given = with_parameters(shape, "float64", workers=4, layout=layout)
    problem = check(
        given["q"], given["k"], given["v"], {n: given[n] for n in ("sinks", "bias", "causal")}
    )
    table = make_layout(layout, 24, 4).table
    shares = {"dsinks": [], "dbias": []}
    for tokens in table:  # the gradient of a loss that only this worker's rows enter
        own = np.isin(np.arange(24), tokens)
        dy, dlse = given["dy"] * own[:, None], given["dlse"] * own
        alone = rs.attention_backward(
            given["q"],
            given["k"],
            given["v"],
            dy,
            dlse=dlse,
            causal=True,
            sinks=SINKS,
            bias=given["bias"],
        )
        shares["dsinks"].append(alone.dsinks)
        rows = problem.rows.bias.shape[2] > 1
        places = np.where(tokens < 0, 0, tokens)
        shares["dbias"].append(alone.dbias[..., places, :] if rows else alone.dbias)
    assert_ring_attention(got | shares, **given)
    for name in shares:
        turned = shares | {name: shares[name][1:] + shares[name][:1]}
        with pytest.raises(AssertionError, match=f"{name} of worker"):
            assert_ring_attention(got | turned, **given)
    shares["dsinks"][2] = shares["dsinks"][2] * np.nan
    with pytest.raises(AssertionError, match="dsinks of worker 2: 4 of 4 rows with NaN"):
        assert_ring_attention(got | shares, **given)


def test_gradients_of_a_bfloat16_parameter_may_be_rounded_to_it():
    got, given = with_parameters(BIASES["for all queries"], workers=2, layout="contiguous")
    given["bias"] = np.asarray(given["bias"]).astype(ml_dtypes.bfloat16)
    given["sinks"] = SINKS.astype(ml_dtypes.bfloat16)
    exact = {n: np.asarray(given[n], np.float64) for n in ("q", "k", "v", "dy", "dlse", "bias")}
    run = rs.ring(**exact, workers=2, causal=True, sinks=SINKS, recipe="bf16")
    got = {name: np.asarray(getattr(run, name)) for name in RESULTS}
    got["dsinks"], got["dbias"] = (
        getattr(run.gradients, n).astype(ml_dtypes.bfloat16) for n in ("dsinks", "dbias")
    )
    assert_ring_attention(got, **given)
    got["dsinks"] = got["dsinks"].astype(np.float16)
    with pytest.raises(
        AssertionError, match="dsinks has dtype float16; recipe bf16 requires bfloat16"
    ):
        assert_ring_attention(got, **given)


def test_an_lse_to_base_2_is_converted_and_taken_for_nothing_else():
    x, ring = drawn(), RINGS[2]
    got = ring_of(x, **ring)
    binary = got | {"lse": (got["lse"] / np.log(2.0)).astype(np.float32)}
    assert_ring_attention(binary, **x, **ring, lse="base2")
    for wrong, base in ((binary, "natural"), (got, "base2")):
        with pytest.raises(AssertionError, match="lse of worker 0: .* rows beyond their bound"):
            assert_ring_attention(wrong, **x, **ring, lse=base)
    with refuses((OptionError, "unknown-name"), match="base2"):
        assert_ring_attention(got, **x, **ring, lse="base 2")


# Dtypes of results


def test_wider_dtypes_than_the_recipes_pass():
    x, ring = drawn(), RINGS[0]
    got = ring_of(x, **ring)
    for wide in (np.float32, np.float64):
        assert_ring_attention({n: y.astype(wide) for n, y in got.items()}, **x, **ring)


@pytest.mark.parametrize(
    ("recipe", "name", "narrow"),
    [
        ("float32", "o", np.float16),
        ("float32", "dk", ml_dtypes.bfloat16),
        ("bf16", "dq", np.float16),
        ("bf16", "lse", ml_dtypes.bfloat16),
        ("float64", "dv", np.float32),
    ],
)
def test_a_dtype_that_cannot_hold_the_recipes_numbers_is_named_so(recipe, name, narrow):
    x, ring = drawn(), {"workers": 2, "layout": "zigzag"}
    got = ring_of(x, recipe, **ring)
    got[name] = got[name].astype(narrow)
    with pytest.raises(AssertionError) as caught:
        assert_ring_attention(got, **x, **ring, recipe=recipe)
    text = str(caught.value)
    assert f"{name} of worker 0: wrong dtype" in text and f"{name} of worker 1" in text
    assert f"{name} has dtype {np.dtype(narrow)}; recipe {recipe} requires" in text


# Float64 as truth


@pytest.mark.parametrize("name", ["dq", "dk", "dv", "dsinks", "dbias"])
def test_gradients_in_float64_are_held_against_exact_ones_before_they_are_truth(monkeypatch, name):
    real = dense.dense_backward

    def off(problem, dy, dlse):
        made = real(problem, dy, dlse)
        return type(made)(**vars(made) | {name: getattr(made, name) * (1 + 1e-9)})

    got, given = with_parameters(BIASES["own rows"], "float64", workers=3, layout="contiguous")
    monkeypatch.setattr(expected, "EXACT_LIMIT", 0)
    assert_ring_attention(got, **given)
    monkeypatch.setattr(dense, "dense_backward", off)
    with pytest.raises(UndecidedError, match=f"exact {name}"):
        assert_ring_attention(got, **given)


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (1 << 23, "against exact values: "),
        (0, "against float64, 16 rows checked against exact values: "),
    ],
)
def test_the_text_says_once_which_values_were_compared(monkeypatch, limit, said):
    monkeypatch.setattr(expected, "EXACT_LIMIT", limit)
    x, ring = drawn(), RINGS[0]
    with pytest.raises(AssertionError) as caught:
        assert_ring_attention(ring_of(x, **ring) | {"o": x["q"]}, **x, **ring)
    assert said in str(caught.value) and "values values" not in str(caught.value)


def test_float64_and_exact_truth_agree_in_shares_of_workers_too(monkeypatch):
    monkeypatch.setattr(dense, "PART", 1 << 10)
    got, given = with_parameters(BIASES["for all queries"], workers=4, layout=RAGGED)
    options = {n: given[n] for n in ("sinks", "bias", "causal")}
    problem = check(given["q"], given["k"], given["v"], options)
    upstream, tables = Upstream(given["dy"], given["dlse"]), Tables(RAGGED, RAGGED)
    one, two = (expected_of(problem, upstream, tables, limit) for limit in (None, 0))
    assert set(one.values) == set(two.values) == set(two.scale)
    assert {"dsinks_parts", "dbias_parts", "dsinks", "dbias"} < set(one.values)
    for name, want in one.values.items():
        scale = one.scale[name]
        scale = scale[..., None] if scale.ndim < want.ndim else scale
        assert (np.abs(two.values[name] - want) <= 1e-14 * scale).all(), name
        assert (np.abs(two.scale[name] - one.scale[name]) <= 1e-13 * one.scale[name]).all(), name


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"workers": 5}, LayoutError),
        ({"layout": "spiral"}, (OptionError, "unknown-name")),
        ({"recipe": "bf17"}, (OptionError, "unknown-name")),
        ({"casual": True}, UnknownKeywordError),
        ({"q": np.ones((2, 4, 24, 7))}, ShapeError),
        ({"q": [np.ones((2, 4, 11, 8))] * 2}, ShapeError),
        ({"q": np.ones(SHAPE, dtype=np.int64)}, DtypeError),
        ({"q": np.full(SHAPE, 0.1)}, OptionError),
        ({"q": np.full(SHAPE, np.nan)}, OptionError),
        ({"dy": np.ones((2, 4, 24, 4))}, ShapeError),
        ({"dlse": np.ones((2, 4, 23))}, ShapeError),
        ({"lse": "base10"}, (OptionError, "unknown-name")),
        ({"dy": None}, OptionError),
        ({"got": {"o": np.ones(SHAPE)}}, OptionError),
        ({"got": {"dx": np.ones(SHAPE)}}, (OptionError, "unknown-name")),
    ],
    ids=lambda value: str(list(value)[0]) if isinstance(value, dict) else "",
)
def test_bad_input_is_an_error_of_its_own_and_no_failed_assertion(change, error):
    x = drawn()
    given = {"got": ring_of(x, **RINGS[0]), **x, **RINGS[0]} | change
    with refuses(error):
        assert_ring_attention(given.pop("got"), **given)


@pytest.mark.parametrize(
    "bad", [np.ones((2, 4, 24)), np.ones((2, 4, 12, 8)), [np.ones((2, 4, 5, 8))] * 2]
)
def test_a_result_of_another_shape_fails_the_assertion(bad):
    x = drawn()
    with pytest.raises(AssertionError, match="o of worker 0: wrong shape"):
        assert_ring_attention(ring_of(x, **RINGS[0]) | {"o": bad}, **x, **RINGS[0])


def test_a_result_of_integers_fails_the_assertion():
    x = drawn()
    got = ring_of(x, **RINGS[0]) | {"o": np.ones(SHAPE, dtype=np.int32)}
    with pytest.raises(AssertionError, match="wrong dtype"):
        assert_ring_attention(got, **x, **RINGS[0])


def test_a_sum_without_its_parameter_is_an_error_of_its_own():
    got, given = with_parameters(workers=2)
    with pytest.raises(OptionError, match="sinks together with dsinks"):
        assert_ring_attention(got, **{n: y for n, y in given.items() if n != "sinks"})


@pytest.mark.torch
@pytest.mark.parametrize("per_worker", [False, True])
def test_torch_parameters_lse_and_bfloat16_gathered_and_per_worker(per_worker):
    torch = pytest.importorskip("torch")
    got, given = with_parameters(BIASES["for all queries"], workers=4, layout="zigzag")
    table = make_layout("zigzag", 24, 4).table

    def tensor(name, x):
        x = torch.tensor(np.array(x))
        narrow = name in ("q", "k", "v", "dy", "o", "dq", "dk", "dv")
        return x.to(torch.bfloat16 if narrow else torch.float32)

    def dealt(name, x):
        if not per_worker or name in ("sinks", "bias", "dsinks", "dbias"):
            return x
        return [x[:, :, list(tokens)] for tokens in table]

    made = {n: tensor(n, x) for n, x in given.items() if isinstance(x, np.ndarray)}
    for name in ("q", "k", "v", "sinks", "bias"):
        made[name].requires_grad_()
    call = given | {n: dealt(n, x) for n, x in made.items()}
    results = {n: dealt(n, tensor(n, x)) for n, x in got.items()}
    assert_ring_attention(results, **call)
    results["lse"] = [2 * x for x in results["lse"]] if per_worker else 2 * results["lse"]
    with pytest.raises(AssertionError, match="lse of worker 3"):
        assert_ring_attention(results, **call)
    narrow = results | {"o": dealt("o", tensor("o", got["o"]).to(torch.float16))}
    with pytest.raises(AssertionError, match="o has dtype .*float16"):
        assert_ring_attention(narrow, **call)


@pytest.mark.jax
@pytest.mark.parametrize("per_worker", [False, True])
def test_jax_parameters_and_lse_gathered_and_per_worker(per_worker):
    assert importlib.util.find_spec("jax")
    import jax.numpy as jnp

    got, given = with_parameters(BIASES["own rows"], "float32", workers=3, layout="striped")
    table = make_layout("striped", 24, 3).table

    def dealt(name, x):
        x = jnp.asarray(x, dtype="float32")
        if not per_worker or name in ("sinks", "bias", "dsinks"):
            return x
        return [x[:, :, tokens] for tokens in table]

    arrays = {n: x for n, x in given.items() if isinstance(x, np.ndarray)}
    call = given | {n: dealt(n, x) for n, x in arrays.items()}
    results = {n: dealt(n, x) for n, x in got.items()}
    assert_ring_attention(results, **call)
    with pytest.raises(AssertionError, match="dbias of worker"):
        assert_ring_attention(results | {"dbias": dealt("dbias", got["dbias"] * 1.1)}, **call)


@pytest.mark.torch
def test_torch_tensors_with_gradients_in_bfloat16():
    torch = pytest.importorskip("torch")
    x = {n: torch.tensor(y, dtype=torch.bfloat16) for n, y in drawn(kv_heads=4).items()}
    q, k, v = (x[n].requires_grad_() for n in ("q", "k", "v"))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    o.backward(x["dy"])
    got = {"o": o, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    assert_ring_attention(got, q, k, v, x["dy"], workers=4, layout="zigzag", causal=True)
    got["dk"] = k.grad * 1.1
    with pytest.raises(AssertionError, match="dk of worker"):
        assert_ring_attention(got, q, k, v, x["dy"], workers=4, layout="zigzag", causal=True)


@pytest.mark.jax
def test_jax_arrays_in_bfloat16():
    assert importlib.util.find_spec("jax")
    import jax

    x = {n: jax.numpy.asarray(y, dtype="bfloat16") for n, y in drawn(kv_heads=4).items()}
    ring = {"workers": 2, "layout": "contiguous", "causal": True}
    exact = {n: np.asarray(y, dtype=np.float64) for n, y in x.items()}
    got = {
        n: jax.numpy.asarray(y, dtype="float32" if n == "lse" else "bfloat16")
        for n, y in ring_of(exact, **ring).items()
    }
    assert_ring_attention(got, **x, **ring)
    with pytest.raises(AssertionError):
        assert_ring_attention(got | {"dq": got["dk"]}, **x, **ring)
