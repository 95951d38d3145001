"""Probes at 128 tokens a worker: claimed by long-block targets, right for right ones, and not blind."""

import re
from dataclasses import replace

import numpy as np
import pytest
from conformance import wrong_targets as wrong
from conformance.wrong_targets import Wrong

from ringspec.conformance.cases import golden, probes
from ringspec.conformance.cases.long_blocks import (
    BLOCK,
    dealt_to_heads,
    long_block_cases,
    side_by_side,
)
from ringspec.conformance.diagnose.picture import gathered, patterns
from ringspec.conformance.run.suite import run
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.targets.reference import REFERENCES
from ringspec.vectors.format.inputs import draw

BY_ID = {case.id: case for case in long_block_cases()}
LONG = Capabilities(tokens_multiple=BLOCK, head_dims=(128,), layouts=("contiguous", "zigzag"))
ONE_EACH = (
    "probe/pattern/long-causal-zigzag-w2-d128-bf16",
    "probe/pattern/long-full-contiguous-w2-d64-f32",
    "probe/gradient-pattern/long-causal-contiguous-w2-d128-bf16",
    "probe/gradient-pattern/long-full-striped-w2-d128-f32",
    "probe/hidden-keys/long-causal-contiguous-w2-d128-bf16",
    "probe/hidden-queries/long-causal-zigzag-w2-d128-f32",
    "probe/one-row-of-dy/long-contiguous-w2-d128-bf16",
    "probe/heads/long-4-over-2-zigzag-w2-d128-f32",
)


def record(target, id):
    [one] = run(target, [BY_ID[id]]).records
    return one


def sees_next_key_beyond_64(call):
    """The diagonal is off by one from slot 64 of each worker on, as in a second tile."""
    later = call.position_q + (np.arange(call.position_q.shape[-1]) >= 64)
    return replace(call, position_q=later)


@pytest.mark.parametrize(
    "recipe", ["bf16", *(pytest.param(one, marks=pytest.mark.slow) for one in ("float32", "nki"))]
)
def test_the_reference_passes_one_of_each_kind(recipe):
    own = "f32" if recipe == "float32" else "bf16"
    summary = run(REFERENCES[recipe], [BY_ID[id] for id in ONE_EACH if id.endswith(own)])
    assert summary.claimed >= 3
    assert [(r.id, r.message) for r in summary.failures] == []


@pytest.mark.parametrize("inputs", ["bfloat16", "float32"])
def test_a_target_of_long_blocks_alone_is_asked_every_kind_of_pattern_probe(inputs):
    claims = replace(LONG, formats=(inputs,), head_ratios=(1,))
    kinds = {case.id.split("/")[1] for case in BY_ID.values() if case.why_not(claims) is None}
    assert kinds == {
        "pattern", "gradient-pattern", "hidden-keys", "hidden-queries", "one-row-of-dy",
    }  # fmt: skip
    short = [
        case for case in probes.cases() if case.id not in BY_ID and case.why_not(claims) is None
    ]
    assert short == []


def test_smoke_asks_a_target_of_long_blocks_and_a_target_of_float32():
    smoke = [*probes.cases("smoke"), *golden.cases("smoke")]
    claims = replace(LONG, formats=("bfloat16",))
    asked = [c.id for c in smoke if c.why_not(claims) is None]
    assert "probe/pattern/long-causal-contiguous-w2-d128-bf16" in asked
    assert "probe/pattern/long-causal-zigzag-w2-d128-bf16" in asked
    asked = [c.id for c in golden.cases("smoke") if c.why_not(Capabilities()) is None]
    rings = ["kernel-shape/float32-causal-w2", "kernel-shape/float32-w4"]
    assert asked == ["attention/float32", *rings]


