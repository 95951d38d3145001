"""Sending buffers between the ranks of a ring: the protocol that the loop uses.

``mpi`` and ``threads`` implement it. Only :meth:`Links.wait` blocks; within a bounded time it returns the buffer or
raises an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ringspec.comm.wire import Buffer
from ringspec.errors import RingspecError


@dataclass(frozen=True)
class Pending:
    """A transfer that has been started. ``what`` describes it and its step in messages."""

    peer: int
    what: str
    buffer: Buffer | None
    handle: Any


class Links(Protocol):
    """A way to send buffers from rank to rank; messages with the same source, target and tag keep their order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def name(self, rank: int) -> str:
        """Return the name of a rank in messages."""

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
        """Tell all ranks that this one cannot continue; their waits raise the same error."""
