"""Finite input whose results leave float64, or the recipe's input format, is refused; never NaN."""

import numpy as np
import pytest
from bad_input.calls import DY, FUNCTIONS, B, H, K, Q, S, V, backward, refused, ring

import ringspec as rs
from ringspec.errors import DtypeError, LayoutError, NonFiniteError, RingspecError
from ringspec.rings.layouts import from_table

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


SCORES = {
    "scale": {"scale": 1e308},
    "q and k": {"q": 1e200 * Q, "k": 1e200 * K},
    "bias and product": {"bias": np.full((S, S), 1.7e308), "scale": 1e307},
}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("case", SCORES)
def test_scores_beyond_float64_are_refused(case, function):
    refused(NonFiniteError, lambda: function(**SCORES[case]))


def test_hidden_scores_may_leave_float64():
    """Only what the mask lets through counts."""
    q = Q.copy()
    q[:, :, 0] *= 1e307
    hidden = np.ones((S, S), bool)
    hidden[0] = False
    run = ring(q=q, k=1e10 * K, mask=hidden, scale=1e-10)
    assert (run.lse[:, :, 0] == -np.inf).all() and (run.o[:, :, 0] == 0).all()
    assert np.isfinite(run.lse[:, :, 1:]).all()
    assert all(np.isfinite(x).all() for x in (run.dq, run.dk, run.dv))


GRADIENTS = {
    "dp": {"v": 1e305 * V, "dy": 1e10 * DY},
    "dq": {"q": 1e-10 * Q, "k": 1e10 * K, "dy": 1e300 * DY},
    "dlse": {"dlse": np.full((B, H, S), 1.7e308)},
}


@pytest.mark.parametrize("function", (backward, ring), ids=lambda f: f.__name__)
@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients_beyond_float64_are_refused(case, function):
    """Infinite results are none of those that the definition has."""
    refused(NonFiniteError, lambda: function(**GRADIENTS[case]))


@pytest.mark.parametrize(("recipe", "size"), [("fp16", 1e6), ("fp16_partials", 1e6), ("fp8_e4m3", 1e4),
                                              ("fp8_e5m2", 1e6), ("bf16", 1e39), ("nki", 1e39)])  # fmt: skip
@pytest.mark.parametrize("name", ["q", "k", "v", "dy"])
def test_inputs_beyond_the_recipes_format_are_refused(recipe, size, name):
    """As infinities of that format they would be refused as well."""
    value = {"q": Q, "k": K, "v": V, "dy": DY}[name]
    refused(NonFiniteError, lambda: ring(**{name: size * value}, recipe=recipe))


@pytest.mark.parametrize("circulation", ["kv", "q", "gather"])
def test_sums_over_workers_beyond_float64_are_refused(circulation):
    """Each block's share is finite here, and the sum over blocks or workers is not."""
    one_key = np.zeros((S, S), bool)
    one_key[:, 0] = True
    large = {"dy": np.full(DY.shape, 1.2e308), "mask": one_key, "v": 0 * V}
    refused(NonFiniteError, lambda: ring(**large, circulation=circulation))
    sinks = {"sinks": np.full(H, 5.0), "dlse": np.full((B, H, S), 1e308)}
    refused(NonFiniteError, lambda: ring(**sinks, circulation=circulation))


def test_an_unnormalised_o_beyond_float64_is_refused():
    v = np.full(V.shape, 1.7e308)
    v[:, :, S // 2 :] *= -1
    refused(NonFiniteError, lambda: ring(q=0 * Q, k=0 * K, v=v, dy=None))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_zeros_are_positive(function):
    result = function(q=0 * Q, k=-np.abs(K), v=-0.0 * V, scale=-0.5)
    for name in ("o", "lse", "dq", "dk", "dv"):
        values = getattr(result, name, None)
        if values is not None:
            assert not (np.signbit(values) & (values == 0)).any(), name


LSE = np.zeros((B, H, S))


def test_an_empty_row_of_a_block_sends_no_gradient_to_sinks():
    """BWD-10; with sinks no whole row has lse = -inf, so refusing it would do as well."""
    try:
        result = rs.attention_block_backward(
            Q, K, V, DY, lse=LSE - np.inf, delta=LSE, sinks=np.ones(H)
        )
    except RingspecError:
        return
    assert (result.dsinks == 0).all()


def test_an_lse_far_below_the_scores_is_refused():
    refused(
        NonFiniteError, lambda: rs.attention_block_backward(Q, K, V, DY, lse=LSE - 1e4, delta=LSE)
    )


class NoText(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Unreadable:
    def __array__(self, *arguments, **options):
        raise NoText


def test_an_array_whose_error_has_no_text_is_refused():
    refused(DtypeError, lambda: rs.attention(Unreadable(), K, V))


def test_a_table_for_an_enormous_number_of_workers_is_refused():
    with pytest.raises(RingspecError):
        from_table([[0]], 1, 10**5000)


def test_a_table_for_another_number_of_workers_is_refused():
    refused(LayoutError, lambda: from_table([[0]], 1, 2))


@pytest.mark.parametrize(
    ("recipe", "size"), [("float64", 1e200), ("float32", 1e20), ("bf16", 1e20)]
)
def test_a_hidden_pair_gives_nothing_however_large_it_is(recipe, size):
    """p = ds = dz = 0 by definition where the mask hides, also where dp would overflow."""
    v, dy = V.copy(), DY.copy()
    v[:, :, -1], dy[:, :, 0] = size, size  # key S - 1 is hidden from query 0
    run = ring(v=v, dy=dy, causal=True, recipe=recipe)
    assert all(np.isfinite(x).all() for x in (run.dq, run.dk, run.dv))
    dense = backward(v=v, dy=dy, causal=True)
    assert all(np.isfinite(x).all() for x in (dense.dq, dense.dk, dense.dv))
