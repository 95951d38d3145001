"""What the computing threads share: a limit of one BLAS thread, scratch memory, and values computed only once.

NumPy releases the interpreter's lock in products and elementwise functions, so Python threads run in
parallel. Each of these threads must then use BLAS with a single thread. With a sequence of 4096 tokens, two Python
threads with two BLAS threads each were slower than one Python thread, because OpenBLAS's threads wait for each other in
a spin loop.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

# Larger arrays are not cached.
MAX_KEPT_BYTES = 1 << 25
MAX_VIEWS = 1024


class Scratch(threading.local):
    """Named arrays that belong to the calling thread; their contents are undefined."""

    def __init__(self) -> None:
        self.buffers: dict[str, NDArray[np.uint8]] = {}
        self.views: dict[tuple[Any, ...], NDArray[Any]] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a contiguous array of this shape and dtype, valid until the next call with the same name."""
        view = self.views.get((name, shape, dtype))
        return self.cut(name, shape, dtype) if view is None else view

    def cut(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a cached view of the buffer called ``name``; creating a view for each tile took 2 % of a pass."""
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


def aligned(size: int) -> NDArray[np.uint8]:
    """Return ``size`` bytes at an address that is a multiple of 64.

    Products and elementwise operations on aligned memory are 2 to 3 % faster.
    """
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


@functools.cache
def controller() -> ThreadpoolController:
    """Return the thread pools of this process; finding them takes milliseconds, so it is done once."""
    return ThreadpoolController()


class BlasLimit:
    """Limits BLAS to one thread while any call of ``run_tasks`` is running, and restores the former limit afterwards.

    The thread that calls ``run_tasks`` sets the limit: if that thread has set a limit before, threadpoolctl ignores the
    limits of other threads. An interrupt may arrive anywhere, so every step can be repeated.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.lock = threading.RLock()
        self.calls: set[object] = set()
        self.before: Any = None

    def take(self, call: object) -> None:
        with self.lock:
            if not self.calls:
                self.before = controller().limit(limits=None)
            self.calls.add(call)
            if len(self.calls) == 1:
                controller().limit(limits=1, user_api="blas")
                give_up_control()

    def drop(self, call: object) -> None:
        with self.lock:
            self.calls.discard(call)
            if not self.calls and self.before is not None:
                self.before.restore_original_limits()
                give_up_control()
                self.before = None

    def drop_after_interrupt(self, call: object) -> None:
        """Call :meth:`drop`, and release the lock; an interrupt at the end of a ``with`` leaves it held."""
        self.drop(call)
        with contextlib.suppress(RuntimeError):  # it may not be held
            while True:
                self.lock.release()

    def in_child(self) -> None:
        """Reset the limit in the child of a fork, in which the calls of the parent's other threads do not exist."""
        before = self.before
        self.forget()
        if before is not None:
            before.restore_original_limits()


def give_up_control() -> None:
    """Let other threads set the number of BLAS threads again.

    In threadpoolctl (3.8), a thread that has set a limit controls BLAS until the thread ends, or until it leaves the
    context of a limit.
    """
    with controller().limit(limits=None):
        pass


BLAS_LIMIT = BlasLimit()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=BLAS_LIMIT.in_child)


class Once:
    """Values by key; the first task that needs a value computes it, and other tasks that need the same value wait.

    This avoids a separate call of ``run_tasks`` for these values. At the end of each call some threads are idle, which
    costs time in rings of short blocks.
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
