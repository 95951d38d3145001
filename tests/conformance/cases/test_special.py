"""Special values: right for right targets, and each kind fails for a wrong one."""

import re

import pytest
from conformance import wrong_targets as wrong
from conformance.wrong_targets import Wrong

from ringspec.conformance.cases.problems import tensors_of
from ringspec.conformance.cases.special_values import special_cases
from ringspec.conformance.run.suite import run
from ringspec.conformance.target.results import due_of
from ringspec.conformance.targets.reference import REFERENCES
from ringspec.formats import load

CASES = list(special_cases())
BY_ID = {case.id: case for case in CASES}


@pytest.mark.parametrize(
    "recipe", ["float64", "float32", "bf16", "fp16", "bf16_partials", "nki_low"]
)
def test_the_reference_passes_every_special_case(recipe):
    summary = run(REFERENCES[recipe], CASES)
    assert summary.claimed >= 15
    assert [(r.id, r.message) for r in summary.failures] == []


def nothing_for_padding(call):
    """Segments ignored."""
    return wrong.no_documents(call)


WRONG = [
    (wrong.sees_next_key, None, "special/equal-scores/contiguous-w2-bf16", "beyond bound"),
    (None, wrong.low_rows_lost, "special/low-scores/zigzag-w4-f32", "sum to 0."),
    (None, wrong.high_rows_overflow, "special/high-scores/contiguous-w2-bf16", "NaN"),
    (
        None,
        wrong.plus_infinity_for_empty,
        "special/one-empty-row-bounds/striped-w3-bf16",
        "infinite",
    ),
    (None, wrong.nan_in_empty_rows, "special/one-empty-row-dense/contiguous-w2-f32", "NaN"),
    (nothing_for_padding, None, "special/garbage-in-padding/contiguous-w2-bf16", "beyond bound"),
    (wrong.ones_for_dy, None, "special/zero-dy/contiguous-w2-bf16", "not zero"),
    (None, wrong.never_zero, "special/zero-values/contiguous-w2-f32", "not zero"),
    (
        None,
        wrong.low_rows_lost,
        "special/masked-block-then-minus-200/segments-w3-bf16",
        "sum to 0.",
    ),
    (None, wrong.low_rows_lost, "special/masked-block-then-minus-200/dense-w3-f32", "sum to 0."),
    (None, wrong.dk_one_hop_short, "special/empty-worker/causal-w3-bf16", "beyond bound"),
    (wrong.local_indices, None, "special/padding-slots/causal-w3-f32", "beyond bound"),
    (wrong.local_indices, None, "special/one-token/striped-w4-f32", "beyond bound|infinite|finite"),
]


@pytest.mark.parametrize(("ask", "answer", "id", "kind"), WRONG)
def test_a_wrong_target_fails_and_the_finding_names_the_kind(ask, answer, id, kind):
    [record] = run(Wrong(ask=ask, answer=answer), [BY_ID[id]]).records
    assert record.outcome == "mismatch"
    assert re.search(
        kind, " ".join((record.message, *(finding.kind for finding in record.findings)))
    )


def test_every_kind_of_special_case_has_a_target_that_it_fails():
    assert {id.split("/")[1] for id in BY_ID} == {id.split("/")[1] for _, _, id, _ in WRONG}


def scores_of(id):
    """lse of each query of a case: what special scores are near."""
    claims = REFERENCES["float64"].capabilities
    [call] = BY_ID[id].make(claims)
    assert "lse" in due_of(call)
    return call


@pytest.mark.parametrize(("name", "low", "high"), [("low", -215, -185), ("high", 185, 215)])
def test_scores_lie_where_the_case_says(name, low, high):
    call = scores_of(f"special/{name}-scores/contiguous-w1-f32")
    q, k = (load(call.worker(n, 0)) for n in "qk")
    s = call.terms["scale"] * (q @ k.swapaxes(2, 3))
    assert low <= s.min() and s.max() <= high


def test_an_empty_worker_has_slots_and_no_tokens():
    call = scores_of("special/empty-worker/causal-w3-bf16")
    assert call.worker("q", 1).shape == (1, 2, 12, 64)
    assert (call.index_q[1] == -1).all() and not load(call.worker("v", 1)).any()


def test_a_masked_first_block_is_wholly_masked_on_every_worker():
    call = scores_of("special/masked-block-then-minus-200/segments-w3-bf16")
    for r in range(3):
        own = call.tensors["segments_q"][r][..., None] == call.tensors["segments_k"][r][:, None]
        assert not own.any()


def test_one_row_is_empty_and_no_other():
    from ringspec.conformance.cases.problems import dealt, drawn
    from ringspec.conformance.cases.special_values import EMPTY_ROW, PROBLEMS, TOKENS

    for name in ("one-empty-row-bounds", "one-empty-row-dense"):
        case = dealt(drawn(f"special-{name}", "f32", S=TOKENS, **PROBLEMS[name][1]), "special/t", 1)
        lse = tensors_of(case)["out.lse.float64"][0]
        assert (lse[:, :, EMPTY_ROW] == float("-inf")).all()
        assert (lse > float("-inf")).sum() == 2 * (TOKENS - 1)
