"""Readouts are cases of a run: what they read explains other failures, if it gives their numbers."""

import dataclasses
import json

import pytest

from ringspec.conformance.cases import readout
from ringspec.conformance.cases.profiles import run_cases
from ringspec.conformance.diagnose.mutants import MUTANTS, MutantTarget
from ringspec.conformance.diagnose.summary import Diagnoser, most_likely
from ringspec.conformance.readout.conclusion import conclude
from ringspec.conformance.readout.faults.hints import hint_for
from ringspec.conformance.readout.faults.masks import masks_of
from ringspec.conformance.readout.problem.chosen import problem_for
from ringspec.conformance.readout.problem.problems import Problem
from ringspec.conformance.readout.problem.settings import SETTINGS
from ringspec.conformance.readout.proof.replay import explains
from ringspec.conformance.readout.reading import reading_from
from ringspec.conformance.readout.search.vocabulary import kinds_of
from ringspec.conformance.report.junit import junit
from ringspec.conformance.report.lines import read_record
from ringspec.conformance.report.report import Report, case_line, report_lines
from ringspec.conformance.report.words import verdict_lines
from ringspec.conformance.run.opening import close, opened
from ringspec.conformance.run.suite import run
from ringspec.conformance.target import Capabilities
from ringspec.conformance.targets.reference import REFERENCES
from ringspec.errors import FileFormatError
from ringspec.render.page import page
from ringspec.render.picture import picture

READOUTS = ("readout/causal-contiguous-kv", "readout/full-contiguous-kv")
ONLY = (*READOUTS, "ring/zigzag-causal-w2")
WRONG = "docs/examples/wrong_ring.py:target"
SENTENCE = "dk and dv are added to those of the next step's visitor."


class Wrong:
    """A mutant of the float32 reference; ``change`` changes its results as well."""

    name = "wrong"

    def __init__(self, id, change=None):
        self.target, self.change = MutantTarget(MUTANTS[id], "float32"), change
        self.capabilities = dataclasses.replace(
            self.target.capabilities, circulations=("kv",), formats=("float32", "bfloat16")
        )

    def run(self, call):
        result = self.target.run(call)
        if self.change is not None:
            self.change(call, result)
        return result


def checked(target, only=ONLY):
    return run(target, run_cases("smoke"), only=only, diagnose=Diagnoser())


@pytest.fixture(scope="module")
def wrong():
    return checked(Wrong("dkv-not-home"))


@pytest.mark.slow
def test_every_readout_passes_for_the_reference_with_all_claims():
    target = REFERENCES["float32"]
    claims = dataclasses.replace(
        target.capabilities, circulations=("kv", "q", "gather"), directions=(1, -1)
    )
    every = type("Every", (), {"name": "every", "capabilities": claims, "run": target.run})()
    summary = run(every, readout.cases())
    assert summary.exit_code == 0 and summary.claimed == len(SETTINGS) - 2
    reasons = {one.reason for one in summary.records if one.outcome == "not claimed"}
    assert reasons == {"no other layout, which is read without a mask"}


@pytest.mark.parametrize(
    ("claims", "workers", "group", "direction"),
    [
        (Capabilities(), 3, 2, 1),
        (Capabilities(workers=(2,), head_ratios=(1,)), 2, 1, 1),
        (Capabilities(workers=(1,)), 1, 2, 1),
        (Capabilities(directions=(-1,), workers=(2, 8)), 8, 2, -1),
    ],
)
def test_a_readout_takes_what_the_target_claims(claims, workers, group, direction):
    found = problem_for(SETTINGS[0], claims)
    assert isinstance(found, Problem)
    geometry = found.pairs.geometry
    assert (geometry.workers, geometry.group, geometry.direction) == (workers, group, direction)


def test_a_readout_that_is_not_claimed_says_why():
    assert problem_for(SETTINGS[0], Capabilities(layouts=("striped",))) == "layout contiguous"
    small = problem_for(SETTINGS[0], Capabilities(head_dims=(16,)))
    assert small == "a head dimension of at least 36, for 3 workers with 4 tokens each"


def test_the_explanation_of_the_readouts_is_that_of_other_failures(wrong):
    found = most_likely(wrong.records)["explanation"]
    assert found["explained"] == list(ONLY) and found["failures"] == len(ONLY)
    assert [SENTENCE in one for one in found["sentences"]] == [True]
    assert wrong.records[-1].diagnosis["explained"]
    assert found["shown_by"] == "readout/causal-contiguous-kv"


