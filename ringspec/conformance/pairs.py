"""Pairs of features: small problems in which every two claims that can meet do meet.

:data:`ROWS` is a covering array: for every two values of operation, layout, circulation, direction,
number of workers, format, head ratio, mask terms and features that can occur in one problem, some
golden case or some row has both, and both change its result. tests/conformance/test_pairs.py computes this.

A target that lacks a value of a row still gets the row: the value is left out or replaced by one that
it claims. What it does claim stays, so that the rows cover all pairs of any target's claims. No default
scale of these problems is a power of two, so that a missing scale is no factor of 2.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from ringspec.conformance.calls import backward_alone, call_of, forward_alone
from ringspec.conformance.capabilities import Capabilities, why_not
from ringspec.conformance.cases import Judgement, Outputs, RunCase
from ringspec.conformance.drawing import ClaimsKey, Seen, judged, shuffled, tensors_of
from ringspec.conformance.golden import passes_for
from ringspec.conformance.target import Call
from ringspec.vectors.case import Case, Patch, Ring
from ringspec.vectors.catalogue import build
from ringspec.vectors.catalogue.build import bias_of, coins, put

HEADS = 4
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "f32", "float64": "f64"}
OFFSET, SCALE, SOFTCAP, DROPOUT = 2, 0.3, 1.5, 0.25
LEFT, RIGHT = 4, 2  # sides of the window
BEFORE, AFTER = 3, 5  # reach of the key bounds
PADDED = ("table", "zigzag_per_document")  # layouts that may have slots without a token
OF_RINGS = {"sinks", "several-sinks", "dlse", "padding-slots"}
EMPTYING = ("segments", "bounds", "dense", "documents", "bias-minus-infinity")
HEAD_DIMS = (6, 12, 10, 3, 5, 7, 24, 48, 96, 20, 40, 80, 32, 128, 8, 64, 16, 4)
MOST_TOKENS = 96


@dataclass(frozen=True)
class Row:
    """One problem by its claims; ``operation`` is 'ring', 'block-forward' or 'block-backward'."""

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
    """A row from its line of :data:`TABLE`."""
    ring, masks, features = (part.split() for part in text.split("|"))
    operation, workers, layout, circulation, direction, inputs, ratio = ring
    return Row(
        operation, int(workers), layout, circulation, int(direction), inputs, int(ratio),
        tuple(name for name in masks if name != "none"), tuple(features),
    )  # fmt: skip


# operation W layout circulation direction inputs H/Hkv | masks | features. New rows are added at the
# end: the number of a row is its id, and chooses what replaces an unclaimed value.
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


def cases(profile: str = "core") -> list[RunCase]:
    """One case for each row, ``pairs/000`` and so on; none in 'smoke'."""
    if profile == "smoke":
        return []
    return [pair_case(f"pairs/{n:03}", n) for n in range(len(ROWS))]


def pair_case(id: str, number: int) -> RunCase:
    def fitted(claims: Capabilities) -> Case | None:
        return fitted_case(number, ClaimsKey(claims))

    def claimed(claims: Capabilities) -> str | None:
        case = fitted(claims)
        if case is None:
            return f"workers {ROWS[number].workers}"
        if is_repeated(number, ClaimsKey(claims)):
            return "what is left of its features is in another case of pairs"
        if max(case.requires["lengths"]) > MOST_TOKENS:
            return f"no ring of at most {MOST_TOKENS} tokens"
        return why_not(claims, case.requires | {"passes": passes_for(case, claims)})

    def needs(claims: Capabilities) -> dict[str, Any]:
        case = fitted(claims)
        return {} if case is None else case.requires

    def make(claims: Capabilities) -> list[Call]:
        case = fitted(claims)
        assert case is not None
        return [call_for(case, claims)]

    def judge(claims: Capabilities, calls: Sequence[Call], outputs: Sequence[Outputs]) -> Judgement:
        case = fitted(claims)
        assert case is not None
        return judged(Seen(claims, (case,), tuple(calls), tuple(outputs)))

    everything = case_of(ROWS[number], id)
    return RunCase(
        id,
        "Two features that are right alone can be wrong together.",
        everything.requires,
        make,
        judge,
        rules=("MASK-9",),
        claimed=claimed,
        narrowed=needs,
    )


def call_for(case: Case, claims: Capabilities) -> Call:
    """The call of a case with its own circulation and direction; of passes those that are claimed."""
    tensors, passes = tensors_of(case), passes_for(case, claims)
    call = call_of(case, tensors)
    if passes == case.passes:
        return call
    return forward_alone(call) if passes == ("forward",) else backward_alone(call, case, tensors)


@lru_cache(maxsize=1024)
def fitted_case(number: int, claims: ClaimsKey) -> Case | None:
    """The problem of a row with nothing that a target does not claim; None: no ring is left."""
    found = fitted_row(ROWS[number], claims.claims, number)
    if found is None:
        return None
    return case_of(found, f"pairs/{number:03}", claims.claims)


def fitted_row(one: Row, claims: Capabilities, number: int) -> Row | None:
    """The row with its unclaimed values left out or, where there must be one, replaced.

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
        # Where a value changes nothing it is the first one claimed, so that equal problems are seen.
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
    """The value where it is claimed, else one that is; None: any is."""
    if claimed is None or value in claimed or not claimed:
        return value
    return claimed[number % len(claimed)]


