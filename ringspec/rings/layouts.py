"""Public layout functions: check every argument, then call the function of :mod:`ringspec.spec.layout`.

A layout says which worker holds which token, and in which *slot* (place on the worker). :mod:`ringspec.spec.layout`
states LAYOUT-1 to LAYOUT-7. Arrays may be anything that NumPy can read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringspec.errors import LayoutError, OptionError, ShapeError, nearest, shown
from ringspec.problem.checks import (
    as_array,
    check_workers,
    float_array,
    int_array,
    length_of,
    segments_from_cu_seqlens,
)
from ringspec.problem.model import Array, Integers
from ringspec.spec import layout as spec
from ringspec.spec.layout import LAYOUTS, TILE_ROWS, Layout


def from_table(table: Any, length: int, workers: int | None = None) -> Layout:
    """LAYOUT-5: make a layout from a table [W, n] that has each token 0..S-1 exactly once, and -1 in padding slots.

    S is ``length``. ``workers`` is W; None means the number of rows of the table. Raises LayoutError for any other
    table, and OptionError if ``table`` is None.

    >>> from_table([[3, 0], [1, 2]], 4).table.tolist()
    [[3, 0], [1, 2]]
    """
    if table is None:
        raise OptionError(
            "a layout name or a table [W, n]", "None", nearest("", LAYOUTS), code="unknown-name"
        )
    values = as_array(table, "layout table")
    if values.dtype.kind not in "iu" or values.ndim != 2 or values.shape[0] < 1:
        raise LayoutError(
            "a layout table of integers [W, n]",
            f"dtype {values.dtype}, shape {values.shape}",
            f"pass one row of token indices per worker, or a name: {', '.join(LAYOUTS)}",
        )
    if values.size and int(values.max()) >= 2**63:
        raise LayoutError("token indices below S", "2**63 or more", "write padding as -1 in int64")
    values, length = int_array(values, "layout table"), length_of(length)
    workers = None if workers is None else check_workers(workers)
    if workers is not None and values.shape[0] != workers:
        raise LayoutError(
            f"a layout table with {workers} rows, one per worker",
            f"shape {values.shape}",
            f"pass workers={values.shape[0]} or another table",
        )
    held = np.sort(values[values >= 0])
    if not np.array_equal(held, np.arange(length)):
        raise LayoutError(
            f"each token 0..{length - 1} in exactly one slot",
            describe_tokens(held, length),
            "list each token once; write -1 in padding slots",
        )
    return Layout("table", np.where(values < 0, -1, values))


def describe_tokens(held: Integers, length: int) -> str:
    """Say which tokens a table lacks, repeats or should not have."""
    unique, counts = np.unique(held, return_counts=True)
    missing = np.setdiff1d(np.arange(length), unique)
    if missing.size:
        return f"token {missing[0]} in no slot"
    if (counts > 1).any():
        return f"token {unique[counts > 1][0]} in {counts.max()} slots"
    return f"token {unique[unique >= length][0]} with S = {length}"


def make_layout(layout: Any, length: int, workers: int, cu_seqlens: Any = None) -> Layout:
    """Return a layout of ``length`` tokens over ``workers`` workers, from a name, a table [W, n] or a Layout.

    'zigzag_per_document' needs ``cu_seqlens`` int [N + 1], the starts of the documents and the end of the last one, and
    raises OptionError without it. Other errors: OptionError for an unknown name, and LayoutError if the length is not a
    multiple of W (of 2W for 'zigzag').

    >>> make_layout("striped", 4, 2).table.tolist()
    [[0, 2], [1, 3]]
    """
    workers = check_workers(workers)
    if isinstance(layout, Layout):
        return Layout(layout.name, from_table(layout.table, length, workers).table)
    if not isinstance(layout, str):
        return from_table(layout, length, workers)
    if layout not in LAYOUTS:
        raise OptionError(
            "a layout name or a table [W, n]",
            shown(layout),
            nearest(layout, LAYOUTS),
            code="unknown-name",
        )
    if layout == "zigzag_per_document":
        return spec.zigzag_per_document(length_of(length), workers, starts(cu_seqlens, length))
    chunks, length = 2 if layout == "zigzag" else 1, length_of(length)
    if length % (chunks * workers) != 0:
        longer = -(-length // (chunks * workers)) * chunks * workers
        raise LayoutError(
            f"S divisible by {'W' if chunks == 1 else '2W'} = {chunks * workers} for the layout {layout!r}",
            f"S = {length}",
            f"pad the sequence to S = {longer}",
        )
    constructors = {"contiguous": spec.contiguous, "striped": spec.striped, "zigzag": spec.zigzag}
    return constructors[layout](length, workers)


def starts(cu_seqlens: Any, length: int) -> list[int]:
    """Validate cu_seqlens (the starts of packed documents, and the end of the last one) and return them as a list."""
    if cu_seqlens is None:
        raise OptionError(
            "cu_seqlens with the layout 'zigzag_per_document'",
            "none",
            "pass cu_seqlens=[0, ...], or use layout='zigzag'",
            code="packing",
        )
    segments_from_cu_seqlens(cu_seqlens, length, "cu_seqlens")
    return [int(start) for start in np.asarray(cu_seqlens)]


def shard(x: ArrayLike, layout: Layout, axis: int = 2) -> list[NDArray]:
    """Cut a global array into one local array per worker of ``layout``; padding slots hold zeros.

    ``x`` [.., S, ..] of any dtype has its tokens on ``axis``. Returns W arrays [.., n, ..] of the same
    dtype. Raises ShapeError if ``axis`` has another length than S, LayoutError if ``layout`` is not a Layout.

    >>> [s.ravel().tolist() for s in shard(np.arange(4.0).reshape(1, 1, 4, 1), make_layout("striped", 4, 2))]
    [[0.0, 2.0], [1.0, 3.0]]
    """
    check_layout(layout)
    values = as_array(x, "the tensor to shard")
    check_axis(values, axis, layout.length, "S")
    return spec.shard(values, layout, axis)


def unshard(shards: Sequence[ArrayLike], layout: Layout, axis: int = 2) -> NDArray:
    """Gather local arrays into the global array, without the contents of padding slots. Inverse of :func:`shard`.

    ``shards``: W arrays [.., n, ..] of one shape and dtype, with the slots of ``layout`` on ``axis``.
    Returns an array [.., S, ..] of the same dtype. Raises ShapeError if the number or a shape of the arrays is wrong.

    >>> unshard([[0, 2], [1, 3]], make_layout("striped", 4, 2), axis=0).tolist()
    [0, 1, 2, 3]
    """
    check_layout(layout)
    parts = check_shards(shards, axis)
    if len(parts) != layout.workers:
        raise ShapeError(
            f"{layout.workers} local arrays, one per worker", str(len(parts)), "pass all of them"
        )
    check_axis(parts[0], axis, layout.slots, "n")
    return spec.unshard(parts, layout, axis)


def unpermute(shards: Sequence[ArrayLike], axis: int = 2) -> list[NDArray]:
    """LAYOUT-6: turn the local arrays of a striped sequence into those of the contiguous layout.

    ``shards``: W arrays [.., n, ..] of one shape and dtype, with tokens on ``axis``. Returns W such arrays.

    >>> [s.tolist() for s in unpermute([np.array([0, 2]), np.array([1, 3])], axis=0)]
    [[0, 1], [2, 3]]
    """
    parts = check_shards(shards, axis)
    check_axis(parts[0], axis, None, "n")
    return spec.unpermute(parts, axis)


def check_layout(layout: Any) -> None:
    """Raise LayoutError unless ``layout`` is a :class:`Layout`."""
    if not isinstance(layout, Layout):
        fix = 'make one: make_layout("zigzag", 32, workers=4)'
        raise LayoutError("a Layout", shown(layout), fix)


def check_shards(shards: Sequence[ArrayLike], axis: int) -> list[NDArray]:
    """Validate a list of local arrays of one shape and dtype and return it."""
    if not isinstance(shards, (list, tuple)) or not shards:
        raise ShapeError("a list of local arrays", shown(shards), "pass one array per worker")
    parts = [as_array(part, "a local array") for part in shards]
    forms = {(part.shape, part.dtype) for part in parts}
    if len(forms) != 1:
        raise ShapeError(
            "local arrays of one shape and dtype",
            shown(sorted(map(str, forms))),
            "pad the short ones",
        )
    return parts


def check_axis(x: NDArray, axis: int, length: int | None, what: str) -> None:
    """Raise ShapeError unless ``x`` has the axis ``axis``, with ``length`` entries (None: any number)."""
    known = isinstance(axis, int) and 0 <= axis < x.ndim
    if not known or (length is not None and x.shape[axis] != length):
        raise ShapeError(
            f"an array with {what} = {length} on axis {axis}",
            f"shape {x.shape}",
            "pass axis=2 for [B, H, S, D]",
        )


def lse_to_tiles(lse: Array) -> Array:
    """LAYOUT-7: store lse [B, H, S] as tiles [B, H, 128, S // 128]; row i is at [i % 128, i // 128].

    ``lse`` is float64. Raises ShapeError unless S is a multiple of 128.
    """
    lse = float_array(lse, "lse", rank=3, finite=False)
    if lse.shape[2] % TILE_ROWS != 0:
        raise ShapeError("S divisible by 128", f"S = {lse.shape[2]}", "pad the sequence")
    return spec.lse_to_tiles(lse)


def lse_from_tiles(tiles: Array) -> Array:
    """Convert ``tiles`` [B, H, 128, S // 128] back to lse [B, H, S]. Inverse of :func:`lse_to_tiles`.

    Both are float64. Raises ShapeError unless axis 2 has length 128.
    """
    tiles = float_array(tiles, "lse tiles", rank=4, finite=False)
    if tiles.shape[2] != TILE_ROWS:
        raise ShapeError(
            "tiles [B, H, 128, S // 128]",
            f"shape {tiles.shape}",
            "pass tiles as lse_to_tiles returns them",
        )
    return spec.lse_from_tiles(tiles)
