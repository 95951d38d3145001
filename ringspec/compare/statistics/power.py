"""The smallest errors that the statistical tests of one tensor detect with a given probability.

Let e be the errors of a tensor's elements. A linear test (:mod:`ringspec.compare.statistics.linear`) raises an alarm
if their weighted sum ``T = sum c e`` is too large: ``|T| > allowed + z high sd``. Here sd is the predicted standard
deviation of T, z belongs to the rate of false alarms, and a correct kernel may have a mean of up to ``allowed`` and
``high`` times the predicted noise. A defect changes T by ``sum c response``. It is detected with probability ``power``
if this change exceeds ``allowed + (z high + z_power) sd``, where z_power is the quantile of ``power``. :func:`limits`
computes the smallest size x that is detected, for five kinds of error:

=========  ==================================================================================
factor     the result times 1 + x before its last rounding
scale      the softmax scale times 1 + x
shift      lse + x
bias       the last rounding of the result has a mean error of x units in the last place, towards zero
share      a fraction x of the elements is wrong by one unit in the last place
=========  ==================================================================================

**Response.** The last rounding removes an error that is too small to reach the next number of the format. Averaged
over many elements, rounding preserves an error; but the sums give most weight to the elements with the least noise,
and these are rounded back to their correct values. :class:`LastRounding` computes the mean error that remains.

**Margins.** A recipe declares where a kernel rounds. If it does not say relative to which maximum P is rounded, every
choice is accepted. The choice with the most noise raises the limits by less than a fifth, so the limits are multiplied
by :data:`OPEN`. If no recipe is declared, the size of the noise is not tested, and the standard deviations of two
choices differ by a factor of up to 2 (:data:`UNDECLARED`).
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.compare.noise.predict import Noise
from ringspec.compare.noise.rounding import between_neighbours, spacing
from ringspec.compare.normal import quantile
from ringspec.compare.statistics.linear import RowVariances, contrasts, size_of, threshold
from ringspec.compare.statistics.spread import correlation
from ringspec.compare.statistics.types import RATE, Allowance, Array, Predicted
from ringspec.formats import format_of

POWER = 0.999
WIDE = 24  # digits of float32: its spacing is smaller than the noise before the last rounding
OPEN, UNDECLARED = 1.2, 2.0  # factors of the limits, for what a target does not declare
TRUNCATED = (
    0.5  # mean error of a truncation in units in the last place, the largest of any rounding
)
OF_ROUNDING = 12.0  # the squared spacing divided by the variance of a rounding error
GROWTH, LADDER = 1.1, 80  # factor between the sizes that are tried, and how many are tried
BLURRED = (
    0.25  # noise variance, in squared spacings, from which the last rounding preserves an error
)


@dataclass(frozen=True)
class Limits:
    """The smallest detected error of each of the five kinds, for one tensor.

    None: an error of this kind is never detected, or is not tested.
    """

    factor: float | None = None
    scale: float | None = None
    shift: float | None = None
    bias: float | None = None
    share: float | None = None

    def as_dict(self) -> dict[str, float]:
        """Return the limits that are not None.

        >>> Limits(factor=1e-4).as_dict()
        {'factor': 0.0001}
        """
        return {name: x for name, x in dataclasses.asdict(self).items() if x is not None}


@dataclass(frozen=True)
class Sum:
    """One weighted sum of the errors of a tensor: its weights, standard deviation and allowed mean."""

    weights: Array
    deviation: float
    allowed: float

    def smallest(self, pattern: Array, reach: float) -> float:
        """Return the smallest x for which errors ``x * pattern`` are detected; infinity if the sum does not change.

        ``reach``: the number of standard deviations by which the errors must change the sum.
        """
        lever = abs(float((self.weights * pattern).sum()))
        return (self.allowed + reach * self.deviation) / lever if lever > 0 else math.inf


def sums_of(
    noise: Predicted, name: str, truth: Array, direction: Array | None, allowance: Allowance
) -> Iterator[Sum]:
    """Yield the tested sums over a whole tensor, except sums without noise."""
    sd, size = noise.sd[name], size_of(name, truth, direction)
    for c, _ in contrasts(sd, truth, direction, allowance.last).values():
        variance = float(RowVariances(noise, name, c).whole()[0])
        if variance > 0:
            allowed = np.abs(c) * (allowance.slope * size + allowance.share * sd)
            yield Sum(c, math.sqrt(variance), float(allowed.sum()))


def reach_of(p: float, power: float, allowance: Allowance) -> float:
    """Return the change of a sum, in predicted standard deviations, at which an error is detected.

    ``p``: false-alarm rate of one test. ``power``: required probability of detection.
    """
    return threshold(p) * allowance.high + quantile(power)


def detectable(
    noise: Predicted,
    truth: Mapping[str, Array],
    direction: Mapping[str, Array],
    allowances: Mapping[str, Allowance],
    *,
    rate: float = RATE,
    count: int = 500,
    power: float = POWER,
    scale_direction: Mapping[str, Array] | None = None,
) -> dict[str, float]:
    """Return, for each tensor, the smallest x for which an error ``x * direction`` is detected.

    An error is detected if the most sensitive sum over the whole tensor raises an alarm with probability ``power``. If
    the error changes no sum, x is infinity. A defect that changes several tensors is detected if x reaches the smallest
    of their values. ``rate``: probability of a false alarm in all ``count`` tests together. ``scale_direction``: the
    derivative d result / d log scale that the tests use; default: ``direction``.
    """
    found = {}
    for name, want in direction.items():
        scale = (direction if scale_direction is None else scale_direction).get(name)
        reach = reach_of(rate / count, power, allowances[name])
        sums = sums_of(noise, name, truth[name], scale, allowances[name])
        found[name] = min((one.smallest(want, reach) for one in sums), default=math.inf)
    return found


@dataclass(frozen=True)
class LastRounding:
    """The last rounding of a tensor's elements, in those whose noise before it is small.

    ``few``: which elements these are. ``unit``, ``x``, ``t2``: their spacing in the format of the result, their true
    values in this spacing, and the variance of their noise before the rounding in its square. ``lost``: the mean error
    of rounding the true values with this noise, in the spacing.
    """

    few: NDArray[np.bool_]
    unit: Array
    x: Array
    t2: Array
    lost: Array

    def response(self, error: Array) -> Array:
        """Return the mean error after the rounding, given the ``error`` before it."""
        moved = error.copy()
        lost, _, _ = between_neighbours(self.x + error[self.few] / self.unit, self.t2)
        moved[self.few] += (lost - self.lost) * self.unit
        return moved


def last_rounding(truth: Array, before: Array, last: str) -> LastRounding | None:
    """Describe the last rounding, to the format ``last``; None if the format is so fine that errors are preserved.

    ``before``: variance of the noise before the rounding. Means are taken over this noise.

    >>> x, n = np.array([1.0, 1.0]), np.array([0.0, 1e-4])
    >>> last_rounding(x, n, "bfloat16").response(np.full(2, 1e-3)).round(4).tolist()
    [0.0, 0.001]
    """
    if format_of(last).precision >= WIDE:
        return None
    u = spacing(truth, last)
    few = before < BLURRED * u * u
    u, x, t2 = u[few], truth[few] / u[few], before[few] / (u[few] * u[few])
    return LastRounding(few, u, x, t2, between_neighbours(x, t2)[0])


def limits(
    name: str,
    truth: Array,
    noise: Predicted,
    before: Array | None,
    allowance: Allowance,
    direction: Array,
    p: float,
    *,
    power: float = POWER,
    widened: Callable[[Array], Allowance] | None = None,
    margin: float = 1.0,
) -> Limits:
    """Compute the limits of one tensor.

    ``before``: variance before the last rounding; None for lse. ``p``: false-alarm rate of one test. ``margin``: a
    factor by which all limits are multiplied. ``widened``: None if the tensor must show no more noise than its recipe
    predicts. Otherwise the allowance depends on the errors themselves; ``widened`` returns it for a given added error,
    and ``bias`` and ``share`` are not tested. The other parameters are those of
    :func:`ringspec.compare.statistics.tests.examine`.
    """
    direction = np.where(np.isfinite(direction), direction, 0.0)
    finite = np.where(np.isfinite(truth), truth, 0.0)
    sums = list(sums_of(noise, name, truth, direction, allowance))
    rounding = None if before is None else last_rounding(finite, before, allowance.last)

    def needed(pattern: Array, size: float, rounded: bool) -> float:
        """Return the smallest detected size, given the response and the allowance for an error of ``size``."""
        moved = size * pattern
        if rounded and rounding is not None:
            moved = rounding.response(moved)
        allowed = allowance if widened is None else widened(moved)
        reach = threshold(p) * allowed.high + quantile(power) * allowance.high
        return margin * min((one.smallest(moved / size, reach) for one in sums), default=math.inf)

    def by_sums(pattern: Array, rounded: bool = True) -> float | None:
        reach = reach_of(p, power, allowance)
        size = min((one.smallest(pattern, reach) for one in sums), default=math.inf)
        if not math.isfinite(size):
            return None
        found = needed(pattern, size, rounded)
        if widened is None:
            return found if math.isfinite(found) else None
        for _ in range(LADDER):  # the error itself widens the allowance
            if found <= size:
                return size
            size *= GROWTH
            found = needed(pattern, size, rounded)
        return None

    if name == "lse":
        shift = np.isfinite(truth).astype(np.float64)
        return Limits(scale=by_sums(direction), shift=by_sums(shift))
    step = np.where(finite == 0, 0.0, spacing(finite, allowance.last))
    if widened is not None:
        return Limits(by_sums(finite), by_sums(direction))
    share = margin * smallest_share(name, noise, step, allowance, p, power)
    bias = by_sums(np.sign(finite) * step, rounded=False)
    return Limits(
        by_sums(finite),
        by_sums(direction),
        bias=None if bias is None or bias > TRUNCATED else bias,
        share=share if share < 1 else None,
    )


def smallest_share(
    name: str, noise: Predicted, step: Array, allowance: Allowance, p: float, power: float
) -> float:
    """Return the smallest fraction of random elements whose errors of one ``step`` are detected as excess variance.

    Each element counts as if it had at least the noise of its last rounding, because other correct kernels may have
    that noise where this recipe predicts less. The added variance depends on which elements are wrong; it is large
    enough with probability ``power``.
    """
    sd = noise.sd[name]
    noisy = (sd > 0) & (step > 0)
    if not noisy.any():
        return math.inf
    square = np.minimum((step[noisy] / sd[noisy]) ** 2, OF_ROUNDING)
    needed = mean_square_needed(name, noise, allowance, p, power)
    mean, z = float(square.mean()), quantile(power)
    spread = z * math.sqrt(float((square * square).mean()))
    root = (spread + math.sqrt(spread * spread + 4.0 * mean * square.size * needed)) / (2.0 * mean)
    return root * root / square.size


def mean_square_needed(
    name: str, noise: Predicted, allowance: Allowance, p: float, power: float
) -> float:
    """Return the mean square, in units of the noise, that errors must add to be detected as excess variance.

    The kernel is assumed to have as little other noise as a correct kernel may have.
    """
    sd = noise.sd[name]
    noisy = sd > 0
    unit = np.where(noisy, 1.0 / np.where(noisy, sd, 1.0), 0.0)
    # The random signs are those of the tests, so that the variances are already cached.
    rng = np.random.default_rng([zlib.crc32(name.encode()), *sd.shape])
    known = correlation(noise, name, unit, rng)
    counts = noisy.reshape(known.within.size, -1).sum(axis=1).astype(np.float64)
    n = float(counts.sum())
    square, norm = known.of(counts, n)
    x = math.log(1.0 / p)
    excess = 2.0 * math.sqrt(x * square) / n + 2.0 * x * norm / n
    margin = quantile(power) * math.sqrt(2.0 * square) / n
    return allowance.high**2 * (1.0 + excess + margin) - allowance.low**2


@dataclass
class Remembered:
    """A noise prediction that caches variances, because tests and limits ask for the same ones."""

    noise: Noise
    known: dict[Any, Array] = field(default_factory=dict)

    @property
    def sd(self) -> Mapping[str, Array]:
        return self.noise.sd

    @property
    def mean(self) -> Mapping[str, Array]:
        return self.noise.mean

    @property
    def drift(self) -> Mapping[str, Array]:
        return self.noise.drift

    def variance_of_sums(self, name: str, weights: Array, labels: Any = None) -> Array:
        key = (name, digest(weights), None if labels is None else digest(labels))
        if key not in self.known:
            self.known[key] = np.asarray(self.noise.variance_of_sums(name, weights, labels))
        return self.known[key]


def digest(x: NDArray) -> int:
    return hash(np.ascontiguousarray(x).tobytes())
