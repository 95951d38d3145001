"""Cases spread over MPI ranks: every rank judges its part, rank 0 has the records in their order.

As in ``judges``, neighbours that share one truth stay together. Records travel as lines of a report.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from ringspec.comm.mpi import MpiLinks
from ringspec.conformance.cases.model import RunCase
from ringspec.conformance.diagnose.summary import Diagnoser
from ringspec.conformance.report.lines import read_record
from ringspec.conformance.report.records import Record
from ringspec.conformance.report.report import case_line
from ringspec.conformance.run.case import run_case
from ringspec.conformance.run.executor import close, one_more
from ringspec.conformance.run.judges import chunks, within_limits
from ringspec.conformance.target.protocol import Target

SIZE_TAG, RECORDS_TAG = 16 * 1024 + 30, 16 * 1024 + 31
FOREVER = float("inf")


def parts(cases: Sequence[RunCase], size: int) -> list[tuple[int, list[RunCase]]]:
    """(rank, cases) of each chunk, in the order of the cases: one rank after the other."""
    known = {case.id: case for case in cases}
    found = chunks(list(known))
    return [(n % size, [known[id] for id in ids]) for n, ids in enumerate(found)]


def over_ranks(
    links: MpiLinks,
    target: Target,
    cases: Sequence[RunCase],
    timeout: float | None,
    spec: str,
    diagnose: bool,
) -> Generator[Record, None, None]:
    """Called on all ranks: the records of cases, in their order, on rank 0; none on the others."""
    caller = one_more(target, timeout, spec)
    diagnoser = Diagnoser() if diagnose else None
    diagnosed: Counter[str] = Counter()
    try:
        for rank, chunk in parts(cases, links.size):
            records: list[Record] = []
            if rank == links.rank:
                records = [run_case(caller, case, diagnoser) for case in chunk]
                if rank:
                    send(links, records)
                    records = []
            elif links.rank == 0:
                records = received(links, rank)
            for record in records:
                yield within_limits(record, diagnosed)
    finally:
        close(caller)


def send(links: MpiLinks, records: list[Record]) -> None:
    """Records to rank 0, which may be busy for long."""
    data = json.dumps([case_line(record) for record in records]).encode()
    size = np.array([len(data)], np.int64).view(np.uint8)
    for tag, buffer in ((SIZE_TAG, size), (RECORDS_TAG, np.frombuffer(data, np.uint8))):
        what = f"waits until {links.name(0)} has taken the records of its cases"
        links.awaited(links.send(0, tag, buffer, what), FOREVER)


def received(links: MpiLinks, rank: int) -> list[Record]:
    """The records of the next chunk of a rank."""
    what = f"waits for the records of the cases of {links.name(rank)}"
    size = links.awaited(links.receive(rank, SIZE_TAG, 8, what), FOREVER)
    length = int(size.view(np.int64)[0])
    data = links.awaited(links.receive(rank, RECORDS_TAG, length, what), FOREVER)
    lines: list[dict[str, Any]] = json.loads(data.tobytes())
    return [read_record(line, links.name(rank)) for line in lines]
