"""cmd: targets. Each way in which a program can go wrong is named as that, and the next call works."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from conformance.diagnose.named_faults import ID, assert_named, each_fault

from ringspec.conformance.adapters import command as command_module
from ringspec.conformance.adapters import wire
from ringspec.conformance.adapters.command import CommandTarget
from ringspec.conformance.adapters.process import LOG_BYTES
from ringspec.conformance.cases.calls import call_of
from ringspec.conformance.cases.golden import cases as golden_cases
from ringspec.conformance.run.suite import run
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import (
    TABLES,
    Crashed,
    Exited,
    Failed,
    Garbage,
    Refused,
    TimedOut,
)
from ringspec.errors import OptionError
from ringspec.formats import load
from ringspec.tensorfile import encode
from ringspec.vectors import open_set

NAIVE = Path(__file__).parents[3] / "docs" / "examples" / "naive_ring.py"
MISBEHAVE = Path(__file__).parent / "programs" / "misbehave.py"
CASE = "ring/float32-zigzag-w4"
# For an answer that comes, and for one that never does: long enough to write a log on a busy machine.
PLENTY, HANG_SECONDS = 60.0, 4.0
CASES = {case.id: case for case in golden_cases("core")}

pytestmark = pytest.mark.skipif(os.name != "posix", reason="cmd: needs process groups")


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where the adapter puts its files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def program(temporary):
    """The example program gone wrong in a way; ended when the test is."""
    made = []

    def start(mode, first=0):
        command = [sys.executable, str(MISBEHAVE), str(NAIVE), mode, str(first)]
        timeout = HANG_SECONDS if mode.startswith("hang") else PLENTY
        made.append(CommandTarget(command, timeout=timeout))
        return made[-1]

    yield start
    for target in made:
        target.close()


@pytest.fixture(scope="module")
def call():
    core = open_set("core")
    return call_of(core.case(CASE), core.tensors(CASE))


def gone(pid):
    """Whether a process has ended (a zombie that nobody has waited for has)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def gone_soon(pid):
    deadline = time.monotonic() + PLENTY
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return gone(pid)


def script(tmp_path, text, start_timeout=PLENTY):
    path = tmp_path / "program.py"
    path.write_text(text)
    return CommandTarget([sys.executable, str(path)], start_timeout=start_timeout)


# The example


def test_the_example_is_at_most_60_lines_and_imports_nothing_of_ringspec():
    text = NAIVE.read_text()
    assert len(text.splitlines()) <= 60
    assert [line for line in text.splitlines() if "import" in line] == [
        "import json",
        "import sys",
        "import numpy as np",
    ]


def test_the_example_passes_smoke(temporary):
    target = CommandTarget([sys.executable, "-I", str(NAIVE)])
    summary = run(target, golden_cases("smoke"))
    target.close()
    assert summary.exit_code == 0
    assert summary.counts["pass"] >= 7
    assert list(temporary.iterdir()) == []


def test_the_example_gives_what_is_expected_on_each_worker(program, call):
    result = program("").run(call)
    tensors = open_set("core").tensors(CASE)
    for name in ("o", "lse", "dq", "dk", "dv"):
        got = np.stack([load(x) for x in getattr(result, name)])
        scale = tensors[f"scale.{name}"]
        scale = scale if name == "lse" else scale[..., None]
        assert (abs(got - tensors[f"out.{name}.float64"]) <= 2.0**-20 * scale).all(), name


# What goes wrong with the process


def test_a_signal_is_a_crash_that_names_it_and_the_log_comes_along(program, call):
    with pytest.raises(Crashed, match="ended by SIGSEGV before it answered") as caught:
        program("segfault").run(call)
    assert caught.value.log == "about to dereference null\n"


def test_an_exit_status_is_an_exit_that_names_it(program, call):
    with pytest.raises(Exited, match="exit status 3 before it answered"):
        program("exit 3").run(call)


def test_a_process_that_ends_after_its_answer_is_an_exit_of_the_next_call(program, call):
    target = program("once")
    assert target.run(call).o is not None
    assert gone_soon(target.log.split()[0])
    with pytest.raises(Exited, match="exit status 5 after its last answer"):
        target.run(call)
    assert target.run(call).o is not None


def test_a_hang_is_a_timeout_and_ends_when_the_limit_says(program, call):
    target = program("hang")  # for 60 s
    assert target.name == "naive, hang"
    started = time.monotonic()
    with pytest.raises(TimedOut, match=f"no answer within {HANG_SECONDS:g} s") as caught:
        target.run(call)
    assert HANG_SECONDS <= time.monotonic() - started <= 45
    assert caught.value.log == "waiting for a collective\n"


