"""Linear tests: each checks whether a weighted sum of errors exceeds the noise that is predicted for that sum.

Let e be the errors of a tensor's elements, and c their weights, also called a contrast. The predicted variance of
``T = sum c e`` is ``noise.variance_of_sums(c)``. It includes the errors that several elements share. Three choices of
weights are tested. If the errors are independent, each is the most powerful test against one kind of defect, of any
size x:

- *slope* ``c = truth / sd^2`` detects e = x truth, the error of a wrong factor;
- *mean* ``c = 1 / sd^2`` detects e = x, the error of a wrong offset;
- *temperature* ``c = direction / sd^2`` detects e = x direction, the error of a wrong softmax scale. The direction is
  the derivative d(result) / d(log scale).

In c, ``sd^2`` is the predicted variance plus a margin (:func:`weight_of`), so that a few elements with almost no noise
do not get all of the weight. Any c gives a valid test; the margin costs a few per cent of power.

Each test has two p-values, computed from z, which is T divided by its standard deviation:

- ``p`` is the Gaussian tail, which is exact in the limit of many roundings. If the predicted variance is correct, as
  for 16-bit kernels, ``p`` is uniformly distributed over problems, which Kolmogorov-Smirnov tests check
  (tests/compare/test_statistics.py, test_statistics_simulated.py). If float32 sums dominate, ``p`` is not uniform,
  because the order of these sums is not known.
- ``p_allowed`` is the Chernoff bound ``2 exp(-z^2 / 2)``, which holds for any number of roundings. Here z is smaller:
  the mean error that a correct kernel may have is subtracted from abs(T), and the standard deviation is multiplied by
  the factor ``high`` by which a correct kernel may exceed it (:class:`Allowance`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ringspec.compare.noise.rounding import spacing
from ringspec.compare.normal import outside
from ringspec.compare.statistics.strata import Stratum, by_exponent, by_sign
from ringspec.compare.statistics.types import (
    ROW_TENSORS,
    Allowance,
    Array,
    Integers,
    Predicted,
    Test,
)

Booleans = NDArray[np.bool_]
FLOOR = 0.1  # fraction of the median variance that is added to the variance in a weight
WHERE = ("head", "worker", "step")  # strata that the temperature test covers
QUIET = 0.1  # least predicted variance of a sum, relative to the variance without correlations


def weight_of(sd: Array, last: Array) -> Array:
    """Return the weight 1 / (variance + margin) of each element; 0 where ``sd`` is 0.

    The margin is the variance of the last rounding plus a tenth of the tensor's median variance. Without a margin,
    elements whose true value is close to a number of the format would get most of the weight. They have little noise,
    because they are rounded to that number; for the same reason they do not show a small defect. ``last``: spacing of
    the result's format at each element.

    >>> weight_of(np.array([0.0, 1.0, 1.0]), np.array([0.0, 0.0, 12.0**0.5])).round(3).tolist()
    [0.0, 0.909, 0.476]
    """
    noisy = sd > 0
    if not noisy.any():
        return np.zeros(sd.shape)
    variance = sd * sd
    least = FLOOR * float(np.median(variance[noisy])) + last * last / 12.0
    return np.where(noisy, 1.0 / np.where(noisy, variance + least, 1.0), 0.0)


def size_of(name: str, truth: Array, direction: Array | None) -> Array:
    """Return the size of each element, to which its allowed relative error refers (``size_i`` in ``types``)."""
    size = np.abs(np.where(np.isfinite(truth), truth, 0.0))
    if direction is not None:
        size = np.maximum(size, np.abs(direction))
    return np.maximum(size, 1.0) if name == "lse" else size


def contrasts(
    sd: Array, truth: Array, direction: Array | None, last: str
) -> dict[str, tuple[Array, Array]]:
    """Return, for each test, the weights c and the pattern of errors that the test detects: truth, 1 or direction."""
    finite = np.where(np.isfinite(truth), truth, 0.0)
    weight = weight_of(sd, spacing(finite, last))
    pairs = {
        "slope": (weight * finite, finite),
        "mean": (weight, np.ones(finite.shape)),
    }
    if direction is not None:
        pairs["temperature"] = (weight * direction, direction)
    return pairs


def gaussian_tail(z: Array) -> Array:
    """Return P(|N(0, 1)| > z)."""
    return outside(z)


def chernoff(z: Array) -> Array:
    """Return min(1, 2 exp(-z^2 / 2)), which bounds P(|T| > z sd) of a sub-Gaussian T.

    >>> float(chernoff(np.array(7.4))) < 3e-12
    True
    """
    return np.minimum(1.0, 2.0 * np.exp(-0.5 * z * z))


def threshold(p: float) -> float:
    """Return the z at which :func:`chernoff` equals p.

    >>> round(threshold(1e-9 / 500), 2)
    7.43
    """
    return math.sqrt(2.0 * math.log(2.0 / p))


def group_sums(values: Array, labels: Integers, count: int) -> Array:
    """Sum values [B, H, S] or [B, H, S, d] over the rows of each label; rows with the label -1 are ignored."""
    rows = values if values.ndim == labels.ndim else values.sum(axis=-1)
    kept = labels >= 0
    return np.bincount(labels[kept], weights=rows[kept], minlength=count).astype(np.float64)


class RowVariances:
    """The variances of weighted sums over several parts (strata) of one tensor; all sums use the same weights.

    In o, lse and dq the rows are independent. One call of ``variance_of_sums`` then gives the variance of every row,
    and the variance of a part is the sum over its rows. In dk and dv the keys share errors, so each part needs its own
    call.
    """

    def __init__(self, noise: Predicted, name: str, c: Array) -> None:
        self.noise, self.name, self.c = noise, name, c
        self.alone = np.square(c * noise.sd[name])
        self.rows: Array | None = None
        if name in ROW_TENSORS:
            shape = c.shape[:3]
            labels = np.arange(math.prod(shape)).reshape(shape)
            self.rows = np.asarray(noise.variance_of_sums(name, c, labels)).reshape(shape)

    def whole(self) -> Array:
        least = QUIET * self.alone.sum()
        if self.rows is not None:
            return np.maximum(np.array([self.rows.sum()]), least)
        whole = np.asarray(self.noise.variance_of_sums(self.name, self.c)).reshape(1)
        return np.maximum(whole, least)

    def of(self, labels: Integers, count: int) -> Array:
        least = QUIET * group_sums(self.alone, labels, count)
        if self.rows is not None:
            return np.maximum(group_sums(self.rows, labels, count), least)
        sums = np.asarray(self.noise.variance_of_sums(self.name, self.c, labels))
        padded = np.zeros(count)
        padded[: sums.size] = sums
        return np.maximum(padded, least)


def linear_tests(
    name: str,
    error: Array,
    truth: Array,
    noise: Predicted,
    strata: Sequence[Stratum],
    allowance: Allowance,
    direction: Array | None,
) -> Iterator[Test]:
    """Return the results of all linear tests of one tensor.

    The slope is tested over all elements, over the parts in ``strata``, and by sign and by exponent of the true value.
    The mean is tested over all elements and by sign. The temperature is tested over all elements and over the strata
    of :data:`WHERE`. Other combinations are left out, because each part of dk and dv costs a few matrix products.
    """
    sd = noise.sd[name]
    size = size_of(name, truth, direction)
    for kind, (c, pattern) in contrasts(sd, truth, direction, allowance.last).items():
        variances = RowVariances(noise, name, c)
        parts: list[tuple[tuple[str, ...], Integers | None, Array]] = [
            (("all",), None, variances.whole())
        ]
        for s in strata:
            if kind == "slope" or (kind == "temperature" and s.kind in WHERE):
                parts.append((s.names, s.labels, variances.of(s.labels, len(s.names))))
        tall = np.abs(c) * (allowance.slope * size + allowance.share * sd)
        for names, labels, variance in parts:
            sums = [
                np.array([x.sum()]) if labels is None else group_sums(x, labels, len(names))
                for x in (c * error, tall, c * pattern, c != 0)
            ]
            yield from judged(kind, name, names, sums, variance, allowance)
    yield from masked_tests(name, error, truth, noise, allowance, direction)


def masked_tests(
    name: str,
    error: Array,
    truth: Array,
    noise: Predicted,
    allowance: Allowance,
    direction: Array | None,
) -> Iterator[Test]:
    """Test the slope by exponent of the true value, and the slope and the mean by sign of the true value."""
    sd = noise.sd[name]
    size = size_of(name, truth, direction)
    pairs = contrasts(sd, truth, None, allowance.last)
    plan = [("slope", part) for part in by_exponent(truth)]
    plan += [(kind, part) for kind in ("slope", "mean") for part in by_sign(truth)]
    for kind, (label, mask) in plan:
        c, pattern = pairs[kind]
        c = np.where(mask, c, 0.0)
        if not c.any():
            continue
        variance = RowVariances(noise, name, c).whole()
        tall = np.abs(c) * (allowance.slope * size + allowance.share * sd)
        sums = [np.array([x.sum()]) for x in (c * error, tall, c * pattern, c != 0)]
        yield from judged(kind, name, (label,), sums, variance, allowance)


def judged(
    kind: str,
    tensor: str,
    names: Sequence[str],
    sums: Sequence[Array],
    variance: Array,
    allowance: Allowance,
) -> Iterator[Test]:
    """Return one :class:`Test` for each part in ``names``, except parts without noise."""
    total, allowed, lever, count = sums
    for g, stratum in enumerate(names):
        if variance[g] <= 0:
            continue
        deviation = math.sqrt(variance[g])
        z = total[g] / deviation
        beyond = max(0.0, abs(total[g]) - allowed[g]) / (allowance.high * deviation)
        yield Test(
            kind,
            tensor,
            stratum,
            float(z),
            float(gaussian_tail(np.asarray(z))),
            float(chernoff(np.asarray(beyond))),
            effect=float(total[g] / lever[g]) if lever[g] != 0 else 0.0,
            count=int(count[g]),
            allowance=allowance,
        )
