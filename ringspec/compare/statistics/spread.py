"""Tests of the size of errors: excess variance, serial correlation, outliers, growth with the number of workers W.

All tests compare errors with a predicted standard deviation sd. An :class:`Allowance` says what a correct kernel may
show beyond the prediction: a mean error, and ``high`` times the sd.

**Excess and serial tests.** The errors e in each group g of elements are summed with weights w, and each sum is divided
by its predicted sd. These standardised sums y should have a mean square near 1. The groups are

- *excess*: single elements;
- *serial d*: rows, with w = 1 / sd. Errors that agree along d make the sums too large;
- *serial token*: runs of :data:`RUN` consecutive tokens, with a random sign for each d. Errors that agree along tokens
  make the sums too large.

The predicted variance of a sum includes the errors that its elements share, so shared errors do not count as excess.

The sums y are correlated. Let C be their correlation matrix, |C| its norm, and F the sum of its squared entries. For n
groups of sub-Gaussian roundings, Hsu, Kakade and Zhang (https://arxiv.org/abs/1110.2842, theorem 1) prove::

    P( mean y^2 > 1 + 2 sqrt(x F) / n + 2 x |C| / n ) <= exp(-x)

F is estimated: for random signs r, ``Var(sum r y) = r' C r`` has the mean n and the variance 2 (F - n). If rows are
independent, each row gives one sample of this variance. In dk and dv, each of :data:`CELLS` groups of keys gives a
sample, and so does the whole sum. |C| is at most sqrt(F) within a row plus the same quantity between rows.
:data:`PROBES` vectors of signs are used. The result is an estimate, not a proof, so it is multiplied by :data:`SAFETY`.

The bound is applied to y / high, after the allowed mean error is subtracted from each abs(y). A variance that is too
small raises no alarm, because a kernel may be better than declared (:mod:`ringspec.compare.inference.infer` reports
this).

**Outliers.** The last rounding contributes at most half a spacing of the format to an error. (For a float32 result, the
allowed error of its merges is used if it is larger, because it is not known how a kernel merges partial results.) All
earlier errors are sub-Gaussian, with at most the predicted variance. The test therefore applies the sub-Gaussian tail
bound to the part of each error beyond half a spacing, and multiplies the probability by the number of elements.
Comparing whole errors with sd would be wrong: if the true value is a number of the format, sd is small, and a rare
error of one spacing is many sd.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringspec.compare.noise.rounding import spacing
from ringspec.compare.normal import below
from ringspec.compare.statistics.linear import QUIET, chernoff, group_sums, size_of
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
PROBES = 2
CELLS = 64  # groups of keys in which the correlation of dk and dv is estimated
SAFETY = 3.0  # factor applied to the estimate of the correlations
RUN = 8  # tokens in a group of 'serial token'
# Growth of rms error / predicted from the least to the greatest W that a model may show.
DRIFT = 1.1


@dataclass(frozen=True)
class Correlation:
    """The estimated correlation of the standardised errors of elements.

    ``within`` [rows]: for each row, the sum of squared correlations between different elements of the row; in dk and
    dv it is estimated from groups of rows. ``between``: the sum over pairs of elements from different rows or groups.
    """

    within: Array
    between: float

    def of(self, rows: Array, groups: float) -> tuple[float, float]:
        """Return F and a bound of |C| for the excess test of a part of the tensor.

        ``rows`` [rows]: how many elements of each row are in the part. ``groups``: the number of elements of the
        tensor.
        """
        share = rows.sum() / max(groups, 1.0)
        here = rows > 0
        square = rows.sum() + SAFETY * (self.within[here].sum() + self.between * share)
        largest = (rows[here] + SAFETY * self.within[here]).max(initial=0.0)
        norm = math.sqrt(min(largest, float((rows[here] ** 2).max(initial=0.0))))
        return square, norm + math.sqrt(SAFETY * self.between * share)


def correlation(noise: Predicted, name: str, unit: Array, rng: np.random.Generator) -> Correlation:
    """Estimate the correlation of the standardised errors ``unit * error`` (unit = 1 / sd, 0 where sd is 0)."""
    size = math.prod(unit.shape[:3])
    counts = (unit.reshape(size, -1) != 0).sum(axis=1).astype(np.float64)
    # A call in which each key is a group costs as much as a product of three matrices.
    cells = np.arange(size)
    if name not in ROW_TENSORS:
        cells = cells * min(CELLS, size) // size
    labels = cells.reshape(unit.shape[:3])
    number = np.bincount(cells, weights=counts)
    within, between = np.zeros(number.size), 0.0
    for _ in range(PROBES):
        c = unit * rng.choice((-1.0, 1.0), size=unit.shape)
        sums = np.asarray(noise.variance_of_sums(name, c, labels))
        within += 0.5 * (sums - number) ** 2 / PROBES
        if name not in ROW_TENSORS:
            whole = float(np.asarray(noise.variance_of_sums(name, c)).reshape(-1)[0])
            between += 0.5 * (whole - sums.sum()) ** 2 / PROBES
    share = counts / np.maximum(number[cells], 1.0)
    return Correlation(within[cells] * share, between)


def bound_of_excess(excess: float, n: float, square: float, norm: float) -> float:
    """Return exp(-x) for the x at which 2 sqrt(x F) / n + 2 x |C| / n = ``excess``.

    ``square`` is F, ``norm`` is |C|.

    >>> round(bound_of_excess(2 * 0.1 + 2 * 0.01, 100.0, 100.0, 1.0), 4) == round(math.exp(-1), 4)
    True
    """
    if not excess > 0:
        return 1.0
    a, b = norm, math.sqrt(square)  # a x + b sqrt(x) = n excess / 2
    root = (-b + math.sqrt(b * b + 2.0 * a * n * excess)) / (2.0 * a)
    return math.exp(-root * root)


def spread_test(
    kind: str,
    tensor: str,
    stratum: str,
    y: Array,
    shift: Array,
    square: float,
    norm: float,
    allowance: Allowance,
) -> Test:
    """Test whether the standardised sums ``y`` are too large.

    ``shift``: allowed mean errors, subtracted from abs(y). ``square`` and ``norm``: F and the bound of |C|.
    """
    n = float(y.size)
    ratio = float((y * y).mean())
    beyond = np.maximum(np.abs(y) - shift, 0.0) / allowance.high
    return Test(
        kind,
        tensor,
        stratum,
        ratio,
        bound_of_excess(ratio - 1.0, n, square, norm),
        bound_of_excess(float((beyond * beyond).mean()) - 1.0, n, square, norm),
        effect=ratio,
        count=int(n),
        allowance=allowance,
    )


def spread_tests(
    name: str,
    error: Array,
    truth: Array,
    noise: Predicted,
    strata: Sequence[Stratum],
    allowance: Allowance,
    direction: Array | None,
    rng: np.random.Generator,
    merging: Array | float = 0.0,
) -> Iterator[Test]:
    """Test outliers over all elements, and excess variance over all elements and over every part.

    ``merging``: the allowed error of the merges of a float32 result.
    """
    sd = noise.sd[name]
    noisy = sd > 0
    if not noisy.any():
        return
    unit = np.where(noisy, 1.0 / np.where(noisy, sd, 1.0), 0.0)
    z = unit * error
    mean = unit * allowance.slope * size_of(name, truth, direction) + allowance.share
    half = 0.5 * unit * spacing(np.abs(truth) + np.abs(error), allowance.last)
    if allowance.last == "float32":
        half = np.maximum(half, unit * merging)
    yield outliers(name, z[noisy], half[noisy], mean[noisy], allowance)
    known = correlation(noise, name, unit, rng)
    groups = float(noisy.sum())
    parts: list[tuple[str, Booleans]] = [("all", noisy)]
    parts += [(label, noisy & mask) for label, mask in (*by_sign(truth), *by_exponent(truth))]
    for stratum in strata:
        for g, label in enumerate(stratum.names):
            rows = stratum.labels == g
            parts.append((label, noisy & (rows if noisy.ndim == 3 else rows[..., None])))
    for label, mask in parts:
        if mask.any():
            counts = mask.reshape(known.within.size, -1).sum(axis=1).astype(np.float64)
            square, norm = known.of(counts, groups)
            yield spread_test("excess", name, label, z[mask], mean[mask], square, norm, allowance)


def outliers(name: str, z: Array, half: Array, mean: Array, allowance: Allowance) -> Test:
    """Test the largest error; ``z`` is error / sd, and ``half`` is half a spacing of the result's format, over sd."""
    size = np.abs(z)
    least = max(0.0, float((size - half).max()))
    beyond = max(0.0, float((size - half - mean).max()) / allowance.high)
    p, p_allowed = (min(1.0, z.size * float(chernoff(np.asarray(x)))) for x in (least, beyond))
    worst = float(size.max())
    return Test("outliers", name, "all", worst, p, p_allowed, worst, z.size, allowance)