def test_a_failure_with_another_fault_besides_remains():
    def spoil(call, result):
        if call.workers == 2:
            result.dq[0][...] *= 2

    records = checked(Wrong("dkv-not-home", spoil), (READOUTS[0], ONLY[-1])).records
    found = most_likely(records)["explanation"]
    assert found["explained"] == [READOUTS[0]] and found["failures"] == 2
    assert not records[-1].diagnosis.get("explained")
    assert any(
        line.endswith("1 of 2 failures; 1 remains") for line in verdict_lines(most_likely(records))
    )


def test_faults_explain_no_call_of_a_correct_ring(wrong):
    faults = conclude([reading_from(wrong.records[0].diagnosis["reading"])])
    assert faults.faults
    case = next(one for one in run_cases("smoke") if one.id == ONLY[-1])
    target = REFERENCES["float32"]
    [call] = case.make(target.capabilities)
    result = target.run(call)
    got = {name: getattr(result, name) for name in ("o", "lse", "dq", "dk", "dv")}
    assert not explains(faults, [call], [got])


def test_the_verdict_and_junit_begin_with_what_the_target_computes(wrong):
    lines = verdict_lines(most_likely(wrong.records), "mine.py:ring")
    assert lines[0] == "explanation:" and SENTENCE in lines[1]
    assert "explains the numbers of 3 of 3 failures" in lines[2]
    assert lines[4].endswith("ringspec replay mine.py:ring readout/causal-contiguous-kv")
    assert lines[5].startswith("diagnosis: ") and "[dkv-not-home], in " in lines[5]
    header = {"target": {"name": "mine", "spec": "mine.py:ring"}, "profile": "smoke"}
    xml = junit(Report(header, wrong.records, None))
    message = next(x for x in xml.split("message=") if "ring/zigzag-causal-w2" in x[:40])
    assert "explanation: In the backward pass" in message


@pytest.mark.slow
def test_records_do_not_depend_on_the_number_of_processes():
    target = opened(WRONG, 60)
    try:
        records = [
            run(
                target, run_cases("smoke"), only=ONLY, jobs=jobs, spec=WRONG, profile="smoke",
                diagnose=Diagnoser(), timeout=60,
            ).records
            for jobs in (1, 2)
        ]  # fmt: skip
    finally:
        close(target)
    for one, other in zip(*records, strict=True):
        assert one.outcome == other.outcome == "mismatch"
        assert json.loads(json.dumps(one.diagnosis)) == other.diagnosis


@pytest.mark.parametrize(
    "change",
    [
        {"problem": 1},
        {"right": "no"},
        {"more": 1},
        {"forward": {"sets": [], "left": ""}},
        {"backward": {"sets": [[{"phase": "x"}]], "left": "", "base": ""}},
        {"backward": {"sets": [["x"]], "left": "", "base": ""}},
    ],
)
def test_a_reading_in_a_report_that_is_out_of_order_is_refused(wrong, change):
    line = json.loads(json.dumps(case_line(wrong.records[0])))
    assert read_record(line, "line").diagnosis == line["diagnosis"]
    line["diagnosis"]["reading"] |= change
    with pytest.raises(FileFormatError):
        read_record(line, "line")


def test_a_failed_readout_has_the_picture_of_the_matrix_that_differs_first(wrong):
    data = wrong.records[0].picture
    assert data["caption"] == (
        "P, the weights in the backward pass, head 0; lines separate the workers"
    )
    drawn = picture(data)
    assert len(drawn.panels) == 3 and drawn.lines.startswith("M0 8h24M0 16h24M8 0v24")
    report = Report({"target": {"name": "mine", "spec": "mine.py:ring"}}, wrong.records, None)
    text = page(report_lines(report))
    assert text.index(SENTENCE[:30]) < text.index("P, the weights") < text.index('class="bar"')


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_every_fault_has_a_hint_where_its_code_is(phase):
    problem = problem_for(SETTINGS[0], Capabilities())
    geometry = dataclasses.replace(problem.pairs.geometry, circulation="q")
    kinds = kinds_of(geometry, phase, masks_of(geometry))
    assert len(kinds) > 100 and [kind.words for kind in kinds if not hint_for(kind)] == []
