"""A golden case becomes a call that holds what each worker holds, and nothing expected."""

from functools import partial

import numpy as np
import pytest

from ringspec.conformance.cases import golden
from ringspec.conformance.cases.calls import backward_alone, call_of, expected_of, forward_alone
from ringspec.conformance.judge.scales import with_all_rows, with_scales
from ringspec.conformance.run import suite
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.results import due_of, fingerprint
from ringspec.conformance.targets.reference import REFERENCES
from ringspec.errors import UndecidedError
from ringspec.formats import bits, load
from ringspec.vectors import open_set
from ringspec.vectors.format.inputs import inputs_of
from ringspec.vectors.generate import tensors_of_case

CORE = open_set("core")
ASKED = [case.id for case in CORE if case.operation != "schedule"]
MANY = ["attention/bias", "attention/segments-with-padding", "block/backward-dropout",
        "merge/two-parts", "ring/bias-of-queries-w2", "ring/bias-of-keys-w3",
        "ring/segments-w3", "ring/dense-mask-w2", "ring/table-ragged-w3", "ring/several-sinks-striped-w4",
        "ring/positions-w3", "ring/bounds-q-ring-w3", "kernel-shape/contiguous-causal-w2"]  # fmt: skip


def made(id):
    return call_of(CORE.case(id), CORE.tensors(id))


@pytest.mark.parametrize("id", MANY)
def test_a_call_has_one_read_only_array_a_worker_in_storage_dtypes(id):
    case, call = CORE.case(id), made(id)
    for name, arrays in call.tensors.items():
        assert len(arrays) == call.workers, name
        for x in arrays:
            assert not x.flags.writeable and x.flags.c_contiguous and x.base is None, name
            if x.dtype.kind in "fV":
                assert str(x.dtype) in (case.formats.inputs, case.formats.statistics), name


@pytest.mark.parametrize("id", MANY)
def test_no_expected_value_is_in_a_call(id):
    case = CORE.case(id)
    assert set(made(id).tensors) <= set(case.inputs.tensors)


def test_each_worker_holds_its_own_tokens_and_zeros_in_padding_slots():
    id = "ring/table-ragged-w3"
    call, whole = made(id), CORE.tensors(id)
    assert (call.index_q < 0).any()
    for worker in range(call.workers):
        for slot, token in enumerate(call.index_q[worker]):
            got = bits(call.worker("q", worker)[:, :, slot])
            want = bits(whole["in.q"][:, :, token]) if token >= 0 else 0
            assert np.array_equal(got, np.broadcast_to(want, got.shape))


def test_a_bias_has_own_rows_and_global_keys_and_what_all_share_is_the_same_on_each_worker():
    call, whole = made("ring/bias-w3"), CORE.tensors("ring/bias-w3")["in.bias"]
    for worker, index in enumerate(call.index_q):
        assert np.array_equal(call.worker("bias", worker), whole[:, :, index])
    call = made("ring/bias-of-keys-w3")
    assert call.worker("bias", 2).shape[2] == 1
    call = made("ring/several-sinks-striped-w4")
    assert all(np.array_equal(x, call.worker("sinks", 0)) for x in call.tensors["sinks"])


def test_segments_and_bounds_are_rows_of_the_worker_with_minus_one_in_padding():
    call = made("ring/segments-w3")
    whole = CORE.tensors("ring/segments-w3")["in.segments_q"]
    for worker, index in enumerate(call.index_q):
        got = call.worker("segments_q", worker)
        assert got.ndim == 2 and np.array_equal(got[0], np.atleast_2d(whole)[0][index])


def test_dense_attention_is_a_ring_of_one_worker_with_positions():
    call = made("attention/causal-end-aligned")
    case = CORE.case("attention/causal-end-aligned")
    assert (call.operation, call.workers, call.layout) == ("ring", 1, "contiguous")
    assert call.position_q[0, 0, 0] == case.terms["q_offset"]
    assert call.index_q.tolist() == [list(range(case.shape.Sq))]


def test_the_inputs_of_sampled_cases_are_drawn_again():
    id = "kernel-shape/contiguous-causal-w2"
    whole = tensors_of_case(CORE.case(id), scales=False)
    call = made(id)
    assert np.array_equal(bits(call.worker("k", 1)), bits(whole["in.k"][:, :, 128:]))


@pytest.mark.parametrize("id", ASKED)
def test_what_is_due_is_what_is_expected(id):
    case, tensors = CORE.case(id), CORE.tensors(id)
    call = call_of(case, tensors)
    due, expected = due_of(call), expected_of(case, with_all_rows(case, tensors))
    assert set(due) == set(expected)
    for name, one in expected.items():
        for worker, shape in enumerate(due[name].shapes):
            assert one.values[worker].shape == shape, name
            assert one.rounded[worker].shape == one.values[worker].shape
            assert str(one.rounded[worker].dtype) == due[name].format


def test_padding_slots_are_not_compared():
    id = "ring/table-ragged-w3"
    call = made(id)
    expected = expected_of(CORE.case(id), CORE.tensors(id))
    for worker in range(3):
        assert np.array_equal(expected["dq"].real[worker], call.index_q[worker] >= 0)
        assert np.array_equal(expected["dk"].real[worker], call.index_k[worker] >= 0)


