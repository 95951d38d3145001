"""``ringspec smoke | check | replay``: exit codes, text, reports, and the same run under pytest."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from cli.commands import assert_one_paragraph, run_program
from click.testing import CliRunner

import ringspec
from ringspec.cli import main
from ringspec.cli.commands import check_run
from ringspec.cli.shared import progress as vectors_bar
from ringspec.conformance.report.report import read_report

TARGETS = '''
import dataclasses, os, signal, time
import numpy as np
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.targets.reference import reference_float64 as good

class Changed:
    """The reference, with one thing done to its results or its process."""

    capabilities = dataclasses.replace(good.capabilities, workers=(1, 2))
    notes = "made for a test"

    def __init__(self, name, change):
        self.name, self.change = name, change

    def run(self, call):
        return self.change(call, good.run(call))

def wrong_dk(call, result):
    if call.layout == "zigzag" and result.dk is not None:
        result.dk = [2 * np.asarray(x) for x in result.dk]
    return result

def crashing(call, result):
    if call.layout == "striped":
        os.write(2, b"about to crash\\n")
        os.kill(os.getpid(), signal.SIGSEGV)
    return result

def interrupted(call, result):
    if call.layout == "striped":
        raise KeyboardInterrupt
    return result

def stays(call, result):
    if call.layout == "striped":
        open("pid", "w").write(str(os.getpid()))
        open("here", "w").close()
        time.sleep(80)
    return result

waiting = Changed("waiting", stays)
wrong = Changed("\\x1b[31mwrong", wrong_dk)
crash = Changed("crash", crashing)
stopped = Changed("stopped", interrupted)
class Closing(Changed):
    def close(self):
        raise RuntimeError("the device is gone")

closing = Closing("closing", lambda call, result: result)
nothing = Changed("nothing", None)
nothing.capabilities = Capabilities(operations=("merge",), formats=("float16",))
'''
ONLY = ("--only", "ring/*-causal-w2", "--only", "attention/plain")
WRONG = "ring/zigzag-causal-w2"


@pytest.fixture
def names_no_bug(monkeypatch):
    """For tests of failures whose cause is not the point: to compare each with every known bug takes a second."""
    monkeypatch.setattr(check_run, "Diagnoser", lambda: None)


@pytest.fixture
def target(tmp_path, monkeypatch):
    """A function that names a target of the file above."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(TARGETS)
    return lambda name: f"mine.py:{name}"


def call(*arguments, code=0):
    result = CliRunner().invoke(main, [str(one) for one in arguments])
    assert result.exit_code == code, result.output
    return result


def check(spec, *arguments, code=0, timeout=0, only=ONLY):
    """Some cases of profile smoke."""
    given = ("--profile", "smoke", "--timeout", timeout, *only, *arguments)
    return call("check", spec, *given, code=code)


def test_a_right_target_passes_and_the_headline_says_of_how_many(target):
    parts = ("ring/*", "attention/*", "merge/*")
    result = check(target("good"), only=[word for part in parts for word in ("--only", part)])
    last = result.stdout.splitlines()[-1]
    assert last.startswith("passed ") and last.endswith(" claimed, 0 not claimed")
    words = last.split()
    assert words[1] == words[3] and int(words[1]) >= 8
    assert result.stderr == "" and result.stdout.isascii()


def test_a_wrong_target_fails_with_tensor_worker_place_and_the_command_that_repeats_it(target):
    result = check(target("wrong"), code=1)
    assert f"{WRONG}: mismatch" in result.stdout
    assert "dk of worker 0" in result.stdout and "dk of worker 1" in result.stdout
    assert "dv of worker" not in result.stdout
    assert f"repeat it: ringspec replay mine.py:wrong {WRONG}" in result.stdout
    assert "\x1b" not in result.stdout and "note: made for a test" in result.stdout


