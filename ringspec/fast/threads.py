"""What threads need: BLAS held to one thread, scratch that each keeps, values that one makes for all.

NumPy releases the interpreter's lock in products and elementwise functions, so Python threads share
the cores. BLAS must have one thread then: two times two threads were slower than one at S = 4096,
because OpenBLAS's threads wait for each other in a spin loop.
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


def aligned(size: int) -> NDArray[np.uint8]:
    """Bytes from a multiple of 64 on: products and elementwise passes are 2 to 3 % faster on them."""
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


@functools.cache
def controller() -> ThreadpoolController:
    """The thread pools of this process; looking for them takes milliseconds, so it is done once."""
    return ThreadpoolController()


class BlasLimit:
    """BLAS at one thread while any call wants it so, and as before afterwards.

    Only the calling thread can limit BLAS where it has limits of its own: threadpoolctl ignores other threads
    then. An interrupt may arrive anywhere in it, so every step can be done again.
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
        """As :meth:`drop`. An interrupt at the end of a ``with`` leaves its lock held."""
        self.drop(call)
        with contextlib.suppress(RuntimeError):  # not held any more
            while True:
                self.lock.release()

    def in_child(self) -> None:
        """After a fork: the calls of the parent's other threads are not there."""
        before = self.before
        self.forget()
        if before is not None:
            before.restore_original_limits()


def give_up_control() -> None:
    """Let this thread no longer control the number of BLAS threads.

    threadpoolctl (3.8) has the thread that set a limit control BLAS as long as it lives, or until it
    leaves the context of a limit.
    """
    with controller().limit(limits=None):
        pass


BLAS_LIMIT = BlasLimit()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=BLAS_LIMIT.in_child)


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
