"""The input of a noise prediction: the true values, and how a ring divides the problem.

Noise means rounding errors. All arrays are float64. They cover the whole problem in token order, and hold true values,
not a kernel's results. Noise is computed for one :class:`Head` at a time: a key head with the query heads that share
it. dk and dv are sums over these query heads. docs/spec/index.md explains the symbols.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.errors import OptionError, shown
from ringspec.merges import MergeRecipe, visits

__all__ = ["Attention", "Geometry"]

Array = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Attention:
    """True values of one problem with H query heads and Hkv key heads, H = G * Hkv.

    ``q`` [B, H, Sq, D], ``k`` [B, Hkv, Sk, D], ``v`` [B, Hkv, Sk, Dv]: as the kernel received them
    ``s``       [B, H, Sq, Sk] scores after scale, bias and soft cap; -inf where invisible
    ``lse``     [B, H, Sq], including the sinks; -inf for an empty row. ``p`` = exp(s - lse); ``o`` [B, H, Sq, Dv]
    ``scale``   factor of <q, k>
    ``dy``      [B, H, Sq, Dv]; None without a backward pass. ``dlse`` [B, H, Sq], None = zeros
    ``dp``      <dy, v> * keep; ``delta`` = <dy, o> - dlse; ``ds`` = p * (dp - delta), without the factor
                of a soft cap. Any of the three may be None; it is then computed from the other values
    ``keep``    dropout factor (0 or 1 / (1 - dropout_p)), broadcastable to [B, H, Sq, Sk], or None
    ``softcap`` and ``tanh`` [B, H, Sq, Sk] (t = s / softcap where visible), or None
    ``sinks``   [H, N] or None; ``bias`` broadcastable to [B, H, Sq, Sk], -inf where it masks, or None
    """

    q: Array
    k: Array
    v: Array
    s: Array
    lse: Array
    p: Array
    o: Array
    scale: float
    dy: Array | None = None
    dlse: Array | None = None
    dp: Array | None = None
    delta: Array | None = None
    ds: Array | None = None
    keep: Array | None = None
    softcap: float | None = None
    tanh: Array | None = None
    sinks: Array | None = None
    bias: Array | None = None

    @property
    def group(self) -> int:
        """The number G = H / Hkv of query heads that share a key head."""
        return self.q.shape[1] // self.k.shape[1]


@dataclass(frozen=True)
class Geometry:
    """How a ring of W = ``workers`` divides a problem, and in which order partial results are combined.

    Each token belongs to the block of one worker, its owner. The places in a block are numbered slots.

    ``owner_q``, ``owner_k``  [Sq] and [Sk]: the owner of each query and of each key
    ``order``              [W, W]: ``order[r, t]`` is the owner of the keys that worker r computes with at
                           step t of the forward pass; -1 = none
    ``order_dq``           [W, W]: ``order_dq[r, t]`` is the owner of the t-th block of keys that contributes to the dq
                           of worker r
    ``order_dkv``          [W, W]: ``order_dkv[b, t]`` is the owner of the t-th block of queries that contributes to
                           the dk and dv of worker b
    ``slot_q``, ``slot_k``  the slot of each token, which decides its tile; None: slots follow the order of the tokens
    ``reduced_dkv``        whether every contribution to dk, dv is rounded to ``carried_dkv`` before it is added, as in a
                           reduce-scatter; the running sum is always rounded

    >>> ring = Geometry.ring(np.repeat(np.arange(4), 2), np.repeat(np.arange(4), 2), 4)
    >>> ring.order[0].tolist(), ring.order_dkv[0].tolist()
    ([0, 3, 2, 1], [0, 1, 2, 3])
    """

    workers: int
    owner_q: Integers
    owner_k: Integers
    order: Integers
    order_dq: Integers
    order_dkv: Integers
    slot_q: Integers | None = None
    slot_k: Integers | None = None
    reduced_dkv: bool = False

    @classmethod
    def ring(
        cls,
        owner_q: Integers,
        owner_k: Integers,
        workers: int,
        circulation: str = "kv",
        direction: int = 1,
    ) -> Geometry:
        """Return the geometry of a ring (rule RING-1).

        ``circulation``: 'kv' (k, v, dk, dv travel), 'q' (q and dq travel) or 'gather' (all keys are collected first);
        other values raise OptionError. ``direction`` 1: worker r sends to r + 1; -1: to r - 1.
        """
        if circulation not in ("kv", "q", "gather"):
            raise OptionError(
                "circulation 'kv', 'q' or 'gather'", shown(circulation), "pass one of the three"
            )
        r, t = np.arange(workers)[:, None], np.arange(workers)[None, :] * direction
        back, forth = (r - t) % workers, (r + t) % workers
        if circulation == "gather":
            back = (r - np.arange(workers)[None, :]) % workers
            in_order = np.broadcast_to(np.arange(workers), (workers, workers))
            return cls(workers, owner_q, owner_k, back, back, in_order, reduced_dkv=True)
        order_dq, order_dkv = (back, forth) if circulation == "kv" else (forth, back)
        return cls(workers, owner_q, owner_k, back, order_dq, order_dkv)

    @classmethod
    def single(cls, n_q: int, n_k: int) -> Geometry:
        """Return the geometry of one worker with n_q queries and n_k keys: a kernel without a ring."""
        zeros = np.zeros((1, 1), dtype=np.int64)
        return cls(1, np.zeros(n_q, np.int64), np.zeros(n_k, np.int64), zeros, zeros, zeros)

    def merging_as(self, used: MergeRecipe) -> Geometry:
        """Return the geometry with the orders in which the merge recipe ``used`` merges parts and adds gradients."""
        changes: dict[str, Any] = {"order": self._visited(used.order)}
        if used.dq is not None:
            changes["order_dq"] = self._visited(used.dq.order)
        if used.dkv is not None:
            changes |= {"order_dkv": self._visited(used.dkv.order), "reduced_dkv": False}
        return dataclasses.replace(self, **changes)

    def _visited(self, order: str) -> Integers:
        return np.array([visits(order, r, self.workers) for r in range(self.workers)])

    def queries(self, worker: int) -> Integers:
        """Return the global indices of a worker's queries, in the order of its slots."""
        return members(self.owner_q, self.slot_q, worker)

    def keys(self, worker: int) -> Integers:
        """Return the global indices of a worker's keys, in the order of its slots."""
        return members(self.owner_k, self.slot_k, worker)

    def key_tiles(self, worker: int, size: int | None) -> list[Integers]:
        """Return the indices of a worker's keys in tiles of ``size`` slots; None: all in one tile."""
        return tiles(self.keys(worker), self.slot_k, size)

    def query_tiles(self, worker: int, size: int | None) -> list[Integers]:
        """Return the indices of a worker's queries in tiles of ``size`` slots; None: all in one tile."""
        return tiles(self.queries(worker), self.slot_q, size)


