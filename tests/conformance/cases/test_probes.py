"""The probes: right for right targets, and each fails for a wrong one and says where."""

import hashlib
import re

import numpy as np
import pytest
from conformance import wrong_targets as wrong
from conformance.wrong_targets import Wrong

from ringspec.conformance.cases import probes
from ringspec.conformance.cases.closed_form import value_of
from ringspec.conformance.cases.problems import dealt, drawn, tensors_of
from ringspec.conformance.diagnose.summary import Diagnoser
from ringspec.conformance.report.words import record_text
from ringspec.conformance.run.suite import run
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Result
from ringspec.conformance.target.results import due_of, fingerprint
from ringspec.conformance.targets.reference import REFERENCES, options_of, whole, workers_of
from ringspec.formats import load, store
from ringspec.rings.attention import attention
from ringspec.rings.ring import ring
from ringspec.spec.block import block_backward
from ringspec.vectors.generate import tensors_of_case

CASES = probes.cases()
BY_ID = {case.id: case for case in CASES}


def records(target, *ids):
    summary = run(target, [BY_ID[id] for id in ids])
    return list(summary.records)


@pytest.mark.parametrize("recipe", ["float64", "float32", "bf16", "fp16", "bf16_partials"])
@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_the_reference_passes_the_probes(recipe, stride):
    claims = REFERENCES[recipe].capabilities
    short = [case for case in CASES if "/long-" not in case.id]  # test_long_blocks has the others
    claimed = [case for case in short if case.why_not(claims) is None]
    summary = run(REFERENCES[recipe], claimed[::stride])
    assert summary.claimed >= 12
    assert [(r.id, r.message) for r in summary.failures] == []
    assert all(finding.kind == "ok" for r in summary.records for finding in r.findings)


WRONG = [
    # (ask, answer, id, what the message must say)
    (wrong.sees_next_key, None, "probe/pattern/causal-contiguous-w1-f32",
     "o shows a wrong attention pattern in 47 of 48 rows, on worker 0. Query 0 .* hidden key 1"),
    (wrong.sees_next_key, None, "probe/gradient-pattern/causal-zigzag-w4-bf16", "dv shows a wrong"),
    (wrong.sees_next_key, None, "probe/pattern/block-causal-bf16", "o shows a wrong"),
    (wrong.sees_next_key, None, "probe/hidden-keys/causal-contiguous-w2-f32",
     r"keys and values 30-47 changed, o of token 29 \(worker 1\)"),
    (wrong.sees_next_key, None, "probe/hidden-queries/causal-striped-w3-f32", "dy of queries 0-29"),
    (wrong.local_indices, None, "probe/pattern/causal-contiguous-w2-bf16",
     "on workers 0, 1. Query 0 .* attends to the hidden key 24 of worker 1"),
    (wrong.local_indices, None, "probe/pattern/causal-striped-w3-f32", "a wrong attention pattern"),
    (wrong.window_per_block, None, "probe/pattern/window-contiguous-w4-bf16",
     "(attends to|misses) .*key"),
    (wrong.window_per_block, None, "probe/gradient-pattern/window-zigzag-w2-f32", "dv shows a wrong"),
    (wrong.window_per_block, None, "probe/pattern/two-sided-window-striped-w3-f32", "pattern"),
    (wrong.no_documents, None, "probe/pattern/documents-striped-w2-bf16",
     "attends to the hidden keys? .* of workers"),
    (wrong.no_documents, None, "probe/pattern/segments-contiguous-w2-f32", "pattern"),
    (wrong.no_documents, None, "probe/pattern/documents-zigzag-per-document-w2-f32", "pattern"),
    (wrong.no_documents, None, "probe/hidden-keys/documents-contiguous-w2-f32", "keys and values 14"),
    (wrong.no_bounds, None, "probe/pattern/bounds-zigzag-w4-bf16", "pattern"),
    (wrong.no_mask, None, "probe/pattern/dense-contiguous-w2-f32", "In batch 0, head 0"),
    (wrong.no_window, None, "probe/hidden-keys/window-contiguous-w1-bf16", "keys and values 0-4"),
    (wrong.no_window, None, "probe/hidden-queries/window-contiguous-w1-bf16", "dy of queries 40-47"),
    (wrong.ones_for_dy, None, "probe/gradient-pattern/full-contiguous-w2-bf16", "dv|dq"),
    (wrong.ones_for_dy, None, "probe/one-row-of-dy/contiguous-w2-f32", "dq of worker|dv of worker"),
    (None, wrong.dq_of_next_worker, "probe/gradient-pattern/causal-contiguous-w3-bf16",
     "dq shows a wrong attention pattern .* on workers 0-2"),
    (None, wrong.dq_of_next_worker, "probe/hidden-queries/causal-contiguous-w3-bf16", "dq of tokens"),
    (None, wrong.dk_one_hop_short, "probe/gradient-pattern/causal-striped-w4-f32", "dk shows a wrong"),
    (wrong.no_sinks, None, "probe/sinks/contiguous-w1-bf16", "sink of head 0 takes 0 of query 0 instead of 0.5"),
    (wrong.heads_dealt_round, wrong.heads_put_back, "probe/heads/4-over-2-contiguous-w2-f32",
     "query head 1 should read 1, the value of key head 0, but reads 2"),
    (None, wrong.base_2_lse, "probe/zero-queries/contiguous-w2-bf16", "lse of worker 0"),
    (None, wrong.scale_twice, "probe/power-of-two/contiguous-w2-bf16", "dq of call 2 is not 0.5"),
    (None, wrong.leaks, "probe/hidden-keys/causal-contiguous-w4-f32", "bit for bit the same"),
    (None, wrong.Unsteady(), "probe/repeat/contiguous-w2-f32", "o of call 2 is not that of call 1"),
    (None, wrong.delta_of_block, "probe/constant-values/contiguous-w2-bf16", "dq of worker 0"),
    (None, wrong.never_zero, "probe/one-row-of-dy/striped-w3-f32", "not zero"),
]  # fmt: skip


