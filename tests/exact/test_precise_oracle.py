"""oracle/precise.py held to the older oracle, to finite differences at 900 digits, and to float64."""

from dataclasses import replace

import mpmath
import numpy as np
import pytest
from oracle import mp_attention
from oracle.cases import CASES, draw
from oracle.exact_cases import everything, make, softcap
from oracle.precise import DIGITS, Problem, Reference, block_loss, loss, merge_row
from oracle.problem import Problem as OlderProblem
from oracle.problem import all_keeps, allowed
from oracle.problem import scale_of as older_scale_of
from oracle.row_scale import row_scale, worst_row_error

import ringspec as rs

TENSORS = ("o", "lse", "dq", "dk", "dv", "dsinks", "dbias")
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
# The older oracle differentiates every coordinate numerically; these stand for all.
SLOW_TO_DIFFERENTIATE = (
    "causal, first rows empty",
    "softcap with bias",
    "bias per head and key",
    "bias per query",
    "grouped heads",
    "rows with sinks only",
    "given keep mask",
    "every term at once",
)


def four_axes(array: np.ndarray) -> np.ndarray:
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def problem_of(data) -> Problem:
    """The same problem with its mask and keep bits as arrays."""
    older = OlderProblem(data.q, data.k, data.v, **data.options)
    options, H = data.options, data.q.shape[1]
    bias, sinks = options.get("bias"), options.get("sinks")
    return Problem(
        data.q,
        data.k,
        data.v,
        older_scale_of(older),
        visible=allowed(older),
        bias=None if bias is None else four_axes(np.asarray(bias, dtype=np.float64)),
        softcap=options.get("softcap"),
        sinks=None if sinks is None else np.asarray(sinks, dtype=np.float64).reshape(H, -1),
        keep=all_keeps(older),
        dropout_p=options.get("dropout_p", 0.0),
    )


def tensor(reference: Reference, name: str, shape: tuple[int, ...], part: str = "value"):
    result = np.empty(shape, dtype=object)
    for index in np.ndindex(shape):
        result[index] = getattr(reference, part)(name, index)
    return result


def largest_error(reference: Reference, name: str, want: np.ndarray):
    """In units of the row scale, of this oracle."""
    by_row = name in ("o", "dq", "dk", "dv")
    largest = mpmath.mpf(0)
    for index in np.ndindex(want.shape):
        got = reference.value(name, index)
        if got == want[index]:
            continue
        largest = max(
            largest,
            abs(got - want[index]) / reference.scale(name, index[:-1] if by_row else index),
        )
    return largest


def test_it_has_the_digits_that_the_check_needs():
    assert DIGITS >= 450


@every_case
def test_forward_agrees_with_the_older_oracle_to_100_digits(case):
    data = draw(case)
    older = OlderProblem(data.q, data.k, data.v, **data.options)
    reference, want = Reference(problem_of(data)), mp_attention.forward(older, digits=115)
    assert largest_error(reference, "o", want.o) <= mpmath.mpf("1e-110")
    assert largest_error(reference, "lse", want.lse) <= mpmath.mpf("1e-110")


@pytest.mark.parametrize("name", SLOW_TO_DIFFERENTIATE)
def test_gradients_agree_with_the_older_oracle_to_50_digits(name):
    data = draw(next(case for case in CASES if case.name == name))
    want = mp_attention.gradients(
        OlderProblem(data.q, data.k, data.v, **data.options), data.dy, data.dlse
    )
    reference = Reference(problem_of(data), data.dy, data.dlse)
    for tensor_name in ("dq", "dk", "dv", "dsinks", "dbias"):
        array = getattr(want, tensor_name)
        if array is None:
            continue
        if tensor_name == "dsinks":
            array = array.reshape(data.q.shape[1], -1)
        if tensor_name == "dbias":
            array = four_axes(array)
        assert largest_error(reference, tensor_name, array) <= mpmath.mpf("1e-50"), tensor_name


@every_case
def test_float64_and_the_float64_row_scale_agree(case):
    data = draw(case)
    reference = Reference(problem_of(data), data.dy, data.dlse)
    forward = rs.attention(data.q, data.k, data.v, **data.options)
    backward = rs.attention_backward(
        data.q, data.k, data.v, data.dy, dlse=data.dlse, **data.options
    )
    scales = row_scale(data.q, data.k, data.v, data.dy, data.dlse, **data.options)
    for name in TENSORS:
        got = getattr(forward if name in ("o", "lse") else backward, name)
        if got is None:
            continue
        scale = getattr(scales, name)
        if name == "dsinks":
            got, scale = (x.reshape(data.q.shape[1], -1) for x in (got, scale))
        if name == "dbias":
            got, scale = four_axes(got), four_axes(scale)
        want = tensor(reference, name, got.shape).astype(float)
        assert worst_row_error(got, want, scale) <= 2e-15, name
        want_scale = tensor(reference, name, scale.shape, "scale").astype(float)
        assert np.all(np.abs(scale - want_scale) <= 1e-13 * want_scale), name


# Finite differences of the whole loss, which holds no gradient formula ------------------------------

STEP_DIGITS, DIFFERENCE_DIGITS = 250, 900


def measured(problem: Problem, name: str, index: tuple[int, ...], loss_of) -> object:
    """d loss / d (one number of the problem) by a central difference with h = 1e-250."""
    ends = []
    for sign in (1, -1):
        context = mpmath.MPContext()
        context.dps = DIFFERENCE_DIGITS
        array = getattr(problem, name).astype(object)
        array[index] = context.mpf(float(array[index])) + sign * context.mpf(10) ** -STEP_DIGITS
        reference = Reference(replace(problem, **{name: array}), digits=DIFFERENCE_DIGITS)
        ends.append(loss_of(reference))
    return (ends[0] - ends[1]) * (ends[0].context.mpf(10) ** STEP_DIGITS) / 2


