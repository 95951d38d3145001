"""Run the test suite of AWS's nki-library on the simulator, and write the table of docs/nki/official_suite.md.

``run CHECKOUT --out FILE`` collects the tests of the checkout in one process, and runs each in a fork of it, ``--jobs``
at once, those with small sizes first. It appends one JSON line per test to FILE; tests that have a result there are not
run again, so an interrupted run can continue. A test that exceeds ``--memory`` is run again at the end, with the memory
of eight processes. ``table FILE`` prints the table: module, passed, failed, races, failures of the library itself,
slow, out of memory, skipped, not run, and why. A race is a test that ended with a RaceError; ``--warned FILE`` takes the
results of a run with RINGSPEC_NKI_RACES=warn and says for how many of these tests the numbers are right.

The checkout is not changed; its tests need the packages that its pyproject.toml lists in the extra ``test``.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from _pytest.runner import runtestprotocol

TESTS = Path("test", "integration", "nkilib")
OPTIONS = "NKI_SUITE_OPTIONS"
TOGETHER = 8
"""Tests that ran out of memory get the limits of this many processes when they are run again."""


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

# The hooks of the process that runs the tests, which loads this file as a plugin.


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Seed `random` and NumPy, from which the suite draws the parameters of many tests, for each file.

    Without a seed the names and the number of the tests change with each run, so a run could not continue.
    """
    if isinstance(collector, pytest.Module):
        _seed()


