"""ringspec's verdict on a ring that shares nothing with it: passes when right, fails with a bug."""

import importlib.util

import pytest

from ringspec.conformance.cases.profiles import run_cases
from ringspec.conformance.run.load import load_target
from ringspec.conformance.run.suite import run

pytestmark = pytest.mark.torch
if importlib.util.find_spec("torch") is not None:
    from independent.target import independent, independent_bf16

# Golden cases, whose truth is stored, and one in so many of them; a prime, so that all kinds are met.
GOLDEN = ("ring/", "attention/", "block/", "merge/", "adversarial/", "number/")
STRIDE = 7


def verdict(target, cases):
    summary = run(target, cases)
    return {record.id: record.message for record in summary.failures}, summary.claimed


def test_the_right_ring_passes_a_share_of_the_core_cases():
    golden = [case for case in run_cases("core") if case.id.startswith(GOLDEN)]
    failed, claimed = verdict(independent(), golden[::STRIDE])
    assert failed == {}
    assert claimed > 30


@pytest.mark.slow
def test_the_right_ring_passes_the_core_cases():
    cases = run_cases("core")
    failed, claimed = verdict(independent(), cases)
    assert failed == {}
    assert claimed == len(cases)


def test_rings_with_a_bug_fail_the_smoke_cases():
    smoke = run_cases("smoke")
    for bug in ("causal_triangle_on_every_step", "backward_reads_step_0_keys", "dkv_one_hop_short"):
        failed, _ = verdict(independent_bf16(bug), smoke)
        assert failed


def test_the_command_line_finds_the_ring_and_each_bug():
    place = f"{__file__.rpartition('test_target.py')[0]}target.py"
    assert load_target(f"{place}:independent_bf16").name == "independent-bfloat16"
    wrong = load_target(f"{place}:bf16.dkv_against_kv")
    assert wrong.name == "independent-bfloat16 with dkv_against_kv"
    assert "dk and dv travel" in wrong.notes[0]
