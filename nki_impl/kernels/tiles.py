"""Tile sizes, loads of tiles from HBM, and transposes on the tensor engine.

A tensor of one head is stored in HBM by columns, [D, S], or by rows, [S, D]. Products that contract over D need
columns, because the contracted dimension must be the partition dimension. On chip, columns are a tile [D, n]. Rows are
a tile [128, n / 128, D], in which row ``c * 128 + p`` of the head is at [p, c].

A length need not be a multiple of 128. On chip, every tile of rows or columns has whole tiles of 128; the padding of the
last one is 0. HBM has no padding, except in tensors of shape [.., 128, tiles] with one number for each row.
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


def tile_count(length: int) -> int:
    """Return the number of tiles of 128 rows that hold ``length`` rows; the last tile can be partial."""
    return (length + ROWS - 1) // ROWS


def zero_padding(tile: Tensor, length: int) -> None:
    """Write 0 to the columns from ``length`` on of a tile [partitions, n]."""
    if length < tile.shape[1]:
        nisa.memset(dst=tile[:, length:], value=0.0)


def load_columns(head: Tensor, start: int, stop: int) -> Tensor:
    """Load columns start..stop-1 of a head [D, S] in HBM into a tile [D, n]; n is padded to whole tiles."""
    length = stop - start
    tile = nl.ndarray((head.shape[0], tile_count(length) * ROWS), dtype=head.dtype, buffer=nl.sbuf)
    zero_padding(tile, length)
    nisa.dma_copy(dst=tile[:, :length], src=head[:, start:stop])
    return tile


def load_rows(head: Tensor, start: int, stop: int) -> Tensor:
    """Load rows start..stop-1 of a head [S, D] in HBM into a tile [128, n / 128, D]; n is padded to whole tiles."""
    length = stop - start
    whole, rest = length // ROWS, length % ROWS
    tile = nl.ndarray((ROWS, tile_count(length), head.shape[1]), dtype=head.dtype, buffer=nl.sbuf)
    if whole > 0:
        nisa.dma_copy(dst=tile[:, :whole, :], src=whole_rows(head, start, whole))
    if rest > 0:
        nisa.memset(dst=tile[:, whole, :], value=0.0)
        nisa.dma_copy(dst=tile[:rest, whole, :], src=head[stop - rest : stop, :])
    return tile


def store_rows(head: Tensor, start: int, stop: int, tile: Tensor) -> None:
    """Store a tile [128, n / 128, D] to rows start..stop-1 of a head [S, D] in HBM, without the padding."""
    length = stop - start
    whole, rest = length // ROWS, length % ROWS
    if whole > 0:
        nisa.dma_copy(dst=whole_rows(head, start, whole), src=tile[:, :whole, :])
    if rest > 0:
        nisa.dma_copy(dst=head[stop - rest : stop, :], src=tile[:rest, whole, :])


def whole_rows(head: Tensor, start: int, tiles: int) -> Tensor:
    """Return the view [128, tiles, D] of the rows from ``start`` on of a head [S, D] in HBM."""
    return head[start : start + tiles * ROWS, :].reshape_dim(0, (-1, ROWS)).permute((1, 0, 2))


def load_numbers(numbers: Tensor, length: int) -> Tensor:
    """Load one number for each row, [128, tiles] in HBM, into a float32 tile; the padding is not read, and becomes 0."""
    whole, rest = length // ROWS, length % ROWS
    tile = nl.ndarray((ROWS, tile_count(length)), dtype=nl.float32, buffer=nl.sbuf)
    if whole > 0:
        nisa.dma_copy(dst=tile[:, :whole], src=numbers[:, :whole])
    if rest > 0:
        nisa.memset(dst=tile[:, whole:], value=0.0)
        nisa.dma_copy(dst=tile[:rest, whole:], src=numbers[:rest, whole:])
    return tile


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
