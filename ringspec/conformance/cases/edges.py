"""Cases at boundaries: windows, query offsets, key bounds and document lengths; and soft caps of every size.

Each case varies one parameter, such as the left side of the window, in one layout. It calls the program under test once
for each value of the parameter. For a soft cap, the values range from far below the scores to far above them. For other
parameters they are 0, each boundary, and the numbers just below and above it. The boundaries are half of the keys on
one worker, all keys on one worker, and all keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from ringspec.conformance.cases.claimed_rings import MOST_TOKENS, case_of_rings
from ringspec.conformance.cases.model import RunCase
from ringspec.conformance.cases.problems import dealt, drawn, judged_each
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Call
from ringspec.vectors.format.case import Case

LAYOUTS = ("contiguous", "striped", "zigzag")
# Queries and keys per worker; zigzag divides them into two chunks.
LENGTHS = {"": (4, 4), "-more-keys": (4, 8), "-more-queries": (8, 4)}
LAYOUT_IN_CORE = {"-more-keys": "contiguous", "-more-queries": "zigzag"}
DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "fp16", "float64": "f64"}
WORKERS = (3, 4, 2, 5, 6, 7, 8, 1)  # the first claimed one is used
HEAD_DIMS = (6, 12, 10, 5, 24, 48, 96, 32, 128, 8, 64, 16, 4)
SOFTCAPS = (2.0**-10, 0.25, 1.0, 4.0, 2.0**10)
Terms = dict[str, Any]


def cases(profile: str = "core") -> list[RunCase]:
    """Return the cases ``edges/<parameter>/<layout>``. The profile 'smoke' has none.

    Further cases have more keys than queries, or more queries than keys. In 'core' they run in one layout, in 'full' in
    every layout.

    >>> [case.id for case in cases()][:2]
    ['edges/window-left/contiguous', 'edges/window-left/striped']
    """
    if profile == "smoke":
        return []
    return [
        edge_case(f"edges/{parameter}/{layout.replace('_', '-')}{lengths}", parameter, layout, each)
        for parameter in PARAMETERS
        for lengths, each in LENGTHS.items()
        for layout in layouts_of(parameter)
        if profile == "full" or lengths == "" or layout == LAYOUT_IN_CORE[lengths]
    ]


def layouts_of(parameter: str) -> tuple[str, ...]:
    return (*LAYOUTS, "zigzag_per_document") if parameter == "documents" else LAYOUTS


def edge_case(id: str, parameter: str, layout: str, each: tuple[int, int]) -> RunCase:
    return case_of_rings(
        id,
        "A parameter at a boundary of a shard or of the sequence, one below it and one above it.",
        partial(problems, id, parameter, layout, each),
        partial(judged_each, in_words),
        rules=RULES[parameter],
    )


def problems(
    id: str, parameter: str, layout: str, each: tuple[int, int], claims: Capabilities
) -> list[Case]:
    """Return one problem for each value of the parameter, in sizes that the program under test supports."""
    workers = next((w for w in WORKERS if claims.workers is None or w in claims.workers), 3)
    multiple = math.lcm(4, claims.tokens_multiple) // 4
    lengths = (workers * each[0] * multiple, workers * each[1] * multiple)
    if max(lengths) > MOST_TOKENS:
        return []
    sizes: Terms = {"Sq": lengths[0], "Sk": lengths[1], "D": head_dim(claims)}
    kv_heads = math.lcm(2, claims.kv_heads_unit(workers))
    if claims.head_ratios is not None or kv_heads != 2:
        ratio = (claims.head_ratios or (1,))[0]
        sizes |= {"H": kv_heads * ratio, "Hkv": kv_heads}
    dtype = next((DTYPES[name] for name in DTYPES if name in claims.formats), "f32")
    found = []
    for n, terms in enumerate(PARAMETERS[parameter](workers, *lengths)):
        masked = ({"causal": True} if claims.only_causal else {}) | terms
        name = id.replace(f"/{layout.replace('_', '-')}", "/")  # the same inputs in every layout
        found.append(dealt(drawn(name, dtype, **sizes, **masked), f"{id}-{n}", workers, layout))
    return found


def head_dim(claims: Capabilities) -> int:
    fits = [d for d in HEAD_DIMS if claims.head_dims is None or d in claims.head_dims]
    return fits[0] if fits else HEAD_DIMS[0]


def around(*boundaries: int) -> list[int]:
    """Return 0, each boundary, and the numbers just below and above each boundary.

    >>> around(4, 12)
    [0, 3, 4, 5, 11, 12, 13]
    """
    return sorted({0} | {b + d for b in boundaries for d in (-1, 0, 1)})


def distances(workers: int, queries: int, keys: int) -> list[int]:
    """Return window sizes: 0, each boundary, and the numbers just below and above it."""
    n = keys // workers
    return around(n // 2, n, keys)


def left_windows(workers: int, queries: int, keys: int) -> list[Terms]:
    return [{"window": (side, None)} for side in distances(workers, queries, keys)]


def right_windows(workers: int, queries: int, keys: int) -> list[Terms]:
    return [{"window": (None, side)} for side in distances(workers, queries, keys)]


def causal_windows(workers: int, queries: int, keys: int) -> list[Terms]:
    return [{"causal": True, "window": (x, 0)} for x in distances(workers, queries, keys)]


def offsets(workers: int, queries: int, keys: int) -> list[Terms]:
    """Return positive and negative offsets of the query positions; other cases cover the default, 0."""
    n = keys // workers
    sizes = {*around(n // 2, n, keys), queries, abs(keys - queries)} - {0}
    both = sorted({sign * size for size in sizes for sign in (1, -1)})
    return [{"causal": True, "q_offset": offset} for offset in both]


def key_bounds(workers: int, queries: int, keys: int) -> list[Terms]:
    """Return five problems that give each query a lower and an upper bound of its keys.

    The bounds are the boundaries and the numbers next to them. In the first two problems every query sees a key.
    """
    n = keys // workers
    every = around(n // 2, n, keys)
    inside, above = [x for x in every if x < keys], [x for x in every if x > 0]
    return [
        bounds_of(queries, lows, highs)
        for lows, highs in (
            (inside, [keys + 1]),
            ([0], above),
            (every, [keys + 1]),
            ([0], every),
            (every, every),
        )
    ]


def bounds_of(queries: int, lows: Sequence[int], highs: Sequence[int]) -> Terms:
    return {
        "bound_min": tuple(lows[i % len(lows)] for i in range(queries)),
        "bound_max": tuple(highs[i % len(highs)] for i in range(queries)),
    }


def document_lengths(workers: int, queries: int, keys: int) -> list[Terms]:
    """Return packings of the tokens into documents.

    In each, the first document has a boundary length, a document is empty, or some tokens are in no document.
    """
    n_q, n_k = queries // workers, keys // workers
    found: list[Terms] = []
    for step in (-1, 0, 1):
        for part in (2, 1):
            found.append(two_documents(queries, keys, n_q // part + step, n_k // part + step))
    found += [
        two_documents(queries, keys, queries - 1, keys - 1),
        two_documents(queries, keys, queries, keys),
        two_documents(queries, keys, 0, 0),
        {"cu_seqlens": (0, n_q, n_q, queries), "cu_seqlens_k": (0, n_k, n_k, keys)},
        {"cu_seqlens": (0, n_q, 2 * n_q), "cu_seqlens_k": (0, n_k, 2 * n_k)},
        {"cu_seqlens": (0, n_q, queries), "cu_seqlens_k": (0, 0, keys)},
    ]
    return found


def two_documents(queries: int, keys: int, first_q: int, first_k: int) -> Terms:
    return {"cu_seqlens": (0, first_q, queries), "cu_seqlens_k": (0, first_k, keys)}


def softcaps(workers: int, queries: int, keys: int) -> list[Terms]:
    return [{"softcap": cap} for cap in SOFTCAPS]


PARAMETERS = {
    "window-left": left_windows,
    "window-right": right_windows,
    "window-causal": causal_windows,
    "q-offset": offsets,
    "bounds": key_bounds,
    "documents": document_lengths,
    "softcap": softcaps,
}
RULES = {
    "window-left": ("MASK-2",),
    "window-right": ("MASK-2",),
    "window-causal": ("MASK-1", "MASK-2", "MASK-9"),
    "q-offset": ("MASK-1", "MASK-8"),
    "bounds": ("MASK-4",),
    "documents": ("MASK-5",),
    "softcap": ("FWD-3",),
}


def in_words(case: Case, call: Call | None = None) -> str:
    """Describe the parameters and lengths of a problem, for a message.

    >>> in_words(drawn("example", "f32", Sq=4, Sk=8, causal=True, window=(4, 0)))
    'With causal True, window (4, 0), Sq = 4, Sk = 8'
    """
    assert case.shape is not None
    terms = [f"{name} {value}" for name, value in case.terms.items() if name != "scale"]
    terms += [
        f"{name} {case.inputs.tensors[name].values}"
        for name in ("bound_min", "bound_max")
        if name in case.inputs.tensors
    ]
    return f"With {', '.join([*terms, f'Sq = {case.shape.Sq}', f'Sk = {case.shape.Sk}'])}"
