"""The tables of a case of the operation "context_parallel": which tokens and heads each rank holds, and its results.

The tables are those of the scheme that :mod:`ringspec.schemes` makes for the case, and depend only on case.json. The results
are those of dense attention in global order, cut by the tables: every copy of a cell is the same number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.problem.model import Problem
from ringspec.problem.options import check
from ringspec.schemes.build import Call, make_scheme
from ringspec.schemes.mesh import make_mesh
from ringspec.schemes.scheme import Scheme
from ringspec.truth.sharded import Tables, layout_tensors, padded_layout
from ringspec.vectors.format.case import PADDED_LAYOUTS, Case, SchemeCall
from ringspec.vectors.format.shards import SIDES, cut

__all__ = ["ShardTables", "per_rank", "scheme_of", "shard_tensors", "tables_of_scheme"]

OWN = ("circulation", "direction", "text", "text_at", "interleave")


@dataclass(frozen=True)
class ShardTables:
    """Tokens ``q`` [W, n_q], ``k`` [W, n_k] and heads ``heads_q`` [W, h], ``heads_k`` [W, hkv] of each rank, -1 beyond them."""

    q: NDArray[np.int64]
    k: NDArray[np.int64]
    heads_q: NDArray[np.int64]
    heads_k: NDArray[np.int64]

    def of(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the tokens and heads by which the result ``name`` is cut."""
        return (self.q, self.heads_q) if SIDES[name] == "q" else (self.k, self.heads_k)


def scheme_of(case: Case) -> Scheme:
    """Make the scheme of a case. Raises the errors of :func:`ringspec.context_parallel` for one that does not fit."""
    shape, own = case.shape, case.scheme
    assert shape is not None and own is not None
    # The tables depend on lengths and heads alone, so no tensor is made.
    q, k = np.zeros((1, shape.H, shape.Sq, 1)), np.zeros((1, shape.Hkv, shape.Sk, 1))
    problem = check(q, k, k, {"scale": 1.0})
    options: dict[str, Any] = dict(case.terms)
    if "positions_q" in case.inputs.tensors:
        options["positions_q"] = ()
    values = {name: getattr(own, name) for name in OWN}
    call = Call(make_mesh(own.mesh), problem, layout_of_scheme(own, options), options, values)
    return make_scheme(own.name, call)


def layout_of_scheme(own: SchemeCall, options: Mapping[str, Any]) -> Any:
    """Return the argument ``layout`` of ``ringspec.context_parallel``."""
    if own.layout in PADDED_LAYOUTS:
        starts = options.get("cu_seqlens")
        return padded_layout(own.layout, starts, own.cu_seqlens_padded, own.ranks)
    if own.layout != "table":
        return own.layout
    table_k = own.table_q if own.table_k is None else own.table_k
    return np.array(own.table_q), np.array(table_k)


def tables_of_scheme(case: Case) -> ShardTables:
    """Return the tables with which both passes of a case begin and end."""
    scheme = scheme_of(case)
    q, k = scheme.home_q.shards, scheme.home_k.shards
    return ShardTables(
        *(table([shard.tokens for shard in side]) for side in (q, k)),
        *(table([shard.heads for shard in side]) for side in (q, k)),
    )


def table(rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Return rows of different lengths as one table, with -1 in the slots that are left.

    >>> table([(0, 1), (2,)]).tolist()
    [[0, 1], [2, -1]]
    """
    x = np.full((len(rows), max(map(len, rows))), -1, dtype=np.int64)
    for row, numbers in zip(x, rows, strict=True):
        row[: len(numbers)] = numbers
    return x


def shard_tensors(problem: Problem, tables: ShardTables) -> dict[str, NDArray]:
    """Return the tables, and the position of each slot's token [W, 1|B, n], by their names in the tensor file."""
    slots = layout_tensors(problem, Tables(tables.q, tables.k))
    return slots | {"heads.q": tables.heads_q, "heads.k": tables.heads_k}


def per_rank(
    values: Mapping[str, NDArray], tables: ShardTables, lse_of_padding: float
) -> dict[str, NDArray]:
    """Return results or row scales [B, H, S, ...], by name, as the ranks hold them, [W, B, h, n, ...]; dsinks stays whole.

    ``lse_of_padding``: the value of lse in empty slots; all else is 0 there.
    """
    arranged = {}
    for name, x in values.items():
        if name not in SIDES:
            arranged[name] = x
            continue
        tokens, heads = tables.of(name)
        fill = lse_of_padding if name == "lse" else 0.0
        arranged[name] = np.stack(cut(x, tokens, heads, fill))
    return arranged
