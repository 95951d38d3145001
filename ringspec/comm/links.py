"""The protocol by which the ranks of a ring send buffers of bytes to each other; ``mpi`` and ``threads`` implement it.

Only :meth:`Links.wait` blocks. Within a bounded time it returns the buffer or raises an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ringspec.comm.wire import Buffer
from ringspec.errors import RingspecError


@dataclass(frozen=True)
class Pending:
    """A send or a receive that has been started; ``what`` is a description for messages."""

    peer: int
    what: str
    buffer: Buffer | None
    handle: Any


class Links(Protocol):
    """The connections of one rank; messages with the same source, target and tag arrive in the order sent."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def name(self, rank: int) -> str:
        """Return the name of a rank, for messages."""

    def send(self, target: int, tag: int, buffer: Buffer, what: str) -> Pending:
        """Start to send; the buffer must not change until :meth:`wait` returns."""

    def receive(self, source: int, tag: int, size: int, what: str) -> Pending:
        """Start to receive ``size`` bytes."""

    def wait(self, pending: Pending) -> Buffer:
        """Wait until the transfer is complete and return the buffer.

        Raises LostWorkerError after the time limit, or the error of another rank that called
        :meth:`stop`.
        """

    def stop(self, error: RingspecError) -> None:
        """Send ``error``, which ends this rank, to all other ranks; :meth:`wait` then raises it there."""
