"""The properties: right for right targets, and each fails for a wrong one and says what disagrees."""

import hashlib
import re

import numpy as np
import pytest
from conformance import wrong_targets as wrong
from conformance.wrong_targets import Wrong

from ringspec.conformance.cases import properties
from ringspec.conformance.run.suite import run
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.results import fingerprint
from ringspec.conformance.targets.reference import REFERENCES
from ringspec.formats import load

CASES = [case for case in properties.cases() if case.id.startswith("property/")]
BY_ID = {case.id: case for case in CASES}


def record(target, id):
    [one] = run(target, [BY_ID[id]]).records
    return one


@pytest.mark.parametrize(
    "recipe",
    [
        "float64",
        "float32",
        "bf16",
        "nki",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("fp16", "bf16_partials")),
    ],
)
def test_the_reference_has_every_property(recipe):
    summary = run(REFERENCES[recipe], CASES)
    assert summary.claimed >= 5
    assert [(r.id, r.message) for r in summary.failures] == []


WRONG = [
    (
        None,
        wrong.larger_on_four,
        "property/rings/causal-bf16",
        "o over 4 workers, contiguous differs",
    ),
    (wrong.local_indices, None, "property/rings/causal-f32", "over 2 workers, contiguous"),
    (None, wrong.larger_on_four, "property/workers/causal-zigzag-bf16", "beyond"),
    (None, wrong.cubic_in_dy, "property/linearity/contiguous-w2-bf16", "dv is not linear in dy"),
    (wrong.ones_for_dy, None, "property/linearity/striped-w3-f32", "d[qkv] is not linear in dy"),
    (None, wrong.base_2_lse, "property/blocks-merged/bf16", "do not merge to attention"),
]


@pytest.mark.parametrize(("ask", "answer", "id", "says"), WRONG)
def test_a_wrong_target_lacks_a_property_and_the_message_says_which(ask, answer, id, says):
    one = record(Wrong(ask=ask, answer=answer), id)
    assert one.outcome == "mismatch"
    assert re.search(says, one.message), one.message


def test_every_property_has_a_target_that_lacks_it():
    assert {id.split("/")[1] for id in BY_ID} == {id.split("/")[1] for _, _, id, _ in WRONG}


def test_rings_are_chosen_from_the_claims():
    case = BY_ID["property/rings/causal-bf16"]
    claims = Capabilities(layouts=("zigzag",), workers=(2, 4), formats=("bfloat16",))
    assert [(call.workers, call.layout) for call in case.make(claims)] == [
        (2, "zigzag"),
        (4, "zigzag"),
    ]
    assert case.why_not(claims) is None


def test_one_ring_alone_has_nothing_to_agree_with():
    claims = Capabilities(workers=(2,), formats=("bfloat16",))
    reason = BY_ID["property/rings/causal-bf16"].why_not(claims)
    assert reason is not None and reason.startswith("fewer than 2 of its rings")


def test_blocks_and_merge_must_both_be_claimed():
    case = BY_ID["property/blocks-merged/f32"]
    both = ("block-forward", "merge")
    features = ("unequal-lengths",)
    assert case.why_not(Capabilities(operations=both, features=features)) is None
    for one in both:
        assert case.why_not(Capabilities(operations=(one,), features=features)) is not None


def test_a_merge_of_blocks_sees_a_swapped_lse():
    def swapped(call, result):
        if call.operation == "block":
            result.lse = [np.ascontiguousarray(x[:, ::-1]) for x in result.lse]

    one = record(Wrong(answer=swapped), "property/blocks-merged/f32")
    assert one.outcome == "mismatch"
    assert "of a block do not match" in one.message


def test_the_third_dy_is_exactly_the_combination_of_the_other_two():
    for case in (
        BY_ID["property/linearity/contiguous-w2-bf16"],
        BY_ID["property/linearity/contiguous-w2-fp16"],
    ):
        dys = [load(call.worker("dy", 0)) for call in case.make(REFERENCES["float64"].capabilities)]
        assert np.array_equal(2 * dys[0] + dys[1], dys[2])
        assert not np.array_equal(dys[0], dys[1])


def test_smoke_has_rings_of_three_workers_and_more_and_no_other_property():
    ids = [case.id for case in properties.cases("smoke")]
    assert ids == [id for id in BY_ID if id.startswith("property/workers/")] != []


def test_ids_and_inputs_do_not_change(truth_on_demand):
    """Properties and special cases; a new case may be added, which changes this digest."""
    every = properties.cases()
    assert len({case.id for case in every}) == len(every)
    assert all(re.fullmatch(r"(property|special)(/[a-z0-9-]+){1,2}", case.id) for case in every)
    first = [case for case in every if not case.id.startswith("property/workers/")]
    assert digest_of(first[::11]) == "4077aa8bbbb1e075"
    assert digest_of([case for case in every if case not in first]) == "8d394b0bbd82cc16"


def digest_of(cases):
    digest = hashlib.sha256()
    for case in sorted(cases, key=lambda case: case.id):
        for call in case.make(REFERENCES["float64"].capabilities):
            digest.update(f"{case.id} {fingerprint(call)}\n".encode())
    return digest.hexdigest()[:16]
