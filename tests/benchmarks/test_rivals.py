"""Each rule against cases whose verdict is known, and the naive attention against the definition."""

import dataclasses

import numpy as np
import pytest
from benchmarks.rivals import RULES, Seen, rank_sum_p, smirnov_p
from benchmarks.rivals_naive import naive, naive_of, sizes
from scipy import stats

from ringspec.compare.noise.problem import Attention
from ringspec.formats import round_to
from ringspec.rings.attention import attention, attention_backward

BY_NAME = {rule.name: rule.passes for rule in RULES}


def seen(**changes):
    """A tensor of 1000 numbers, its bfloat16 rounding, and a naive one with twice its error."""
    rng = np.random.default_rng(0)
    truth = rng.standard_normal(1000)
    got = round_to(truth, "bfloat16")
    noise = rng.standard_normal(1000) * 2.0**-7
    given = {
        "got": got, "truth": truth, "naive": truth + noise, "perturbed": truth + 3 * noise,
        "size": np.abs(truth), "length": 1000, "format": "bfloat16",
    }  # fmt: skip
    return Seen(**(given | changes))


@pytest.mark.parametrize("name", BY_NAME)
def test_a_rounded_truth_passes_and_nan_or_a_wrong_sign_fails(name):
    rule, right = BY_NAME[name], seen()
    assert rule(right)
    assert not rule(dataclasses.replace(right, got=-right.got))
    got = right.got.copy()
    got[7] = np.nan
    assert not rule(dataclasses.replace(right, got=got))


@pytest.mark.parametrize(
    ("name", "limit"), [("max-1e-2", 1e-2 * 4.0 + 1e-3), ("max-2e-2", 2e-2 * 4.0 + 1e-5)]
)
def test_max_scaled_rules_allow_one_limit_for_the_whole_tensor(name, limit):
    truth = np.array([4.0, 0.0])
    at = [seen(got=truth + np.array([0.0, x * limit]), truth=truth) for x in (0.999, 1.001)]
    assert [BY_NAME[name](x) for x in at] == [True, False]


def test_the_naive_rule_allows_twice_the_largest_naive_error():
    truth = np.zeros(3)
    given = {"truth": truth, "naive": np.array([0.0, -1.0, 0.5])}
    assert BY_NAME["naive-x2"](seen(got=np.array([2.0, 0, 0]), **given))
    assert not BY_NAME["naive-x2"](seen(got=np.array([2.01, 0, 0]), **given))


@pytest.mark.torch
@pytest.mark.parametrize("format", ["bfloat16", "float16", "float32", "float64"])
def test_assert_close_has_the_defaults_of_torch(format):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    for factor in np.geomspace(1e-8, 1e-1, 40):
        truth = round_to(rng.standard_normal(20), format)
        got = round_to(truth * (1 + factor * rng.uniform(-1, 1, 20)), format)
        pair = [torch.tensor(x, dtype=getattr(torch, format)) for x in (got, truth)]
        try:
            torch.testing.assert_close(*pair)
            passes = True
        except AssertionError:
            passes = False
        assert BY_NAME["assert_close"](seen(got=got, truth=truth, format=format)) is passes


@pytest.mark.parametrize("shift", [0.0, 0.05, 0.2])
def test_p_values_of_two_samples_are_those_of_scipy(shift):
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal(800) + shift, rng.standard_normal(900)
    expected = stats.ks_2samp(x, y, alternative="less", method="asymp").pvalue
    assert smirnov_p(x, y) == pytest.approx(expected, rel=0.3, abs=1e-6)
    expected = stats.mannwhitneyu(x, y, alternative="greater", use_continuity=False).pvalue
    assert rank_sum_p(x, y) == pytest.approx(expected, rel=1e-6)


def test_dual_delta_passes_smaller_errors_and_refuses_larger_ones():
    truth, rng = np.zeros(5000), np.random.default_rng(3)
    naive_error = rng.standard_normal(5000)
    for size, passes in ((0.5, True), (1.0, True), (1.2, False)):
        got = size * rng.standard_normal(5000)
        assert BY_NAME["dual-delta"](seen(got=got, truth=truth, naive=naive_error)) is passes