def serial_tests(
    name: str,
    error: Array,
    truth: Array,
    noise: Predicted,
    allowance: Allowance,
    direction: Array | None,
    rng: np.random.Generator,
) -> Iterator[Test]:
    """Test whether errors are more correlated along d or along tokens than the prediction says."""
    sd = noise.sd[name]
    noisy = sd > 0
    if not noisy.any() or error.shape[2] < RUN:
        return
    unit = np.where(noisy, 1.0 / np.where(noisy, sd, 1.0), 0.0)
    mean = unit * allowance.slope * size_of(name, truth, direction) + allowance.share
    batch, rows, length = error.shape[:3]
    row = np.arange(batch * rows * length).reshape(batch, rows, length)
    runs = -(-length // RUN)
    run = np.arange(batch * rows)[:, None] * runs + np.arange(length)[None, :] // RUN
    plan = {"serial token": (run.reshape(row.shape), unit)}
    if error.ndim == 4:
        signs = rng.choice((-1.0, 1.0), size=error.shape[3])
        plan = {"serial token": (run.reshape(row.shape), unit * signs), "serial d": (row, unit)}
    for kind, (labels, c) in plan.items():
        count = int(labels.max()) + 1
        least = QUIET * group_sums(np.square(c * sd), labels, count)
        variance = np.maximum(noise.variance_of_sums(name, c, labels), least)
        good = ~(variance <= 0)
        deviation = np.sqrt(np.where(good, variance, 1.0))
        y = group_sums(c * error, labels, count) / deviation
        shift = group_sums(np.abs(c) * mean / np.where(noisy, unit, 1.0), labels, count) / deviation
        square, norm = serial_correlation(noise, name, c, labels, deviation, good, rng)
        yield spread_test(kind, name, "all", y[good], shift[good], square, norm, allowance)


def serial_correlation(
    noise: Predicted,
    name: str,
    c: Array,
    labels: Integers,
    deviation: Array,
    good: Booleans,
    rng: np.random.Generator,
) -> tuple[float, float]:
    """Return F and a bound of |C| for the serial tests, whose groups are given by ``labels``."""
    n = float(good.sum())
    if name in ROW_TENSORS:
        return n, 1.0
    between = 0.0
    for _ in range(PROBES):
        r = np.where(good, rng.choice((-1.0, 1.0), size=good.size) / deviation, 0.0)[labels]
        whole = noise.variance_of_sums(name, c * (r if c.ndim == 3 else r[..., None]))
        between += 0.5 * (float(np.asarray(whole).reshape(-1)[0]) - n) ** 2 / PROBES
    return n + SAFETY * between, 1.0 + math.sqrt(SAFETY * between)


def growth(
    tensor: str, records: Sequence[tuple[int, float, float]], allowance: Allowance
) -> Test | None:
    """Test whether the error grows with the number of workers W.

    ``records``: one (W, mean of (error / sd)^2, count) for each run, where count is the number of independent elements
    in the mean. The test is a one-sided weighted regression of the logarithm of the mean on log W. Because predictions
    are not exact, the root mean square may grow by the factor :data:`DRIFT` between the least and the greatest W.
    ``effect`` of the result: the exponent g if the root mean square grows as W^g. Returns None for fewer than two
    different numbers of workers.

    >>> records = [(1, 1.0, 1e4), (2, 1.4, 1e4), (4, 2.0, 1e4), (8, 2.8, 1e4)]
    >>> test = growth("o", records, Allowance(high=1.15))
    >>> test.p_allowed < 1e-12, round(test.effect, 2)
    (True, 0.25)
    """
    x = np.array([math.log(w) for w, _, _ in records])
    if x.size < 2 or np.ptp(x) == 0:
        return None
    y = np.log([max(ratio, 1e-300) for _, ratio, _ in records])
    variance = np.array([2.0 / max(count, 1.0) for _, _, count in records])
    weight = 1.0 / variance
    centred = x - (weight * x).sum() / weight.sum()
    lever = float((weight * centred * centred).sum())
    slope = float((weight * centred * y).sum()) / lever
    deviation = 1.0 / math.sqrt(lever)
    allowed = 2.0 * math.log(DRIFT) / float(np.ptp(x))
    z, beyond = slope / deviation, max(0.0, slope - allowed) / deviation
    return Test(
        "growth",
        tensor,
        "workers " + ", ".join(str(w) for w, _, _ in records),
        z,
        float(below(-z)),
        float(chernoff(np.asarray(beyond))),
        effect=slope / 2.0,
        count=int(sum(count for _, _, count in records)),
        allowance=allowance,
    )
