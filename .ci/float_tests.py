"""Run the tests whose outcome can depend on floating point in every arrangement but the usual one of this machine.

    python .ci/float_tests.py                            the tests below, in every other arrangement
    python .ci/float_tests.py --whole --only '*1 thread' every test, under each BLAS kernel
    python .ci/float_tests.py --only 'Haswell*' tests/fast -k bits

Each arrangement (.ci/arrangements.py) is one pytest in a separate process, as many at once as there are cores: those
with two threads as well, because idle threads sleep; the one with most tests has two. In the end that process says what
BLAS and NumPy used. An arrangement that this processor lacks is named and left out, and so is the one that the leg
``tests`` runs. Exit code 1 where a test failed or an arrangement was not in force.

One arrangement runs all tests but those marked slow and those below, so a new file is in by itself. The others repeat a
few files and folders.
"""

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from arrangements import Arrangement, arrangements, faults, in_force

ROOT = Path(__file__).parents[1]
CLOSING = 40  # lines of a log that are shown where a test failed
# Tests of readouts whose rings multiply matrices.
PLANTED = tuple(
    f"tests/conformance/readout/test_{name}.py"
    for name in ("moved_keys", "padding", "pairs", "parts", "windows")
)
# What no rounding reaches, or what another leg holds in every arrangement, and why.
LEFT_OUT = {
    "ringspec": "examples of docstrings, whose products are tiny",
    "tests/bad_input": "what is refused",
    "tests/cli": "the command line around what the other folders test",
    "tests/conformance/adapters/test_command.py": "programs behind pipes, and how they fail",
    "tests/conformance/adapters/test_offline.py": "files that go to another machine and back",
    "tests/conformance/adapters/test_process_target.py": "processes of targets and what they write",
    "tests/conformance/cases/test_calls.py": "which calls are made",
    "tests/conformance/cases/test_layout_cases.py": "integers",
    "tests/conformance/cases/test_long_blocks.py": "larger blocks for the probes of test_probes.py",
    "tests/conformance/diagnose/test_kill_table.py": "files of a table",
    "tests/conformance/diagnose/test_mutants.py": "known bugs, whose deviations are far above roundings",
    "tests/conformance/explain/test_known_bugs.py": "what is stored of known bugs",
    "tests/conformance/report/test_badge.py": "files of reports",
    "tests/conformance/report/test_coverage.py": "what a report lists as not tested",
    "tests/conformance/report/test_diff.py": "files of reports",
    "tests/conformance/report/test_page.py": "pages of reports",
    "tests/conformance/report/test_report.py": "files of reports",
    "tests/conformance/reproduce/test_reproduce.py": "files of reproducers",
    "tests/conformance/reproduce/test_reproducers.py": "files of reproducers",
    "tests/conformance/run/test_expected.py": "which failures are expected",
    "tests/conformance/run/test_judges.py": "processes that judge, and how they end",
    "tests/conformance/run/test_load.py": "targets found by name",
    "tests/conformance/run/test_runner.py": "processes of targets and how they end",
    "tests/conformance/target/test_declared.py": "what is declared",
    "tests/conformance/test_author_examples.py": "what pages show",
    "tests/conformance/test_cluster_page.py": "what a page shows",
    "tests/conformance/testing/test_checked.py": "what is shown of a run",
    "tests/conformance/testing/test_testing.py": "the pytest plugin around the judges",
    "tests/conformance/testing/test_testing_diagnosis.py": "the pytest plugin around the diagnosis",
    "tests/exact": "exact truth, which the leg vectors generates in every arrangement",
    "tests/fast/test_interrupts.py": "interrupts and forks, whose results are compared with those of the same run",
    "tests/ground/test_plainfile.py": "files that are none",
    "tests/nki_impl/sim/test_pytest_plugin.py": "the pytest plugin around the simulator",
    "tests/nki_impl/sim/test_races.py": "races that the simulator names",
    "tests/nki_impl/test_claims.py": "what is claimed",
    "tests/nki_impl/test_faults.py": "faults that the simulator names",
    "tests/nki_impl/test_faults_of_order.py": "faults that the simulator names",
    "tests/plan": "costs, which no product enters",
    "tests/project": "documents and the tree",
    "tests/render/test_browse.py": "pages",
    "tests/render/test_figures.py": "pictures",
    "tests/render/test_verdicts_page.py": "pages",
    "tests/rings/test_documents.py": "integers",
    "tests/schemes/test_bad_input.py": "what is refused",
    "tests/schemes/test_broken_schemes.py": "what is refused",
    "tests/schemes/test_page.py": "text",
    "tests/schemes/test_show.py": "text",
    "tests/spec/test_document_layouts.py": "integers",
    "tests/vectors": "golden vectors, which the leg vectors generates in every arrangement",
    **{
        f"tests/conformance/readout/test_{name}.py": "more kinds of what test_readout.py and test_blocks.py read"
        for name in (
            "batches",
            "bias",
            "calls",
            "cases",
            "documents",
            "dropout",
            "fault_sets",
            "features",
            "gradients",
            "groups",
            "heads",
            "layouts",
            "rings",
            "selected",
            "sinks",
            "tiles",
        )
    },
    **dict.fromkeys(
        PLANTED, "more of the same; planted faults change results far more than roundings do"
    ),
}
# All that one arrangement runs: the first kernel that this machine does not choose by itself, with one thread. The others
# repeat these, which reach every product and every elementary function.
REPEATED = (
    "tests/compare/test_bounds.py",
    "tests/compare/test_noise.py",
    "tests/compare/test_verdict.py",
    "tests/fast",
    "tests/nki_impl/sim/isa/test_tensor.py",
    "tests/nki_impl/test_ring_backward.py",
    "tests/nki_impl/test_ring_forward.py",
    "tests/nki_impl/test_tolerance.py",
    "tests/rings",
    "tests/spec",
    "tests/truth",
)
# With two threads: these divide the same products as the rest.
REPEATED_WITH_THREADS = ("tests/fast", "tests/rings", "tests/spec")