def operation_for(one: Row, claims: Capabilities, number: int) -> str:
    """A target of blocks alone gets the rows of rings as blocks."""
    blocks = [name for name in ("block-forward", "block-backward") if name in claims.operations]
    rings = any(name.startswith("ring-") for name in claims.operations)
    if one.operation == "ring" and not rings and blocks:
        return blocks[number % len(blocks)]
    return one.operation


def with_terms(one: Row, claims: Capabilities) -> Row:
    """The row with the masks and features that are claimed and can be had together."""
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


@lru_cache(maxsize=1024)
def is_repeated(number: int, claims: ClaimsKey) -> bool:
    """Whether an earlier row has become the same problem for these claims."""
    own = fitted_row(ROWS[number], claims.claims, number)
    earlier = (fitted_row(ROWS[n], claims.claims, n) for n in range(number))
    return any(one == own for one in earlier)


# The problem of a row ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Lengths and the position of each token; a query's own index is always a key that it may see."""

    queries: int
    keys: int
    position_q: tuple[int, ...]
    position_k: tuple[int, ...]


def case_of(one: Row, id: str, claims: Capabilities | None = None) -> Case:
    """The problem of a row; ``claims`` choose head dimensions and lengths where they limit them."""
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
        neighbours = tuple(t ^ 1 for t in range(keys))  # of keys alone: q_offset gives the queries'
        return Sizes(queries, keys, tuple(t + OFFSET for t in range(queries)), neighbours)
    if "positions" in one.features:
        shuffle = [(5 * t + 2) % keys for t in range(keys)]
        return Sizes(queries, keys, tuple(shuffle[:queries]), tuple(shuffle))
    offset = offset_of(one, queries, keys)
    return Sizes(queries, keys, tuple(t + offset for t in range(queries)), tuple(range(keys)))


def offset_of(one: Row, queries: int, keys: int) -> int:
    """q_offset: 2, or what leaves rows without keys where nothing else of the row does."""
    if "q-offset" not in one.features:
        return 0
    if "empty-rows" not in one.features or emptied_by(one) is not None:
        return OFFSET
    if "window" in one.masks:
        return keys - queries + 2 * LEFT
    return -OFFSET if "causal" in one.masks else OFFSET


def emptied_by(one: Row) -> str | None:
    """The mask term that leaves a row without keys whatever the positions are."""
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
    """A layout without a pattern; with ``padded`` one slot of each worker holds no token."""
    rows = shuffled(length, workers)
    if not padded:
        return rows
    n = length // workers
    return tuple((*r[: w % n], -1, *r[w % n :]) for w, r in enumerate(rows))


def masks_of(one: Row, sizes: Sizes) -> dict[str, Any]:
    """Terms and tensors of the mask; every query sees the key of its own index, or is the empty row."""
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
    """Three documents, or two of whole chunks where no slot may be padding."""
    if one.layout == "zigzag_per_document" and "padding-slots" not in one.features:
        half = sizes.queries // 2
        if empty:  # what lies after the last document belongs to none
            return {"cu_seqlens": (0, half), "cu_seqlens_k": (0, half)}
        return {"cu_seqlens": (0, half, 2 * half), "cu_seqlens_k": (0, half, sizes.keys)}
    end_q, end_k = (sizes.queries - 1, sizes.keys - 1) if empty else (sizes.queries, sizes.keys)
    return {"cu_seqlens": (0, 5, 7, end_q), "cu_seqlens_k": (0, 5, 7, end_k)}


def segments(sizes: Sizes, empty: bool) -> dict[str, Any]:
    """Three segments whose tokens alternate; the empty row belongs to none."""
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
    """Where the bias is -inf: the key before every third query's own, and all keys of the empty row."""
    if "bias-minus-infinity" not in one.masks:
        return ()
    hidden = [put(-math.inf, 0, None, i, i - 1) for i in range(1, sizes.queries, 3)]
    if "empty-rows" in one.features and emptied_by(one) == "bias-minus-infinity":
        hidden.append(put(-math.inf, 0, None, 1, None))
    return tuple(hidden)
