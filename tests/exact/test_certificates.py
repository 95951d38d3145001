"""Every interval of ringspec.exact holds the true value of mpmath, and a bound made smaller is seen.

At F = 96 the error of each step stands far above that of the oracle, so a step that the bound forgets
shows itself here and not only in the rare element whose rounding it would change.
"""

import mpmath
import numpy as np
import pytest
from oracle.exact_cases import FEATURES, Given, Sizes, everything, make, plain, softcap
from oracle.hard_cases import HARD
from oracle.precise import Problem, Reference

from ringspec.exact import Problem as ExactProblem
from ringspec.exact import evaluate, head, logits, softmax
from ringspec.exact.evaluate import (
    Groups,
    Seeds,
    backward_balls,
    block_backward_balls,
    forward_balls,
)
from ringspec.exact.integers import fixed
from ringspec.exact.logits import prepare
from ringspec.exact.rounding import Ball
from ringspec.exact.row_scale import scale_balls

MAKERS = (*FEATURES, *HARD)
every_precision = pytest.mark.parametrize("bits", (96, 256))


def exact_problem(problem: Problem) -> ExactProblem:
    return ExactProblem(**vars(problem))


def balls_of(given: Given, bits: int, groups: Groups | None = None) -> dict[str, Ball]:
    return backward_balls(prepare(exact_problem(given.problem)), seeds_of(given), bits, groups)


def seeds_of(given: Given) -> Seeds:
    dlse = np.zeros(given.dy.shape[:3]) if given.dlse is None else given.dlse
    return Seeds(fixed(given.dy), fixed(dlse))


def worst(balls: dict[str, Ball], value, radius) -> float:
    """The largest error of a middle in units of its radius; the oracle's own radius counts too.

    `value(name, index)` and `radius(name, index)` are the oracle's. An exact middle has radius 0.
    """
    largest = 0.0
    for name, ball in balls.items():
        for index in np.ndindex(ball.middle.shape):
            true = value(name, index)
            if true == -mpmath.inf:  # an empty row is no interval
                continue
            error = abs(true - true.context.mpf(int(ball.middle[index])) / 2**ball.bits)
            error -= radius(name, index)
            if error > 0:
                claim = true.context.mpf(int(ball.radius[index])) / 2**ball.bits
                largest = max(largest, float(error / claim) if claim else np.inf)
    return largest


def worst_of(given: Given, bits: int) -> float:
    reference = Reference(given.problem, given.dy, given.dlse)
    return worst(balls_of(given, bits), reference.value, reference.radius)