def test_ttrace_allows_three_times_what_perturbed_inputs_make():
    naive_result = np.array([3.0, 4.0])
    for size, passes in ((2.9, True), (3.1, False)):
        got = naive_result + size * np.array([0.0, 0.1])
        case = seen(got=got, naive=naive_result, perturbed=naive_result + np.array([0.1, 0.0]))
        assert BY_NAME["ttrace"](case) is passes


def test_tosa_has_a_bound_a_bias_test_and_a_variance_test():
    n, u = 10_000, 2.0**-8
    one, rng = np.ones(n), np.random.default_rng(4)
    signs = rng.permutation(np.repeat((1.0, -1.0), n // 2))
    alone = np.eye(1, n)[0]
    for error, passes in (
        (1.99 * u * alone, True),
        (2.01 * u * alone, False),  # bound
        (1.2 * u * signs, True),
        (1.3 * u * signs, False),  # variance: 1.6 at most
        (0.03 * u * one, True),
        (0.05 * u * one, False),  # bias: sqrt(16 / n) at most
    ):
        case = seen(got=one + error, truth=one, size=one, length=100)
        assert BY_NAME["tosa"](case) is passes
    zero = seen(got=np.array([1e-30]), truth=np.zeros(1), size=np.zeros(1))
    assert not BY_NAME["tosa"](zero)


def problem(kv_heads=2):
    rng = np.random.default_rng(5)
    q, dy = rng.standard_normal((2, 1, 4, 6, 8))
    k, v = rng.standard_normal((2, 1, kv_heads, 6, 8))
    return q, k, v, dy


def test_the_naive_attention_in_float64_is_the_definition():
    q, k, v, dy = problem()
    got = naive(q, k, v, dy, visible=np.tri(6, dtype=bool), scale=0.3, format="float64")
    options = {"causal": True, "scale": 0.3}
    gradients = attention_backward(q, k, v, dy, **options)
    expected = {"o": attention(q, k, v, **options).o}
    expected |= {name: getattr(gradients, name) for name in ("dq", "dk", "dv")}
    for name, x in expected.items():
        assert np.abs(got[name] - x).max() < 1e-13, name


def test_the_naive_attention_stores_what_its_format_holds():
    q, k, v, dy = (round_to(x, "bfloat16") for x in problem())
    given = {"visible": np.tri(6, dtype=bool), "scale": 0.3}
    narrow = naive(q, k, v, dy, **given, format="bfloat16")
    wide = naive(q, k, v, dy, **given, format="float64")
    for name, x in narrow.items():
        assert np.array_equal(round_to(x, "bfloat16"), x)
        assert 1e-4 < np.abs(x - wide[name]).max() < 0.1, name


def described():
    q, k, v, dy = problem()
    visible = np.tri(6, dtype=bool)
    s = np.where(visible, 0.3 * q @ np.repeat(k, 2, axis=1).swapaxes(2, 3), -np.inf)
    lse = np.log(np.exp(s).sum(axis=3))
    p = np.exp(s - lse[..., None])
    return Attention(q, k, v, s, lse, p, p @ np.repeat(v, 2, axis=1), 0.3, dy)


def test_perturbed_inputs_move_results_by_about_one_epsilon():
    at = described()
    plain, moved, again = (naive_of(at, "bfloat16", seed) for seed in (None, 1, 1))
    for name, x in plain.items():
        distance = np.linalg.norm(moved[name] - x) / np.linalg.norm(x)
        assert 2.0**-9 < distance < 2.0**-4, name
        assert np.array_equal(moved[name], again[name])


def test_sizes_bound_the_results_and_are_reached_by_positive_operands():
    at = described()
    gradients = attention_backward(at.q, at.k, at.v, at.dy, causal=True, scale=0.3)
    truth = {"o": at.o} | {name: getattr(gradients, name) for name in ("dq", "dk", "dv")}
    found = sizes(at)
    for name, (size, length) in found.items():
        assert size.shape == truth[name].shape
        assert np.all(np.abs(truth[name]) <= size * (1 + 1e-12))
        assert length == (12 if name in ("dk", "dv") else 6)
    positive = dataclasses.replace(at, v=np.abs(at.v))
    assert np.allclose(sizes(positive)["o"][0], at.p @ np.repeat(np.abs(at.v), 2, axis=1))
