"""The covering set: every pair of values of twelve factors, each run within the bit-tolerance."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from covering import covering

from .covered import FACTORS, MORE, cost, covering_runs, report

RUNS = {run["seed"]: run for run in covering_runs()}
# Cheap ones with every value of every factor.
FAST = [5, 10, 13, 15, 16, 20, 22, 28, 31, 42, 56, 62, 66, 74]


def name(seed: int) -> str:
    run = RUNS[seed]
    heads = "x".join(map(str, run["heads"]))
    return f"{seed}-w{run['workers']}-{run['mask']}-{heads}-s{run['length']}-{run['dtype']}"


def test_the_stored_set_is_the_generated_one() -> None:
    generated = [{"seed": seed, **row} for seed, row in enumerate(covering(FACTORS) + MORE)]
    assert list(RUNS.values()) == generated
    assert len(RUNS) <= 120


def test_every_pair_of_values_occurs() -> None:
    for one, two in itertools.combinations(FACTORS, 2):
        got = {(str(run[one]), str(run[two])) for run in RUNS.values()}
        assert got == {(str(a), str(b)) for a in FACTORS[one] for b in FACTORS[two]}


def test_the_fast_runs_have_every_value() -> None:
    assert len(FAST) <= 14
    for factor, values in FACTORS.items():
        assert {str(RUNS[seed][factor]) for seed in FAST} == set(map(str, values)), factor


def broken(run: dict[str, Any]) -> list[str]:
    found = report(run)
    return found["broken_same_order"] + found["broken_any_order"]


@pytest.mark.parametrize("seed", FAST, ids=name)
def test_a_run_is_within_both_levels(seed: int) -> None:
    assert broken(RUNS[seed]) == []


# One dS lies at a rounding tie, which moves a row of dk by 6.6 standard deviations. Beyond tolerance.PREDICTED tokens
# these are those of a whole row, too small for its largest elements.
AT_A_TIE = {37: pytest.mark.xfail(reason="one dS at a rounding tie: 6.6 standard deviations")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=AT_A_TIE.get(seed, ()))
        for seed in sorted(set(RUNS) - set(FAST), key=lambda x: cost(RUNS[x]))
    ],
    ids=name,
)
def test_the_other_runs_are_within_both_levels(seed: int) -> None:
    assert broken(RUNS[seed]) == []
