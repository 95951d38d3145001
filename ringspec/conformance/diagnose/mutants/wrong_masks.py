"""Masks of kernels that assume wrong positions, documents or mask terms for their blocks.

Only the visible query-key pairs change; dropout counters and biases are those of the real tokens. A layout table [W, n]
lists the tokens of each worker; slot i of worker r holds token table[r, i], or no token if that is -1. ``rows`` and
``columns`` are the queries and keys of a block.
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
    """Return a function that makes the functions of a ring for a call: all correct except the mask ``make(call)``."""
    return lambda call, recipe: Hooks(mask=make(call))


def moved_keys(rows: Rows, columns: Columns, terms: Terms, by: int) -> Booleans:
    """Return the mask as it would be if all keys of a block were ``by`` positions later."""
    return masks.visible(rows, at_positions(columns, columns.position + by), terms)


def at_positions(columns: Columns, position: Integers) -> Columns:
    return dataclasses.replace(columns, position=position)


def rows_at(rows: Rows, position: Integers) -> Rows:
    return dataclasses.replace(rows, position=position)


def slots(index: Integers | None) -> Integers:
    """Return the slot of each token within its worker's block, [S], from a layout table [W, n]."""
    assert index is not None
    slot = np.broadcast_to(np.arange(index.shape[1]), index.shape)
    return of_tokens(index, slot)


def of_tokens(index: Integers, values: Integers) -> Integers:
    """Reorder an array with one number per slot of a layout table, [W, n], to one number per token, [S]."""
    result = np.zeros(int((index >= 0).sum()), dtype=np.int64)
    result[index[index >= 0]] = values[index >= 0]
    return result


def taken(per_token: Integers, index: Integers) -> Integers:
    """Pick the values of a block's tokens, [1|B, n], out of the values of all tokens, [1|B, S] or [S].

    Slots without a token, which are always masked, get the value of token 0.
    """
    whole = np.atleast_2d(per_token)
    return whole[:, np.maximum(index, 0)]


def global_positions(call: Call, side: str) -> Integers:
    """Return the position of each token, [1|B, S]; ``side`` is 'q' for queries or 'k' for keys."""
    index = getattr(call, f"index_{side}")
    position = getattr(call, f"position_{side}")
    whole: Integers = unshard(list(position), Layout("table", index), 1)
    return whole


def positions_if(call: Call, side: str, table: Integers) -> Integers:
    """Return the positions [1|B, S] that tokens have for workers that assume another layout table."""
    whole = global_positions(call, side)
    taken_for = of_tokens(getattr(call, f"index_{side}"), table)
    return whole[:, np.clip(taken_for, 0, whole.shape[1] - 1)]


def believing(call: Call, table_of: Callable[[Integers], Integers]) -> Mask:
    """Return the mask of workers that assume another layout.

    ``table_of(table)``: the assumed layout table, made from the real one.
    """
    assert call.index_q is not None and call.index_k is not None
    moved = at_given(
        positions_if(call, "q", table_of(call.index_q)),
        positions_if(call, "k", table_of(call.index_k)),
    )
    return lambda at, rows, columns, terms: masks.visible(*moved(rows, columns), terms)


def local(call: Call) -> Callable[[Rows, Columns], tuple[Rows, Columns]]:
    """Return a function that replaces positions by slot numbers in the rows and columns of a block."""
    return at_given(slots(call.index_q), slots(call.index_k))


def at_given(on_q: Integers, on_k: Integers) -> Callable[[Rows, Columns], tuple[Rows, Columns]]:
    """Return a function that replaces the positions of a block's rows and columns; given are those of all tokens."""
    return lambda rows, columns: (
        rows_at(rows, taken(on_q, rows.index)),
        at_positions(columns, taken(on_k, columns.index)),
    )


def only(terms: Terms, *names: str) -> Terms:
    """Return the mask terms without ``causal`` and ``window``, except those in ``names``."""
    return dataclasses.replace(
        terms,
        causal=terms.causal and "causal" in names,
        window=terms.window if "window" in names else None,
    )


def bare(rows: Rows) -> Rows:
    """Return rows without documents, bounds and dense mask, and with 0 in place of -inf in the bias."""
    bias = None if rows.bias is None else np.where(np.isneginf(rows.bias), 0.0, rows.bias)
    return dataclasses.replace(
        rows, segment=None, bound_min=None, bound_max=None, mask=None, bias=bias
    )
