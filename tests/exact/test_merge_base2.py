"""Merges of lse to base 2: each result is that of mpmath rounded once, also where weights are equal or vanish."""

import mpmath
import numpy as np
import pytest
from oracle.decide import nearest, to_odd
from refusals import refuses

from ringspec import exact
from ringspec.errors import NonFiniteError, OptionError
from ringspec.exact import merge_base2

FORMATS = ("float64", "float32", "bfloat16")
INF = np.inf


def merged(o, lse):
    """mpmath's o, lse and row scales of one row; None for a row without parts."""
    have = np.flatnonzero(np.isfinite(lse))
    weights = [mpmath.power(2, mpmath.mpf(lse[n])) for n in have]
    total = mpmath.fsum(weights)
    if not have.size:
        return None
    log = mpmath.log(total) / mpmath.log(2)
    means, sizes = (
        [mpmath.fsum(w * mpmath.mpf(v) for w, v in zip(weights, x[have, d], strict=True)) / total
         for d in range(o.shape[1])]
        for x in (o, np.abs(o))
    )  # fmt: skip
    kappa = 1 + max(abs(mpmath.mpf(lse[n])) for n in have)
    return means, log, kappa * max(sizes), kappa + abs(log)


@pytest.mark.parametrize("spread", [1.0, 30.0, 1000.0])
def test_results_and_row_scales_are_those_of_mpmath_rounded_once(spread):
    rng = np.random.default_rng(int(spread))
    o, lse = rng.normal(size=(5, 1, 2, 4, 3)), spread * rng.normal(size=(5, 1, 2, 4))
    lse[1, 0, 0] = lse[:, 0, 1, 2] = lse[4, 0, 1, 3] = -INF
    lse[:4, 0, 1, 3] = lse[0, 0, 1, 3]
    truth = exact.merge(o, lse, FORMATS, scales=True, base=2)
    with mpmath.workprec(4000):
        for row in np.ndindex(1, 2, 4):
            want = merged(o[(slice(None), *row)], lse[(slice(None), *row)])
            if want is None:
                assert truth.tensors["lse"]["float64"][row] == -INF
                assert not truth.tensors["o"]["float64"][row].any()
                continue
            means, log, *scales = want
            assert truth.tensors["lse"]["float64"][row] == float(log)
            assert truth.tensors["o"]["float64"][row].tolist() == [float(x) for x in means]
            assert [truth.scales[name][row] for name in ("o", "lse")] == [float(x) for x in scales]
            for name in FORMATS:
                for got, x in zip(truth.tensors["o"][name][row], means, strict=True):
                    assert float(got) == nearest(to_odd(x), name)


def test_equal_weights_give_exact_results_also_where_they_are_ties():
    """(1 + 1.0078125) / 2 lies between two bfloat16 numbers, and log2 of four parts is lse + 2."""
    o = np.array([1.0, 1.0078125, 1.0, 1.0078125]).reshape(4, 1, 1, 1, 1)
    truth = exact.merge(o, np.full((4, 1, 1, 1), 0.375), ("float64", "bfloat16"), base=2)
    assert truth.tensors["o"]["float64"].item() == 1.00390625
    assert float(truth.tensors["o"]["bfloat16"].item()) == 1.0
    assert truth.tensors["lse"]["float64"].item() == 2.375


def outside(rows, low=24, high=256):
    """The number of middles with few bits that are further from those with many than their radii allow."""
    count = 0
    for o, x in rows:
        lse = [value << (high - low) for value in x]
        coarse = merge_base2.merged_row(o, x, low, low)
        fine = merge_base2.merged_row(o, lse, high, high)
        pairs = zip(
            (*coarse[0], coarse[2]), (*coarse[1], coarse[3]), (*fine[0], fine[2]), strict=True
        )
        for middle, radius, exact_middle in pairs:
            count += abs((middle << (high - low)) - exact_middle) > (radius << (high - low)) + (
                1 << 64
            )
    return count


def test_intervals_of_few_bits_contain_the_values_and_smaller_ones_do_not(monkeypatch):
    rng = np.random.default_rng(2)
    rows = [
        (rng.integers(-99, 99, (n, 3)).tolist(), rng.integers(-(9 << 24), 9 << 24, n).tolist())
        for n in rng.integers(2, 9, 200)
    ]
    assert outside(rows) == 0
    monkeypatch.setattr(merge_base2, "EXP_ERROR", -1)  # eps = 0
    monkeypatch.setattr(merge_base2, "LOG_ERROR", -1)
    assert outside(rows) > 0


def test_another_base_or_an_lse_that_is_no_number_is_refused():
    o, lse = np.zeros((2, 1, 1, 1, 1)), np.zeros((2, 1, 1, 1))
    with refuses((OptionError, "option")):
        exact.merge(o, lse, base=10)
    with refuses((NonFiniteError, "non-finite")):
        exact.merge(o, lse + INF, base=2)