@pytest.mark.parametrize(
    ("mode", "kind"), [("hang with a child", TimedOut), ("exit with a child", Exited)]
)
def test_its_children_end_with_the_program(program, call, mode, kind):
    with pytest.raises(kind) as caught:
        program(mode).run(call)
    child = caught.value.log.split()[1]
    assert gone_soon(child)


def test_ctrl_c_ends_the_program(program, call, monkeypatch):
    target = program("hang")
    target.claims()
    pid = target._program.process.pid

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command_module, "asked", interrupted)
    with pytest.raises(KeyboardInterrupt):
        target.run(call)
    assert gone(pid)


@pytest.mark.parametrize(
    "mode",
    [
        *("segfault", "hang", "print", "print after"),
        # Each takes up to five seconds, and the test of its message is not slow.
        *(
            pytest.param(mode, marks=pytest.mark.slow)
            for mode in ("exit 3", "endless line", "close stdout")
        ),
    ],
)
def test_after_a_failure_the_next_call_has_a_process_of_its_own(program, call, mode):
    target = program(mode, first=1)
    first = target.run(call)
    pid = target.log.split()[0]
    with pytest.raises(Failed):
        target.run(call)
    assert gone_soon(pid)
    again = target.run(call)
    assert target.log.split()[0] != pid
    for name in ("o", "lse", "dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))


def test_calls_that_go_well_share_a_process(program, call):
    target = program("")
    pids = set()
    for _ in range(3):
        target.run(call)
        pids.add(target.log.split()[0])
    assert len(pids) == 1


def test_close_lets_the_program_end_by_itself(program, call):
    target = program("")
    target.run(call)
    pid = target.log.split()[0]
    target.close()
    assert gone(pid)
    assert "stdin is closed" in target.log
    target.close()


# What goes wrong with its answers


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("print", "not JSON: 'loading kernel for 4 workers'|after the line"),
        ("print after", "stdout is for answers; the program wrote 'all done' after the line"),
        ("number", "not a JSON object: 17|after the line"),
        ("endless line", "more than 1048576 bytes on stdout without an end of line"),
        ("close stdout", "closed its stdout but is still running"),
        ("other kind", "kind 'done'; expected result, refused or error"),
        ("other id", "the answer is for the call 'another'; expected 'ring/float32-zigzag-w4'"),
        ("unknown key", "unknown key 'seconds'"),
        ("reason of no text", "is not text: 5"),
        ("truncated", "result file: expected tensors inside"),
        ("empty file", "a safetensors file in result.safetensors; got 0 bytes"),
        ("huge file", r"of at most \d+ bytes; got 1099511627776 bytes"),
        ("link", "no symbolic link at result.safetensors"),
        ("pipe", "a plain file at result.safetensors"),
        ("folder", "a plain file at result.safetensors"),
        ("unknown tensor", "unknown tensor 'dscale' in the result"),
    ],
)
def test_what_is_no_result_is_garbage_and_said_to_be_what_it_is(program, call, mode, message):
    with pytest.raises(Garbage, match=message):
        program(mode).run(call)


def test_a_refusal_is_passed_on_and_the_process_stays(program, call):
    target = program("refuse")
    target.claims()
    process = target._program.process
    with pytest.raises(Refused, match="^no zigzag here$"):
        target.run(call)
    assert target._program.process is process


def test_an_error_of_its_own_is_passed_on_and_the_process_stays(program, call):
    target = program("fail")
    target.claims()
    process = target._program.process
    with pytest.raises(Failed, match="the program says: out of device memory") as caught:
        target.run(call)
    assert type(caught.value) is Failed
    assert target._program.process is process


def test_a_missing_file_is_an_empty_result(program, call):
    result = program("no file").run(call)
    assert all(getattr(result, name) is None for name in wire.RESULTS)


def test_files_are_removed_whatever_happens(program, call, temporary):
    for mode in ("", "segfault", "truncated", "link", "pipe", "folder", "refuse", "huge file"):
        target = program(mode)
        try:
            target.run(call)
        except (Failed, Refused):
            pass
        assert list(temporary.iterdir()) == [], mode


def test_of_a_long_log_the_end_is_kept(program, call):
    target = program("loud")
    target.run(call)
    assert len(target.log) <= LOG_BYTES
    assert "line 19999 of a log" in target.log
    assert "line 100 of a log" not in target.log


def test_the_log_is_that_of_the_last_call(program, call):
    target = program("")
    for _ in range(2):
        target.run(call)
        assert len(target.log.splitlines()) == 1


# What the runner makes of it