@pytest.mark.parametrize(("ask", "answer", "id", "says"), WRONG)
def test_a_wrong_target_fails_and_the_message_says_where(ask, answer, id, says):
    [record] = records(Wrong(ask=ask, answer=answer), id)
    assert record.outcome == "mismatch"
    text = f"{record.message} {' '.join(f.kind for f in record.findings)}"
    assert re.search(says, text, re.DOTALL), text


def test_every_kind_of_probe_has_a_target_that_it_fails():
    kinds = {id.split("/")[1] for id in BY_ID}
    assert kinds - {"merge"} == {id.split("/")[1] for _, _, id, _ in WRONG}


def test_merge_weights_show_a_base_2_merge():
    def halved(call, result):
        result.o = [wrong.like(x, load(x) ** np.log(2.0)) for x in result.o]

    [record] = records(Wrong(answer=halved), "probe/merge/weights-f32")
    assert record.outcome == "mismatch"


def test_a_pattern_failure_comes_with_both_pictures():
    [record] = records(Wrong(ask=wrong.sees_next_key), "probe/pattern/causal-zigzag-w2-bf16")
    expected, got = (np.array(record.picture[name]) for name in ("expected", "got"))
    assert expected.shape == got.shape == (48, 48)
    assert np.array_equal(expected, np.tri(48))
    assert np.array_equal(got, np.tri(48, k=1))


def test_a_pass_has_no_picture():
    [record] = records(REFERENCES["bf16"], "probe/pattern/causal-zigzag-w2-bf16")
    assert (record.outcome, record.picture) == ("pass", None)


def test_bits_may_change_where_no_bitwise_repetition_is_claimed():
    steady = ("probe/repeat/contiguous-w2-f32", "probe/hidden-keys/causal-contiguous-w2-f32")
    target = Wrong(answer=wrong.Unsteady(), repeats_bitwise=False, recipe="float32")
    assert [r.outcome for r in records(target, *steady)] == ["pass", "pass"]


def test_a_leak_shows_within_noise_as_well_where_it_is_large():
    def leaks(call, result):
        last = load(call.worker("v", call.workers - 1))[:, :, -1:, :].mean()
        result.o = [wrong.like(x, load(x) + 0.01 * last) for x in result.o]

    target = Wrong(answer=leaks, repeats_bitwise=False)
    [record] = records(target, "probe/hidden-keys/causal-contiguous-w2-bf16")
    assert "did not stay the same within noise" in record.message


def test_a_target_without_a_backward_is_asked_for_no_backward():
    target = Wrong(operations=("ring-forward",))
    kinds = ("gradient-pattern", "hidden-queries", "heads", "pattern")
    first = [next(case for case in CASES if case.id.split("/")[1] == kind) for kind in kinds]
    outcomes = {r.id.split("/")[1]: r.outcome for r in run(target, first).records}
    assert outcomes["gradient-pattern"] == outcomes["hidden-queries"] == "not claimed"
    assert outcomes["heads"] == outcomes["pattern"] == "pass"


def test_a_target_with_a_gather_alone_is_asked_for_a_gather():
    case = BY_ID["probe/pattern/causal-contiguous-w2-bf16"]
    claims = Capabilities(circulations=("gather",), directions=(-1,), formats=("bfloat16",))
    [call] = case.make(claims)
    assert (call.circulation, call.direction, case.why_not(claims)) == ("gather", -1, None)


@pytest.mark.parametrize("dtype", ["bf16", "f64"])
def test_shared_truth_is_the_truth_of_each_case(dtype):
    problem = drawn("shared", dtype, S=12, causal=True)
    for workers, layout in ((1, "contiguous"), (3, "striped"), (2, "table")):
        case = dealt(problem, f"shared/{layout}", workers, layout)
        shared, own = tensors_of(case), tensors_of_case(case)
        assert shared.keys() == own.keys()
        for name in own:
            assert shared[name].tobytes() == own[name].tobytes(), name


