"""Links between threads of one process: every rank is a thread, and every message is an entry of a queue.

This module is meant for tests and for readers, because it does not need MPI. A rank runs the same loop as over MPI.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ringspec.comm.links import Pending
from ringspec.comm.ring import ring_over
from ringspec.comm.wire import Buffer
from ringspec.errors import LostWorkerError, RingspecError
from ringspec.problem.checks import check_workers
from ringspec.rings.run import Run

GLANCE_SECONDS = 0.02


class Hall:
    """The objects that all threads share: a message queue for each (source, target, tag), and the first error."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.error: RingspecError | None = None
        self._queues: dict[tuple[int, int, int], queue.Queue[Buffer]] = defaultdict(queue.Queue)
        self._lock = threading.Lock()

    def queue(self, source: int, target: int, tag: int) -> queue.Queue[Buffer]:
        with self._lock:
            return self._queues[source, target, tag]


class ThreadLinks:
    """The links of one rank, which are queues of a :class:`Hall`; ``timeout`` is the longest wait in seconds."""

    def __init__(self, hall: Hall, rank: int, timeout: float = 60.0) -> None:
        self.hall, self.timeout = hall, timeout
        self._rank = rank

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self.hall.size

    def name(self, rank: int) -> str:
        return f"rank {rank}"

    def send(self, target: int, tag: int, buffer: Buffer, what: str) -> Pending:
        self.hall.queue(self.rank, target, tag).put(buffer.copy())
        return Pending(target, what, buffer, None)

    def receive(self, source: int, tag: int, size: int, what: str) -> Pending:
        return Pending(source, what, None, self.hall.queue(source, self.rank, tag))

    def wait(self, pending: Pending) -> Buffer:
        """Wait and return the buffer; raise LostWorkerError after the time limit, or another rank's error."""
        if pending.buffer is not None:
            return pending.buffer
        deadline = time.monotonic() + self.timeout
        while time.monotonic() < deadline:
            if self.hall.error is not None:
                raise self.hall.error
            try:
                buffer: Buffer = pending.handle.get(timeout=GLANCE_SECONDS)
            except queue.Empty:
                continue
            return buffer
        raise LostWorkerError(
            f"a message within {self.timeout:g} s",
            f"none: rank {self.rank} {pending.what}",
            "find out why that rank does not answer",
        )

    def stop(self, error: RingspecError) -> None:
        self.hall.error = self.hall.error or error


def ring_in_threads(
    q: Any, k: Any, v: Any, dy: Any = None, *, workers: int, timeout: float = 60.0, **keywords: Any
) -> Run:
    """Run :func:`~ringspec.comm.ring.ring_over` with a thread for each worker, and return the run.

    Shapes, keywords and errors are those of :func:`ringspec.rings.ring.ring`; ``timeout`` is in seconds.

    >>> import numpy as np
    >>> q = k = np.zeros((1, 1, 4, 2)); v = np.arange(8.0).reshape(1, 1, 4, 2)
    >>> ring_in_threads(q, k, v, workers=2, causal=True).o[0, 0, :, 0].tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    hall = Hall(check_workers(workers))

    def one(rank: int) -> Run | None:
        links = ThreadLinks(hall, rank, timeout)
        return ring_over(links, q, k, v, dy, root=0, **keywords)

    with ThreadPoolExecutor(hall.size) as pool:
        runs = [pool.submit(one, rank) for rank in range(hall.size)]
        run = [future.result() for future in runs][0]
    assert run is not None
    return run
