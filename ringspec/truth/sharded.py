"""Distribute global tensors to the workers of a ring.

A layout assigns the tokens to the slots of the W workers; a slot without a token is padding. Distributed tensors have a
leading axis W, and each worker's tokens in the order of its slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.problem.model import Problem, take
from ringspec.rings.documents import contiguous_padded, striped_padded, zigzag_padded
from ringspec.rings.ring import layouts_for
from ringspec.spec.layout import Layout

OF_QUERIES, OF_KEYS = ("o", "lse", "dq"), ("dk", "dv")


@dataclass(frozen=True)
class Tables:
    """The layouts of queries and keys: int64 [W, n_q] and [W, n_k], the token in each slot, -1 for padding."""

    q: NDArray[np.int64]
    k: NDArray[np.int64]

    @property
    def workers(self) -> int:
        return len(self.q)

    def worker_of_query(self) -> NDArray[np.int64]:
        """Return [Sq]: the worker that holds each query.

        >>> Tables(np.array([[0, 2], [1, -1]]), np.zeros((2, 0), np.int64)).worker_of_query().tolist()
        [0, 1, 0]
        """
        worker = np.full((self.q >= 0).sum(), -1, dtype=np.int64)
        for r, slots in enumerate(self.q):
            worker[slots[slots >= 0]] = r
        return worker


def tables_for(problem: Problem, layout: Any, workers: int, options: Mapping[str, Any]) -> Tables:
    """Return the tables of a ``layout``, which may have any form that ``ringspec.ring`` accepts.

    ``options`` are the keywords of the problem. Raises the errors of :func:`ringspec.ring` for a layout that does not
    fit the problem.
    """
    for_q, for_k = layouts_for(problem, layout, workers, options)
    return Tables(for_q.table, for_k.table)


PADDED = {
    "contiguous_padded": contiguous_padded,
    "striped_padded": striped_padded,
    "zigzag_padded": zigzag_padded,
}


def padded_layout(name: str, cu_seqlens: Any, cu_seqlens_padded: Any, workers: int) -> Layout:
    """Return a layout of padded documents (LAYOUT-8) by its name, a key of :data:`PADDED`; LayoutError if it does not fit."""
    return PADDED[name](cu_seqlens, cu_seqlens_padded, workers)


def slots_of(x: NDArray, table: NDArray[np.int64], axis: int, fill: float) -> NDArray:
    """Return [W, ...]: the entries of each worker's slots along ``axis``; ``fill`` in padding slots.

    >>> slots_of(np.array([[5, 6, 7]]), np.array([[0, 2], [1, -1]]), 1, 9).tolist()
    [[[5, 7]], [[6, 9]]]
    """
    return np.stack([take(x, tokens, axis, fill) for tokens in table])


def layout_tensors(problem: Problem, tables: Tables) -> dict[str, NDArray]:
    """Return the token of each slot [W, n], and its position [W, 1|B, n]; -1 in padding slots."""
    return {
        "layout.q": tables.q,
        "layout.k": tables.k,
        "position.q": slots_of(problem.rows.position, tables.q, 1, -1),
        "position.k": slots_of(problem.columns.position, tables.k, 1, -1),
    }


def per_worker(
    values: Mapping[str, NDArray], tables: Tables | None, lse_of_padding: float
) -> dict[str, NDArray]:
    """Return results or row scales, by name, as the workers of a ring hold them; without ``tables``, unchanged.

    ``dsinks_parts``, the sums over each worker's rows, becomes dsinks [W, H, N], and the total becomes dsinks_sum. The
    same holds for dbias if all queries share the bias. Otherwise each row of dbias belongs to the worker of its query.
    ``lse_of_padding``: the value of lse in padding slots.
    """
    if tables is None:
        return dict(values)
    arranged = {}
    for name, x in values.items():
        if name in OF_QUERIES:
            fill = lse_of_padding if name == "lse" else 0.0
            arranged[name] = slots_of(x, tables.q, 2, fill)
        elif name in OF_KEYS:
            arranged[name] = slots_of(x, tables.k, 2, 0.0)
        elif name.endswith("_parts"):
            arranged[name.removesuffix("_parts")] = x
        elif f"{name}_parts" in values:
            arranged[f"{name}_sum"] = x
        else:
            arranged[name] = slots_of(x, tables.q, 2, 0.0)
    return arranged
