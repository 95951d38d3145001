"""What can become of a case: disjoint outcomes, and the record of one case.

A report is made of records and of nothing else; ``ringspec.render`` reads them without this package.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

OUTCOMES = {
    "pass": "every compared value is within its bound",
    "mismatch": "a value is beyond its bound, or is NaN or infinite where it must not be",
    "wrong shape": "a tensor has another shape or another number of workers",
    "wrong dtype": "a tensor has another dtype than the case asks for",
    "missing": "a claimed tensor did not come",
    "mutated": "the target changed its inputs",
    "refused": "the target refused a case that it claims",
    "error": "the target raised an exception, or gave something that is no result",
    "crash": "the target's process ended",
    "timeout": "no answer within the time limit",
    "not claimed": "the target's capabilities do not cover the case",
    "expected failure": "failed, and the list of expected failures names it",
    "unexpected pass": "passed, though the list of expected failures names it",
    "not run": "the run ended before this case",
}
FAILURES = (
    "mismatch",
    "wrong shape",
    "wrong dtype",
    "missing",
    "mutated",
    "refused",
    "error",
    "crash",
    "timeout",
    "unexpected pass",
)


@dataclass(frozen=True)
class Finding:
    """One tensor of one worker that was compared.

    ``error``: the largest error in units of its bound (<= 1 passes), ``where``: (b, h, slot[, d]) of
    it; ``kind``: 'ok', 'beyond bound', 'NaN', 'infinite', 'finite where -inf is due', 'not zero',
    'wrong shape', 'wrong dtype', 'missing'. ``rows``: how many rows are beyond their bound, of how many.
    """

    tensor: str
    worker: int
    kind: str
    error: float = 0.0
    where: tuple[int, ...] = ()
    got: float | None = None
    want: float | None = None
    rows: int = 0
    of: int = 0


@dataclass(frozen=True)
class Record:
    """The outcome of one case, as plain data."""

    id: str
    outcome: str
    needs: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    message: str = ""
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0
    flags: tuple[str, ...] = ()
    truth: str = "exact"
    picture: dict[str, Any] | None = None
