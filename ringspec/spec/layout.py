"""Layouts: which token lies in which slot of which worker (LAYOUT-1 to LAYOUT-7).

A *slot* is the place of one token on a worker. A layout is a table ``index[worker, slot]`` of global token indices,
which holds each token once, and -1 in a padding slot. The mask hides every pair that has a padding slot (LAYOUT-5).
With W workers of n slots each, worker r holds:

``contiguous``           in each slot: token r * n + slot
``striped``              in each slot: token slot * W + r
``zigzag``               chunk r, then chunk 2W - 1 - r, of 2W chunks of S/(2W) tokens
``zigzag_per_document``  zigzag inside each packed document
a table [W, n]           the tokens in row r of the table

Sharding, unsharding and unpermuting move values without changing them. A length S counts tokens, not padding slots.
:mod:`ringspec.rings.layouts` checks the preconditions: S is a multiple of W (of 2W for zigzag); cu_seqlens begins
with 0 and never decreases. The last two functions convert lse to and from the tiles in which some kernels store it
(LAYOUT-7).

Sources: striped: Brandon et al., https://arxiv.org/abs/2311.09431; zigzag:
https://github.com/zhuzilin/ring-flash-attention (issue 2); zigzag per document: TransformerEngine's
context parallelism for THD tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringspec.problem.model import Array, Integers, take

LAYOUTS = ("contiguous", "striped", "zigzag", "zigzag_per_document")
TILE_ROWS = 128


@dataclass(frozen=True)
class Layout:
    """A distribution of tokens over workers: ``table`` int64 [W, n] has the global token of each slot, -1 = padding."""

    name: str
    table: Integers

    @property
    def workers(self) -> int:
        """W, the number of workers."""
        return int(self.table.shape[0])

    @property
    def slots(self) -> int:
        """n, the number of slots of one worker."""
        return int(self.table.shape[1])

    @property
    def length(self) -> int:
        """S, the number of tokens."""
        return int((self.table >= 0).sum())


def contiguous(length: int, workers: int) -> Layout:
    """LAYOUT-1: worker r holds tokens r * n + slot; ``length`` S must be a multiple of W.

    >>> contiguous(4, 2).table.tolist()
    [[0, 1], [2, 3]]
    """
    return Layout("contiguous", np.arange(length, dtype=np.int64).reshape(workers, -1))


def striped(length: int, workers: int) -> Layout:
    """LAYOUT-2: worker r holds tokens slot * W + r; ``length`` S must be a multiple of W.

    >>> striped(4, 2).table.tolist()
    [[0, 2], [1, 3]]
    """
    return Layout("striped", np.arange(length, dtype=np.int64).reshape(-1, workers).T.copy())


def zigzag(length: int, workers: int) -> Layout:
    """LAYOUT-3: worker r holds chunks r and 2W - 1 - r of 2W equal chunks; ``length`` S must be a multiple of 2W.

    >>> zigzag(8, 2).table.tolist()
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    chunks = np.arange(length, dtype=np.int64).reshape(2 * workers, -1)
    table = [np.concatenate((chunks[r], chunks[2 * workers - 1 - r])) for r in range(workers)]
    return Layout("zigzag", np.stack(table))


def zigzag_per_document(length: int, workers: int, cu_seqlens: Sequence[int]) -> Layout:
    """LAYOUT-4: zigzag inside each packed document, so that the workers have equal work for every document.

    ``cu_seqlens`` int [N + 1]: the starts of the documents, beginning with 0, and the end of the last document. The
    length of each document is padded to a multiple of 2W. Tokens after the last document are placed like one more
    document.

    >>> zigzag_per_document(6, 2, [0, 4, 6]).table.tolist()
    [[0, 3, 4, -1], [1, 2, 5, -1]]
    """
    starts = sorted({*cu_seqlens, length})  # an empty document adds no start
    parts = [np.zeros((workers, 0), dtype=np.int64)]
    for first, stop in zip(starts[:-1], starts[1:], strict=True):
        chunk = -(-(stop - first) // (2 * workers))
        inside = zigzag(2 * workers * chunk, workers).table
        parts.append(np.where(inside < stop - first, first + inside, -1))
    return Layout("zigzag_per_document", np.concatenate(parts, axis=1))


def shard(x: NDArray, layout: Layout, axis: int = 2) -> list[NDArray]:
    """Cut x [.., S, ..] into one local array [.., n, ..] per worker; padding slots hold zeros.

    >>> [s.ravel().tolist() for s in shard(np.arange(4.0).reshape(1, 1, 4, 1), striped(4, 2))]
    [[0.0, 2.0], [1.0, 3.0]]
    """
    return [take(x, layout.table[r], axis) for r in range(layout.workers)]


def unshard(shards: Sequence[NDArray], layout: Layout, axis: int = 2) -> NDArray:
    """Gather local arrays into the global one, without the contents of padding slots. Inverse of :func:`shard`.

    >>> unshard([np.array([0, 2]), np.array([1, 3])], striped(4, 2), axis=0).tolist()
    [0, 1, 2, 3]
    """
    shape = shards[0].shape
    x = np.zeros(shape[:axis] + (layout.length,) + shape[axis + 1 :], dtype=shards[0].dtype)
    before = (slice(None),) * axis
    for r, local in enumerate(shards):
        real = np.flatnonzero(layout.table[r] >= 0)
        x[(*before, layout.table[r, real])] = np.take(local, real, axis)
    return x


def unpermute(shards: Sequence[NDArray], axis: int = 2) -> list[NDArray]:
    """LAYOUT-6: turn the local arrays of a striped sequence into those of the contiguous layout.

    >>> [s.tolist() for s in unpermute([np.array([0, 2]), np.array([1, 3])], axis=0)]
    [[0, 1], [2, 3]]
    """
    workers, n = len(shards), shards[0].shape[axis]
    x = unshard(shards, striped(workers * n, workers), axis)
    return shard(x, contiguous(workers * n, workers), axis)


def lse_to_tiles(lse: Array) -> Array:
    """LAYOUT-7: store lse [B, H, S], S a multiple of 128, as tiles [B, H, 128, S // 128]; row i is at [i % 128, i // 128].

    >>> lse_to_tiles(np.arange(256.0).reshape(1, 1, 256))[0, 0, 1].tolist()
    [1.0, 129.0]
    """
    batch, heads, length = lse.shape
    return lse.reshape(batch, heads, length // TILE_ROWS, TILE_ROWS).swapaxes(2, 3).copy()


def lse_from_tiles(tiles: Array) -> Array:
    """Convert tiles [B, H, 128, S // 128] back to lse [B, H, S]. Inverse of :func:`lse_to_tiles`."""
    batch, heads, rows, columns = tiles.shape
    return tiles.swapaxes(2, 3).reshape(batch, heads, rows * columns).copy()
