"""Profile seeds: fixed cases that real targets claim, right targets pass, and wrong ones do not."""

import hashlib
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from conformance import wrong_targets as wrong
from conformance.wrong_targets import Wrong

from ringspec.conformance.cases.calls import call_of
from ringspec.conformance.cases.problems import dealt, drawn, tensors_of
from ringspec.conformance.cases.profiles import run_cases
from ringspec.conformance.cases.random_seeds import PROBLEMS, problem_in, variants
from ringspec.conformance.run.suite import run
from ringspec.conformance.target.results import fingerprint
from ringspec.conformance.targets import haoliuhl, torch_cp
from ringspec.conformance.targets.reference import REFERENCES
from ringspec.formats import load
from ringspec.vectors.catalogue.build import bias_of
from ringspec.vectors.format.inputs import inputs_of
from ringspec.vectors.generate import tensors_of_case

CASES = run_cases("seeds")
BY_ID = {case.id: case for case in CASES}


def test_there_are_twelve_problems_of_twenty_seeds_apart_from_the_other_profiles():
    assert len(BY_ID) == len(CASES) == 240
    assert all(re.fullmatch(r"seeded/[a-z-]+/[01]\d", id) for id in BY_ID)
    assert set(Counter(id.split("/")[1] for id in BY_ID).values()) == {20}
    assert not set(BY_ID) & {case.id for case in run_cases("full")}


def test_ids_and_inputs_do_not_change():
    """What was published under an id stays, for good."""
    digest = hashlib.sha256()
    for problem in PROBLEMS:
        for seed in (0, 7, 13):
            for case in variants(problem, seed, f"seeded/{problem.name}/{seed:02}"):
                digest.update(f"{case.id} {fingerprint(call_of(case, {}))}\n".encode())
    assert digest.hexdigest()[:16] == "23beaac8da8585ec"


CLAIMED = [
    (torch_cp.claims("contiguous", "alltoall", "cpu"), 8),
    (torch_cp.claims("contiguous", "allgather", "16bit"), 8),
    (torch_cp.claims("zigzag", "allgather", "cpu"), 5),
    (torch_cp.claims("zigzag", "alltoall", "flash"), 5),
    (haoliuhl.CLAIMS, 7),
    *((reference.capabilities, 12) for reference in REFERENCES.values()),
]


@pytest.mark.parametrize(("claims", "problems"), CLAIMED)
def test_each_target_claims_a_share_and_is_asked_with_every_number_of_workers(claims, problems):
    if claims.workers is None or 4 in claims.workers:  # GPUs are counted on this machine
        asked = [case for case in CASES if case.why_not(claims) is None]
        assert len(asked) == 20 * problems
        for workers in (2, 3, 4):
            of_one_size = replace(claims, workers=(workers,))
            assert all(case.why_not(of_one_size) is None for case in asked)


def test_the_reference_passes_one_seed_in_every_recipe():
    """Recipes side by side share their truth."""
    for case in CASES[13::120]:
        for reference in REFERENCES.values():
            [record] = run(reference, [case]).records
            assert record.outcome == "pass", (reference.name, record.id, record.message)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", REFERENCES)
def test_the_reference_passes_every_seed(recipe):
    summary = run(REFERENCES[recipe], CASES)
    assert summary.counts == {"pass": 240}, [r.message for r in summary.failures]


@pytest.mark.parametrize(
    ("ask", "answer", "id", "says"),
    [
        (None, wrong.larger_on_four, "seeded/full/03",
         "In bfloat16, contiguous, 4 workers: o of worker 0"),
        (wrong.sees_next_key, None, "seeded/causal/15", "In bfloat16, contiguous, 2 workers: o of"),
        (wrong.heads_dealt_round, wrong.heads_put_back, "seeded/causal-grouped/04", "o of worker"),
        (wrong.no_documents, None, "seeded/documents/10", "o of worker"),
        (wrong.no_window, None, "seeded/window/02", "o of worker"),
        (wrong.no_sinks, None, "seeded/sinks/05", "dsinks of worker"),
        (None, wrong.dk_one_hop_short, "seeded/causal/15", "dk of worker"),
    ],
)  # fmt: skip
def test_a_wrong_target_fails_and_the_message_names_the_ring(ask, answer, id, says):
    [record] = run(Wrong("float32", ask=ask, answer=answer), [BY_ID[id]]).records
    assert record.outcome == "mismatch"
    assert re.search(says, record.message), record.message


def inputs(seed, dtype="bf16"):
    return {n: load(x) for n, x in inputs_of(problem_in(PROBLEMS[0], seed, dtype)).items()}


def test_every_seed_has_inputs_of_its_own_and_its_own_sharpness():
    drawn_inputs = [inputs(seed) for seed in range(20)]
    for name in ("q", "k", "v", "dy"):
        assert len({x[name].tobytes() for x in drawn_inputs}) == 20
    sizes = [np.abs(x["q"]).max() for x in drawn_inputs[:10]]
    assert all(1.8 < later / one < 2.2 for one, later in zip(sizes, sizes[1:], strict=False))
    assert sizes[0] < 0.13 and sizes[-1] > 60


def test_outliers_stand_out_from_seed_10_on():
    def largest_by_mean(seed):
        size = np.abs(inputs(seed)["v"]).mean(axis=(0, 1, 3))
        return size.max() / size.mean()

    assert largest_by_mean(9) < 2 and largest_by_mean(10) > 10


def test_float32_inputs_use_all_bits_and_16_bit_formats_share_theirs():
    assert np.array_equal(inputs(6, "bf16")["k"], inputs(6, "fp16")["k"])
    assert np.array_equal(inputs(6, "f32")["k"], inputs(6, "f64")["k"])
    assert (inputs(6, "f32")["k"] * 2**22 % 2 == 1).any()


@pytest.mark.parametrize("given", [
    {"sinks": ((0.5,), (-1.25,)), "causal": True},
    {"bias": bias_of(1, 2, 12, 12)},
    {"bias": bias_of(1, 2, 1, 12), "sinks": ((0.5,), (-1.25,))},
])  # fmt: skip
def test_shared_truth_holds_each_workers_share_of_dsinks_and_dbias(given):
    for dtype in ("bf16", "f64"):
        problem = drawn("shared", dtype, S=12, **given)
        for workers, layout in ((1, "contiguous"), (3, "striped"), (2, "table")):
            case = dealt(problem, f"shared/{layout}", workers, layout)
            shared, own = tensors_of(case), tensors_of_case(case)
            assert shared.keys() == own.keys()
            assert all(shared[name].tobytes() == own[name].tobytes() for name in own)
