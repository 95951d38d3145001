"""The whole-tensor tests against noise whose law is known exactly."""

import dataclasses
import math

import numpy as np
import pytest
from compare.synthetic_noise import problem
from scipy import stats

from ringspec.compare.statistics.linear import threshold
from ringspec.compare.statistics.power import detectable
from ringspec.compare.statistics.spread import growth
from ringspec.compare.statistics.strata import Stratum, edges, heads, positions, workers
from ringspec.compare.statistics.tests import alarms, errors_of, examine, in_words
from ringspec.compare.statistics.types import Allowance, Test, allowance_for
from ringspec.errors import OptionError, ShapeError

PLAIN = Allowance()
BF16 = allowance_for("bf16", "dq")
LINEAR = ("slope", "mean", "temperature")


def strata_of(shape):
    owner = np.repeat(np.arange(4), shape[2] // 4)
    rows = shape[:3]
    return (heads(rows), workers(owner, 4, rows), positions(owner, rows), edges(owner, rows))


def examined(seed, allowance=PLAIN, change=None, **kind):
    truth, direction, noise = problem(seed, **kind)
    error = noise.draw(np.random.default_rng(1000 + seed))
    if change is not None:
        error = change(error, truth, direction, noise)
    name = noise.name
    parts = strata_of(truth.shape)
    return examine(name, error, truth, noise, parts, allowance=allowance, direction=direction)


def pick(tests, name, stratum="all"):
    (one,) = [t for t in tests if (t.name, t.stratum) == (name, stratum)]
    return one


KINDS = (
    {"name": "dq", "row": 0.5},
    {"name": "dq", "row": 3.0},
    {"name": "dk", "row": 0.5, "head": 0.3},
    {"name": "lse", "row": 0.0, "shape": (1, 2, 256)},
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
def test_linear_p_values_are_uniform_and_all_others_conservative(kind):
    linear, other = {}, []
    for seed in range(200):
        for test in examined(seed, **kind):
            if test.name in LINEAR:
                linear.setdefault((test.name, test.stratum == "all"), []).append(test.p)
            else:
                other.append(test.p)
    for (name, _), p in linear.items():
        assert stats.kstest(p, "uniform").pvalue > 1e-4, name
        rate = np.mean(np.array(p) < 0.01)
        assert rate < 0.01 + 4 * math.sqrt(0.01 / len(p)), name
    assert np.mean(np.array(other) < 0.01) <= 0.01
    assert np.mean(np.array(other) < 0.001) <= 0.002


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
def test_noise_at_the_edge_of_the_band_with_an_allowed_slope_raises_no_alarm(kind):
    def change(error, truth, direction, noise):
        return BF16.high * error + BF16.slope * truth

    p = []
    for seed in range(60):
        tests = examined(seed, BF16, change, **kind)
        assert not alarms(tests)
        p += [test.p_allowed for test in tests]
    assert np.mean(np.array(p) < 0.01) <= 0.01


def scaled(error, truth, direction, noise):
    return error + 1e-3 * truth


def offset(error, truth, direction, noise):
    return error + 3e-4


def hotter(error, truth, direction, noise):
    return error + 1e-3 * direction


def louder(error, truth, direction, noise):
    return 1.8 * error


def one_element(error, truth, direction, noise):
    error = error.copy()
    error[0, 1, 17, 3] += 15 * noise.sd["dq"][0, 1, 17, 3]
    return error


def along_d(error, truth, direction, noise):
    rng = np.random.default_rng(5)
    return error + noise.sd["dq"] * rng.standard_normal(error.shape[:3])[..., None]


def along_tokens(error, truth, direction, noise):
    rng = np.random.default_rng(6)
    steady = np.repeat(rng.standard_normal((1, 2, error.shape[2] // 8, 16)), 8, axis=2)
    return error + 1.2 * noise.sd["dq"] * steady


def one_worker(error, truth, direction, noise):
    error = error.copy()
    error[:, :, 256:512] += 2e-3 * truth[:, :, 256:512]
    return error


def towards_zero(error, truth, direction, noise):
    return error - 0.3 * noise.sd["dq"] * np.sign(truth)


DEFECTS = (
    (scaled, "slope", "all"),
    (offset, "mean", "all"),
    (hotter, "temperature", "all"),
    (louder, "excess", "all"),
    (one_element, "outliers", "all"),
    (along_d, "serial d", "all"),
    (along_tokens, "serial token", "all"),
    (one_worker, "slope", "worker 1"),
    (towards_zero, "mean", "positive truth"),
)


@pytest.mark.parametrize(
    ("change", "name", "stratum"), DEFECTS, ids=lambda x: getattr(x, "__name__", x)
)
def test_each_defect_is_found_by_the_test_that_is_for_it(change, name, stratum):
    shape = (1, 2, 1024, 16)
    assert not alarms(examined(3, BF16, shape=shape))
    found = alarms(examined(3, BF16, change, shape=shape))
    assert (name, stratum) in {(test.name, test.stratum) for test in found}
    assert all(in_words(test) for test in found)


def test_the_effect_is_the_relative_error_that_was_injected():
    shape = (1, 2, 1024, 16)
    assert pick(examined(3, BF16, scaled, shape=shape), "slope").effect == pytest.approx(
        1e-3, rel=0.1
    )
    found = pick(examined(3, BF16, hotter, shape=shape), "temperature").effect
    assert found == pytest.approx(1e-3, rel=0.1)


def test_less_noise_than_predicted_is_no_alarm():
    assert not alarms(examined(3, BF16, lambda error, *_: 0.2 * error))


def test_nan_and_infinity_are_alarms_and_do_not_hide_the_rest():
    for value in (np.nan, np.inf, -np.inf):

        def change(error, truth, direction, noise, value=value):
            error = 5 * error
            error[0, 0, 0, 0] = value
            return error

        found = {test.name for test in alarms(examined(3, BF16, change, shape=(1, 2, 1024, 16)))}
        assert {"finite", "excess"} <= found


def test_an_element_without_noise_must_be_right():
    truth, direction, noise = problem(1)
    own, row = noise.own.copy(), noise.row_pattern.copy()
    own[0, 0, :5] = row[0, 0, :5] = 0.0
    quiet = dataclasses.replace(noise, own=own, row_pattern=row)
    error = quiet.draw(np.random.default_rng(0))
    assert not alarms(examine("dq", error, truth, quiet, allowance=BF16))
    error[0, 0, 2, 1] = 1e-300
    (found,) = alarms(examine("dq", error, truth, quiet, allowance=BF16))
    assert (found.name, found.statistic) == ("exact", 1.0)


def test_a_tensor_without_any_noise_is_only_compared():
    truth, direction, noise = problem(1)
    zero = np.zeros(truth.shape)
    silent = dataclasses.replace(noise, own=zero, row_pattern=zero, head_pattern=zero)
    assert {t.name for t in examine("dq", zero, truth, silent, allowance=BF16)} == {
        "finite",
        "exact",
    }


def test_equal_infinities_are_no_error_and_unlike_ones_are():
    got = np.array([-np.inf, np.inf, np.nan, 1.0])
    truth = np.array([-np.inf, -np.inf, 0.0, -np.inf])
    error = errors_of(got, truth)
    assert error[0] == 0 and not np.isfinite(error[1:]).any()


def test_the_alarm_threshold_is_the_rate_divided_by_the_number_of_tests():
    tests = [Test("slope", "o", "all", 0.0, p, p) for p in (0.9e-9, 1.1e-9, math.nan)]
    found = alarms(tests, rate=1e-6, count=1000)
    assert len(found) == 2 and tests[1] not in found  # NaN is an alarm
    with pytest.raises(OptionError):
        alarms(tests, rate=0.0)


def test_unlike_shapes_are_refused():
    truth, _, noise = problem(1)
    with pytest.raises(ShapeError):
        examine("dq", truth[:, :1], truth, noise, allowance=BF16)


@pytest.mark.parametrize("pattern", ["slope", pytest.param("temperature", marks=pytest.mark.slow)])
def test_what_is_called_detectable_is_detected_with_the_power_that_is_stated(pattern):
    truth, direction, noise = problem(2, shape=(1, 1, 128, 16))
    want = truth if pattern == "slope" else direction
    rate, count, power = 1e-4, 10, 0.9
    (x,) = detectable(
        noise, {"dq": truth}, {"dq": want}, {"dq": BF16}, rate=rate, count=count, power=power,
        scale_direction={"dq": direction},
    ).values()  # fmt: skip
    seen = [0, 0]
    for n, factor in enumerate((1.0, 0.5)):
        for seed in range(300):
            error = noise.draw(np.random.default_rng(seed)) + factor * x * want
            tests = examine("dq", error, truth, noise, allowance=BF16, direction=direction)
            linear = [t for t in tests if t.name in LINEAR and t.stratum == "all"]
            seen[n] += bool(alarms(linear, rate, count))
    assert seen[0] >= 0.85 * 300 and seen[1] <= 0.3 * 300


def test_a_longer_run_does_not_come_nearer_to_an_alarm_by_an_allowed_slope():
    z = [
        pick(
            examined(1, BF16, lambda error, truth, *_: 0 * error + BF16.slope * truth, shape=s),
            "slope",
        )
        for s in ((1, 1, 64, 16), (1, 4, 4096, 16))
    ]
    assert z[1].statistic > 3 * z[0].statistic and z[1].p_allowed == z[0].p_allowed == 1.0


def test_growth_is_told_from_steady_noise():
    rng = np.random.default_rng(0)
    p = []
    for _ in range(400):
        records = [(w, rng.chisquare(500) / 500, 500.0) for w in (1, 2, 4, 8)]
        p.append(growth("o", records, BF16).p)
    assert stats.kstest(p, "uniform").pvalue > 1e-4
    assert growth("o", [(1, 1.0, 500.0)], BF16) is None
    growing = growth("o", [(w, w**0.5, 500.0) for w in (1, 2, 4, 8)], BF16)
    assert growing.p_allowed < 1e-12 and growing.effect == pytest.approx(0.25)
    assert growth("o", [(w, 1 / w, 500.0) for w in (1, 2, 4, 8)], BF16).p_allowed == 1.0


@pytest.mark.parametrize("name", ["dq", "dsinks"])
def test_a_drift_that_the_noise_predicts_is_taken_off_sums_of_errors(name):
    """What a sum holds after the predicted drift is the noise; without it, the drift is a slope."""
    shape = (1, 2, 64, 16) if name == "dq" else (2, 16)
    truth = np.random.default_rng(8).standard_normal(shape)
    drift = 1e-3 * truth
    error = drift + 1e-6 * np.random.default_rng(9).standard_normal(shape)
    noise = Drifting(name, np.full(shape, 1e-5), drift)
    tests = examine(name, error, truth, noise, allowance=PLAIN, direction=2 * truth)
    sums = [t for t in tests if t.name in LINEAR or t.name.startswith("serial")]
    assert {"slope", "mean", "temperature"} <= {t.name for t in sums}
    assert not alarms(sums)
    assert abs(pick(tests, "slope").statistic) <= 1.0
    without = dataclasses.replace(noise, taken_off=np.zeros(shape))
    tests = examine(name, error, truth, without, allowance=PLAIN, direction=2 * truth)
    assert pick(alarms(tests), "slope").statistic > 100.0


@dataclasses.dataclass(frozen=True)
class Drifting:
    """Independent errors of one size, and a drift."""

    name: str
    own: np.ndarray
    taken_off: np.ndarray

    @property
    def sd(self):
        return {self.name: self.own}

    @property
    def mean(self):
        return {}

    @property
    def drift(self):
        return {self.name: self.taken_off}

    def variance_of_sums(self, name, weights, labels=None):
        labels = np.zeros(self.own.shape, int) if labels is None else labels
        labels = np.broadcast_to(
            labels.reshape(labels.shape + (1,) * (weights.ndim - labels.ndim)), weights.shape
        )
        here = labels >= 0
        variances = (weights * self.own)[here] ** 2
        return np.bincount(labels[here], weights=variances, minlength=int(labels.max()) + 1)


def test_the_threshold_of_a_run_is_near_seven_standard_deviations():
    assert 7.0 < threshold(1e-9 / 500) < 7.5


def test_a_stratum_leaves_out_the_rows_without_a_label():
    truth, direction, noise = problem(4, name="dk", head=0.3)
    labels = np.full(truth.shape[:3], -1)
    labels[:, :, :8] = 0
    error = noise.draw(np.random.default_rng(0))
    error[:, :, 8:] += 100.0
    part = Stratum("edge", labels, ("first rows",))
    tests = examine("dk", error, truth, noise, (part,), allowance=BF16)
    assert not [t for t in alarms(tests) if t.stratum == "first rows"]