def test_replay_runs_one_case_alone_and_tells_it_whole(target):
    result = call("replay", target("wrong"), WRONG, "--timeout", 0, code=1)
    assert "1 case;" in result.stdout and "dk of worker 1" in result.stdout
    assert "largest error in units of the bound: o " in result.stdout
    assert result.stdout.splitlines()[-1] == "passed 0 of 1 claimed, 0 not claimed"
    call("replay", target("wrong"), "ring/contiguous-causal-w2", "--timeout", 0)


def test_a_crash_is_one_outcome_and_the_run_goes_on(target):
    result = check(target("crash"), "--json", code=1, timeout=60)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    outcomes = {line["id"]: line for line in lines[1:-1]}
    crashed = outcomes["ring/striped-causal-w2"]
    assert crashed["outcome"] == "crash" and "SIGSEGV" in crashed["message"]
    assert "about to crash" in crashed["message"]
    assert outcomes["ring/zigzag-causal-w2"]["outcome"] == "pass"
    assert lines[-1]["complete"] is True


def test_a_target_that_cannot_be_closed_is_bad_input_and_a_sentence(target):
    result = check(target("closing"), code=2)
    assert "passed " in result.stdout  # the run itself is told
    assert "a close() of mine.py:closing that returns" in result.stderr
    assert "the device is gone" in result.stderr


def test_nothing_executed_is_a_failure_of_its_own(target):
    result = check(target("nothing"), code=3)
    assert "no case was executed" in result.stdout


def test_ctrl_c_leaves_a_partial_report_that_says_so(target, tmp_path):
    files = ("--report", "r.jsonl", "--junit", "r.xml", "--html", "r.html")
    result = check(target("stopped"), *files, code=130)
    assert "interrupted" in result.stderr and "not run" in result.stdout
    chosen = read_report(tmp_path / "r.jsonl")
    outcomes = {record.id: record.outcome for record in chosen.records}
    assert not chosen.complete and outcomes["ring/striped-causal-w2"] == "not run"
    assert outcomes["ring/contiguous-causal-w2"] == "pass"
    assert "Incomplete" in (tmp_path / "r.html").read_text()
    assert 'type="incomplete"' in (tmp_path / "r.xml").read_text()


def on_terminal(folder, *arguments, interrupt_at=None, typed=()):
    """Runs the program with a terminal of its own for stdin and stderr: exit code, stdout, stderr.

    Ctrl-C is typed when the file ``interrupt_at`` is there. With ``typed``, lines for the prompts of
    a debugger, stdout is the terminal too.
    """
    import fcntl
    import pty
    import select
    import termios

    terminal, end = pty.openpty()
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"from ringspec.cli import main; main({[str(one) for one in arguments]!r})"
    )
    with (folder / "stdout").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm"},
            stdin=end,
            stdout=end if typed else out,
            stderr=end,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
    os.close(end)
    shown, deadline, lines = b"", time.monotonic() + 600, list(typed)
    try:
        while time.monotonic() < deadline:
            if interrupt_at is not None and interrupt_at.exists():
                interrupt_at.unlink()
                os.write(terminal, b"\x03")
            if not select.select([terminal], [], [], 0.1)[0]:
                continue
            try:
                piece = os.read(terminal, 1 << 16)
            except OSError:  # nobody has the other end any more
                break
            if not piece:
                break
            shown += piece
            if lines and shown.count(b"(Pdb)") > len(typed) - len(lines):
                os.write(terminal, lines.pop(0))
        code = process.wait(200)
    finally:
        process.kill()
        os.close(terminal)
    return code, (folder / "stdout").read_text(), shown.decode()


needs_terminal = pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")


@needs_terminal
def test_a_terminal_sees_a_bar_that_counts_cases_and_stdout_holds_no_trace_of_it(target, tmp_path):
    given = ("--profile", "smoke", *ONLY, "--timeout", 60)
    code, out, shown = on_terminal(tmp_path, "check", target("good"), *given)
    assert code == 0 and "\x1b" not in out
    total = out.splitlines()[-1].split()[3]
    assert "smoke" in shown and f"/{total}" in shown and "\x1b[" in shown
    assert "attention/plain" in shown or "ring/" in shown


