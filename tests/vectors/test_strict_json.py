"""JSON from outside: one reading of it or none, in bounded memory."""

import json

import pytest
from refusals import refuses
from vectors import samples

from ringspec.errors import VectorError
from ringspec.vectors.format.case_json import case_from_json, case_to_json
from ringspec.vectors.format.json_text import MAX_DEPTH, MAX_ITEMS, parse

GOOD = case_to_json(samples.attention())
TEXTS = {
    "empty": "",
    "not-json": "case",
    "a-list": "[]",
    "a-number": "1",
    "null": "null",
    "cut": GOOD[:-3],
    "more-behind": GOOD + "{}",
    "key-twice": GOOD.replace('"id":', '"id": "a/b", "id":', 1),
    "key-twice-inside": GOOD.replace('"B":', '"B": 1, "B":', 1),
    "nan": GOOD.replace('"scale": 0.5', '"scale": NaN'),
    "infinity": GOOD.replace('"scale": 0.5', '"scale": Infinity'),
    "minus-infinity": GOOD.replace('"scale": 0.5', '"scale": -Infinity'),
    "beyond-float64": GOOD.replace('"scale": 0.5', '"scale": 1e999'),
    "integer-of-5000-digits": GOOD.replace('"scale": 0.5', '"scale": ' + "9" * 5000),
    "integer-of-65-bits": GOOD.replace('"scale": 0.5', f'"scale": {2**64}'),
    "deep": "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
    "very-deep": "[" * 500_000 + "]" * 500_000,
    "too-long": GOOD + " " * 2**20,
    "not-utf8": b"\xff" + GOOD.encode(),
    "utf16": GOOD.encode("utf-16"),
    "byte-order-mark": "\ufeff" + GOOD,
    "lone-surrogate": GOOD.replace("a small case", "a \\ud800 case"),
    "control-character": GOOD.replace("a small case", "a \\u0007 case"),
    "no-text": 7,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_text_that_is_no_strict_json_is_refused(text):
    assert text != GOOD
    with refuses((VectorError, "case-format")):
        case_from_json(text)


@pytest.mark.parametrize("nest", [lambda x: [x], lambda x: {"a": x}])
def test_json_is_read_to_a_bounded_depth(nest):
    data = 1
    for _ in range(MAX_DEPTH):
        data = nest(data)
    assert parse(json.dumps(data), "text", 1000, code="manifest") == data
    with pytest.raises(VectorError, match="levels"):
        parse(json.dumps(nest(data)), "text", 1000, code="manifest")


def test_json_has_a_bounded_number_of_items():
    parse("[" + "1," * (MAX_ITEMS - 2) + "1]", "text", 2**21, code="manifest")
    with pytest.raises(VectorError, match="items"):
        parse("[" + "1," * MAX_ITEMS + "1]", "text", 2**21, code="manifest")


@pytest.mark.parametrize(
    "text", ['"\\u0000"', '"\\n"', '{"\\u00e4": 1}', '["\\ud800"]', '"\\u007f"']
)
def test_text_in_json_is_printable_ascii(text):
    with pytest.raises(VectorError, match="ASCII"):
        parse(text, "text", 100, code="manifest")
