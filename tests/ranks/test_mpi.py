"""Four MPI ranks on this machine: the same bits as lockstep, and an end within a bounded time."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringspec.conformance.targets.reference_mpi import launcher

pytestmark = pytest.mark.mpi
ROOT = Path(__file__).parents[2]
IDENTICAL = Path(__file__).with_name("programs") / "identical.py"
FAILING = Path(__file__).with_name("programs") / "failing.py"
TARGET = "ringspec.conformance.targets.reference_mpi:reference_mpi"
# A ring that computes for some seconds. A busy machine may take a second or two for an answer.
LONG = ("simulate", "--length", "8192", "--heads", "4", "--compare", "rows", "--timeout", "8")
# Seconds in which a run must end, whatever becomes of its ranks: a run that waits for ever fails.
END = 240


def environment():
    paths = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    return os.environ | {"PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"} | open_mpi()


def open_mpi():
    """Open MPI wants leave to run as root, and to start more ranks than there are cores (4, 5)."""
    allowed = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    slots = {
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    return dict.fromkeys(allowed, "1") | slots


def command(*words, ranks=4):
    """The launcher that RINGSPEC_MPIEXEC names, or else mpiexec; it starts ``ranks`` Pythons."""
    return [*launcher(), "-n", str(ranks), sys.executable, *words]


def started(*words, ranks=4):
    """The output of mpiexec, stdout and stderr apart, and its status."""
    done = subprocess.run(
        command(*words, ranks=ranks),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=END,
        cwd=ROOT,
    )
    return done.stdout, done.stderr, done.returncode


@pytest.mark.rule("RING-4", "RING-5", "RING-12")
def test_four_ranks_give_the_bits_of_lockstep_and_subrings_and_refusals_are_agreed():
    out, errors, status = started(str(IDENTICAL))
    assert status == 0, errors[-3000:]
    assert out.splitlines() == [
        "identical: 54",
        "subrings: as one ring",
        "refusals: on every rank",
    ]


@pytest.mark.parametrize(
    "what, others, own",
    [
        (
            "observer",
            "CommunicationError (failed-worker): ValueError on rank 2: broken: here",
            "ValueError (none): broken: here",
        ),
        (
            "other ring size",
            "CommunicationError (disagreement): another ring size on rank 2 than on rank 0",
            "CommunicationError (disagreement): another ring size on rank 2 than on rank 0",
        ),
        ("no ring size", "LayoutError (worker-count): 3", "LayoutError (worker-count): 3"),
    ],
)
def test_what_one_rank_does_otherwise_every_rank_hears_by_name(what, others, own):
    out, errors, status = started(str(FAILING), what)
    assert status == 0, errors[-3000:]
    assert out.splitlines() == [f"{rank} {own if rank == 2 else others}" for rank in range(4)]


def test_simulate_under_mpiexec_prints_the_report_of_lockstep_once():
    words = ("-m", "ringspec", "simulate", "--layout", "zigzag", "--circulation", "q")
    for form in ((), ("--json",)):
        out, errors, status = started(*words, *form)
        assert status == 0, errors
        alone = subprocess.run(
            [sys.executable, *words, *form],
            env=environment(),
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert out.splitlines() == alone.stdout.splitlines()
    # Each rank says who it is, and each wait says for whom.
    assert len(re.findall(r"^ringspec: rank \d is process \d+ on ", errors, re.M)) == 4
    assert re.search(r"^ringspec: rank \d waits (after|in) (for|back)ward step \d ", errors, re.M)


@pytest.mark.parametrize(
    "words, said",
    [
        (("simulate", "--layut", "zigzag"), "No such option '--layut'"),
        (("simulate", "--heads", "many"), "'many' is not a valid integer"),
        (("simulat",), "expected a command; got 'simulat'"),
        (("--colour",), "No such option '--colour'"),
        (("simulate", "--comm", "lockstep"), "expected one process for --comm lockstep"),
    ],
    ids=str,
)
def test_wrong_words_on_the_command_line_are_said_once(words, said):
    out, errors, status = started("-m", "ringspec", *words, ranks=2)
    assert status == 2 and out == ""
    assert errors.count(said) == errors.count("Error: ") == 1, errors


def test_a_wrong_number_of_workers_is_said_once():
    out, errors, status = started("-m", "ringspec", "simulate", "--workers", "3", "--no-waits")
    assert status == 2 and out == ""
    assert errors.count("Error: expected --workers 4") == 1 and "mpiexec -n 3" in errors


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_is_killed_or_stopped_ends_the_run_and_is_named(name):
    program = subprocess.Popen(
        command("-m", "ringspec", *LONG),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert program.stderr is not None
    lines, victim = [], None
    try:
        for line in program.stderr:
            lines.append(line)
            if found := re.match(r"ringspec: rank 1 is process (\d+) ", line):
                victim = int(found[1])
            if victim is not None and "waits at the start" in line:
                break
        time.sleep(0.7)
        os.kill(victim, getattr(signal, name))
        lines += program.communicate(timeout=END)[1].splitlines(keepends=True)
    finally:
        program.kill()
    errors = "".join(lines)
    assert program.returncode != 0, errors
    when = r"(before the ranks form rings|at the start|(after|in) (for|back)ward step \d)"
    pattern = rf"rank \d waits {when} .*rank \d"
    waits = [line for line in lines if re.match(r"ringspec: rank \d waits", line)]
    assert waits and all(re.search(pattern, line) for line in waits), errors
    if name == "SIGSTOP":
        assert program.returncode == 4, errors
        lost = [line for line in lines if "rank 1 does not answer" in line]
        waits = r": rank {} waits (after|in) \w+ step \d "
        assert any(re.search(waits.format(2) + "for .* from rank 1", line) for line in lost)
        assert any(re.search(waits.format(0), line) for line in lost), errors


def test_the_target_reference_mpi_passes_rings_of_two_and_of_four_workers():
    words = ("-m", "ringspec", "check", TARGET, "--json")
    for only in ("ring/zigzag-causal-w2", "ring/float32-zigzag-w4"):
        words += ("--only", only)
    done = subprocess.run(
        [sys.executable, *words, "--profile", "smoke"],
        env=environment(),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert done.stdout.count('"outcome": "pass"') == 2