def _seed() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (the generator that the suite uses)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """List the tests that have no result yet, and keep those of them that run: a sample, the small sizes first."""
    options = _options()
    known = {line["test"]: kind(line) for line in read(options.out)}
    by_file: dict[Path, list[pytest.Item]] = defaultdict(list)
    for item in items:
        skip = item.get_closest_marker("skip")
        if item.nodeid not in known:
            why = skip.kwargs.get("reason", "") if skip else ""
            options.append(item.nodeid, "skipped" if skip else "not run", why=why)
        if not skip:
            by_file[item.path].append(item)
    again = {"not run", *options.again}
    order: dict[pytest.Item, float] = {}
    for runs in by_file.values():
        n = min(options.sample or len(runs), len(runs))
        kept = sorted((runs[i * len(runs) // n] for i in range(n)), key=size)
        order |= {item: i / n for i, item in enumerate(kept)}
    wanted = [item for item in order if known.get(item.nodeid, "not run") in again]
    items[:] = sorted(wanted, key=order.__getitem__)  # all files advance alike


def size(item: pytest.Item) -> int:
    """Return the product of the numbers in a test's parameters, by which the time of tests is guessed."""
    parameters = item.nodeid.partition("[")[2]
    return math.prod(int(number) for number in re.findall(r"\d+", parameters) if int(number))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """List a file that cannot be collected as one failed test."""
    if report.failed:
        _options().append(report.nodeid, "failed", why=f"not collected: {report.longrepr}"[-2000:])


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Run the tests, each in a separate process, and those that ran out of memory again."""
    options = _options()
    gc.freeze()  # so that a collection in a child does not copy the pages of its parent
    _run_all(session.items, options.jobs, options.memory)
    if options.memory and options.jobs > 1:
        outcomes = {line["test"]: kind(line) for line in read(options.out)}
        again = [item for item in session.items if outcomes[item.nodeid] == "memory"]
        together = min(TOGETHER, options.jobs)
        _run_all(again, options.jobs // together, options.memory * together)
    return True


def _run_all(items: list[pytest.Item], jobs: int, memory: float) -> None:
    options = _options()
    running: dict[int, tuple[pytest.Item, float]] = {}
    waiting = items[::-1]
    while waiting or running:
        while waiting and len(running) < jobs and time.time() < options.end:
            item = waiting.pop()
            child = os.fork()
            if not child:
                _run_one(item, memory)
            running[child] = item, time.time()
        if not running:
            return  # the time is up
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            item, start = running.pop(child)
            shutil.rmtree(options.work / str(child), ignore_errors=True)
            if status:
                _append_end(item, status, time.time() - start)
            continue
        for late_child, (_, start) in running.items():
            if time.time() - start >= options.seconds:
                os.kill(late_child, signal.SIGKILL)
        time.sleep(0.01)


def _append_end(item: pytest.Item, status: int, seconds: float) -> None:
    """Append the result of a test whose process ended without one."""
    options = _options()
    why = f"the process ended with status {os.waitstatus_to_exitcode(status)}"
    if status == signal.SIGKILL and seconds >= options.seconds:
        options.append(item.nodeid, "slow", seconds, f"slower than {options.seconds} s")
    elif status == signal.SIGKILL:  # by the system, because its memory is full
        options.append(item.nodeid, "failed", seconds, f"MemoryError: {why}")
    else:
        options.append(item.nodeid, "failed", seconds, why)


def _run_one(item: pytest.Item, memory: float) -> None:
    """Run one test in this process, a fork, and end it."""
    options = _options()
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    if memory:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + int(memory * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    _seed()  # some inputs are drawn, too
    item.config.option.output_directory = str(options.work / str(os.getpid()))
    code = 1
    try:
        reports = runtestprotocol(item, log=False, nextitem=None)
        bad = [report for report in reports if not report.passed]
        told = bad[0] if bad else reports[-1]
        seconds = sum(report.duration for report in reports)
        options.append(item.nodeid, told.outcome, seconds, _reason(told) if bad else "")
        code = 0
    except BaseException as error:
        options.append(item.nodeid, "failed", why=f"{type(error).__name__}: {error}")
        code = 0
    finally:
        os._exit(code)


class Options(NamedTuple):
    """What the process that runs the tests has to know."""

    out: Path
    work: Path
    sample: int
    seconds: int
    jobs: int
    memory: float
    end: float
    again: list[str]

    def append(self, test: str, outcome: str, seconds: float = 0, why: str = "") -> None:
        """Append a result to the file of results."""
        line = {"test": test, "outcome": outcome, "seconds": round(seconds, 2), "why": why}
        with open(self.out, "ab", buffering=0) as file:  # one write, as several processes append
            file.write(f"{json.dumps(line)}\n".encode())


def _options() -> Options:
    given = json.loads(os.environ[OPTIONS])
    return Options(**(given | {"out": Path(given["out"]), "work": Path(given["work"])}))


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    # A negative test replaces the kernel's exception by its own AssertionError, so list the whole chain.
    chain = [str(crash.message) for _, crash, _ in getattr(report.longrepr, "chain", ()) if crash]
    return "\n".join(message[:2000] for message in chain[-4:]) or str(report.longrepr)[:2000]


# The program.


def run(arguments: argparse.Namespace) -> int:
    """Run the tests of the checkout."""
    checkout = arguments.checkout.resolve()
    out = arguments.out.resolve()
    if not (checkout / TESTS).is_dir():
        print(f"no directory {checkout / TESTS}: pass a checkout of nki-library", file=sys.stderr)
        return 2
    out.touch()
    work = out.parent / (out.stem + "-artifacts")
    options = {name: getattr(arguments, name) for name in ("sample", "seconds", "jobs", "memory")}
    options |= {"out": str(out), "work": str(work), "again": arguments.again.split(",")}
    options["end"] = time.time() + arguments.until
    path = [checkout / "src", checkout / "src" / "nkilib_src", Path(__file__).parent]
    environment = os.environ | {
        OPTIONS: json.dumps(options),
        "PYTHONPATH": os.pathsep.join([*map(str, path), os.environ.get("PYTHONPATH", "")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",  # some parameters are drawn from sets
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-s", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-p", "nki_impl.sim.pytest_plugin", "-p", "nki_suite"]
    command += ["--continue-on-collection-errors", "--test-mode", "simulation"]
    command += ["--force-local-cleanup", "--platform-target", arguments.target]
    command += ["--output-directory", str(work), "-o", f"artifacts_dir={work}"]
    for file in sorted((checkout / TESTS).rglob("test_*.py")):
        if re.search(arguments.module, str(file.relative_to(checkout))):
            command.append(str(file.relative_to(checkout)))
    with open(out.with_suffix(".log"), "a", encoding="utf-8") as log:
        subprocess.run(command, cwd=checkout, env=environment, stdout=log, stderr=log, check=False)
    shutil.rmtree(work, ignore_errors=True)
    print(", ".join(f"{n} {name}" for name, n in Counter(map(kind, read(out))).most_common()))
    return 0


def read(path: Path) -> list[dict[str, Any]]:
    """Return the results in a file; the last result of a test counts."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return list({line["test"]: line for line in lines}.values())


def kind(line: dict[str, Any]) -> str:
    """Return the column of the table that a result belongs to."""
    if line["outcome"] != "failed":
        return str(line["outcome"])
    if any(re.search(pattern, f"{line['test']}\n{line['why']}") for pattern in UPSTREAM):
        return "upstream"
    if "RaceError" in line["why"]:
        return "race"
    return "memory" if re.search(OUT_OF_MEMORY, line["why"]) else "failed"


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
        outcome = kind(line)
        if outcome == "race":
            races[warned_outcomes.get(line["test"], "not run")] += 1
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
    passed, decided = total["passed"], total["passed"] + total["failed"]
    share, strict = (100 * passed / max(1, n) for n in (decided, decided + total["race"]))
    print(
        f"\n{passed} of {decided} tests that ran to their end passed ({share:.1f} %); "
        f"{strict:.1f} % if races fail."
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
    one.add_argument(
        "--module", default="", help="regular expression: only test files whose path matches"
    )
    one.add_argument(
        "--sample", type=int, default=0, help="at most this many tests of a file; 0: all"
    )
    one.add_argument(
        "--seconds", type=int, default=120, help="time limit of a test; then it counts as slow"
    )
    one.add_argument("--jobs", type=int, default=1, help="tests that run at once")
    one.add_argument(
        "--memory", type=float, default=0, help="GiB of address space for a test; 0: no limit"
    )
    one.add_argument(
        "--until", type=float, default=math.inf, help="start no test after this many seconds"
    )
    one.add_argument(
        "--again", default="", help="run tests with these outcomes again: slow,memory,failed"
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