@pytest.mark.parametrize(
    ("mode", "outcome", "message"),
    [
        ("segfault", "crash", "SIGSEGV"),
        ("exit 3", "exit", "exit status 3"),
        # As test_each_fault_of_a_program_is_named_as_exactly_that has it.
        pytest.param("hang", "timeout", "no answer within", marks=pytest.mark.slow),
        ("print", "garbage", "loading kernel|stdout is for answers"),
        ("truncated", "garbage", "result file"),
        ("mutate", "mutated", "changed the file of its inputs"),
        ("refuse", "refused", "no zigzag here"),
        ("fail", "error", "out of device memory"),
        ("no file", "missing", "o of worker 0 is missing"),
        ("no dq", "missing", "dq of worker 0 is missing"),
        ("NaN", "mismatch", "dk"),
        ("wrong order", "mismatch", "o"),
        ("one worker less", "missing", "dv of worker 3"),
        ("one number", "missing", "lse of worker 1 is missing"),
        ("float16", "wrong dtype", "o of worker 0 is float16"),
    ],
)
def test_each_is_named_as_exactly_that(program, mode, outcome, message):
    (record,) = run(program(mode), [CASES[CASE]]).records
    assert record.outcome in outcome.split("|"), record
    assert any(part in record.message for part in message.split("|")), record.message


MODES = {
    "segfault": "segfault",
    "hang": "hang",
    "print": "print after",
    "float16": "float16",
    "wrong worker": "wrong order",
    "mutate": "mutate",
    "NaN": "NaN",
}


@each_fault
def test_each_fault_of_a_program_is_named_as_exactly_that(program, fault):
    (record,) = run(program(MODES[fault]), [CASES[ID]]).records
    if fault == "print":  # stdout is the channel of answers
        assert record.outcome == "garbage"
        assert "stdout is for answers; the program wrote 'all done'" in record.message
        return
    assert_named(record, fault)


def test_a_nan_is_found_on_its_worker(program):
    (record,) = run(program("NaN"), [CASES[CASE]]).records
    wrong = [finding for finding in record.findings if finding.kind != "ok"]
    assert [(one.tensor, one.worker, one.kind) for one in wrong] == [("dk", 3, "NaN")]


def test_the_run_goes_on_after_a_crash(program):
    ids = ("attention/float32", CASE, "number/large-lse")
    cases = [CASES[id] for id in ids]
    records = run(program("segfault", first=1), cases).records
    assert [record.outcome for record in records] == ["pass", "crash", "pass"]


# Hello


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("input()", "exit status 0 before it answered"),
        ("import time; time.sleep(30)", "no answer within 1 s"),
        ("print('hi')", "not JSON: 'hi'"),
        ("print('[' * 100000)", "not JSON"),
        ('print(\'{"kind": "result"}\')', "answer to hello has the kind 'result'"),
        ('print(\'{"kind": "hello", "protocol": 2}\')', "protocol 2"),
        ('print(\'{"kind": "hello", "kind": "hello"}\')', "not JSON"),
        ('print(\'{"kind": "hello", "name": NaN}\')', "not JSON"),
        ('print(\'{"kind": "hello", "name": 5}\')', "name, notes or capabilities"),
        ('print(\'{"kind": "hello", "nam": "x"}\')', "unknown key 'nam'"),
    ],
)
def test_a_bad_answer_to_hello_says_what_it_is(tmp_path, text, message):
    if "print" in text:  # once it is asked: an answer before that is another fault
        text = f"input(); {text}; import sys; sys.stdout.flush(); sys.stdin.read()"
    target = script(tmp_path, text, 1.0 if "sleep" in text else PLENTY)
    with pytest.raises(OptionError, match=message):
        target.name  # noqa: B018
    target.close()


@pytest.mark.parametrize(
    "capabilities",
    [
        {"workers": "24"},
        {"workers": [2, "4"]},
        {"workers": [2.0]},
        {"workers": [True]},
        {"operations": "merge"},
        {"operations": None},
        {"operations": ["rings"]},
        {"only_causal": 1},
        {"tokens_multiple": 0},
        {"tokens_multiple": True},
        {"kv_heads_multiple": 0},
        {"kv_heads_multiple": "heads"},
        {"kv_heads_multiple": True},
        {"lse": ["natural"]},
        {"recipe": 5},
        {"head_dim": [64]},
    ],
)
def test_capabilities_of_the_wrong_kind_are_garbage(capabilities):
    with pytest.raises(Garbage):
        wire.claims_from({"name": "x", "capabilities": capabilities}, "")


