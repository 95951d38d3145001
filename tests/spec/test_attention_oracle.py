"""Dense attention and its gradients against mpmath at 60 digits and more (oracle/).

The errors are in units of the row scale. The oracle itself is tested first.
"""

from dataclasses import replace
from fractions import Fraction
from functools import cache

import mpmath
import numpy as np
import pytest
from mpmath import mpf
from oracle.cases import CASES, Case, Data, draw
from oracle.dual import dual_derivative
from oracle.mp_attention import (
    Forward,
    Gradients,
    block_gradients,
    forward,
    gradients,
    merge,
    to_float64,
)
from oracle.problem import Problem, all_keeps, allowed, keeps, may_attend, nearest_inverse_root
from oracle.row_scale import RowScale, row_scale, worst_row_error

import ringspec as rs
from ringspec.formats import round_to, store

BOUND = 2e-15
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def marked(backward: bool) -> list:
    """Every case as a parameter, marked with its backward rules or with all its other ones."""
    parameters = []
    for case in CASES:
        rules = [rule for rule in case.rules if rule.startswith("BWD") == backward]
        marks = (pytest.mark.rule(*rules),) if rules else ()
        parameters.append(pytest.param(case, marks=marks, id=case.name))
    return parameters


def case_named(name: str) -> Case:
    (case,) = [case for case in CASES if case.name == name]
    return case


@cache
def data_of(case_name: str) -> Data:
    return draw(case_named(case_name))


def problem_of(data: Data) -> Problem:
    return Problem(data.q, data.k, data.v, **data.options)


def scale_of(data: Data) -> RowScale:
    return row_scale(data.q, data.k, data.v, data.dy, data.dlse, **data.options)


def dense_forward(data: Data):
    return rs.attention(data.q, data.k, data.v, **data.options)


def dense_gradients(data: Data):
    return rs.attention_backward(data.q, data.k, data.v, data.dy, dlse=data.dlse, **data.options)


def errors_of(got, want: Forward | Gradients, scale: RowScale, names: tuple[str, ...]) -> dict:
    """Worst row error of each named tensor; a tensor that both lack counts 0."""
    errors = {}
    for name in names:
        got_array, want_array = getattr(got, name), getattr(want, name)
        if want_array is None:
            assert got_array is None, name
            errors[name] = 0.0
            continue
        assert got_array.dtype == np.float64, name
        errors[name] = worst_row_error(got_array, to_float64(want_array), getattr(scale, name))
    return errors


# The definition against the oracle --------------------------------------------------------------


@pytest.mark.parametrize("case", marked(backward=False))
def test_forward_agrees_with_mpmath(case):
    data = data_of(case.name)
    errors = errors_of(dense_forward(data), forward(problem_of(data)), scale_of(data), ("o", "lse"))
    for name, error in errors.items():
        assert error <= BOUND, (name, errors)


@pytest.mark.parametrize("case", marked(backward=True))
def test_gradients_agree_with_finite_differences_in_mpmath(case):
    data = data_of(case.name)
    want = gradients(problem_of(data), data.dy, data.dlse)
    names = ("dq", "dk", "dv", "dsinks", "dbias")
    errors = errors_of(dense_gradients(data), want, scale_of(data), names)
    for name, error in errors.items():
        assert error <= BOUND, (name, errors)


