"""Cases of the operation 'layout': integers in, integers out, judged exactly.

Each problem of :data:`PACKS` gives one case for each result: a table, positions, lengths, cu_seqlens, visible keys. The
cases are only added for a target (the program under test) that claims one of these results.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.cases.model import Judgement, Outputs, RunCase
from ringspec.conformance.diagnose.layouts import alike, expected
from ringspec.conformance.report.records import Finding
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Call

RULES = {
    "positions": ("LAYOUT-11",),
    "lengths": ("LAYOUT-10", "LAYOUT-12"),
    "cu_seqlens": ("LAYOUT-12",),
    "visible": ("LAYOUT-13",),
}


@dataclass(frozen=True)
class Pack:
    """Packed documents, and how they are distributed; ``rooms`` are their lengths with padding."""

    id: str
    reason: str
    layout: str
    workers: int
    lengths: tuple[int, ...]
    rooms: tuple[int, ...] = ()
    interleave: int = 0
    prefix: tuple[int, ...] = ()
    queries: int = 0

    @property
    def results(self) -> tuple[str, ...]:
        """The results of which cases are made."""
        padded = ("table", "positions", "lengths", "cu_seqlens")
        return (*padded, "visible") if self.queries else padded

    @property
    def terms(self) -> dict[str, Any]:
        """The terms of the call."""
        found: dict[str, Any] = {"cu_seqlens": bounds(self.lengths)}
        if self.rooms:
            found["cu_seqlens_padded"] = bounds(self.rooms)
        for name in ("interleave", "prefix", "queries"):
            if value := getattr(self, name):
                found[name] = value
        return found


def bounds(lengths: Sequence[int]) -> tuple[int, ...]:
    return (0, *itertools.accumulate(lengths))


THD = "A document's tokens end inside a chunk, so neither n // W nor the padded length is right."
DCP = "Blocks of I tokens go to the workers in turn; the last block is not full."
NAMED = (
    Pack("thd-w2", THD, "zigzag_padded", 2, (3,), (4,)),
    Pack("thd-takes-padding-w2", THD, "zigzag_padded", 2, (6,), (8,)),
    Pack("rope-thd-w2", "Positions begin anew in each document; table rows do not.", "zigzag_padded", 2, (4, 4), (4, 4)),
    Pack("prefix-w2", "One cached token, three new ones in a room of four.", "zigzag_padded", 2, (3,), (4,), prefix=(1,)),
    Pack("documents-w3", THD, "zigzag_padded", 3, (7, 0, 12, 1), (12, 6, 12, 6)),
    Pack("documents-prefix-w4", "Each document has its own prefix.", "zigzag_padded", 4, (13, 8, 5), (16, 8, 24), prefix=(5, 0, 16)),
    Pack("interleave-w2", DCP, "interleaved", 2, (5,), interleave=4, queries=1),
    Pack("requests-w2", "Each request begins with worker 0, wherever it lies in the batch.", "interleaved", 2, (3, 5), interleave=1, queries=2),
    Pack("mtp-w2", "The last queries do not see a right-aligned triangle.", "interleaved", 2, (10,), interleave=1, queries=3),
    Pack("mtp-i16-w2", "A block of 16 hides the error below 17 tokens.", "interleaved", 2, (17, 35), interleave=16, queries=3),
    Pack("empty-ranks-w4", "Some workers hold nothing.", "interleaved", 4, (3, 16), interleave=16, queries=2),
)  # fmt: skip


def covering() -> Iterator[Pack]:
    """Yield each layout with each number of workers, with documents of every remainder."""
    for workers in (1, 2, 3, 4, 8):
        for name, unit in (("zigzag", 2 * workers), ("contiguous", workers), ("striped", workers)):
            rooms = (2 * unit, unit, 3 * unit)
            lengths = (2 * unit - 1, unit, 2 * unit + 1 - unit // 2)
            id = f"{name}-padded-w{workers}"
            yield Pack(
                id,
                "A full, an almost full and a partly filled document.",
                f"{name}_padded",
                workers,
                lengths,
                rooms,
                prefix=(0, 3, 70),
            )
        for interleave in (1, 2, 16):
            block = workers * interleave
            lengths = (2 * block + 1, max(interleave - 1, 1), 3 * block - 1)
            id = f"interleaved-{interleave}-w{workers}"
            yield Pack(id, DCP, "interleaved", workers, lengths, interleave=interleave, queries=1)


PACKS = (*NAMED, *covering())


def cases() -> list[RunCase]:
    """Return all cases, those of published bugs first."""
    return [case_of(pack, result) for pack in PACKS for result in pack.results]


def case_of(pack: Pack, result: str) -> RunCase:
    """Make the case that asks for one result."""
    id = f"layout/{pack.id}/{result.replace('_', '-')}"
    needs: dict[str, Any] = {
        "operation": "layout", "passes": (result,), "layout": pack.layout, "workers": pack.workers,
    }  # fmt: skip
    if pack.prefix and result == "positions":
        needs["features"] = ("prefix",)

    def make(claims: Capabilities) -> list[Call]:
        terms = (
            pack.terms
            if result == "visible"
            else {k: v for k, v in pack.terms.items() if k != "queries"}
        )
        if result != "positions":
            terms.pop("prefix", None)
        return [Call(id, "layout", (result,), pack.workers, {}, terms, {}, pack.layout)]

    usual = ("LAYOUT-9",) if pack.layout == "interleaved" else ("LAYOUT-8",)
    return RunCase(id, pack.reason, needs, make, judge, rules=RULES.get(result, usual))


def judge(claims: Capabilities, calls: Sequence[Call], outputs: Sequence[Outputs]) -> Judgement:
    """Compare each integer; padding slots of positions are not compared."""
    [call], [output] = calls, outputs
    [result] = call.passes
    want, got = expected(call), [np.asarray(x) for x in output[result]]
    real = [x >= 0 if result == "positions" else np.ones(x.shape, bool) for x in want]
    findings = tuple(compared(result, r, got[r], want[r], real[r]) for r in range(call.workers))
    wrong = [one for one in findings if not one.ok]
    if not wrong:
        return Judgement(True, findings)
    worker = wrong[0].worker
    message = (
        f"{result} of worker {worker} is {shortened(got[worker])}, expected {shortened(want[worker])}"
        f" ({len(wrong)} of {call.workers} workers are wrong)"
    )
    names = [bug.title for bug in alike(call, got)]
    return Judgement(
        False,
        findings,
        message
        + (f"; this is what a program computes where {' or '.join(names)}" if names else ""),
    )


def compared(result: str, worker: int, got: NDArray, want: NDArray, real: NDArray) -> Finding:
    """Return the comparison of one worker's integers."""
    far = (got != want) & real
    finding = Finding(result, worker, "ok", rows=int(far.sum()), of=int(real.sum()))
    if not far.any():
        return finding
    where = tuple(int(i) for i in np.argwhere(far)[0])
    return replace(
        finding,
        kind="beyond bound",
        error=float("inf"),
        where=where,
        got=float(got[where]),
        want=float(want[where]),
    )


def shortened(x: NDArray) -> str:
    text = str(x.tolist())
    return text if len(text) <= 120 else f"{text[:117]}..."