@pytest.mark.parametrize(
    ("ask", "answer", "id", "says"),
    [
        (sees_next_key_beyond_64, None, "probe/pattern/long-causal-contiguous-w2-d128-bf16",
         r"o shows a wrong attention pattern in 127 of 256 rows, on workers 0, 1. "
         r"Query 64 \(worker 0, slot 64\) attends to the hidden key 65 of worker 0"),
        (sees_next_key_beyond_64, None, "probe/pattern/long-causal-zigzag-w3-d128-f32",
         r"Query 192 \(worker 2, slot 64\) attends to the hidden key 193 of worker 2"),
        (sees_next_key_beyond_64, None, "probe/pattern/long-causal-contiguous-w2-d64-f32",
         r"Query 64 \(worker 0, slot 64\) attends to the hidden key 65 of worker 0"),
        (sees_next_key_beyond_64, None, "probe/gradient-pattern/long-causal-contiguous-w2-d128-f32",
         r"dv shows .* Query 64 \(worker 0, slot 64\) attends to the hidden key 65 of worker 0"),
        (sees_next_key_beyond_64, None, "probe/hidden-queries/long-causal-contiguous-w2-d128-bf16",
         r"dk of token 200 \(worker 1\) did not stay"),
        (sees_next_key_beyond_64, None, "probe/hidden-keys/long-causal-contiguous-w2-d128-bf16",
         r"keys and values 200-255 changed, o of token 199 \(worker 1\)"),
        (wrong.local_indices, None, "probe/pattern/long-causal-contiguous-w2-d128-bf16",
         "attends to the hidden key 128 of worker 1"),
        (None, wrong.dq_of_next_worker, "probe/gradient-pattern/long-causal-zigzag-w2-d128-bf16",
         "dq shows a wrong attention pattern"),
        (None, wrong.dk_one_hop_short, "probe/gradient-pattern/long-causal-striped-w2-d128-bf16",
         "dk shows a wrong attention pattern"),
        (wrong.ones_for_dy, None, "probe/one-row-of-dy/long-zigzag-w2-d128-f32", "dq of worker"),
        (wrong.heads_dealt_round, wrong.heads_put_back, "probe/heads/long-4-over-2-contiguous-w2-d128-f32",
         "query head 1 should read 1, the value of key head 0, but reads 2"),
    ],
)  # fmt: skip
def test_a_wrong_target_fails_and_the_message_says_where(ask, answer, id, says):
    one = record(Wrong(recipe="float32", ask=ask, answer=answer), id)
    assert one.outcome == "mismatch"
    assert re.search(says, one.message, re.DOTALL), one.message


def test_the_picture_shows_the_first_wrong_pair():
    one = record(
        Wrong(ask=sees_next_key_beyond_64), "probe/pattern/long-causal-contiguous-w2-d128-bf16"
    )
    top, left = one.picture["origin"]
    expected, got = (np.array(one.picture[name]) for name in ("expected", "got"))
    rows, columns = top + np.arange(64)[:, None], left + np.arange(64)
    assert np.array_equal(expected, columns <= rows)
    assert np.array_equal(got, columns <= rows + (rows >= 64))


def test_one_hot_values_dealt_to_heads_are_a_unit_matrix_side_by_side():
    drawn = draw("v", (1, 3, 384, 128), dealt_to_heads(384, 128), "any")
    assert np.array_equal(side_by_side(drawn)[0, 0], np.eye(384))


@pytest.mark.parametrize("part", [0, 1, 2])
def test_the_pattern_that_the_gradients_should_show_is_the_mask(part):
    """dv shows every visible pair; dq and dk all but that of query 0, whose dZ is 0."""
    case = BY_ID["probe/gradient-pattern/long-causal-contiguous-w2-d128-f32"]
    name = ("dv", "dq", "dk")[part]
    call = case.make(REFERENCES["float64"].capabilities)[part]
    result = REFERENCES["float64"].run(call)
    whole = side_by_side(gathered(getattr(result, name), call.index_q))
    shown, _ = patterns(name, np.where(np.abs(whole) > 1e-6, whole, 0.0), whole, 256)
    mask = np.tri(256, dtype=bool)
    mask[0, 0] = name == "dv"
    assert np.array_equal(shown[0, 0], mask)
