"""Cases spread over processes that judge: the same records, an end after Ctrl-C, limits that hold."""

import dataclasses
import multiprocessing
import time
from collections import Counter

import pytest

from ringspec.conformance.cases import run_cases
from ringspec.conformance.diagnoser import MOST, Diagnoser
from ringspec.conformance.judges import chunks, within_limits
from ringspec.conformance.outcome import Record
from ringspec.conformance.runner import run
from ringspec.conformance.targets.reference import reference_bf16

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


@pytest.mark.slow
def test_processes_that_judge_give_the_records_of_one_process():
    cases = run_cases("smoke")
    one = run(reference_bf16, cases, diagnose=Diagnoser())
    two = run(
        reference_bf16, cases, jobs=2, spec=SPEC, profile="smoke", timeout=60, diagnose=Diagnoser()
    )
    assert two.complete and two.exit_code == 0
    for a, b in zip(one.records, two.records, strict=True):
        assert dataclasses.replace(a, seconds=0) == dataclasses.replace(b, seconds=0)


@pytest.mark.slow
def test_ctrl_c_ends_the_processes_that_judge():
    def interrupt(done, total, id):
        raise KeyboardInterrupt

    cases = run_cases("smoke")
    summary = run(reference_bf16, cases, jobs=2, spec=SPEC, profile="smoke", progress=interrupt)
    assert not summary.complete and summary.records[-1].outcome == "not run"
    end = time.monotonic() + 30
    while multiprocessing.active_children() and time.monotonic() < end:
        time.sleep(0.05)
    assert multiprocessing.active_children() == []
