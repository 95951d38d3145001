"""The reference passes in every recipe, and what is wrong in one way is named as that."""

import math
import resource

import numpy as np
import pytest
from conformance import faulty_targets

from ringspec.conformance.cases import golden
from ringspec.conformance.cases.profiles import run_cases
from ringspec.conformance.report.records import Record
from ringspec.conformance.report.words import record_text
from ringspec.conformance.run.suite import run
from ringspec.conformance.target.protocol import Result
from ringspec.conformance.targets.reference import REFERENCES, Reference
from ringspec.recipes import RECIPES
from ringspec.vectors import open_set

CORE = golden.cases("core")
FEW = [case for case in CORE if case.id.startswith(("ring/", "block/", "merge/"))][::3]
FLOAT32 = [
    case
    for case in CORE
    if case.needs["inputs"] == "float32" and case.needs["outputs"] == "float32"
]


def failed(summary):
    return [record_text(record) for record in summary.failures]


@pytest.mark.parametrize("name", REFERENCES)
def test_the_reference_passes_a_sample_of_the_core_set(name):
    summary = run(REFERENCES[name], FEW + FLOAT32)
    assert failed(summary) == []
    assert summary.claimed >= {"fp16": 1, "fp16_partials": 1, "nki_impl_fp16": 1}.get(name, 30)
    assert summary.exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", REFERENCES)
def test_the_reference_passes_the_whole_core_profile(name):
    cases = run_cases("core")
    summary = run(REFERENCES[name], cases)
    assert failed(summary) == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 * 2**20  # KiB


def test_the_reference_passes_smoke():
    summary = run(REFERENCES["bf16"], run_cases("smoke"))
    assert failed(summary) == [] and summary.claimed >= 6


def test_the_float64_reference_claims_every_golden_case():
    assert run(REFERENCES["float64"], FEW).counts == {"pass": len(FEW)}


def only(id):
    return [case for case in CORE if case.id == id]


def outcome(target, id="ring/float32-zigzag-w4"):
    [record] = run(target, only(id)).records
    return record


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("right", "pass"),
        ("chatty", "pass"),
        ("gradients_one_hop_short", "mismatch"),
        ("local_causal", "mismatch"),
        ("nan", "mismatch"),
        ("swapped_workers", "mismatch"),
        ("float16", "wrong dtype"),
        ("wrong_shape", "wrong shape"),
        ("more", "wrong shape"),
        ("missing", "missing"),
        ("less", "missing"),
        ("mutates", "mutated"),
        ("tries", "mutated"),
        ("raises", "error"),
        ("exiting", "exit"),
        ("text", "garbage"),
        ("refusing", "refused"),
    ],
)
def test_each_fault_is_named_as_what_it_is(target, expected):
    record = outcome(getattr(faulty_targets, target))
    assert record.outcome == expected, record_text(record)


def wrong_in(record):
    return {(one.tensor, one.worker) for one in record.findings if one.kind != "ok"}


def test_one_nan_is_found_on_its_worker_and_nowhere_else():
    record = outcome(faulty_targets.nan)
    assert wrong_in(record) == {("o", 1)}
    [finding] = [one for one in record.findings if one.kind != "ok"]
    assert finding.kind == "NaN" and finding.where == (0, 0, 1, 2)
    assert math.isnan(finding.got) and finding.rows == 1


def test_gradients_of_the_wrong_worker_are_wrong_on_every_worker_and_the_rest_is_right():
    record = outcome(faulty_targets.gradients_one_hop_short)
    assert wrong_in(record) == {(name, worker) for name in ("dk", "dv") for worker in range(4)}
    assert {one.tensor for one in record.findings} == {"o", "lse", "dq", "dk", "dv"}


def test_a_missing_sink_is_a_mismatch_of_o_and_lse():
    record = outcome(faulty_targets.no_sink, "ring/sink-w3")
    assert record.outcome == "mismatch"
    assert {("o", 0), ("lse", 0), ("dsinks", 0)} <= wrong_in(record)


def test_what_lies_in_padding_slots_does_not_matter():
    def garbage(result, call):
        for name, index in (("o", call.index_q), ("dq", call.index_q), ("dk", call.index_k)):
            for x, slots in zip(getattr(result, name), index, strict=True):
                x[:, :, slots < 0] = np.nan

    target = faulty_targets.Faulty("garbage in padding", behind=garbage, recipe="bf16")
    assert outcome(target, "ring/table-ragged-w3").outcome == "pass"


def row_of(id, sampled):
    """A row of dv on worker 1 that the case stores, or one that it does not."""
    stored = {tuple(map(int, row)) for row in open_set("core").tensors(id)["rows.k"][1]}
    rows = [(0, head, slot) for head in range(2) for slot in range(128)]
    return [row for row in rows if (row in stored) == sampled][7]


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize(
    ("value", "kind"), [(np.nan, "NaN"), (np.inf, "infinite"), (7.0, "beyond bound")]
)
def test_every_row_of_a_sampled_case_is_compared_and_named_by_its_place(sampled, value, kind):
    id = "kernel-shape/contiguous-causal-w2"
    row = row_of(id, sampled)

    def spoilt(result, call):
        result.dv[1][*row, 5] = value

    record = outcome(faulty_targets.Faulty("spoilt", behind=spoilt, recipe="bf16"), id)
    [finding] = [one for one in record.findings if one.kind != "ok"]
    assert (finding.tensor, finding.worker, finding.where) == ("dv", 1, (*row, 5))
    assert (finding.kind, finding.rows, finding.of) == (kind, 1, 256)
    assert record.truth == "exact (sampled rows) and float64 (all others)"
    assert outcome(faulty_targets.right, "attention/float32").truth == "exact"


