"""A call of the operation 'context_parallel' in dense matrices: who meets which key in which block, and what comes out.

A known bug changes one of these things: which keys a row meets, in which blocks, with which head of the keys, how blocks
are merged, or which rows a rank's gradients include. Nothing is moved between ranks here, so that a bug is a few lines.
All arrays are float64 [B, H, Sq, K], where K counts the keys and, after them, the padding slots of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.target.cells import global_of, positions_of, shards_of
from ringspec.conformance.target.protocol import Call
from ringspec.schemes.mesh import Mesh
from ringspec.spec.dropout import keep_mask
from ringspec.vectors.format.shards import cut

GATHERED = {"all_gather": "cp", "pcp": "pcp", "dcp": "dcp"}
Floats = NDArray[Any]
Partial = tuple[Floats, Floats]  # o and lse of one block
Answer = dict[str, list[Floats]]


@dataclass(frozen=True)
class Block:
    """Keys that a rank's rows meet together.

    ``counts`` [Sq, K] or [H, Sq, K]: how often each row meets each key. ``key_head``: the key head of each query head.
    ``owner``: the rank from which the keys come, -1 for those of a text. ``columns``: the keys, in order of slots.
    """

    counts: Floats
    key_head: Sequence[int]
    owner: int
    columns: NDArray[np.int64]


class World:
    """The data of a call in global order, and the blocks in which a correct program computes."""

    def __init__(self, call: Call) -> None:
        self.call, self.terms, self.mesh = call, call.terms, Mesh(call.mesh)
        self.ranks = range(call.workers)
        self.tokens_q, self.heads_q = shards_of(call, "q")
        self.tokens_k, self.heads_k = shards_of(call, "k")
        self.q, k, v = (global_of(call, name) for name in ("q", "k", "v"))
        self.dy, self.dlse, self.sinks = (
            global_of(call, name) if name in call.tensors else None
            for name in ("dy", "dlse", "sinks")
        )
        self.heads, self.kv_heads = self.q.shape[1], k.shape[1]
        self.place_q, place_k = positions_of(call)
        self.keys = k.shape[2]
        pads = int((self.tokens_k < 0).sum())
        wide = ((0, 0), (0, 0), (0, pads), (0, 0))
        self.k, self.v = np.pad(k, wide), np.pad(v, wide)
        self.place_k = np.pad(place_k, (0, pads))
        self.columns = self.tokens_k.copy()
        self.columns[self.columns < 0] = self.keys + np.arange(pads)
        self.text = len(self.terms.get("text", ()))
        self.group = self.heads // self.kv_heads
        self.key_head = [head // self.group for head in range(self.heads)]
        self.scale: float = self.terms["scale"]
        self.bias = self.of_pairs("bias") if "bias" in call.tensors else None
        self.factor: Floats | None = self.dropped()

    def of_pairs(self, name: str) -> Floats:
        """Return a tensor [1|B, 1|H, Sq, K] of pairs, with zeros in the columns of padding slots."""
        x = np.asarray(global_of(self.call, name), np.float64)
        return np.pad(x, ((0, 0), (0, 0), (0, 0), (0, self.k.shape[2] - x.shape[3])))

    def dropped(
        self, place_q: Any = None, place_k: Any = None, heads: Sequence[int] | None = None
    ) -> Floats | None:
        """Return by what dropout multiplies each weight, with other positions or numbers of heads if given."""
        p = self.terms.get("dropout_p", 0.0)
        if p == 0.0:
            return None
        if "keep" in self.call.tensors:
            return self.of_pairs("keep") / (1.0 - p)
        kept = keep_mask(
            (self.place_q if place_q is None else place_q)[None],
            (self.place_k if place_k is None else place_k)[None],
            heads=np.array(range(self.heads) if heads is None else heads, np.int64),
            batches=np.arange(self.q.shape[0]),
            dropout_p=p,
            dropout_seed=self.terms["dropout_seed"],
        )
        return np.where(kept, 1.0, 0.0) / (1.0 - p)

    @cached_property
    def documents(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The document of each query [Sq] and of each key and padding slot [K]."""
        starts = self.terms.get("cu_seqlens", (0, self.q.shape[2]))
        every = starts if "cu_seqlens" in self.terms else (0, self.k.shape[2])
        starts_k = self.terms.get("cu_seqlens_k", every)
        of_q = np.searchsorted(starts[1:], np.arange(self.q.shape[2]), side="right")
        of_k = np.searchsorted(starts_k[1:], np.arange(self.k.shape[2]), side="right")
        if "cu_seqlens_padded" in self.terms:
            for row, own in zip(self.columns, self.rooms, strict=True):
                of_k[row[row >= self.keys]] = own[row >= self.keys]
        return of_q, of_k

    @cached_property
    def rooms(self) -> NDArray[np.int64]:
        """The document in whose room each slot lies, [W, n]."""
        each = [(b - a) // len(self.ranks) for a, b in pairwise(self.terms["cu_seqlens_padded"])]
        return np.tile(np.repeat(np.arange(len(each)), each), (len(self.ranks), 1))

    def visible(
        self, place_q: Any = None, place_k: Any = None, documents: Any = None, pads: bool = False
    ) -> Floats:
        """Return which query sees which key, [Sq, K] of 0 and 1, with other positions or documents if given."""
        pq = (self.place_q if place_q is None else place_q)[:, None]
        pk = (self.place_k if place_k is None else place_k)[None, :]
        of_q, of_k = self.documents if documents is None else documents
        allowed = np.ones((len(of_q), len(of_k)), dtype=np.bool_)
        if "cu_seqlens" in self.terms:
            allowed = of_q[:, None] == of_k[None, :]
        allowed = allowed & (pads | (np.arange(pk.shape[1]) < self.keys))
        if self.terms.get("causal"):
            allowed = allowed & (pk <= pq)
        left, right = self.terms.get("window") or (None, None)
        if left is not None:
            allowed = allowed & (pq - pk <= left)
        if right is not None:
            allowed = allowed & (pk - pq <= right)
        return np.where(allowed, 1.0, 0.0)

    def exchanged(self, rank: int, table: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what a rank has of a table after the exchange along ulysses, in order of slots and without the text."""
        return np.concatenate([table[m][self.text :] for m in self.mesh.group(rank, "ulysses")])

    def visits(self, rank: int) -> list[int]:
        """Return the ranks whose keys a rank meets, in order."""
        mesh = self.mesh
        if self.call.scheme == "double_ring":
            return [
                mesh.moved(mesh.moved(rank, "outer", -a), "inner", -b)
                for a in range(mesh.size("outer"))
                for b in range(mesh.size("inner"))
            ]
        if self.call.scheme in GATHERED:
            return [rank]
        return [mesh.moved(rank, "ring", -step) for step in range(mesh.size("ring"))]

    def block_of(self, owner: int) -> NDArray[np.int64]:
        """Return the keys that come from one rank of a ring, in order of slots."""
        if self.call.scheme in ("all_gather", "pcp"):
            axis = GATHERED[self.call.scheme]
            return np.concatenate([self.columns[m] for m in self.mesh.group(owner, axis)])
        return self.exchanged(owner, self.columns)

    def blocks(
        self,
        rank: int,
        visible: Floats | Callable[[int, NDArray[np.int64]], Floats] | None = None,
        visits: Sequence[int] | None = None,
        text: int = 1,
        key_head: Sequence[int] | None = None,
    ) -> list[Block]:
        """Return the blocks that a rank's rows meet, in order.

        ``visible``: [Sq, K], or a function of the owner and its keys; ``visits``: owners of the blocks; ``text``: how
        often the keys of a text are used.
        """
        usual = self.visible() if visible is None else visible
        heads = self.key_head if key_head is None else key_head
        if self.call.scheme == "dcp":
            owners = self.mesh.group(rank, "dcp") if visits is None else visits
            met = [(owner, self.columns[owner]) for owner in owners]
        else:
            owners = self.visits(rank) if visits is None else visits
            met = [(owner, self.block_of(owner)) for owner in owners]
            at = 0 if self.terms.get("text_at") == "front" else len(met)
            own = self.columns[rank][: self.text]
            met[at:at] = [(-1, own)] * (text if self.text else 0)
        found = []
        for owner, columns in met:
            seen = usual(owner, columns) if callable(usual) else usual
            inside = np.zeros(self.k.shape[2])
            inside[columns] = 1.0
            found.append(Block(seen * inside, heads, owner, columns))
        return found

    @cached_property
    def owner(self) -> NDArray[np.int64]:
        """The rank on which each row is differentiated: the lowest one that holds it."""
        found = np.zeros(self.q.shape[2], dtype=np.int64)
        for rank in reversed(self.ranks):
            found[self.tokens_q[rank][self.tokens_q[rank] >= 0]] = rank
        return found

    @cached_property
    def all_blocks(self) -> list[list[Block]]:
        """The blocks of all ranks in a correct program."""
        return [self.blocks(rank) for rank in self.ranks]

    def cut(self, name: str, whole: Sequence[Floats]) -> list[Floats]:
        """Return each rank's cells of a result; ``whole`` has the global tensor of each rank."""
        tokens, heads = shards_of(self.call, name)
        return [
            cut(x, tokens[r : r + 1], heads[r : r + 1])[0]
            for r, x in zip(self.ranks, whole, strict=True)
        ]


def ring_of(world: World) -> int:
    """Return the number of ranks in a ring; 1 if the scheme has none."""
    return world.mesh.size("ring")
