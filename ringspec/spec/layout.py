"""Layouts: which token lies in which slot of which worker (LAYOUT-1 to LAYOUT-13).

A *slot* is the place of one token on a worker. A layout is a table ``index[worker, slot]`` of global token indices,
which holds each token once, and -1 in a padding slot. The mask hides every pair that has a padding slot (LAYOUT-5).
With W workers of n slots each, worker r holds:

``contiguous``           in each slot: token r * n + slot
``striped``              in each slot: token slot * W + r
``zigzag``               chunk r, then chunk 2W - 1 - r, of 2W chunks of S/(2W) tokens
``zigzag_per_document``  zigzag inside each packed document
``zigzag_padded``        zigzag over the room of each padded document; slots past its tokens are padding
``interleaved``          token i if (i // I) mod W = r, as in decode context parallelism
a table [W, n]           the tokens in row r of the table

Sharding, unsharding and unpermuting move values without changing them. A length S counts tokens, not padding slots.
:mod:`ringspec.rings.layouts` checks the preconditions: S is a multiple of W (of 2W for zigzag); cu_seqlens begins
with 0 and never decreases. Tokens are numbered without padding: token ``cu_seqlens[d] + i`` is number i of document d.
LAYOUT-11 to LAYOUT-13 are integers that kernels need beside a table. The last two functions convert lse to and from the
tiles in which some kernels store it (LAYOUT-7).

Sources: striped: Brandon et al., https://arxiv.org/abs/2311.09431; zigzag:
https://github.com/zhuzilin/ring-flash-attention (issue 2); zigzag per document and zigzag padded: TransformerEngine's
context parallelism for THD tensors; interleaved: vLLM's decode context parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def zigzag_padded(
    cu_seqlens: Sequence[int], cu_seqlens_padded: Sequence[int], workers: int
) -> Layout:
    """LAYOUT-8: zigzag over the room of each document; slots at and past its number of tokens are padding.

    Document d has n = ``cu_seqlens[d + 1] - cu_seqlens[d]`` tokens in N = ``cu_seqlens_padded[d + 1] -
    cu_seqlens_padded[d]`` slots, a multiple of 2W. Worker r holds chunks r and 2W - 1 - r of 2W chunks of N/(2W) slots.

    >>> zigzag_padded([0, 3, 9], [0, 4, 12], 2).table.tolist()
    [[0, -1, 3, 4, -1, -1], [1, 2, 5, 6, 7, 8]]
    """
    return padded("zigzag_padded", zigzag, cu_seqlens, cu_seqlens_padded, workers)


def padded(
    name: str,
    inside: Callable[[int, int], Layout],
    cu_seqlens: Sequence[int],
    cu_seqlens_padded: Sequence[int],
    workers: int,
) -> Layout:
    """Distribute the room of each document as ``inside(room, workers)`` distributes a sequence of this length."""
    parts = [np.zeros((workers, 0), dtype=np.int64)]
    for d in range(len(cu_seqlens) - 1):
        first, stop = cu_seqlens[d], cu_seqlens[d + 1]
        slots = inside(cu_seqlens_padded[d + 1] - cu_seqlens_padded[d], workers).table
        parts.append(np.where(slots < stop - first, first + slots, -1))
    return Layout(name, np.concatenate(parts, axis=1))


def interleaved(cu_seqlens: Sequence[int], workers: int, interleave: int) -> Layout:
    """LAYOUT-9: token i of a document is on worker (i // I) mod W, in slot (i // (W * I)) * I + i mod I.

    I is ``interleave``. Each document (in serving, each request) begins with worker 0 and with a slot of its own, which
    is the same on all workers. A sequence of n tokens is ``cu_seqlens = [0, n]``.

    >>> interleaved([0, 5], 2, 1).table.tolist(), interleaved([0, 5], 2, 4).table.tolist()
    ([[0, 2, 4], [1, 3, -1]], [[0, 1, 2, 3], [4, -1, -1, -1]])
    """
    parts = [np.zeros((workers, 0), dtype=np.int64)]
    for first, stop in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        offset = np.arange(stop - first, dtype=np.int64)
        owner = offset // interleave % workers
        slot = offset // (workers * interleave) * interleave + offset % interleave
        longest = interleaved_length(stop - first, 0, workers, interleave)
        inside = np.full((workers, longest), -1, dtype=np.int64)
        inside[owner, slot] = first + offset
        parts.append(inside)
    return Layout("interleaved", np.concatenate(parts, axis=1))


def interleaved_length(length: int, worker: int, workers: int, interleave: int) -> int:
    """LAYOUT-10: worker r holds L_r(n) = (n // (W * I)) * I + clamp(n mod (W * I) - r * I, 0, I) of n tokens.

    >>> [interleaved_length(5, r, workers=2, interleave=4) for r in range(2)]
    [4, 1]
    """
    rounds, rest = divmod(length, workers * interleave)
    return rounds * interleave + min(max(rest - worker * interleave, 0), interleave)


def positions(table: Integers, cu_seqlens: Sequence[int], prefix: Sequence[int]) -> Integers:
    """LAYOUT-11: a token's position is its offset in its document plus the document's prefix, whatever its slot.

    ``prefix[d]`` tokens of document d are already in a cache. Returns int64 [W, n], -1 in padding slots.

    >>> positions(zigzag_padded([0, 4, 8], [0, 4, 8], 2).table, [0, 4, 8], [0, 0]).tolist()
    [[0, 3, 0, 3], [1, 2, 1, 2]]
    """
    document = np.searchsorted(cu_seqlens, table, side="right") - 1
    offset = table - np.asarray(cu_seqlens)[document] + np.asarray(prefix)[document]
    return np.where(table < 0, -1, offset)


def local_cu_seqlens(table: Integers, cu_seqlens: Sequence[int]) -> Integers:
    """LAYOUT-12: a worker's own cu_seqlens [W, N + 1] count its tokens before each document and before the end.

    >>> local_cu_seqlens(zigzag_padded([0, 3, 9], [0, 4, 12], 2).table, [0, 3, 9]).tolist()
    [[0, 1, 3], [0, 2, 6]]
    """
    counts = [[((row >= 0) & (row < start)).sum() for start in cu_seqlens] for row in table]
    return np.array(counts, dtype=np.int64)


def visible_length(position: int, worker: int, workers: int, interleave: int) -> int:
    """LAYOUT-13: of an interleaved document, a causal query at position p sees the first L_r(p + 1) keys of worker r.

    The number need not grow from one query to the next. For the last three of 10 tokens on two workers:

    >>> [visible_length(p, 1, workers=2, interleave=1) for p in (7, 8, 9)]
    [4, 4, 5]
    """
    return interleaved_length(position + 1, worker, workers, interleave)


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