DEBUGGED = """
import os, sys
from types import SimpleNamespace
from ringspec.conformance.targets.reference import reference_float64 as good

def run(call):
    breakpoint()
    return good.run(call)

os.chdir("/")
mine = SimpleNamespace(name="mine", capabilities=good.capabilities, run=run)
"""


@needs_terminal
def test_timeout_0_serves_a_debugger_on_the_terminal(tmp_path):
    (tmp_path / "debugged.py").write_text(DEBUGGED)
    code, _, shown = on_terminal(
        tmp_path,
        *("check", "debugged.py:mine", "--profile", "smoke", "--timeout", 0),
        *("--only", "ring/zigzag-causal-w2", "--report", "r.jsonl"),
        typed=(b"p 6 * 7, call.workers\n", b"c\n"),
    )
    assert code == 0, shown
    assert "(Pdb)" in shown and "(42, 2)" in shown
    assert "\x1b" not in re.sub("\x1b\\[([0-9;]*m|[?]2004[hl])", "", shown)  # styles, and no bar
    assert read_report(tmp_path / "r.jsonl").complete


DEBUGGED_RANK = """
from pathlib import Path
from ringspec.conformance.adapters.torch_processes import TorchTarget
from ringspec.conformance.target.capabilities import Capabilities

mine = TorchTarget(str(Path(__file__).parent / "functions.py") + ":stops", Capabilities(layouts=("zigzag",), recipe="float32"))
"""
STOPS = """
import importlib.util
located = importlib.util.spec_from_file_location("given", {path!r})
given = importlib.util.module_from_spec(located)
located.loader.exec_module(given)

def stops(q, k, v, *, group, call):
    if call.rank == 2:
        breakpoint()
    return given.gathered_attention(q, k, v, group=group, call=call)
"""


@pytest.mark.torch
@needs_terminal
def test_timeout_0_serves_a_debugger_of_one_torch_rank(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGSPEC_RANK", "2")
    functions = Path(__file__).parents[1] / "conformance" / "adapters" / "torch_functions.py"
    (tmp_path / "debugged.py").write_text(DEBUGGED_RANK)
    (tmp_path / "functions.py").write_text(STOPS.format(path=str(functions)))
    code, _, shown = on_terminal(
        tmp_path,
        *("check", "debugged.py:mine", "--timeout", 0, "--only", "ring/float32-zigzag-w4"),
        typed=(b"p 6 * 7, call.workers, call.rank\n", b"c\n"),
    )
    assert code == 0, shown
    assert "(Pdb)" in shown and "(42, 4, 2)" in shown


EXITS, IS_KILLED = "os._exit(0)", "os.write(2, b'x'); os.kill(os.getpid(), 9)"


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        (EXITS, 0),
        (IS_KILLED, 60),
        pytest.param(EXITS, 60, marks=pytest.mark.slow),
        pytest.param(IS_KILLED, 0, marks=pytest.mark.slow),
    ],
)
def test_an_end_of_the_process_while_the_target_is_loaded_is_status_2(tmp_path, seconds, line):
    (tmp_path / "ends.py").write_text(f"import os\n{line}\nmine = 1\n")
    given = ("--profile", "smoke", "--timeout", str(seconds))
    done = run_program("check", "ends.py:mine", *given, cwd=tmp_path)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stdout == "" and "expected a target ends.py:mine that can be loaded" in done.stderr
    assert ("exit status 0" if "_exit" in line else "SIGKILL") in done.stderr


def test_without_a_terminal_a_line_tells_now_and_then_how_far_the_run_is(
    target, monkeypatch, capfd
):
    monkeypatch.setattr(vectors_bar, "SECONDS_BETWEEN_LINES", 0.01)
    with vectors_bar.counting("core") as tick:
        wait_for(capfd, "core: nothing done yet")
        tick(3, 10, "ring/plain")
        wait_for(capfd, "core: 3 of 10 done, the last was ring/plain; 0 s")
    capfd.readouterr()
    time.sleep(0.1)
    assert capfd.readouterr().err == ""
    result = check(target("good"))
    assert "smoke: " in result.stderr and "smoke: " not in result.stdout
    assert vectors_bar.SECONDS_BETWEEN_LINES <= 30


