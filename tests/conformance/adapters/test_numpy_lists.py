"""A function over lists of arrays is a target, and gets of a call what it has parameters for."""

import numpy as np
import pytest
from conformance import faulty_targets
from conformance.diagnose.named_faults import ID, assert_named, each_fault

from ringspec.conformance.adapters.numpy_lists import NumPyTarget, result_from
from ringspec.conformance.cases import golden
from ringspec.conformance.cases.calls import call_of
from ringspec.conformance.report.words import record_text
from ringspec.conformance.run.suite import run
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Result
from ringspec.errors import OptionError
from ringspec.vectors import open_set

CORE = open_set("core")
CASES = golden.cases("core")
CLAIMS = Capabilities(
    operations=("ring-forward",),
    layouts=("contiguous", "striped", "zigzag"),
    formats=("float32", "bfloat16"),
    features=("scale", "sinks"),
)


def attention(q, k, v, scale, position_q, position_k, formats, causal=False, sinks=None):
    """All keys gathered: ten lines, as an author would write them."""
    keys, values = (np.concatenate([x.astype(float) for x in y], axis=2) for y in (k, v))
    where = np.concatenate(list(position_k), axis=-1)
    os, lses = [], []
    for worker, mine in enumerate(q):
        group = mine.shape[1] // keys.shape[1]
        one, two = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
        s = scale * mine.astype(float) @ one.swapaxes(2, 3)
        if causal:
            s = np.where(where[:, None, None] <= position_q[worker][:, None, :, None], s, -np.inf)
        if sinks is not None:
            extra = np.broadcast_to(sinks[None, :, None].astype(float), (*s.shape[:3], 1))
            s = np.concatenate([s, extra], axis=3)
            two = np.concatenate([two, 0 * two[:, :, :1]], axis=2)
        m = s.max(axis=3, keepdims=True)
        total = np.exp(s - m).sum(axis=3, keepdims=True)
        os.append((np.exp(s - m) @ two / total).astype(mine.dtype))
        lses.append((m + np.log(total))[..., 0].astype(np.float32))
    return {"o": os, "lse": lses}


def test_ten_lines_of_numpy_pass_what_they_claim():
    summary = run(NumPyTarget(attention, CLAIMS), CASES)
    assert [record_text(record) for record in summary.failures] == []
    assert summary.counts["pass"] > 40


LISTS = {
    "segfault": "lists_segfaulting",
    "hang": "lists_hanging",
    "print": "lists_chatty",
    "float16": "lists_float16",
    "wrong worker": "lists_swapped",
    "mutate": "lists_mutates",
    "NaN": "lists_nan",
}


@each_fault
def test_each_fault_of_a_function_over_lists_is_named_as_exactly_that(fault):
    ring = [case for case in CASES if case.id == ID]
    target, spec = (
        getattr(faulty_targets, LISTS[fault]),
        f"{faulty_targets.__file__}:{LISTS[fault]}",
    )
    seconds = 1.5 if fault == "hang" else 100
    [record] = run(target, ring, spec=spec, timeout=seconds).records
    assert_named(record, fault)
    assert run(faulty_targets.lists_right, ring).exit_code == 0


@pytest.mark.parametrize("returned", [3, {"out": 1}, {"o": 1}, "o"], ids=str)
def test_what_is_no_result_is_garbage(returned):
    ring = [case for case in CASES if case.id == ID]
    target = NumPyTarget(
        lambda call: returned, Capabilities(formats=("float32",), layouts=("zigzag",))
    )
    [record] = run(target, ring).records
    assert record.outcome == "garbage", record


def test_a_term_that_the_function_has_no_parameter_for_is_an_error_not_a_silent_pass():
    def deaf(q, k, v, scale):
        return {"o": q}

    case = [case for case in CASES if case.id == "ring/contiguous-causal-w2"]
    claims = Capabilities(operations=("ring-forward",), formats=("bfloat16",), lse="hidden")
    [record] = run(NumPyTarget(deaf, claims), case).records
    assert record.outcome == "error" and "parameter causal" in record.message


def test_a_function_may_take_the_call_or_everything():
    call = call_of(CORE.case("ring/dlse-w2"), CORE.tensors("ring/dlse-w2"))
    got = []
    NumPyTarget(lambda call: got.append(call) or (None,)).run(call)
    NumPyTarget(lambda **rest: got.append(rest) or (None,)).run(call)
    assert got[0] is call and set(got[1]) == {*call.tensors, *call.terms}


def test_what_a_call_does_not_have_is_none():
    got = []
    call = call_of(CORE.case("ring/contiguous-w2"), CORE.tensors("ring/contiguous-w2"))

    def function(q, k, v, dy, scale, bias, sinks=7, workers=0):
        got.append((bias, sinks, workers))
        return {}

    NumPyTarget(function).run(call)
    assert got == [(None, 7, 2)]


def test_results_are_a_dict_a_tuple_or_a_result():
    assert result_from({"o": [1]}).o == [1]
    assert result_from(([1], [2])).lse == [2]
    own = Result(dq=[3])
    assert result_from(own) is own
    for wrong in ({"out": 1}, 3, (1,) * 8, None):
        with pytest.raises(OptionError):
            result_from(wrong)
