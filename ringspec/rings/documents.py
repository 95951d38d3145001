"""Layouts of padded documents and of decode, with the integers that kernels need: check the arguments, then compute.

:mod:`ringspec.spec.layout` states LAYOUT-8 to LAYOUT-13. ``cu_seqlens`` int [N + 1] are the starts of N packed documents
and the end of the last one, without padding; token numbers refer to this pack. ``cu_seqlens_padded`` has the same form,
with the slots that each document takes up. Everything here is integers: results are exact.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ringspec.errors import LayoutError, OptionError, shown
from ringspec.problem.checks import as_array, check_workers, int_array, is_integer
from ringspec.problem.model import Integers
from ringspec.rings.layouts import check_layout
from ringspec.spec import layout as spec
from ringspec.spec.layout import Layout

LARGEST = 2**61


def zigzag_padded(cu_seqlens: Any, cu_seqlens_padded: Any, workers: int) -> Layout:
    """LAYOUT-8: make the zigzag layout of padded documents; slots past a document's tokens are padding, -1.

    Each document's room, the difference of two entries of ``cu_seqlens_padded``, must be a multiple of 2W and hold its
    tokens. With ``cu_seqlens = cu_seqlens_padded`` the table lists, for each worker, the rows that it takes from the
    padded pack, as TransformerEngine's ``thd_get_partitioned_indices`` does. Raises LayoutError.

    >>> zigzag_padded([0, 3], [0, 4], 2).table.tolist(), zigzag_padded([0, 4], [0, 4], 2).table.tolist()
    ([[0, -1], [1, 2]], [[0, 3], [1, 2]])
    """
    return spec.zigzag_padded(*rooms(cu_seqlens, cu_seqlens_padded, workers, 2), int(workers))


def contiguous_padded(cu_seqlens: Any, cu_seqlens_padded: Any, workers: int) -> Layout:
    """Make the layout in which worker r holds the r-th of W equal parts of each document's room, a multiple of W.

    >>> contiguous_padded([0, 3], [0, 4], 2).table.tolist()
    [[0, 1], [2, -1]]
    """
    given = rooms(cu_seqlens, cu_seqlens_padded, workers, 1)
    return spec.padded("contiguous_padded", spec.contiguous, *given, int(workers))


def striped_padded(cu_seqlens: Any, cu_seqlens_padded: Any, workers: int) -> Layout:
    """Make the layout in which worker r holds slots r, r + W, r + 2W... of each document's room, a multiple of W.

    >>> striped_padded([0, 3], [0, 4], 2).table.tolist()
    [[0, 2], [1, -1]]
    """
    given = rooms(cu_seqlens, cu_seqlens_padded, workers, 1)
    return spec.padded("striped_padded", spec.striped, *given, int(workers))


def interleaved(lengths: Any, workers: int, interleave: int = 1) -> Layout:
    """LAYOUT-9: make the layout of a KV cache in decode context parallelism: blocks of I tokens, to the workers in turn.

    ``lengths``: the number of tokens of one request, or a list with one number per request. Each request begins with
    worker 0. ``interleave`` is I, 1 by default. Raises LayoutError.

    >>> interleaved(5, workers=2).table.tolist()
    [[0, 2, 4], [1, 3, -1]]
    >>> interleaved([3, 2], workers=2).table.tolist()
    [[0, 2, 3], [1, -1, 4]]
    """
    counts = check_lengths(lengths).ravel().tolist()
    each = check_interleave(interleave)
    return spec.interleaved([0, *itertools.accumulate(counts)], check_workers(workers), each)


def interleaved_lengths(lengths: Any, workers: int, interleave: int = 1) -> Integers:
    """LAYOUT-10: return how many of each request's tokens each worker holds, L_r(n), as int64 [W, ...].

    ``lengths``: an integer or an array of integers >= 0, of any shape. A causal query at position p sees the first
    L_r(p + 1) keys of worker r (LAYOUT-13): pass positions + 1.

    >>> interleaved_lengths([3, 16], workers=2, interleave=16).tolist()
    [[3, 16], [0, 0]]
    """
    counts, workers, each = (
        check_lengths(lengths),
        check_workers(workers),
        check_interleave(interleave),
    )
    held = [
        [spec.interleaved_length(n, r, workers, each) for n in counts.ravel().tolist()]
        for r in range(workers)
    ]
    return np.array(held, dtype=np.int64).reshape(workers, *counts.shape)


def positions(layout: Layout, cu_seqlens: Any = None, prefix: Any = None) -> Integers:
    """LAYOUT-11: return the position of the token in each slot, int64 [W, n], and -1 in padding slots.

    A position is the offset in the document, plus the number of the document's tokens that are already in a cache:
    ``prefix`` int [N], or one number for all documents; None means 0. Without ``cu_seqlens`` there is one document.
    The positions index a table of RoPE frequencies by position; ``layout.table`` indexes a table by token.

    >>> positions(zigzag_padded([0, 4, 8], [0, 4, 8], 2), [0, 4, 8]).tolist()
    [[0, 3, 0, 3], [1, 2, 1, 2]]
    >>> positions(zigzag_padded([0, 3], [0, 4], 2), [0, 3], prefix=1).tolist()
    [[1, -1], [2, 3]]
    """
    starts = starts_of(layout, cu_seqlens)
    given = check_lengths(0 if prefix is None else prefix, "prefix")
    documents = len(starts) - 1
    if given.shape not in ((), (documents,)):
        raise LayoutError(
            f"prefix as one integer or {documents}, one per document",
            f"shape {given.shape}",
            "pass the number of cached tokens of each document",
        )
    return spec.positions(layout.table, starts, np.broadcast_to(given, (documents,)).tolist())


def local_cu_seqlens(layout: Layout, cu_seqlens: Any = None) -> Integers:
    """LAYOUT-12: return each worker's own cu_seqlens, int64 [W, N + 1], which count its tokens and no padding.

    >>> local_cu_seqlens(zigzag_padded([0, 3, 9], [0, 4, 12], 2), [0, 3, 9]).tolist()
    [[0, 1, 3], [0, 2, 6]]
    """
    return spec.local_cu_seqlens(layout.table, starts_of(layout, cu_seqlens))


def local_lengths(layout: Layout, cu_seqlens: Any = None) -> Integers:
    """Return how many tokens of each document each worker holds, int64 [W, N].

    >>> local_lengths(zigzag_padded([0, 6], [0, 8], 2)).tolist()
    [[2], [4]]
    """
    return np.diff(local_cu_seqlens(layout, cu_seqlens), axis=1)


def owner_and_slot(layout: Layout) -> tuple[Integers, Integers]:
    """Return the worker that holds each token, and its slot there: two arrays int64 [S].

    >>> owner, slot = owner_and_slot(interleaved(5, workers=2, interleave=2))
    >>> owner.tolist(), slot.tolist()
    ([0, 0, 1, 1, 0], [0, 1, 0, 1, 2])
    """
    check_layout(layout)
    worker, slot = np.nonzero(layout.table >= 0)
    order = np.argsort(layout.table[worker, slot])
    return worker[order], slot[order]


def visible_lengths(layout: Layout, queries: Any, cu_seqlens: Any = None) -> Integers:
    """LAYOUT-13: return how many keys of each worker a causal query sees in its own document, int64 [W, Q].

    ``queries`` int [Q]: tokens. It counts in any layout. In an interleaved layout, these are the first keys of the
    document on the worker, and the count is L_r(p + 1).

    >>> visible_lengths(interleaved(10, workers=2), [7, 8, 9]).tolist()
    [[4, 5, 5], [4, 4, 5]]
    """
    starts = np.asarray(starts_of(layout, cu_seqlens))
    tokens = int_array(queries, "queries")
    if tokens.ndim != 1 or (tokens.size and not 0 <= tokens.min() <= tokens.max() < layout.length):
        raise LayoutError(
            f"queries as a list of tokens 0..{layout.length - 1}",
            shown(tokens.tolist()),
            "pass the numbers of tokens in the pack without padding",
        )
    first = starts[np.searchsorted(starts, tokens, side="right") - 1]
    held = layout.table[:, None, :]
    return ((held >= first[:, None]) & (held <= tokens[:, None])).sum(axis=2).astype(np.int64)


def starts_of(layout: Layout, cu_seqlens: Any) -> list[int]:
    """Validate cu_seqlens of all tokens of a layout; None means one document."""
    check_layout(layout)
    if cu_seqlens is None:
        return [0, layout.length]
    starts = boundaries(cu_seqlens, "cu_seqlens")
    if starts[-1] != layout.length:
        raise LayoutError(
            f"cu_seqlens that end at {layout.length}, the number of tokens of the layout",
            shown(starts[-1]),
            "pass cu_seqlens without padding",
        )
    return starts


def rooms(
    cu_seqlens: Any, cu_seqlens_padded: Any, workers: Any, chunks: int
) -> tuple[list[int], list[int]]:
    """Validate cu_seqlens and cu_seqlens_padded; each room must be a multiple of ``chunks`` W and hold its tokens."""
    unit = chunks * check_workers(workers)
    tokens = boundaries(cu_seqlens, "cu_seqlens")
    slots = boundaries(cu_seqlens_padded, "cu_seqlens_padded")
    if len(tokens) != len(slots):
        raise LayoutError(
            "cu_seqlens and cu_seqlens_padded of the same length",
            f"{len(tokens)} and {len(slots)}",
            "pass the boundaries of the same documents",
        )
    lengths, sizes = np.diff(tokens).tolist(), np.diff(slots).tolist()
    for d, (length, room) in enumerate(zip(lengths, sizes, strict=True)):
        if room % unit != 0 or room < length:
            raise LayoutError(
                f"room for the {length} tokens of document {d}, a multiple of {'2W' if chunks == 2 else 'W'} = {unit}",
                f"{room} slots",
                f"pad the document to {-(-length // unit) * unit} slots",
            )
    return tokens, slots


def boundaries(x: Any, what: str) -> list[int]:
    """Validate cu_seqlens, integers [N + 1] that begin with 0 and never decrease, and return them as a list."""
    values = as_array(x, what)
    right = values.dtype.kind in "iu" and values.ndim == 1 and values.size >= 1
    starts = int_array(values, what) if right else values
    if not right or starts[0] != 0 or (starts[1:] < starts[:-1]).any() or starts[-1] > LARGEST:
        raise OptionError(
            f"{what} as a list of integers that begins with 0 and never decreases",
            shown(values.tolist()),
            "give the cumulative lengths of the documents in order",
            code="packing",
        )
    return [int(start) for start in starts]


def check_lengths(x: Any, what: str = "lengths") -> Integers:
    """Validate numbers of tokens, integers >= 0 of any shape, and return them as int64."""
    values = as_array(x, what)
    good = values.dtype.kind in "iu" or values.size == 0
    if not good or (values.size and not 0 <= values.min() <= values.max() <= LARGEST):
        raise LayoutError(
            f"{what} as integers >= 0", shown(values.tolist()), "pass numbers of tokens"
        )
    return values.astype(np.int64)


def check_interleave(interleave: Any) -> int:
    """Validate I, an integer >= 1, and return it as an int."""
    if not is_integer(interleave) or not 1 <= interleave <= LARGEST:
        raise LayoutError(
            "interleave >= 1, the number of neighbouring tokens on one worker",
            shown(interleave),
            "pass interleave=1 to give single tokens to the workers in turn",
        )
    return int(interleave)