def wait_for(capfd, text):
    err, deadline = "", time.monotonic() + 600
    while text not in err and time.monotonic() < deadline:
        time.sleep(0.01)
        err += capfd.readouterr().err
    assert text in err


@needs_terminal
def test_ctrl_c_on_a_terminal_ends_the_run_and_the_processes_and_leaves_a_partial_report(
    target, tmp_path
):
    spec = target("waiting")
    code, out, shown = on_terminal(
        tmp_path,
        *("check", spec, "--profile", "smoke", "--only", "ring/*causal-w2", "--timeout", 90),
        *("--report", "r.jsonl"),
        interrupt_at=tmp_path / "here",
    )
    assert code == 130 and "interrupted: the report is not complete" in shown
    assert "Traceback" not in shown and "\x1b[?25h" in shown  # the cursor is back
    chosen = read_report(tmp_path / "r.jsonl")
    outcomes = {record.id: record.outcome for record in chosen.records}
    assert not chosen.complete and "not run" in out
    assert outcomes["ring/contiguous-causal-w2"] == "pass"
    assert outcomes["ring/striped-causal-w2"] == "not run"
    child, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + 200
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_the_three_files_tell_the_same_run(names_no_bug, target, tmp_path):
    files = ("--report", "r.jsonl", "--junit", "r.xml", "--html", "r.html")
    result = check(target("wrong"), *files, code=1)
    chosen = read_report(tmp_path / "r.jsonl")
    assert chosen.complete and chosen.footer["headline"] in result.stdout
    suite = ElementTree.parse(tmp_path / "r.xml").getroot().find("testsuite")
    assert int(suite.get("tests")) == len(chosen.records)
    assert int(suite.get("failures")) == chosen.footer["summary"]["mismatch"]
    page = (tmp_path / "r.html").read_text()
    assert chosen.footer["headline"] in page and "wrong" in page and "\x1b" not in page
    assert chosen.header["vectors"]["digest"] and chosen.header["profile"] == "smoke"
    assert chosen.header["capabilities"]["workers"] == [1, 2]


def test_json_is_a_report_on_stdout_and_nothing_else(target, tmp_path):
    result = check(target("good"), "--json")
    (tmp_path / "stdout.jsonl").write_text(result.stdout)
    assert read_report(tmp_path / "stdout.jsonl").complete and result.stderr == ""


def failing_ids(tmp_path):
    chosen = read_report(tmp_path / "r.jsonl")
    return [record.id for record in chosen.records if record.outcome == "mismatch"]


def test_expected_failures_are_strict_both_ways(names_no_bug, target, tmp_path):
    check(target("wrong"), "--report", "r.jsonl", code=1)
    wrong = failing_ids(tmp_path)
    known = tmp_path / "known.toml"
    known.write_text("".join(f'["{id}"]\nreason = "dk is doubled"\n' for id in wrong))
    result = check(target("wrong"), "--expected-failures", known)
    assert "expected failure" in result.stdout.splitlines()[-1]
    result = check(target("good"), "--expected-failures", known, code=1)
    assert f"{wrong[0]}: unexpected pass" in result.stdout
    known.write_text('["ring/zigzag-causal-w22"]\nreason = "a slip"\n')
    assert_one_paragraph(check(target("wrong"), "--expected-failures", known, code=2))


