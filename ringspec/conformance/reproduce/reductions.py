"""Reductions: functions that yield simpler versions of a given problem, the smallest first.

Each simpler problem has a name that says what changed. It may be invalid, or need something that the program under test
does not support; the caller checks this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.cases.calls import (
    OF_KEYS,
    OF_QUERIES,
    PAIRS,
    POSITIONS,
    QUERY_ROWS,
    SEGMENTS,
)
from ringspec.conformance.reproduce.explicit import Explicit, is_number
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Call
from ringspec.formats import round_to
from ringspec.problem.options import default_scale
from ringspec.vectors.format.case import Ring

ROWS = (*QUERY_ROWS, *SEGMENTS[1:], *POSITIONS)
MOST_CHOICES = 4  # up to this many batch entries or heads, each is tried separately
MOST_ELEMENTS = 48  # up to this size of a tensor, its elements are simplified one by one
OPTIONAL = (
    ("positions", POSITIONS),
    ("bounds", ("bound_min", "bound_max")),
    ("segments", SEGMENTS),
    ("documents", ("cu_seqlens", "cu_seqlens_k")),
    ("the mask", ("mask",)),
    ("keep and dropout", ("keep", "dropout_p", "dropout_seed")),
    ("bias", ("bias",)),
    ("sinks", ("sinks",)),
    ("dlse", ("dlse",)),
    ("softcap", ("softcap",)),
    ("q_offset", ("q_offset",)),
    ("the window", ("window",)),
    ("causal", ("causal",)),
)
Named = tuple[str, Explicit]
# Gets the problem, the call that was made from it, and the claims of the target.
Reduction = Callable[[Explicit, Call, Capabilities], Iterator[Named]]


def workers(problem: Explicit, call: Call, claims: Capabilities) -> Iterator[Named]:
    """Keep only the first workers and their tokens."""
    for count in fewer(problem.workers, claims.workers):
        yield f"workers: {count}", cut_tokens(problem, call, count)


def tokens(problem: Explicit, call: Call, claims: Capabilities) -> Iterator[Named]:
    """Keep only the first or the last tokens of each worker."""
    assert call.index_q is not None and call.index_k is not None
    of_q, of_k = call.index_q.shape[1], call.index_k.shape[1]
    zigzag = problem.ring is not None and problem.ring.layout == "zigzag"
    unit = int(np.lcm(claims.tokens_multiple, 2 if zigzag else 1))
    sizes = [(n, n) for n in fewer(min(of_q, of_k) + (of_q != of_k), None, unit)]
    if of_q != of_k:
        sizes += [(of_q, n) for n in fewer(of_k, None, unit)]
        sizes += [(n, of_k) for n in fewer(of_q, None, unit)]
    for n_q, n_k in sizes:
        for slots_q, slots_k in (
            (slice(0, n_q), slice(0, n_k)),
            (slice(of_q - n_q, of_q), slice(of_k - n_k, of_k)),
        ):
            made = cut_tokens(problem, call, problem.workers, slots_q, slots_k)
            yield f"tokens a worker: {n_q}" + ("" if n_q == n_k else f", keys: {n_k}"), made


def layout(problem: Explicit, call: Call, claims: Capabilities) -> Iterator[Named]:
    """Change the layout to contiguous."""
    if problem.ring is not None and problem.ring.layout != "contiguous":
        ring = dataclasses.replace(
            problem.ring, layout="contiguous", table_q=None, table_k=None
        )  # fmt: skip
        yield "layout contiguous", dataclasses.replace(problem, ring=ring)


def batch(problem: Explicit, call: Call, claims: Capabilities) -> Iterator[Named]:
    """Keep fewer entries of the batch."""
    for count in fewer(problem.shape.B, claims.batch):
        for entries in chosen(problem.shape.B, count):
            tensors = dict(problem.tensors)
            for name, x in tensors.items():
                shared = name == "sinks" or x.ndim == 1 or len(x) == 1
                tensors[name] = x if shared else x[entries]
            yield f"batch of {count}", dataclasses.replace(problem, tensors=tensors)


def heads(problem: Explicit, call: Call, claims: Capabilities) -> Iterator[Named]:
    """Keep fewer key heads, then fewer query heads per key head."""
    shape = problem.shape
    group = shape.H // shape.Hkv
    for count in fewer(shape.Hkv, unit=claims.kv_heads_unit(problem.workers)):
        for kept in chosen(shape.Hkv, count):
            yield f"key heads: {count}", cut_heads(problem, kept, range(group))
    for count in fewer(group, claims.head_ratios):
        for members in chosen(group, count):
            made = cut_heads(problem, range(shape.Hkv), members)
            yield f"query heads of a key head: {count}", made


def dimensions(problem: Explicit, call: Call, claims: Capabilities) -> Iterator[Named]:
    """Keep fewer dimensions of q and k, of v and dy, or of all four tensors."""
    of_k, of_v = problem.shape.D, problem.shape.Dv
    for d in fewer(min(of_k, of_v) + (of_k != of_v), claims.head_dims):
        yield f"D = Dv = {d}", cut_dimensions(problem, d, d)
    if of_k != of_v:
        for d in fewer(of_k, claims.head_dims):
            yield f"D = {d}", cut_dimensions(problem, d, of_v)
        for d in fewer(of_v, claims.value_dims):
            yield f"Dv = {d}", cut_dimensions(problem, of_k, d)


def passes(problem: Explicit, call: Call, claims: Capabilities) -> Iterator[Named]:
    """Keep only the forward pass."""
    if problem.operation == "ring" and call.passes == ("forward", "backward"):
        tensors = {name: x for name, x in problem.tensors.items() if name not in ("dy", "dlse")}
        made = dataclasses.replace(problem, passes=("forward",), tensors=tensors)
        yield "only the forward pass", made


def terms(problem: Explicit, call: Call, claims: Capabilities) -> Iterator[Named]:
    """Leave out a mask or a feature; then try a smaller window, one sink per head, or the default scale."""
    for what, names in OPTIONAL:
        if any(name in problem.terms or name in problem.tensors for name in names):
            yield f"without {what}", without(problem, names)
    yield from smaller_windows(problem)
    sinks = problem.tensors.get("sinks")
    if sinks is not None and sinks.shape[1] > 1:
        one = {**problem.tensors, "sinks": sinks[:, :1]}
        yield "one sink per head", dataclasses.replace(problem, tensors=one)
    if not problem.default_scale:
        usual = {**problem.terms, "scale": default_scale(problem.shape.D)}
        yield "the default scale", dataclasses.replace(problem, terms=usual)


def smaller_windows(problem: Explicit) -> Iterator[Named]:
    """Make one side of the window smaller."""
    window: tuple[int | None, ...] = problem.terms.get("window") or ()
    for side in range(len(window)):
        for length in fewer((window[side] or 0) + 1):
            sizes = tuple(length - 1 if i == side else old for i, old in enumerate(window))
            made = dataclasses.replace(problem, terms={**problem.terms, "window": sizes})
            yield f"window {sizes}", made


def numbers(problem: Explicit, call: Call, claims: Capabilities) -> Iterator[Named]:
    """Simplify the numbers of a tensor.

    Tried are: all 0, a single 1, all 1, rounded numbers, and then changes of one element at a time.
    """
    for name, x in reversed(list(problem.tensors.items())):
        if is_number(name):
            for what, y in (*simple(x), *one_by_one(x)):
                there = np.where(np.isneginf(x), x, y)  # a masked pair stays masked
                made = {**problem.tensors, name: stored(problem, name, there)}
                yield f"{name}: {what}", dataclasses.replace(problem, tensors=made)


def simple(x: NDArray) -> Iterator[tuple[str, NDArray]]:
    yield "0", np.zeros_like(x)
    for i in range(min(x.size, MOST_CHOICES)):
        one_hot = np.zeros_like(x)
        one_hot.flat[i] = 1.0
        yield "a single 1", one_hot
    yield "1", np.ones_like(x)
    yield "whole numbers", np.round(x)
    yield "halves", np.round(2 * x) / 2


def one_by_one(x: NDArray) -> Iterator[tuple[str, NDArray]]:
    if x.size > MOST_ELEMENTS:
        return
    for i in np.flatnonzero(x):
        for value in (0.0, 1.0, float(np.round(x.flat[i]))):
            y = x.copy()
            y.flat[i] = value
            yield "an element", y


def stored(problem: Explicit, name: str, x: NDArray) -> NDArray:
    """Round numbers to the format of the input ``name``."""
    narrow = name in ("q", "k", "v", "dy")
    return round_to(x, problem.formats.inputs if narrow else problem.formats.statistics)


REDUCTIONS: tuple[Reduction, ...] = (
    workers, tokens, batch, heads, dimensions, passes, layout, terms, numbers,
)  # fmt: skip


def fewer(now: int, claimed: Sequence[int] | None = None, unit: int = 1) -> list[int]:
    """Return counts below ``now`` that are multiples of ``unit``, smallest first.

    They are taken from ``claimed``, or else from a list of round numbers.

    >>> fewer(12), fewer(12, (4, 8, 16)), fewer(12, None, 4), fewer(1)
    ([1, 2, 3, 4, 6, 8, 11], [4, 8], [4, 8], [])
    """
    some = claimed or {1, 2, 3, 4, 8, 16, 32, 64, now // 2, now - 1}
    return sorted({n // unit * unit for n in some if unit <= n < now})


def chosen(now: int, count: int) -> list[list[int]]:
    """Return lists of the indices to keep if ``count`` of ``now`` entries remain.

    If one of a few remains, each single entry is tried; otherwise only the first ``count`` entries.
    """
    if count == 1 and now <= MOST_CHOICES:
        return [[i] for i in range(now)]
    return [list(range(count))]


def cut_tokens(
    problem: Explicit,
    call: Call,
    count: int,
    slots_q: slice = slice(None),
    slots_k: slice = slice(None),
) -> Explicit:
    """Keep only the first ``count`` workers, and of their blocks the slots in ``slots_q`` and ``slots_k``.

    A slot is a place in a worker's block. The remaining tokens are renumbered in order.
    """
    assert call.index_q is not None and call.index_k is not None
    table_q, table_k = call.index_q[:count, slots_q], call.index_k[:count, slots_k]
    of_q, of_k = (np.sort(table[table >= 0]) for table in (table_q, table_k))
    tensors = {name: rows_left(name, x, of_q, of_k) for name, x in problem.tensors.items()}
    if "positions_k" not in tensors:
        for name in ("bound_min", "bound_max"):
            if name in tensors:
                tensors[name] = np.searchsorted(of_k, tensors[name]).astype(np.int64)
    left = {**problem.terms, **documents_left(problem.terms, of_q, of_k)}
    ring = problem.ring
    if ring is not None:
        ring = Ring(count, ring.layout, ring.circulation, ring.direction)
        if ring.layout == "table":
            again = (numbered(table_q, of_q), numbered(table_k, of_k))
            ring = dataclasses.replace(ring, table_q=again[0], table_k=again[1])
    return dataclasses.replace(problem, ring=ring, terms=left, tensors=tensors)


def rows_left(name: str, x: NDArray, of_q: NDArray, of_k: NDArray) -> NDArray:
    """Return the part of a global tensor that belongs to the queries ``of_q`` and the keys ``of_k``."""
    if name in PAIRS:
        x = x if x.shape[2] == 1 else x[:, :, of_q]
        return x if x.shape[3] == 1 else x[..., of_k]
    if name in OF_QUERIES or name in OF_KEYS:
        return x[:, :, of_q if name in OF_QUERIES else of_k]
    if name in ROWS:
        return x[..., of_q if name in (*QUERY_ROWS, "positions_q") else of_k]
    return x


def documents_left(given: Any, of_q: NDArray, of_k: NDArray) -> dict[str, Any]:
    """Return the document boundaries among the remaining tokens."""
    if "cu_seqlens" not in given:
        return {}
    if "cu_seqlens_k" not in given and np.array_equal(of_q, of_k):
        again = np.unique(np.searchsorted(of_q, given["cu_seqlens"]))
        return {"cu_seqlens": tuple(again.tolist())}
    for_k = given.get("cu_seqlens_k", given["cu_seqlens"])
    return {
        "cu_seqlens": tuple(np.searchsorted(of_q, given["cu_seqlens"]).tolist()),
        "cu_seqlens_k": tuple(np.searchsorted(of_k, for_k).tolist()),
    }


def numbered(table: NDArray, tokens_left: NDArray) -> tuple[tuple[int, ...], ...]:
    """Renumber the tokens of a layout table; -1 stays."""
    again = np.where(table < 0, -1, np.searchsorted(tokens_left, table))
    return tuple(map(tuple, again.tolist()))


def cut_heads(problem: Explicit, kept: Sequence[int], members: Sequence[int]) -> Explicit:
    """Keep the key heads ``kept`` and, in the group of query heads of each, the ones numbered ``members``."""
    group = problem.shape.H // problem.shape.Hkv
    queries = [head * group + member for head in kept for member in members]
    tensors = dict(problem.tensors)
    for name, x in tensors.items():
        if name == "sinks":
            tensors[name] = x[queries]
        elif name in OF_KEYS:
            tensors[name] = x[:, list(kept)]
        elif name in OF_QUERIES or (name in PAIRS and x.shape[1] > 1):
            tensors[name] = x[:, queries]
    return dataclasses.replace(problem, tensors=tensors)


def cut_dimensions(problem: Explicit, of_k: int, of_v: int) -> Explicit:
    """Keep the first dimensions of q and k, v and dy. If the scale is the default, it is computed again."""
    widths = {"q": of_k, "k": of_k, "v": of_v, "dy": of_v}
    tensors = {n: x[..., : widths[n]] if n in widths else x for n, x in problem.tensors.items()}
    scale = default_scale(of_k) if problem.default_scale else problem.terms["scale"]
    return dataclasses.replace(problem, terms={**problem.terms, "scale": scale}, tensors=tensors)


def without(problem: Explicit, names: Sequence[str]) -> Explicit:
    """Remove the terms and tensors with these names."""
    return dataclasses.replace(
        problem,
        terms={name: x for name, x in problem.terms.items() if name not in names},
        tensors={name: x for name, x in problem.tensors.items() if name not in names},
    )


def cost(problem: Explicit) -> tuple[float, ...]:
    """Return how complicated a problem is, as a tuple.

    A simpler problem is accepted only if its tuple is smaller.
    """
    shape, window = problem.shape, problem.terms.get("window") or (0, 0)
    return (
        problem.workers,
        shape.Sq + shape.Sk,
        shape.B,
        shape.Hkv,
        shape.H,
        shape.D + shape.Dv,
        len(problem.passes),
        problem.ring is not None and problem.ring.layout != "contiguous",
        len(problem.terms) + len(problem.tensors),
        not problem.default_scale,
        sum(side is None for side in window),
        sum(side or 0 for side in window),
        sum(x.size for name, x in problem.tensors.items() if name == "sinks"),
        sum(cost_of(x) for name, x in problem.tensors.items() if is_number(name)),
    )


def cost_of(x: NDArray) -> float:
    """Return how complicated the numbers of an array are, as a sum over the elements.

    0 costs 0, 1 costs 1, other whole numbers 2, halves 3, and all others 4. Numbers above 9 and negative numbers cost
    more.
    """
    values = np.abs(x[np.isfinite(x)])
    kinds = [
        values == 0,
        values == 1,
        values == np.round(values),
        2 * values == np.round(2 * values),
    ]
    costs = np.select(kinds, [0.0, 1.0, 2.0, 3.0], 4.0)
    return float((costs + (values > 9) + (x[np.isfinite(x)] < 0) / 2).sum())
