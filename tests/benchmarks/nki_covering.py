"""The covering set of the NKI kernels: make it, run it.

    python tests/benchmarks/nki_covering.py make
    python tests/benchmarks/nki_covering.py run [--jobs 2] [--only N] [--most COST] > out.jsonl

``make`` writes tests/nki_impl/covering_runs.json: every value and every pair of values of the factors in
tests/nki_impl/covered.py, and a few runs beyond pairs. ``run`` prints a line of JSON for each run, the
costly ones first, and ends with status 1 if any of them broke a level of the bit-tolerance. It needs
what ringspec needs and pytest, runs in the root of the repository, and gives each process one thread.
"""

import argparse
import json
import multiprocessing
import os
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")


def make() -> None:
    """Write the set, one run a line."""
    from covering import covering

    from tests.nki_impl.covered import FACTORS, FILE, MORE

    runs = [{"seed": seed, **row} for seed, row in enumerate(covering(FACTORS) + MORE)]
    lines = ",\n".join("  " + json.dumps(run) for run in runs)
    FILE.write_text('{"runs": [\n' + lines + "\n]}\n", encoding="utf-8")
    print(f"{len(runs)} runs")


def one(run: dict[str, Any]) -> dict[str, Any]:
    """One run; an exception is told as what it broke."""
    from tests.nki_impl.covered import report

    try:
        return report(run)
    except Exception:
        return {**run, "error": traceback.format_exc()}


def run(jobs: int, only: list[int] | None, most: float) -> int:
    """All runs, or those of some numbers, or of some cost; returns the exit status."""
    from tests.nki_impl.covered import cost, covering_runs

    chosen = [x for x in covering_runs() if cost(x) <= most and (not only or x["seed"] in only)]
    chosen.sort(key=cost, reverse=True)
    bad = 0
    # Not fork: BLAS may have threads already.
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for result in pool.imap_unordered(one, chosen):
            print(json.dumps(result), flush=True)
            wrong = "error" in result or result["broken_same_order"] or result["broken_any_order"]
            bad += bool(wrong)
    print(f"{len(chosen)} runs, {bad} outside the bit-tolerance", file=sys.stderr)
    return 1 if bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("make", "run"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="*", help="numbers (seeds) of runs")
    parser.add_argument("--most", type=float, default=float("inf"), help="largest cost of a run")
    given = parser.parse_args()
    if given.command == "make":
        make()
        return 0
    return run(given.jobs, given.only, given.most)


if __name__ == "__main__":
    sys.exit(main())
