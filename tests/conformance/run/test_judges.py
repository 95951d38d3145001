"""Cases spread over processes that judge: the same records, an end after Ctrl-C, limits that hold."""

import dataclasses
import json
import signal
import textwrap
from collections import Counter

import pytest

from ringspec.conformance.cases import golden
from ringspec.conformance.cases.profiles import run_cases
from ringspec.conformance.diagnose.summary import MOST, Diagnoser
from ringspec.conformance.report.lines import read_record
from ringspec.conformance.report.records import Record
from ringspec.conformance.report.report import case_line
from ringspec.conformance.run import judges
from ringspec.conformance.run.judges import chunks, in_processes, within_limits
from ringspec.conformance.run.suite import run
from ringspec.conformance.targets.reference import reference_bf16
from ringspec.errors import OptionError, RingspecError

SPEC = "ringspec.conformance.targets.reference:reference_bf16"


def test_chunks_hold_every_case_once_in_order_and_noise_cases_alone():
    ids = [case.id for case in run_cases("core")]
    found = chunks(ids)
    assert [id for chunk in found for id in chunk] == ids
    assert max(map(len, found)) > 8
    assert all(len(chunk) == 1 for chunk in found if chunk[0].startswith("noise/"))


def test_only_the_first_failures_of_a_kind_keep_their_diagnosis():
    taken = Counter()
    records = [
        within_limits(Record(f"probe/{n}", "mismatch", diagnosis={"id": n}), taken)
        for n in range(MOST["probe"] + 2)
    ]
    assert [record.diagnosis is None for record in records] == [False] * MOST["probe"] + [True] * 2


def assert_sent_as_made(made, sent):
    """Records that came from a process that judges are those that were made here, except for the time."""
    assert sent.complete and sent.exit_code == 0
    assert made.coverage == sent.coverage
    for a, b in zip(made.records, sent.records, strict=True):
        read = read_record(json.loads(json.dumps(case_line(a))), "what one process sends")
        assert dataclasses.replace(read, seconds=0) == dataclasses.replace(b, seconds=0)


def test_processes_that_judge_give_the_records_of_one_process():
    few = golden.cases("core")[::20]
    assert len(few) > 12
    two = run(reference_bf16, few, jobs=2, spec=SPEC, profile="core")
    assert_sent_as_made(run(reference_bf16, few), two)


@pytest.mark.slow
def test_processes_that_judge_give_the_records_of_one_process_with_diagnoses_and_a_timeout():
    cases = run_cases("smoke")
    options = {"spec": SPEC, "profile": "smoke", "timeout": 60, "diagnose": Diagnoser()}
    two = run(reference_bf16, cases, jobs=2, **options)
    assert_sent_as_made(run(reference_bf16, cases, diagnose=Diagnoser()), two)


def test_ctrl_c_ends_the_processes_that_judge(monkeypatch):
    begun = []

    def started(setup):
        begun.append(start(setup))
        return begun[-1]

    def interrupt(done, total, id):
        raise KeyboardInterrupt

    start = judges.started
    monkeypatch.setattr(judges, "started", started)
    cases = run_cases("smoke")
    summary = run(reference_bf16, cases, jobs=2, spec=SPEC, profile="smoke", progress=interrupt)
    assert not summary.complete and summary.records[-1].outcome == "not run"
    assert len(begun) == 2
    assert [judge.process.returncode for judge in begun] == [-signal.SIGKILL] * 2


# A target with processes of its own is loaded where the judge is; this one behaves there alone.
HOSTILE = """
    import contextlib
    import os
    import sys
    from ringspec.conformance.targets.reference import reference_bf16

    class Several:
        timeout = None
        name, capabilities, run = "several", reference_bf16.capabilities, reference_bf16.run

    def everywhere(data):
        for number in range(1, 20):
            with contextlib.suppress(OSError):
                os.write(number, data)

    target = Several()
    if "ringspec.conformance.run.judge_worker" in sys.modules:
        {act}
"""
ACTS = {
    "os._exit(3)": "exit status 3",
    "everywhere(b'\\x80\\x05.\\n')": "not JSON",
    "everywhere(b'{}\\n')": "the kind 'case' in",
    "os.kill(os.getpid(), 9)": "SIGKILL",
}


@pytest.mark.parametrize(
    "act", [pytest.param(x, marks=pytest.mark.slow if "kill" in x else ()) for x in ACTS]
)
def test_a_target_that_stops_or_imitates_a_judge_ends_the_run_with_a_sentence(
    act, tmp_path, monkeypatch
):
    (tmp_path / "several_own.py").write_text(textwrap.dedent(HOSTILE.replace("{act}", act)))
    monkeypatch.syspath_prepend(str(tmp_path))
    cases = run_cases("smoke")[:2]
    with pytest.raises(RingspecError, match=ACTS[act]):
        list(in_processes("smoke", cases, None, 1, "several_own:target", False))


def test_a_judge_that_cannot_load_the_target_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match="no_such_module"):
        list(in_processes("smoke", run_cases("smoke")[:1], None, 1, "no_such_module:target", False))
