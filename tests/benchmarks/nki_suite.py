"""Run the test suite of AWS's nki-library on the simulator, and write the table of docs/nki/official_suite.md.

``run CHECKOUT --out FILE`` runs each test file of the checkout in a process of its own, and appends one JSON line per
test to FILE. Tests that FILE already lists are not run again, so an interrupted run can continue. ``table FILE`` prints
the table: module, passed, failed, races, failures of the library itself, slow, out of memory, skipped, not run, and why.
A race is a test that ended with a RaceError; ``--warned FILE`` takes the results of a run with RINGSPEC_NKI_RACES=warn and says for how many of
these tests the numbers are right.

The checkout is not changed; its tests need the packages that its pyproject.toml lists in the extra ``test``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path("test", "integration", "nkilib")
RESULTS, SAMPLE, SECONDS = "NKI_SUITE_RESULTS", "NKI_SUITE_SAMPLE", "NKI_SUITE_SECONDS"


class TooSlow(BaseException):
    """A test took longer than the limit. Not an Exception, so that no test counts it as an expected failure."""


KINDS = ("passed", "failed", "race", "upstream", "slow", "memory", "skipped", "not run")
OUT_OF_MEMORY = (
    r"MemoryError|Unable to allocate [\d.]+ \wiB|can't (allocate memory|start new thread)"
)
UPSTREAM = {
    r"RuntimeError: The size of tensor a \(\d+\) must match the size of tensor b \(3\) at non-singleton dimension 2": (
        "the PyTorch reference of attention_block_tkg multiplies [B, S, (q + 2 k) d] by scales of length 3 "
        "(qkv_tkg_torch.py), before the kernel runs"
    ),
    r"test_(quantize_to_mx|mxfp_load)\.py::(.|\n)*never written": (
        "expects zeros in the partitions of the scale tile that quantize_mx does not write"
    ),
    r"test_rmsnorm_mx_quantize_tkg\.py::(.|\n)*result\[2\](.|\n)*never written": (
        "expects zeros in the rows of the output of scales that the test's kernel does not write"
    ),
    r"test_mlp_proj_mxfp4\.py::(.|\n)*never written.*test_mlp_proj_mxfp4\.py:\d+\)": (
        "the test's kernel copies rows that the library says are garbage, and overwrites them in HBM"
    ),
    r"test_gen_mask_tkg\.py::(.|\n)*KeyError: 'mask_out_hbm'": (
        "release of 2026-04-13: the test renamed an input and reads it by its old name, before the kernel runs"
    ),
    r"Incorrect shape for qkv weight scale for row quantization": (
        "the test passes scales (128, 3), and the kernel's own check asks for one for each column, (128, 768)"
    ),
    r"Incorrect shape for weight scale for row quantization": (
        "the test passes scales (128, 1), and the kernel's own check asks for one for each column, (128, H)"
    ),
    r"test_attention_block_tkg.*-bfloat16-1-2-(\w+-){5}[\w.]+-\w+-True-.*\n(.|\n)*Validation failed for": (
        "static weights and an fp8 cache: the reference rounds nothing and the scores are far apart, so that one "
        "rounding selects other keys; nki_static_fp8.py compares the kernel with a float64 model of its source"
    ),
    r"test_attention_block_tkg(.|\n)*nc_matmul: moving: N <= 512 free elements; got (1024|2048)": (
        "the kernel multiplies 1024 or 2048 columns at once where nc_matmul takes 512"
    ),
}
"""Failures of the library or its tests: a pattern of the test's name, a new line and the message; and the reason."""

