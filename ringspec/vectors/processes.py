"""Apply a function to many items in several processes; results are returned in the order of the items.

Each process uses one BLAS thread, because the threads of several processes would compete for the same
processors.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from threadpoolctl import threadpool_limits

from ringspec.errors import OptionError, RingspecError, shown

MOST_JOBS = 256
Item = TypeVar("Item")
Result = TypeVar("Result")


def each(
    function: Callable[[Item], Result], items: Iterable[Item], jobs: int = 1
) -> Iterator[Result]:
    """Yield ``function(item)`` for each item, in order; if ``jobs`` > 1, function and items must be picklable.

    If the function raises an error for an item, this error is raised instead of yielding the result, and the remaining
    items are dropped.

    >>> list(each(abs, [-1, 2, -3]))
    [1, 2, 3]
    """
    if type(jobs) is not int or not 1 <= jobs <= MOST_JOBS:
        raise OptionError(f"1 to {MOST_JOBS} jobs", shown(jobs), "give the number of processes")
    if jobs == 1:
        for item in items:
            with threadpool_limits(1):
                result = function(item)
            yield result
        return
    yield from in_processes(function, items, jobs)


def in_processes(
    function: Callable[[Item], Result], items: Iterable[Item], jobs: int
) -> Iterator[Result]:
    """Yield the results of :func:`each` from ``jobs`` processes; at most 4 * jobs items are submitted ahead."""
    # spawn: a fork would copy the state of running BLAS threads.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=begin)
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= 4 * jobs:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise RingspecError(
            "processes that finish their work",
            "a process that was killed, perhaps for lack of memory",
            "use fewer jobs",
            code="failed-process",
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def begin() -> None:
    """Set up a new process: it uses one BLAS thread, and ends when its parent process ends or is killed."""
    threadpool_limits(1)
    threading.Thread(target=leave_with_parent, daemon=True).start()


def leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def default_jobs() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), MOST_JOBS)
    return min(os.cpu_count() or 1, MOST_JOBS)
