"""Compiled schemas say the same as the package jsonschema."""

import json

import pytest
from vectors import samples

from ringspec.vectors import open_set
from ringspec.vectors.format.case_json import case_to_json
from ringspec.vectors.format.json_text import accepts, text_of, validator
from ringspec.vectors.format.schema import compiled
from ringspec.vectors.sets.stored import DATA

NAMES = ("case", "flags", "manifest")
USUAL = (None, True, False, 0, 1, 1.0, 0.5, -1, 2**60, "", "a", "inf", "A-1", "a\n", [], {}, [None])
USUAL += ([1, 2], [1, 2, 3], ["ring", 2], ["forward"], [True], {"a": 1}, {"since": "1.0"}, "1.0")
RECIPES = (
    {"kind": "uniform", "bits": 6, "exponent": -4},
    {"kind": "uniform", "bits": 6, "exponent": -4, "value": 1},
    {"kind": "constant", "value": "nan"},
    {"kind": "constant", "value": 1, "threshold": 3},
    {"kind": "values", "values": []},
    {"kind": "bernoulli", "threshold": 0},
    {"kind": "bernoulli", "threshold": 0, "head": 0},
    {"at": [0, None, [1, 2]], "set": True},
    {"at": [], "set": 1, "multiply": 2},
    {"at": []},
)


def parts_of(schema):
    """The schema itself and all schemas in it."""
    found = [schema]
    for part in found:
        for word in ("properties", "$defs"):
            found += part.get(word, {}).values()
        for word in ("anyOf", "allOf", "oneOf", "prefixItems"):
            found += part.get(word, ())
        for word in ("items", "additionalProperties", "propertyNames", "if", "then", "else"):
            found += [part[word]] if word in part else []
        found[:] = [one for one in found if isinstance(one, dict)]
    return found


def at_the_limits(schema):
    """Data on both sides of every limit in one schema."""
    for word, limit in schema.items():
        if word in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            yield from (limit - 1, limit, limit + 1, float(limit))
        elif word == "maxLength":
            yield from ("a" * limit, "a" * (limit + 1))
        elif word in ("minItems", "maxItems"):
            yield from ([0] * (limit - 1), [0] * limit, [0] * (limit + 1))
        elif word == "maxProperties":
            yield from ({f"a{n}": 0 for n in range(limit + more)} for more in (0, 1))
        elif word in ("enum", "const"):
            yield from limit if word == "enum" else [limit]


def edited(data):
    """Copies of ``data`` with one value replaced, one key removed, or one key added."""
    inner = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in list(inner):
        for other in (None, True, 0, 1.5, "", "x", [], {}):
            yield replaced(data, key, other)
        if isinstance(value, (dict, list)):
            yield from (replaced(data, key, other) for other in edited(value))
    if isinstance(data, dict):
        yield data | {"zz": 1}
        yield from ({name: data[name] for name in data if name != key} for key in data)


def replaced(data, key, value):
    copy = data.copy()
    copy[key] = value
    return copy


@pytest.mark.parametrize("name", NAMES)
def test_each_part_of_a_schema_accepts_what_jsonschema_accepts(name):
    schema = text_of(name)
    definitions = schema.get("$defs", {})
    verdicts = set()
    for part in parts_of(schema):
        ours = compiled(part, definitions)
        theirs = validator(name).evolve(schema={"$defs": definitions, **part})
        for data in (*USUAL, *RECIPES, *at_the_limits(part)):
            assert ours(data) == theirs.is_valid(data), (part, data)
            verdicts.add(ours(data))
    assert verdicts == {True, False}


# Together they have all kinds of recipes, a ring with tables, and packed documents.
@pytest.mark.parametrize("id", ["attention/everything", "ring/table-w3", "ring/packed-w2"])
def test_edited_cases_get_the_same_verdict(id):
    case = next(case for case in samples.cases() if case.id == id)
    check("case", json.loads(case_to_json(case)), every=4)


def test_edited_cases_of_merges_and_schemes_get_the_same_verdict():
    for name in ("merge", "cp"):
        path = DATA / name / open_set(name).ids[0] / "case.json"
        check("case", json.loads(path.read_text()), every=5)


def test_edited_manifests_and_flags_get_the_same_verdict():
    for name in ("manifest", "flags"):
        data = json.loads((DATA / "merge" / f"{name}.json").read_text())
        if name == "manifest":
            data["cases"] = dict(list(data["cases"].items())[:2])
        check(name, data, every=13)


def check(name, data, every):
    """Compare the verdicts about each ``every``-th edit."""
    assert accepts(name)(data) and validator(name).is_valid(data)
    edits = list(edited(data))[::every]
    assert len(edits) > 10
    for one in edits:
        assert accepts(name)(one) == validator(name).is_valid(one), one


def test_items_are_those_after_the_prefix_and_keys_have_their_schema():
    for part in (
        {"prefixItems": [{"type": "string"}], "items": {"type": "integer"}},
        {"propertyNames": {"maxLength": 1}, "additionalProperties": {"type": "integer"}},
    ):
        theirs = validator("case").evolve(schema=part)
        for data in (*USUAL, ["ring", "ring"], {"since": 1}):
            assert compiled(part)(data) == theirs.is_valid(data), (part, data)


def test_an_unknown_keyword_is_refused():
    with pytest.raises(ValueError, match="multipleOf"):
        compiled({"type": "integer", "multipleOf": 2})
