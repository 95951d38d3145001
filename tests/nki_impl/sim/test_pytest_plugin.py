"""The plugin runs tests of a kernel repository that is written like AWS's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
import nki_cpu_simulator.nki.builtin
import nki_cpu_simulator.nki.isa.constants
import nki_cpu_simulator.nki.language.dtypes as dtypes
import nki_cpu_simulator.nki.tensor
import nki_cpu_simulator.nki.typing as nt
import neuron_dtypes as dt
import neuronxcc.nki.typing as old
from neuronxcc.starfish.support.dtype import static_cast
from nki.compiler.frontend import NKIFrontend, ParserFrontend
from nki.isa import constants
from nki_cpu_simulator import nki
from test.utils.perf_analysis_private import analyze_trace
from test.utils.scripts.remote_lock_scripts import LockResult, LockStatus
from test.utils import present

assert old.tensor is nt.mutable_tensor
assert constants.oob_mode is nki.isa.oob_mode
"""

KERNELS = """
import nki
import nki.isa as nisa
import nki.language as nl
import nki.collectives as ncc
import numpy as np
import pytest

@nki.jit
def double(x):
    tile, out = nl.ndarray(x.shape, x.dtype), nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=tile, src=x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
    nisa.dma_copy(dst=out, src=tile)
    return out

@nki.jit
def raced(x):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=x)
    if nl.program_id(0) == 1:
        nisa.dma_copy(dst=out[0:1], src=nl.zeros((1, x.shape[1]), x.dtype))
    return out

@nki.jit
def change(x):
    nisa.dma_copy(dst=x, src=nl.zeros(x.shape, x.dtype))
    return x

@nki.jit
def add_up(x, groups):
    mine = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm, name="mine")
    both = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm, name="both")
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=mine, src=x)
    ncc.all_reduce(dsts=[both], srcs=[mine], op=nl.add, replica_group=groups)
    nisa.dma_copy(dst=out, src=both)
    return out
"""

TESTS = """
from kernels import *

X = np.arange(6, dtype=np.float32).reshape(2, 3)

@pytest.mark.parametrize("lnc", [1, 2])
def test_double(lnc):
    assert np.allclose(nki.cpu_simulate(double)[lnc](x=X), 2 * X, rtol=1e-2)

def test_an_input_that_a_kernel_writes_does_not_change_for_the_caller():
    given = X.copy()
    assert (nki.cpu_simulate(change)[1](x=given) == 0).all()
    assert (given == X).all()

def test_the_environment_chooses_the_target(monkeypatch):
    @nki.jit
    def generation(x):
        assert nisa.get_nc_version().name == "gen4"
        return double(x)

    monkeypatch.setenv("NKI_NC_VERSION", "gen4")
    nki.cpu_simulate(generation)[1](x=X)
"""

RACES = """
from kernels import *

def test_numbers_of_a_kernel_with_a_race():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.array_equal(nki.cpu_simulate(raced)[2](x=x)[1], x[1])

def test_a_kernel_without_a_race():
    assert (nki.cpu_simulate(change)[2](x=np.ones((2, 3), np.float32)) == 0).all()
"""

UNWRITTEN = """
import numpy as np
import pytest
from nki_cpu_simulator import nki
import nki.isa as nisa
import nki.language as nl

def half(x):
    out = nl.ndarray((4, 3), nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out[0:2], src=x)
    return out

def test_the_rest_is_zero():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    got = nki.cpu_simulate(half)[1](x=x)
    assert np.array_equal(got, np.concatenate([x, np.zeros((2, 3))]))

def test_the_rest_is_an_error_again(monkeypatch):
    monkeypatch.delenv("RINGSPEC_NKI_UNWRITTEN", raising=False)
    with pytest.raises(Exception, match="never written"):
        nki.cpu_simulate(half)[1](x=np.ones((2, 3), np.float32))
"""

REPORTS = """
def pytest_runtest_logreport(report):
    if report.when == "call":
        races = [text for name, text in report.user_properties if name == "race"]
        print(report.nodeid.split("::")[1], report.outcome, len(races), *races)
"""

ORCHESTRATOR = """
class InferenceException(Exception):
    pass

INF_ARTIFACT_DIR_NAME = "inference"

def normalize_golden_output(golden, rank_id=0):
    return golden.for_rank(rank_id)

class Orchestrator:
    def _run_simulator_inference(self, kernel_under_test):
        return "one rank"
"""