@pytest.mark.rule("MASK-7", "FWD-8", "BWD-10")
@every_case
def test_empty_rows_and_unattended_keys_are_exact(case):
    data = data_of(case.name)
    visible = allowed(problem_of(data))
    B, H, _, Sk = visible.shape
    Hkv = data.k.shape[1]
    f, g = dense_forward(data), dense_gradients(data)
    empty = ~visible.any(axis=3)
    assert np.all(f.o[empty] == 0.0) and np.all(g.dq[empty] == 0.0)
    if data.options.get("sinks") is None:
        assert np.all(f.lse[empty] == -np.inf)
        assert np.all(np.isfinite(f.lse[~empty]))
    else:
        assert np.all(np.isfinite(f.lse))
    unattended = ~visible.any(axis=2).reshape(B, Hkv, H // Hkv, Sk).any(axis=2)
    assert np.all(g.dk[unattended] == 0.0) and np.all(g.dv[unattended] == 0.0)
    dropped = ~(visible & all_keeps(problem_of(data))).any(axis=2)
    assert np.all(g.dv[dropped.reshape(B, Hkv, H // Hkv, Sk).all(axis=2)] == 0.0)
    for array in (f.o, g.dq, g.dk, g.dv, g.dsinks, g.dbias):
        assert array is None or np.all(np.isfinite(array))
    if g.dbias is not None:
        bias = np.asarray(data.options["bias"])
        assert g.dbias.shape == bias.shape
        assert np.all(g.dbias[np.isneginf(bias)] == 0.0)
        if bias.shape == visible.shape:
            assert np.all(g.dbias[~visible] == 0.0)


BLOCK_CASES = (
    "plain",
    "causal, first rows empty",
    "softcap with bias",
    "bias per head and key",
    "grouped heads with sinks",
    "rows with sinks only",
    "dropout",
    "given keep mask",
)


@pytest.mark.rule("BWD-11")
@pytest.mark.parametrize("shift", (0.0, 0.25), ids=("own lse and delta", "lse and delta shifted"))
@pytest.mark.parametrize("name", BLOCK_CASES)
def test_block_backward_takes_lse_and_delta_as_given(name, shift):
    """The shifted ones belong to no row of this problem: p = exp(s - lse) does not sum to 1.

    The row scale is that of the problem; p is smaller than its p by exp(-shift).
    """
    data = data_of(name)
    f = dense_forward(data)
    delta = np.sum(data.dy * f.o, axis=-1) - data.dlse
    given = {"lse": f.lse + shift, "delta": delta + shift}
    got = rs.attention_block_backward(data.q, data.k, data.v, data.dy, **given, **data.options)
    want = block_gradients(problem_of(data), data.dy, **given)
    names = ("dq", "dk", "dv", "dsinks", "dbias")
    errors = errors_of(got, want, scale_of(data), names)
    for tensor, error in errors.items():
        assert error <= BOUND, (tensor, errors)


@pytest.mark.rule("SOFT-2", "SOFT-3")
@pytest.mark.parametrize("spread", (0.5, 5.0, 300.0))
@pytest.mark.parametrize("number", (1, 2, 5))
def test_merge_of_partials_agrees_with_mpmath(number, spread):
    """Row scale as in section 4 with lse_n in the place of the scores and o_n in that of v."""
    generator = np.random.default_rng(number)
    shape = (2, 3, 4)
    parts = []
    for _ in range(number):
        lse = spread * generator.standard_normal(shape)
        lse[generator.random(shape) < 0.3] = -np.inf
        lse[1, 2] = -np.inf  # rows without a key in any part
        o = 2.0 * generator.standard_normal((*shape, 3)) + 0.3
        o[np.isneginf(lse)] = 0.0
        parts.append((o, lse))
    got, want = rs.merge_partials(parts), merge(parts)
    want_lse = to_float64(want.lse)
    finite = [np.where(np.isneginf(lse), 0.0, lse) for _, lse in parts]
    kappa = 1.0 + np.max(np.abs(finite), axis=0)
    shift = np.where(np.isneginf(want_lse), 0.0, want_lse)
    size = sum(np.exp(lse - shift)[..., None] * np.abs(o) for o, lse in parts)
    errors = {
        "o": worst_row_error(got.o, to_float64(want.o), kappa * np.max(size, axis=-1)),
        "lse": worst_row_error(got.lse, want_lse, kappa + np.abs(shift)),
    }
    for name, error in errors.items():
        assert error <= BOUND, (name, errors)
    assert np.all(got.o[1, 2] == 0.0) and np.all(got.lse[1, 2] == -np.inf)


@pytest.mark.parametrize("logit", (-6e4, -800.0, 800.0, 3e5))
def test_scores_far_from_zero_give_the_weights_of_their_differences(logit):
    """exp of each of these overflows or vanishes; a bias that is the same for all keys is exact."""
    data = data_of("plain")
    shifted = replace(data, options={"bias": np.full((1, 1, 1, 1), logit)})
    want = forward(problem_of(shifted))
    errors = errors_of(dense_forward(shifted), want, scale_of(shifted), ("o", "lse"))
    for name, error in errors.items():
        assert error <= BOUND, (name, errors)


@pytest.mark.parametrize("sink", (-1e4, -100.0, 100.0, 700.0))
def test_a_sink_of_any_size_gives_a_finite_lse(sink):
    data = data_of("plain")
    with_sink = replace(data, options={"sinks": np.full(data.q.shape[1], sink)})
    want = forward(problem_of(with_sink))
    errors = errors_of(dense_forward(with_sink), want, scale_of(with_sink), ("o", "lse"))
    assert errors["lse"] <= BOUND
    assert np.all(np.isfinite(dense_forward(with_sink).o))


@pytest.mark.rule("FWD-2")
def test_the_default_scale_is_the_float64_nearest_to_one_over_root_d():
    """With one-hot q and k and one key, lse is the scale itself: log(exp(scale * 1))."""
    for D in range(1, 513):
        one_hot = np.zeros((1, 1, 1, D))
        one_hot[..., 0] = 1.0
        got = float(rs.attention(one_hot, one_hot, np.ones((1, 1, 1, 1))).lse[0, 0, 0])
        below, above = np.nextafter(got, 0.0), np.nextafter(got, 2.0)
        low = (Fraction(got) + Fraction(float(below))) / 2
        high = (Fraction(got) + Fraction(float(above))) / 2
        assert low * low * D <= 1 <= high * high * D, (D, got.hex())
        assert got == nearest_inverse_root(D)


def test_a_given_scale_is_taken_exactly():
    """Also the float64 beside the default one, which is what 1 / math.sqrt(128) gives."""
    one_hot = np.zeros((1, 1, 1, 128))
    one_hot[..., 3] = 1.0
    default = nearest_inverse_root(128)
    for scale in (float(np.nextafter(default, 0.0)), default, 1.0, 0.1):
        got = rs.attention(one_hot, one_hot, np.ones((1, 1, 1, 1)), scale=scale).lse[0, 0, 0]
        assert float(got) == scale


@pytest.mark.parametrize("name", ("float32", "float16", "bfloat16", "float8_e4m3fn"))
def test_inputs_of_a_narrower_dtype_are_taken_exactly(name):
    data = data_of("causal")
    arrays = (data.q, data.k, data.v)
    narrow = rs.attention(*(store(array, name) for array in arrays), causal=True)
    exact = rs.attention(*(round_to(array, name) for array in arrays), causal=True)
    assert np.array_equal(narrow.o, exact.o) and np.array_equal(narrow.lse, exact.lse)
    dy = round_to(data.dy, name)
    narrow = rs.attention_backward(
        *(store(array, name) for array in arrays), store(dy, name), causal=True
    )
    exact = rs.attention_backward(*(round_to(array, name) for array in arrays), dy, causal=True)
    for tensor in ("dq", "dk", "dv"):
        assert np.array_equal(getattr(narrow, tensor), getattr(exact, tensor)), tensor


# Every option matters, so that a case which ignores one is seen -------------------------------------

PAIRS = {
    "segments_q": ("segments_q", "segments_k"),
    "cu_seqlens": ("cu_seqlens", "cu_seqlens_k"),
    "bound_min": ("bound_min", "bound_max"),
}
SILENT = {  # options that by their nature do not change the result of a case
    ("all dropped", "dropout_p"),
    ("a sink far below all scores", "sinks"),
}
OPTIONS = [
    (case.name, option)
    for case in CASES
    for option in draw(case).options
    if option not in ("segments_k", "cu_seqlens_k", "bound_max")
    and (case.name, option) not in SILENT
]


@pytest.mark.parametrize(
    ("name", "option"), OPTIONS, ids=[" without ".join(pair) for pair in OPTIONS]
)
def test_leaving_an_option_out_changes_the_result(name, option):
    data = data_of(name)
    left_out = PAIRS.get(option, (option,))
    options = {key: value for key, value in data.options.items() if key not in left_out}
    scale = scale_of(data)
    other = replace(data, options=options)
    f, g = dense_forward(data), dense_gradients(data)
    other_f, other_g = dense_forward(other), dense_gradients(other)
    errors = [
        worst_row_error(f.o, other_f.o, scale.o),
        worst_row_error(f.lse, other_f.lse, scale.lse),
        worst_row_error(g.dq, other_g.dq, scale.dq),
        worst_row_error(g.dk, other_g.dk, scale.dk),
        worst_row_error(g.dv, other_g.dv, scale.dv),
    ]
    assert max(errors) >= 1e-4


# The oracle itself ----------------------------------------------------------------------------------


def test_oracle_by_hand_one_row_of_two_keys():
    """Scores log 3 and 0, so p = 3/4 and 1/4; all gradients worked out on paper."""
    with mpmath.workdps(60):
        log3 = float(mpmath.log(3))
    q = np.array([[[[1.0]]]])
    k = np.array([[[[log3], [0.0]]]])
    v = np.array([[[[4.0], [8.0]]]])
    problem = Problem(q, k, v, scale=1.0)
    f = forward(problem)
    assert abs(f.o[0, 0, 0, 0] - 5) <= mpf("1e-15")  # 3/4 * 4 + 1/4 * 8
    assert abs(f.lse[0, 0, 0] - mpmath.log(4)) <= mpf("1e-15")
    dy, dlse = np.array([[[[2.0]]]]), np.array([[[0.5]]])
    g = gradients(problem, dy, dlse)
    # dp = (8, 16), delta = 10: ds = (3/4 * (-2 + 1/2), 1/4 * (6 + 1/2)) = (-9/8, 13/8)
    want = {"dq": [-9 / 8 * log3], "dk": [-9 / 8, 13 / 8], "dv": [1.5, 0.5]}
    for name, values in want.items():
        got = getattr(g, name).ravel()
        assert np.all(np.abs(to_float64(got) - np.array(values)) <= 1e-15), name


def test_oracle_by_hand_sinks_take_part_in_the_denominator_alone():
    """One key with score 0 and two sinks log 2 and 0: p = 1/4, o = v / 4, lse = log 4."""
    with mpmath.workdps(60):
        sinks = np.array([[float(mpmath.log(2)), 0.0]])
    zero, one = np.zeros((1, 1, 1, 1)), np.ones((1, 1, 1, 1))
    problem = Problem(zero, one, 8 * one, sinks=sinks)
    f = forward(problem)
    assert abs(f.o[0, 0, 0, 0] - 2) <= mpf("1e-15")
    assert abs(f.lse[0, 0, 0] - mpmath.log(4)) <= mpf("1e-15")
    g = gradients(problem, dy=one, dlse=np.array([[[1.0]]]))
    # do/dsink = -p_sink * o = -(1/2, 1/4) * 2; dlse/dsink = p_sink
    assert np.all(np.abs(to_float64(g.dsinks) - [[-0.5, -0.25]]) <= 1e-15)


def test_oracle_by_hand_soft_cap_is_applied_behind_scale_and_bias():
    zero, one = np.zeros((1, 1, 1, 1)), np.ones((1, 1, 1, 1))
    bias = np.array([[[[1.5]]]])
    problem = Problem(2 * one, 3 * one, one, scale=0.25, bias=bias, softcap=2.0)
    with mpmath.workdps(60):
        want = 2 * mpmath.tanh(mpf(3) / 2)  # z = 0.25 * 6 + 1.5 = 3
        slope = 1 - mpmath.tanh(mpf(3) / 2) ** 2
        assert abs(forward(problem).lse[0, 0, 0] - want) <= mpf("1e-55")
        g = gradients(problem, dy=zero, dlse=np.array([[[1.0]]]))
        assert abs(g.dbias[0, 0, 0, 0] - slope) <= mpf("1e-55")


DUAL_CASES = (
    "causal, first rows empty",
    "softcap with bias",
    "bias per head and key",
    "three sinks per head",
    "dropout by position",
    "very peaked rows",
    "every term at once",
)


@pytest.mark.parametrize("name", DUAL_CASES)
def test_oracle_finite_differences_equal_dual_numbers(name):
    data = data_of(name)
    problem, scale = problem_of(data), scale_of(data)
    measured = gradients(problem, data.dy, data.dlse)
    derived = gradients(problem, data.dy, data.dlse, derivative=dual_derivative)
    for tensor in ("dq", "dk", "dv", "dsinks", "dbias"):
        if getattr(measured, tensor) is None:
            continue
        rows = getattr(scale, tensor)
        with mpmath.workdps(60):
            for index in np.ndindex(getattr(measured, tensor).shape):
                error = abs(getattr(measured, tensor)[index] - getattr(derived, tensor)[index])
                row = rows[index] if rows.ndim == len(index) else rows[index[:-1]]
                assert error <= mpf("1e-45") * mpf(float(row)), (tensor, index)


@every_case
def test_oracle_masks_by_pair_and_by_array_agree(case):
    problem = problem_of(data_of(case.name))
    visible, keep = allowed(problem), all_keeps(problem)
    for index in np.ndindex(problem.scores_shape):
        assert bool(visible[index]) == may_attend(problem, *index), index
        assert bool(keep[index]) == keeps(problem, *index), index


def test_row_scale_by_hand():
    """Two keys with p = 1/2 each, dropout 1/2 that keeps the second."""
    q, k = np.array([[[[3.0, 0.0]]]]), np.array([[[[0.0, 5.0], [0.0, -5.0]]]])
    v, dy = np.array([[[[1.0], [-6.0]]]]), np.array([[[[-2.0]]]])
    dlse = np.array([[[0.5]]])
    bias = np.array([-1.0, -1.0])
    scale = row_scale(
        q, k, v, dy, dlse, scale=0.5, bias=bias, dropout_p=0.5, keep=np.array([False, True])
    )
    kappa = 2.0  # 1 + max(0.5 * 0 + |-1|)
    size_o = 0.5 * 2 * 6  # sum_j p~ |v|
    a = np.array([0.5 * (0 + 2 * size_o + 0.5), 0.5 * (2 * 2 * 6 + 2 * size_o + 0.5)])
    assert scale.o.item() == kappa * size_o
    assert scale.lse.item() == kappa + abs(np.log(2.0) - 1.0)
    assert scale.dq.item() == 0.5 * kappa * (a[0] * 5 + a[1] * 5)
    assert scale.dk.ravel().tolist() == [0.5 * kappa * a[0] * 3, 0.5 * kappa * a[1] * 3]
    assert scale.dv.ravel().tolist() == [0.0, kappa * 0.5 * 2 * 2]
    assert scale.dbias.tolist() == [kappa * a[0], kappa * a[1]]


def test_row_scale_of_an_empty_row_demands_zero():
    one = np.ones((1, 1, 1, 1))
    scale = row_scale(one, one, one, dy=one, mask=np.zeros((1, 1), dtype=bool))
    assert scale.o.item() == scale.dq.item() == scale.dk.item() == scale.dv.item() == 0.0
    assert scale.lse.item() == 1.0
    assert worst_row_error(one, one, scale.o) == 0.0
    assert worst_row_error(one * 1e-300, 0 * one, scale.o) == np.inf


@pytest.mark.parametrize(
    ("got", "want", "error"),
    [
        (np.nan, 1.0, np.inf),
        (1.0, np.nan, np.inf),
        (np.nan, np.nan, np.inf),
        (np.inf, 1.0, np.inf),
        (np.inf, -np.inf, np.inf),
        (-np.inf, -np.inf, 0.0),
        (3.0, 4.0, 0.5),
        (0.0, -0.0, 0.0),
    ],
)
def test_worst_row_error_never_lets_a_nan_or_an_infinity_through(got, want, error):
    arrays = [np.array([[1.0, x]]) for x in (got, want)]
    assert worst_row_error(*arrays, np.array([2.0])) == error