def test_one_pass_alone_has_its_own_inputs():
    id = "ring/dlse-w2"
    case, tensors = CORE.case(id), CORE.tensors(id)
    call = made(id)
    ahead, behind = forward_alone(call), backward_alone(call, case, tensors)
    assert set(call.tensors) - set(ahead.tensors) == {"dy", "dlse"}
    assert set(behind.tensors) - set(call.tensors) == {"o", "lse"}
    assert np.array_equal(bits(behind.worker("o", 1)), bits(tensors["out.o.bfloat16"][1]))
    assert set(due_of(ahead)) == {"o", "lse"} and set(due_of(behind)) == {"dq", "dk", "dv"}


def test_a_fingerprint_sees_one_bit():
    call = made("ring/dlse-w2")
    before = fingerprint(call)
    assert before == fingerprint(made("ring/dlse-w2"))
    x = call.tensors["dlse"][1]
    x.flags.writeable = True
    x[0, 0, 0] = np.nextafter(x[0, 0, 0], np.float32(np.inf))
    assert fingerprint(call) != before


@pytest.mark.parametrize("id", [id for id in ASKED if id.startswith("ring/")][::4])
def test_row_scales_in_float64_are_those_of_the_set(id):
    case, tensors = CORE.case(id), CORE.tensors(id)
    bare = {name: x for name, x in tensors.items() if not name.startswith("scale.")}
    made = with_scales(case, bare)
    for name in ("o", "lse", "dq", "dk", "dv", "dsinks", "dsinks_sum", "dbias", "dbias_sum"):
        if f"scale.{name}" in tensors:
            want = tensors[f"scale.{name}"]
            real = tensors[f"out.{name}.float64"]
            assert want.shape == real.shape[: want.ndim]
            assert np.all(np.abs(made[f"scale.{name}"] - want) <= 1e-12 * want), name


SAMPLED = [case.id for case in CORE if case.storage == "sampled"]


@pytest.mark.parametrize("id", SAMPLED)
def test_all_rows_of_a_sampled_case_are_there_and_the_sampled_ones_are_exact(id):
    case, tensors = CORE.case(id), CORE.tensors(id)
    whole = with_all_rows(case, tensors)
    call = call_of(case, tensors)
    for name, side in (("o", "q"), ("lse", "q"), ("dq", "q"), ("dk", "k"), ("dv", "k")):
        if f"out.{name}.float64" not in tensors:
            continue
        for key in [key for key in tensors if key.startswith(f"out.{name}.")]:
            for worker, at in enumerate(tensors[f"rows.{side}"]):
                assert whole[key][worker].shape == due_of(call)[name].shapes[worker]
                taken = whole[key][worker][tuple(at.T)]
                assert np.array_equal(bits(taken), bits(tensors[key][worker])), key


@pytest.mark.parametrize("id", ["kernel-shape/sinks-w2", "kernel-shape/window-w2"])
def test_rows_beside_the_sampled_ones_are_the_exact_ones_to_float64s_last_digits(id):
    case, tensors = CORE.case(id), CORE.tensors(id)
    whole, exact = with_all_rows(case, tensors), tensors_of_case(case)
    for name in ("o", "lse", "dq", "dk", "dv"):
        want, scale = exact[f"out.{name}.float64"], exact[f"scale.{name}"]
        row = scale if name == "lse" else scale[..., None]
        assert (np.abs(whole[f"out.{name}.float64"] - want) <= 1e-14 * row).all(), name
        assert (np.abs(whole[f"scale.{name}"] - scale) <= 1e-12 * scale).all(), name


def test_float64_that_differs_from_a_sampled_row_is_no_truth():
    id = "kernel-shape/contiguous-w2"
    case, tensors = CORE.case(id), dict(CORE.tensors(id))
    tensors["out.o.float64"] = tensors["out.o.float64"] * (1 + 1e-9)
    with pytest.raises(UndecidedError):
        with_all_rows(case, tensors)


def test_ids_are_unique_and_every_case_of_the_core_set_but_schedules_is_asked():
    ids = [case.id for case in golden.cases("core")]
    assert sorted(ids) == sorted(ASKED) and len(set(ids)) == len(ids)
    assert {case.id for case in golden.cases("smoke")} <= set(ids)
    assert {case.id for case in golden.cases("smoke")} == set(golden.SMOKE)


@pytest.mark.parametrize("recipe", ["float64", "bf16_partials"])
def test_merges_that_a_call_can_express_are_asked_and_passed(recipe):
    merges = open_set("merge")
    cases = [case for case in merges if golden.is_expressible(case)]
    assert len(cases) == 51  # docs/conform/index.md says so
    for case in cases:
        x = merges.tensors(case.id)
        assert set(inputs_of(case)) == {"parts_o", "parts_lse"} and case.terms == {}
        assert np.isfinite(load(x["in.parts_o"])).all() and (x["in.parts_lse"] < np.inf).all()
    made = [
        golden.golden_case(case, *[partial(merges.tensors, case.id)] * 2) for case in cases[::3]
    ]
    summary = suite.run(REFERENCES[recipe], made)
    assert summary.exit_code == 0 and summary.claimed >= 8, summary.failures


@pytest.mark.slow
def test_the_full_profile_deals_dense_cases_and_has_the_kernel_set():
    cases = {case.id: case for case in golden.cases("full")}
    assert set(ASKED) < set(cases) and set(open_set("kernel").ids) < set(cases)
    assert sum(id.startswith("partials/") for id in cases) == 51
    dealt = [id for id in cases if id.startswith("resharded/")]
    assert len(dealt) > 150
    case = cases["resharded/attention-plain-w4"]
    assert case.needs["workers"] == 4 and case.needs["layout"] == "contiguous"
    [call] = case.make(Capabilities())
    lengths = [x.shape[2] for x in call.tensors["q"]]
    assert lengths == [cases["attention/plain"].needs["lengths"][0] // 4] * 4
