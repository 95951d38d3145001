"""ParallelKernelBench's reference rings: right, but the benchmark gives the backward one o and lse of local keys.

Needs torch and RINGSPEC_PARALLEL_KERNEL_BENCH, the folder of a checkout. What is said about the benchmark is confirmed
by ``by_hand_parallel_kernel_bench.py``, a program without ringspec.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringspec.conformance.cases import properties
from ringspec.conformance.run.suite import run
from ringspec.conformance.targets import parallel_kernel_bench
from ringspec.errors import MissingPackageError, OptionError

BY_HAND = Path(__file__).with_name("by_hand_parallel_kernel_bench.py")
RIGHT = 2e-6  # float32 against float64; the largest error seen is 6e-7


@pytest.fixture(name="checkout")
def given_checkout():
    folder = os.environ.get(parallel_kernel_bench.VARIABLE)
    if not folder:
        pytest.skip(f"needs {parallel_kernel_bench.VARIABLE}, the folder of a checkout")
    return folder


@pytest.mark.torch
@pytest.mark.slow
def test_by_hand_the_rings_are_right_and_the_inputs_of_problem_57_are_of_local_keys(checkout):
    command = [sys.executable, str(BY_HAND), checkout]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["same_ring"]
    for part in ("given", "own_keys", "corrected"):
        for name, error in found[part].items():
            assert error <= RIGHT, (part, name)
    for part in ("whole_rows", "gradients"):
        for name, error in found[part].items():
            assert error > 0.1, (part, name)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("name", parallel_kernel_bench.FILES)
def test_the_rings_pass_with_several_workers(checkout, name):
    target = parallel_kernel_bench.target(name, checkout)
    try:
        summary = run(target, properties.cases(), only=("property/workers/*-contiguous-*",))
    finally:
        target.close()
    assert summary.counts["pass"] >= 6 and set(summary.counts) <= {"pass", "not claimed"}


def test_a_missing_checkout_is_named_with_its_variable(monkeypatch, tmp_path):
    monkeypatch.delenv(parallel_kernel_bench.VARIABLE, raising=False)
    with pytest.raises(MissingPackageError, match="set RINGSPEC_PARALLEL_KERNEL_BENCH"):
        parallel_kernel_bench.forward_ring()
    monkeypatch.setenv(parallel_kernel_bench.VARIABLE, str(tmp_path))
    with pytest.raises(OptionError, match="reference/57_ring_attention_backward_dp.py"):
        parallel_kernel_bench.backward_ring()


@pytest.mark.parametrize("name", parallel_kernel_bench.FILES)
def test_a_target_claims_one_pass_and_says_whose_o_and_lse_it_gives(tmp_path, name):
    file = tmp_path / parallel_kernel_bench.FILES[name]
    file.parent.mkdir()
    file.write_text("")
    target = parallel_kernel_bench.target(name, str(tmp_path))
    assert target.capabilities.operations == (f"ring-{name}",)
    assert target.options == {"path": str(file)}
    assert any("own keys" in one for one in target.notes) == (name == "backward")
