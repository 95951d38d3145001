"""Write the inputs of a call as Python source: arrays as literals, everything else by its repr."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.target.protocol import EVERY_TABLE, TABLES, Call
from ringspec.errors import OptionError, shown
from ringspec.formats import load, name_of

WIDTH = 110
DIGITS = {"float64": 17}  # of all other formats, 9 digits give back the exact number


def array_text(x: NDArray) -> str:
    """Write an array.

    >>> array_text(np.array([[0.5, -np.inf]], np.float32)), array_text(np.array([0, -1]))
    ("np.array([[0.5, -inf]], 'float32')", "np.array([0, -1], 'int64')")
    """
    if x.dtype.kind in "iub":
        return f"np.array({x.tolist()}, {str(x.dtype)!r})"
    name = name_of(x.dtype)
    assert name is not None
    return f"np.array({nested(load(x).tolist(), DIGITS.get(name, 9))}, {name!r})"


def nested(x: Any, digits: int) -> str:
    if isinstance(x, list):
        return f"[{', '.join(nested(one, digits) for one in x)}]"
    return f"{x:.{digits}g}" if x != int(x if abs(x) < 1e9 else 0) else str(int(x))


def input_lines(call: Call, tables: Sequence[str] = TABLES) -> Iterator[str]:
    """Yield an assignment for each tensor of a call, and for ``tables`` of its tokens and positions."""
    for name, shards in call.tensors.items():
        yield from assigned(name, [array_text(x) for x in shards])
    for name in tables:
        table = getattr(call, name)
        if table is not None:
            yield from assigned(name, [array_text(x) for x in table])


def assigned(name: str, entries: list[str]) -> Iterator[str]:
    """Yield 'name = [entries]', broken into lines between numbers."""
    yield from wrapped(f"{name} = [{', '.join(entries)}]")


def wrapped(line: str, indent: str = "    ") -> list[str]:
    """Break a line of source between words; only inside brackets, and never inside a text."""
    return textwrap.wrap(
        line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def source(value: Any, call: Call) -> str:
    """Write one argument of the function under test; a tensor of the call by its name."""
    if isinstance(value, Call):
        return call_text(value)
    if isinstance(value, np.ndarray):
        owner = [name for name, xs in call.tensors.items() if any(x is value for x in xs)]
        if owner:
            return f"{owner[0]}[0]"
        table = [name for name in EVERY_TABLE if getattr(call, name) is value]
        return f"np.array({table[0]})" if table else array_text(value)
    if isinstance(value, list | tuple) and any(isinstance(x, np.ndarray) for x in value):
        for name, xs in call.tensors.items():
            if len(xs) == len(value) and all(x is y for x, y in zip(xs, value, strict=True)):
                return name if isinstance(value, list) else f"tuple({name})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name!r}: {source(x, call)}' for name, x in value.items())}}}"
    if isinstance(value, list | tuple):
        entries = [source(x, call) for x in value]
        inner = ", ".join(entries)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(entries) == 1)})"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    raise OptionError("an argument that can be written as source", shown(value), "pass plain data")


def call_text(call: Call) -> str:
    """Write a Call as a SimpleNamespace with the same fields."""
    fields = {f.name: getattr(call, f.name) for f in dataclasses.fields(call)}
    inner = ", ".join(f"{name}={source(value, call)}" for name, value in fields.items())
    return f"SimpleNamespace({inner})"
