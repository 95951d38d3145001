"""A call as one JSON line and one safetensors file; a result as one safetensors file.

Any language can read and write these, so a program under test needs nothing from ringspec. The file of a call contains
each tensor once, with the workers as leading axis: ``q`` is [W, B, H, n, D] if one worker's array is [B, H, n, D]. It
also contains the tables ``index_q``, ``index_k`` [W, n], which list the tokens of each worker, and ``position_q``,
``position_k`` [W, 1|B, n], which list their positions. docs/conform/protocol.md explains these files to the author of a
program.

Answers are untrusted: their size is limited before they are read, links are not followed, nothing is executed. An
invalid answer raises :class:`~ringspec.conformance.target.protocol.Garbage`. Missing tensors, shapes and dtypes are
checked later, by :mod:`ringspec.conformance.run.call`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec import strictjson
from ringspec.conformance.target.capabilities import Capabilities, capabilities_from
from ringspec.conformance.target.protocol import (
    EVERY_TABLE,
    INTEGERS,
    RESULTS,
    Call,
    Failed,
    Garbage,
    Refused,
    Result,
)
from ringspec.conformance.target.results import frozen, read_only
from ringspec.conformance.target.versions import Installed, said_installed
from ringspec.errors import FileFormatError, RingspecError, VectorError, shown
from ringspec.tensorfile import decode, encode
from ringspec.vectors.format.files import read_plain

PROTOCOL = 1
MAX_LINE = 1 << 20
SPARE_BYTES = 1 << 24
VERSIONS = ("versions", "files")
MAX_TEXT = 2000


def call_message(call: Call, inputs: str, result: str) -> dict[str, Any]:
    """Convert a call to plain data; ``inputs`` and ``result`` are paths of files."""
    split = {"scheme": call.scheme, "mesh": plain(call.mesh)} if call.scheme else {}
    return {
        "kind": "call",
        "id": call.id,
        "operation": call.operation,
        "passes": list(call.passes),
        "workers": call.workers,
        "layout": call.layout,
        "circulation": call.circulation,
        "direction": call.direction,
        "terms": {name: plain(value) for name, value in call.terms.items()},
        "formats": dict(call.formats),
        "inputs": inputs,
        "result": result,
    } | split


def call_from(message: Mapping[str, Any], tensors: Mapping[str, NDArray]) -> Call:
    """Rebuild the call from its message (:func:`call_message`) and tensors (:func:`inputs_file`), read-only."""
    each = {name: frozen(x) for name, x in tensors.items() if name not in EVERY_TABLE}
    names = {"id", "operation", "workers", "layout", "circulation", "direction", "formats"}
    rest: dict[str, Any] = {name: message[name] for name in names}
    rest |= {name: read_only(x) for name, x in tensors.items() if name in EVERY_TABLE}
    terms = {name: settled(value) for name, value in message["terms"].items()}
    rest |= {name: settled(message[name]) for name in ("scheme", "mesh") if name in message}
    return Call(passes=tuple(message["passes"]), tensors=each, terms=terms, **rest)


def settled(value: Any) -> Any:
    """Turn lists into tuples, also inside other lists.

    >>> settled([3, None])
    (3, None)
    """
    return tuple(map(settled, value)) if isinstance(value, list) else value


def plain(value: Any) -> Any:
    """Turn arrays, tuples and mappings into lists and dicts for JSON, also inside each other.

    >>> plain({"window": (np.int64(3), None)})
    {'window': [3, None]}
    """
    if isinstance(value, Mapping):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def line_of(message: Mapping[str, Any]) -> bytes:
    r"""Encode a message as one line of ASCII JSON.

    >>> line_of({"kind": "hello", "protocol": 1})
    b'{"kind":"hello","protocol":1}\n'
    """
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def inputs_file(call: Call) -> bytes:
    """Return the bytes of a call's safetensors file; equal calls give equal bytes."""
    tensors = {name: np.stack(arrays) for name, arrays in call.tensors.items()}
    for name in EVERY_TABLE:
        table = getattr(call, name)
        if table is not None:
            tensors[name] = table
    return encode(tensors)


def message_of(line: bytes, what: str) -> dict[str, Any]:
    """Decode one line of a program as a JSON object; raise Garbage for anything else.

    >>> message_of(b'{"kind": "result"}', "the answer")
    {'kind': 'result'}
    >>> message_of(b'step 1 done', "the answer")
    Traceback (most recent call last):
    ringspec.conformance.target.protocol.Garbage: the answer is not JSON: 'step 1 done'
    """
    try:
        message = strictjson.loads(line)
    except ValueError:
        raise Garbage(f"{what} is not JSON: {shown(line)[1:]}") from None
    if not isinstance(message, dict):
        raise Garbage(f"{what} is not a JSON object: {shown(message)}")
    return message