def test_every_capability_goes_to_a_program_and_back():
    whole = Capabilities(workers=(2, 4), features=("bias",), recipe="bf16", head_dims=(64,))
    data = json.loads(wire.line_of({"capabilities": whole.as_dict()}))
    assert wire.claims_from(data, "").capabilities == whole
    assert wire.claims_from({}, "default").capabilities == Capabilities()
    own = {"bfloat16": {"base": "bf16", "tile_k": 512}}
    assert wire.claims_from({"capabilities": {"recipe": own}}, "x").capabilities.recipe == own
    with pytest.raises(Garbage, match="bf16"):
        wire.claims_from({"capabilities": {"recipe": {"bfloat16": "bf15"}}}, "x")


# Commands


def test_no_shell_sees_the_command(tmp_path):
    echo = tmp_path / "echo.py"
    echo.write_text(
        "import json, sys\n"
        "sys.stdin.readline()\n"  # an answer before hello is a fault, if it comes that early
        "print(json.dumps({'kind': 'hello', 'name': ' '.join(sys.argv[1:])}), flush=True)\n"
        "sys.stdin.read()\n"
    )
    target = CommandTarget(f"{sys.executable} {echo} 'two words' $HOME ; > * |")
    assert target.name == "two words $HOME ; > * |"
    target.close()


@pytest.mark.parametrize(
    "command", ["", "  ", "'unclosed", [], [""], [3], None, "no-such-program-anywhere x", ["a\0b"]]
)
def test_a_command_that_cannot_be_run_is_an_option_error(command):
    with pytest.raises(OptionError):
        CommandTarget(command)


# The wire


def test_inputs_are_one_tensor_with_the_workers_first(call):
    data = wire.inputs_file(call)
    assert data == wire.inputs_file(call)
    tensors = wire.decode(data)
    assert set(tensors) == {*call.tensors, *TABLES}
    for name, arrays in call.tensors.items():
        assert tensors[name].dtype == arrays[0].dtype
        np.testing.assert_array_equal(tensors[name], np.stack(arrays))


def test_every_case_of_the_core_set_can_be_asked_in_one_short_line():
    core = open_set("core")
    for case in core:
        if case.operation == "schedule":
            continue
        call = call_of(case, core.tensors(case.id))
        line = wire.line_of(wire.call_message(call, "in", "out"))
        assert line.count(b"\n") == 1 and len(line) <= wire.MAX_LINE
        message = json.loads(line)
        assert tuple(message["passes"]) == call.passes
        for name, value in call.terms.items():
            assert message["terms"][name] == wire.plain(value)


def test_the_size_limit_holds_every_right_result():
    core = open_set("core")
    for case in core:
        if case.operation == "schedule":
            continue
        call = call_of(case, core.tensors(case.id))
        held = [x for arrays in call.tensors.values() for x in arrays]
        outputs = {
            name: np.zeros_like(np.stack(call.tensors[name]), np.float64) for name in call.tensors
        }
        assert len(encode(outputs)) <= wire.most_bytes(call)
        assert wire.most_bytes(call) <= wire.SPARE_BYTES + 64 * sum(x.nbytes for x in held) + 2**20


def test_a_message_longer_than_a_pipe_does_not_lock_up(tmp_path):
    text = (
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    m = json.loads(line)\n"
        "    print(json.dumps({'kind': 'hello' if m['kind'] == 'hello' else 'refused'}), flush=True)\n"
    )
    target = script(tmp_path, text)
    program = target.started()
    answer = command_module.asked(program, {"kind": "call", "pad": "x" * 500_000}, PLENTY)
    assert answer == {"kind": "refused"}
    target.close()


def test_a_program_that_reads_no_call_is_a_timeout(tmp_path):
    text = 'import time\ninput()\nprint(\'{"kind": "hello"}\', flush=True)\ntime.sleep(30)\n'
    target = script(tmp_path, text)
    program = target.started()
    with pytest.raises(TimedOut):
        command_module.asked(program, {"kind": "call", "pad": "x" * 500_000}, 0.5)
    target.close()


def test_importing_the_adapter_does_not_start_anything():
    code = "import ringspec.conformance.adapters.command, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# The sketch in C


@pytest.mark.external("cc")
def test_the_sketch_in_c_compiles_without_a_warning_and_passes_what_it_claims(tmp_path):
    source, program = NAIVE.parent / "merge.c", tmp_path / "merge"
    strict = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-O2"]
    subprocess.run(["cc", *strict, "-o", str(program), str(source), "-lm"], check=True)
    target = CommandTarget([str(program)])
    summary = run(target, list(CASES.values()))
    assert (summary.exit_code, target.name) == (0, "merge in C")
    assert summary.counts["pass"] >= 2
    call = CASES[CASE].make(target.capabilities)[0]
    with pytest.raises(Refused, match="only merges"):
        target.run(call)
    target.close()