def test_shapes_and_dtypes_are_told_with_the_worker():
    assert "lse of worker 0 has shape (1, 2, 3), expected (1, 2, 4)" in (
        outcome(faulty_targets.wrong_shape).message
    )
    assert "o of worker 0 is float16, expected float32" in outcome(faulty_targets.float16).message
    assert "dq of worker 3 is missing" in outcome(faulty_targets.less).message
    assert {one.kind for one in outcome(faulty_targets.missing).findings} == {"missing"}


def test_what_a_target_prints_goes_into_the_message_and_not_to_stdout(capsys):
    record = outcome(faulty_targets.raises)
    assert "RuntimeError: no such kernel" in record.message and "here I am" in record.message
    assert outcome(faulty_targets.chatty).message == "it printed:\nhere I am"
    assert capsys.readouterr().out == ""


def test_what_is_no_result_is_garbage():
    class Claiming(Reference):
        def run(self, call):
            return {"o": 1}

    record = outcome(Claiming(RECIPES["float32"]))
    assert record.outcome == "garbage" and "Result" in record.message


def test_a_target_of_one_pass_is_asked_for_that_pass_alone():
    asked = []

    class One(Reference):
        def run(self, call):
            asked.append((call.passes, sorted(call.tensors)))
            return super().run(call)

    forward = One(RECIPES["bf16"], operations=("ring-forward",))
    assert outcome(forward, "ring/dlse-w2").outcome == "pass"
    backward = One(RECIPES["bf16"], operations=("ring-backward",))
    assert outcome(backward, "ring/dlse-w2").outcome == "pass"
    assert outcome(backward, "kernel-shape/contiguous-causal-w2").outcome == "pass"
    assert asked[0] == (("forward",), ["k", "q", "v"])
    assert asked[1] == (("backward",), ["dlse", "dy", "k", "lse", "o", "q", "v"])


def test_a_target_without_a_backward_needs_no_dlse():
    forward = Reference(RECIPES["bf16"], operations=("ring-forward",), features=())
    assert outcome(forward, "ring/dlse-w2").outcome == "pass"
    both = Reference(RECIPES["bf16"], features=())
    assert outcome(both, "ring/dlse-w2").reason == "feature dlse"


def test_an_lse_that_the_recipe_keeps_in_few_bits_is_no_false_alarm():
    assert outcome(REFERENCES["nki_low"], "adversarial/huge-scores").outcome == "pass"


def test_dense_cases_come_in_a_layout_that_the_target_claims():
    seen = []

    class One(Reference):
        def run(self, call):
            seen.append((call.layout, call.circulation, call.direction, call.workers))
            return super().run(call)

    claims = {"layouts": ("zigzag",), "circulations": ("q",), "directions": (-1,)}
    assert outcome(One(RECIPES["bf16"], **claims), "attention/plain").outcome == "pass"
    assert seen == [("zigzag", "q", -1, 1)]
    one_worker = One(RECIPES["bf16"], workers=(2,))
    assert outcome(one_worker, "attention/plain").reason == "workers 1"


@pytest.mark.parametrize(
    "conventions",
    [
        {"axes": "BSHD"},
        {"axes": "SBHD"},
        {"axes": "SHD", "batch": (1,)},
        {"axes": "HSD", "batch": (1,)},
        {"lse": "base2"},
        {"lse": "hidden"},
        {"lse_of_empty_rows": "plus-infinity"},
        {"lse_of_empty_rows": "finite"},
    ],
    ids=str,
)
def test_conventions_are_converted_and_change_no_verdict(conventions):
    summary = run(Conventional(conventions), FEW)
    assert failed(summary) == [] and summary.claimed > 25


class Conventional(Reference):
    """The reference behind a target's own conventions, converted back by hand."""

    def __init__(self, conventions):
        super().__init__(RECIPES["bf16"], **conventions)

    def run(self, call):
        from conformance.target.by_hand_conventions import answered, natural

        result = super().run(natural(call, self.capabilities))
        return answered(result, call, self.capabilities)


def test_a_wrong_base_of_the_lse_is_a_mismatch():
    claims_base2 = Reference(RECIPES["bf16"], lse="base2")
    record = outcome(claims_base2, "ring/lse-base-w2")
    assert record.outcome == "mismatch"
    assert {name for name, _ in wrong_in(record)} == {"lse"}


def test_records_are_plain():
    record = outcome(faulty_targets.right)
    assert isinstance(record, Record) and isinstance(record.seconds, float)
    assert not isinstance(record.findings[0].error, Result)
