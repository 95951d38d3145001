"""Classify tiles as fully visible, fully hidden or mixed, without looking at single pairs of tokens.

Queries are cut into row blocks, and keys into short intervals called granules. Here, a tile is a row block with a
granule. For each row block and each granule, the least and the greatest position are computed, and also those of the
segment ids and of the explicit mask bounds, if there are any. These numbers classify most tiles. An undecided tile
counts as mixed, which is slower but never wrong.

A run is a sequence of neighbouring granules; a row block computes each run in one product. The first axis P of arrays
is the batch size, or 1 if positions are the same for all batch entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspec.errors import OptionError
from ringspec.problem.model import Booleans, Columns, Integers, Rows, Terms

LARGE = np.int64(1) << np.int64(62)


@dataclass(frozen=True)
class TileSizes:
    """Lengths of tiles.

    ``rows``: number of queries in a row block. ``keys``: the largest number of keys in a run, which is computed in one
    product. ``granule``: number of keys that are classified together. ``chunk``: number of keys in a chunk; the tasks
    of the backward pass divide the chunks among them.

    Raises OptionError unless all are integers >= 1, ``keys`` is a multiple of ``granule``, and ``chunk`` a multiple
    of ``keys``.
    """

    rows: int = 256
    keys: int = 512
    granule: int = 256
    chunk: int = 1024

    def __post_init__(self) -> None:
        whole = all(type(n) is int and n >= 1 for n in vars(self).values())
        if not (whole and self.keys % self.granule == 0 and self.chunk % self.keys == 0):
            raise OptionError(
                "tile sizes >= 1 with chunk a multiple of keys, and keys a multiple of granule",
                str(self),
                "pass TileSizes(rows=256, keys=512, granule=256, chunk=1024)",
            )


def fastest(dtype: str, terms: Terms, n_q: int, backward: bool) -> TileSizes:
    """Return the sizes that were fastest on a core with a cache of 2 MiB; other sizes were 3 to 8 % slower.

    If positions hide keys, a row block of 512 queries computes more hidden pairs than a row block of 256, but in longer
    products, which are faster. For causal masks in float32, 512 is faster in a forward pass over a long sequence, and
    256 in a backward pass. In float64, longer runs of keys are faster.
    """
    if terms.window is not None:
        return TileSizes()
    if not terms.causal:
        return TileSizes(rows=512)
    if dtype == "float64":
        return TileSizes(keys=1024)
    return TileSizes(rows=512) if n_q >= 4096 and not backward else TileSizes()


@dataclass(frozen=True)
class Run:
    """The keys start..stop-1 for one row block; all keys before ``mixed`` are visible to each of its queries."""

    start: int
    stop: int
    mixed: int

    @property
    def whole(self) -> bool:
        """Whether all keys of the run are visible to every query of the row block."""
        return self.mixed == self.stop


@dataclass(frozen=True)
class Extent:
    """The least and the greatest value, such as a position, in each interval of tokens, [P, intervals].

    Padding is ignored.
    """

    low: Integers
    high: Integers


def starts(length: int, size: int) -> Integers:
    return np.arange(0, length, size)


def extent(x: Integers, real: Booleans, size: int) -> Extent:
    """Return the extent of each interval of ``size`` entries of x [P, n]; low > high where all entries are padding."""
    first = starts(x.shape[1], size)
    low = np.minimum.reduceat(np.where(real, x, LARGE), first, axis=1)
    high = np.maximum.reduceat(np.where(real, x, -LARGE), first, axis=1)
    return Extent(low, high)


def kinds(
    rows: Rows, columns: Columns, terms: Terms, sizes: TileSizes
) -> tuple[Booleans, Booleans]:
    """Return which tiles have a visible pair, and which tiles have only visible pairs.

    Each array is bool [P, row blocks, granules].
    """
    real_q, real_k = rows.index >= 0, columns.index >= 0
    first_q, first_k = starts(real_q.size, sizes.rows), starts(real_k.size, sizes.granule)
    any_q, any_k = (np.logical_or.reduceat(x, f) for x, f in ((real_q, first_q), (real_k, first_k)))
    all_q, all_k = (
        np.logical_and.reduceat(x, f) for x, f in ((real_q, first_q), (real_k, first_k))
    )
    some = (any_q[:, None] & any_k[None, :])[None]
    every = (all_q[:, None] & all_k[None, :])[None]

    def of_rows(x: Integers) -> Extent:
        e = extent(x, real_q, sizes.rows)
        return Extent(e.low[:, :, None], e.high[:, :, None])

    def of_keys(x: Integers) -> Extent:
        e = extent(x, real_k, sizes.granule)
        return Extent(e.low[:, None, :], e.high[:, None, :])

    q, k = of_rows(rows.position), of_keys(columns.position)
    left, right = terms.window or (None, None)
    if terms.causal:  # MASK-1
        some, every = some & (k.low <= q.high), every & (k.high <= q.low)
    if left is not None:  # MASK-2
        some, every = some & (k.high - q.low >= -left), every & (k.low - q.high >= -left)
    if right is not None:
        some, every = some & (k.low - q.high <= right), every & (k.high - q.low <= right)
    if rows.segment is not None and columns.segment is not None:  # MASK-3
        a, b = of_rows(rows.segment), of_keys(columns.segment)
        some = some & (a.low <= b.high) & (b.low <= a.high) & (a.high >= 0) & (b.high >= 0)
        every = every & (a.low == a.high) & (b.low == b.high) & (a.low == b.low) & (a.low >= 0)
    if rows.bound_min is not None and rows.bound_max is not None:  # MASK-4
        low, high = of_rows(rows.bound_min), of_rows(rows.bound_max)
        some = some & (low.low <= k.high) & (k.low < high.high)
        every = every & (low.high <= k.low) & (k.high < high.low)
    return some, every


def plan(
    rows: Rows, columns: Columns, terms: Terms, sizes: TileSizes
) -> tuple[tuple[tuple[Run, ...], ...], ...]:
    """Return the runs of keys that each row block computes: [P][row block][run].

    >>> from ringspec.problem.options import check
    >>> p = check(*np.ones((3, 1, 1, 8, 1)), {"causal": True})
    >>> sizes = TileSizes(rows=4, keys=4, granule=2, chunk=4)
    >>> [[(r.start, r.stop, r.whole) for r in runs] for runs in plan(p.rows, p.columns, p.terms, sizes)[0]]
    [[(0, 4, False)], [(0, 4, True), (4, 8, False)]]
    """
    n_q, n_k = rows.index.size, columns.index.size
    if n_q == 0 or n_k == 0:
        return (((),) * starts(n_q, sizes.rows).size,)
    some, every = kinds(rows, columns, terms, sizes)
    return tuple(
        tuple(runs_of(s, e, n_k, sizes) for s, e in zip(of_some, of_every, strict=True))
        for of_some, of_every in zip(some, np.broadcast_to(every, some.shape), strict=True)
    )


def runs_of(some: Booleans, every: Booleans, n_k: int, sizes: TileSizes) -> tuple[Run, ...]:
    """Join neighbouring granules that are not fully hidden into runs of at most ``sizes.keys`` keys within a chunk."""
    runs: list[Run] = []
    for granule in np.flatnonzero(some).tolist():
        start = granule * sizes.granule
        stop = min(start + sizes.granule, n_k)
        mixed = stop if every[granule] else start
        before = runs[-1] if runs else None
        if (
            before is not None
            and before.stop == start
            and stop - before.start <= sizes.keys
            and start % sizes.chunk != 0
        ):
            runs[-1] = Run(before.start, stop, mixed if before.whole else before.mixed)
        else:
            runs.append(Run(start, stop, mixed))
    return tuple(runs)
