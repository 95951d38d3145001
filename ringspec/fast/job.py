"""Prepare an attention computation for tiling: its tensors, its plan of tiles, and the view of one head.

A row block is an interval of queries, a run an interval of keys, and a tile all pairs of a row block and a run
(:mod:`ringspec.fast.plan`).
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.fast.kept import Kept
from ringspec.fast.plan import Run, TileSizes, fastest, plan
from ringspec.fast.team import run_tasks
from ringspec.problem.model import Booleans, Columns, Rows, Terms, columns_of
from ringspec.spec.dropout import keep_mask
from ringspec.spec.masks import visible

Floats = NDArray[Any]  # of Job.dtype, float32 or float64
# Of a tile: whether any pair is visible, the hidden pairs (None: none), and the first key with a hidden pair.
Pattern = tuple[bool, Booleans | None, int]
MAX_PATTERNS = 64


@dataclass(frozen=True)
class Job:
    """Queries and keys, divided into tiles: a whole dense problem, or one block of a ring.

    ``q`` [B, H, n_q, D], ``k`` [B, Hkv, n_k, D], ``v`` [B, Hkv, n_k, Dv]: any float type. ``dtype``: the type of
    the computation. ``runs``: the runs of keys for each row block, as :func:`~ringspec.fast.plan.plan` returns them.
    ``look``: whether to search k and v for NaN and infinity before use. ``unit``: the factor on the scores of the
    forward pass, log2(e) if the pass uses exp2, else 1. ``kept``: a cache of values derived from read-only arrays.
    ``patterns``: a cache of the hidden pairs of tiles, shared by all heads.
    """

    q: Floats
    k: Floats
    v: Floats
    rows: Rows
    columns: Columns
    terms: Terms
    dtype: np.dtype[Any]
    sizes: TileSizes
    runs: tuple[tuple[tuple[Run, ...], ...], ...]
    look: bool
    kept: Kept
    unit: float = 1.0
    patterns: dict[tuple[int, ...], Pattern] = field(default_factory=dict)

    def row_blocks(self) -> list[tuple[int, int]]:
        n, size = self.q.shape[2], self.sizes.rows
        return [(first, min(first + size, n)) for first in range(0, n, size)]

    def runs_of(self, batch: int) -> tuple[tuple[Run, ...], ...]:
        return self.runs[batch if len(self.runs) > 1 else 0]


def make_job(
    q: Floats,
    k: Floats,
    v: Floats,
    rows: Rows,
    columns: Columns,
    terms: Terms,
    dtype: str,
    sizes: TileSizes | None,
    look: bool | None = None,
    kept: Kept | None = None,
    *,
    backward: bool = False,
) -> Job:
    """Return the :class:`Job` for these tensors and this mask.

    ``look`` None: search k and v for NaN and infinity if the mask can hide keys, because NaN in a hidden key must not
    reach a result. ``sizes`` None: the sizes that :func:`~ringspec.fast.plan.fastest` returns.
    """
    sizes = fastest(dtype, terms, q.shape[2], backward) if sizes is None else sizes
    runs = plan(rows, columns, terms, sizes)
    dense = rows.mask is not None or rows.bias is not None
    hides = dense or not all(run.whole for of in runs for block in of for run in block)
    look = hides if look is None else look
    parts = np.dtype(dtype), sizes, runs, look, kept or Kept(), unit_of(dtype)
    return Job(q, k, v, rows, columns, terms, *parts)


@functools.cache
def unit_of(dtype: str) -> float:
    """Return log2(e) if NumPy's exp2 has a special loop for AVX-512 (Intel's SVML, on Linux), else 1.

    With this loop, a float32 number takes 0.20 ns in exp2 and 0.36 ns in exp; a float64 number takes 0.50 and 0.56 ns.
    Without the loop, exp2 takes 1.8 ns in float32. No time is measured here, because the bits of a result must not
    depend on the load of the machine.
    """
    if sys.platform != "linux":
        return 1.0
    found = np.lib.introspect.opt_func_info(func_name="^exp2$", signature=dtype)
    types = 2 * np.dtype(dtype).char
    current = found.get("exp2", {}).get(types, {}).get("current", "")
    return math.log2(math.e) if current in ("AVX512_SKX", "X86_V4") else 1.0


def norms_of(x: Floats) -> Floats:
    """Return the norm |x_j| of each row; NaN or infinity if the row contains either or the sum of squares overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.sqrt(np.vecdot(x, x))


