"""At which size an error is detected: the sum, the element and the variance that give it away.

For each tensor the least of three sizes is taken, each detected with the wanted probability:

- *sum*: :func:`ringspec.compare.statistics.power.detectable`, of the error as it comes through the last rounding.
  That rounding swallows what does not reach the next number: where the noise before it is smaller than the
  spacing, the answer to a small error is uneven, and smaller where the predicted noise is small. So
  the answer is measured on the results of the correct kernel, at the size that is looked for.
- *element*: the largest error in units of its noise (the test of outliers), less a spacing;
- *variance*: the mean square of all errors (the test of excess), where the noise of the correct
  kernel may be as small as its allowance says.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from benchmarks.power_problem import Array, Named, Setting
from scipy import special

from ringspec.compare.noise.rounding import spacing
from ringspec.compare.statistics.linear import size_of, threshold
from ringspec.compare.statistics.power import detectable, mean_square_needed
from ringspec.compare.statistics.types import RATE
from ringspec.conformance.cases.noise import MOST_CASES
from ringspec.formats import round_to

TESTS = 1000  # tests of a case, at most: 400 with one head and four workers
CASE = RATE / MOST_CASES  # false alarms of a case
COARSE = 1e-3  # where sums need more than this, the variance is looked at as well
SHIFTS = 4  # along a row, of the noise before the last rounding
TIMES = 2  # that the answer of the last rounding is measured at a better size


def reach(setting: Setting, direction: Named) -> dict[str, float]:
    """By tensor: the smallest multiple of an error that is detected."""
    return {name: reach_in(setting, name, error) for name, error in direction.items()}


def reach_in(setting: Setting, name: str, error: Array) -> float:
    """The smallest multiple of an error of one tensor."""
    best = min(by_sum(setting, name, error), by_element(setting, name, error))
    if best > COARSE:
        best = min(best, by_variance(setting, name, error))
    return best


def by_sum(setting: Setting, name: str, error: Array) -> float:
    """By slope, mean and temperature of the whole tensor."""
    size = of_sums(setting, name, error)
    for _ in range(TIMES):
        if not math.isfinite(size):
            break
        size = of_sums(setting, name, answer(setting, name, size * error) / size)
    return size


def of_sums(setting: Setting, name: str, error: Array) -> float:
    return detectable(
        setting.noise,
        setting.truth,
        {name: error},
        {name: setting.allowance(name)},
        rate=CASE,
        count=TESTS,
        power=setting.asked.power,
        scale_direction=setting.directions,
    )[name]


def answer(setting: Setting, name: str, error: Array) -> Array:
    """What an error before the last rounding adds to the result, in the mean.

    The mean is over both signs of the error, and over the noise before that rounding: the correct
    kernel's own, with either sign, and its neighbours' along the row, which are of the same size.
    """
    truth, format = setting.truth[name], setting.format_of(name)
    finite = np.where(np.isfinite(truth), truth, 0.0)
    noise = np.where(np.isfinite(truth), setting.wide[name], 0.0) - finite
    shifts = range(0, truth.shape[3], -(-truth.shape[3] // SHIFTS)) if truth.ndim == 4 else (0,)
    total, count = np.zeros(truth.shape), 0
    for shift in shifts:
        moved = np.roll(noise, shift, axis=-1) if shift else noise
        for sign in (1.0, -1.0):
            before = finite + sign * moved
            total += round_to(before + error, format) - round_to(before - error, format)
            count += 2
    return total / count


def step_of(setting: Setting, name: str) -> Array:
    """The spacing of the stored numbers at each result."""
    return spacing(setting.truth[name], setting.format_of(name))


def by_element(setting: Setting, name: str, error: Array) -> float:
    """By the element that stands out most."""
    sd, allowance = setting.noise.sd[name], setting.allowance(name)
    used = (sd > 0) & (error != 0)
    if not used.any():
        return math.inf
    p = CASE / TESTS / int((sd > 0).sum())
    needed = threshold(p) * allowance.high + float(special.ndtri(setting.asked.power))
    size = size_of(name, setting.truth[name], setting.directions[name])
    limit = (needed + allowance.share) * sd + allowance.slope * size
    # Half a spacing that the last rounding may take away, and half that the test allows for it.
    limit = limit + spacing(np.abs(setting.truth[name]) + 2 * limit, setting.format_of(name))
    return float((limit[used] / np.abs(error[used])).min())


def by_variance(setting: Setting, name: str, error: Array) -> float:
    """By the mean square of all errors in units of their noise."""
    sd, allowance = setting.noise.sd[name], setting.allowance(name)
    noisy = sd > 0
    if not noisy.any():
        return math.inf
    n, z = float(noisy.sum()), float(special.ndtri(setting.asked.power))
    wanted = mean_square_needed(name, setting.noise, allowance, CASE / TESTS, setting.asked.power)
    variance = sd**2 + step_of(setting, name) ** 2 / 12.0
    total = float((error[noisy] ** 2 / variance[noisy]).sum())
    # x^2 total, less what the product of noise and error may take away, is n wanted.
    root = z + math.sqrt(z * z + n * wanted)
    return root / math.sqrt(total) if total > 0 else math.inf


def deviations_of(setting: Setting, name: str, error: Array) -> float:
    """Predicted standard deviations of the best whole-tensor sum that an error makes."""
    given = setting.allowance(name)
    plain = dataclasses.replace(given, slope=0.0, share=0.0, low=1.0, high=1.0)
    came = answer(setting, name, error)
    unit = detectable(
        setting.noise, setting.truth, {name: came}, {name: plain}, rate=1.0, count=1, power=0.5,
        scale_direction=setting.directions,
    )[name]  # fmt: skip
    return threshold(1.0) / unit if unit > 0 else math.inf
