"""Whole-tensor statistics: test whether errors look like the rounding noise that is predicted for a kernel.

The prediction follows from the kernel's recipe, which says where the kernel rounds. A tolerance limits single errors;
sums of errors show more. Over 10^5 elements, a systematic error far below the noise of one element adds up, while the
noise of the sum is predictable. :func:`examine` runs all tests of one tensor, over the whole tensor and over its parts
(:mod:`ringspec.compare.statistics.strata`). :func:`alarms` selects the test results that a correct kernel produces only
with probability ``rate``.

======================  =======================================================================
exact, finite           elements without noise are correct; every error is finite
slope, mean             the error is not proportional to the true value, and has no common sign
temperature             the error is not that of a wrong softmax scale
excess                  the errors of no part are larger than predicted
outliers                no single error is larger than predicted
serial d, serial token  errors of neighbours are not more alike than predicted
growth                  the error grows with the number of workers no more than predicted (several runs)
======================  =======================================================================

:mod:`ringspec.compare.statistics.types` states the null hypothesis, and the allowance: the deviations from the
prediction that correct kernels may have. The tests are in :mod:`ringspec.compare.statistics.linear` and
:mod:`ringspec.compare.statistics.spread`. The false-alarm rate applies to a whole run: each test gets rate / count,
where count is the number of tests in the run (the Bonferroni correction, which does not assume independent tests).
docs/conform/noise.md says what is predicted and allowed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ringspec.compare.statistics.linear import linear_tests
from ringspec.compare.statistics.spread import serial_tests, spread_tests
from ringspec.compare.statistics.strata import Stratum
from ringspec.compare.statistics.types import (
    RATE,
    Allowance,
    Array,
    Predicted,
    Test,
)
from ringspec.errors import OptionError, ShapeError, shown

__all__ = ["alarms", "errors_of", "examine", "in_words"]


def errors_of(got: Array, truth: Array) -> Array:
    """Return got - truth, or 0 where both are the same infinity; both are float64 arrays of one shape.

    >>> errors_of(np.array([-np.inf, 1.5]), np.array([-np.inf, 1.0])).tolist()
    [0.0, 0.5]
    """
    with np.errstate(invalid="ignore"):
        return np.where(got == truth, 0.0, got - truth)


def examine(
    name: str,
    error: Array,
    truth: Array,
    noise: Predicted,
    strata: Sequence[Stratum] = (),
    *,
    allowance: Allowance,
    direction: Array | None = None,
    merging: Array | float = 0.0,
) -> tuple[Test, ...]:
    """Run all tests of the tensor ``name``, over the whole tensor and over the parts in ``strata``.

    ``error`` = got - truth (:func:`errors_of`) and ``truth`` are float64 of one shape: [B, H, S, d], or
    [B, H, S] for lse. dsinks and dbias have other shapes, and get only the tests of the whole tensor. ``direction``:
    the derivative d truth / d log(scale), for the temperature test. ``allowance``: the result of
    :func:`ringspec.compare.statistics.types.allowance_for` for the recipe and the tensor. ``merging``: an absolute
    error that float32 results may have beyond the noise, because a recipe does not say how partial results are merged;
    broadcastable to ``error``. Raises :class:`~ringspec.errors.ShapeError` if shapes differ.

    All tests first subtract the predicted mean error, ``noise.mean``. An element whose error is not finite raises an
    alarm, and the other tests ignore it.
    """
    shapes = {error.shape, truth.shape, noise.sd[name].shape}
    if len(shapes) != 1 or (direction is not None and direction.shape != error.shape):
        raise ShapeError(
            f"error, truth, predicted sd and direction of {name} of one shape",
            ", ".join(
                str(x.shape) for x in (error, truth, noise.sd[name], direction) if x is not None
            ),
            "pass them in global order",
        )
    finite = np.isfinite(error)
    tests = [flaw("finite", name, ~finite, allowance)]
    error = np.where(finite, error - noise.mean.get(name, 0.0), 0.0)
    if direction is not None:
        direction = np.where(np.isfinite(direction), direction, 0.0)
    tests.append(flaw("exact", name, (noise.sd[name] == 0) & (error != 0), allowance))
    whole = name not in ("o", "lse", "dq", "dk", "dv")
    strata = () if whole else strata
    steady = error - noise.drift.get(name, 0.0)
    tests += linear_tests(name, steady, truth, noise, strata, allowance, direction)
    if not whole:
        # Random signs that depend only on the problem.
        rng = np.random.default_rng([zlib.crc32(name.encode()), *error.shape])
        tests += spread_tests(name, error, truth, noise, strata, allowance, direction, rng, merging)
        tests += serial_tests(name, steady, truth, noise, allowance, direction, rng)
    return tuple(tests)


def flaw(kind: str, tensor: str, wrong: NDArray[np.bool_], allowance: Allowance) -> Test:
    """Return the result of a test that involves no noise: an alarm if any element is ``wrong``."""
    count = int(wrong.sum())
    p = 0.0 if count else 1.0
    return Test(kind, tensor, "all", float(count), p, p, float(count), wrong.size, allowance)


def alarms(tests: Iterable[Test], rate: float = RATE, count: int | None = None) -> tuple[Test, ...]:
    """Return the tests that reject the null hypothesis, the strongest first.

    ``rate``: probability of a false alarm in the whole run. ``count``: number of tests in the run (default: the number
    of ``tests``). Raises OptionError for a rate that is not between 0 and 1.

    >>> tests = [Test("slope", "o", "all", z, p, p) for z, p in ((1.0, 0.3), (9.0, 1e-18))]
    >>> [test.statistic for test in alarms(tests)]
    [9.0]
    """
    given = tuple(tests)
    if not 0 < rate < 1:
        raise OptionError("rate between 0 and 1", shown(rate), "pass rate=1e-9")
    count = max(len(given), 1) if count is None else count
    raised = [test for test in given if not test.p_allowed > rate / count]
    return tuple(sorted(raised, key=lambda test: (test.p_allowed, -abs(test.statistic))))


def in_words(test: Test) -> str:
    """Return the result of a test as one line of text.

    >>> in_words(Test("slope", "dq", "head 1", 33.2, 1e-99, 1e-90, effect=1.02e-4))
    'dq, head 1: slope of error on truth 1.02e-04, 33.2 predicted standard deviations'
    """
    where = f"{test.tensor}, {test.stratum}"
    what = {
        "slope": "slope of error on truth {0:.2e}, {1:.1f} predicted standard deviations",
        "mean": "mean error {0:.2e}, {1:.1f} predicted standard deviations",
        "temperature": "as if the scale were off by {0:.2e}, {1:.1f} predicted standard deviations",
        "excess": "variance {1:.3g} times the predicted one",
        "serial d": "errors agree along d: variance of row sums {1:.3g} times the predicted one",
        "serial token": "errors agree along tokens: variance of sums {1:.3g} times the predicted one",
        "outliers": "an error of {1:.1f} predicted standard deviations",
        "growth": "rms error grows as W^{0:.2f} beyond the prediction",
        "exact": "{1:.0f} elements without rounding noise differ",
        "finite": "{1:.0f} errors are infinite or NaN",
    }[test.name]
    return f"{where}: {what.format(test.effect, test.statistic)}"
