"""A run gives each case one outcome, in order, whatever the target does."""

import dataclasses
import time
from pathlib import Path

import numpy as np
import pytest
from conformance import faulty_targets
from conformance.diagnose.named_faults import ID, assert_named, each_fault
from conformance.faulty_targets import Faulty
from refusals import refuses

from ringspec.conformance.cases import golden
from ringspec.conformance.cases.model import PROFILES, Judgement, RunCase
from ringspec.conformance.cases.profiles import run_cases
from ringspec.conformance.run.suite import Summary, run, selected
from ringspec.conformance.targets.reference import REFERENCES
from ringspec.errors import OptionError

FILE = Path(faulty_targets.__file__)
CORE = golden.cases("core")
FLOAT32 = [case for case in CORE if case.id in ("ring/float32-zigzag-w4", "attention/float32")]


def spec(name):
    return f"{FILE}:{name}"


def wrong(name, **options):
    target = getattr(faulty_targets, name)
    return run(target, FLOAT32, spec=spec(name), **options)


def test_every_case_has_one_record_in_order_and_the_sink_and_the_bar_see_each():
    seen, ticks = [], []
    few = CORE[::25]
    summary = run(
        REFERENCES["bf16"], few, sink=seen.append, progress=lambda *tick: ticks.append(tick)
    )
    assert [record.id for record in summary.records] == [case.id for case in few]
    assert tuple(seen) == summary.records
    assert ticks == [(n, len(few), case.id) for n, case in enumerate(few, start=1)]
    assert {record.outcome for record in seen} == {"pass", "not claimed"}


def test_not_claimed_has_a_reason_and_is_not_counted_as_executed():
    summary = run(REFERENCES["fp16"], FLOAT32)
    assert [record.reason for record in summary.records] == ["inputs float32"] * 2
    assert summary.counts == {"not claimed": 2} and summary.claimed == 0


def test_exit_codes():
    assert run(faulty_targets.right, FLOAT32).exit_code == 0
    assert run(faulty_targets.nan, FLOAT32).exit_code == 1
    assert run(REFERENCES["fp16"], FLOAT32).exit_code == 3
    assert run(REFERENCES["fp16"], []).exit_code == 3
    assert Summary((), complete=False).exit_code == 130


def test_ctrl_c_leaves_the_rest_not_run_and_the_run_incomplete():
    class Interrupted(faulty_targets.Faulty):
        def run(self, call):
            if call.id == FLOAT32[1].id:
                raise KeyboardInterrupt
            return super().run(call)

    cases = [FLOAT32[0], FLOAT32[1], dataclasses.replace(FLOAT32[0], id="later")]
    seen = []
    summary = run(Interrupted("interrupted"), cases, sink=seen.append)
    assert [record.outcome for record in seen] == ["pass", "not run", "not run"]
    assert tuple(seen) == summary.records
    assert not summary.complete and summary.exit_code == 130


def test_ids_are_unique_and_each_profile_holds_the_smaller_one():
    smoke, core, full = ([case.id for case in run_cases(name)] for name in PROFILES[:3])
    assert len(set(full)) == len(full) > len(core) > len(smoke) >= 8
    assert set(smoke) <= set(core) <= set(full)
    with refuses((OptionError, "unknown-name")):
        run_cases("cor")


@pytest.mark.parametrize(
    ("name", "outcome", "says"),
    [("aborting", "crash", "SIGABRT"), ("leaving", "exit", "exit status 7")],
)
def test_an_end_of_the_process_is_named_and_the_run_goes_on(name, outcome, says):
    summary = wrong(name, timeout=100)
    assert [record.outcome for record in summary.records] == [outcome] * 2
    assert all(says in record.message for record in summary.records)
    if name == "aborting":
        assert "about to end" in summary.records[1].message


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("dsinks", lambda o: [o[0][:, 0, 0]] * len(o), "dsinks returned, but not requested"),
        ("o", lambda o: [np.ma.masked_all_like(x) for x in o], "masked"),
        ("o", lambda o: [np.ma.masked_invalid(x / (x > 0)) for x in o], "masked"),
    ],
)
def test_what_is_no_answer_to_the_call_is_garbage(name, value, says):
    with np.errstate(all="ignore"):
        target = Faulty("wrong", behind=lambda result, _: setattr(result, name, value(result.o)))
        [record] = run(target, FLOAT32[1:]).records
    assert record.outcome == "garbage" and says in record.message


def test_what_was_not_asked_for_may_be_none_for_each_worker():
    target = Faulty("right", behind=lambda result, _: setattr(result, "dsinks", [None]))
    assert run(target, FLOAT32[1:]).records[0].outcome == "pass"


def test_a_hang_is_a_timeout_and_the_run_goes_on():
    started = time.monotonic()
    summary = wrong("hanging", timeout=1.5)
    assert [record.outcome for record in summary.records] == ["timeout", "timeout"]
    assert "1.5 seconds" in summary.records[0].message
    assert time.monotonic() - started < 60


