"""case.json: what is written comes back, the text is one, and everything else is refused."""

import copy
import json

import pytest
from refusals import is_refusal
from vectors import samples

from ringspec.errors import RingspecError, VectorError
from ringspec.spec.rules import RULES
from ringspec.vectors.format import case as case_module
from ringspec.vectors.format import flag, inputs
from ringspec.vectors.format.case import Inputs, Patch, Ring, TensorRecipe
from ringspec.vectors.format.case_json import (
    case_from_json,
    case_to_data,
    case_to_json,
    recipe_to_data,
)
from ringspec.vectors.format.check_case import is_id
from ringspec.vectors.format.json_text import pretty, validator

CASES = {case.id: case for case in samples.cases()}
REMOVED = object()
OPTIONAL = (
    "recipes",
    "scheme",
)  # written only if there is one, so that older cases keep their bytes


def refused(text, what="case.json") -> VectorError:
    with pytest.raises(RingspecError) as caught:
        case_from_json(text, what)
    error = caught.value
    assert is_refusal(error, (VectorError, "case-format"))
    assert all(part.strip() for part in (error.expected, error.got, error.fix))
    assert len(str(error)) < 2000
    return error


def changed(id, changes):
    """The text of a sample with values put at paths such as 'ring/workers'."""
    data = copy.deepcopy(case_to_data(CASES[id]))
    for path, value in changes.items():
        *parents, last = [int(part) if part.isdigit() else part for part in path.split("|")]
        holder = data
        for part in parents:
            holder = holder[part]
        if value is REMOVED:
            del holder[last]
        else:
            holder[last] = value
    return json.dumps(data)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_case_comes_back_from_its_text(case):
    text = case_to_json(case)
    assert case_from_json(text) == case
    assert case_from_json(text.encode()) == case
    assert case_to_json(case_from_json(text)) == text


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_text_is_ascii_in_the_order_of_the_fields_with_short_lines(case):
    text = case_to_json(case)
    assert text.isascii() and text.endswith("}\n")
    fields = list(case_module.Case.__dataclass_fields__)
    assert list(json.loads(text)) == [x for x in fields if x not in OPTIONAL or getattr(case, x)]
    assert max(len(line) for line in text.splitlines()) <= 110


def test_minus_infinity_is_text_in_the_file_and_a_number_in_memory():
    case = CASES["attention/everything"]
    assert case.inputs.tensors["bias"].patches[0].set == float("-inf")
    assert '"set": "-inf"' in case_to_json(case)


def test_the_kinds_of_numbers_survive():
    recipe = TensorRecipe("values", values=[[1, 1.0, -0.0], [True, "-inf", 2.0**-1074]])
    values = {"sinks": TensorRecipe("values", values=[[1], [2.0]]), "bias": recipe}
    data = case_to_data(samples.ring(inputs=Inputs("x", values)))["inputs"]["tensors"]["bias"]
    expected = {"kind": "values", "values": [[1, 1.0, -0.0], [True, "-inf", 5e-324]]}
    assert repr(data) == repr(expected)
    assert json.loads(pretty(data)) == data


def test_a_value_of_false_or_zero_is_written():
    zero, false = (TensorRecipe("constant", shape=(1,), value=value) for value in (0, False))
    data = case_to_data(samples.ring(inputs=Inputs("x", {"keep": false, "bias": zero})))
    assert data["inputs"]["tensors"]["keep"]["value"] is False
    assert data["inputs"]["tensors"]["bias"]["value"] == 0
    assert recipe_to_data(TensorRecipe("constant", value=1, patches=(Patch((0,), set=False),))) == {
        "kind": "constant",
        "value": 1,
        "patches": [{"at": [0], "set": False}],
    }


def test_long_lists_fill_their_lines():
    data = {"name": list(range(100)), "empty": [], "nested": [[1] * 60, [2]]}
    text = pretty(data)
    assert json.loads(text) == data
    assert max(len(line) for line in text.splitlines()) <= 100
    assert len(text.splitlines()) < 20


@pytest.mark.parametrize("id", ["a/b", "ring/zigzag-w4", "a/b/c", "0/1", "a" * 60 + "/b"])
def test_a_good_id_is_one(id):
    assert is_id(id)


