"""What the cases of one report say about each column of the matrix of verdicts.

A case belongs to every column whose feature it uses, so one failing case can make several cells of a row fail. The cases
on rounding noise belong only to the column 'rounding', because a failure there says that errors are larger than
declared, not that a feature is wrong.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from verdict_columns import COLUMNS, ROUNDING, Column

from ringspec.conformance.report.records import FAILURES, Record

# In the order of the legend. A cell has the worst verdict of its cases: wrong, failed, known failure, passed.
VERDICTS = {
    "passed": "Every case of this column that was run passed. If claimed cases were not run, the row says so.",
    "wrong": "At least one case fails by an error that a program without ringspec confirms. The column need not be the "
    "cause: a case uses several features. The row names the cause.",
    "failed": "At least one case fails, but no program without ringspec has confirmed it yet. It may be an error of the "
    "implementation, of the target, or of ringspec.",
    "known failure": "Cases fail that the target's list of expected failures contains, with the reason. All others "
    "pass.",
    "not claimed": "The implementation does not support this, or the target does not claim it. Nothing is said about "
    "it.",
    "not run": "No case of this column was run. The row says why.",
}


def columns_of(record: Record) -> list[Column]:
    """The columns to which a case belongs."""
    if record.id.startswith("noise/"):
        return [ROUNDING]
    return [one for one in COLUMNS if one is not ROUNDING and one.uses(record.needs)]


def wrong_tensors(record: Record) -> set[str]:
    return {one.tensor for one in record.findings if one.kind != "ok"}


def failed_in(record: Record, column: Column) -> bool:
    """Whether a failing case fails in the results that count for a column.

    A failure without a wrong tensor, such as a crash, counts in every column.
    """
    wrong = wrong_tensors(record)
    return not column.tensors or not wrong or bool(wrong & {*column.tensors})


def state_of(record: Record, column: Column, confirmed: Callable[[Record], bool]) -> str:
    """'passed', 'wrong', 'failed', 'known failure', 'not claimed' or 'not run'."""
    if record.outcome in ("not claimed", "not run"):
        return record.outcome
    if record.outcome == "pass" or not failed_in(record, column):
        return "passed"
    if record.outcome == "expected failure":
        return "known failure"
    assert record.outcome in FAILURES
    return "wrong" if confirmed(record) else "failed"


def cell(
    column: Column, records: Iterable[Record], confirmed: Callable[[Record], bool], cut: str
) -> dict[str, Any]:
    """The cell of a column as plain data: its verdict, the number of cases in each state, and why.

    ``cut``: why cases may be missing in the report; empty if none are.
    """
    mine = [(state_of(record, column, confirmed), record) for record in records]
    counts = Counter(state for state, _ in mine)
    verdict = next(
        (one for one in ("wrong", "failed", "known failure", "passed") if counts[one]), None
    )
    if verdict is not None:
        missing = counts["not run"]
        why = f"{missing} more cases were not run: {cut}" if missing else cut
    elif counts["not run"] or (cut and not counts["not claimed"]):
        verdict, why = "not run", cut or "the run ended before these cases"
    elif counts["not claimed"]:
        reasons = Counter(record.reason for state, record in mine if state == "not claimed")
        verdict, why = "not claimed", why_not(column, reasons)
    else:
        verdict, why = "not run", "the profile has no such case"
    return {"verdict": verdict, "counts": {one: counts[one] for one in VERDICTS if counts[one]}} | (
        {"why": why} if why else {}
    )


def why_not(column: Column, reasons: Counter[str]) -> str:
    """Why no case of a column is claimed: the reason of most cases, if possible one that names the column.

    >>> window = next(one for one in COLUMNS if one.id == "window")
    >>> why_not(window, Counter({"layout zigzag": 9, "mask window": 2})), why_not(window, Counter({"workers 8": 1}))
    ('mask window', 'outside the claims for other reasons, mostly: workers 8')
    """
    own = [one for one in reasons if {*column.names} & {*one.split()}]
    first = min(own or reasons, key=lambda one: (-reasons[one], one))
    return first if own else f"outside the claims for other reasons, mostly: {first}"


def cells(
    records: Sequence[Record], confirmed: Callable[[Record], bool], cut: str
) -> dict[str, dict[str, Any]]:
    """The cells of a row by the id of their column."""
    sorted_in: dict[str, list[Record]] = {column.id: [] for column in COLUMNS}
    for record in records:
        for column in columns_of(record):
            sorted_in[column.id].append(record)
    return {column.id: cell(column, sorted_in[column.id], confirmed, cut) for column in COLUMNS}
