"""No member of the collection is accused: a sample in every run, every case once with ``-m slow``.

``run.py`` runs each noise case with twenty seeds, which takes hours.
"""

import dataclasses

import numpy as np
import pytest
from correct_kernels import run
from correct_kernels.forward_states import fresh
from correct_kernels.members import MEMBERS
from correct_kernels.target import WAYS
from independent.numpy_target import NumpyRing

from ringspec.compare.inference.candidates import REFERENCES
from ringspec.conformance.cases import noise as noise_cases
from ringspec.conformance.run.case import run_case

ALL = tuple(MEMBERS)
NOISE = [case.id for case in noise_cases.cases()]
SAMPLE = "noise/causal-zigzag-w4-fp16"
FEW = 128  # tokens of the sample; its predictions then take a tenth of the time
SAMPLED = ("carried-state", "normalised-p", "unrounded-delta")
SMALL = (
    "attention/all-mask-terms",
    "attention/plain",
    "ring/float32-zigzag-w4",
    "ring/zigzag-causal-w4",
    "adversarial/hidden-keys-hold-garbage",
    "block/backward-empty-rows",
    "merge/two-empty-parts",
    "special/garbage-in-padding/striped-w3-bf16",
)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def told(found):
    return [(alarm.member, alarm.case, alarm.seed, alarm.tests) for alarm in found.alarms]


def noise(id, seed, tokens=noise_cases.TOKENS):
    return run.Work("noise", NOISE.index(id), id, seed, tokens)


def core(ids=None):
    return [work for work in run.core_work() if ids is None or work.id in ids]


def test_no_member_is_accused_in_some_cases_of_core():
    chosen = core(SMALL)
    assert len(chosen) == len(SMALL)
    for work in chosen:
        found = run.done(work, ALL, WAYS)
        assert told(found) == [] and found.ran >= 4


@pytest.mark.slow
@pytest.mark.parametrize("part", range(16))
def test_no_member_is_accused_in_core(part):
    for work in core()[part::16]:
        assert told(run.done(work, ALL, WAYS)) == []


@pytest.fixture(scope="module")
def predicted_once():
    """The noise of a problem is predicted once for all tests that ask for this."""
    with run.predicts_once():
        yield


@pytest.fixture(scope="module")
def sampled(predicted_once):
    """Some members in one noise case: the truth and its noise are computed once for all of them."""
    return run.done(noise(SAMPLE, 0, FEW), SAMPLED, WAYS)


@pytest.mark.parametrize("way", WAYS)
def test_no_member_is_accused_by_one_noise_case(sampled, way):
    assert sampled.ran > 2 * len(SAMPLED)
    assert [alarm for alarm in sampled.alarms if alarm.way == way] == []


@pytest.mark.parametrize("name", ["sigmoid-merge", "normalised-merge"])
def test_a_merge_of_normalised_parts_in_float32_is_not_accused_of_single_elements(name):
    """Where one key has all the weight nearly no noise is predicted, and a weight of 1 still rounds."""
    for id, seed in (("noise/full-contiguous-w2-f32", 3), ("noise/full-contiguous-w8-f32", 1)):
        assert told(run.done(noise(id, seed), (name,), ("named",))) == []


@pytest.mark.slow
@pytest.mark.parametrize("id", NOISE)
def test_no_member_is_accused_by_noise(id):
    assert told(run.done(noise(id, 0), ALL, WAYS)) == []


@pytest.mark.parametrize(
    ("name", "id"),
    [
        ("carried-state", "noise/causal-zigzag-w2-bf16"),
        slow("carried-state", "noise/causal-contiguous-w4-bf16"),
        slow("keys-backwards", "noise/causal-zigzag-w2-bf16"),
        slow("keys-backwards", "noise/causal-contiguous-w4-bf16"),
    ],
)
def test_a_reference_that_fits_little_better_than_the_block_s_is_accepted(name, id):
    assert told(run.done(noise(id, 0), (name,), ("named",))) == []