def members(owner: Integers, slot: Integers | None, worker: int) -> Integers:
    index = np.flatnonzero(owner == worker)
    return index if slot is None else index[np.argsort(slot[index], kind="stable")]


def tiles(index: Integers, slot: Integers | None, size: int | None) -> list[Integers]:
    """Group token indices into tiles of ``size`` slots; a tile with padding slots has fewer tokens."""
    if index.size == 0:
        return []
    if size is None:
        return [index]
    number = (np.arange(index.size) if slot is None else slot[index]) // size
    return [index[number == n] for n in np.unique(number)]


@dataclass(frozen=True)
class Head:
    """The true values of one key head of one batch, with its G query heads.

    ``q`` [G, Sq, D], ``k`` [Sk, D], ``v`` [Sk, Dv]; ``s``, ``p``, ``dp``, ``ds``, ``dz`` [G, Sq, Sk];
    ``lse``, ``delta``, ``dlse`` [G, Sq]; ``o``, ``dy`` [G, Sq, Dv]. ``keep`` [G, Sq, Sk] or None. ``seen``
    is False for hidden pairs; their ``s`` and ``p`` are 0. ``dz`` = ``ds`` * ``damping``, where ``damping`` = 1 -
    tanh^2 is the derivative of a soft cap, or None.
    """

    q: Array
    k: Array
    v: Array
    s: Array
    seen: NDArray[np.bool_]
    lse: Array
    p: Array
    o: Array
    scale: float
    keep: Array | None
    softcap: float | None
    tanh: Array | None
    damping: Array | None
    sinks: Array | None
    biased: bool
    dy: Array | None = None
    dlse: Array | None = None
    dp: Array | None = None
    delta: Array | None = None
    ds: Array | None = None
    dz: Array | None = None


def head_of(attention: Attention, b: int, h: int) -> Head:
    """Return the true values of key head ``h`` of batch ``b``."""
    at = attention
    heads = slice(h * at.group, (h + 1) * at.group)

    def pairs(x: Array | None) -> Array | None:
        if x is None:
            return None
        return np.broadcast_to(x, at.s.shape)[b, heads]

    s = at.s[b, heads]
    seen = ~np.isneginf(s)
    p, o, v = at.p[b, heads], at.o[b, heads], at.v[b, h]
    keep, tanh = pairs(at.keep), pairs(at.tanh)
    damping = None if tanh is None else 1.0 - tanh * tanh
    forward = Head(
        at.q[b, heads],
        at.k[b, h],
        v,
        np.where(seen, s, 0.0),
        seen,
        at.lse[b, heads],
        p,
        o,
        at.scale,
        keep,
        at.softcap,
        tanh,
        damping,
        None if at.sinks is None else at.sinks[heads],
        at.bias is not None,
    )
    if at.dy is None:
        return forward
    return with_backward(at, forward, b, heads)


def with_backward(at: Attention, head: Head, b: int, heads: slice) -> Head:
    """Add the values of the backward pass to ``head``; values that are missing in ``at`` are computed."""
    assert at.dy is not None
    dy = at.dy[b, heads]
    dlse = np.zeros(head.lse.shape) if at.dlse is None else at.dlse[b, heads]
    dp = dy @ head.v.T if at.dp is None else at.dp[b, heads]
    if at.dp is None and head.keep is not None:
        dp = dp * head.keep
    delta = (dy * head.o).sum(axis=2) - dlse if at.delta is None else at.delta[b, heads]
    ds = head.p * (dp - delta[..., None]) if at.ds is None else at.ds[b, heads]
    dz = ds if head.damping is None else ds * head.damping
    fields = {name: getattr(head, name) for name in head.__dataclass_fields__}
    fields |= {"dy": dy, "dlse": dlse, "dp": dp, "delta": delta, "ds": ds, "dz": dz}
    return Head(**fields)