RANKS = """
from types import SimpleNamespace as Space
from kernels import *
from test.utils.test_orchestrator import InferenceException, Orchestrator

def run(tmp_path, ranks, expected=("out",)):
    arrays = [np.full((2, 3), r + 1.0, np.float32) for r in range(ranks)]
    group = ncc.ReplicaGroup([list(range(ranks))])
    maker = Orchestrator()
    maker.fs_config = Space(artifacts_output_directory_path=str(tmp_path))
    target = Space(get_nc_gen=lambda: "gen3")
    golden = Space(for_rank=lambda r: {name: arrays[r] for name in expected})
    return maker._run_simulator_inference(Space(
        kernel_func=add_up,
        kernel_input=Space(for_rank=lambda r: {"x.must_alias_input": arrays[r], "groups": group}),
        compiler_input=Space(logical_nc_config=1, platform_target=target),
        inference_args=Space(collective_ranks=ranks),
        validation_args=Space(golden_output=golden),
    ))

def test_one_rank_is_left_to_the_orchestrator(tmp_path):
    assert run(tmp_path, 1) == "one rank"
    assert Orchestrator()._compiled_kernel is None

def test_every_rank_writes_its_outputs(tmp_path):
    folder = run(tmp_path, 3)
    for rank in range(3):
        out = np.fromfile(f"{folder}/output_worker_{rank}/out", np.float32)
        assert np.allclose(out, 6.0, rtol=1e-2)

def test_another_number_of_outputs_fails(tmp_path):
    with pytest.raises(InferenceException, match="expected 2 outputs"):
        run(tmp_path, 2, ("out", "more"))
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    utils = tmp_path / "test" / "utils"
    utils.mkdir(parents=True)
    for folder in (tmp_path / "test", utils):
        (folder / "__init__.py").write_text("")
    (utils / "present.py").write_text("")
    (utils / "test_orchestrator.py").write_text(ORCHESTRATOR)
    (tmp_path / "kernels.py").write_text(KERNELS)
    (tmp_path / "test" / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test" / "test_kernels.py").write_text(TESTS)
    (tmp_path / "test" / "test_ranks.py").write_text(RANKS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def run(repository: Path, *options: str, **environment: str) -> str:
    import os

    command = [sys.executable, "-m", "pytest", "-p", "nki_impl.sim.pytest_plugin", "-q", "test"]
    command += options
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTEST_ADDOPTS", "NKI_NC_VERSION")}
    done = subprocess.run(
        command, cwd=repository, env=kept | environment, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def only_file(repository: Path, name: str, text: str) -> None:
    """Put one file of tests in the place of all others."""
    for other in (repository / "test").glob("test_*.py"):
        other.unlink()
    (repository / "test" / name).write_text(text)


def test_the_tests_of_a_repository_pass_with_the_plugin(repository: Path) -> None:
    output = run(repository)
    assert "7 passed" in output and "failed" not in output, output


def test_scaled_outputs_make_them_fail(repository: Path) -> None:
    output = run(repository, RINGSPEC_NKI_SCALE="1.05")
    assert "3 failed, 4 passed" in output, output


def test_with_races_warn_the_numbers_are_checked_and_the_report_lists_the_races(
    repository: Path,
) -> None:
    only_file(repository, "test_races.py", RACES)
    (repository / "listing.py").write_text(REPORTS)
    output = run(repository, "-p", "listing", "-s", RINGSPEC_NKI_RACES="warn")
    assert "test_numbers_of_a_kernel_with_a_race passed 1 dma_copy: an unnamed tensor" in output
    assert "nothing orders the two; 2 elements" in output
    assert "test_a_kernel_without_a_race passed 0" in output, output
    assert "RaceError" in run(repository)


def test_with_unwritten_zeros_memory_begins_with_zeros_and_otherwise_reading_it_is_an_error(
    repository: Path,
) -> None:
    only_file(repository, "test_unwritten.py", UNWRITTEN)
    assert "2 passed" in run(repository, RINGSPEC_NKI_UNWRITTEN="zeros")
    output = run(repository)
    assert "1 failed, 1 passed" in output and "never written" in output, output
    assert "error or zeros" in run(repository, RINGSPEC_NKI_UNWRITTEN="zero")
