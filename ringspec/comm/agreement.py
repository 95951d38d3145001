"""Compare the inputs and errors of all ranks, so that either all ranks continue or all raise an error.

Every rank sends a record of fixed size to rank 0, which compares the records and sends the outcome to every rank. So an
error message can name a rank that sent nothing.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

import ringspec
import ringspec.errors
from ringspec.comm.links import Links
from ringspec.comm.wire import Buffer, arrays_of
from ringspec.errors import CommunicationError, RingspecError
from ringspec.problem.model import Problem

ERROR_BYTES = 4096
MOST_PARTS = 64
DIGEST_BYTES = 32
RECORD_BYTES = ERROR_BYTES + MOST_PARTS * DIGEST_BYTES
MEETING_TAG = 16 * 1024 + 1
VERDICT_TAG = MEETING_TAG + 1


def meet(
    links: Links,
    where: str,
    error: RingspecError | None = None,
    parts: Mapping[str, bytes] | None = None,
) -> None:
    """Compare the errors and digests of all ranks; every rank must call this function.

    If a rank passes an ``error``, all ranks raise this error; if several ranks do, all raise that of the lowest rank.
    ``parts`` has, by name, the SHA-256 of data that must be equal on all ranks. If a digest differs from that of rank
    0, all ranks raise CommunicationError ('disagreement') with the names of the ranks and of the data. ``where`` says
    in messages when the ranks compare, such as 'at the start'.
    """
    mine = record(error, parts or {})
    if links.rank:
        links.wait(
            links.send(
                0, MEETING_TAG, mine, f"waits {where} until {links.name(0)} takes its digests"
            )
        )
        what = f"waits {where} for the verdict of {links.name(0)}"
        verdict = links.wait(links.receive(0, VERDICT_TAG, ERROR_BYTES, what))
    else:
        records = [mine]
        posted = [
            links.receive(
                r, MEETING_TAG, RECORD_BYTES, f"waits {where} for the digests of {links.name(r)}"
            )
            for r in range(1, links.size)
        ]
        records += [links.wait(one) for one in posted]
        verdict = error_bytes(found(records, list(parts or {})))
        sends = [
            links.send(
                r, VERDICT_TAG, verdict, f"waits {where} until {links.name(r)} takes the verdict"
            )
            for r in range(1, links.size)
        ]
        for one in sends:
            links.wait(one)
    agreed = error_from(verdict)
    if agreed is not None:
        raise error if error is not None and str(error) == str(agreed) else agreed


def record(error: RingspecError | None, parts: Mapping[str, bytes]) -> Buffer:
    """Encode a rank's error, if it has one, and its digests as a record of fixed size."""
    buffer = np.zeros(RECORD_BYTES, np.uint8)
    buffer[:ERROR_BYTES] = error_bytes(error)
    digests = b"".join(parts.values())
    buffer[ERROR_BYTES : ERROR_BYTES + len(digests)] = np.frombuffer(digests, np.uint8)
    return buffer


def found(records: list[Buffer], names: list[str]) -> RingspecError | None:
    """Return the error of the first rank with an error, or an error that names differing data; None if all agree."""
    for one in records:
        error = error_from(one[:ERROR_BYTES])
        if error is not None:
            return error
    tables = [one[ERROR_BYTES:].reshape(MOST_PARTS, DIGEST_BYTES) for one in records]
    for n, name in enumerate(names):
        other = [r for r, table in enumerate(tables) if not np.array_equal(table[n], tables[0][n])]
        if other:
            ranks = ", ".join(map(str, other[:16])) + (", ..." if len(other) > 16 else "")
            return CommunicationError(
                f"the same {name} on every rank",
                f"another {name} on rank {ranks} than on rank 0",
                "give every rank the same inputs and options; each rank takes its own tokens",
                code="disagreement",
            )
    return None


def error_bytes(error: RingspecError | None) -> Buffer:
    """Encode an error as bytes of fixed length: its class, its code and the three parts of its message, as JSON."""
    buffer = np.zeros(ERROR_BYTES, np.uint8)
    if error is not None:
        parts = [type(error).__name__, error.code, error.expected, error.got, error.fix]
        most = ERROR_BYTES // 4 - 16
        while len(data := json.dumps([part[:most] for part in parts]).encode()) > ERROR_BYTES:
            most //= 2
        buffer[: len(data)] = np.frombuffer(data, np.uint8)
    return buffer


def error_from(buffer: Buffer) -> RingspecError | None:
    """Decode the error that :func:`error_bytes` encoded; None if there is no error.

    >>> error_from(error_bytes(CommunicationError("a", "b", "c", code="disagreement")))
    CommunicationError('expected a; got b. Fix: c.')
    """
    data = buffer.tobytes().rstrip(b"\0")
    if not data:
        return None
    name, code, *parts = json.loads(data)
    kind = getattr(ringspec.errors, name, None)
    known = isinstance(kind, type) and issubclass(kind, RingspecError)
    return (kind if known else RingspecError)(*parts, code=code)  # type: ignore[misc]


def digest(*values: Any) -> bytes:
    """Compute a SHA-256 of values: of the dtype, shape and bytes of an array, and of the repr of anything else."""
    sha = hashlib.sha256()
    for value in values:
        arrays = arrays_of(value) if hasattr(value, "__dataclass_fields__") else [("", value)]
        for name, x in arrays:
            if isinstance(x, np.ndarray):
                sha.update(f"{name} {x.dtype} {x.shape}\n".encode())
                sha.update(np.ascontiguousarray(x).data)
            else:
                sha.update(f"{name} {x!r}\n".encode())
    return sha.digest()


def versions() -> bytes:
    """Encode the versions that must be equal on all ranks: ringspec, NumPy and the byte order."""
    return digest(ringspec.__version__, ringspec.SPEC_VERSION, np.__version__, sys.byteorder)


def digests_of(problem: Problem, seeds: Any, others: Iterable[tuple[str, Any]]) -> dict[str, bytes]:
    """Return digests of everything that determines the result of a ring, by the name that messages use."""
    terms = problem.terms
    sinks = terms.sinks
    parts = {"ringspec, NumPy and order of bytes": versions()}
    parts |= {name: digest(*value) for name, value in others}
    parts |= {
        "q": digest(problem.q),
        "k": digest(problem.k),
        "v": digest(problem.v),
        "dy and dlse": digest(*(seeds or ())),
        "positions, segments, bounds, bias, mask or keep of the queries": digest(problem.rows),
        "positions or segments of the keys": digest(problem.columns),
        "sinks": digest(sinks),
    }
    plain = {name: value for name, value in vars(terms).items() if name != "sinks"}
    return parts | {"scale, mask, softcap and dropout options": digest(sorted(plain.items()))}
