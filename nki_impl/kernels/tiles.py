"""Tile sizes, loads of tiles from HBM, and transposes on the tensor engine.

A tensor of one head is stored in HBM by columns, [D, S], or by rows, [S, D]. Products that contract over D need
columns, because the contracted dimension must be the partition dimension. On chip, columns are a tile [D, n]. Rows are
a tile [128, n / 128, D], in which row ``c * 128 + p`` of the head is at [p, c].
"""

from __future__ import annotations

from typing import Any

from nki_impl.lang import nisa, nl

Tensor = Any
"""A tensor in HBM or a tile on chip: ``nl.NkiTensor`` of whichever NKI is in use."""
DType = Any
"""A member of ``nl`` such as ``nl.float32``."""

ROWS = 128
"""Query rows per tile, and keys per chunk: the number of partitions."""
KEYS = 512
"""Keys per key tile: the free size of one product, one PSUM bank of float32."""
STRETCH = 2048
"""The largest number of rows or keys on chip at a time; longer heads are processed in such stretches."""


def load_columns(head: Tensor, start: int, stop: int) -> Tensor:
    """Load columns of a head [D, S] in HBM into a tile [D, n]."""
    tile = nl.ndarray((head.shape[0], stop - start), dtype=head.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=head[:, start:stop])
    return tile


def load_rows(head: Tensor, start: int, stop: int) -> Tensor:
    """Load rows of a head [S, D] in HBM into a tile [128, n / 128, D]."""
    chunks = (stop - start) // ROWS
    tile = nl.ndarray((ROWS, chunks, head.shape[1]), dtype=head.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=rows_by_partition(head, start, stop))
    return tile


def rows_by_partition(head: Tensor, start: int, stop: int) -> Tensor:
    """Return the view [128, n / 128, D] of rows start..stop-1 of a head [S, D] in HBM."""
    return head[start:stop, :].reshape_dim(0, (-1, ROWS)).permute((1, 0, 2))


def columns_to_rows(columns: Tensor) -> Tensor:
    """Transpose columns [D, n] to rows [128, n / 128, D], both on chip."""
    width, length = columns.shape
    rows = nl.ndarray((ROWS, length // ROWS, width), dtype=columns.dtype, buffer=nl.sbuf)
    for c in range(length // ROWS):
        turned = nl.ndarray((ROWS, width), dtype=columns.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=turned, data=columns[:, c * ROWS : (c + 1) * ROWS])
        nisa.tensor_copy(dst=rows[:, c, :], src=turned)
    return rows


def rows_to_columns(rows: Tensor) -> Tensor:
    """Transpose rows [128, n / 128, D] to columns [D, n], both on chip."""
    _, chunks, width = rows.shape
    columns = nl.ndarray((width, chunks * ROWS), dtype=rows.dtype, buffer=nl.sbuf)
    for c in range(chunks):
        turned = nl.ndarray((width, ROWS), dtype=rows.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=turned, data=rows[:, c, :])
        nisa.tensor_copy(dst=columns[:, c * ROWS : (c + 1) * ROWS], src=turned)
    return columns


def transpose_chunks(tile: Tensor) -> Tensor:
    """Transpose each chunk of 128 keys of a tile [128 rows, keys]; return [128 keys, chunks, 128 rows].

    ``tile`` has at most 512 keys, so that all chunks fit one PSUM bank and a single copy moves them out.
    """
    chunks = tile.shape[1] // ROWS
    turned = nl.ndarray((ROWS, chunks, ROWS), dtype=tile.dtype, buffer=nl.psum)
    for c in range(chunks):
        nisa.nc_transpose(dst=turned[:, c, :], data=tile[:, c * ROWS : (c + 1) * ROWS])
    return turned
