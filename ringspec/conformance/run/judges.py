"""Distribute cases over judging processes, each of which calls the target in another process.

The target is the program under test. For most targets, computing the correct results of a case takes longer than the
target's calls, so whole cases are distributed, not calls. A case consists of functions, which cannot be sent, so a
process receives the case's profile and id instead. Consecutive cases with one problem in several layouts and formats
stay together, because they share its correct results. Records are sent back as lines of a report. They are checked,
because a judging process also imports code of the target.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import threading
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

from ringspec.conformance.adapters import rank_start
from ringspec.conformance.adapters.control import refused
from ringspec.conformance.adapters.process import Program
from ringspec.conformance.adapters.wire import line_of, message_of
from ringspec.conformance.cases.model import RunCase
from ringspec.conformance.diagnose.summary import MOST, kind_of
from ringspec.conformance.report.lines import MAX_LINE, read_record
from ringspec.conformance.report.records import Record
from ringspec.conformance.target.protocol import Failed
from ringspec.errors import RingspecError

WORKER = "ringspec.conformance.run.judge_worker"
WHO = "a process that judges"
# The parts of an id in which the variants of a problem differ.
VARIANT = re.compile(r"-(contiguous|striped|zigzag|w\d+|bf16|fp16|f32|f64)(?=-|$)")
MOST_TOGETHER = 24
READOUT = "readout/"


def in_processes(
    profile: str,
    cases: Sequence[RunCase],
    timeout: float | None,
    jobs: int,
    spec: str,
    diagnose: bool,
) -> Generator[Record, None, None]:
    """Yield the records of cases, in their order. The records do not depend on ``jobs``."""
    setup = {"profile": profile, "spec": spec, "timeout": timeout, "diagnose": diagnose}
    judges: list[Program] = []
    own = threading.local()
    over = threading.Event()

    def begin() -> None:
        own.judge = started(setup)
        judges.append(own.judge)

    def work(ids: list[str], readings: list[Any]) -> list[Record]:
        return [] if over.is_set() else [judged(own.judge, id, readings) for id in ids]

    diagnosed: Counter[str] = Counter()
    ids = [case.id for case in cases]
    first = [id for id in ids if id.startswith(READOUT)]
    readings: list[Any] = []
    threads = ThreadPoolExecutor(jobs, initializer=begin)
    try:
        # What the readouts say may explain the other cases, whichever process they are in.
        for part in (first, [id for id in ids if id not in first]):
            futures = [threads.submit(work, some, list(readings)) for some in chunks(part)]
            for future in futures:
                for record in future.result():
                    yield within_limits(record, diagnosed)
                    if record.id.startswith(READOUT) and record.diagnosis:
                        readings.append(record.diagnosis)
    finally:
        over.set()
        threads.shutdown(wait=False, cancel_futures=True)
        for judge in judges:
            judge.kill()  # this also ends the process of its target
        threads.shutdown()
        for judge in judges:
            judge.end()


def started(setup: Mapping[str, Any]) -> Program:
    text = json.dumps({**setup, "path": sys.path})
    command = (sys.executable, str(rank_start.__file__), WORKER, text)
    return Program(command, WHO, longest=MAX_LINE)


def judged(judge: Program, id: str, readings: list[Any]) -> Record:
    """Return the record of one case; raise RingspecError if the process ended or reports an error.

    ``readings``: the diagnoses of all failed readouts (cases whose results show the attention weights), which may
    explain this case.
    """
    try:
        line = judge.exchange(line_of({"id": id, "readings": readings}), math.inf)
        message = message_of(line, "the record of a case")
    except Failed as failure:
        got = "\n".join([f"at {id}: {failure}", judge.log()]).strip()
        fix = "use fewer jobs if it was killed, perhaps because memory ran out"
        raise RingspecError(
            "judging processes that run to the end", got, fix, code="failed-process"
        ) from None
    if message.get("kind") == "error":
        raise refused(message)
    return read_record(message, f"what {WHO} sent")


def chunks(ids: Sequence[str]) -> list[list[str]]:
    """Divide ids into lists. Each list goes to one process, which runs its cases in order.

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
    """Remove the named bug from a record if enough failures of its kind have a diagnosis already.

    The limit holds for all processes together.
    """
    if record.diagnosis is None or "id" not in record.diagnosis:
        return record
    kind = kind_of(record.id)
    diagnosed[kind] += 1
    if diagnosed[kind] <= MOST[kind]:
        return record
    read = {x: y for x, y in record.diagnosis.items() if x in ("reading", "explained")}
    return dataclasses.replace(record, diagnosis=read or None)