def check_answer(message: Mapping[str, Any], id: str) -> None:
    """Check the answer to a call; raise Refused, Failed or Garbage unless it announces a result."""
    kind, texts = message.get("kind"), {"refused": "reason", "error": "message"}
    if kind != "result" and not (isinstance(kind, str) and kind in texts):
        raise Garbage(f"the answer has the kind {shown(kind)}; expected result, refused or error")
    allowed = {"kind", "id", *([texts[kind]] if kind in texts else VERSIONS)}
    for key in message:
        if key not in allowed:
            raise Garbage(f"the answer of kind {kind!r} has the unknown key {shown(key)}")
    if message.get("id", id) != id:
        raise Garbage(f"the answer is for the call {shown(message['id'])}; expected {id!r}")
    if kind == "result":
        return
    text = message.get(texts[kind], "")
    if not isinstance(text, str):
        raise Garbage(f"the {texts[kind]} in an answer of kind {kind!r} is not text: {shown(text)}")
    if kind == "refused":
        raise Refused(text[:MAX_TEXT])
    raise Failed(f"the program says: {text[:MAX_TEXT]}")


def most_bytes(call: Call) -> int:
    """Return the largest allowed size of a result file: twice the size of all results in float64, and a reserve."""
    elements = sum(array.size for arrays in call.tensors.values() for array in arrays)
    if "q" in call.tensors and "v" in call.tensors:
        for q, v in zip(call.tensors["q"], call.tensors["v"], strict=True):
            elements += q.size // max(q.shape[-1], 1) * (v.shape[-1] + 1)
    return SPARE_BYTES + 2 * 8 * elements


def read_result(root: Path, name: str, call: Call) -> Result:
    """Read the result in the file ``root/name``; return an empty result if the file does not exist.

    Raises Garbage for a link, a pipe, a file that is too large, a file that is not a safetensors file, and unknown
    names of tensors.
    """
    tensors = stored(root, name, most_bytes(call))
    for key in tensors:
        if key not in (*RESULTS, *INTEGERS):
            expected = ", ".join(RESULTS if call.operation != "layout" else INTEGERS)
            raise Garbage(f"unknown tensor {shown(key)} in the result; expected {expected}")
    return Result(**{key: workers_of(array, call.workers) for key, array in tensors.items()})


def stored(root: Path, name: str, limit: int) -> dict[str, NDArray]:
    """Read the tensors in a target's file; {} if there is no file; raise Garbage if the file is invalid."""
    if not os.path.lexists(root / name):
        return {}
    try:
        return decode(read_plain(root, name, limit), name.rsplit("/", 1)[-1])
    except (FileFormatError, VectorError) as error:
        raise Garbage(f"the result file: expected {error.expected}; got {error.got}") from None


def workers_of(array: NDArray, workers: int) -> tuple[NDArray, ...]:
    """Split an array by worker; a leading axis that is too long is cut after one surplus entry.

    >>> len(workers_of(np.zeros((10**9, 0)), 4))
    5
    """
    if array.ndim == 0:
        return (array,)
    return tuple(array[worker] for worker in range(min(array.shape[0], workers + 1)))


def whole(value: Any) -> bool:
    return type(value) is int


def text(value: Any) -> bool:
    return isinstance(value, str)


def several(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


def optional(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


# Tests of a JSON value for each type annotation of Capabilities.
CHECKS: dict[str, Callable[[Any], bool]] = {
    "tuple[str, ...]": several(text),
    "tuple[str, ...] | None": optional(several(text)),
    "tuple[int, ...] | None": optional(several(whole)),
    "bool": lambda value: isinstance(value, bool),
    "int": whole,
    "int | str": lambda value: whole(value) or text(value),
    "str": text,
    "Declared": lambda value: True,  # Capabilities checks its recipe itself
}


@dataclasses.dataclass(frozen=True)
class Claims:
    """What a program says of itself: name, capabilities, notes for the report, and package versions."""

    name: str
    capabilities: Capabilities
    notes: tuple[str, ...] = ()
    installed: Installed = dataclasses.field(default_factory=Installed)


def claims_from(data: Mapping[str, Any], default_name: str) -> Claims:
    """Read claims from the answer to hello, the first request, or from a JSON file; raise Garbage if they are invalid.

    >>> claims_from({"name": "mine", "capabilities": {"workers": [2]}}, "").capabilities.workers
    (2,)
    """
    known = {"kind", "protocol", "name", "capabilities", "notes", *VERSIONS}
    for key in data:
        if key not in known:
            raise Garbage(f"unknown key {shown(key)} in the claims")
    name, notes = data.get("name", default_name), data.get("notes", [])
    capabilities = data.get("capabilities", {})
    if not (text(name) and several(text)(notes) and isinstance(capabilities, dict)):
        raise Garbage(f"invalid name, notes or capabilities in the claims: {shown(data)}")
    for field in dataclasses.fields(Capabilities):
        value = capabilities.get(field.name, field.default)
        value = list(value) if isinstance(value, tuple) else value
        if not CHECKS[str(field.type)](value):
            raise Garbage(f"the capability {field.name} is {field.type}; got {shown(value)}")
    try:
        claims = capabilities_from(capabilities)
    except RingspecError as error:
        raise Garbage(f"capabilities: {error}") from None
    sentences = tuple(note[:MAX_TEXT] for note in notes[:100])
    return Claims(name[:MAX_TEXT], claims, sentences, said_installed(data))