def test_a_pattern_of_expected_failures_holds_with_exactly_its_count(
    names_no_bug, target, tmp_path
):
    """Of the rings with a causal mask over two workers one fails."""
    pattern, known = "ring/*-causal-w2", tmp_path / "known.toml"
    for count, code in ((1, 0), (2, 1)):
        known.write_text(f'["{pattern}"]\ncount = {count}\nreason = "dk is doubled"\n')
        given = ("--expected-failures", known)
        result = check(target("wrong"), *given, code=code, only=("--only", pattern))
        assert "; 1 expected failure" in result.stdout.splitlines()[-1]
        assert ("unexpected pass: 2 of the " in result.stdout) is (code == 1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["check", "no_such_module:thing"], "no_such_module"),
        (["check", "mine.py:none"], "mine.py"),
        (["check", "mine.py"], "write mine.py:target"),
        (["check"], "[tool.ringspec] target"),
        (["check", "mine.py:good", "--only", "ring/nothing-like-it"], "ring/nothing-like-it"),
        (["check", "mine.py:good", "--html", "no/such/folder/page.html"], "folder"),
        (["check", "mine.py:good", "--expected-failures", "none.toml"], "none.toml"),
        (["check", "mine.py:good", "--profile", "huge"], "huge"),
        (["check", "mine.py:good", "--timeout", "-1"], "-1"),
        (["replay", "mine.py:good", "ring/zigzag-casual-w2"], "ring/zigzag-causal-w2"),
        (["replay", "ring/zigzag-causal-w2"], "[tool.ringspec] target"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_told_before_anything_runs(target, arguments, says):
    target("good")
    result = call(*arguments, code=2)
    assert says in result.stderr and result.stdout == ""
    assert "Error: " in result.stderr


def test_the_projects_pyproject_names_the_target(target, tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text(f'[tool.ringspec]\ntarget = "{target("good")}"\n')
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    result = call("replay", WRONG, "--timeout", 0)
    assert result.stdout.splitlines()[-1].startswith("passed 1 of 1 claimed")


@pytest.mark.parametrize(
    "text", ["[tool", '[tool.ringspec]\ntargets = "a:b"\n', "[tool.ringspec]\ntarget = 5\n"]
)
def test_a_pyproject_with_a_slip_is_refused(target, tmp_path, text):
    target("good")
    (tmp_path / "pyproject.toml").write_text(text)
    assert "pyproject.toml" in call("smoke", code=2).stderr


def test_help_documents_targets_and_exit_codes():
    for command in ("smoke", "check", "replay"):
        text = call(command, "--help").stdout
        for words in ("cmd:PROGRAM", "path/file.py:object", "Exit codes", "130", "no case was"):
            assert words in text, (command, words)


def run_pytest(folder, *arguments):
    """pytest in a folder of its own, as an author runs it."""
    paths = os.pathsep.join(
        [str(Path(ringspec.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    options = ("-p", "ringspec.conformance.pytest.plugin", "-p", "no:cacheprovider", "-q")
    options += ("-k", "ring/ and -causal-w2 or attention/plain")  # the cases of ONLY
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--pyargs", "ringspec.conformance", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_pytest_runs_the_same_cases_with_the_same_verdicts(target, tmp_path):
    check(target("wrong"), "--report", "r.jsonl", code=1)
    chosen = read_report(tmp_path / "r.jsonl")
    ran = run_pytest(tmp_path, "--ringspec-target", "mine.py:wrong", "--ringspec-profile", "smoke")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert chosen.footer["headline"] in ran.stdout and len(chosen.records) >= 4
    failed = {
        line.split("[", 1)[1].split("]")[0]
        for line in ran.stdout.splitlines()
        if line.startswith("FAILED")
    }
    assert failed == set(failing_ids(tmp_path))
    assert "dk of worker 1" in ran.stdout


@pytest.mark.parametrize(
    ("name", "code"),
    [("good", 0), ("nothing", 5), pytest.param("no_such", 2, marks=pytest.mark.slow), (None, 2)],
    ids=str,
)
def test_the_exit_code_of_pytest(target, tmp_path, name, code):
    given = [] if name is None else ["--ringspec-target", target(name)]
    ran = run_pytest(tmp_path, *given, "--ringspec-profile", "smoke")
    assert ran.returncode == code, ran.stdout + ran.stderr
