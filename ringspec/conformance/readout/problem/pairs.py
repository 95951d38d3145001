"""Inputs for which the results show, pair by pair, what a ring computed; and functions that read those results.

W workers hold n tokens each. All T = W n tokens are numbered worker by worker. H is the number of query heads. For
query head h and key head c, the matrices S^{c,h} and G^{c,h} are chosen freely. e_x is a unit vector, M_{:j} is
column j of a matrix M, and vectors are filled with zeros up to the head dimension D = Dv >= (H + 1) T.
Padding slots are numbered like tokens, but all their vectors are 0::

    q_i^h = e_{hT+i}        k_j^c = [S^{c,0}_{:j}/scale, ..., S^{c,H-1}_{:j}/scale, e_j]
    v_j^c = [e_j, G^{c,0}_{:j}, ..., G^{c,H-1}_{:j}]        dy_i^h = e_{T+hT+i}

Then s_ij = S_ij and <dy_i, v_j> = G_ij, and the results contain matrices over pairs of tokens::

    o_i[j] = A_ij                       the weights in the forward pass
    o_i[T+hT+i] = delta_i               <dy_i, o_i>
    dv_j[T+hT+i] = P_ij                 the weights in the backward pass
    dq_i[HT+j] / scale = dS_ij          as used for dq
    dk_j[hT+i] / scale = dS_ij          as used for dk

In arrays, a matrix is divided into blocks: ``[a, b, h, i, j]`` is query i of worker a, key j of worker b, head h.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringspec.conformance.readout.problem.geometry import Geometry
from ringspec.problem.model import Array, Integers
from ringspec.spec.dropout import keep_mask
from ringspec.vectors.format.inputs import words

OF_SLOTS = ("o", "lse", "dq", "dk", "dv")
LEVELS, OFFSETS, EIGHTHS = 9, 7, 16
# In dk and dv, the columns of a query head should be 0 in every key head that it does not read. If they are not, their
# entries are added with this weight.
ELSEWHERE = 0.6180339887498949


@dataclass(frozen=True)
class Pairs:
    """The matrices of a problem, for each key head: ``s`` (S) and ``g`` (G), [Hkv, a, b, h, i, j].

    ``dlse`` [W, H, n]: the gradient that arrives for lse; None if the call has none. ``sinks`` [H, N], ``bias`` [a, h, i, (b, j)] and
    ``keep`` [a, h, i, (b, j)], the mask of dropout; None if there are none. ``dy_at`` [(h, a, i)]: the place of the only
    entry of each dy that is not 0, as a fraction of the head dimension; None if dy has others. ``dy_k``: <dy, k>, in the
    form of ``g``. ``starts``: what dk and dv show as matrices, [a, b, h, i, j], if k or v is added to them.
    """

    geometry: Geometry
    s: Array
    g: Array
    dlse: Array | None = None
    sinks: Array | None = None
    bias: Array | None = None
    keep: Array | None = None
    dy_at: Array | None = None
    dy_k: Array | None = None
    starts: Mapping[str, Array] | None = None


@dataclass(frozen=True)
class Seen:
    """What was read from results: matrices [a, b, h, i, j], and ``lse`` and ``delta`` [a, h, i].

    ``weights`` are those of the forward pass. ``through`` [a, h, i, x] is the rest of o: products of the weights with
    G. ``lse`` is None if the target does not return it. ``p``, ``ds_of_dq`` and ``ds_of_dk`` are None without a
    backward pass. ``ds_of_bias`` is None without a bias, and ``dsinks`` [a, h, sink] without sinks.
    """

    weights: Array
    lse: Array | None
    delta: Array
    through: Array
    p: Array | None = None
    ds_of_dq: Array | None = None
    ds_of_dk: Array | None = None
    ds_of_bias: Array | None = None
    dsinks: Array | None = None


def pairs_of(geometry: Geometry, dim: int, seed: int = 1) -> Pairs:
    """Draw S and G for a ring whose vectors have ``dim`` entries.

    An element of S is one of nine values, about 3/8 apart, plus an offset that is drawn for each query and key worker.
    It is a whole multiple of the scale, so that k contains whole numbers. G contains multiples of 1/8 between -2 and 2.
    Every input format holds both k and G exactly.
    """
    W, n, H = geometry.workers, geometry.slots, geometry.heads
    shape = (H // geometry.group, W, W, H, n, n)
    unit = max(1, round(0.375 / geometry.scale)) * geometry.scale

    def below(most: int, name: str, *shape: int) -> Integers:
        drawn = words(f"readout {seed}", name, int(np.prod(shape))) % np.uint64(most)
        return drawn.astype(np.int64).reshape(shape)

    grid, offset = below(LEVELS, "grid", *shape), below(OFFSETS, "offset", *shape[:5], 1)
    g = (below(2 * EIGHTHS + 1, "g", *shape) - EIGHTHS) / 8 * geometry.real_pairs
    # A padded key has the score 0. All others are negative, so that 16-bit results show a visible padded key in every row.
    low = LEVELS + OFFSETS if geometry.padding else 0
    s = (unit * (grid + offset - low)).astype(np.float64) * geometry.real_pairs
    dlse = (below(2 * EIGHTHS + 1, "dlse", W, H, n) - EIGHTHS) / 8 if geometry.dlse else None
    bias = (below(2 * EIGHTHS + 1, "bias", W, H, n, W * n) - EIGHTHS) / 8 if geometry.bias else None
    dy_at = (W * n + np.arange(H * W * n)) / dim
    found = Pairs(
        geometry, s, g.astype(np.float64), dlse, sinks_of(geometry), bias, kept(geometry), dy_at
    )
    inputs = inputs_of(found, dim)
    T, H = geometry.tokens, geometry.heads
    starts = {
        "dk": of_columns(geometry, inputs["k"][..., : H * T]) / geometry.scale,
        "dv": of_columns(geometry, inputs["v"][..., T : T + H * T]),
    }
    return dataclasses.replace(found, dy_k=products(inputs["dy"], inputs["k"]), starts=starts)


def products(rows: Array, columns: Array) -> Array:
    """Return <row, column> in the form of ``g`` for vectors of queries [W, H, n, dim] and of keys [W, Hkv, n, dim]."""
    return np.einsum("ahid,bcjd->cabhij", rows, columns)


def kept(geometry: Geometry, more: int = 0) -> Array | None:
    """Return the counter-based mask of dropout [a, h, i, (b, j)] for the seed plus ``more``; None without a seed."""
    if geometry.dropout is None or geometry.dropout[1] is None:
        return None
    p, seed = geometry.dropout[0], geometry.dropout[1] + more
    position, heads = geometry.position.reshape(1, -1), np.arange(geometry.heads)
    mask = keep_mask(
        position, position, heads=heads, batches=np.zeros(1, int), dropout_p=p, dropout_seed=seed
    )
    by_worker = mask[0].reshape(geometry.heads, geometry.workers, geometry.slots, -1)
    return by_worker.swapaxes(0, 1).astype(np.float64)


def sinks_of(geometry: Geometry) -> Array | None:
    """Return sinks [H, N] that are about as large as the row maxima, each with its own value; None without sinks."""
    if not geometry.sinks:
        return None
    number = np.arange(geometry.heads * geometry.sinks)
    return (2.0 + (5 * number % 16) / 4).reshape(geometry.heads, -1)


def inputs_of(pairs: Pairs, dim: int) -> dict[str, Array]:
    """Return the float64 inputs of all workers: q and dy [W, H, n, dim], k and v [W, Hkv, n, dim].

    ``dim`` is at least (H + 1) T.
    """
    geometry = pairs.geometry
    W, n, H, T = geometry.workers, geometry.slots, geometry.heads, geometry.tokens
    kv = H // geometry.group
    q, dy = np.zeros((W, H, n, dim)), np.zeros((W, H, n, dim))
    k, v = np.zeros((W, kv, n, dim)), np.zeros((W, kv, n, dim))
    for w in range(W):
        for i in range(n):
            token = w * n + i
            if token in geometry.padding:
                continue
            k[w, :, i, H * T + token] = 1.0
            v[w, :, i, token] = 1.0
            for h in range(H):
                q[w, h, i, h * T + token] = 1.0
                dy[w, h, i, T + h * T + token] = 1.0
    # [c, a, b, h, i, j] becomes [b, c, j, (h, a, i)].
    k[..., : H * T] = np.round(by_key(pairs.s, W, kv, n) / geometry.scale)
    v[..., T : T + H * T] = by_key(pairs.g, W, kv, n)
    return {"q": q, "k": k, "v": v, "dy": dy}


def by_key(x: Array, workers: int, kv_heads: int, slots: int) -> Array:
    return x.transpose(2, 0, 5, 3, 1, 4).reshape(workers, kv_heads, slots, -1)


def without_padding(geometry: Geometry, results: Mapping[str, Array]) -> dict[str, Array]:
    """Return results with 0 in padding slots, where a target may return any value."""
    return {
        name: geometry.without_padding(x) if name in OF_SLOTS else x for name, x in results.items()
    }


def seen_in(geometry: Geometry, results: Mapping[str, Array]) -> Seen:
    """Read the matrices from o, dq [W, H, n, dim], dk, dv [W, Hkv, n, dim] and lse [W, H, n]; all but o are optional."""
    W, n, H, T = geometry.workers, geometry.slots, geometry.heads, geometry.tokens
    o = results["o"]
    column = T + T * np.arange(H)[None, :, None, None] + np.arange(T).reshape(W, 1, n, 1)
    delta = np.take_along_axis(o, np.broadcast_to(column, (W, H, n, 1)), axis=3)[..., 0]
    weights, through = of_rows(geometry, o[..., :T]), o[..., T : T + H * T]
    if "dv" not in results:
        return Seen(weights, results.get("lse"), delta, through)
    return Seen(
        weights,
        results.get("lse"),
        delta,
        through,
        of_columns(geometry, results["dv"][..., T : T + H * T]),
        of_rows(geometry, results["dq"][..., H * T : H * T + T]) / geometry.scale,
        of_columns(geometry, results["dk"][..., : H * T]) / geometry.scale,
        of_rows(geometry, results["dbias"][..., geometry.position.ravel()])
        if "dbias" in results
        else None,
        results["dsinks"].reshape(W, H, -1) if "dsinks" in results else None,
    )


def of_rows(geometry: Geometry, x: Array) -> Array:
    """Rearrange [a, h, i, (b, j)] to [a, b, h, i, j]."""
    W, n = geometry.workers, geometry.slots
    return x.reshape(W, geometry.heads, n, W, n).transpose(0, 3, 1, 2, 4)


def of_columns(geometry: Geometry, x: Array) -> Array:
    """Rearrange [b, c, j, (h, a, i)] to [a, b, h, i, j], where c is a key head.

    The entries of query head h belong in its own key head. Entries in other key heads are multiplied by ELSEWHERE and
    added.
    """
    W, n, H, group = geometry.workers, geometry.slots, geometry.heads, geometry.group
    y = x.reshape(W, H // group, n, H, W, n)
    weight = np.where(np.arange(H // group)[:, None] == np.arange(H) // group, 1.0, ELSEWHERE)
    return np.einsum("ch,bcjhai->abhij", weight, y)


def joined(shards: Iterable[Any]) -> Array:
    """Join the arrays [1, heads, n, ..] of the workers to one array [W, heads, n, ..]."""
    return np.concatenate([np.asarray(x) for x in shards])
