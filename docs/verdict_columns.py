"""The columns of the matrix of verdicts: features, and which cases use them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

FORWARD, BACKWARD = ("o", "lse"), ("dq", "dk", "dv")
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
