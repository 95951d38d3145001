"""A table of problems that combine features, and how each row is fitted to what a target claims.

:mod:`ringspec.conformance.cases.pairs` makes a case from each row. A target is the program under test; its claims say
what it supports.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringspec.conformance.target.capabilities import Capabilities

PADDED = ("table", "zigzag_per_document")  # layouts that may have slots without a token
OF_RINGS = {"sinks", "several-sinks", "dlse", "padding-slots"}
EMPTYING = ("segments", "bounds", "dense", "documents", "bias-minus-infinity")


@dataclass(frozen=True)
class Row:
    """One row of the table: the claims that a problem needs.

    ``operation``: 'ring', 'block-forward' or 'block-backward'.
    """

    operation: str
    workers: int
    layout: str
    circulation: str
    direction: int
    inputs: str
    head_ratio: int
    masks: tuple[str, ...]
    features: tuple[str, ...]


def row_from(text: str) -> Row:
    """Parse a line of :data:`TABLE`."""
    ring, masks, features = (part.split() for part in text.split("|"))
    operation, workers, layout, circulation, direction, inputs, ratio = ring
    return Row(
        operation, int(workers), layout, circulation, int(direction), inputs, int(ratio),
        tuple(name for name in masks if name != "none"), tuple(features),
    )  # fmt: skip


# operation W layout circulation direction inputs H/Hkv | masks | features. Add new rows at the end:
# the number of a row is its id, and decides what replaces an unclaimed value.
TABLE = """
ring 3 zigzag_per_document kv -1 bfloat16 4 | bias-minus-infinity documents window | bias padding-slots q-offset several-sinks sinks unequal-lengths
ring 4 zigzag_per_document q -1 float32 1 | causal dense documents window | dlse q-offset scale softcap unequal-lengths
ring 3 zigzag kv 1 float64 2 | bias-minus-infinity causal segments | bias dropout positions scale unequal-lengths
ring 2 table q 1 float16 1 | bias-minus-infinity bounds dense | bias dropout empty-rows q-offset several-sinks sinks
ring 3 striped gather 1 float32 1 | causal segments window | bias empty-rows keep several-sinks sinks softcap
ring 8 table q 1 bfloat16 1 | bounds window | empty-rows keep padding-slots positions scale
ring 8 contiguous gather 1 bfloat16 2 | bias-minus-infinity dense window | bias dlse dropout empty-rows several-sinks sinks
ring 4 zigzag kv -1 float16 4 | none | dlse scale several-sinks sinks softcap
ring 3 contiguous kv -1 float64 2 | bounds dense segments | dlse positions several-sinks sinks softcap
ring 4 zigzag_per_document gather 1 float64 2 | bounds causal documents | keep padding-slots positions scale softcap
ring 8 striped q 1 float64 4 | dense segments | bias dropout positions several-sinks sinks softcap
ring 4 zigzag_per_document kv 1 float32 4 | bias-minus-infinity causal documents | bias dropout empty-rows padding-slots q-offset
ring 2 striped gather 1 float16 4 | bounds window | dlse keep unequal-lengths
ring 2 table q 1 float64 2 | causal segments | padding-slots q-offset scale softcap unequal-lengths
ring 8 striped kv -1 bfloat16 2 | none | bias keep softcap unequal-lengths
ring 1 contiguous kv 1 float16 1 | bias-minus-infinity segments | bias dropout positions several-sinks sinks softcap
ring 2 contiguous q 1 float32 1 | none | dropout positions
block-backward 1 contiguous kv 1 float64 2 | bias-minus-infinity causal | bias empty-rows keep q-offset unequal-lengths
block-forward 1 contiguous kv 1 float16 2 | bounds causal documents | empty-rows q-offset scale
ring 2 zigzag kv 1 bfloat16 2 | bounds documents window | empty-rows positions q-offset unequal-lengths
block-forward 1 contiguous kv 1 bfloat16 2 | bias-minus-infinity dense segments | bias keep softcap unequal-lengths
ring 3 table q -1 float64 1 | none | dropout padding-slots q-offset softcap
ring 1 contiguous kv 1 float32 2 | bounds causal dense | bias dlse q-offset scale
ring 4 contiguous kv 1 bfloat16 2 | causal segments | bias dlse keep softcap unequal-lengths
ring 8 zigzag q -1 float32 1 | causal dense | bias empty-rows keep unequal-lengths
block-backward 1 contiguous kv 1 float32 1 | bounds dense window | dropout positions softcap
ring 8 table gather 1 float16 4 | documents window | dlse q-offset several-sinks sinks
ring 1 contiguous kv 1 bfloat16 4 | causal dense window | empty-rows keep several-sinks sinks unequal-lengths
ring 3 contiguous kv 1 float64 1 | dense documents window | dropout q-offset scale
ring 3 table kv 1 float16 4 | causal dense | bias dropout empty-rows padding-slots q-offset
block-forward 1 contiguous kv 1 float64 1 | window | bias dropout positions
block-backward 1 contiguous kv 1 bfloat16 4 | bounds segments | dropout empty-rows scale
ring 8 contiguous gather 1 float16 4 | none | dlse dropout scale unequal-lengths
ring 4 striped gather 1 float64 1 | bounds causal documents | dropout q-offset scale sinks
ring 4 table q 1 float32 2 | none | keep padding-slots unequal-lengths
ring 8 zigzag_per_document kv -1 float16 1 | bias-minus-infinity documents | bias dlse keep padding-slots scale unequal-lengths
block-forward 1 contiguous kv 1 float32 4 | none | bias dropout
ring 1 contiguous kv 1 float64 2 | causal documents | dropout several-sinks sinks
block-backward 1 contiguous kv 1 float16 2 | none |
ring 3 zigzag gather 1 bfloat16 2 | none | bias dlse dropout q-offset
ring 1 contiguous kv 1 bfloat16 1 | none | dropout scale unequal-lengths
ring 8 striped q -1 bfloat16 2 | bias-minus-infinity causal | bias keep scale sinks
block-backward 1 contiguous kv 1 float32 4 | documents window | bias q-offset unequal-lengths
ring 2 zigzag_per_document gather 1 bfloat16 4 | causal dense documents | empty-rows padding-slots
"""
ROWS = tuple(row_from(line) for line in TABLE.strip().splitlines())


def fitted_row(one: Row, claims: Capabilities, number: int) -> Row | None:
    """Fit a row to claims: drop unclaimed masks and features, replace other unclaimed values by claimed ones.

    ``number``: the number of the row, by which one of several claimed values is chosen. Returns None for a row with a
    ring if the target claims no ring of 1 to 8 workers.

    >>> claims = Capabilities(layouts=("zigzag",), workers=(2,), features=("sinks",))
    >>> made = row_from("ring 4 striped q -1 bfloat16 2 | causal window | sinks dlse")
    >>> fitted_row(made, claims, 0)
    Row(operation='ring', workers=2, layout='zigzag', circulation='q', direction=1, inputs='float32', head_ratio=2, masks=('causal',), features=('sinks',))
    """
    operation = operation_for(one, claims, number)
    rings = None if claims.workers is None else [w for w in claims.workers if 1 <= w <= 8]
    if rings == [] and operation == "ring":
        return None
    workers = kept(one.workers, rings, number) if operation == "ring" else 1
    layouts = list(claims.layouts)
    if "documents" not in claims.masks:
        layouts = [x for x in layouts if x != "zigzag_per_document"]
    fitted = dataclasses.replace(
        one,
        operation=operation,
        workers=workers,
        # Where a value has no effect, use the first claimed one, so that equal problems are recognised.
        layout=kept(one.layout if workers > 1 else "contiguous", layouts, number * (workers > 1)),
        circulation=kept(one.circulation if workers > 1 else "kv", claims.circulations, number),
        inputs=kept(one.inputs, claims.formats, number),
        head_ratio=kept(one.head_ratio, claims.head_ratios, number),
    )
    turns = workers > 2 and fitted.circulation != "gather"
    fitted = dataclasses.replace(
        fitted, direction=kept(one.direction if turns else 1, claims.directions, number)
    )
    return with_terms(fitted, claims)


def kept(value: Any, claimed: Sequence[Any] | None, number: int) -> Any:
    """Return ``value`` if it is claimed, else the claimed value that ``number`` selects.

    ``claimed``: the claimed values; None: all.
    """
    if claimed is None or value in claimed or not claimed:
        return value
    return claimed[number % len(claimed)]


def operation_for(one: Row, claims: Capabilities, number: int) -> str:
    """Return the operation of a row; a ring becomes a block if the target claims blocks and no rings."""
    blocks = [name for name in ("block-forward", "block-backward") if name in claims.operations]
    rings = any(name.startswith("ring-") for name in claims.operations)
    if one.operation == "ring" and not rings and blocks:
        return blocks[number % len(blocks)]
    return one.operation


def with_terms(one: Row, claims: Capabilities) -> Row:
    """Limit a row to claimed masks and features.

    If a feature of the row has no effect without a mask, a claimed mask is added.
    """
    ring = one.operation == "ring"
    masks = {name for name in one.masks if name in claims.masks}
    if claims.only_causal:
        masks.add("causal")
    if ring and one.layout == "zigzag_per_document":
        masks = (masks | {"documents"}) - {"segments"}
    if "bias" not in claims.features:
        masks.discard("bias-minus-infinity")
    features = {name for name in one.features if name in claims.features}
    if "sinks" not in claims.features:
        features.discard("several-sinks")
    if not ring:
        features -= OF_RINGS
    if not ring or one.layout not in PADDED or one.workers == 1:
        features.discard("padding-slots")
    reads_positions = masks & {"causal", "window"} or "dropout" in features
    if features & {"positions", "q-offset"} and not reads_positions:
        masks |= {name for name in claims.masks if name in ("causal", "window")}
        if "dropout" in claims.features and not masks & {"causal", "window"}:
            features = (features | {"dropout"}) - {"keep"}
    by_offset = "q-offset" in features and masks & {"causal", "window"}
    if "empty-rows" in features and not masks & set(EMPTYING) and not by_offset:
        masks |= {name for name in ("bounds", "dense", "segments") if name in claims.masks}
    return dataclasses.replace(one, masks=tuple(sorted(masks)), features=tuple(sorted(features)))
