"""The columns of the matrix of verdicts, and what the cases of one report say about each of them.

A column is a feature. A case belongs to every column whose feature it uses, so one failing case can make several cells
of a row fail. The cases on rounding noise belong only to the column 'rounding', because a failure there says that
errors are larger than declared, not that a feature is wrong.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringspec.conformance.report.records import FAILURES, Record

FORWARD, BACKWARD = ("o", "lse"), ("dq", "dk", "dv")
# In the order of the legend. A cell has the first of failed, wrong, known, passed that applies to one of its cases.
VERDICTS = {
    "passed": "Every case of this column that was run passed. If claimed cases were not run, the row says so.",
    "wrong": "At least one case fails, and a program without ringspec confirms the failure. The column need not be the "
    "cause: a case uses several features. The row names the cause.",
    "failed": "At least one case fails, but no program without ringspec has confirmed it yet. It may be an error of the "
    "implementation, of the target, or of ringspec.",
    "known failure": "Cases fail that the target's list of expected failures contains, with the reason. All others "
    "pass.",
    "not claimed": "The implementation does not support this, or the target does not claim it. Nothing is said about "
    "it.",
    "not run": "No case of this column was run. The row says why.",
}

OTHER_NAMES = {
    "other-layouts": ("zigzag_per_document", "table"),
    "documents": ("documents", "segments"),
    "other-masks": ("dense", "bounds"),
    "grouped-heads": ("head_ratio",),
    "empty-rows": ("empty-rows", "padding-slots"),
    "sinks": ("sinks", "several-sinks"),
    "dropout": ("dropout", "keep"),
}


@dataclass(frozen=True)
class Column:
    """A feature. ``tensors``: the results that count; empty for all. ``meaning``: one sentence for the legend."""

    id: str
    group: str
    title: str
    meaning: str
    uses: Callable[[Mapping[str, Any]], bool]
    tensors: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The words with which a report gives this feature as the reason that a case is not claimed."""
        return OTHER_NAMES.get(self.id, (self.id,))


def ring(needs: Mapping[str, Any]) -> bool:
    return needs.get("operation") == "ring" and needs.get("workers", 1) >= 2


def has(kind: str, *names: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda needs: bool({*names} & {*needs.get(kind, ())})


def layout(*names: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda needs: ring(needs) and needs.get("layout") in names


def inputs(name: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda needs: needs.get("inputs") == name


def attends(needs: Mapping[str, Any]) -> bool:
    return needs.get("operation") in ("ring", "attention", "block")


PASSES = (
    Column(
        "forward",
        "pass",
        "forward",
        "o and lse, of every worker.",
        lambda needs: attends(needs) and "forward" in needs.get("passes", ()),
        FORWARD,
    ),
    Column(
        "backward",
        "pass",
        "backward",
        "dq, dk and dv, of every worker.",
        lambda needs: attends(needs) and "backward" in needs.get("passes", ()),
        BACKWARD,
    ),
)
WORKERS = (
    Column(
        "w1",
        "workers",
        "1",
        "One worker: no ring, only the kernel.",
        lambda needs: attends(needs) and needs.get("workers") == 1,
    ),
    Column(
        "w2",
        "workers",
        "2",
        "A ring of two workers. It is the same in both directions.",
        lambda needs: ring(needs) and needs["workers"] == 2,
    ),
    Column(
        "w3",
        "workers",
        "3 or more",
        "A ring of at least three workers, in which the direction matters.",
        lambda needs: ring(needs) and needs["workers"] >= 3,
    ),
)
LAYOUTS = (
    Column(
        "contiguous",
        "layout",
        "contiguous",
        "Each worker holds consecutive tokens.",
        layout("contiguous"),
    ),
    Column(
        "zigzag",
        "layout",
        "zigzag",
        "Each worker holds one chunk from the start and one from the end.",
        layout("zigzag"),
    ),
    Column("striped", "layout", "striped", "Worker r holds every W-th token.", layout("striped")),
    Column(
        "other-layouts",
        "layout",
        "other",
        "Zigzag per document, or any table of tokens.",
        layout("zigzag_per_document", "table"),
    ),
)
MASKS = (
    Column(
        "full",
        "mask",
        "none",
        "Every query attends to every key.",
        lambda needs: attends(needs) and needs.get("masks") == [],
    ),
    Column(
        "causal",
        "mask",
        "causal",
        "A query attends to keys at or before its position.",
        has("masks", "causal"),
    ),
    Column(
        "window",
        "mask",
        "window",
        "A query attends to keys within a distance.",
        has("masks", "window"),
    ),
    Column(
        "documents",
        "mask",
        "documents",
        "Packed documents do not attend to each other.",
        has("masks", "documents", "segments"),
    ),
    Column(
        "other-masks",
        "mask",
        "other",
        "A mask given as a matrix, or as bounds for each query.",
        has("masks", "dense", "bounds", "bias-minus-infinity"),
    ),
)
FORMATS = tuple(
    Column(name, "inputs", name, f"The inputs are {name}.", inputs(name))
    for name in ("float64", "float32", "bfloat16", "float16")
)
FEATURES = (
    Column(
        "grouped-heads",
        "feature",
        "grouped heads",
        "Several query heads share a key head.",
        lambda needs: needs.get("head_ratio", 1) > 1,
    ),
    Column("scale", "feature", "scale", "A given scale of the scores.", has("features", "scale")),
    Column(
        "softcap",
        "feature",
        "soft cap",
        "Scores are limited by a tanh.",
        has("features", "softcap"),
    ),
    Column(
        "sinks",
        "feature",
        "sinks",
        "A learnt score in the denominator of each row.",
        has("features", "sinks", "several-sinks"),
    ),
    Column(
        "dropout",
        "feature",
        "dropout",
        "Some weights are dropped, by a given mask or seed.",
        has("features", "dropout", "keep"),
    ),
    Column(
        "bias",
        "feature",
        "bias",
        "A matrix that is added to the scores.",
        has("features", "bias"),
    ),
    Column(
        "unequal-lengths",
        "feature",
        "unequal lengths",
        "There are more keys than queries, or fewer.",
        has("features", "unequal-lengths"),
    ),
    Column(
        "empty-rows",
        "feature",
        "empty rows",
        "Queries that attend to no key, and padding.",
        has("features", "empty-rows", "padding-slots"),
    ),
    Column(
        "dlse",
        "feature",
        "gradient of lse",
        "An upstream gradient of lse.",
        has("features", "dlse"),
    ),
)
ROUNDING = Column(
    "rounding",
    "precision",
    "rounding",
    "The errors are as small, and spread, as the declared precision predicts.",
    lambda needs: True,
)
COLUMNS = (*PASSES, *WORKERS, *LAYOUTS, *MASKS, *FORMATS, *FEATURES, ROUNDING)


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
