"""nki_suite runs the tests of a checkout that is laid out like AWS's, and tabulates them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each run starts pytest several times
PROGRAM = Path(__file__).with_name("nki_suite.py")
CONFTEST = """
def pytest_addoption(parser):
    for name in ("--test-mode", "--platform-target", "--output-directory"):
        parser.addoption(name)
    parser.addoption("--force-local-cleanup", action="store_true")
    parser.addini("artifacts_dir", "a directory")
"""
TESTS = """
import random
import time
import nki
import pytest

REFERENCE = "The size of tensor a (384) must match the size of tensor b (3) at non-singleton dimension 2"

def test_passes():
    assert nki.cpu_simulate

@pytest.mark.parametrize("n", [1, 2])
def test_fails(n):
    raise ValueError(f"tile {n}: at most 4; got 5")

def test_races():
    raise ValueError("nki_impl.sim.errors.RaceError: two cores")

def test_upstream():
    raise RuntimeError(REFERENCE)

def test_upstream_replaced_by_the_assertion_of_a_negative_test():
    try:
        raise RuntimeError(REFERENCE)
    except RuntimeError as error:
        assert "validation" in str(error)

def test_runs_out_of_memory():
    raise MemoryError

@pytest.mark.parametrize("n", random.sample(range(10**9), 1))
def test_drawn(n):
    pass

def test_sleeps():
    time.sleep(60)

@pytest.mark.skip(reason="large")
def test_skipped():
    pass
"""


def program(*arguments: object) -> str:
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_table_lists_each_kind_of_result_and_a_second_run_runs_nothing_again(tmp_path: Path):
    folder = tmp_path / "test" / "integration" / "nkilib" / "core"
    folder.mkdir(parents=True)
    (tmp_path / "test" / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test" / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_tile.py").write_text(TESTS)
    results = tmp_path / "results.jsonl"
    for _ in range(2):
        program("run", tmp_path, "--out", results, "--seconds", 1)
        assert len(results.read_text().splitlines()) == 2 * 10
    table = program("table", results)
    assert (
        "| `core/test_tile` | 2 | 2 | 1 | 2 | 1 | 1 | 1 | 0 | 2 x `ValueError: tile N: at most N` |"
        in table
    )
    assert "2 of 4 tests that ran to their end passed; races are counted apart." in table


def test_the_table_says_how_the_tests_with_a_race_end_when_races_are_warnings(tmp_path: Path):
    race, passed = "nkilib/test_a.py::b", {"outcome": "passed", "seconds": 1, "why": ""}
    strict, warned = tmp_path / "strict.jsonl", tmp_path / "warned.jsonl"
    strict.write_text(
        json.dumps({"test": race, "outcome": "failed", "why": "RaceError: two cores"})
    )
    warned.write_text(json.dumps({"test": race} | passed))
    table = program("table", strict, "--warned", warned)
    assert "The 1 tests with a race, with RINGSPEC_NKI_RACES=warn: 1 passed." in table


def test_a_sample_is_spread_over_the_file(tmp_path: Path):
    folder = tmp_path / "test" / "integration" / "nkilib"
    folder.mkdir(parents=True)
    (tmp_path / "test" / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test" / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_many.py").write_text(
        "import pytest\n@pytest.mark.parametrize('n', range(12))\ndef test_it(n):\n    pass\n"
    )
    results = tmp_path / "results.jsonl"
    program("run", tmp_path, "--out", results, "--sample", 3)
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    names = [line["test"] for line in lines if line["outcome"] == "passed"]
    assert program("table", results).count("| 3 | 0 | 0 | 0 | 0 | 0 | 0 | 9 |") == 2
    assert [name.split("[")[1] for name in names] == ["0]", "4]", "8]"]


FAILED = "ValidationException: Validation failed for ['X_out']"


@pytest.mark.parametrize(
    ("weights", "cache", "expected"),
    [("1", "True", "| 0 | 0 | 0 | 1 |"), ("0", "True", "| 0 | 1 | 0 | 0 |"), ("1", "False", "| 0 | 1 | 0 | 0 |")],
)  # fmt: skip
def test_wrong_numbers_are_upstream_only_with_static_weights_and_an_fp8_cache(
    tmp_path: Path, weights: str, cache: str, expected: str
):
    name = f"8-1-128-7168-False-bfloat16-{weights}-2-False-True-False-False-False-None-True-{cache}-default-1"
    line = {"test": f"nkilib/test_attention_block_tkg.py::t[{name}]", "why": FAILED}
    results = tmp_path / "results.jsonl"
    results.write_text(json.dumps(line | {"outcome": "failed", "seconds": 1}))
    assert f"test_attention_block_tkg` {expected}" in program("table", results)
