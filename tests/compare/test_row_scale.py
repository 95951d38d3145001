"""ringspec.compare.row_scale against the oracle's own, which was written apart from it."""

import numpy as np
import pytest
from oracle.cases import CASES, draw
from oracle.row_scale import row_scale as oracle_row_scale
from oracle.row_scale import worst_row_error

from ringspec.compare.row_scale import relative_errors, row_errors, row_scale
from ringspec.problem.options import check
from ringspec.truth.dense import sums_of
from ringspec.truth.problem import Upstream

NAMES = ("o", "lse", "dq", "dk", "dv", "dsinks")


def sums(data):
    """Absolute sums of a problem."""
    problem = check(data.q, data.k, data.v, data.options)
    return sums_of(problem, Upstream(data.dy, data.dlse))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_scale_is_the_oracles(case):
    data = draw(case)
    ours = row_scale(sums(data))
    theirs = oracle_row_scale(data.q, data.k, data.v, data.dy, data.dlse, **data.options)
    for name in NAMES:
        got, want = getattr(ours, name), getattr(theirs, name)
        if want is None:
            assert got is None
            continue
        want = want.reshape(got.shape)
        # lse alone has rounding errors in common with nothing; 1e-12 tells any wrong term.
        assert np.all(np.abs(got - want) <= 1e-12 * want), name


def test_an_empty_row_has_scale_zero_and_must_be_exact():
    data = draw(next(case for case in CASES if case.name == "nothing visible"))
    scale = row_scale(sums(data))
    assert not scale.o.any() and not scale.dq.any() and not scale.dk.any() and not scale.dv.any()
    assert np.all(scale.lse == 1.0)
    assert relative_errors(np.array([1e-300]), np.array([0.0])).tolist() == [np.inf]


def test_errors_are_those_of_the_worst_element_and_keep_nan():
    got = np.zeros((1, 1, 3, 2))
    want = np.zeros((1, 1, 3, 2))
    got[0, 0, 0, 1], want[0, 0, 1, 0], got[0, 0, 2, 0] = 3.0, -4.0, np.nan
    errors = row_errors(got, want)
    assert errors[0, 0, :2].tolist() == [3.0, 4.0]
    assert np.isnan(errors[0, 0, 2])
    assert not relative_errors(errors, np.ones(errors.shape)).max() <= 1e300
    scale = np.array([[[2.0, 2.0, 1.0]]])
    finite = relative_errors(errors, scale)[..., :2].max()
    assert finite == worst_row_error(got[:, :, :2], want[:, :, :2], scale[..., :2]) == 2.0


def test_equal_infinities_are_no_error_and_others_are():
    infinite = np.array([[[-np.inf, -np.inf, 1.0]]])
    assert row_errors(infinite, infinite).max() == 0.0
    other = np.array([[[-np.inf, 1.0, -np.inf]]])
    assert row_errors(infinite, other).tolist() == [[[0.0, np.inf, np.inf]]]
