"""Diagnoses: known bugs are named, unknown ones are not, and places are told."""

import dataclasses

import numpy as np
import pytest

from ringspec.compare.noise import predict
from ringspec.conformance.answers import outputs_of
from ringspec.conformance.cases import run_cases
from ringspec.conformance.diagnose import diagnose
from ringspec.conformance.diagnoser import Diagnoser, kind_of, most_likely
from ringspec.conformance.execute import run_case
from ringspec.conformance.localise import localise
from ringspec.conformance.mutants import MUTANTS, MutantTarget
from ringspec.conformance.noise_cases import noise_call
from ringspec.conformance.noise_of import geometry_of, in_order, question_of
from ringspec.conformance.outcome import Record
from ringspec.conformance.report import case_line
from ringspec.conformance.report_lines import read_record
from ringspec.conformance.runner import run
from ringspec.conformance.targets.reference import REFERENCES
from ringspec.conformance.words import record_text
from ringspec.render.failures import failure

RIGHT = REFERENCES["bf16"]
SAMPLE = (
    "stale-keys", "ring-direction", "dkv-not-home", "block-local-delta", "log2-lse", "diagonal-inclusive",
    "half-of-diagonal", "positions-not-sharded", "scale-twice-in-dk", "dy-ignored", "delta-missing",
    "merge-averages", "buffer-reuse", "values-one-step-late", "lse-returned-in-base-2",
)  # fmt: skip


@pytest.fixture(scope="module")
def cases():
    return {case.id: case for case in run_cases("core")}


@pytest.mark.parametrize("id", SAMPLE)
@pytest.mark.parametrize("recipe", ["bf16", "float32"])
def test_a_known_bug_is_named_with_its_links(cases, id, recipe):
    record = run_case(
        MutantTarget(MUTANTS[id], recipe), cases["ring/zigzag-causal-w4"], Diagnoser()
    )
    found = record.diagnosis
    assert id in (found["id"], *found["alike"]), found
    assert found["links"] == list(MUTANTS[found["id"]].links)
    assert found["distance"] < 3 and found["right_distance"] > 2 * found["distance"]


def test_what_no_mutant_gives_is_no_known_bug_and_is_located(cases):
    class Wrong:
        name, capabilities = "wrong", RIGHT.capabilities

        def run(self, call):
            result = RIGHT.run(call)
            if "backward" in call.passes:
                dq = [np.array(x) for x in result.dq]
                dq[2][:, 1, 1::2] = -dq[2][:, 1, 1::2] * dq[2].dtype.type(0.75)
                result = dataclasses.replace(result, dq=dq)
            return result

    record = run_case(Wrong(), cases["ring/zigzag-causal-w4"], Diagnoser())
    found = record.diagnosis
    assert found["id"] is None and found["title"] == "no known bug"
    assert found["where"][0] == "wrong: dq; right: o, lse, dk, dv"
    assert "head 1 of 2; worker 2 of 4" in found["where"][1]
    assert "no known bug" in record_text(record)


def test_the_right_program_fits_and_no_bug_is_named():
    call = noise_call("right", "bf16", 3, "zigzag", "causal", tokens=24, head_dim=8)
    outputs = outputs_of(RIGHT.run(call), call, RIGHT.capabilities)
    found = diagnose(RIGHT.capabilities, [call], [outputs])
    assert found.right.fits and found.named is None


@pytest.mark.parametrize("change", ["missing", "twice"])
def test_a_block_that_counts_wrongly_is_told_with_its_step(change):
    call = noise_call("block", "bf16", 3, tokens=24, head_dim=8)
    question, geometry = question_of(call), geometry_of(call)
    noise = predict(question.attention, "bf16", geometry)
    outputs = outputs_of(RIGHT.run(call), call, RIGHT.capabilities)
    got = in_order(call, outputs)
    keys = geometry.owner_k == 0
    p, dy = question.attention.p[..., keys], question.attention.dy
    share = (p.swapaxes(2, 3)[..., geometry.owner_q == 1] @ dy[:, :, geometry.owner_q == 1]).sum(
        axis=1, keepdims=True
    )
    got["dv"][:, :, keys] += share if change == "twice" else -share
    lines = localise(question, geometry, got, noise.sd)
    words = {"missing": "is missing from", "twice": "counts twice in"}[change]
    assert f"the block of queries of worker 1 (step 1) {words} dv of worker 0" in lines


def test_a_run_says_what_most_of_its_diagnoses_say(cases):
    target = MutantTarget(MUTANTS["stale-keys"], "bf16")
    chosen = [case for id, case in cases.items() if id.startswith("ring/contiguous")]
    summary = run(target, chosen, diagnose=Diagnoser())
    found = most_likely(summary.records)
    assert found["id"] == "stale-keys" and found["count"] >= 0.9 * found["of"] >= 4
    assert found["links"][0].endswith("huggingface/diffusers/issues/14265")
    one = next(record for record in summary.records if record.diagnosis)
    assert read_record(case_line(one), "line").diagnosis == one.diagnosis
    assert "step-0 keys" in failure(case_line(one), {"target": {"spec": "x"}}, True)


def test_few_explained_failures_are_no_verdict():
    named = {"id": "stale-keys", "title": "t", "alike": []}
    unknown = {"id": None, "title": "no known bug"}
    records = [
        Record(str(n), "mismatch", diagnosis=one) for n, one in enumerate([named] + 4 * [unknown])
    ]
    assert most_likely(records)["id"] is None
    assert most_likely(records[:2])["id"] == "stale-keys"
    assert most_likely([Record("a", "pass")]) is None


def test_a_run_diagnoses_no_more_cases_than_its_budget():
    diagnose_few = Diagnoser()
    diagnose_few.taken["ring"] = 8
    call = noise_call("budget", "bf16", 2, tokens=16, head_dim=8)
    case = dataclasses.replace(run_cases("core")[0], id="ring/any")
    assert kind_of(case.id) == "ring"
    assert diagnose_few(RIGHT.capabilities, case, [call], [{}]) is None