@pytest.mark.parametrize(
    ("name", "id", "seed"),
    [
        ("lazy-rescaling", "noise/causal-contiguous-w1-bf16", 3),
        slow("lazy-rescaling-base2", "noise/causal-contiguous-w1-bf16", 6),
        slow("lazy-rescaling", "noise/documents-contiguous-w3-bf16", 1),
        ("keys-backwards", "noise/causal-zigzag-w4-bf16", 1),
    ],
)
def test_a_state_carried_through_tiles_is_accepted_where_its_tile_is_not_declared(name, id, seed):
    assert told(run.done(noise(id, seed), (name,), ("named",))) == []


@pytest.mark.parametrize("fault", ["block-o-16", pytest.param("delta-16", marks=pytest.mark.slow)])
def test_what_p_is_relative_to_excuses_no_other_rounding(fault):
    case = run.case_of(noise("noise/causal-contiguous-w4-bf16", 0, FEW))
    with run.fast_judge():
        assert run_case(NumpyRing(fault, "bf16"), case).outcome == "mismatch"


@pytest.mark.parametrize(("name", "found"), [("carried-state", "running"), ("normalised-p", "lse")])
def test_what_p_is_relative_to_is_found_where_it_is_not_declared(predicted_once, name, found):
    case = run.case_of(noise(SAMPLE, 0, FEW))
    assert run_case(run.member_target(name, "named"), case).noise["p_relative_to"] == found


@pytest.mark.parametrize(
    "name", ["carried-state", pytest.param("normalised-p", marks=pytest.mark.slow)]
)
def test_a_kernel_that_declares_another_reference_of_p_is_contradicted(
    predicted_once, name, monkeypatch
):
    wrong = dataclasses.replace(MEMBERS[name], declares={"p_relative_to": "block"})
    monkeypatch.setitem(MEMBERS, name, wrong)
    record = run_case(run.member_target(name, "declared"), run.case_of(noise(SAMPLE, 0, FEW)))
    words = REFERENCES[{"carried-state": "running", "normalised-p": "lse"}[name]]
    assert record.outcome == "mismatch" and words in record.message


@pytest.fixture
def too_large(monkeypatch):
    """A kernel whose o is 0.1 % too large, in the place of a member."""

    def forward(ring, sizes):
        o, lse = fresh(ring, sizes)
        return [x * np.float32(1.001) for x in o], lse

    wrong = dataclasses.replace(MEMBERS["fresh-state"], forward=forward)
    monkeypatch.setitem(MEMBERS, "fresh-state", wrong)


def test_a_wrong_member_is_accused_and_its_tests_are_listed(too_large):
    found = run.done(
        noise("noise/full-contiguous-w2-fp16", 0, FEW), ("fresh-state",), ("undeclared", "named")
    )
    assert [alarm.way for alarm in found.alarms] == ["undeclared", "named"]
    assert all(alarm.tests for alarm in found.alarms)
    assert "o, all: slope" in " ".join(found.alarms[0].tests)


def test_an_undeclared_wrong_member_is_accused_where_some_rows_see_one_key(
    predicted_once, too_large
):
    """There it is 10^10 predicted standard deviations off, which is not the noise of the whole tensor."""
    found = run.done(noise(SAMPLE, 0, FEW), ("fresh-state",), ("undeclared",))
    assert [alarm.member for alarm in found.alarms] == ["fresh-state"]


def test_a_seed_changes_the_numbers_of_a_noise_case_and_nothing_else():
    claims = run.member_target("fresh-state").capabilities
    calls = [run.case_of(noise(SAMPLE, seed)).make(claims)[0] for seed in (0, 1)]
    assert calls[0].workers == calls[1].workers == 4
    assert [call.layout for call in calls] == ["zigzag", "zigzag"]
    assert not np.array_equal(calls[0].worker("k", 2), calls[1].worker("k", 2))
    assert NOISE == [case.id for case in noise_cases.cases()]
