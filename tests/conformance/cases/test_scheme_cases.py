"""The operation 'context_parallel': the cases of schemes, which targets run them, and what they are told."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from refusals import refuses

from ringspec.conformance.cases.profiles import cases_for, run_cases
from ringspec.conformance.cases.scheme_list import SPLITS
from ringspec.conformance.cases.schemes import cases
from ringspec.conformance.cases.splits import call_of, expected_of
from ringspec.conformance.run.case import run_case
from ringspec.conformance.run.load import load_target
from ringspec.conformance.run.suite import run
from ringspec.conformance.target.capabilities import (
    SCHEME_FEATURES,
    SCHEME_OPERATIONS,
    SCHEME_TERMS,
    SCHEMES,
    Capabilities,
)
from ringspec.conformance.targets.reference import reference_float64
from ringspec.conformance.targets.schemes import reference_bf16
from ringspec.errors import OptionError

CASES = {case.id: case for case in cases()}


def changed(target, change):
    """The target with a change to its results."""

    class Changed:
        name, capabilities = "changed", target.capabilities

        def run(self, call):
            result = target.run(call)
            change(call, result)
            return result

    return Changed()


def test_the_specification_passes_the_smoke_cases_in_sixteen_bits():
    summary = run(reference_bf16, cases("smoke"))
    assert summary.counts == {"pass": len(cases("smoke"))} and len(summary.records) >= 15


def test_the_cases_run_only_for_a_target_that_claims_a_scheme():
    usual = [case.id for case in run_cases("smoke")]
    assert not any(id.startswith("scheme/") for id in usual)
    assert [case.id for case in cases_for("smoke", Capabilities())] == usual
    assert not reference_float64.capabilities.schemes
    claims = Capabilities(schemes="ulysses", operations=SCHEME_OPERATIONS)
    smoke = [case.id for case in cases_for("smoke", claims)]
    assert smoke == [*usual, *(case.id for case in cases("smoke"))]
    assert set(smoke[len(usual) :]) < set(CASES)


def test_every_scheme_and_feature_has_cases():
    claims = reference_bf16.capabilities
    needs = [case.needs_of(claims) for case in CASES.values()]
    assert {one["scheme"] for one in needs} == set(SCHEMES)
    assert set(SCHEME_FEATURES) | {"prefix"} <= {x for one in needs for x in one["features"]}
    assert {one["mesh"] for one in needs} >= {"ring x ulysses", "ulysses x ring", "tp x dcp"}


def test_a_plain_target_makes_the_same_claims_as_before():
    data = Capabilities().as_dict()
    assert not {"schemes", "meshes", "interleaves"} & data.keys()
    assert Capabilities(schemes="dcp", interleaves=16).as_dict()["interleaves"] == (16,)


@pytest.mark.parametrize("limit,reason", [
    ({"schemes": "dcp"}, "scheme ulysses"),
    ({"meshes": "ring"}, "mesh ulysses"),
    ({"features": ()}, "feature kv-replicas"),
    ({"workers": (2,)}, "workers 4"),
    ({"head_ratios": (1, 2)}, "head_ratio 4"),
    ({"operations": "context_parallel-backward"}, "operation context_parallel-forward"),
])  # fmt: skip
def test_a_case_that_is_not_claimed_says_why(limit, reason):
    claims = dataclasses.replace(reference_bf16.capabilities, **limit)
    assert CASES["scheme/ulysses/gqa-w4"].why_not(claims) == reason


def test_a_target_without_backward_pass_runs_the_forward_pass():
    claims = dataclasses.replace(reference_bf16.capabilities, operations=SCHEME_OPERATIONS[:1])
    [call] = CASES["scheme/ulysses/gqa-w4"].make(claims)
    assert call.passes == ("forward",) and set(call.tensors) == {"q", "k", "v"}


def test_formats_and_widths_are_those_that_a_target_claims():
    claims = dataclasses.replace(
        reference_bf16.capabilities, head_dims=(64, 128), formats=("float16", "bfloat16")
    )
    calls = [case.make(claims)[0] for case in cases("smoke") if case.why_not(claims) is None]
    assert {call.worker("q", 0).shape[3] for call in calls} == {64}
    assert {call.formats["inputs"] for call in calls} == {"float16", "bfloat16"}


@pytest.mark.parametrize("name", ["o", "lse", "dq", "dk", "dv"])
def test_every_copy_of_a_replicated_token_is_judged(name):
    case = CASES["scheme/joint/backward-w4"]
    [call] = case.make(reference_bf16.capabilities)
    copies = [r for r in range(4) if 1 in call.index_q[r]]
    assert copies == [0, 1, 2, 3]
    for rank in copies:

        def spoil(call, result, rank=rank):
            slot = call.index_q[rank].tolist().index(1)
            getattr(result, name)[rank][:, :, slot] *= 2

        record = run_case(changed(reference_bf16, spoil), case)
        assert record.outcome == "mismatch"
        assert {one.worker for one in record.findings if not one.ok} == {rank}


@pytest.mark.parametrize("id", ["ulysses-w2", "ring-w3", "usp-w4"])
def test_the_sums_of_sinks_of_every_rank_are_judged(id):
    case = CASES[f"scheme/sinks/{id}"]
    assert run_case(reference_bf16, case).outcome == "pass"

    def spoil(call, result):
        result.dsinks[1] = result.dsinks[1] * 2

    record = run_case(changed(reference_bf16, spoil), case)
    wrong = [(one.tensor, one.worker) for one in record.findings if not one.ok]
    assert record.outcome == "mismatch" and wrong == [("dsinks", 1)]


def test_a_rank_gets_the_sinks_and_the_bias_of_its_heads_and_rows():
    claims = reference_bf16.capabilities
    [call] = CASES["scheme/sinks/dcp-w4"].make(claims)
    whole = [0.5 - 0.75 * head for head in range(8)]
    for rank in range(4):
        assert call.worker("sinks", rank)[:, 0].tolist() == [whole[h] for h in call.heads_q[rank]]
    [call] = CASES["scheme/bias/all-gather-w3"].make(claims)
    assert call.passes == ("forward",)
    assert [x.shape for x in call.tensors["bias"]] == [(1, 1, 4, 12)] * 3
    assert call.index_q[0].tolist() == [0, 1, 10, 11]


def test_every_term_and_every_element_of_a_batch_has_a_case_that_only_its_feature_claims():
    for feature in SCHEME_TERMS:
        left = tuple(x for x in reference_bf16.capabilities.features if x != feature)
        claims = dataclasses.replace(reference_bf16.capabilities, features=left)
        reasons = {case.why_not(claims) for case in CASES.values()}
        assert reasons == {None, f"feature {feature}"}
    one = dataclasses.replace(reference_bf16.capabilities, batch=(1,))
    assert sum(case.why_not(one) == "batch 2" for case in CASES.values()) >= 5


def test_padding_slots_are_not_judged_and_empty_ranks_are_asked():
    def spoil(call, result):
        for rank, tokens in enumerate(call.index_q):
            result.o[rank][:, :, tokens < 0] = np.nan

    case = CASES["scheme/padded/thd-w2"]
    [call] = case.make(reference_bf16.capabilities)
    assert (call.index_q < 0).any()
    assert run_case(changed(reference_bf16, spoil), case).outcome == "pass"
    [call] = CASES["scheme/dcp/empty-rank-w4"].make(reference_bf16.capabilities)
    assert call.index_k.tolist() == [[0], [1], [2], [-1]]


def test_values_that_tell_keys_apart_say_which_weight_is_wrong():
    def spoil(call, result):
        result.o[1][0, 1, 0, 3] = 0.0

    case = CASES["scheme/ulysses/gqa-w4"]
    record = run_case(changed(reference_bf16, spoil), case)
    assert (
        "query 2, head 1 of rank 1: read from o, weight 0 of key 3, expected 0." in record.message
    )


def test_expected_values_are_those_of_dense_attention():
    claims = dataclasses.replace(reference_bf16.capabilities, formats=("float64",))
    split = next(one for one in SPLITS if one.id == "scheme/usp/heads-outer-w6")
    call = call_of(split, claims)
    q, k, v = (np.zeros((6, 12, call.worker(x, 0).shape[3])) for x in "qkv")
    for x, name in ((q, "q"), (k, "k"), (v, "v")):
        for rank, tokens in enumerate(call.index_q):
            x[:, tokens] = call.worker(name, rank)[0]
    s = q @ k.transpose(0, 2, 1) * call.terms["scale"]
    p = np.exp(s - s.max(axis=2, keepdims=True))
    o = p / p.sum(axis=2, keepdims=True) @ v
    for rank, want in enumerate(expected_of(split, claims, call)["o"].values):
        assert np.abs(want[0] - o[:, call.index_q[rank]]).max() < 1e-12


def test_a_claim_of_an_unknown_scheme_is_refused():
    with refuses((OptionError, "unknown-name"), match="ulysses"):
        Capabilities(schemes="ulyses")


def test_the_example_of_decoding_passes_all_that_it_claims():
    target = load_target(f"{Path(__file__).parents[3] / 'docs/conform/example_dcp.py'}:target")
    summary = run(target, list(CASES.values()))
    assert summary.counts["pass"] == 13 and set(summary.counts) == {"pass", "not claimed"}
    assert summary.coverage.untested == {}
