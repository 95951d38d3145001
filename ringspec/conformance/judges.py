"""Cases spread over processes: each has the target in a process of its own, and judges its answers.

The truth of a case takes longer than most targets do, so the work is cut by cases, not by calls. A
case is a set of functions and does not travel; its profile and its id do. Neighbours that are one
problem in several layouts and formats stay together, because they share one truth.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import re
import signal
from collections import Counter
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import groupby
from typing import Any

from ringspec.conformance.cases import RunCase, run_cases
from ringspec.conformance.diagnoser import MOST, Diagnoser, kind_of
from ringspec.conformance.execute import run_case
from ringspec.conformance.outcome import Record
from ringspec.errors import VectorError
from ringspec.vectors.processes import begin

# What a problem's variants differ in.
VARIANT = re.compile(r"-(contiguous|striped|zigzag|w\d+|bf16|fp16|f32|f64)(?=-|$)")
MOST_TOGETHER = 24
_own: dict[str, Any] = {}


def in_processes(
    profile: str,
    cases: Sequence[RunCase],
    timeout: float | None,
    jobs: int,
    spec: str,
    diagnose: bool,
) -> Generator[Record, None, None]:
    """The records of cases of a profile, in their order; they do not depend on ``jobs``."""
    context = multiprocessing.get_context("spawn")
    before = set(multiprocessing.active_children())
    settings = profile, spec, timeout, diagnose
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=start, initargs=settings)
    diagnosed: Counter[str] = Counter()
    try:
        for future in [pool.submit(work, chunk) for chunk in chunks([case.id for case in cases])]:
            for record in future.result():
                yield within_limits(record, diagnosed)
    except BrokenProcessPool:
        raise VectorError(
            "processes that finish their work",
            "one that was killed, perhaps for want of memory",
            "use fewer jobs",
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - before:
            process.kill()  # and the process of its target ends with it
            process.join()


def chunks(ids: Sequence[str]) -> list[list[str]]:
    """Ids that are worked on one after the other by one process.

    >>> chunks(["probe/a/full-contiguous-w2-bf16", "probe/a/full-zigzag-w2-f32", "probe/a/one"])
    [['probe/a/full-contiguous-w2-bf16', 'probe/a/full-zigzag-w2-f32'], ['probe/a/one']]
    """
    found = []
    for key, group in groupby(ids, lambda id: VARIANT.sub("", id)):
        same = list(group)
        # Noise cases share nothing and take long.
        most = 1 if key.startswith("noise/") else MOST_TOGETHER
        found += [same[n : n + most] for n in range(0, len(same), most)]
    return found


def within_limits(record: Record, diagnosed: Counter[str]) -> Record:
    """Only the first failures of a kind keep their diagnosis, however many processes made some."""
    if record.diagnosis is None:
        return record
    kind = kind_of(record.id)
    diagnosed[kind] += 1
    if diagnosed[kind] <= MOST[kind]:
        return record
    return dataclasses.replace(record, diagnosis=None)


def start(profile: str, spec: str, timeout: float | None, diagnose: bool) -> None:
    """In a new process: nothing is loaded before there is a case to run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's matter
    begin()
    _own.update(profile=profile, spec=spec, timeout=timeout)
    _own["diagnose"] = Diagnoser() if diagnose else None


def work(ids: list[str]) -> list[Record]:
    """The records of these cases."""
    cases = known_cases(_own["profile"])
    return [run_case(own_target(), cases[id], _own["diagnose"]) for id in ids]


@functools.cache
def known_cases(profile: str) -> dict[str, RunCase]:
    return {case.id: case for case in run_cases(profile)}


@functools.cache
def own_target() -> Any:
    """The target in a process of its own."""
    from ringspec.conformance.pool import opened

    return opened(_own["spec"], _own["timeout"])