INPUT_OF = {"dq": "q", "dk": "k", "dv": "v", "dsinks": "sinks", "dbias": "bias"}


def some_indices(rng: np.random.Generator, shape: tuple[int, ...], number: int) -> list:
    flat = rng.choice(int(np.prod(shape)), min(number, int(np.prod(shape))), replace=False)
    return [tuple(int(x) for x in np.unravel_index(n, shape)) for n in flat]


def grouped_with_everything(rng: np.random.Generator):
    given = everything(rng, "float32")
    return given.problem, given.dy, given.dlse


def full_bias_with_softcap(rng: np.random.Generator):
    given = make(rng, "float64", softcap=0.9, bias=rng.standard_normal((1, 2, 5, 6)), dropout_p=0.1)
    return given.problem, given.dy, given.dlse


@pytest.mark.parametrize(
    "maker",
    (grouped_with_everything, pytest.param(full_bias_with_softcap, marks=pytest.mark.slow)),
)
def test_gradients_equal_finite_differences_to_450_digits(maker):
    rng = np.random.default_rng(3)
    problem, dy, dlse = maker(rng)
    reference = Reference(problem, dy, dlse, digits=DIFFERENCE_DIGITS)
    for name, source in INPUT_OF.items():
        array = getattr(problem, source)
        if array is None:
            continue
        for index in some_indices(rng, array.shape, 2):
            if not np.isfinite(array[index]):
                continue
            want = measured(problem, source, index, lambda r: loss(r, dy, dlse))
            error = abs(reference.value(name, index) - want)
            by_row = name in ("dq", "dk", "dv")
            scale = reference.scale(name, index[:-1] if by_row else index)
            assert error <= mpmath.mpf("1e-450") * (1 + scale), (name, index)


def test_block_gradients_equal_finite_differences_to_450_digits():
    rng = np.random.default_rng(4)
    given = everything(rng, "float32")
    problem, B, H, Sq = given.problem, *given.problem.shape[:3]
    lse, delta = rng.standard_normal((B, H, Sq)), rng.standard_normal((B, H, Sq))
    lse[0, 1, 2] = -np.inf

    def block(problem, digits=DIFFERENCE_DIGITS, **terms):
        return Reference(problem, lse_given=lse, digits=digits, **terms)

    reference = block(problem, dy=given.dy, delta_given=delta)
    for name, source in INPUT_OF.items():
        for index in some_indices(rng, getattr(problem, source).shape, 2):
            if not np.isfinite(getattr(problem, source)[index]):
                continue
            want = measured(
                problem, source, index, lambda r: block_loss(block(r.problem), given.dy, delta)
            )
            by_row = name in ("dq", "dk", "dv")
            scale = reference.scale(name, index[:-1] if by_row else index)
            error = abs(reference.value(name, index) - want)
            assert error <= mpmath.mpf("1e-450") * (1 + scale), (name, index)
    assert reference.value("dq", (0, 1, 2, 0)) == 0 and reference.row(0, 1, 2).p == {}


# Radius, merge, errors that are seen ----------------------------------------------------------------


def test_the_radius_covers_the_difference_to_a_longer_evaluation():
    rng = np.random.default_rng(5)
    for maker in (everything, softcap):
        given = maker(rng, "float32")
        short, long = (Reference(given.problem, given.dy, given.dlse, digits=n) for n in (60, 500))
        for name in ("o", "lse", "dq", "dk", "dv"):
            shape = (
                short.problem.shape[:3]
                if name == "lse"
                else getattr(
                    given.problem, {"o": "q", "dq": "q", "dk": "k", "dv": "v"}[name]
                ).shape[:3]
                + (2,)
            )
            for index in some_indices(rng, shape, 6):
                value = long.value(name, index)
                if mpmath.isfinite(value):
                    error = abs(short.value(name, index) - value)
                    assert error <= short.radius(name, index), (name, index)


def test_merge_agrees_with_the_older_oracle():
    rng = np.random.default_rng(6)
    lse = 5 * rng.standard_normal((3, 1, 2, 4))
    lse[rng.random(lse.shape) < 0.3] = -np.inf
    lse[:, 0, 1, 3] = -np.inf
    o = rng.standard_normal((*lse.shape, 2))
    want = mp_attention.merge([(o[n], lse[n]) for n in range(3)])
    for index in np.ndindex(lse.shape[1:]):
        got = merge_row(o, lse, index)
        assert got.lse == want.lse[index] or abs(got.lse - want.lse[index]) <= 1e-55
        assert all(abs(x - y) <= 1e-55 for x, y in zip(got.o, want.o[index], strict=True))


def test_a_sum_over_some_rows_is_a_part_of_the_whole():
    given = everything(np.random.default_rng(7), "float32")
    reference = Reference(given.problem, given.dy, given.dlse)
    for name, index in (("dsinks", (1, 0)), ("dbias", (0, 2, 0, 1)), ("dk", (0, 1, 2, 0))):
        parts = [reference.value(name, index, rows=rows) for rows in ((0, 2), (1,), (3,))]
        assert abs(sum(parts) - reference.value(name, index)) <= mpmath.mpf("1e-480")
        assert parts[0] != 0 or name == "dk"
