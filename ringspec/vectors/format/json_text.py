"""A strict parser for untrusted JSON, and a writer that gives equal bytes for equal data.

The parser limits the length of the text, the depth of nesting and the size of numbers. It refuses duplicate keys, NaN,
infinity (also written as 1e999) and characters other than printable ASCII. The JSON schemas of the files are in
``schemas/`` (JSON Schema 2020-12). What a compiled schema refuses, the package jsonschema checks again and words; it is
loaded on first use.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringspec import strictjson
from ringspec.errors import VectorError, shown
from ringspec.vectors.format.schema import compiled

MAX_DEPTH = 12
MAX_ITEMS = 1 << 19
MAX_SCHEMA_ERROR = 200
WIDTH = 100
SCHEMAS = Path(__file__).parent / "schemas"
FIX = "get the file again from its source, or write it with ringspec"


def parse(text: str | bytes, what: str, limit: int, *, code: str) -> Any:
    """Parse a JSON text of at most ``limit`` bytes; raise VectorError with ``code`` for anything else.

    >>> parse('{"a": [1, 2.5]}', "example", 100, code="case-format")
    {'a': [1, 2.5]}
    >>> parse('{"a": NaN}', "example", 100, code="case-format")
    Traceback (most recent call last):
    ringspec.errors.VectorError: expected JSON in example; got NaN is not JSON. Fix: get the file again from its source, or write it with ringspec.
    """
    if not isinstance(text, (str, bytes)):
        raise VectorError(
            f"{what} as text or bytes", shown(type(text)), "pass the content of a file", code=code
        )
    if len(text) > limit:
        raise VectorError(f"{what} of at most {limit} bytes", f"{len(text)}", FIX, code=code)
    try:
        plain = text if isinstance(text, str) else text.decode("utf-8")
        # Checked before parsing: the objects of "[[],[],..." take 30 times its length.
        if sum(plain.count(mark) for mark in "[{,") > MAX_ITEMS:
            raise ValueError(f"more than {MAX_ITEMS} items")
        data = strictjson.loads(plain)
    except ValueError as cause:
        raise VectorError(f"JSON in {what}", str(cause)[:200], FIX, code=code) from None
    check_items(data, what, code=code)
    return data


def check_items(data: Any, what: str, *, code: str) -> None:
    """Raise VectorError for lists and objects nested deeper than MAX_DEPTH, and for characters that are not allowed."""
    level = [data]
    for _ in range(MAX_DEPTH + 1):
        for item in level:
            if isinstance(item, str) and not (item.isascii() and item.isprintable()):
                raise VectorError(f"text of printable ASCII in {what}", shown(item), FIX, code=code)
        level = [inner for item in level for inner in inside(item)]
    if level:
        raise VectorError(f"JSON of at most {MAX_DEPTH} levels in {what}", "more", FIX, code=code)


def inside(item: Any) -> list[Any]:
    if isinstance(item, dict):
        return [*item.keys(), *item.values()]
    return item if isinstance(item, list) else []


def check_schema(data: Any, schema: str, what: str, *, code: str) -> None:
    """Raise VectorError with ``code`` unless data satisfies ``schemas/<schema>.schema.json``."""
    if accepts(schema)(data):
        return
    # jsonschema names the place and the fault; for valid data it takes 17 times as long.
    fault = next(validator(schema).iter_errors(data), None)
    if fault is None:
        return
    place = "/".join(str(part)[:60] for part in fault.absolute_path) or "the whole file"
    raise VectorError(
        f"{what} that satisfies schemas/{schema}.schema.json",
        f"at {place[:200]}: {fault.message[:MAX_SCHEMA_ERROR]}",
        "compare it with a case.json, flags.json or manifest.json of the core set",
        code=code,
    )


@functools.cache
def accepts(schema: str) -> Callable[[Any], bool]:
    """Return the function that says whether data satisfy ``schemas/<schema>.schema.json``."""
    return compiled(text_of(schema))


def text_of(schema: str) -> Any:
    return json.loads((SCHEMAS / f"{schema}.schema.json").read_text(encoding="utf-8"))


@functools.cache
def validator(schema: str) -> Any:
    """Make a validator for a schema that does not accept 1.0 as an integer, as JSON Schema itself does."""
    # Imported here: loading jsonschema takes as long as loading ringspec, and only reading a set needs it.
    import jsonschema

    checker = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine(
        "integer", lambda _, x: type(x) is int
    )
    strict = jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=checker)
    return strict(text_of(schema))


def canonical(data: Any) -> bytes:
    """Encode data as the bytes from which digests are computed: sorted keys, no spaces, ASCII.

    >>> canonical({"b": 1.0, "a": [True, None]})
    b'{"a":[true,null],"b":1.0}'
    """
    return json.dumps(
        data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode()


def pretty(data: dict[str, Any]) -> str:
    """Encode data as the text of a file: keys in the given order, one space per level, short lists on one line.

    >>> print(pretty({"shape": {"B": 1, "H": 2}, "rows": [0, 1]}), end="")
    {
     "shape": {"B": 1, "H": 2},
     "rows": [0, 1]
    }
    """
    return block(data, 0) + "\n"


def flat(data: Any) -> str:
    return json.dumps(data, ensure_ascii=True, allow_nan=False)


def block(data: Any, level: int) -> str:
    """Format a list or an object over several lines."""
    margin = "\n" + " " * (level + 1)
    if isinstance(data, dict):
        parts = [
            f"{flat(name)}: {item(value, level + 1, len(name))}" for name, value in data.items()
        ]
        return "{" + margin + f",{margin}".join(parts) + "\n" + " " * level + "}"
    if any(isinstance(value, (dict, list)) for value in data):
        parts = [item(value, level + 1, 0) for value in data]
        return "[" + margin + f",{margin}".join(parts) + "\n" + " " * level + "]"
    return "[" + margin + margin.join(filled([flat(value) for value in data], level)) + "]"


def item(value: Any, level: int, before: int) -> str:
    line = flat(value)
    one_line = level + before + len(line) + 6 <= WIDTH  # quotes, colon, space and comma
    container = isinstance(value, (dict, list)) and value
    return line if one_line or not container else block(value, level)


def filled(words: list[str], level: int) -> list[str]:
    """Join numbers with commas, in lines of at most WIDTH characters."""
    lines = [""]
    for index, word in enumerate(words):
        text = word + ("," if index + 1 < len(words) else "")
        if lines[-1] and level + len(lines[-1]) + len(text) + 4 > WIDTH:  # and "],"
            lines.append(text)
        else:
            lines[-1] += (" " if lines[-1] else "") + text
    return lines