@pytest.mark.parametrize(
    ("maker", "bits"),
    [
        pytest.param(maker, bits, marks=() if bits == 96 else pytest.mark.slow)
        for maker in MAKERS
        for bits in (96, 256)
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_every_interval_holds_the_true_value(maker, bits):
    assert worst_of(maker(np.random.default_rng(11), "bfloat16"), bits) <= 1


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
def test_every_interval_of_a_row_scale_holds_the_true_value(maker):
    bits = 96
    given = maker(np.random.default_rng(12), "float32")
    reference = Reference(given.problem, given.dy, given.dlse)
    balls = scale_balls(prepare(exact_problem(given.problem)), seeds_of(given), bits, None)
    assert worst(balls, reference.scale, lambda *at: reference.slack * reference.scale(*at)) <= 1


@every_precision
def test_forward_and_backward_have_the_same_intervals_of_o_and_lse(bits):
    given = everything(np.random.default_rng(13), "float32")
    forward = forward_balls(prepare(exact_problem(given.problem)), bits)
    backward = balls_of(given, bits)
    for name, ball in forward.items():
        assert ball.bits == backward[name].bits
        assert (ball.middle == backward[name].middle).all()
        assert (ball.radius == backward[name].radius).all()


@every_precision
@pytest.mark.parametrize("shift", (-30.0, 0.0, 0.25))
@pytest.mark.parametrize("maker", (everything, softcap, plain))
def test_every_interval_of_a_block_backward_holds_the_true_value(maker, shift, bits):
    """With a shift of -30 the given lse makes P about e**30."""
    given = maker(np.random.default_rng(14), "float32")
    shape = given.dy.shape[:3]
    lse = np.full(shape, 1.5) + shift
    lse[0, 1, 2] = -np.inf
    delta = np.random.default_rng(15).standard_normal(shape)
    prepared = prepare(exact_problem(given.problem))
    by = evaluate.given(lse, delta)
    balls = block_backward_balls(prepared, fixed(given.dy), by, bits, None)
    reference = Reference(given.problem, given.dy, lse_given=lse, delta_given=delta)
    assert worst(balls, reference.value, reference.radius) <= 1


# Bounds made smaller are seen -------------------------------------------------------------------------


def smaller_claim_of_exp(monkeypatch):
    monkeypatch.setattr(softmax, "EXP_ERROR", 0)


def smaller_claim_of_log(monkeypatch):
    monkeypatch.setattr(softmax, "LOG_ERROR", 0)
    monkeypatch.setattr(softmax, "EXP_ERROR", 0)


def exp_off_by_a_few_units(monkeypatch):
    """40 units beyond the claim, in the larger exponentials."""
    right = softmax.exp
    monkeypatch.setattr(
        softmax, "exp", lambda x, b, out: [y - 40 * (y >> (out - 1)) for y in right(x, b, out)]
    )


def log_off_by_a_few_units(monkeypatch):
    right = softmax.log
    monkeypatch.setattr(softmax, "log", lambda z, bits: [x + 200 for x in right(z, bits)])


def tanh_off_by_a_few_units(monkeypatch):
    right = logits.tanh

    def wrong(*arguments):
        capped = right(*arguments)
        return type(capped)([t + (1 << 40) for t in capped.t], capped.slope, capped.bits)

    monkeypatch.setattr(logits, "tanh", wrong)


def slope_off_by_a_few_units(monkeypatch):
    right = logits.tanh

    def wrong(*arguments):
        capped = right(*arguments)
        return type(capped)(capped.t, [w - (1 << 40) for w in capped.slope], capped.bits)

    monkeypatch.setattr(logits, "tanh", wrong)


def a_forgotten_error_of_the_products_with_p(monkeypatch):
    monkeypatch.setattr(head, "masked_sums", lambda mask, x: 0 * right_masked_sums(mask, x))


right_masked_sums = head.masked_sums


def a_forgotten_error_of_dy_o_sum(monkeypatch):
    """c as if it were exact, and P: only the cut of T is left."""
    right = head.score_gradient

    def wrong(weights, by):
        t = right(weights, by)
        return type(t)(t.middle, np.minimum(t.radius, 2), t.bits)

    monkeypatch.setattr(head, "score_gradient", wrong)


def a_forgotten_error_of_the_division(monkeypatch):
    """The quotient moved by one unit, its radius left alone but for what came before it."""
    right = head.divide

    def wrong(ball, kept):
        quotient = right(ball, kept)
        if quotient is ball:
            return ball
        return Ball(quotient.middle, quotient.radius // 2**20, quotient.bits)

    monkeypatch.setattr("ringspec.exact.evaluate.divide", wrong)


BROKEN = (
    smaller_claim_of_exp,
    smaller_claim_of_log,
    exp_off_by_a_few_units,
    log_off_by_a_few_units,
    tanh_off_by_a_few_units,
    slope_off_by_a_few_units,
    a_forgotten_error_of_the_products_with_p,
    a_forgotten_error_of_dy_o_sum,
    a_forgotten_error_of_the_division,
)


def several_problems() -> list[Given]:
    rng = np.random.default_rng(16)
    givens = [everything(rng, "float32"), softcap(rng, "float32"), make(rng, "float64")]
    # One key dominates: the errors of all the others add up in a sum of about 1.
    givens.append(make(rng, "float32", Sizes(H=2, Sq=1, Sk=50, D=1, Dv=1), logits=30.0))
    return givens


@every_precision
def test_the_problems_of_the_broken_bounds_are_within_the_right_ones(bits):
    assert max(worst_of(given, bits) for given in several_problems()) <= 1


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_bound_made_smaller_or_a_wrong_digit_is_seen(broken, monkeypatch):
    broken(monkeypatch)
    assert any(worst_of(given, 96) > 1 for given in several_problems())


def test_the_radii_are_not_far_larger_than_the_errors():
    """A radius of 1000 times the error would make the certificate true and of little worth."""
    rng = np.random.default_rng(17)
    for name in ("float32", "float64"):
        assert worst_of(make(rng, name), 96) >= 1e-3
