"""The statistics with the predicted noise of simulated kernels: silent when they are right, loud when not."""

import functools

import numpy as np
import pytest
from compare import noise_problems as simulated
from compare.test_inference import backward_block, forward_block, truncate
from scipy import stats

from ringspec.compare.noise.predict import predict
from ringspec.compare.statistics.power import detectable
from ringspec.compare.statistics.spread import growth
from ringspec.compare.statistics.strata import strata_for
from ringspec.compare.statistics.tests import alarms, errors_of, examine
from ringspec.compare.statistics.types import allowance_for

NAMES = ("o", "lse", "dq", "dk", "dv")
LINEAR = ("slope", "mean", "temperature")


def answers(problem, got=None, names=NAMES, declared=None):
    declared = declared or problem.recipe
    attention, geometry = simulated.attention_of(problem), simulated.geometry_of(problem)
    noise = predict(attention, declared, geometry)
    truth, directions = simulated.truth_of(problem), simulated.directions(problem)
    got = simulated.run(problem) if got is None else got
    parts = strata_for(geometry, attention.p, problem.k.shape[1])
    tests = []
    for name in names:
        tests += examine(
            name,
            errors_of(got[name], truth[name]),
            truth[name],
            noise,
            parts[name],
            allowance=allowance_for(declared, name, problem.workers),
            direction=directions[name],
        )
    return tests


def plain(seed=1, **changes):
    fixed = {
        "workers": 4, "length": 128, "width": 32, "heads": 2, "group": 1, "spread": 1.0,
        "unlike": False, "mask": "causal", "layout": "zigzag", "circulation": "kv",
    }  # fmt: skip
    return simulated.random_problem(seed, changes.pop("recipe", "bf16"), **(fixed | changes))


def test_right_kernels_raise_no_alarm_and_their_linear_p_values_are_uniform():
    p = []
    for seed in range(6):
        tests = answers(simulated.random_problem(1000 + seed, length=64, heads=1, group=1))
        assert not alarms(tests)
    for seed in range(25):
        tests = answers(plain(seed, length=64, workers=2, recipe=("bf16", "fp16")[seed % 2]))
        assert not alarms(tests)
        p += [t.p for t in tests if t.stratum == "all" and t.name in LINEAR and t.tensor != "lse"]
    assert stats.kstest(p, "uniform").pvalue > 1e-3


def test_a_truncated_p_is_found_in_o_and_dv():
    problem = plain()
    got = simulated.run(
        problem,
        block_forward=functools.partial(forward_block, round_p=truncate),
        block_backward=functools.partial(backward_block, round_p=truncate),
    )
    found = {(t.name, t.tensor, t.stratum) for t in alarms(answers(problem, got))}
    assert {("slope", "o", "all"), ("slope", "dv", "all")} <= found


def test_a_dropped_row_is_found_as_an_outlier():
    problem = plain()
    got = simulated.run(problem)
    got["dk"] = got["dk"].copy()
    got["dk"][0, 1, 77] = 0.0
    found = alarms(answers(problem, got, ("dk",)))
    assert ("outliers", "dk") in {(t.name, t.tensor) for t in found}


def test_one_worker_with_another_scale_is_named():
    problem = plain()
    wrong, got = simulated.run(problem, 3e-3), simulated.run(problem)
    mine = simulated.geometry_of(problem).owner_q == 2
    got["dq"] = np.where(mine[:, None], wrong["dq"], got["dq"])
    found = alarms(answers(problem, got, ("dq",)))
    assert any(t.stratum == "worker 2" for t in found)
    assert not any(t.stratum == "worker 1" for t in found)


def test_partials_that_are_not_declared_are_excess_noise_that_grows_with_w():
    records, found = [], {}
    for workers in (1, 2, 4, 8):
        problem = plain(workers=workers, recipe="bf16_partials", mask="full")
        tests = answers(problem, names=("o",), declared="bf16")
        found[workers] = bool([t for t in alarms(tests) if t.name == "excess"])
        (one,) = [t for t in tests if (t.name, t.stratum) == ("excess", "all")]
        records.append((workers, one.statistic, one.count / 4))
    assert found[8] and not found[1]
    allowance = allowance_for("bf16", "o")
    assert growth("o", records, allowance).p_allowed < 1e-9


def test_an_injected_scale_error_is_found_where_detectable_says_so():
    problem = plain(length=256)
    attention, geometry = simulated.attention_of(problem), simulated.geometry_of(problem)
    noise = predict(attention, "bf16", geometry)
    allowances = {name: allowance_for("bf16", name) for name in NAMES}
    x = detectable(noise, simulated.truth_of(problem), simulated.directions(problem), allowances)
    assert x["lse"] < 1e-4 and 1e-4 < x["o"] < 1e-3 and 1e-4 < x["dq"] < 1e-3
    for name in ("o", "dq", "dk", "dv"):
        got = simulated.run(problem, x[name])
        assert alarms(answers(problem, got, (name,)), count=500), name
        assert not alarms(answers(problem, simulated.run(problem, 0.1 * x[name]), (name,)))


@pytest.mark.slow
def test_a_scale_error_of_1e_4_is_found_at_2048_tokens_from_the_forward_pass_alone_and_from_dq():
    problem = plain(length=2048, width=128, heads=1, workers=1)
    noise = predict(simulated.attention_of(problem), "bf16", simulated.geometry_of(problem))
    truth, directions = simulated.truth_of(problem), simulated.directions(problem)
    names = ("o", "dq")
    allowances = {name: allowance_for("bf16", name) for name in names}
    directions = {name: directions[name] for name in names}
    assert max(detectable(noise, truth, directions, allowances).values()) < 1e-4
    for error, expected in ((1e-4, True), (0.0, False)):
        got = simulated.run(problem, error)
        for name in names:
            tests = examine(
                name, errors_of(got[name], truth[name]), truth[name], noise,
                allowance=allowances[name], direction=directions[name],
            )  # fmt: skip
            assert bool(alarms(tests, count=500)) == expected, (name, error)
