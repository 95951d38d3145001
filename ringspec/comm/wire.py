"""Convert a block to one buffer of bytes and back: a header of fixed size, followed by the arrays of the block.

The buffer does not contain the names, shapes and dtypes of the arrays. The receiver knows them from the schedule and
from its own block, because the blocks of all workers have the same number of slots. The header identifies the message,
so that a rank can refuse an unexpected message.
"""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringspec.errors import CommunicationError
from ringspec.spec.worker import Side

Buffer = NDArray[np.uint8]
MAGIC = b"ringspec"
HEADER = struct.Struct("<8s7q")
PHASES = ("forward", "backward", "gather of the results")
ALIGNMENT = 8


@dataclass(frozen=True)
class Header:
    """What identifies a message: pass, step, tag, source and target rank, and the owner of the block."""

    phase: str
    step: int
    tag: int
    source: int
    target: int
    owner: int

    def __str__(self) -> str:
        return f"{self.phase} step {self.step}, {self.source} to {self.target}, block {self.owner}"


@dataclass(frozen=True)
class Leaf:
    """The position of one array in a buffer: from byte ``start`` up to byte ``stop``.

    ``name`` is the name of a tensor of the block. If the tensor is a dataclass of several arrays (rows or columns),
    ``field`` is the name of the array in the dataclass, otherwise ''.
    """

    name: str
    field: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Frame:
    """The position of each array in a buffer of ``size`` bytes."""

    leaves: tuple[Leaf, ...]
    size: int


def frame_of(side: object, names: tuple[str, ...]) -> Frame:
    """Return the positions of the tensors ``names`` in a buffer; ``side`` has tensors of the same shapes and dtypes.

    >>> from ringspec.spec.worker import KeySide
    >>> frame = frame_of(KeySide(0, k=np.zeros((1, 1, 2, 3))), ("k", "v"))
    >>> [leaf.name for leaf in frame.leaves], frame.size
    (['k'], 112)
    """
    leaves, at = [], HEADER.size
    for name in names:
        for field, array in arrays_of(getattr(side, name)):
            leaf = Leaf(name, field, array.dtype, array.shape, at, at + array.nbytes)
            leaves.append(leaf)
            at = -(-leaf.stop // ALIGNMENT) * ALIGNMENT
    return Frame(tuple(leaves), at)


def arrays_of(value: object) -> list[tuple[str, NDArray]]:
    """Return the arrays of a tensor as pairs (field, array): several for a dataclass, none if the tensor is None."""
    if value is None:
        return []
    if isinstance(value, np.ndarray):
        return [("", value)]
    fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]  # type: ignore[arg-type]
    return [(name, array) for name, array in fields if array is not None]


def pack(side: object, frame: Frame, header: Header) -> Buffer:
    """Return a buffer with the header and, at the positions of ``frame``, copies of the arrays of ``side``."""
    buffer = np.zeros(frame.size, np.uint8)
    numbers = (PHASES.index(header.phase), header.step, header.tag)
    ends = (header.source, header.target, header.owner, frame.size)
    buffer[: HEADER.size] = np.frombuffer(HEADER.pack(MAGIC, *numbers, *ends), np.uint8)
    for leaf in frame.leaves:
        value = getattr(side, leaf.name)
        array = getattr(value, leaf.field) if leaf.field else value
        if array.dtype != leaf.dtype or array.shape != leaf.shape:
            raise CommunicationError(
                f"{leaf.name} as {leaf.dtype} {leaf.shape}, as at the start of the pass",
                f"{array.dtype} {array.shape}",
                "return arrays of the given shapes and dtypes from the block functions",
                code="message",
            )
        room = buffer[leaf.start : leaf.stop].view(leaf.dtype).reshape(leaf.shape)
        room[...] = array
    return buffer


def check_header(buffer: Buffer, header: Header) -> None:
    """Raise CommunicationError ('message') unless the buffer is the message that ``header`` identifies."""
    magic, phase, step, tag, source, target, owner, size = HEADER.unpack(
        buffer[: HEADER.size].tobytes()
    )
    if magic != MAGIC or not 0 <= phase < len(PHASES) or size != buffer.size:
        raise CommunicationError(
            f"the message {header}",
            "bytes that are not a message",
            "run the same version of ringspec on every rank",
            code="message",
        )
    got = Header(PHASES[phase], step, tag, source, target, owner)
    if got != header:
        raise CommunicationError(
            f"the message {header}",
            str(got),
            "pass the same schedule on every rank",
            code="message",
        )


def unpack(buffer: Buffer, frame: Frame, like: object) -> dict[str, object]:
    """Return the tensors of a buffer by name.

    ``like`` is a block. A tensor that is a dataclass of arrays gets the class that it has in this block.
    """
    values: dict[str, object] = {}
    inside: dict[str, dict[str, NDArray]] = {}
    for leaf in frame.leaves:
        array = buffer[leaf.start : leaf.stop].view(leaf.dtype).reshape(leaf.shape).copy()
        if leaf.field:
            inside.setdefault(leaf.name, {})[leaf.field] = array
        else:
            values[leaf.name] = array
    for name, fields in inside.items():
        values[name] = type(getattr(like, name))(**fields)
    return values


def side_from(buffer: Buffer, frame: Frame, like: Side, owner: int) -> Side:
    """Return the block of ``owner`` with the tensors of a buffer."""
    return type(like)(owner, **unpack(buffer, frame, like))  # type: ignore[arg-type]
