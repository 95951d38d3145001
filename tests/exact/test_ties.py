"""Values that no interval decides: proven rational, or refused; never looped on."""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from oracle.decide import nearest, to_odd

from ringspec import exact
from ringspec.errors import UndecidedError
from ringspec.exact import Problem

FORMATS = ("float64", "float32", "bfloat16", "float16")
GENERATOR = np.random.default_rng(11)
S, D = 8, 4
Q = GENERATOR.standard_normal((1, 2, S, D))
K, V = GENERATOR.standard_normal((2, 1, 1, S, D))
DY = GENERATOR.standard_normal((1, 2, S, D))
MIDPOINT = 1 + 2.0**-8  # half way between two bfloat16 numbers; the even one is 1


def values(truth, tensor, name="float64"):
    return truth.tensors[tensor][name].astype(np.float64)


def test_constant_v_gives_o_equal_to_it_and_exactly_no_score_gradient():
    truth = exact.backward(Problem(Q, K, np.full_like(V, MIDPOINT), 0.5), DY, formats=FORMATS)
    assert (values(truth, "o") == MIDPOINT).all()
    assert (values(truth, "o", "bfloat16") == 1.0).all()
    for tensor in ("dq", "dk"):
        for name in FORMATS:
            assert (values(truth, tensor, name) == 0).all()
            assert not np.signbit(values(truth, tensor, name)).any()


def test_groups_of_equal_keys_with_one_mean_are_proven_without_more_bits(monkeypatch):
    evaluated = []
    forward_balls = exact.truth.forward_balls
    monkeypatch.setattr(
        exact.truth,
        "forward_balls",
        lambda prepared, bits: evaluated.append(bits) or forward_balls(prepared, bits),
    )
    k = np.repeat(K[:, :, :2], 4, axis=2)  # two groups of four equal keys
    v = np.tile(np.array([MIDPOINT - 0.5, MIDPOINT + 0.5]), 4)[None, None, :, None]
    truth = exact.forward(Problem(Q, k, np.broadcast_to(v, V.shape).copy(), 0.5), FORMATS)
    assert (values(truth, "o", "bfloat16") == 1.0).all()
    assert evaluated == [256]


def test_a_mean_of_three_that_is_a_midpoint_is_a_tie_to_even():
    v = np.array([1.0, 1.0, 3 * MIDPOINT - 2])[None, None, :, None]
    problem = Problem(0 * Q, K[:, :, :3], np.broadcast_to(v, (1, 1, 3, D)).copy(), 1.0)
    truth = exact.backward(problem, DY, formats=FORMATS)
    assert (values(truth, "o") == MIDPOINT).all()
    assert (values(truth, "o", "bfloat16") == 1.0).all()


def test_the_mean_over_a_uniform_row_is_the_rounded_fraction():
    k, v = K[:, :, :7], np.round(V[:, :, :7] * 64) / 64
    truth = exact.forward(Problem(0 * Q, k, v, 1.0), FORMATS)
    for d in range(D):
        mean = sum(Fraction(x) for x in v[0, 0, :, d].tolist()) / 7
        for name in FORMATS:
            assert values(truth, "o", name)[0, 1, 3, d] == nearest(mean, name)


def test_dbias_of_a_whole_row_is_dlse():
    dlse = GENERATOR.standard_normal((1, 2, S))
    bias = GENERATOR.standard_normal((1, 1, S, 1))
    truth = exact.backward(Problem(Q, K, V, 0.5, bias=bias), DY, dlse, FORMATS)
    for i in range(S):
        total = Fraction(dlse[0, 0, i]) + Fraction(dlse[0, 1, i])
        assert values(truth, "dbias")[0, 0, i, 0] == nearest(total, "float64")


def test_a_sink_alone_takes_dlse_exactly():
    nothing = np.zeros((1, 1, S, S), dtype=bool)
    dlse = GENERATOR.standard_normal((1, 2, S))
    sinks = np.array([[MIDPOINT], [2.0]])
    truth = exact.backward(Problem(Q, K, V, 0.5, visible=nothing, sinks=sinks), DY, dlse, FORMATS)
    assert (values(truth, "lse")[0, 0] == MIDPOINT).all()
    assert (values(truth, "lse", "bfloat16")[0, 0] == 1.0).all()
    for h in range(2):
        total = sum(Fraction(x) for x in dlse[0, h].tolist())
        assert values(truth, "dsinks")[h, 0] == nearest(total, "float64")


