"""The names, shapes and formats of the results of a call, and a digest of its inputs."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.target.protocol import EVERY_TABLE, Call, PerWorker
from ringspec.formats import format_of
from ringspec.spec.layout import interleaved_length

INTEGER = "integer"  # stands for every integer dtype


@dataclass(frozen=True)
class Due:
    """The form that one result must have: its shape on each worker (``shapes``) and the name of its ``format``."""

    shapes: tuple[tuple[int, ...], ...]
    format: str


def due_of(call: Call) -> dict[str, Due]:
    """Return the form that each result of a call must have, in a fixed order.

    lse is included even if the target does not return it.
    """
    if call.operation == "layout":
        return {
            name: Due((integers_shape(call, name),) * call.workers, INTEGER) for name in call.passes
        }
    outputs, statistics = call.formats["outputs"], call.formats["statistics"]
    if call.operation == "merge":
        _, *rest = call.worker("parts_o", 0).shape
        return {"o": Due((tuple(rest),), outputs), "lse": Due((tuple(rest[:-1]),), statistics)}
    q, k, v = (call.tensors[name] for name in ("q", "k", "v"))
    due: dict[str, Due] = {}
    if "forward" in call.passes:
        rows = tuple(x.shape[:3] for x in q)
        o = tuple((*n, y.shape[3]) for n, y in zip(rows, v, strict=True))
        due |= {"o": Due(o, outputs), "lse": Due(rows, statistics)}
    if "backward" in call.passes:
        for name, like in (("dq", q), ("dk", k), ("dv", v)):
            due[name] = Due(tuple(x.shape for x in like), outputs)
        if "sinks" in call.tensors and call.operation in ("ring", "context_parallel"):
            due["dsinks"] = Due(tuple(x.shape for x in call.tensors["sinks"]), statistics)
        if "bias" in call.tensors:
            due["dbias"] = Due(tuple(x.shape for x in call.tensors["bias"]), outputs)
    return due


def integers_shape(call: Call, name: str) -> tuple[int, ...]:
    """Return the shape of a result of the operation 'layout' on each worker."""
    starts = call.terms["cu_seqlens"]
    documents = len(starts) - 1
    if name in ("table", "positions"):
        return (slots_of_layout(call),)
    return {
        "lengths": (documents,),
        "cu_seqlens": (documents + 1,),
        "visible": (documents, call.terms.get("queries", 1)),
    }[name]


def slots_of_layout(call: Call) -> int:
    """Return the number of slots of one worker: the share of the padded pack, or of worker 0 if interleaved."""
    if "cu_seqlens_padded" in call.terms:
        return int(call.terms["cu_seqlens_padded"][-1]) // call.workers
    starts, each = call.terms["cu_seqlens"], call.terms["interleave"]
    lengths = [stop - first for first, stop in itertools.pairwise(starts)]
    return sum(interleaved_length(n, 0, call.workers, each) for n in lengths)


def frozen(arrays: Iterable[NDArray]) -> PerWorker:
    """Return read-only copies of arrays, one for each worker."""
    return tuple(read_only(x) for x in arrays)


def read_only(x: NDArray) -> NDArray:
    """Return a read-only copy in C order."""
    copy = np.array(x, order="C")
    copy.flags.writeable = False
    return copy


def dtype_of(storage: str) -> np.dtype:
    """Return the NumPy dtype of a format."""
    return format_of(storage).dtype


def fingerprint(call: Call) -> str:
    """Return a SHA-256 digest of all arrays of a call. It shows whether a target changed them."""
    digest = hashlib.sha256()
    for name in sorted(call.tensors):
        for x in call.tensors[name]:
            digest.update(f"{name} {x.dtype} {x.shape}\n".encode())
            digest.update(np.ascontiguousarray(x).view(np.uint8).tobytes())
    for index in (getattr(call, name) for name in EVERY_TABLE):
        digest.update(b"" if index is None else np.ascontiguousarray(index).tobytes())
    return digest.hexdigest()