def test_truth_agrees_with_the_definition_in_float64():
    tensors = tensors_of(dealt(drawn("shared", "bf16", S=12, causal=True), "shared/a", 1))
    made = attention(*(load(tensors[f"in.{name}"]) for name in "qkv"), causal=True)
    assert np.allclose(tensors["out.o.float64"][0], made.o, rtol=0, atol=1e-14)
    assert np.allclose(tensors["out.lse.float64"][0], made.lse, rtol=0, atol=1e-14)


def test_ids_are_unique_and_well_formed():
    assert len(BY_ID) == len(CASES)
    assert all(re.fullmatch(r"probe/[a-z0-9-]+/[a-z0-9-]+", id) for id in BY_ID)


def test_ids_and_inputs_do_not_change(truth_on_demand):
    """What was published under an id stays; a new case may be added, which changes this digest."""
    digest = hashlib.sha256()
    for case in sorted(CASES[::29], key=lambda case: case.id):
        for call in case.make(REFERENCES["float64"].capabilities):
            digest.update(f"{case.id} {fingerprint(call)}\n".encode())
    assert digest.hexdigest()[:16] == "7b9ef86c1756adfd"


def test_smoke_is_a_part_of_core():
    smoke = {case.id for case in probes.cases("smoke")}
    assert 4 <= len(smoke) <= 24 and smoke <= set(BY_ID)


def test_values_of_heads_are_told_apart():
    assert len({value_of(b, h) for b in range(2) for h in range(4)}) == 8


class StaleKeys(Wrong):
    """A backward that differentiates every step against the keys and values of step 0."""

    def run(self, call):
        first = []

        def stale(q, k, v, *rest):
            first.append((k, v))
            k, v = first[(len(first) - 1) % call.workers]
            return block_backward(q, k, v, *rest)

        names = ("q", "k", "v", "dy")
        q, k, v, dy = (whole(call, name) for name in names)
        made = ring(
            q, k, v, dy, workers=call.workers, recipe="float32", block_backward=stale,
            **options_of(call),
        )  # fmt: skip
        results = workers_of(list(made.workers))
        return Result(
            **{n: [store(x, due.format) for x in results[n]] for n, due in due_of(call).items()}
        )


def test_stale_keys_in_the_backward_show_in_dq_alone():
    [gradient] = records(StaleKeys("float32"), "probe/gradient-pattern/full-contiguous-w2-f32")
    assert {f.kind for f in gradient.findings if f.tensor in ("o", "lse", "dv")} == {"ok"}
    assert gradient.outcome == "mismatch"
    assert (
        "dq shows a wrong attention pattern in 48 of 48 rows, on workers 0, 1" in gradient.message
    )


def nan_in(name):
    """NaN in one row of worker 1."""

    def answer(call, result):
        if getattr(result, name) is not None:
            shards = list(getattr(result, name))
            values = load(shards[1]).copy()
            values[0, 0, 3] = np.nan
            shards[1] = wrong.like(shards[1], values)
            setattr(result, name, shards)

    return answer


NAN = [
    ("o", "probe/pattern/causal-contiguous-w2-bf16", "query 27"),
    pytest.param(
        "dq", "probe/gradient-pattern/causal-contiguous-w2-bf16", "query 27", marks=pytest.mark.slow
    ),
    ("dk", "probe/gradient-pattern/full-contiguous-w2-bf16", "key 27"),
]


@pytest.mark.parametrize(("name", "id", "where"), NAN)
def test_nan_is_told_as_nan_and_as_no_pattern(name, id, where):
    target = Wrong("bf16", answer=nan_in(name))
    [record] = run(target, [BY_ID[id]], diagnose=Diagnoser()).records
    assert record.message.startswith(f"{name} holds NaN in 1 of 96 rows, on worker 1")
    assert where in record.message and "hidden" not in record.message
    assert record.diagnosis["id"] is None
    assert f"{name} holds NaN" in record.diagnosis["where"]


def test_a_gradient_probe_tells_each_tensor_of_a_worker_once():
    target = Wrong("bf16", ask=wrong.sees_next_key)
    [record] = records(target, "probe/gradient-pattern/causal-contiguous-w3-bf16")
    lines = record_text(record, 99).splitlines()[1:]
    told = [line.split(":")[0] for line in lines if " of worker " in line]
    assert len(told) == len(set(told)) == 15  # o, lse, dq, dk and dv of three workers
    assert sum(line.endswith("; wrong in 2 calls") for line in lines) == 9  # dq and dk: in one call


def test_the_summary_of_a_gradient_probe_agrees_with_its_findings():
    target = Wrong("bf16", answer=wrong.dk_one_hop_short)
    case = BY_ID["probe/gradient-pattern/causal-contiguous-w3-bf16"]
    [record] = run(target, [case], diagnose=Diagnoser()).records
    assert {one.tensor for one in record.findings if one.kind != "ok"} == {"dk"}
    if record.diagnosis["id"] is None:
        assert record.diagnosis["where"][0] == "wrong: dk; right: o, lse, dq, dv"
