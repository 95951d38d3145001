"""One ring attention problem as W workers hold it, and the scores and masks of a tile of it.

Written from the definition of ring attention: positions decide masks, and a pair of blocks is what the
queries of worker a and the keys of worker b make. Everything else of this folder reads scores from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from correct_kernels.philox import kept
from correct_kernels.rounding import narrowed
from numpy.typing import NDArray

Array = NDArray[Any]
Workers = list[Array]
Sizes = int | tuple[int, ...] | None
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453


@dataclass(frozen=True)
class Ring:
    """Lists hold one array a worker; optional terms are None where a problem has none.

    ``q`` [B, H, n, D], ``k`` [B, Hkv, n, D], ``v`` [B, Hkv, n, Dv]: float32, or float64 to check the
    mathematics. ``token_*`` [n]: -1 marks padding; ``position_*``, ``segments_*``, ``bound_*`` [1|B, n].
    ``bias``, ``mask``, ``keep`` [1|B, 1|H, n|1, S|1]: own rows, all keys by token. ``sinks`` [H, N].
    ``format``: what P and dS are rounded to as operands. ``base2``: scores in log2 units and exp2.
    """

    q: Workers
    k: Workers
    v: Workers
    token_q: Workers
    token_k: Workers
    position_q: Workers
    position_k: Workers
    scale: float
    format: str
    base2: bool = False
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    segments_q: Workers | None = None
    segments_k: Workers | None = None
    bound_min: Workers | None = None
    bound_max: Workers | None = None
    mask: Workers | None = None
    bias: Workers | None = None
    softcap: float | None = None
    sinks: Array | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0
    keep: Workers | None = None
    circulation: str = "kv"
    direction: int = 1

    @property
    def workers(self) -> int:
        return len(self.q)

    @property
    def dtype(self) -> np.dtype:
        return self.q[0].dtype

    def operand(self, x: Array) -> Array:
        """x as an operand of a matrix unit."""
        return narrowed(x, self.format)

    def exp(self, x: Array) -> Array:
        return np.exp2(x) if self.base2 else np.exp(x)

    def log(self, x: Array) -> Array:
        with np.errstate(divide="ignore"):
            return np.log2(x) if self.base2 else np.log(x)

    def natural(self, x: Array) -> Array:
        """A logarithm in the units of the scores, as a natural one."""
        return x * self.dtype.type(LN_2) if self.base2 else x

    def units(self, x: Array) -> Array:
        """A natural logarithm in the units of the scores."""
        return x * self.dtype.type(LOG2_E) if self.base2 else x


@dataclass(frozen=True)
class Tile:
    """Some rows of worker a against some columns of worker b.

    ``s`` [B, H, rows, columns] with -inf where the mask forbids; ``tanh`` of a soft cap, else None;
    ``kept``: keep / (1 - dropout_p), else None; ``k``, ``v``: the columns, one for each query head.
    """

    s: Array
    tanh: Array | None
    kept: Array | None
    k: Array
    v: Array

    def drop(self, p: Array) -> Array:
        return p if self.kept is None else p * self.kept


def owner(ring: Ring, worker: int, step: int) -> int:
    """Whose keys the queries of ``worker`` meet at ``step``.

    In a KV ring a worker gets the keys of those before it; in a Q ring its queries visit those after
    it; where keys are gathered, they come in the order of the workers.
    """
    if ring.circulation == "gather":
        return step
    sign = -1 if ring.circulation == "kv" else 1
    return (worker + sign * ring.direction * step) % ring.workers


def cuts(n: int, sizes: Sizes) -> Iterator[slice]:
    """Slices of n rows: all of them (None), of one size, or of several sizes in turn."""
    start, turn = 0, 0
    while start < n:
        size = n if sizes is None else sizes if isinstance(sizes, int) else sizes[turn % len(sizes)]
        yield slice(start, min(start + size, n))
        start, turn = start + size, turn + 1


def tile_of(ring: Ring, a: int, b: int, rows: slice, columns: slice) -> Tile:
    """Scores, mask and dropout of rows of worker a and columns of worker b."""
    group = ring.q[a].shape[1] // ring.k[b].shape[1]
    k, v = (np.repeat(x[b][:, :, columns], group, axis=1) for x in (ring.k, ring.v))
    z = ring.q[a][:, :, rows] @ k.swapaxes(2, 3)
    seen, tanh = visible(ring, a, b, rows, columns), None
    if ring.base2 and ring.bias is None and ring.softcap is None:
        s = z * ring.dtype.type(ring.scale * LOG2_E)
    else:
        s = z * ring.dtype.type(ring.scale)
        if ring.bias is not None:
            s = s + of_pairs(ring, ring.bias, a, b, rows, columns).astype(ring.dtype)
        if ring.softcap is not None:
            tanh = np.tanh(s / ring.dtype.type(ring.softcap))
            s = tanh * ring.dtype.type(ring.softcap)
        s = ring.units(s)
    return Tile(np.where(seen, s, -np.inf), tanh, dropout(ring, a, b, rows, columns), k, v)


def of_pairs(ring: Ring, pairs: Workers, a: int, b: int, rows: slice, columns: slice) -> Array:
    """The part of [1|B, 1|H, n|1, S|1] that belongs to a tile."""
    own = pairs[a] if pairs[a].shape[2] == 1 else pairs[a][:, :, rows]
    return own if own.shape[3] == 1 else own[..., ring.token_k[b][columns]]


def visible(ring: Ring, a: int, b: int, rows: slice, columns: slice) -> Array:
    """Bool [1|B, 1|H, rows, columns]: the conjunction of all terms of the mask."""
    real = (ring.token_q[a][rows, None] >= 0) & (ring.token_k[b][None, columns] >= 0)
    seen = real[None, None]
    query = ring.position_q[a][:, None, rows, None]
    key = ring.position_k[b][:, None, None, columns]
    if ring.causal:
        seen = seen & (key <= query)
    if ring.window is not None:
        left, right = ring.window
        seen = seen if left is None else seen & (key - query >= -left)
        seen = seen if right is None else seen & (key - query <= right)
    if ring.segments_q is not None and ring.segments_k is not None:
        own = ring.segments_q[a][:, None, rows, None]
        seen = seen & (own >= 0) & (own == ring.segments_k[b][:, None, None, columns])
    if ring.bound_min is not None:
        seen = seen & (key >= ring.bound_min[a][:, None, rows, None])
    if ring.bound_max is not None:
        seen = seen & (key < ring.bound_max[a][:, None, rows, None])
    if ring.mask is not None:
        seen = seen & (of_pairs(ring, ring.mask, a, b, rows, columns) != 0)
    if ring.bias is not None:
        seen = seen & (of_pairs(ring, ring.bias, a, b, rows, columns) != -np.inf)
    return seen


def dropout(ring: Ring, a: int, b: int, rows: slice, columns: slice) -> Array | None:
    """keep / (1 - dropout_p) of a tile, or None without dropout."""
    if ring.keep is not None:
        keep = of_pairs(ring, ring.keep, a, b, rows, columns) != 0
    elif ring.dropout_p > 0:
        batch, heads = ring.q[a].shape[:2]
        query, key = ring.position_q[a][:, rows], ring.position_k[b][:, columns]
        keep = kept(ring.dropout_seed, ring.dropout_p, batch, heads, query, key)
    else:
        return None
    return keep.astype(ring.dtype) / ring.dtype.type(1.0 - ring.dropout_p)