# The hooks of the child processes, which load this file as a plugin.


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Seed `random`, from which the suite draws the parameters of many tests, for each file.

    Without a seed the names and the number of the tests change with each run, so a run could not continue.
    """
    if isinstance(collector, pytest.Module):
        random.seed(0)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that have no result yet, or an evenly spaced sample of them; list all of them as not run."""
    known = {line["test"]: line["outcome"] for line in read(Path(os.environ[RESULTS]))}
    done = {test for test, outcome in known.items() if outcome != "not run"}
    for item in items:
        if item.nodeid not in known:
            _append({"test": item.nodeid, "outcome": "not run", "seconds": 0, "why": ""})
    wanted = int(os.environ[SAMPLE])
    runs = [item for item in items if not item.get_closest_marker("skip")]
    if wanted and len(runs) > wanted:
        kept = {runs[i * len(runs) // wanted].nodeid for i in range(wanted)}
        skipped = [item for item in items if item.get_closest_marker("skip")]
        items[:] = [item for item in runs if item.nodeid in kept] + skipped
    items[:] = [item for item in items if item.nodeid not in done]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Stop a test after the time limit."""

    def stop(*_: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(int(os.environ[SECONDS]))
    try:
        yield
    except TooSlow:
        pytest.fail(f"slower than {os.environ[SECONDS]} s", pytrace=False)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append the result of a test to the file of results."""
    if report.when != "call" and report.outcome == "passed":
        return
    line = {
        "test": report.nodeid,
        "outcome": report.outcome,
        "seconds": round(report.duration, 2),
        "why": "" if report.passed else _reason(report),
    }
    if re.search(r"^(Failed: )?slower than \d+ s$", line["why"], re.MULTILINE):
        line["outcome"] = "slow"
    _append(line)


def _append(line: dict[str, Any]) -> None:
    with open(os.environ[RESULTS], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    # A negative test replaces the kernel's exception by its own AssertionError, so list the whole chain.
    chain = [str(crash.message) for _, crash, _ in getattr(report.longrepr, "chain", ()) if crash]
    return "\n".join(message[:2000] for message in chain[-4:]) or str(report.longrepr)[:2000]


# The program.


def run(arguments: argparse.Namespace) -> int:
    """Run the test files of the checkout: each in a process of its own, or all in ``jobs`` processes."""
    checkout = arguments.checkout.resolve()
    out = arguments.out.resolve()
    if not (checkout / TESTS).is_dir():
        print(f"no directory {checkout / TESTS}: pass a checkout of nki-library", file=sys.stderr)
        return 2
    out.touch()
    environment = os.environ | {
        RESULTS: str(out),
        SAMPLE: str(arguments.sample),
        SECONDS: str(arguments.seconds),
        "PYTHONPATH": os.pathsep.join(
            [
                str(checkout / "src"),
                str(checkout / "src" / "nkilib_src"),
                str(Path(__file__).parent),
            ]
        ),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",  # some parameters are drawn from sets
    }
    files = [
        str(file.relative_to(checkout))
        for file in sorted((checkout / TESTS).rglob("test_*.py"))
        if not arguments.module or re.search(arguments.module, str(file.relative_to(checkout)))
    ]
    work = out.parent / (out.stem + "-artifacts")
    options = [
        "-q",
        "-p",
        "nki_impl.sim.pytest_plugin",
        "-p",
        "nki_suite",
        "-p",
        "no:cacheprovider",
    ]
    options += ["--tb=short", "--show-capture=no", "--test-mode", "simulation"]
    options += ["--force-local-cleanup", "--platform-target", arguments.target]
    options += ["--output-directory", str(work), "-o", f"artifacts_dir={work}"]
    if arguments.jobs > 1:
        options += ["-n", str(arguments.jobs), "--dist=load", "--maxschedchunk=1"]
    for part in [files] if arguments.jobs > 1 else [[file] for file in files]:
        print(*part, sep="\n", flush=True)
        command = [sys.executable, "-m", "pytest", *options, *part]
        with open(out.with_suffix(".log"), "a", encoding="utf-8") as log:
            subprocess.run(
                command, cwd=checkout, env=environment, stdout=log, stderr=log, check=False
            )
    return 0


def read(path: Path) -> list[dict[str, Any]]:
    """Return the results in a file; the last result of a test counts."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return list({line["test"]: line for line in lines}.values())


def _is_upstream(line: dict[str, Any]) -> bool:
    return any(re.search(pattern, f"{line['test']}\n{line['why']}") for pattern in UPSTREAM)


def summary(why: str) -> str:
    """Return the kind of a failure: the exception and the rule, without the numbers of the case."""
    last = next((part for part in reversed(why.splitlines()) if part.strip()), "")
    text = re.sub(r"; got .*", "", last.split(" (at ")[0])
    return re.sub(r"\d+", "N", re.sub(r"^(\w+\.)*(\w+: )", r"\2", text))[:160]


def table(arguments: argparse.Namespace) -> int:
    """Print the results by module as a Markdown table."""
    results = read(arguments.results)
    modules: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    warned = read(arguments.warned) if arguments.warned else []
    warned_outcomes = {line["test"]: line["outcome"] for line in warned}
    races: Counter[str] = Counter()
    for line in results:
        name = re.sub(r"^.*nkilib/|\.py::.*$", "", line["test"])
        outcome = line["outcome"]
        if outcome == "failed" and _is_upstream(line):
            outcome = "upstream"
        elif outcome == "failed" and "RaceError" in line["why"]:
            outcome = "race"
            races[warned_outcomes.get(line["test"], "not run")] += 1
        elif outcome == "failed" and re.search(OUT_OF_MEMORY, line["why"]):
            outcome = "memory"
        modules[name][outcome] += 1
        if outcome == "failed":
            reasons[name][summary(line["why"])] += 1
    print(f"{datetime.date.today()}: {arguments.title}\n")
    print(f"| module | {' | '.join(KINDS)} | why failed |")
    print(f"| {'--- | ' * (len(KINDS) + 2)}".rstrip())
    total: Counter[str] = Counter()
    for name, counts in sorted(modules.items()):
        total += counts
        why = "; ".join(f"{n} x `{text}`" for text, n in reasons[name].most_common(4))
        print(f"| `{name}` | {_cells(counts)} | {why.replace('|', '/')} |")
    print(f"| all | {_cells(total)} | |")
    decided = total["passed"] + total["failed"]
    print(
        f"\n{total['passed']} of {decided} tests that ran to their end passed; races are counted apart."
    )
    if warned:
        counts = ", ".join(f"{races[outcome]} {outcome}" for outcome in sorted(races))
        print(f"\nThe {total['race']} tests with a race, with RINGSPEC_NKI_RACES=warn: {counts}.")
    return 0


def _cells(counts: Counter[str]) -> str:
    return " | ".join(str(counts[kind]) for kind in KINDS)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run", help="run the suite of a checkout")
    one.add_argument("checkout", type=Path)
    one.add_argument(
        "--out", type=Path, required=True, help="file of results, one JSON line per test"
    )
    one.add_argument("--module", help="regular expression: only test files whose path matches")
    one.add_argument(
        "--sample", type=int, default=0, help="at most this many tests of a file; 0: all"
    )
    one.add_argument(
        "--seconds", type=int, default=120, help="time limit of a test; then it counts as slow"
    )
    one.add_argument(
        "--jobs", type=int, default=1, help="processes; more than 1 needs pytest-xdist"
    )
    one.add_argument("--target", default="trn2", help="trn2 or trn3")
    one.set_defaults(call=run)
    two = commands.add_parser("table", help="print a file of results as a table")
    two.add_argument("results", type=Path)
    two.add_argument(
        "--warned",
        type=Path,
        help="results of the tests with a race, run with RINGSPEC_NKI_RACES=warn",
    )
    two.add_argument("--title", default="AWS's nki-library on the simulator")
    two.set_defaults(call=table)
    arguments = parser.parse_args()
    code: int = arguments.call(arguments)
    return code


if __name__ == "__main__":
    sys.exit(main())
