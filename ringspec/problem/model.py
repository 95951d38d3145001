"""The parts of a problem: tensors, *rows* (the data of the queries), *columns* (the data of the keys) and *terms*.

Rows and columns are cut into blocks and travel with the queries or keys to which they belong (RING-6). The terms, such
as the scale, are the same on every worker. Indices and positions are int64, masks are bool, and all else is float64.

Sizes: B batches, H query heads, Hkv key and value heads, Sq queries, Sk keys, D entries of a query or key, Dv of a
value, N sinks of a head, n tokens of one block. ``B|1`` is an axis of length B, or of length 1 if the same values hold
for all batches; likewise for other axes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringspec.recipes import RECIPES, Recipe

Array = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]


@dataclass(frozen=True)
class Terms:
    """The parameters that every worker knows.

    H = ``heads``, Hkv = ``kv_heads``. ``scale`` multiplies <q, k>. ``causal`` and ``window`` are conditions of the
    mask; ``window`` is None or (left, right), with None for an unbounded side. ``softcap`` is a number or None, and
    ``sinks`` [H, N] or None. ``dropout_p`` and ``dropout_seed`` define the keep mask of dropout.
    """

    heads: int
    kv_heads: int
    scale: float
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    sinks: Array | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0

    @property
    def group(self) -> int:
        """G = H / Hkv: query head h uses key head h // G (FWD-10)."""
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Rows:
    """The data of n queries: indices, positions and the like, and the queries' rows of bias, mask and keep.

    ``index`` [n] has the global index of each query, -1 for a padding slot. ``position``, ``segment`` (the document of
    a token), ``bound_min``, ``bound_max`` are [B, n] or [1, n]. ``bias``, ``mask`` and ``keep`` (the keep mask of
    dropout) are [B|1, H|1, n|1, Sk|1], with a column for each key of the whole sequence.
    """

    index: Integers
    position: Integers
    segment: Integers | None = None
    bound_min: Integers | None = None
    bound_max: Integers | None = None
    bias: Array | None = None
    mask: Booleans | None = None
    keep: Booleans | None = None

    def take(self, index: Integers) -> Rows:
        """Return the data of the queries with the global indices ``index``; -1 makes a padding slot."""
        return Rows(
            index,
            take(self.position, index, axis=1),
            None if self.segment is None else take(self.segment, index, axis=1, fill=-1),
            None if self.bound_min is None else take(self.bound_min, index, axis=1),
            None if self.bound_max is None else take(self.bound_max, index, axis=1),
            None if self.bias is None else take_rows(self.bias, index),
            None if self.mask is None else take_rows(self.mask, index),
            None if self.keep is None else take_rows(self.keep, index),
        )

    def slice(self, start: int, stop: int) -> Rows:
        """Return the data of the queries start..stop-1, counted from the first query of these rows."""
        return Rows(
            self.index[start:stop],
            self.position[:, start:stop],
            None if self.segment is None else self.segment[:, start:stop],
            None if self.bound_min is None else self.bound_min[:, start:stop],
            None if self.bound_max is None else self.bound_max[:, start:stop],
            None if self.bias is None else cut(self.bias, start, stop),
            None if self.mask is None else cut(self.mask, start, stop),
            None if self.keep is None else cut(self.keep, start, stop),
        )


@dataclass(frozen=True)
class Columns:
    """The data of n keys: ``index`` [n] (-1 for a padding slot), ``position`` and ``segment`` [B, n] or [1, n]."""

    index: Integers
    position: Integers
    segment: Integers | None = None

    def take(self, index: Integers) -> Columns:
        """Return the data of the keys with the global indices ``index``; -1 makes a padding slot."""
        return Columns(
            index,
            take(self.position, index, axis=1),
            None if self.segment is None else take(self.segment, index, axis=1, fill=-1),
        )

    def slice(self, start: int, stop: int) -> Columns:
        """Return the data of the keys start..stop-1, counted from the first key of these columns."""
        return Columns(
            self.index[start:stop],
            self.position[:, start:stop],
            None if self.segment is None else self.segment[:, start:stop],
        )


@dataclass(frozen=True)
class Tile:
    """A rectangle of the score matrix: its queries, its keys, and the parameters of the computation.

    ``rows`` [n_q] belong to the queries, ``columns`` [n_k] to the keys, and ``terms`` to the whole problem. ``recipe``
    says where values are rounded.
    """

    rows: Rows
    columns: Columns
    terms: Terms
    recipe: Recipe

    def part(self, rows: tuple[int, int], columns: tuple[int, int]) -> Tile:
        """Return the part of this tile in the ranges ``rows`` and ``columns``, each (start, stop) inside this tile."""
        return Tile(self.rows.slice(*rows), self.columns.slice(*columns), self.terms, self.recipe)


@dataclass(frozen=True)
class Problem:
    """One attention problem, whole or one worker's shard of it.

    q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] in float64. ``rows`` belong to the queries, ``columns`` to
    the keys, and ``terms`` are the parameters of the whole problem.
    """

    q: Array
    k: Array
    v: Array
    rows: Rows
    columns: Columns
    terms: Terms

    def take(self, index_q: Integers, index_k: Integers) -> Problem:
        """Return the shard of one worker: the queries and keys with these global indices; -1 makes a padding slot."""
        return Problem(
            take(self.q, index_q, axis=2),
            take(self.k, index_k, axis=2),
            take(self.v, index_k, axis=2),
            self.rows.take(index_q),
            self.columns.take(index_k),
            self.terms,
        )

    @property
    def tile(self) -> Tile:
        """The tile of all queries and all keys, in float64."""
        return Tile(self.rows, self.columns, self.terms, RECIPES["float64"])


def take(x: NDArray, index: Integers, axis: int, fill: float = 0) -> NDArray:
    """Return the entries of ``x`` at ``index`` along an axis; ``fill`` where the index is -1.

    >>> take(np.array([[5, 6, 7]]), np.array([2, -1]), axis=1, fill=9).tolist()
    [[7, 9]]
    """
    if x.shape[axis] == 0:
        return np.full(x.shape[:axis] + index.shape + x.shape[axis + 1 :], fill, dtype=x.dtype)
    taken = np.take(x, np.maximum(index, 0), axis=axis)
    padding = np.flatnonzero(index < 0)
    if padding.size:
        taken[(slice(None),) * axis + (padding,)] = fill
    return taken


def take_rows(x: NDArray, index: Integers) -> NDArray:
    """Return the rows ``index`` of ``x`` [b, h, Sq, Sk]; if all queries share one row, return ``x``."""
    return x if x.shape[2] == 1 else take(x, index, axis=2)


def cut(x: NDArray, start: int, stop: int) -> NDArray:
    """Return rows start..stop-1 of ``x`` [b, h, n, Sk]; if all queries share one row, return ``x``."""
    return x if x.shape[2] == 1 else x[:, :, start:stop]


def columns_of(x: NDArray, columns: Columns) -> NDArray:
    """Return the entries of ``x`` [b, h, n, Sk] for the keys of ``columns``; if all keys share an entry, return ``x``."""
    if x.shape[3] == 1:
        return x
    if x.shape[3] == 0:  # there is no key, so all columns are padding slots
        return np.zeros((*x.shape[:3], columns.index.size), dtype=x.dtype)
    return np.take(x, np.maximum(columns.index, 0), axis=3)
