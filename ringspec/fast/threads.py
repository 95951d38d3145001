"""Threads over tasks, BLAS held to one thread, and scratch that each thread keeps.

NumPy releases the interpreter's lock in products and elementwise functions, so Python threads share
the cores. BLAS must have one thread then: two times two threads were slower than one at S = 4096,
because OpenBLAS's threads wait for each other in a spin loop.

A task's arithmetic never depends on which thread runs it or when, and no two tasks write to the
same place. So results are the same bits for any number of threads.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from ringspec.errors import OptionError, shown
from ringspec.fast.memory import aligned

Task = Callable[[], None]

LOCK = threading.Lock()
POOLS: dict[int, ThreadPoolExecutor] = {}
# Larger arrays than this are not kept.
MAX_KEPT_BYTES = 1 << 25
MAX_VIEWS = 1024


class Scratch(threading.local):
    """Arrays by name that belong to the calling thread; their content is undefined."""

    def __init__(self) -> None:
        self.buffers: dict[str, NDArray[np.uint8]] = {}
        self.views: dict[tuple[Any, ...], NDArray[Any]] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """A contiguous array of that shape, valid until the same name is asked for again."""
        view = self.views.get((name, shape, dtype))
        return self.cut(name, shape, dtype) if view is None else view

    def cut(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """A view of the name's buffer, kept: making it anew for each tile took 2 % of a pass."""
        size = math.prod(shape) * dtype.itemsize
        if size > MAX_KEPT_BYTES:
            return np.empty(shape, dtype)
        buffer = self.buffers.get(name)
        if len(self.views) >= MAX_VIEWS:
            self.views.clear()
        if buffer is None or buffer.nbytes < size:
            buffer = self.buffers[name] = aligned(size)
            self.views = {key: view for key, view in self.views.items() if key[0] != name}
        view = buffer[:size].view(dtype).reshape(shape)
        self.views[name, shape, dtype] = view
        return view


SCRATCH = Scratch()


@functools.cache
def controller() -> ThreadpoolController:
    """The thread pools of this process; looking for them takes milliseconds, so it is done once."""
    return ThreadpoolController()


class BlasLimit:
    """BLAS at one thread while anybody in this process wants it so, and as before afterwards."""

    depth = 0
    limiter: Any = None


@contextmanager
def one_blas_thread() -> Iterator[None]:
    with LOCK:
        if BlasLimit.depth == 0:
            BlasLimit.limiter = controller().limit(limits=1, user_api="blas")
        BlasLimit.depth += 1
    try:
        yield
    finally:
        with LOCK:
            BlasLimit.depth -= 1
            if BlasLimit.depth == 0:
                BlasLimit.limiter.restore_original_limits()


def thread_count(threads: int | None) -> int:
    """The number of threads asked for; None is one for each core that this process may use."""
    if threads is None:
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1
    if isinstance(threads, bool) or not isinstance(threads, (int, np.integer)) or threads < 1:
        raise OptionError("threads as an integer >= 1, or None", shown(threads), "pass threads=2")
    return int(threads)


def run_tasks(tasks: Sequence[Task], threads: int) -> None:
    """Run every task once, on the calling thread and others; each takes the next task when it is done.

    Errors are raised when no thread is at work any more.
    """
    others = min(threads, len(tasks)) - 1
    with one_blas_thread():
        queue = iter(tasks)  # next() on a list's iterator is atomic
        futures = [pool(others).submit(drain, queue) for _ in range(others)]
        try:
            drain(queue)
        finally:
            wait(futures)
        for future in futures:
            future.result()


class Once:
    """Values by key, each made by the first task that asks for it; others that ask meanwhile wait.

    It spares a round of tasks before those that need the values: with two threads a ring of short blocks loses
    time at the end of every round that it does not lose with one.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make
        self.made: dict[tuple[int, ...], Any] = {}
        self.locks: dict[tuple[int, ...], threading.Lock] = {}

    def get(self, *key: int) -> Any:
        if key not in self.made:
            with self.locks.setdefault(key, threading.Lock()):
                if key not in self.made:
                    self.made[key] = self.make(*key)
        return self.made[key]


def drain(queue: Iterator[Task]) -> None:
    """Overflow shows in results, which are checked; NumPy's warnings would come from hidden pairs."""
    with np.errstate(all="ignore"):
        for task in queue:
            task()


def pool(threads: int) -> ThreadPoolExecutor:
    with LOCK:
        if threads not in POOLS:
            POOLS[threads] = ThreadPoolExecutor(threads, thread_name_prefix="ringspec-fast")
        return POOLS[threads]


if hasattr(os, "register_at_fork"):  # a child has none of its parent's threads
    os.register_at_fork(after_in_child=POOLS.clear)
