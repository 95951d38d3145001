"""Cases for targets that promise bits which do not depend on the number of workers W.

The target is the program under test. Its claim ``invariant_under_workers`` says what it promises:

- 'all': every result has the same bits for each W, as with Ulysses, where one worker computes whole heads.
- 'unmerged-rows': a ring merges partial results, and another W cuts the keys elsewhere. Only these rows keep their bits: of
  o, lse and dq those whose visible keys are all on one worker, and of dk and dv those whose queries are all on one worker
  and are such rows themselves. Every other element may change.

Each case runs one problem with 1, 2 and 4 workers, as far as the target claims them. +0 and -0 are the same. These are
cases of the operation 'ring'; :mod:`.scheme_bits` has those of 'context_parallel'.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.cases.claimed_rings import MOST_TOKENS, case_of_rings
from ringspec.conformance.cases.invariance import result_rows, whose
from ringspec.conformance.cases.model import RunCase
from ringspec.conformance.cases.problems import (
    DTYPES,
    Seen,
    dealt,
    drawn,
    judged,
    side_of,
    tables_of,
    tensors_of,
)
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.vectors.format.case import Case
from ringspec.vectors.format.requires import visible

__all__ = ["cases", "other_bits", "same_bits", "unmerged", "unpromised"]

WORKERS = (1, 2, 4)
TENSORS = ("o", "lse", "dq", "dk", "dv")
# With a full mask, a ring of two workers merges every row.
PROBLEMS = (
    ("full", "contiguous"),
    ("causal", "contiguous"),
    ("causal", "striped"),
    ("causal", "zigzag"),
    ("documents", "contiguous"),
)


def cases() -> list[RunCase]:
    """Return all cases. A target claims those of its promise.

    >>> [case.id for case in cases()][:2]
    ['property/worker-bits/full-contiguous-bf16', 'property/worker-bits/full-contiguous-f32']
    """
    return [case_of(*problem, dtype) for problem in PROBLEMS for dtype in DTYPES]


def case_of(mask: str, layout: str, dtype: str) -> RunCase:
    id = f"property/worker-bits/{mask}-{layout}-{dtype}"
    made = case_of_rings(
        id,
        "The bits that a target promises for every number of workers are those with the fewest workers.",
        partial(rings, id, mask, layout, dtype),
        partial(judged, look=same_bits),
        least=2,
    )

    def claimed(claims: Capabilities) -> str | None:
        assert made.claimed is not None
        return unpromised(claims, mask == "full") or made.claimed(claims)

    return replace(made, claimed=claimed)


def unpromised(claims: Capabilities, every_row: bool) -> str | None:
    """Return why a target's promise does not include a case; ``every_row``: whether a ring merges every row of it."""
    promise = claims.invariant_under_workers
    kept = promise == "all" or (promise == "unmerged-rows" and not every_row)
    return None if kept else f"invariant_under_workers={promise!r}"


def rings(id: str, mask: str, layout: str, dtype: str, claims: Capabilities) -> list[Case]:
    """Divide one problem among 1, 2 and 4 workers; its length and heads suit every number that the target claims."""
    numbers = [w for w in WORKERS if claims.workers is None or w in claims.workers]
    while numbers and tokens_for(numbers[-1], claims) > MOST_TOKENS:
        numbers.pop()
    if not numbers:
        return []
    tokens = tokens_for(numbers[-1], claims)
    heads = math.lcm(4, *(claims.kv_heads_unit(w) for w in numbers))
    problem = drawn(f"worker-bits-{mask}", dtype, S=tokens, H=heads, **terms_of(mask, tokens))
    return [dealt(problem, f"{id}-w{w}", w, layout) for w in numbers]


def tokens_for(workers: int, claims: Capabilities) -> int:
    """Return a length of at least 24 that gives 4 documents, and each worker two chunks of claimed sizes."""
    step = math.lcm(4, workers * math.lcm(2, claims.tokens_multiple))
    return step * -(-24 // step)


def terms_of(mask: str, tokens: int) -> dict[str, Any]:
    """Return the terms of a mask; each of four documents is as long as the shard of one of four workers."""
    if mask != "documents":
        return {"causal": True} if mask == "causal" else {}
    return {"causal": True, "cu_seqlens": tuple(range(0, tokens + 1, tokens // 4))}


def same_bits(seen: Seen) -> tuple[str, None]:
    """Check that the rows that the target promises have the bits of the first call, which has the fewest workers."""
    promise = seen.claims.invariant_under_workers
    for call in range(1, len(seen.calls)):
        for name in TENSORS:
            if name not in seen.outputs[call]:
                continue
            first, later = (result_rows(seen, n, name) for n in (0, call))
            changed = other_bits(first, later)
            if promise == "unmerged-rows":
                stays = unmerged(seen.cases[0], name) & unmerged(seen.cases[call], name)
                changed &= stays[:, None]
            if changed.any():
                return message(seen, call, name, changed), None
    return "", None


def other_bits(first: NDArray[np.float64], later: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return where the bits differ; +0 and -0 are the same, and so are two NaNs."""
    return ~((first == later) | (np.isnan(first) & np.isnan(later)))


def unmerged(case: Case, name: str) -> NDArray[np.bool_]:
    """Return [S]: True for the rows of a tensor that a ring computes on one worker, without merging partial results."""
    assert case.shape is not None
    sees = np.asarray(visible(case, case.shape).any(axis=(0, 1)))
    tables = tables_of(tensors_of(case))
    keys, queries = (owners(tables[side], sees.shape[axis]) for side, axis in (("k", 1), ("q", 0)))
    alone = owners_seen(sees, keys) <= 1
    if side_of(name) == "q":
        return np.asarray(alone)
    return np.asarray((owners_seen(sees.T, queries) <= 1) & ~(sees & ~alone[:, None]).any(axis=0))


def owners(table: NDArray[np.int64], tokens: int) -> NDArray[np.bool_]:
    """Return [S, W]: whether a worker holds a token."""
    return np.stack([np.isin(np.arange(tokens), row) for row in table], axis=1)


def owners_seen(sees: NDArray[np.bool_], held: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return how many workers hold tokens that each row sees."""
    return np.asarray(((sees.astype(int) @ held.astype(int)) > 0).sum(axis=1))


def message(seen: Seen, call: int, name: str, changed: NDArray[np.bool_]) -> str:
    few, many = (seen.calls[n].workers for n in (0, call))
    promise = seen.claims.invariant_under_workers
    where = whose(seen, call, name, np.flatnonzero(changed.any(axis=(0, 1, 3))))
    merged = " A ring merges no partial results for them." if promise == "unmerged-rows" else ""
    return (
        f"{name} with {many} workers has other bits than with {few}, in {changed.sum()} of {changed.size} elements, "
        f"for {where}; the target claims invariant_under_workers={promise!r}.{merged}"
    )
