"""The script tests/benchmarks/bench_exact.py runs, and what it says adds up."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "bench_exact.py"


@pytest.mark.slow
def test_the_benchmark_runs_and_measures_every_program():
    command = [sys.executable, str(SCRIPT), "--lengths", "4", "6", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = json.loads(done.stdout)["lines"]
    seen = {(line["program"], line["pass"], line["length"]) for line in lines}
    passes = ("forward", "backward")
    want = {(p, w, n) for p in ("exact", "numpy") for w in passes for n in (4, 6)}
    want |= {(p, w, 16) for p in ("exact", "mpmath") for w in passes}
    assert seen == want and len(lines) == len(want)
    for line in lines:
        assert 0 < line["seconds"] < 100 and line["peak MiB"] > 10 and line["runs"] == 3
        assert line["program"] == "exact" or line["exact / this"] > 0
