"""The backward pass: P again from the saved lse, dS, and the gradients that travel round the ring."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from correct_kernels.ring import Ring, Sizes, Tile, cuts, owner, tile_of
from correct_kernels.state import finite
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class BackwardWay:
    """``rows``, ``columns``: sizes of tiles. ``delta_column``: dP - delta inside the matrix product.
    ``random_order``: contributions to dq are added in a random order, as atomic additions are."""

    rows: Sizes = None
    columns: Sizes = None
    delta_column: bool = False
    random_order: bool = False


@dataclass
class Gradients:
    """Accumulators of each worker, not yet multiplied by the scale; ``parts``: unordered parts of dq."""

    dq: list[Array]
    dk: list[Array]
    dv: list[Array]
    dbias: list[Array] | None
    parts: list[tuple[int, slice, Array]] = field(default_factory=list)


def delta_of(dy: Array, o: Array) -> Array:
    """Row sum of dy * o [B, H, n], also called dy_o_sum."""
    return (dy * o).sum(axis=3)


def backward(
    ring: Ring,
    dy: list[Array],
    lse: list[Array],
    delta: list[Array],
    dlse: list[Array] | None = None,
    way: BackwardWay | None = None,
) -> dict[str, list[Array]]:
    """dq, dk, dv and, where the ring has them, dsinks and dbias, of each worker.

    ``dy`` [B, H, n, Dv]; ``lse`` natural, ``delta``, ``dlse`` [B, H, n]; all in the dtype of the ring.
    """
    way = BackwardWay() if way is None else way
    zeros = [[np.zeros_like(x) for x in held] for held in (ring.q, ring.k, ring.v)]
    dbias = None if ring.bias is None else [np.zeros(x.shape, ring.dtype) for x in ring.bias]
    sums = Gradients(*zeros, dbias)
    # What is subtracted from dP. With dlse it is delta - dlse, which a ring sends in place of delta.
    shift = delta if dlse is None else [x - y for x, y in zip(delta, dlse, strict=True)]
    # Hidden pairs may hold numbers whose products overflow.
    with np.errstate(over="ignore", invalid="ignore"):
        for step in range(ring.workers):
            for worker in range(ring.workers):
                add_block(ring, sums, way, worker, owner(ring, worker, step), dy, lse, shift)
    if way.random_order:
        for i in np.random.default_rng(0).permutation(len(sums.parts)):
            worker, rows, part = sums.parts[i]
            sums.dq[worker][:, :, rows] += part
    scale = ring.dtype.type(ring.scale)
    found = {"dq": [x * scale for x in sums.dq], "dk": [x * scale for x in sums.dk], "dv": sums.dv}
    if sums.dbias is not None:
        found["dbias"] = sums.dbias
    if ring.sinks is not None:
        sinks = ring.sinks.astype(ring.dtype)[None, :, None, :]
        found["dsinks"] = [
            -(np.exp(sinks - a[..., None]) * b[..., None]).sum(axis=(0, 2))
            for a, b in zip(lse, shift, strict=True)
        ]
    return found


def add_block(
    ring: Ring,
    sums: Gradients,
    way: BackwardWay,
    a: int,
    b: int,
    dy: list[Array],
    lse: list[Array],
    shift: list[Array],
) -> None:
    """The contributions of the queries of worker a and the keys of worker b."""
    for rows in cuts(ring.q[a].shape[2], way.rows):
        q, dy_rows = ring.q[a][:, :, rows], dy[a][:, :, rows]
        row_lse, row_shift = lse[a][:, :, rows, None], shift[a][:, :, rows, None]
        for columns in cuts(ring.k[b].shape[2], way.columns):
            tile = tile_of(ring, a, b, rows, columns)
            p = ring.exp(tile.s - ring.units(finite(row_lse)))
            # Hidden pairs are selected away, not multiplied by 0: their dP may be infinite. The lse
            # of a row without keys may come with a block that it could see.
            live = (tile.s > -np.inf) & (row_lse > -np.inf)
            p = np.where(live, p, np.zeros_like(p))
            dz = np.where(live, p * dp_minus(ring, tile, dy_rows, row_shift, way), np.zeros_like(p))
            if tile.tanh is not None:
                dz = dz * (1 - tile.tanh * tile.tanh)
            operand = ring.operand(dz)
            if way.random_order:
                sums.parts.append((a, rows, operand @ tile.k))
            else:
                sums.dq[a][:, :, rows] += operand @ tile.k
            kept = ring.operand(tile.drop(p))
            sums.dk[b][:, :, columns] += grouped(ring, operand.swapaxes(2, 3) @ q)
            sums.dv[b][:, :, columns] += grouped(ring, kept.swapaxes(2, 3) @ dy_rows)
            if sums.dbias is not None:
                add_bias(ring, sums.dbias[a], dz, b, rows, columns)


def dp_minus(ring: Ring, tile: Tile, dy: Array, shift: Array, way: BackwardWay) -> Array:
    """dP - shift, with dP = <dy, v> times the dropout factor."""
    if not way.delta_column:
        return tile.drop(dy @ tile.v.swapaxes(2, 3)) - shift
    if tile.kept is not None:
        raise ValueError("expected no dropout, which multiplies dP alone. Fix: delta_column=False")
    ones = np.ones((*tile.v.shape[:3], 1), ring.dtype)
    left, right = np.concatenate([dy, -shift], axis=3), np.concatenate([tile.v, ones], axis=3)
    return left @ right.swapaxes(2, 3)


def grouped(ring: Ring, x: Array) -> Array:
    """Sum over the query heads that share a key head: [B, H, n, d] to [B, Hkv, n, d]."""
    batch, heads, n, d = x.shape
    key_heads = ring.k[0].shape[1]
    return x.reshape(batch, key_heads, heads // key_heads, n, d).sum(axis=2)


def add_bias(ring: Ring, dbias: Array, dz: Array, b: int, rows: slice, columns: slice) -> None:
    """dz of a tile, added to dbias [1|B, 1|H, n|1, S|1] and summed over the axes that it shares."""
    axes = tuple(axis for axis in range(4) if dbias.shape[axis] == 1)
    part = dz.sum(axis=axes, keepdims=True)
    own = slice(None) if dbias.shape[2] == 1 else rows
    if dbias.shape[3] == 1:
        dbias[:, :, own] += part
        return
    token = ring.token_k[b][columns]
    real = token >= 0  # padding has dz = 0, and its token -1 is no index
    dbias[:, :, own, token[real]] += part[..., real]
