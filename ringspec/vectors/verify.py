"""Derive the cases of a set again, and compare the bytes with those in the set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ringspec.errors import RingspecError, UndecidedError
from ringspec.vectors.generate import derive, matching
from ringspec.vectors.processes import each
from ringspec.vectors.sets.diff import FieldChange, TensorChange, diff_case
from ringspec.vectors.sets.stored import VectorSet

__all__ = ["CaseReport", "verify"]

OUTCOMES = ("ok", "differs", "undecided", "refused", "withdrawn")
FAILURES = ("differs", "undecided", "refused")


@dataclass(frozen=True)
class CaseReport:
    """The result of deriving the case ``id`` again.

    ``outcome`` is "ok", "differs", "undecided", "refused" or "withdrawn". "differs": ``fields`` of case.json, such as
    digests, or stored ``tensors`` are different; their ``old`` value is in the set, their ``new`` value is derived.
    "undecided": a result cannot be rounded with certainty. "refused": the case cannot be derived, and ``message`` says
    why. "withdrawn": the case is no longer used and was not derived.
    """

    id: str
    outcome: str
    fields: tuple[FieldChange, ...] = ()
    tensors: tuple[TensorChange, ...] = ()
    message: str = ""

    @property
    def failed(self) -> bool:
        """Whether the outcome is neither "ok" nor "withdrawn"."""
        return self.outcome in FAILURES


def verify(
    vectors: VectorSet,
    *,
    only: str | None = None,
    jobs: int = 1,
    progress: Callable[[int, int, str], None] | None = None,
) -> tuple[CaseReport, ...]:
    """Derive the cases of a set again, compare them with the stored cases, and return a report per case, sorted by id.

    ``only``: a pattern of ids (None: all). ``jobs`` processes work at the same time, and ``progress(done, total, id)``
    is called after each case. The cache is not used. Files are compared with the manifest when they are read;
    ``check_set`` checks everything else about the format of the set.
    """
    cases = matching(tuple(vectors), only)
    # Without the flags that the set may have read, which the other processes do not need.
    plain = VectorSet(vectors.path, vectors.manifest)
    reports = []
    for report in each(verify_case, [(plain, case.id) for case in cases], jobs):
        reports.append(report)
        if progress is not None:
            progress(len(reports), len(cases), report.id)
    return tuple(reports)


def verify_case(which: tuple[VectorSet, str]) -> CaseReport:
    """Derive one case of a set again and compare it with the stored one; ``which`` is (set, id)."""
    vectors, id = which
    case, stored = vectors.case(id), vectors.tensors(id)
    if case.withdrawn is not None:
        return CaseReport(id, "withdrawn", message=case.withdrawn.reason)
    try:
        derived = derive(case)
    except UndecidedError as error:
        return CaseReport(id, "undecided", message=str(error))
    except RingspecError as error:
        return CaseReport(id, "refused", message=str(error))
    change = diff_case(id, case, stored, derived.case, derived.tensors or {})
    same = not (change.fields or change.tensors)
    return CaseReport(id, "ok" if same else "differs", change.fields, change.tensors)
