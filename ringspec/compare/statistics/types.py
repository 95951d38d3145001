"""The types that the statistical tests share: a prediction of the noise, an allowance, the result of a test.

All tests have the same **null hypothesis**: the error of element i is a systematic error b_i plus noise n_i.

- Each n_i is a linear combination of independent rounding errors, each bounded and symmetric. Every weighted sum of n
  is therefore sub-Gaussian with its own variance: for u uniform on [-a, a], whose variance is a^2 / 3,
  ``E exp(t u) = sinh(t a) / (t a) <= exp(t^2 a^2 / 6)``. Hence ``P(|sum c n| >= z sd) <= 2 exp(-z^2 / 2)`` for
  any number of terms, without a limit theorem.
- The standard deviation of n_i is at most ``high`` times the predicted value sd_i, because predictions are not exact.
- The systematic error of a correct kernel is limited: ``|b_i| <= slope * size_i + share * sd_i``. It occurs if the
  softmax scale is itself rounded. Rounding to nearest also causes it, in the second order of the unit roundoff. Here
  size_i = max(|truth_i|, |d result_i / d log scale|); for lse it is at least 1, because an absolute error of lse is a
  relative error of l.

``high``, ``slope`` and ``share`` are the *allowance*. :func:`allowance_for` derives it from a recipe, which lists
the formats to which a kernel rounds. Because of the allowance, more elements do not make a false alarm more likely.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ringspec.formats import unit_roundoff
from ringspec.recipes import Recipe
from ringspec.recipes import recipe as recipe_of

__all__ = ["Allowance", "Test", "allowance_for"]

Array = NDArray[np.float64]
Integers = NDArray[np.int64]
RATE = 1e-9  # false alarms per run, all tests together
# Tensors whose errors are independent from row to row, because a row's roundings affect only that row. Keys
# share the errors of their queries' lse and dy_o_sum.
ROW_TENSORS = ("o", "lse", "dq")

FORWARD_POINTS = ("p", "block_o", "merge", "carried_o", "outputs")
STATISTICS_POINTS = ("scores", "statistics", "lse")
BACKWARD_POINTS = ("backward_lse", "dy_o_products", "delta", "ds", "block_gradients", "gradients")
DQ_POINTS = (*FORWARD_POINTS, *BACKWARD_POINTS, "tile_dq", "carried_dq")
DK_POINTS = (*FORWARD_POINTS, *BACKWARD_POINTS, "tile_dkv", "carried_dkv")
DV_POINTS = ("p", "backward_lse", "tile_dkv", "block_gradients", "carried_dkv", "gradients")
CARRIED = ("block_o", "merge", "carried_o", "block_gradients", "carried_dq", "carried_dkv")
POINTS = {
    "o": (*STATISTICS_POINTS[:2], *FORWARD_POINTS),
    "lse": STATISTICS_POINTS,
    "dq": DQ_POINTS,
    "dk": DK_POINTS,
    "dv": DV_POINTS,
    "dsinks": DQ_POINTS,
    "dbias": DQ_POINTS,
}


class Predicted(Protocol):
    """The predicted noise of one problem; :mod:`ringspec.compare.noise.predict` computes it."""

    @property
    def sd(self) -> Mapping[str, Array]:
        """The standard deviation of each element's error, by tensor."""
        ...

    @property
    def mean(self) -> Mapping[str, Array]:
        """The predicted mean error; mostly 0, because rounding to nearest has no mean error."""
        ...

    @property
    def drift(self) -> Mapping[str, Array]:
        """Errors whose value and sign are known, although ``sd`` counts them as random; they add up in sums."""
        ...

    def variance_of_sums(self, name: str, weights: Array, labels: Any = None) -> Array:
        """Return Var(sum of weights * error) for each label, including all errors that elements share."""
        ...


@dataclass(frozen=True)
class Allowance:
    """The deviations from the predicted noise that a correct kernel may have.

    ``slope``, ``share``  bounds of the mean error of element i, in units of size_i and of sd_i
    ``low``, ``high``     least and greatest root mean square of error / sd, for a kernel that rounds as its recipe says
    ``last``              the format in which the kernel returns the result
    """

    slope: float = 0.0
    share: float = 0.0
    low: float = 1.0
    high: float = 1.0
    last: str = "float64"


@dataclass(frozen=True)
class Test:
    r"""The result of one test of one part (stratum) of a tensor.

    ``name``       'exact', 'finite', 'slope', 'mean', 'temperature', 'excess', 'outliers',
                   'serial d', 'serial token', 'growth'
    ``stratum``    'all', or a part of the tensor such as 'head 2', 'step 1', 'negative truth'
    ``statistic``  'slope', 'mean' and 'temperature': the weighted sum of errors, in predicted standard deviations.
                   'excess' and the serial tests: the mean of (error / sd)^2. 'outliers': the largest \|error\| / sd.
                   'exact' and 'finite': a count. 'growth': the slope of the regression in standard deviations
    ``p``          the p-value for a kernel with exactly the predicted noise; an upper bound of it for 'excess', the
                   serial tests and 'outliers'
    ``p_allowed``  an upper bound of the p-value under the null hypothesis with its allowance; it decides
                   whether an alarm is raised
    ``effect``     size of the deviation: the slope, the mean, the relative error of the scale, or the exponent of
                   'growth'; for the other tests, the statistic itself
    ``count``      number of elements in the stratum
    """

    __test__ = False  # so that pytest does not collect this class

    name: str
    tensor: str
    stratum: str
    statistic: float
    p: float
    p_allowed: float
    effect: float = 0.0
    count: int = 0
    allowance: Allowance = Allowance()


def allowance_for(which: str | Recipe, tensor: str, workers: int = 1) -> Allowance:
    """Return the allowance of a tensor under the recipe ``which``.

    It depends on the coarsest format, of unit roundoff u, to which the tensor or an intermediate result is rounded.

    If this is a 16-bit or 8-bit format, ``low`` and ``high`` are 0.85 and 1.15, and ``share`` is u / 4. ``slope`` is
    u^2 (1.5e-5 in bfloat16, 2.4e-7 in float16) plus 8 times the unit roundoff of the accumulators. One rounding to
    nearest has a slope of about -0.35 u^2, because more of the numbers that round to a power of two lie above it than
    below, and a result goes through two or three such roundings. If partial results are rounded, every ring step adds
    as many roundings, so u^2 is multiplied by ``workers``.

    In float32 and float64 the order of accumulation is not declared, and some adders truncate. Therefore ``low`` and
    ``high`` are 0.5 and 2, ``slope`` is 8 u, and ``share`` is 0.5.

    >>> allowance_for("bf16", "o").high, allowance_for("bf16", "lse").high
    (1.15, 2.0)
    >>> [round(allowance_for(name, "dq", 8).slope / 2.0**-16) for name in ("bf16", "bf16_partials")]
    [1, 8]
    """
    used = recipe_of(which)
    u = {point: unit_roundoff(getattr(used, point)) for point in POINTS[tensor]}
    coarsest, accumulator = max(u.values()), unit_roundoff(used.products)
    last = {"o": used.outputs, "lse": used.lse}.get(tensor, used.gradients)
    if coarsest <= unit_roundoff("float32"):
        return Allowance(8 * max(coarsest, accumulator), 0.5, 0.5, 2.0, last)
    carried = max((u[point] for point in CARRIED if point in u), default=0.0)
    roundings = max(workers, 1) if carried == coarsest else 1
    slope = roundings * coarsest * coarsest + 8 * accumulator
    return Allowance(slope, coarsest / 4, 0.85, 1.15, last)
