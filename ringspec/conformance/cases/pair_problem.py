"""Make the problem for one row of a table of feature pairs: lengths, positions, masks, features.

:mod:`ringspec.conformance.cases.pair_rows` contains the table. Each row lists masks and features that occur together in
one problem. One feature makes a query row empty: that query sees no key. All other queries see at least the key with
their own index.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ringspec.conformance.cases.pair_rows import EMPTYING, Row
from ringspec.conformance.cases.problems import shuffled
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.vectors.catalogue import build
from ringspec.vectors.catalogue.build import bias_of, coins, put
from ringspec.vectors.format.case import Case, Patch, Ring

HEADS = 4
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "f32", "float64": "f64"}
OFFSET, SCALE, SOFTCAP, DROPOUT = 2, 0.3, 1.5, 0.25
LEFT, RIGHT = 4, 2  # sides of the window
BEFORE, AFTER = 3, 5  # reach of the key bounds
HEAD_DIMS = (6, 12, 10, 3, 5, 7, 24, 48, 96, 20, 40, 80, 32, 128, 8, 64, 16, 4)


@dataclass(frozen=True)
class Sizes:
    """The lengths and positions of queries and keys.

    They are such that every mask can let each query see the key with its own index.
    """

    queries: int
    keys: int
    position_q: tuple[int, ...]
    position_k: tuple[int, ...]


def case_of(one: Row, id: str, claims: Capabilities | None = None) -> Case:
    """Make the problem of a row, with head dimensions and lengths that the target claims to support."""
    limits = Capabilities() if claims is None else claims
    sizes = sizes_of(one, limits)
    given: dict[str, Any] = masks_of(one, sizes) | features_of(one, sizes)
    D = next((d for d in HEAD_DIMS if limits.head_dims is None or d in limits.head_dims), 6)
    Dv = D + 1
    if limits.value_dim_equals_head_dim:
        Dv = D
    elif limits.value_dims is not None and Dv not in limits.value_dims:
        Dv = next((d for d in HEAD_DIMS if d in limits.value_dims), D)
    given |= {
        "Sq": sizes.queries, "Sk": sizes.keys, "H": HEADS, "Hkv": HEADS // one.head_ratio, "D": D,
        "Dv": Dv, "dtype": DTYPES[one.inputs],
    }  # fmt: skip
    if one.operation == "block-forward":
        return build.block_forward(id, "", "", **given)
    if one.operation == "block-backward":
        return build.block_backward(id, "", "", **given)
    return build.case(id, "", "", operation="ring", ring=ring_of(one, sizes), **given)


def sizes_of(one: Row, claims: Capabilities) -> Sizes:
    workers = one.workers if one.operation == "ring" else 1
    step = 2 * workers * math.lcm(2, claims.tokens_multiple) // 2
    queries = step * -(-12 // step)
    if one.layout == "zigzag_per_document":
        queries = max(queries, 2 * step)
    keys = 2 * queries if "unequal-lengths" in one.features else queries
    if {"positions", "q-offset"} <= set(one.features):
        neighbours = tuple(
            t ^ 1 for t in range(keys)
        )  # only of keys: q_offset sets the positions of queries
        return Sizes(queries, keys, tuple(t + OFFSET for t in range(queries)), neighbours)
    if "positions" in one.features:
        shuffle = [(5 * t + 2) % keys for t in range(keys)]
        return Sizes(queries, keys, tuple(shuffle[:queries]), tuple(shuffle))
    offset = offset_of(one, queries, keys)
    return Sizes(queries, keys, tuple(t + offset for t in range(queries)), tuple(range(keys)))


def offset_of(one: Row, queries: int, keys: int) -> int:
    """Return q_offset. If query rows must be empty and no mask can do that alone, the offset makes them empty."""
    if "q-offset" not in one.features:
        return 0
    if "empty-rows" not in one.features or emptied_by(one) is not None:
        return OFFSET
    if "window" in one.masks:
        return keys - queries + 2 * LEFT
    return -OFFSET if "causal" in one.masks else OFFSET


def emptied_by(one: Row) -> str | None:
    """Return the first mask term of the row that can empty a query row, whatever the positions; else None."""
    return next((name for name in EMPTYING if name in one.masks), None)


def ring_of(one: Row, sizes: Sizes) -> Ring:
    tables: dict[str, Any] = {}
    if one.layout == "table":
        padded = "padding-slots" in one.features
        tables = {
            "table_q": table(sizes.queries, one.workers, padded),
            "table_k": table(sizes.keys, one.workers, padded),
        }
    return Ring(one.workers, one.layout, one.circulation, one.direction, **tables)


def table(length: int, workers: int, padded: bool) -> tuple[tuple[int, ...], ...]:
    """Return an irregular layout table [W, n]; if ``padded``, one entry of each row is -1, which means no token."""
    rows = shuffled(length, workers)
    if not padded:
        return rows
    n = length // workers
    return tuple((*r[: w % n], -1, *r[w % n :]) for w, r in enumerate(rows))


def masks_of(one: Row, sizes: Sizes) -> dict[str, Any]:
    """Return the terms and tensors of the masks that the row lists."""
    empties = emptied_by(one) if "empty-rows" in one.features else None
    made: dict[str, Callable[[bool], dict[str, Any]]] = {
        "causal": lambda empty: {"causal": True},
        "window": lambda empty: {"window": (LEFT, RIGHT)},
        "documents": partial(documents, one, sizes),
        "segments": partial(segments, sizes),
        "bounds": partial(bounds, sizes),
        "dense": partial(dense, sizes),
        "bias-minus-infinity": lambda empty: {},  # the bias is a feature
    }
    given: dict[str, Any] = {}
    for name in one.masks:
        given |= made[name](name == empties)
    return given


def documents(one: Row, sizes: Sizes, empty: bool) -> dict[str, Any]:
    """Return the boundaries of three documents, or of two halves.

    The layout 'zigzag_per_document' needs halves, unless its blocks are padded. If ``empty``, the last tokens belong to
    no document.
    """
    if one.layout == "zigzag_per_document" and "padding-slots" not in one.features:
        half = sizes.queries // 2
        if empty:  # tokens after the last document belong to none
            return {"cu_seqlens": (0, half), "cu_seqlens_k": (0, half)}
        return {"cu_seqlens": (0, half, 2 * half), "cu_seqlens_k": (0, half, sizes.keys)}
    end_q, end_k = (sizes.queries - 1, sizes.keys - 1) if empty else (sizes.queries, sizes.keys)
    return {"cu_seqlens": (0, 5, 7, end_q), "cu_seqlens_k": (0, 5, 7, end_k)}


def segments(sizes: Sizes, empty: bool) -> dict[str, Any]:
    """Return segment ids of the tokens, from three segments in turn; the token of an empty row has id -1."""
    rows = [t // 2 % 3 for t in range(sizes.queries)]
    if empty:
        rows[1] = -1
    return {"segments_q": tuple(rows), "segments_k": tuple(t // 2 % 3 for t in range(sizes.keys))}


def bounds(sizes: Sizes, empty: bool) -> dict[str, Any]:
    low = [max(0, p - BEFORE) for p in sizes.position_q]
    high = [p + AFTER for p in sizes.position_q]
    if empty:
        high[1] = low[1]
    return {"bound_min": tuple(low), "bound_max": tuple(high)}


def dense(sizes: Sizes, empty: bool) -> dict[str, Any]:
    own = [put(True, 0, None, i, i) for i in range(sizes.queries)]
    if empty:
        own.append(put(False, 0, None, 1, None))
    return {"mask": coins(96, 1, HEADS, sizes.queries, sizes.keys, patches=tuple(own))}


def features_of(one: Row, sizes: Sizes) -> dict[str, Any]:
    names, pairs = one.features, (sizes.queries, sizes.keys)
    given: dict[str, Any] = {}
    if "bias" in names or "bias-minus-infinity" in one.masks:
        given["bias"] = bias_of(1, HEADS, *pairs, patches=hidden_pairs(one, sizes))
    if "softcap" in names:
        given["softcap"] = SOFTCAP
    if "sinks" in names or "several-sinks" in names:
        several = (0.5, -1.25) if "several-sinks" in names else (0.5,)
        given["sinks"] = tuple(tuple(x + h / 4 for x in several) for h in range(HEADS))
    if "dropout" in names or "keep" in names:
        given["dropout_p"] = DROPOUT
        if "keep" in names:
            given["keep"] = coins(64, 1, HEADS, *pairs)
        else:
            given["dropout_seed"] = 77
    if "dlse" in names:
        given["dlse"] = True
    if "q-offset" in names:
        given["q_offset"] = sizes.position_q[0]
    elif "positions" in names:
        given["positions_q"] = sizes.position_q
    if "positions" in names:
        given["positions_k"] = sizes.position_k
    if "scale" in names:
        given["scale"] = SCALE
    return given


def hidden_pairs(one: Row, sizes: Sizes) -> tuple[Patch, ...]:
    """Return where the bias is -inf: for every third query at the key before its own.

    If the bias is to make a row empty, it is also -inf in that whole row.
    """
    if "bias-minus-infinity" not in one.masks:
        return ()
    hidden = [put(-math.inf, 0, None, i, i - 1) for i in range(1, sizes.queries, 3)]
    if "empty-rows" in one.features and emptied_by(one) == "bias-minus-infinity":
        hidden.append(put(-math.inf, 0, None, 1, None))
    return tuple(hidden)
