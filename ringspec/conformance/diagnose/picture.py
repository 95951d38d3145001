"""Show where an attention pattern is wrong: as a picture and in words.

A probe is a case with inputs so simple that its results show the pattern, which says what keys each query sees. A
pattern is a boolean array [queries, keys] of one head. o shows it if v is one-hot, and dq if k is one-hot. dv shows the
transposed pattern [keys, queries] if dy is one-hot, and dk if q is one-hot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.formats import load

Booleans = NDArray[np.bool_]
Integers = NDArray[np.int64]
LARGEST = 64
KEYS_FIRST = ("dk", "dv")


def gathered(shards: Sequence[NDArray], table: Integers) -> NDArray[np.float64]:
    """Join the arrays [B, H, n, d] of all workers to [B, H, S, d]; ``table`` [W, n]: token of each slot, or -1.

    >>> table = np.array([[0, 2], [1, -1]])
    >>> gathered([np.full((1, 1, 2, 1), 5.0), np.full((1, 1, 2, 1), 6.0)], table).ravel().tolist()
    [5.0, 6.0, 5.0]
    """
    local = [load(x) for x in shards]
    batch, heads, _, *rest = local[0].shape
    whole = np.zeros((batch, heads, int((table >= 0).sum()), *rest))
    for x, tokens in zip(local, table, strict=True):
        real = tokens >= 0
        whole[:, :, tokens[real]] = x[:, :, real]
    return whole


def patterns(name: str, want: NDArray, got: NDArray, columns: int) -> tuple[Booleans, Booleans]:
    """Return the expected pattern and the pattern in ``got``, each [B, H, queries, keys].

    Both are read from the first ``columns`` columns of a tensor. A pair counts as seen if its number exceeds half of
    the smallest expected number of any visible pair. NaN counts as seen in the picture; the message reports it as NaN
    (:func:`not_a_number`).
    """
    size, read = np.abs(want[..., :columns]), np.abs(got[..., :columns])
    least = size[size > 0].min(initial=np.inf)
    expected, seen = size > 0, ~(read <= least / 2)
    if name in KEYS_FIRST:
        expected, seen = expected.swapaxes(2, 3), seen.swapaxes(2, 3)
    return expected, seen


def first_difference(expected: Booleans, seen: Booleans) -> tuple[int, int] | None:
    """Return (batch, head) of the first pattern that is not as expected; None if all are."""
    differs = (expected != seen).any(axis=(2, 3))
    if not differs.any():
        return None
    batch, head = np.argwhere(differs)[0]
    return int(batch), int(head)


def picture_of(expected: Booleans, seen: Booleans) -> dict[str, Any]:
    """Cut a region of at most 64 x 64 around the first difference out of two patterns [queries, keys].

    ``origin`` in the result: the query of the region's first row, and the key of its first column.
    """
    row, column = (int(i) for i in np.argwhere(expected != seen)[0])
    top, left = start(row, expected.shape[0]), start(column, expected.shape[1])
    part = np.s_[top : top + LARGEST, left : left + LARGEST]
    return {
        "expected": expected[part].astype(int).tolist(),
        "got": seen[part].astype(int).tolist(),
        "origin": [top, left],
    }


def pictured(
    expected: Booleans, seen: Booleans, at: tuple[int, int] | None
) -> dict[str, Any] | None:
    """Return the picture of one pattern; ``at``: its (batch, head). Return None if ``at`` is None."""
    return None if at is None else picture_of(expected[at], seen[at])


def not_a_number(name: str, got: NDArray, table: Integers) -> str:
    """Say which rows of a tensor hold NaN. These rows show no pattern.

    >>> got = np.zeros((1, 1, 4, 2)); got[0, 0, 3] = np.nan
    >>> not_a_number("dk", got, np.array([[0, 1], [2, 3]]))
    'dk holds NaN in 1 of 4 rows, on worker 1; first in batch 0, head 0, key 3 (worker 1, slot 1).'
    """
    rows = np.isnan(got).any(axis=3)
    batch, head, row = (int(i) for i in np.argwhere(rows)[0])
    worker, slot = place(row, table)
    workers = sorted({place(int(i), table)[0] for i in np.flatnonzero(rows.any(axis=(0, 1)))})
    what = "key" if name in KEYS_FIRST else "query"
    return (
        f"{name} holds NaN in {int(rows.sum())} of {rows.size} rows, on {numbers('worker', workers)}; first in "
        f"batch {batch}, head {head}, {what} {row} (worker {worker}, slot {slot})."
    )


def start(first: int, length: int) -> int:
    """Return the first of the 64 indices to show, so that ``first`` is among them and near their start."""
    return max(0, min(first - LARGEST // 8, length - LARGEST))


def describe(name: str, expected: Booleans, seen: Booleans, tables: Mapping[str, Integers]) -> str:
    """Say which workers have wrong rows, and which keys the first wrong row sees or misses by mistake.

    >>> expected, seen = np.array([[1, 0], [1, 1]]) > 0, np.array([[1, 1], [1, 1]]) > 0
    >>> describe("o", expected, seen, {"q": np.array([[0], [1]]), "k": np.array([[0], [1]])})
    'o shows a wrong attention pattern in 1 of 2 rows, on worker 0. Query 0 (worker 0, slot 0) attends to the hidden key 1 of worker 1.'
    """
    rows = np.flatnonzero((expected != seen).any(axis=1))
    first = int(rows[0])
    worker, slot = place(first, tables["q"])
    surplus = np.flatnonzero(seen[first] & ~expected[first])
    missed = np.flatnonzero(expected[first] & ~seen[first])
    parts = []
    if surplus.size:
        parts.append(f"attends to the hidden {tokens('key', surplus, tables['k'])}")
    if missed.size:
        parts.append(f"misses {tokens('key', missed, tables['k'])}")
    whose = numbers("worker", sorted({place(int(row), tables["q"])[0] for row in rows}))
    return (
        f"{name} shows a wrong attention pattern in {len(rows)} of {len(expected)} rows, on {whose}. "
        f"Query {first} (worker {worker}, slot {slot}) {' and '.join(parts)}."
    )


def place(token: int, table: Integers) -> tuple[int, int]:
    """Return (worker, slot) of a token."""
    worker, slot = np.argwhere(table == token)[0]
    return int(worker), int(slot)


def tokens(what: str, which: Sequence[int] | Integers, table: Integers) -> str:
    """List tokens with their workers: 'keys 3-5, 9 of workers 0, 1'."""
    owners = sorted({place(int(token), table)[0] for token in which})
    return f"{numbers(what, which)} of {numbers('worker', owners)}"


def numbers(what: str, which: Sequence[int] | Integers, most: int = 6) -> str:
    """List ascending numbers after their noun, with runs written as ranges.

    >>> numbers("row", [3]), numbers("row", [0, 1, 2, 5])
    ('row 3', 'rows 0-2, 5')
    """
    values = [int(n) for n in which]
    runs: list[list[int]] = []
    for n in values:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    shown = [str(a) if a == b else f"{a}{'-' if b > a + 1 else ', '}{b}" for a, b in runs[:most]]
    more = "" if len(runs) <= most else " and others"
    return f"{what}{'s' if len(values) > 1 else ''} {', '.join(shown)}{more}"