@pytest.mark.parametrize(
    "id",
    [
        "", "a", "a/b/c/d", "/a/b", "a/b/", "a//b", "../a", "a/..", "a/../b", "./a", "a/.b", "a/b.json",
        "A/b", "a/B", "a b/c", "a-/b", "-a/b", "a--b/c", "a/b\n", "a\\b/c", "c:/b", "a/b\0", "\u00e4/b",
        "con/b", "a/nul", "a/lpt1", "a" * 61 + "/b", "/".join(["a" * 60] * 2 + ["b"]), None, 7,
    ],
)  # fmt: skip
def test_a_bad_id_is_none(id):
    assert not is_id(id)


MARKED = {"terms": {"empty_lse": "+inf"}}
INF = {"at": [0, None, None, None], "set": "inf"}
NAN = {"at": [0, None, None, None], "set": "nan"}
EVERYTHING, TABLE, PACKED = "attention/everything", "ring/table-w3", "ring/packed-w2"
TWO_TABLES = "ring/two-tables"
RECIPES = "inputs|tensors|"
BAD = {
    "unknown-key": (EVERYTHING, {"note": 1}),
    "missing-key": (EVERYTHING, {"withdrawn": REMOVED}),
    "bad-id": (EVERYTHING, {"id": "../../etc/passwd"}),
    "reserved-id": (EVERYTHING, {"id": "attention/con"}),
    "id-with-newline": (EVERYTHING, {"id": "attention/everything\n"}),
    "empty-reason": (EVERYTHING, {"reason": ""}),
    "reason-of-two-lines": (EVERYTHING, {"reason": "one\ntwo"}),
    "reason-ends-in-newline": (EVERYTHING, {"reason": "one\n"}),
    "reason-not-ascii": (EVERYTHING, {"reason": "\u2028"}),
    "unknown-operation": (EVERYTHING, {"operation": "convolution"}),
    "no-passes": (EVERYTHING, {"passes": []}),
    "passes-reversed": (EVERYTHING, {"passes": ["backward", "forward"]}),
    "no-rules": (EVERYTHING, {"rules": []}),
    "odd-rule": (EVERYTHING, {"rules": ["fwd 1"]}),
    "rule-twice": (EVERYTHING, {"rules": ["FWD-1", "FWD-1"]}),
    "flag-twice": (EVERYTHING, {"flags": ["a", "a"]}),
    "odd-flag": (EVERYTHING, {"flags": ["Stale_keys"]}),
    "no-shape": (EVERYTHING, {"shape": None}),
    "shape-without-D": (EVERYTHING, {"shape|D": REMOVED}),
    "negative-length": (EVERYTHING, {"shape|B": -1}),
    "no-head": (EVERYTHING, {"shape|H": 0}),
    "fractional-length": (EVERYTHING, {"shape|Sq": 4.0}),
    "boolean-length": (EVERYTHING, {"shape|B": True}),
    "text-length": (EVERYTHING, {"shape|B": "1"}),
    "huge-length": (EVERYTHING, {"shape|D": 2**40}),
    "too-many-pairs": ("attention/old/withdrawn", {"shape|Sq": 2**16, "shape|Sk": 2**15}),
    "tensor-too-large": ("block/backward", {"shape|Sq": 2**20, "shape|D": 2**10}),
    "uneven-groups": (EVERYTHING, {"shape|Hkv": 3}),
    "no-formats": (EVERYTHING, {"formats": None}),
    "unknown-format": (EVERYTHING, {"formats|inputs": "float8_e4m3fn"}),
    "narrow-statistics": (EVERYTHING, {"formats|statistics": "bfloat16"}),
    "no-scale": (EVERYTHING, {"terms|scale": REMOVED}),
    "scale-of-text": (EVERYTHING, {"terms|scale": "0.5"}),
    "scale-of-true": (EVERYTHING, {"terms|scale": True}),
    "unknown-term": (EVERYTHING, {"terms|alibi": 1.0}),
    "causal-false": (EVERYTHING, {"terms|causal": False}),
    "window-of-three": (EVERYTHING, {"terms|window": [1, 2, 3]}),
    "negative-window": (EVERYTHING, {"terms|window": [-1, 0]}),
    "huge-window": (EVERYTHING, {"terms|window": [2**62, 0]}),
    "unbounded-window": (EVERYTHING, {"terms|window": [None, None]}),
    "softcap-zero": (EVERYTHING, {"terms|softcap": 0}),
    "dropout-of-one": (EVERYTHING, {"terms|dropout_p": 1.0}),
    "seed-without-dropout": (EVERYTHING, {"terms|dropout_seed": 3}),
    "seed-zero": (PACKED, {"terms|dropout_seed": 0}),
    "seed-of-65-bits": (PACKED, {"terms|dropout_seed": 2**64}),
    "offset-zero": (EVERYTHING, {"terms|q_offset": 0}),
    "huge-offset": (EVERYTHING, {"terms|q_offset": 2**62}),
    "starts-empty": (PACKED, {"terms|cu_seqlens": []}),
    "starts-from-1": (PACKED, {"terms|cu_seqlens": [1, 3]}),
    "starts-falling": (PACKED, {"terms|cu_seqlens": [0, 5, 3]}),
    "starts-beyond-Sq": (PACKED, {"terms|cu_seqlens": [0, 9]}),
    "starts-of-keys-alone": (EVERYTHING, {"terms|cu_seqlens_k": [0, 6]}),
    "documents-without-starts": (PACKED, {"terms|cu_seqlens": REMOVED}),
    "ring-in-attention": (EVERYTHING, {"ring": case_to_data(CASES[PACKED])["ring"]}),
    "no-ring": (PACKED, {"ring": None}),
    "no-workers": (PACKED, {"ring|workers": 0}),
    "uneven-workers": (PACKED, {"ring|workers": 3, "ring|layout": "zigzag"}),
    "unknown-layout": (PACKED, {"ring|layout": "spiral"}),
    "unknown-circulation": (PACKED, {"ring|circulation": "v"}),
    "direction-2": (PACKED, {"ring|direction": 2}),
    "table-without-layout": (TABLE, {"ring|layout": "contiguous"}),
    "layout-without-table": (TABLE, {"ring|table_q": REMOVED}),
    "table-of-keys-alone": (PACKED, {"ring|table_k": [[0]]}),
    "table-of-two-workers": (TABLE, {"ring|table_q": [[0, 1, 2, 3], [4, 5, 6, 7]]}),
    "ragged-table": (TABLE, {"ring|table_q|0": [0]}),
    "token-twice": (TABLE, {"ring|table_q|0|1": 7}),
    "token-beyond": (TABLE, {"ring|table_q|0|1": 8}),
    "token-twice-of-two-tables": (TWO_TABLES, {"ring|table_q|0|0": 3}),
    "key-twice-of-two-tables": (TWO_TABLES, {"ring|table_k|0|0": 0}),
    "token-minus-2": (TABLE, {"ring|table_q|0|2": -2}),
    "empty-seed": (EVERYTHING, {"inputs|seed": ""}),
    "unknown-input": (EVERYTHING, {RECIPES + "w": {"kind": "constant", "value": 1}}),
    "missing-input": (EVERYTHING, {RECIPES + "dy": REMOVED}),
    "input-of-another-operation": (EVERYTHING, {RECIPES + "lse": {"kind": "constant", "value": 1}}),
    "unknown-kind": (EVERYTHING, {RECIPES + "q|kind": "normal"}),
    "field-of-another-kind": (EVERYTHING, {RECIPES + "q|threshold": 3}),
    "uniform-without-bits": (EVERYTHING, {RECIPES + "q|bits": REMOVED}),
    "bits-54": (EVERYTHING, {RECIPES + "q|bits": 54}),
    "shape-of-q": (EVERYTHING, {RECIPES + "q|shape": [1, 2, 4, 9]}),
    "shape-of-mask": (EVERYTHING, {RECIPES + "mask|shape": [1, 1, 4, 5]}),
    "shape-of-three-axes": (EVERYTHING, {RECIPES + "mask|shape": [1, 4, 6]}),
    "mask-without-shape": (EVERYTHING, {RECIPES + "mask|shape": REMOVED}),
    "ragged-values": (EVERYTHING, {RECIPES + "sinks|values": [[1.0], []]}),
    "values-of-another-shape": (EVERYTHING, {RECIPES + "segments_q|values": [0, 0]}),
    "patch-of-nothing": (EVERYTHING, {RECIPES + "q|patches": [{"at": [0, 0, 0, 0]}]}),
    "patch-of-both": (EVERYTHING, {RECIPES + "bias|patches|0|multiply": 2.0}),
    "patch-of-infinity": (EVERYTHING, {RECIPES + "bias|patches|0|set": "inf"}),
    "patch-of-nan": (EVERYTHING, {RECIPES + "bias|patches|0|set": "nan"}),
    "infinity-of-no-empty-part": ("merge/three", {RECIPES + "parts_lse|patches": [INF]}),
    "nan-of-an-lse": ("merge/three", MARKED | {RECIPES + "parts_lse|patches": [NAN]}),
    "terms-of-a-merge": (EVERYTHING, {"terms|empty_lse": "+inf"}),
    "other-mark-of-empty-parts": ("merge/three", {"terms|empty_lse": "-inf"}),
    "recipes-of-a-ring": ("ring/table-w3", {"recipes": ["te_p2p"]}),
    "recipe-twice": ("merge/three", {"recipes": ["te_p2p", "te_p2p"]}),
    "no-recipe": ("merge/three", {"recipes": []}),
    "unknown-storage": (EVERYTHING, {"storage": "lazy"}),
    "deep-requires": (EVERYTHING, {"requires|x": {"a": 1}}),
    "odd-requirement": (EVERYTHING, {"requires|a b": 1}),
    "short-digest": (EVERYTHING, {"digests": {"in.q": "00"}}),
    "upper-case-digest": (EVERYTHING, {"digests": {"in.q": "A" * 64}}),
    "odd-digest-name": (EVERYTHING, {"digests": {"../q": "0" * 64}}),
    "withdrawn-without-reason": (EVERYTHING, {"withdrawn": {"since": "1.1"}}),
    "withdrawn-since-then": (EVERYTHING, {"withdrawn": {"since": "then", "reason": "x"}}),
    "merge-with-terms": ("merge/three", {"terms|causal": True}),
    "merge-with-scale": ("merge/three", {"terms|scale": 1.0}),
    "merge-backward": ("merge/three", {"passes": ["backward"]}),
    "schedule-with-shape": (
        "schedule/q-ring",
        {"shape": {"B": 1, "H": 1, "Hkv": 1, "Sq": 1, "Sk": 1, "D": 1, "Dv": 1}},
    ),
    "schedule-with-terms": ("schedule/q-ring", {"terms|causal": True}),
    "schedule-with-input": (
        "schedule/q-ring",
        {RECIPES + "q": {"kind": "constant", "value": 1}},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("id", "changes"), BAD.values(), ids=BAD)
def test_a_changed_case_is_refused(id, changes):
    case_from_json(changed(id, {}))
    refused(changed(id, changes))


def test_the_message_names_the_file_and_the_place():
    error = refused(changed(EVERYTHING, {"shape|B": "1"}), "core/attention/everything/case.json")
    assert "core/attention/everything/case.json" in str(error)
    assert "shape" in error.got


def test_the_schema_and_the_code_know_the_same_names():
    schema = validator("case").schema
    known, recipe = schema["properties"], schema["$defs"]["recipe"]
    assert tuple(known["operation"]["enum"]) == case_module.OPERATIONS
    assert tuple(map(tuple, known["passes"]["enum"])) == case_module.PASSES
    assert tuple(known["storage"]["enum"]) == case_module.STORAGES
    assert tuple(schema["$defs"]["ring"]["properties"]["layout"]["enum"]) == case_module.LAYOUTS
    circulations = schema["$defs"]["ring"]["properties"]["circulation"]["enum"]
    assert tuple(circulations) == case_module.CIRCULATIONS
    assert tuple(recipe["properties"]["kind"]["enum"]) == case_module.KINDS
    names = known["inputs"]["properties"]["tensors"]["propertyNames"]["enum"]
    assert set(names) == set(inputs.NAMES)
    assert set(recipe["properties"]) == set(TensorRecipe.__dataclass_fields__)
    assert set(schema["$defs"]["ring"]["properties"]) == set(Ring.__dataclass_fields__)
    assert list(known) == list(case_module.Case.__dataclass_fields__)
    assert [name for name in known if name not in OPTIONAL] == schema["required"]
    statuses = validator("flags").schema["additionalProperties"]["properties"]["statuses"]
    assert tuple(statuses["items"]["enum"]) == flag.STATUSES


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_every_rule_of_the_specification_may_be_named(rule):
    case_from_json(changed(EVERYTHING, {"rules": [rule.id]}))


@pytest.mark.parametrize("name", ["case", "flags", "manifest"])
def test_a_schema_is_a_valid_one_that_refuses_unknown_keys_everywhere(name):
    schema = validator(name).schema
    validator(name).check_schema(schema)
    holders = [schema]
    while holders:
        holder = holders.pop()
        if isinstance(holder, dict):
            if holder.get("type") == "object":
                assert "additionalProperties" in holder
                assert holder["additionalProperties"] is not True
            holders += holder.values()
        elif isinstance(holder, list):
            holders += holder