@pytest.mark.parametrize(("keys", "n"), [(3, 3), (7, 1), (15, 5)])
def test_scores_and_sinks_that_are_equal_in_units_but_not_in_value_are_told_apart(keys, n):
    # s = -n/4 and sink = -n/32 have the same numerator; dsinks cancels to a remainder of 6 * 53 bits.
    rows = 7
    q, k, v = np.full((1, 1, rows, 1), -n / 4), np.ones((1, 1, keys, 1)), np.ones((1, 1, keys, 1))
    dy, dlse = np.zeros((1, 1, rows, 1)), np.zeros((1, 1, rows))
    dy[0, 0, 0, 0] = 1.0
    with mpmath.workprec(3000):
        terms = keys * mpmath.exp(mpmath.mpf(-n) / 4), mpmath.exp(mpmath.mpf(-n) / 32)
        rest = terms[0] / sum(terms)
        for i in range(rows - 1):
            dlse[0, 0, i] = float(rest)
            rest -= mpmath.mpf(dlse[0, 0, i])
        want = -terms[1] / sum(terms) * rest
        truth = exact.backward(Problem(q, k, v, 1.0, sinks=np.full((1, 1), -n / 32)), dy, dlse)
        assert values(truth, "dsinks")[0, 0] == nearest(to_odd(want), "float64")


def test_a_capped_logit_of_zero_equals_a_sink_of_zero():
    v = np.array([1.0, 1.0, 4 * MIDPOINT - 2])[None, None, :, None]
    problem = Problem(
        np.zeros((1, 1, 1, 1)), np.ones((1, 1, 3, 1)), v, 1.0, softcap=1.0, sinks=np.zeros((1, 1))
    )
    assert values(exact.forward(problem, FORMATS), "o", "bfloat16").item() == 1.0


def test_a_block_whose_logits_are_the_given_lse_has_weights_of_exactly_one():
    one = np.ones((1, 1, 1, 1))
    problem = Problem(one, one, one, 0.5)
    truth = exact.block_backward(
        problem, MIDPOINT * one, np.full((1, 1, 1), 0.5), np.zeros((1, 1, 1)), FORMATS
    )
    assert values(truth, "dv", "bfloat16").item() == 1.0


def test_one_key_gives_v_and_the_logit_themselves():
    truth = exact.forward(Problem(Q, K[:, :, :1], V[:, :, :1], 0.5), FORMATS)
    for h in range(2):
        assert (values(truth, "o")[0, h] == V[0, 0, 0]).all()
        for i in range(S):
            logit = sum(
                (
                    Fraction(a) * Fraction(b)
                    for a, b in zip(Q[0, h, i].tolist(), K[0, 0, 0].tolist(), strict=True)
                ),
                Fraction(0),
            )
            assert values(truth, "lse")[0, h, i] == nearest(logit / 2, "float64")


@pytest.mark.parametrize("dropout_p", [0.5, 0.1])
def test_rows_without_keys_give_exact_zeros_and_minus_infinity(dropout_p):
    nothing = np.zeros((1, 1, 1, S), dtype=bool)
    problem = Problem(Q, K, V, 0.5, visible=nothing, dropout_p=dropout_p)
    truth = exact.backward(problem, DY, np.ones((1, 2, S)), FORMATS)
    assert (values(truth, "lse") == -math.inf).all()
    for tensor in ("o", "dq", "dk", "dv"):
        assert (values(truth, tensor) == 0).all()


def test_a_value_that_no_precision_decides_is_refused_with_its_place():
    # dv of key 0 is (1 + 2**-53) / (1 + exp(-90000)): below a midpoint by less than any bits here see.
    q = np.full((1, 1, 2, 1), 300.0)
    k = np.array([300.0, 0.0]).reshape(1, 1, 2, 1)
    dy = np.array([1.0, 2.0**-53]).reshape(1, 1, 2, 1)
    with pytest.raises(UndecidedError, match=r"1 undecided elements .*dv\[0, 0, 0, 0\]"):
        exact.backward(Problem(q, k, k / 300, 1.0), dy)


def test_results_beyond_a_format_are_infinite_and_results_below_it_are_plus_zero():
    truth = exact.forward(Problem(Q, K, np.full_like(V, -70000.0), 0.5), FORMATS)
    assert (values(truth, "o", "float16") == -math.inf).all()
    assert (values(truth, "o", "float32") == -70000.0).all()
    truth = exact.forward(Problem(Q, K, np.full_like(V, -(2.0**-140)), 0.5), FORMATS)
    assert (values(truth, "o", "float16") == 0).all()
    assert not np.signbit(values(truth, "o", "float16")).any()
    assert (values(truth, "o", "bfloat16") == 0).all()  # 2**-134 is half the least one, and even
    assert (values(truth, "o", "float32") == -(2.0**-140)).all()


@pytest.mark.parametrize("seed", [23, 24])  # some row scale lies half way between two float64
def test_the_row_scale_of_values_plus_and_minus_one_is_the_rounded_condition(seed):
    generator = np.random.default_rng(seed)
    q, k = (generator.integers(-8, 9, (1, h, n, 6)) / 8.0 for h, n in ((2, 5), (1, 7)))
    v = np.where(generator.random((1, 1, 7, 3)) < 0.5, 1.0, -1.0)
    scale = 120**-0.5
    truth = exact.forward(Problem(q, k, v, scale), scales=True)
    largest = (np.abs(q[0]) @ np.abs(k[0, 0]).T).max(axis=2)  # sums of few eighths are exact
    want = [[float(1 + Fraction(scale) * Fraction(x)) for x in row] for row in largest]
    assert truth.scales["o"][0].tolist() == want
