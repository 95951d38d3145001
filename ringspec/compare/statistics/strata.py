"""Divide a tensor into parts (strata), because one part may show a bug that the whole tensor hides.

In a ring, each worker holds one block of the tokens. A row ([B, H, S] for o, lse, dq; [B, Hkv, S] for dk, dv) belongs
to a part by its head, its worker, the ring step that contributed most to it, its quarter of the worker's block, or an
edge of the block. Elements are also divided by the sign and by the exponent of their true value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]
POSITIONS = 4  # parts of a block
EDGE = 2  # rows at each end of a block
BINADES = 3  # number of binades that get a stratum each


@dataclass(frozen=True)
class Stratum:
    """A division of a tensor's rows into parts by one criterion, ``kind``, such as 'head'.

    ``labels``: the part of each row, in the tensor's shape without d; -1 for rows in no part. ``names[g]``: the name of
    part g.
    """

    kind: str
    labels: Integers
    names: tuple[str, ...]


def by_token(kind: str, labels: Integers, names: Sequence[str], shape: Sequence[int]) -> Stratum:
    """Divide rows [B, H, S] by their token, given one label for each token [S]."""
    return Stratum(kind, np.broadcast_to(labels, tuple(shape)).copy(), tuple(names))


def heads(shape: Sequence[int]) -> Stratum:
    """Label rows by head; ``shape`` decides whether these are query heads or key heads."""
    labels = np.broadcast_to(np.arange(shape[1])[None, :, None], tuple(shape)).copy()
    return Stratum("head", labels, tuple(f"head {h}" for h in range(shape[1])))


def workers(owner: Integers, count: int, shape: Sequence[int]) -> Stratum:
    """Label rows by worker; ``owner`` [S], -1 for tokens of no worker."""
    return by_token("worker", owner, [f"worker {r}" for r in range(count)], shape)


def local_index(owner: Integers) -> tuple[Integers, Integers]:
    """Return each token's index among the tokens of its worker, and the number of tokens of that worker.

    >>> [x.tolist() for x in local_index(np.array([0, 1, 0, 1, 1]))]
    [[0, 0, 1, 1, 2], [2, 3, 2, 3, 3]]
    """
    place, total = np.zeros(owner.size, dtype=np.int64), np.zeros(owner.size, dtype=np.int64)
    for r in np.unique(owner):
        mine = owner == r
        total[mine] = mine.sum()
        place[mine] = np.arange(mine.sum())
    return place, total


def positions(owner: Integers, shape: Sequence[int]) -> Stratum:
    """Label rows by the quarter of their worker's block in which they lie."""
    place, total = local_index(owner)
    quarter = np.where(owner < 0, -1, place * POSITIONS // np.maximum(total, 1))
    names = [f"quarter {n} of the blocks" for n in range(POSITIONS)]
    return by_token("position", quarter, names, shape)


def edges(owner: Integers, shape: Sequence[int]) -> Stratum:
    """Label the first :data:`EDGE` rows of each worker's block 0, the last :data:`EDGE` rows 1, all others -1."""
    place, total = local_index(owner)
    labels = np.full(owner.size, -1)
    labels[place >= total - EDGE] = 1
    labels[place < EDGE] = 0
    labels[owner < 0] = -1
    return by_token("edge", labels, ["first rows of blocks", "last rows of blocks"], shape)


def steps(mass: Array, met: Integers, owner: Integers) -> Stratum:
    """Label each row by the ring step that contributed most to it.

    ``mass`` [B, H, S, W]: for each row, the sum of P over the block of each worker. ``met[a, b]``: the step in which
    the rows of worker a are computed with the block of worker b; -1 if never. ``owner`` [S]: the worker of each token.
    """
    labels = met[np.maximum(owner, 0)[None, None, :], mass.argmax(axis=3)]
    labels = np.where((mass.max(axis=3) > 0) & (owner >= 0), labels, -1)
    return Stratum("step", labels, tuple(f"step {t}" for t in range(met.shape[1])))


def meeting_steps(order: Integers) -> Integers:
    """Return met[r, b], the step in which worker r computes with the block of worker b; -1 if never.

    ``order[r, t]``: the worker whose block worker r computes with in step t; -1 if none.

    >>> meeting_steps(np.array([[0, 1], [1, 0]])).tolist()
    [[0, 1], [1, 0]]
    """
    met = np.full((order.shape[0], max(order.shape)), -1)
    for r, row in enumerate(order):
        for t, owner in enumerate(row):
            if owner >= 0:
                met[r, owner] = t
    return met


def masses(p: Array, owner: Integers, count: int, axis: int) -> Array:
    """Sum p [B, H, Sq, Sk] over the tokens of each worker, along axis 3 (keys) or 2 (queries)."""
    parts = [
        p[..., owner == r].sum(axis=3) if axis == 3 else p[:, :, owner == r].sum(axis=2)
        for r in range(count)
    ]
    return np.stack(parts, axis=-1)


def strata_for(geometry: Any, p: Array, kv_heads: int) -> dict[str, tuple[Stratum, ...]]:
    """Return the divisions of each tensor's rows, by tensor name.

    ``geometry``: a :class:`ringspec.compare.noise.predict.Geometry`, or an object with the same ``workers``,
    ``owner_q``, ``owner_k``, ``order``, ``order_dq`` and ``order_dkv``. ``p`` [B, H, Sq, Sk]: the true probabilities.
    """
    batch, query_heads, n_q, n_k = p.shape
    count, group = geometry.workers, query_heads // kv_heads
    of_rows = masses(p, geometry.owner_k, count, 3)
    of_keys = masses(p, geometry.owner_q, count, 2)
    of_keys = of_keys.reshape(batch, kv_heads, group, n_k, count).sum(axis=2)
    rows, keys = (batch, query_heads, n_q), (batch, kv_heads, n_k)
    forward = sided(geometry.owner_q, of_rows, geometry.order, rows)
    dq = sided(geometry.owner_q, of_rows, geometry.order_dq, rows)
    dkv = sided(geometry.owner_k, of_keys, geometry.order_dkv, keys)
    return {"o": forward, "lse": forward, "dq": dq, "dk": dkv, "dv": dkv}


def sided(
    owner: Integers, mass: Array, order: Integers, shape: Sequence[int]
) -> tuple[Stratum, ...]:
    """Return the divisions of the query rows or of the key rows that have at least two parts."""
    count = order.shape[0]
    every = (
        heads(shape),
        workers(owner, count, shape),
        steps(mass, meeting_steps(order), owner),
        positions(owner, shape),
        edges(owner, shape),
    )
    return tuple(s for s in every if len(s.names) > 1)


def by_sign(truth: Array) -> tuple[tuple[str, Booleans], ...]:
    """Return a mask of the elements with a positive true value, and a mask of those with a negative true value."""
    return (("positive truth", truth > 0), ("negative truth", truth < 0))


def by_exponent(truth: Array) -> tuple[tuple[str, Booleans], ...]:
    """Return a mask for each of the :data:`BINADES` most frequent binades of |truth|, and a mask for all others.

    >>> [(name, mask.tolist()) for name, mask in by_exponent(np.array([1.0, -1.5, 4.0]))]
    [('|truth| in 2**0', [True, True, False]), ('|truth| in 2**2', [False, False, True])]
    """
    _, exponent = np.frexp(truth)
    exponent = exponent - 1
    usual = np.isfinite(truth) & (truth != 0)
    values, counts = np.unique(exponent[usual], return_counts=True)
    chosen = values[np.argsort(-counts, kind="stable")[:BINADES]]
    parts = [(f"|truth| in 2**{n}", usual & (exponent == n)) for n in sorted(chosen)]
    rest = usual & ~np.isin(exponent, chosen)
    return (*parts, ("|truth| in other binades", rest)) if rest.any() else tuple(parts)
