"""A strict JSON parser: it refuses duplicate keys, NaN, infinity, floats beyond float64, integers beyond 64 bits."""

from __future__ import annotations

import json
import math
from typing import Any


def loads(text: str | bytes) -> Any:
    """Parse JSON text (UTF-8); raise ValueError for anything that is not strict JSON.

    The caller must limit the length of the text.

    >>> loads(b'{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    >>> loads('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: duplicate key 'a'
    """
    try:
        return json.loads(
            text if isinstance(text, str) else text.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_within_64_bits,
        )
    except RecursionError:
        raise ValueError("too many nested levels") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"duplicate key {key[:40]!r}")
        result[key] = value
    return result


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is beyond float64")
    return value


def _within_64_bits(text: str) -> int:
    value = int(text)  # Python itself refuses more than 4300 digits
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"the integer {text[:40]} is beyond 64 bits")
    return value
