"""Run the tasks of a call on threads; a task may itself call :func:`run_tasks`.

A task is a function without arguments. When :func:`run_tasks` is called outside of any task, it takes a crew (a group
of idle threads), gives it the tasks, and waits. The calling thread computes nothing, so an interrupt (Ctrl-C arrives in
the main thread) cannot stop a sum half-way. After an interrupt the crew is dismissed, and the next call creates a new
crew.

When a task itself calls :func:`run_tasks`, its thread works on the new tasks, and idle threads of the crew help. In a
ring, each thread thus first computes whole workers of the ring; a thread that becomes idle then helps with the tiles of
other workers.

The arithmetic of a task does not depend on which thread runs it or when, and no two tasks write to the
same memory. Results are therefore bit-identical for any number of threads.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from ringspec.errors import OptionError, shown
from ringspec.fast.forks import GATE
from ringspec.fast.threads import BLAS_LIMIT
from ringspec.problem.checks import is_integer

Task = Callable[[], None]

GLANCE = 0.5  # seconds


class Here(threading.local):
    """The crew to which the current thread belongs; None for a thread that belongs to no crew."""

    crew: Crew | None = None


HERE = Here()


class Round:
    """The tasks of one call, which start in order; ``failed``: the number and the error of each task that failed."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.waiting = deque(enumerate(tasks))
        self.failed: list[tuple[int, BaseException]] = []

    def fail(self, number: int, error: BaseException) -> None:
        """Record the failure of a task, and drop all tasks that have not started.

        All tasks with smaller numbers have started already, so the first failure is the same for any number of
        threads.
        """
        self.failed.append((number, error))
        self.waiting.clear()

    def raise_first(self) -> None:
        if self.failed:
            error = min(self.failed, key=lambda pair: pair[0])[1]
            self.failed.clear()  # the error's traceback holds this round
            raise error


class Crew:
    """A group of threads that run the tasks of one call. ``dismissed``: True if no further task may start."""

    def __init__(self, threads: int) -> None:
        self.executor = ThreadPoolExecutor(threads, thread_name_prefix="ringspec-fast")
        self.dismissed = False

    def dismiss(self) -> None:
        """Start no further task, and wait for the running tasks."""
        self.dismissed = True
        self.executor.shutdown(cancel_futures=True)

    def begin(self, one: Round, helpers: int, ended: Callable[[], None]) -> list[Future[None]]:
        return [self.executor.submit(self.help, one, ended) for _ in range(helpers)]

    def help(self, one: Round, ended: Callable[[], None]) -> None:
        """Run tasks of the call ``one`` in a thread of the crew, then call ``ended``."""
        try:
            HERE.crew = self
            GATE.enter()
            with np.errstate(all="ignore"):
                self.work(one)
        except BaseException as error:
            one.fail(-1, error)
        finally:
            GATE.leave()
            HERE.crew = None
            ended()

    def work(self, one: Round) -> None:
        """Run tasks of the call ``one`` until none is waiting or the crew is dismissed."""
        while not self.dismissed:
            GATE.let_forks_pass()
            try:
                number, task = one.waiting.popleft()
            except IndexError:
                return
            try:
                task()
            except BaseException as error:
                one.fail(number, error)

    def run_within(self, tasks: Sequence[Task], threads: int) -> None:
        """Run tasks for a task of this crew: the current thread works on them, and idle threads of the crew help."""
        one = Round(tasks)
        helpers = self.begin(one, min(threads, len(tasks)) - 1, lambda: None)
        with np.errstate(all="ignore"):
            self.work(one)
        # Cancel helpers that have not started: they would wait for threads that may wait for this call.
        begun = [helper for helper in helpers if not helper.cancel()]
        if begun:
            GATE.leave()
            wait(begun)
            GATE.enter()
        if self.dismissed:
            raise CancelledError("the call was interrupted")
        one.raise_first()


# Idle crews by number of threads. They are kept because their threads keep scratch memory.
IDLE: dict[int, list[Crew]] = {}


def run_tasks(tasks: Sequence[Task], threads: int) -> None:
    """Run every task once on ``threads`` threads; each thread takes the next task when it is free.

    If a task calls this function, the new tasks run on the threads of the outermost call. If tasks fail, the error of
    the first one in the order of ``tasks`` is raised after all running tasks have ended. If the calling thread is
    interrupted, no further task starts, and the interrupt is raised after the running tasks have ended. NumPy's
    overflow warnings are off, because hidden pairs would cause them; results are checked instead.
    """
    if HERE.crew is not None:
        HERE.crew.run_within(tasks, threads)
    elif tasks:
        run_from_outside(tasks, threads)


def run_from_outside(tasks: Sequence[Task], threads: int) -> None:
    """Run the tasks on a crew and wait for them.

    The wait uses a queue that is implemented in C, because an interrupt during ``Future.result`` could leave the lock
    of the future held.
    """
    handled = sys.exception()
    one, ended = Round(tasks), queue.SimpleQueue[None]()
    crew = idle_crew(threads)
    try:
        BLAS_LIMIT.take(one)
        helpers = crew.begin(one, min(threads, len(tasks)), functools.partial(ended.put, None))
        for _ in helpers:
            wait_for_one(ended)
        BLAS_LIMIT.drop(one)
    except BaseException as error:
        crew.dismiss()
        BLAS_LIMIT.drop_after_interrupt(one)
        raise first_before(error, handled) from None
    # If an interrupt arrives before this line, the crew becomes garbage, and its threads end with it.
    IDLE.setdefault(threads, []).append(crew)
    one.raise_first()


def first_before(error: BaseException, handled: BaseException | None) -> BaseException:
    """Return the first error in the chain of ``__context__`` that leads to ``error``.

    The chain begins after ``handled``, the error that the caller was already handling. The first error may be an
    interrupt that led to a second error: ``submit`` uses ``threading.Condition.wait``, in which an interrupt can cause
    "release unlocked lock".
    """
    while error.__context__ is not None and error.__context__ is not handled:
        if isinstance(error.__context__, queue.Empty):  # the interrupt came while a wait timed out
            break
        error = error.__context__
    return error


def wait_for_one(ended: queue.SimpleQueue[None]) -> None:
    """Wait until one thread of the crew has ended its work, in repeated short waits.

    A wait without a timeout would ignore an interrupt on Windows, or if another thread received the signal.
    """
    while True:
        with contextlib.suppress(queue.Empty):
            return ended.get(timeout=GLANCE)


def idle_crew(threads: int) -> Crew:
    try:
        return IDLE[threads].pop()
    except (KeyError, IndexError):
        return Crew(threads)


def each(function: Callable[[Any], Any], values: Iterable[Any], *, threads: int) -> list[Any]:
    """Apply ``function`` to every value on ``threads`` threads; return the results in the order of ``values``."""
    values = list(values)
    results: list[Any] = [None] * len(values)

    def call(number: int) -> None:
        results[number] = function(values[number])

    # The function runs with the caller's settings, for example those for NumPy's warnings.
    tasks = [
        functools.partial(contextvars.copy_context().run, call, number)
        for number in range(len(values))
    ]
    run_tasks(tasks, threads)
    return results


def thread_count(threads: int | None) -> int:
    """Validate a number of threads and return it; None means one thread for each core that this process may use."""
    if threads is None:
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1
    if not is_integer(threads) or threads < 1:
        raise OptionError("threads as an integer >= 1, or None", shown(threads), "pass threads=2")
    return int(threads)


if hasattr(os, "register_at_fork"):  # a forked child does not have its parent's threads
    os.register_at_fork(after_in_child=IDLE.clear)