def arguments_of(few: bool, threads: int, whole: bool, given: list[str]) -> list[str]:
    """What pytest is called with; ``few``: only what is repeated in every arrangement.

    >>> arguments_of(False, 1, True, ["-k", "bits"])
    ['-q', '-n', '0', '-p', 'no:cacheprovider', '-k', 'bits']
    >>> arguments_of(True, 2, False, [])[-3:]
    ['tests/fast', 'tests/rings', 'tests/spec']
    >>> arguments_of(False, 1, False, [])[:3]
    ['-q', '-n', '2']
    """
    # The arrangement that runs most tests would go on alone, after all others. Its two processes inherit its environment.
    processes = "0" if few or whole or given else "2"
    chosen = [f"--ignore={path}" for path in LEFT_OUT]
    if few:
        chosen += REPEATED_WITH_THREADS if threads > 1 else REPEATED
    if whole or any((ROOT / one).exists() for one in given):
        chosen = []
    return ["-q", "-n", processes, "-p", "no:cacheprovider", *chosen, *given]


def most_tested(there: Iterable[Arrangement], own: set[str]) -> str:
    """The arrangement that runs most tests: one thread, and a kernel not in ``own``, which this machine chooses by itself.

    >>> there = [Arrangement(core, {}, core, 1) for core in ("Nehalem", "Haswell")]
    >>> most_tested(there, {"Haswell"}), most_tested(there, {"Nehalem"})
    ('Nehalem', 'Haswell')
    """
    found = [one.name for one in there if one.threads == 1 and one.core and one.core not in own]
    return found[0] if found else ""


def without_usual(chosen: list[Arrangement], own: set[str]) -> list[Arrangement]:
    """Leave out what this machine chooses by itself, with one thread: the leg ``tests`` runs all tests in it.

    >>> chosen = [Arrangement(core, {}, core, 1) for core in ("Nehalem", "Haswell")]
    >>> [one.name for one in without_usual(chosen, {"Haswell"})]
    Haswell: left out, the leg tests runs all tests in it
    ['Nehalem']
    """
    usual = [one for one in chosen if one.threads == 1 and own == {one.core}]
    for one in usual:
        print(f"{one.name}: left out, the leg tests runs all tests in it", flush=True)
    return [one for one in chosen if one not in usual]


def longest_first(chosen: list[Arrangement], most: str) -> list[Arrangement]:
    """The order in which no core is idle at the end: most tests, then NumPy without SIMD, then one thread."""
    return sorted(chosen, key=lambda one: (one.name != most, one.core is not None, one.threads))


def child(report: str, arguments: list[str]) -> int:
    """Run pytest here, and write what this process used."""
    import pytest

    code = int(pytest.main(arguments))
    Path(report).write_text(json.dumps(in_force()), encoding="utf-8")
    return code


def run(one: Arrangement, folder: str, most: str, whole: bool, given: list[str]) -> list[str]:
    """One arrangement; what is wrong with it. Says how it went. ``most``: the one that runs most tests."""
    few = one.name != most
    arguments = arguments_of(few, one.threads, whole, given)
    report, started = Path(folder) / f"{one.name}.json", time.monotonic()
    done = subprocess.run(
        [sys.executable, __file__, "--child", str(report), *arguments],
        cwd=ROOT,
        env={**os.environ, **one.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = done.stdout.splitlines() or ["no output"]
    shown = lines[-CLOSING:] if done.returncode else lines[-1:]
    took = f"{one.name}: {time.monotonic() - started:.0f} s: "
    print(took + "\n".join(shown), flush=True)
    found = [f"{one.name}: pytest ended with {done.returncode}"] if done.returncode else []
    if not report.exists():
        return [*found, f"{one.name}: did not say what it used"]
    return found + faults(one, json.loads(report.read_text(encoding="utf-8")))


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        return child(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--whole", action="store_true", help="leave out nothing but slow tests")
    parser.add_argument("--only", default="*", help="pattern of names of arrangements")
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="how many to use")
    given, rest = parser.parse_known_args()
    own = {core for core, _ in in_force()["blas"]}
    every = list(arrangements())
    most = most_tested(every, own)
    chosen = [one for one in every if fnmatch.fnmatchcase(one.name, given.only)]
    if given.only == "*" and not rest and not given.whole:
        chosen = without_usual(chosen, own)
    found = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.cores) as pool:
        asked = partial(run, folder=folder, most=most, whole=given.whole, given=rest)
        for part in pool.map(asked, longest_first(chosen, most)):
            found += part
    print(f"{len(chosen)} arrangements, {len(found)} faults", *found, sep="\n")
    return 1 if found or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
