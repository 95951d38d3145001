"""Threads that share tasks: those of one call, and those of calls that tasks make themselves.

A ring's workers compute side by side, and each of their blocks is cut into tasks too. So that no core waits
while another still has work, a thread without a task of its own takes one of any call that is open: a
whole worker if there is one left, or else a part of another thread's block.

A task's arithmetic never depends on which thread runs it or when, and no two tasks write to the
same place. So results are the same bits for any number of threads.
"""

from __future__ import annotations

import contextvars
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from ringspec.errors import OptionError, shown
from ringspec.fast.threads import one_blas_thread

Task = Callable[[], None]

LOCK = threading.Lock()
POOLS: dict[int, ThreadPoolExecutor] = {}


class Here(threading.local):
    """The team that the calling thread works in, and how many calls deep."""

    team: Team | None = None
    depth: int = 0


HERE = Here()


class Round:
    """The tasks of one call, handed out in their order. ``failed``: the first task that raised, and what."""

    def __init__(self, tasks: Sequence[Task], depth: int) -> None:
        self.waiting = deque(enumerate(tasks))
        self.unfinished = len(tasks)
        self.depth = depth
        self.failed: tuple[int, BaseException] | None = None

    def fail(self, number: int, error: BaseException) -> None:
        """Later tasks are dropped. All earlier ones were handed out before, so the first failure is
        the same for any number of threads."""
        if self.failed is None or number < self.failed[0]:
            self.failed = number, error
        self.unfinished -= len(self.waiting)
        self.waiting.clear()


class Team:
    """The threads of one outermost call, and the rounds of tasks that are open in it."""

    def __init__(self) -> None:
        self.rounds: list[Round] = []
        self.change = threading.Condition()
        self.closed = False

    def run(self, tasks: Sequence[Task]) -> None:
        """A round: the calling thread works at it until all of it is done."""
        one = Round(tasks, HERE.depth)
        with self.change:
            self.rounds.append(one)
            self.change.notify_all()
        try:
            self.work(one, lambda: one.unfinished == 0)
        finally:
            with self.change:
                self.rounds.remove(one)
        if one.failed is not None:
            raise one.failed[1]

    def help(self) -> None:
        """What the other threads do: any task of any round, until the team is closed."""
        with np.errstate(all="ignore"):
            HERE.team = self
            try:
                self.work(None, lambda: self.closed)
            finally:
                HERE.team = None

    def work(self, own: Round | None, done: Callable[[], bool]) -> None:
        """Tasks of the thread's own round, then of others, until ``done``. A thread that waits for the
        last of its own tasks takes none of an outer round: it would come back too late."""
        while True:
            found = None
            with self.change:
                while not done() and (found := self.next_task(own)) is None:
                    self.change.wait()
                if found is None:
                    return
            self.do(*found)

    def next_task(self, own: Round | None) -> tuple[Round, int, Task] | None:
        if own is not None and own.waiting:
            return own, *own.waiting.popleft()
        for one in self.rounds:
            if one.waiting and (own is None or one.depth >= own.depth):
                return one, *one.waiting.popleft()
        return None

    def do(self, one: Round, number: int, task: Task) -> None:
        outside = HERE.depth
        HERE.depth = one.depth + 1
        error = None
        try:
            task()
        except BaseException as raised:
            error = raised
        HERE.depth = outside
        with self.change:
            one.unfinished -= 1
            if error is not None:
                one.fail(number, error)
            if one.unfinished == 0:
                self.change.notify_all()

    def close(self) -> None:
        with self.change:
            self.closed = True
            self.change.notify_all()


def run_tasks(tasks: Sequence[Task], threads: int) -> None:
    """Run every task once, on the calling thread and others; each takes the next task when it is done.

    Within a task of another call the threads are those of the outermost call. What the first failing task raised
    is raised when no thread is at work on these tasks any more. Overflow shows in results, which are
    checked: NumPy's warnings would come from hidden pairs.
    """
    others = min(threads, len(tasks)) - 1
    with np.errstate(all="ignore"):
        if others < 1:
            with one_blas_thread():
                for task in tasks:
                    task()
        elif HERE.team is not None:
            HERE.team.run(tasks)
        else:
            run_in_team(tasks, others)


def run_in_team(tasks: Sequence[Task], others: int) -> None:
    team = Team()
    with one_blas_thread():
        futures = [pool(others).submit(team.help) for _ in range(others)]
        HERE.team = team
        try:
            team.run(tasks)
        finally:
            HERE.team = None
            team.close()
            # Those that have not begun would wait for another team's threads, which may wait for this call.
            begun = [future for future in futures if not future.cancel()]
            wait(begun)
    for future in begun:
        future.result()


def each(function: Callable[[Any], Any], values: Iterable[Any], *, threads: int) -> list[Any]:
    """``function`` of every value, in their order, as ``map``, but side by side on so many threads."""
    values = list(values)
    results: list[Any] = [None] * len(values)

    def call(number: int) -> None:
        results[number] = function(values[number])

    # The function sees the caller's settings, those for NumPy's warnings among them.
    tasks = [
        functools.partial(contextvars.copy_context().run, call, number)
        for number in range(len(values))
    ]
    run_tasks(tasks, threads)
    return results


def pool(threads: int) -> ThreadPoolExecutor:
    with LOCK:
        if threads not in POOLS:
            POOLS[threads] = ThreadPoolExecutor(threads, thread_name_prefix="ringspec-fast")
        return POOLS[threads]


def thread_count(threads: int | None) -> int:
    """The number of threads asked for; None is one for each core that this process may use."""
    if threads is None:
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1
    if isinstance(threads, bool) or not isinstance(threads, (int, np.integer)) or threads < 1:
        raise OptionError("threads as an integer >= 1, or None", shown(threads), "pass threads=2")
    return int(threads)


if hasattr(os, "register_at_fork"):  # a child has none of its parent's threads
    os.register_at_fork(after_in_child=POOLS.clear)
