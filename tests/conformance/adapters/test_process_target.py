"""Nothing that a Python target does in its process stops or deceives the run."""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conformance.adapters import hostile_targets

from ringspec.conformance.adapters.process import LOG_BYTES
from ringspec.conformance.adapters.wire import call_from, call_message, inputs_file, line_of
from ringspec.conformance.cases import golden
from ringspec.conformance.cases.calls import call_of
from ringspec.conformance.run.call import MOST_LOG
from ringspec.conformance.run.opening import opened
from ringspec.conformance.run.process_target import ProcessTarget
from ringspec.conformance.run.suite import run
from ringspec.errors import OptionError
from ringspec.tensorfile import decode
from ringspec.vectors import open_set

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs process groups")
FILE = Path(hostile_targets.__file__)
[RING] = [case for case in golden.cases("core") if case.id == "ring/float32-zigzag-w4"]
# For an answer that comes, and for one that never does.
PLENTY, HANG_SECONDS = 100.0, 3.0


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def record_of(name, seconds=PLENTY):
    spec = f"{FILE}:{name}"
    [record] = run(getattr(hostile_targets, name), [RING], spec=spec, timeout=seconds).records
    return record


def is_gone_soon(pid):
    deadline = time.monotonic() + PLENTY
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


# The channel


def test_part_of_a_message_on_the_channel_is_a_timeout():
    record = record_of("part", HANG_SECONDS)
    assert record.outcome == "timeout", record.message
    assert f"no answer within {HANG_SECONDS:g} seconds" in record.message


@pytest.mark.parametrize("name", ["garbage", "pickled", "forged"])
def test_what_a_target_writes_on_the_channel_is_garbage_and_is_not_executed(name):
    record = record_of(name)
    assert record.outcome == "garbage", record.message
    assert "Traceback" not in record.message and len(record.message.splitlines()[0]) < 300
    assert not Path("unpickled").exists()


def test_the_run_goes_on_after_garbage_on_the_channel():
    again = dataclasses.replace(RING, id="again")
    summary = run(hostile_targets.garbage, [RING, again], spec=f"{FILE}:garbage", timeout=PLENTY)
    assert [record.outcome for record in summary.records] == ["garbage", "garbage"]


@pytest.mark.parametrize("name", ["complex64", "big_endian", "huge", "hole", "uneven"])
def test_a_result_of_the_wrong_form_has_the_record_that_it_has_in_this_process(name):
    [here] = run(getattr(hostile_targets, name), [RING]).records
    there = record_of(name)
    assert here.outcome in ("wrong dtype", "wrong shape", "missing")
    assert (there.outcome, there.message, there.findings) == (
        here.outcome,
        here.message,
        here.findings,
    )


def test_the_process_gets_the_very_call_of_every_golden_case():
    core, compared = open_set("core"), set()
    for case in core:
        if case.operation == "schedule":
            continue
        call = call_of(case, core.tensors(case.id))
        message = json.loads(line_of(call_message(call, "inputs", "result")))
        assert_same_call(call_from(message, decode(inputs_file(call), "inputs")), call)
        compared |= {call.operation, *call.terms, *call.tensors}
    assert {"ring", "block", "merge", "window", "cu_seqlens", "mask", "sinks"} <= compared


def assert_same_call(got, call):
    for field in dataclasses.fields(call):
        a, b = getattr(got, field.name), getattr(call, field.name)
        if field.name == "tensors":
            assert a.keys() == b.keys()
            for name in b:
                assert len(a[name]) == len(b[name])
                for x, y in zip(a[name], b[name], strict=True):
                    assert_same_array(x, y)
        elif isinstance(b, np.ndarray):
            assert_same_array(a, b)
        elif field.name == "terms":
            assert repr(dict(a)) == repr(dict(b))
        else:
            assert a == b, field.name


def assert_same_array(x, y):
    assert (x.dtype, x.shape) == (y.dtype, y.shape) and x.tobytes() == y.tobytes()
    assert x.flags.c_contiguous and not x.flags.writeable


# Processes and output


@pytest.mark.parametrize(
    ("name", "outcome", "seconds"),
    [
        ("forking", "pass", PLENTY),
        ("hanging", "timeout", HANG_SECONDS),
        ("crashing", "crash", PLENTY),
    ],
)
def test_no_process_of_the_target_is_left(name, outcome, seconds):
    assert record_of(name, seconds).outcome == outcome
    assert is_gone_soon(int(Path("child").read_text()))


def test_a_target_that_prints_much_passes_and_the_end_of_it_is_told():
    record = record_of("much")
    assert record.outcome == "pass", record.message[-500:]
    assert record.message.endswith("the end") and len(record.message) < 2 * MOST_LOG


def test_a_target_that_prints_for_ever_is_a_timeout_with_the_end_of_its_log():
    record = record_of("for_ever", HANG_SECONDS)
    assert record.outcome == "timeout"
    assert "and again" in record.message and len(record.message) < 2 * MOST_LOG


def test_in_this_process_too_only_the_end_of_what_is_printed_is_kept():
    class Chatty(hostile_targets.faulty_targets.Faulty):
        def run(self, call):
            for _ in range(1000):
                print("x" * 1000)
            print("the end")
            self.kept = len(sys.stdout.getvalue())
            return super().run(call)

    target = Chatty("chatty")
    assert run(target, [RING]).records[0].message.endswith("the end")
    assert target.kept <= MOST_LOG < LOG_BYTES


# Loading


def written(text):
    Path("mine.py").write_text(
        "import os, sys\n"
        "from ringspec.conformance.targets.reference import reference_float32 as mine\n" + text
    )
    return "mine.py:mine"


@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("os._exit(0)", "ended with exit status 0"),
        ("os.abort()", "SIGABRT"),
        ("sys.exit(0)", "SystemExit: 0"),
        ("1 / 0", "ZeroDivisionError"),
        ("os.write(1, b'x'); print('why'); os._exit(4)", "it wrote:\nx"),
        (
            "mine = type('T', (), dict(name='x', capabilities=mine.capabilities, run=1, notes=3))",
            "notes",
        ),
    ],
)
def test_an_end_while_the_target_is_loaded_is_one_sentence(text, says, here):
    with pytest.raises(OptionError) as caught:
        opened(written(text), 60.0, here=here)
    assert says in str(caught.value), str(caught.value)


@pytest.mark.parametrize("here", [False, True])
def test_the_current_folder_stays_when_the_target_changes_it(here, tmp_path):
    where = "\nmine.name = 'reference'\nos.chdir('/')"
    target = opened(written(where), 60.0, here=here)
    try:
        assert Path.cwd() == tmp_path
        assert run(target, [RING]).exit_code == 0
    finally:
        getattr(target, "close", lambda: None)()


def test_a_target_that_stays_in_its_process_runs_nothing_here():
    target = opened(written("sys.modules['was_here'] = 1"), 60.0)
    assert isinstance(target, ProcessTarget) and target.name == "reference-float32"
    target.close()
    assert "was_here" not in sys.modules


def test_capabilities_in_any_iterable_come_back_as_they_were():
    text = "import dataclasses; from types import SimpleNamespace\n"
    text += (
        "claims = dataclasses.replace(mine.capabilities, workers=range(1, 5), masks={'causal'})\n"
    )
    text += "mine = SimpleNamespace(name='mine', capabilities=claims, run=mine.run)"
    target = opened(written(text), 60.0)
    assert target.capabilities.workers == (1, 2, 3, 4) and target.capabilities.masks == ("causal",)
    target.close()
