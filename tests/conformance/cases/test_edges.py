"""Every numeric parameter is tried at 0, at each boundary, one less and one more, in every layout."""

import dataclasses
import hashlib
import math
import re

import pytest
from conformance.wrong_targets import Wrong, replaced

from ringspec.conformance.cases import edges
from ringspec.conformance.cases.problems import needs_of
from ringspec.conformance.run.suite import run
from ringspec.conformance.target.capabilities import Capabilities, why_not
from ringspec.conformance.target.results import fingerprint
from ringspec.conformance.targets.reference import REFERENCES

CASES = edges.cases("full")
BY_ID = {case.id: case for case in CASES}
EVERYTHING = REFERENCES["float64"].capabilities
LAYOUTS = ("contiguous", "striped", "zigzag")
W = 3


def problems(parameter, layout, lengths):
    each = edges.LENGTHS[lengths]
    return edges.problems("edges/a", parameter, layout, each, EVERYTHING)


def around(size):
    return {size - 1, size, size + 1}


def boundaries(case):
    """Half a shard of keys, which is a chunk of zigzag, a shard, and all keys."""
    n = case.shape.Sk // W
    return {0} | around(n // 2) | around(n) | around(case.shape.Sk)


@pytest.mark.parametrize("lengths", edges.LENGTHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_and_offsets_reach_to_each_boundary_and_beyond(layout, lengths):
    for parameter, side in (("window-left", 0), ("window-right", 1), ("window-causal", 0)):
        made = problems(parameter, layout, lengths)
        assert {case.terms["window"][side] for case in made} >= boundaries(made[0])
        assert all(case.ring.workers == W and case.ring.layout == layout for case in made)
    made = problems("q-offset", layout, lengths)
    offsets = {case.terms["q_offset"] for case in made}
    wanted = boundaries(made[0]) - {0}  # 0 is the default, which most other cases have
    assert offsets >= wanted and offsets >= {-size for size in wanted}


@pytest.mark.parametrize("lengths", edges.LENGTHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_key_bounds_lie_at_each_boundary_and_beyond(layout, lengths):
    made = problems("bounds", layout, lengths)
    for name in ("bound_min", "bound_max"):
        values = {x for case in made for x in case.inputs.tensors[name].values}
        assert values >= boundaries(made[0])


@pytest.mark.parametrize("lengths", edges.LENGTHS)
@pytest.mark.parametrize("layout", [*LAYOUTS, "zigzag_per_document"])
def test_documents_are_of_no_token_of_a_chunk_of_a_shard_and_of_all(layout, lengths):
    made = problems("documents", layout, lengths)
    for terms, size in (("cu_seqlens", made[0].shape.Sq), ("cu_seqlens_k", made[0].shape.Sk)):
        n = size // W
        first = {case.terms[terms][1] for case in made}
        assert first >= {0, size - 1, size} | around(n // 2) | around(n)
        # An empty document in the middle, and tokens after the last one.
        assert any(0 < starts[1] == starts[2] for starts in (c.terms[terms] for c in made))
        assert any(case.terms[terms][-1] < size for case in made)


def test_core_tries_every_parameter_in_every_layout_and_with_unequal_lengths_either_way():
    ids = {case.id for case in edges.cases("core")}
    assert ids < set(BY_ID)
    for parameter in edges.PARAMETERS:
        for layout in LAYOUTS:
            assert f"edges/{parameter}/{layout}" in ids
        assert f"edges/{parameter}/contiguous-more-keys" in ids
        assert f"edges/{parameter}/zigzag-more-queries" in ids


def test_soft_caps_lie_far_below_the_scores_between_them_and_far_above():
    caps = {case.terms["softcap"] for case in problems("softcap", "zigzag", "")}
    assert min(caps) <= 2**-10 and max(caps) >= 2**10 and any(0.1 < cap < 2 for cap in caps)


def test_lengths_are_equal_and_unequal_either_way():
    shapes = {problems("softcap", "zigzag", lengths)[0].shape for lengths in edges.LENGTHS}
    assert {math.copysign(1, s.Sq - s.Sk) if s.Sq != s.Sk else 0 for s in shapes} == {0, 1, -1}


def narrow_window(call):
    """A window as wide as a shard is one key too narrow: a block at its edge is skipped."""
    left, right = call.terms.get("window", (None, None))
    if left != call.index_k.shape[1]:
        return call
    return dataclasses.replace(call, terms={**call.terms, "window": (left - 1, right)})


def late_offset(call):
    """Offsets of more than a shard are cut to one."""
    offset = call.terms.get("q_offset", 0)
    cut = min(call.index_k.shape[1], offset)
    return dataclasses.replace(call, position_q=call.position_q - offset + cut)


def first_document_for_none(call):
    """A first document without tokens is taken for the start of the second one, less one token."""
    starts = call.terms.get("cu_seqlens", ())
    if starts[:2] != (0, 0):
        return call
    terms = {**call.terms, "cu_seqlens": (0, 1, *starts[2:])}
    return dataclasses.replace(call, terms=terms)


def bound_beyond_the_keys(call):
    """An upper bound of all keys and more is taken for the last key."""
    if "bound_max" not in call.tensors:
        return call
    keys = call.index_k.size
    high = [x - (x == keys + 1) * 2 for x in call.tensors["bound_max"]]
    return replaced(call, bound_max=tuple(high))


def no_small_softcap(call):
    """A cap under which float32 scores saturate is left out."""
    if call.terms.get("softcap", 1.0) > 0.01:
        return call
    return dataclasses.replace(
        call, terms={name: x for name, x in call.terms.items() if name != "softcap"}
    )


@pytest.mark.parametrize(
    ("ask", "id", "says"),
    [
        (narrow_window, "edges/window-left/striped", "window \\(4, None\\)"),
        (narrow_window, "edges/window-causal/zigzag-more-keys", "window \\(8, 0\\)"),
        (late_offset, "edges/q-offset/contiguous", "q_offset 5"),
        (first_document_for_none, "edges/documents/zigzag", "cu_seqlens \\(0, 0"),
        (bound_beyond_the_keys, "edges/bounds/contiguous", "bound_max"),
        (no_small_softcap, "edges/softcap/contiguous", "softcap 0.0009765625"),
    ],
)
def test_a_kernel_that_is_wrong_at_a_boundary_fails_and_the_value_is_named(ask, id, says):
    [record] = run(Wrong(ask=ask), [BY_ID[id]]).records
    assert record.outcome == "mismatch"
    assert re.search(says, record.message), record.message


@pytest.mark.parametrize("recipe", ["float64", "bf16", "fp16"])
def test_the_reference_passes_a_sixth_of_the_edges(recipe):
    summary = run(REFERENCES[recipe], CASES[::6])
    assert summary.claimed == len(CASES[::6])
    assert [(r.id, r.message) for r in summary.failures] == []


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["float64", "float32", "bf16", "fp16_partials", "nki_low"])
def test_the_reference_passes_all_edges(recipe):
    summary = run(REFERENCES[recipe], CASES)
    assert summary.claimed == len(CASES)
    assert [(r.id, r.message) for r in summary.failures] == []


def test_a_target_gets_only_the_values_whose_features_it_claims(truth_on_demand):
    claims = Capabilities(
        layouts=("zigzag",), workers=(2, 4), masks=("causal", "window"), features=("q-offset",),
        formats=("bfloat16",), head_ratios=(4,), head_dims=(64,), tokens_multiple=8,
    )  # fmt: skip
    claimed = {case.id for case in CASES if case.why_not(claims) is None}
    assert claimed == {
        f"edges/{one}/zigzag"
        for one in ("window-left", "window-right", "window-causal", "q-offset")
    }
    for id in claimed:
        each = edges.LENGTHS[""]
        made = edges.problems(id, id.split("/")[1], "zigzag", each, claims)
        kept = [case for case in made if why_not(claims, needs_of([case])) is None]
        assert len(BY_ID[id].make(claims)) == len(kept) >= 5
        assert why_not(claims, BY_ID[id].needs_of(claims)) is None


def test_inputs_of_edges_do_not_change(truth_on_demand):
    digest = hashlib.sha256()
    for case in CASES[::13]:
        for call in case.make(EVERYTHING):
            digest.update(f"{case.id} {fingerprint(call)}\n".encode())
    assert digest.hexdigest()[:16] == "6b4f2171de109c92"
