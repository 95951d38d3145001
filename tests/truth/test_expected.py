"""Which truth inputs of one's own are given, and that float64 is held against exact values before."""

import numpy as np
import pytest

from ringspec.errors import UndecidedError
from ringspec.problem.options import check
from ringspec.truth import expected
from ringspec.truth.expected import expected_of
from ringspec.truth.problem import Upstream


def asked(tokens=12):
    draw = np.random.default_rng(5).standard_normal
    q, k, v, dy = (draw((1, 2, tokens, 4)) for _ in range(4))
    return check(q, k, v, {"causal": True}), Upstream(dy)


def test_the_limit_counts_products_and_decides_which_truth():
    problem, upstream = asked()
    terms = 2 * 12 * 12 * (4 + 4)
    assert expected_of(problem, upstream, limit=terms).source == "exact"
    assert expected_of(problem, upstream, limit=terms - 1).source.startswith("float64, 4 rows")


@pytest.mark.parametrize("name", ["o", "lse", "dq"])
def test_sampled_rows_are_those_of_the_whole_evaluation(monkeypatch, name):
    """A fault in joining the parts of a problem would not be there in the sampled rows alone."""
    problem, upstream = asked()
    real = expected.in_float64

    def off(some, *rest):
        values, scale = real(some, *rest)
        if some is problem:
            values[name] = values[name] * (1 + 1e-9)
        return values, scale

    expected_of(problem, upstream, limit=0)
    monkeypatch.setattr(expected, "in_float64", off)
    with pytest.raises(UndecidedError, match=f"exact {name}"):
        expected_of(problem, upstream, limit=0)