def is_finite(x: Floats) -> bool:
    """Return whether x contains neither NaN nor infinity.

    A finite sum proves that all elements are finite; otherwise the elements themselves are tested.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(x.sum())) or bool(np.isfinite(x).all())


def all_finite(tensors: Sequence[Floats], threads: int) -> bool:
    """Return whether all tensors [B, H, n, D] are finite; their heads are distributed over threads."""
    found: list[bool] = []

    def look(x: Floats) -> None:
        found.append(is_finite(x))

    run_tasks(
        [functools.partial(look, x[at]) for x in tensors for at in np.ndindex(*x.shape[:2])],
        threads,
    )
    return all(found)


@dataclass(frozen=True)
class Head:
    """One query head of one batch entry: its q [n, D], and the ``rows`` and ``columns`` of its mask."""

    job: Job
    batch: int
    head: int
    q: Floats
    rows: Rows
    columns: Columns


def head_of(job: Job, batch: int, head: int) -> Head:
    rows, columns = job.rows, job.columns
    one_rows = Rows(
        rows.index,
        one(rows.position, batch),
        one(rows.segment, batch),
        one(rows.bound_min, batch),
        one(rows.bound_max, batch),
        one(rows.bias, batch, head),
        one(rows.mask, batch, head),
        one(rows.keep, batch, head),
    )
    one_columns = Columns(columns.index, one(columns.position, batch), one(columns.segment, batch))
    return Head(
        job,
        batch,
        head,
        job.q[batch, head],
        one_rows,
        one_columns,
    )


def one(x: Any, *where: int) -> Any:
    """Keep only the entries ``where`` of the leading axes of x; an axis of length 1 keeps its only entry."""
    if x is None:
        return None
    index = (n if x.shape[axis] > 1 else 0 for axis, n in enumerate(where))
    return x[tuple(slice(n, n + 1) for n in index)]


@dataclass(frozen=True)
class Tile:
    """The n queries of a row block and the keys start..stop-1 of a run, with mask, dropout factors and bias.

    ``hidden`` [n, keys]: True for hidden pairs; None if all pairs are visible. ``first``: the first column of
    ``hidden`` that has a hidden pair. ``keep``: the dropout factors, or None. ``bias``: the bias, with 0 where it hides
    the pair, or None. Both are broadcastable to [n, keys].
    """

    start: int
    stop: int
    hidden: Booleans | None
    first: int
    keep: Floats | None
    bias: Floats | None


def tile_of(head: Head, q0: int, q1: int, run: Run) -> Tile | None:
    """Return the tile of queries q0..q1-1 and the keys of ``run``; None if the mask or a bias hides all its pairs."""
    terms, dtype = head.job.terms, head.job.dtype
    hidden, first = None, 0
    if not run.whole or head.rows.mask is not None or head.rows.bias is not None:
        some, hidden, first = seen_and_hidden(head, q0, q1, run)
        if not some:
            return None
    keep, bias = None, None
    if head.rows.keep is not None or terms.dropout_p != 0:
        keep = keep_of(head, q0, q1, run).astype(dtype)
    if head.rows.bias is not None:
        rows, columns = head.rows.slice(q0, q1), head.columns.slice(run.start, run.stop)
        bias = np.asarray(columns_of(rows.bias, columns)[0, 0], dtype)  # type: ignore[arg-type]
        bias = np.where(np.isneginf(bias), dtype.type(0), bias)
    return Tile(run.start, run.stop, hidden, first, keep, bias)


def seen_and_hidden(head: Head, q0: int, q1: int, run: Run) -> Pattern:
    """Return whether any pair of a tile is visible, its hidden pairs, and the first key with a hidden pair.

    Without an explicit mask array or a bias, all heads share this result.
    """
    job = head.job
    if head.rows.mask is not None or head.rows.bias is not None:
        return pattern_of(head, q0, q1, run)
    at = (head.batch if len(job.runs) > 1 else 0, q0, run.start)
    pattern = job.patterns.get(at)
    if pattern is None:
        pattern = pattern_of(head, q0, q1, run)
        if len(job.patterns) >= MAX_PATTERNS:  # all patterns together would need S * S memory
            job.patterns.clear()
        job.patterns[at] = pattern
    return pattern


def pattern_of(head: Head, q0: int, q1: int, run: Run) -> Pattern:
    rows, terms, known = head.rows.slice(q0, q1), head.job.terms, head.job.kept.patterns
    if rows.mask is not None or rows.bias is not None:
        return made_pattern(rows, head.columns.slice(run.start, run.stop), terms, 0)
    columns, before = head.columns.slice(run.mixed, run.stop), run.mixed - run.start
    key = before, *likeness(rows, columns, terms)
    pattern = known.get(key)
    if pattern is None:
        pattern = made_pattern(rows, columns, terms, before)
        if len(known) >= MAX_PATTERNS:
            known.clear()
        known[key] = pattern
    return pattern


def made_pattern(rows: Rows, columns: Columns, terms: Terms, before: int) -> Pattern:
    """Compute the result of :func:`seen_and_hidden` for a tile whose first ``before`` keys are visible to all rows.

    ``columns``: the other keys of the tile.
    """
    hidden = ~visible(rows, columns, terms)[0, 0]
    if not hidden.any():
        return True, None, 0
    first = before + int(hidden.any(axis=0).argmax())
    some = before > 0 or not hidden.all()
    return some, np.pad(hidden, ((0, 0), (before, 0))), first


def likeness(rows: Rows, columns: Columns, terms: Terms) -> tuple[Any, ...]:
    """Return the cache key for the hidden pairs of a tile.

    Two tiles that differ only by a shift along the diagonal have the same cache key, because they hide the same pairs.
    For example, all tiles on the diagonal of a causal mask share one cache key. Without the cache, computing the hidden
    pairs took as long as the products of the tile.
    """
    base = columns.position[0, 0]
    from_base = rows.position, columns.position, rows.bound_min, rows.bound_max
    as_is = rows.index >= 0, columns.index >= 0, rows.segment, columns.segment
    moved = [None if x is None else (x - base).tobytes() for x in from_base]
    return (
        terms.causal,
        terms.window,
        *moved,
        *(None if x is None else x.tobytes() for x in as_is),
    )


def keep_of(head: Head, q0: int, q1: int, run: Run) -> Floats:
    """Return keep / (1 - dropout_p) of a tile, as ``spec.dropout.keep_factor`` does (rules DROP-1, DROP-3)."""
    terms = head.job.terms
    rows, columns = head.rows.slice(q0, q1), head.columns.slice(run.start, run.stop)
    if rows.keep is not None:
        kept = columns_of(rows.keep, columns)
    else:
        kept = keep_mask(
            rows.position,
            columns.position,
            heads=np.array([head.head]),
            batches=np.array([head.batch]),
            dropout_p=terms.dropout_p,
            dropout_seed=terms.dropout_seed,
        )
    return kept[0, 0] / (1.0 - terms.dropout_p)


def product(p: Floats, x: Floats, tile: Tile, finite: bool, out: Floats) -> Floats:
    """Compute p [n, keys] times x [keys, D], where p is 0 at hidden pairs.

    ``finite`` False: x may contain NaN or infinity. 0 times NaN is NaN, so a hidden key could put NaN into a row that
    must not depend on it. Keys that are not finite are therefore added row by row, only to the rows that see them.
    """
    if finite or tile.hidden is None:
        return np.matmul(p, x, out=out)
    bad = np.logical_not(np.all(np.isfinite(x), axis=1))
    np.matmul(p, np.where(bad[:, None], 0.0, x).astype(x.dtype), out=out)
    for row in np.flatnonzero(~tile.hidden[:, bad].all(axis=1)):
        seen = bad & ~tile.hidden[row]
        out[row] += p[row, seen] @ x[seen]
    return out
