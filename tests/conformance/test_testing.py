"""``assert_ring_attention``: right rings pass in every form, wrong ones fail with worker and place."""

import importlib.util

import ml_dtypes
import numpy as np
import pytest

import ringspec as rs
from ringspec.conformance.dense import truth_of
from ringspec.errors import (
    DtypeError,
    LayoutError,
    OptionError,
    RingspecError,
    ShapeError,
    UnknownNameError,
)
from ringspec.formats import round_to
from ringspec.spec.layout import make_layout
from ringspec.spec.options import check
from ringspec.testing import assert_ring_attention

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
    with pytest.raises(AssertionError, match="finite number where -inf is due"):
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
    monkeypatch.setattr("ringspec.conformance.dense.PART", 1 << 12)
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
    exact, rough = truth_of(problem, x["dy"]), truth_of(problem, x["dy"], limit=0)
    assert exact.source == "exact" and rough.source.startswith("float64")
    for name, want in exact.values.items():
        row = getattr(exact.scale, name)
        bound = 1e-15 * (row if name == "lse" else row[..., None])
        assert (np.abs(rough.values[name] - want) <= bound).all(), name


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"workers": 5}, LayoutError),
        ({"layout": "spiral"}, RingspecError),
        ({"recipe": "bf17"}, UnknownNameError),
        ({"casual": True}, RingspecError),
        ({"q": np.ones((2, 4, 24, 7))}, ShapeError),
        ({"q": [np.ones((2, 4, 11, 8))] * 2}, RingspecError),
        ({"q": np.ones(SHAPE, dtype=np.int64)}, DtypeError),
        ({"q": np.full(SHAPE, 0.1)}, OptionError),
        ({"q": np.full(SHAPE, np.nan)}, RingspecError),
        ({"dy": np.ones((2, 4, 24, 4))}, ShapeError),
        ({"dy": None}, OptionError),
        ({"got": {"o": np.ones(SHAPE)}}, OptionError),
        ({"got": {"dx": np.ones(SHAPE)}}, UnknownNameError),
    ],
    ids=lambda value: str(list(value)[0]) if isinstance(value, dict) else "",
)
def test_bad_input_is_an_error_of_its_own_and_no_failed_assertion(change, error):
    x = drawn()
    given = {"got": ring_of(x, **RINGS[0]), **x, **RINGS[0]} | change
    with pytest.raises(error):
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