PLAIN = {
    "segfault": "segfaulting",
    "hang": "hanging",
    "print": "chatty",
    "float16": "float16",
    "wrong worker": "swapped_workers",
    "mutate": "mutates",
    "NaN": "nan",
}


@each_fault
def test_each_fault_of_a_plain_object_is_named_as_exactly_that(fault):
    ring = [case for case in FLOAT32 if case.id == ID]
    seconds = 1.5 if fault == "hang" else 100
    target = getattr(faulty_targets, PLAIN[fault])
    [record] = run(target, ring, spec=spec(PLAIN[fault]), timeout=seconds).records
    assert_named(record, fault)
    if fault == "print":
        assert record.message == "it printed:\nhere I am"
    if fault == "segfault":
        assert "about to read nothing" in record.message
    if fault not in ("segfault", "hang"):  # in this process too
        assert_named(run(target, ring).records[0], fault)


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("right", "pass"),
        ("nan", "mismatch"),
        ("mutates", "mutated"),
        ("tries", "mutated"),
        ("raises", "error"),
        ("refusing", "refused"),
        ("text", "garbage"),
        ("exiting", "exit"),
        ("chatty", "pass"),
        ("missing", "missing"),
    ],
)
def test_in_a_process_of_its_own_a_target_has_the_outcome_that_it_has_here(name, outcome):
    target, ring = getattr(faulty_targets, name), FLOAT32[1:]
    [here] = run(target, ring).records
    [there] = run(target, ring, spec=spec(name), timeout=100).records
    assert here.outcome == there.outcome == outcome
    assert here.message.splitlines()[:1] == there.message.splitlines()[:1]
    assert repr(here.findings) == repr(there.findings)  # NaN is not equal to itself


def test_two_jobs_without_a_name_are_one_job():
    assert run(faulty_targets.right, FLOAT32, jobs=2).exit_code == 0


def test_a_crash_in_one_of_two_jobs_is_its_own():
    summary = wrong("aborting", jobs=2, profile="smoke")
    assert [record.outcome for record in summary.records] == ["crash", "crash"]


def test_targets_with_processes_of_their_own_keep_the_time_limit():
    target = faulty_targets.Faulty("own process")
    target.timeout = 60.0
    assert run(target, FLOAT32, timeout=5.0).exit_code == 0
    assert target.timeout == 5.0


@pytest.mark.parametrize(
    "options",
    [{"timeout": 0}, {"timeout": -1.0}, {"timeout": float("nan")}, {"jobs": 0}, {"jobs": True}],
    ids=str,
)
def test_options_outside_their_domain_are_refused(options):
    with pytest.raises(OptionError):
        run(faulty_targets.right, FLOAT32, **options)


@pytest.mark.parametrize(
    ("profile", "says"),
    [
        (None, "the name of the profile of all cases"),
        ("cor", "the name of a profile"),
        ("noise", "a case of the profile noise"),
    ],
)
def test_several_jobs_need_the_profile_of_the_cases(profile, says):
    with pytest.raises(OptionError, match=says):
        run(faulty_targets.right, FLOAT32, jobs=2, spec=spec("right"), profile=profile)


def test_a_timeout_needs_a_target_that_a_process_can_load():
    with pytest.raises(OptionError, match="another process"):
        run(faulty_targets.right, FLOAT32, timeout=5)


def test_patterns_choose_cases_and_one_that_matches_nothing_is_refused():
    assert [case.id for case in selected(CORE, "ring/float32-*")] == ["ring/float32-zigzag-w4"]
    both = selected(CORE, ["merge/one-part", "ring/float32-*"])
    assert [case.id for case in both] == ["merge/one-part", "ring/float32-zigzag-w4"]
    assert selected(CORE, None) == CORE
    with pytest.raises(OptionError, match="ring/float32"):
        selected(CORE, "ring/float32-zigzag-w5")


def test_a_case_of_several_calls_keeps_the_answers_apart():
    class OneBuffer(faulty_targets.Faulty):
        """Answers in the same memory each time."""

        def run(self, call):
            result = super().run(call)
            if not hasattr(self, "kept"):
                self.kept = [x.copy() for x in result.o]
            for kept, x in zip(self.kept, result.o, strict=True):
                kept[...] = x + (0 if kept is None else len(call.id))
            result.o = self.kept
            return result

    first = FLOAT32[0]

    def make(claims):
        [call] = first.make(claims)
        return [call, dataclasses.replace(call, id=call.id + "!")]

    def judge(claims, calls, outputs):
        return Judgement(bool((outputs[0]["o"][0] != outputs[1]["o"][0]).all()))

    case = RunCase("two-calls", "", first.needs, make, judge)
    assert run(OneBuffer("one buffer"), [case]).exit_code == 0
