"""Masks by what a buggy kernel believes about its blocks: other positions, other documents, other terms.

Dropout counters and biases stay those of the real tokens; only who sees whom changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from ringspec.conformance.diagnose.mutants.hooks import At, Hooks
from ringspec.conformance.target.protocol import Call
from ringspec.problem.model import Booleans, Columns, Integers, Rows, Terms
from ringspec.recipes import Recipe
from ringspec.rings.layouts import unshard
from ringspec.spec import masks
from ringspec.spec.layout import Layout

Mask = Callable[[At, Rows, Columns, Terms], Booleans]
Make = Callable[[Call, Recipe], Hooks]


def by_call(make: Callable[[Call], Mask]) -> Make:
    """Hooks with a mask that is made for a call."""
    return lambda call, recipe: Hooks(mask=make(call))


def moved_keys(rows: Rows, columns: Columns, terms: Terms, by: int) -> Booleans:
    """The mask as if all keys of a block stood ``by`` positions later."""
    return masks.visible(rows, at_positions(columns, columns.position + by), terms)


def at_positions(columns: Columns, position: Integers) -> Columns:
    return dataclasses.replace(columns, position=position)


def rows_at(rows: Rows, position: Integers) -> Rows:
    return dataclasses.replace(rows, position=position)


def slots(index: Integers | None) -> Integers:
    """The slot of each token inside its worker, [S]; of a table [W, n] with -1 in padding slots."""
    assert index is not None
    slot = np.broadcast_to(np.arange(index.shape[1]), index.shape)
    return of_tokens(index, slot)


def of_tokens(index: Integers, values: Integers) -> Integers:
    """[S] from one number for each slot of a table."""
    result = np.zeros(int((index >= 0).sum()), dtype=np.int64)
    result[index[index >= 0]] = values[index >= 0]
    return result


def taken(per_token: Integers, index: Integers) -> Integers:
    """[1|B, n] of a block from [1|B, S] or [S]; padding slots, which no mask shows, get token 0's."""
    whole = np.atleast_2d(per_token)
    return whole[:, np.maximum(index, 0)]


def global_positions(call: Call, side: str) -> Integers:
    """[1|B, S]: the position of each token of queries 'q' or keys 'k'."""
    index = getattr(call, f"index_{side}")
    position = getattr(call, f"position_{side}")
    whole: Integers = unshard(list(position), Layout("table", index), 1)
    return whole


def positions_if(call: Call, side: str, table: Integers) -> Integers:
    """[1|B, S]: what a worker takes for the position of each token if it believes in another table."""
    whole = global_positions(call, side)
    taken_for = of_tokens(getattr(call, f"index_{side}"), table)
    return whole[:, np.clip(taken_for, 0, whole.shape[1] - 1)]


def believing(call: Call, table_of: Callable[[Integers], Integers]) -> Mask:
    """The mask of workers that believe in another layout; ``table_of`` makes it from the real one."""
    assert call.index_q is not None and call.index_k is not None
    on_q = positions_if(call, "q", table_of(call.index_q))
    on_k = positions_if(call, "k", table_of(call.index_k))

    def mask(at: At, rows: Rows, columns: Columns, terms: Terms) -> Booleans:
        return masks.visible(
            rows_at(rows, taken(on_q, rows.index)),
            at_positions(columns, taken(on_k, columns.index)),
            terms,
        )

    return mask


def local(call: Call) -> Callable[[Rows, Columns], tuple[Rows, Columns]]:
    """Rows and columns of a block with slots for positions."""
    on_q, on_k = slots(call.index_q), slots(call.index_k)

    def counted(rows: Rows, columns: Columns) -> tuple[Rows, Columns]:
        return (
            rows_at(rows, taken(on_q, rows.index)),
            at_positions(columns, taken(on_k, columns.index)),
        )

    return counted


def only(terms: Terms, *names: str) -> Terms:
    """Terms with causal and window left out unless they are named."""
    return dataclasses.replace(
        terms,
        causal=terms.causal and "causal" in names,
        window=terms.window if "window" in names else None,
    )


def bare(rows: Rows) -> Rows:
    """Rows without any mask of their own."""
    bias = None if rows.bias is None else np.where(np.isneginf(rows.bias), 0.0, rows.bias)
    return dataclasses.replace(
        rows, segment=None, bound_min=None, bound_max=None, mask=None, bias=bias
    )
