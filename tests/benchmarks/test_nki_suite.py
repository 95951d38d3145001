"""nki_suite runs the tests of a checkout that is laid out like AWS's, and tabulates them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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
import os
import random
import signal
import time
import nki
import numpy as np
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
@pytest.mark.parametrize("m", [int(np.random.randint(10**9))])
def test_drawn(n, m):
    pass

def test_sleeps():
    time.sleep(60)

def test_crashes():
    os.kill(os.getpid(), signal.SIGSEGV)

@pytest.mark.skip(reason="large")
def test_skipped():
    pass
"""


def program(*arguments: object) -> str:
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def checkout(folder: Path, name: str, tests: str) -> Path:
    """Write a checkout with one file of tests, and return where its results belong."""
    tests_folder = folder / "test" / "integration" / "nkilib" / "core"
    tests_folder.mkdir(parents=True)
    (folder / "test" / "conftest.py").write_text(CONFTEST)
    (folder / "test" / "pytest.ini").write_text("[pytest]\n")
    (tests_folder / f"{name}.py").write_text(tests)
    return folder / "results.jsonl"


def lines(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()]


def test_the_table_lists_each_kind_of_result_and_a_second_run_runs_nothing_again(tmp_path: Path):
    results = checkout(tmp_path, "test_tile", TESTS)
    for _ in range(2):
        program("run", tmp_path, "--out", results, "--seconds", 1, "--jobs", 2)
        # each test is listed when it is collected, and those that are not skipped when they end
        assert len(lines(results)) == 11 + 10
    table = program("table", results)
    assert (
        "| `core/test_tile` | 2 | 3 | 1 | 2 | 1 | 1 | 1 | 0 | 2 x `ValueError: tile N: at most N`; "
        "1 x `the process ended with status -N` |"
    ) in table
    assert "2 of 5 tests that ran to their end passed (40.0 %); 33.3 % if races fail." in table


def test_a_run_that_ends_early_lists_what_was_not_run_and_continues(tmp_path: Path):
    results = checkout(
        tmp_path, "test_two", "def test_a():\n    pass\n\n\ndef test_b():\n    pass\n"
    )
    program("run", tmp_path, "--out", results, "--until", 0)
    assert [line["outcome"] for line in lines(results)] == ["not run", "not run"]
    program("run", tmp_path, "--out", results)
    assert [line["outcome"] for line in lines(results)[2:]] == ["passed", "passed"]


def test_slow_tests_run_again_when_told(tmp_path: Path):
    results = checkout(tmp_path, "test_one", "import time\n\n\ndef test_a():\n    time.sleep(2)\n")
    program("run", tmp_path, "--out", results, "--seconds", 1)
    program("run", tmp_path, "--out", results, "--seconds", 60)
    assert [line["outcome"] for line in lines(results)] == ["not run", "slow"]
    program("run", tmp_path, "--out", results, "--seconds", 60, "--again", "slow,memory")
    assert lines(results)[-1]["outcome"] == "passed"


def test_what_exceeds_the_memory_runs_again_at_the_end_with_more(tmp_path: Path):
    allocate = "def test_large():\n    bytearray(400 << 20)\n\n\ndef test_small():\n    pass\n"
    results = checkout(tmp_path, "test_memory", allocate)
    program("run", tmp_path, "--out", results, "--jobs", 2, "--memory", 0.25)
    first, second, third = lines(results)[2:]
    assert {first["outcome"], second["outcome"]} == {"failed", "passed"}
    assert third["test"].endswith("test_large") and third["outcome"] == "passed"


def test_small_sizes_come_first(tmp_path: Path):
    many = "import pytest\n\n\n@pytest.mark.parametrize('n', [64, 2, 512, 8])\ndef test_it(n):\n    pass\n"
    results = checkout(tmp_path, "test_many", many)
    program("run", tmp_path, "--out", results)
    names = [line["test"].split("[")[1] for line in lines(results) if line["outcome"] == "passed"]
    assert names == ["2]", "8]", "64]", "512]"]


def test_inputs_drawn_without_a_seed_are_the_same_in_each_run(tmp_path: Path):
    draw = "import numpy as np\n\n\ndef test_a():\n    raise ValueError(np.random.random())\n"
    results = checkout(tmp_path, "test_draw", draw)
    for _ in range(2):
        program("run", tmp_path, "--out", results, "--again", "failed")
    _, first, second = lines(results)
    assert first["why"] == second["why"] != ""


def test_a_file_that_cannot_be_collected_is_a_failure(tmp_path: Path):
    results = checkout(tmp_path, "test_broken", "import no_such_module\n")
    program("run", tmp_path, "--out", results)
    (line,) = lines(results)
    assert line["outcome"] == "failed" and "no_such_module" in line["why"]


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
    many = (
        "import pytest\n\n\n@pytest.mark.parametrize('n', range(12))\ndef test_it(n):\n    pass\n"
    )
    results = checkout(tmp_path, "test_many", many)
    program("run", tmp_path, "--out", results, "--sample", 3)
    names = [line["test"] for line in lines(results) if line["outcome"] == "passed"]
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
