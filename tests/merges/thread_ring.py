"""Run the published loop of a ring once per worker, in threads that exchange tensors in place of processes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

WAIT = 60  # seconds; only ends a hang


class ThreadRing:
    """The exchanges of ``workers`` threads. ``rank`` is that of the calling thread."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.local = threading.local()
        self.barrier = threading.Barrier(workers, timeout=WAIT)
        self.slots: list[object] = [None] * workers

    @property
    def rank(self) -> int:
        return self.local.rank

    def exchange(self, value, to: int):
        """Send ``value`` to the worker ``to`` and return what this worker receives; all workers must call this."""
        self.slots[to] = value
        self.barrier.wait()
        received = self.slots[self.rank]
        self.barrier.wait()
        return received

    def pass_on(self, value, direction: int = 1):
        return self.exchange(value, (self.rank + direction) % self.workers)

    def all(self, value) -> list:
        """Return the values of all workers."""
        self.slots[self.rank] = value
        self.barrier.wait()
        received = list(self.slots)
        self.barrier.wait()
        return received

    def run(self, program) -> list:
        """Return ``program(rank)`` of every worker."""

        def begin(rank: int):
            self.local.rank = rank
            return program(rank)

        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(begin, range(self.workers)))
