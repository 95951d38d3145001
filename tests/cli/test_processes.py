"""The command line as a program: pipes, terminals, signals, progress."""

import os
import signal
import subprocess
import sys
import time

import pytest
from cli.commands import SMALL, call, run_program

import ringspec as rs
from ringspec.cli.commands import simulate
from ringspec.rings.lockstep import Moment


def test_the_module_runs_and_prints_the_same_into_a_pipe(tmp_path):
    result = run_program("simulate", "--workers", "4", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == call("--workers", 4).stdout
    version = run_program("--version", cwd=tmp_path)
    assert version.stdout == f"ringspec {rs.__version__} (specification {rs.SPEC_VERSION})\n"


def test_bad_input_of_a_process_is_exit_code_2_without_traceback(tmp_path):
    (tmp_path / "x.npz").write_bytes(b"PK\x03\x04 truncated")
    result = run_program("simulate", "--input", "x.npz", cwd=tmp_path)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("Error: expected an .npz file in x.npz")
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT to a child process")
def test_control_c_exits_130_and_leaves_nothing_behind(tmp_path):
    # Says when it has begun, so that the signal meets the work and not the imports. A shell starts its
    # background jobs with the signal ignored, and children inherit that.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import ringspec.cli as cli, ringspec.cli.commands.simulate as s\n"
        "ring = s.ring\n"
        "s.ring = lambda *a, **o: print('begun', flush=True) or ring(*a, **o)\n"
        "cli.main(['simulate', '--length', '16384', '--workers', '8', '--heads', '1',"
        " '--save', 'x', '--no-states'])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "begun\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (130, "", "interrupted\n")
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_a_terminal_gets_a_progress_bar_on_stderr_and_a_pipe_gets_plain_text(tmp_path):
    import pty

    terminal, end = pty.openpty()
    program = (
        "import ringspec.cli as cli, ringspec.cli.commands.simulate as s\n"
        "s.LONG = 0\n"
        "cli.main(['simulate', '--workers', '3', '--length', '300'])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=end,
    )
    os.close(end)
    out, _ = process.communicate(timeout=600)
    shown = os.read(terminal, 1 << 16)
    os.close(terminal)
    assert process.returncode == 0
    assert b"\x1b" not in out and out.decode().isascii()
    assert b"\x1b" in shown and b"ring" in shown


def test_no_progress_is_shown_where_stderr_is_no_terminal(monkeypatch):
    monkeypatch.setattr(simulate, "LONG", 0)
    assert call(*SMALL).stderr == ""


def test_an_observer_counts_every_step_of_the_bar(monkeypatch):
    ticks, moments = [], []

    def counted(*arguments, observer, **options):
        def observe(moment: Moment) -> None:
            moments.append(moment)
            observer(moment)

        return rs.ring(*arguments, observer=observe, **options)

    class Bar:
        def __init__(self, what, total, wanted):
            self.what, self.total = what, total

        def __enter__(self):
            return lambda: ticks.append(self.what)

        def __exit__(self, *_):
            assert ticks.count(self.what) == self.total

    monkeypatch.setattr(simulate, "ring", counted)
    monkeypatch.setattr(simulate.progress, "stepping", Bar)
    for circulation in ("kv", "q", "gather"):
        ticks.clear()
        assert call(*SMALL, "--circulation", circulation).exit_code == 0
    assert moments and "dense reference" in ticks
