"""Known bugs of context parallelism, by what they change in the dense matrices of a call.

Each bug is a function of a :class:`~.scheme_world.World`. It returns a change, or the results of all ranks, or None where
the bug cannot occur. docs/conform/schemes.md lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.diagnose import scheme_masks as masks
from ringspec.conformance.diagnose import scheme_merges as merges
from ringspec.conformance.diagnose import scheme_term_bugs as terms
from ringspec.conformance.diagnose import scheme_text_bugs as text
from ringspec.conformance.diagnose.scheme_answers import Change, answer
from ringspec.conformance.diagnose.scheme_text_bugs import LINK, Made
from ringspec.conformance.diagnose.scheme_world import Answer, Block, Floats, World, ring_of


@dataclass(frozen=True)
class SchemeBug:
    """A known wrong way to split attention: ``title`` completes "where ..."; ``more``: other programs with the same bug."""

    id: str
    title: str
    make: Callable[[World], Made]
    links: tuple[str, ...] = ()
    more: tuple[Callable[[World], Made], ...] = ()

    def results(self, world: World) -> list[Answer]:
        """Return the results of each program with this bug; none where it cannot occur."""
        each = [make(world) for make in (self.make, *self.more)]
        return [
            answer(world, made) if isinstance(made, Change) else made
            for made in each
            if made is not None
        ]


def local_keys_only(world: World) -> Made:
    if world.text or len(world.ranks) == 1:
        return None
    if world.call.scheme == "dcp":
        return Change([world.blocks(rank, visits=[rank]) for rank in world.ranks])
    found = []
    for rank in world.ranks:
        inside = np.zeros(world.k.shape[2])
        inside[world.columns[rank]] = 1.0
        found.append([Block(world.visible() * inside, world.key_head, rank, world.columns[rank])])
    return Change(found)


def last_block_missed(world: World) -> Made:
    if ring_of(world) == 1:
        return None
    return Change([world.blocks(rank, visits=world.visits(rank)[:-1]) for rank in world.ranks])


def outer_hop_missing(world: World) -> Made:
    if world.call.scheme != "double_ring":
        return None
    inner, outer = world.mesh.size("inner"), world.mesh.size("outer")
    return Change(
        [world.blocks(rank, visits=world.visits(rank)[:inner] * outer) for rank in world.ranks]
    )


def one_hop_short(world: World) -> Made:
    if ring_of(world) == 1 or world.text:
        return None
    return Change(home_k=lambda rank: world.mesh.moved(rank, "ring", 1))


def kv_tiled(world: World) -> Made:
    found = []
    for rank in world.ranks:
        held = world.heads_k[rank].tolist()  # of a decode group: those of the rank
        wanted = [head % world.kv_heads for head in range(world.heads)]
        heads = [head if head in held else held[0] for head in wanted]
        found.append(world.blocks(rank, key_head=heads))
    return Change(found)


def kv_tiled_to_ranks(world: World) -> Made:
    """Key heads are tiled until each rank has one, and the query heads of a rank share them in their order."""
    parts = world.mesh.size("ulysses")
    tiles = world.kv_heads * -(-parts // world.kv_heads)
    if world.call.scheme == "dcp" or tiles == world.kv_heads or world.heads % tiles:
        return None
    heads = [head // (world.heads // tiles) % world.kv_heads for head in range(world.heads)]
    return Change([world.blocks(rank, key_head=heads) for rank in world.ranks])


def foreign_key_heads(world: World) -> Made:
    if world.mesh.size("tp") == 1:
        return None
    found = []
    for rank in world.ranks:
        own = []
        for m in world.mesh.group(rank, "tp"):
            held = world.heads_k[m].tolist()
            heads = [h if h in held else held[0] for h in world.key_head]
            own += world.blocks(rank, visits=[m], key_head=heads)
        found.append(own)
    return Change(found)


def order_of_heads(world: World, heads: int) -> NDArray[np.int64] | None:
    """Return the order in which ``heads`` heads come back if they are interleaved, not rank by rank; None for one rank.

    Head h of the group of P ranks comes back as head (h mod P) H / P + h // P.
    """
    dcp = world.call.scheme == "dcp"
    parts = world.mesh.size("dcp" if dcp else "ulysses")
    each_group = heads // world.mesh.size("tp")
    if parts == 1 or each_group % parts:
        return None
    numbers, each_rank = np.arange(each_group), each_group // parts
    mixed = (
        numbers // each_rank + numbers % each_rank * parts
        if dcp
        else numbers % parts * each_rank + numbers // parts
    )
    return np.concatenate([mixed + t * each_group for t in range(world.mesh.size("tp"))])


def heads_interleaved(*tensors: str, adjoint: bool = False) -> Callable[[World], Made]:
    """Return the bug in which the heads of ``tensors`` come back interleaved and the other results are right.

    ``adjoint``: the gradients are those of the wrong forward pass, as automatic differentiation gives them.
    """

    def made(world: World) -> Made:
        order, backward = order_of_heads(world, world.heads), world.dy is not None
        if order is None or (not backward and (adjoint or "dq" in tensors)):
            return None
        found = answer(world, Change())
        if adjoint and world.dy is not None:
            other = World(world.call)
            other.dy = np.empty_like(world.dy)
            other.dy[:, order] = world.dy
            found = answer(other, Change())
        mixed = reordered(world, order)
        order_k = order_of_heads(world, world.kv_heads)
        for name in tensors:
            if name not in ("dk", "dv"):
                found[name] = mixed[name]
            elif order_k is None:
                return None
            else:
                found[name] = [x[:, order_k] for x in found[name]]
        return found

    return made


def reordered(world: World, order: NDArray[np.int64]) -> Answer:
    """Return results in which o, lse and dq of each head are those of head order[h]."""
    mixed = World(world.call)
    mixed.q, mixed.key_head = world.q[:, order], [world.key_head[h] for h in order]
    mixed.dy = None if world.dy is None else world.dy[:, order]
    return answer(mixed, Change())


def copies_kept(choose: Callable[[list[int]], Mapping[int, float]]) -> Callable[[World], Made]:
    """Return the bug in which ``choose`` says how much the gradient of each rank of a key head counts."""

    def made(world: World) -> Made:
        parts = world.mesh.size("ulysses")
        if parts == 1 or world.dy is None:
            return None
        member = np.arange(world.heads) // (world.heads // parts)
        weights = np.zeros((world.heads, 1, 1))
        for head, key_head in enumerate(world.key_head):
            ranks = sorted({int(member[h]) for h, g in enumerate(world.key_head) if g == key_head})
            weights[head] = choose(ranks).get(int(member[head]), 0.0)
        return Change(take=lambda rank: weights)

    return made


def own_copy_kept(world: World) -> Made:
    """Each rank that has a copy of a key head keeps the gradient of this copy alone."""
    parts = world.mesh.size("ulysses")
    if parts == 1 or world.dy is None:
        return None
    member = np.arange(world.heads) // (world.heads // parts)
    users = [
        {int(member[h]) for h, g in enumerate(world.key_head) if g == own}
        for own in range(world.kv_heads)
    ]

    def take(rank: int) -> Floats:
        here = world.mesh.coordinate(rank, "ulysses")
        kept = [here not in users[g] or member[h] == here for h, g in enumerate(world.key_head)]
        return np.where(kept, 1.0, 0.0)[:, None, None]

    return Change(take=take)


def own_rows_only(world: World) -> Made:
    if world.call.scheme != "all_gather" or world.dy is None:
        return None
    return Change(take=lambda rank: np.where(world.owner == rank, 1.0, 0.0)[:, None])


def backward_change(**changes: Any) -> Callable[[World], Made]:
    return lambda world: Change(**changes) if world.dy is not None else None


def scale_of_width(world: World) -> Made:
    return Change(scale=world.q.shape[3] ** -0.5)


def merging(merge: Any) -> Callable[[World], Made]:
    return lambda world: Change(merge=merge)


HEAD_ORDERS = (
    heads_interleaved("o"),
    heads_interleaved("o", "lse", "dq"),
    heads_interleaved("o", "lse", "dq", "dk", "dv"),
    heads_interleaved("o", "lse", adjoint=True),
    heads_interleaved("o", adjoint=True),
)
OTHER_COPIES = (
    copies_kept(lambda ranks: {ranks[0]: 1.0}),
    copies_kept(lambda ranks: dict.fromkeys(ranks, 1 / len(ranks))),
    own_copy_kept,
)
BUGS = (
    # What a row meets
    SchemeBug("scheme-local-keys", "each rank's queries meet only its own keys", local_keys_only, (f"{LINK}NVIDIA-NeMo/Megatron-Bridge/issues/2667",)),
    SchemeBug("scheme-last-block", "the last block of the ring is not used", last_block_missed),
    SchemeBug("scheme-outer-hop", "the inner ring is repeated without the outer hop", outer_hop_missing),
    SchemeBug("scheme-kv-tiled", "key heads are tiled: query head h uses key head h mod Hkv, not h // G", kv_tiled, more=(kv_tiled_to_ranks,)),
    SchemeBug("scheme-foreign-heads", "a decode group holds ranks of different key heads, so gathered query heads meet foreign keys", foreign_key_heads, (f"{LINK}vllm-project/vllm/issues/48392",)),
    SchemeBug("scheme-head-order", "heads come back interleaved, not rank by rank", heads_interleaved("o", "lse"), (f"{LINK}NVIDIA/TensorRT-LLM/issues/10350",), HEAD_ORDERS),
    SchemeBug("scheme-scale", "the scale is that of the width of q, not the given one", scale_of_width),
    *(SchemeBug(*row) for row in text.BUGS),
    # Backward
    SchemeBug("scheme-gradient-copy", "of a key head on several ranks, only one copy's gradient is kept (also on each rank its own), or their mean", copies_kept(lambda ranks: {ranks[-1]: 1.0}), more=OTHER_COPIES),
    SchemeBug("scheme-gradient-own-rows", "the gradients of gathered keys are not added over the ranks", own_rows_only),
    SchemeBug("scheme-gradient-hop", "dk and dv end one hop before they are home", one_hop_short),
    SchemeBug("scheme-gradient-block-lse", "the backward pass uses o and lse of the block, not of the row", backward_change(own_lse=True), (f"{LINK}tenstorrent/tt-metal/issues/53205",)),
    SchemeBug("scheme-gradient-local-keys", "the backward pass uses the rank's own keys in every step", backward_change(local_keys=True), (f"{LINK}huggingface/diffusers/issues/14265",)),
    # Merges
    SchemeBug("scheme-merge-base2", "partial lse in base 2 are merged as natural ones", merging(merges.base2_as_natural), (f"{LINK}vllm-project/vllm/pull/47079", f"{LINK}sgl-project/sglang/issues/40903")),
    SchemeBug("scheme-merge-natural", "natural partial lse are merged as if in base 2", merging(merges.natural_as_base2), (f"{LINK}sgl-project/sglang/issues/33064",)),
    SchemeBug("scheme-merge-mean", "partial outputs are averaged without weights", merging(merges.mean)),
    SchemeBug("scheme-merge-sum", "partial outputs are added without weights", merging(merges.total)),
    SchemeBug("scheme-merge-empty", "a part without keys has lse 0 instead of -inf", merging(merges.empty_counts)),
    SchemeBug("scheme-merge-garbage", "the unwritten output of a part without keys is multiplied by 0, which keeps NaN", merging(merges.garbage), (f"{LINK}flashinfer-ai/flashinfer/issues/4975",)),
    SchemeBug("scheme-merge-two-empty", "the merge of two parts without keys is NaN", merging(merges.tree), (f"{LINK}vllm-project/vllm/issues/27491", f"{LINK}vllm-project/vllm/pull/39148")),
    SchemeBug("scheme-lse-last", "lse is that of the last block", merging(merges.last_lse)),
    *(SchemeBug(*row) for row in masks.BUGS),
    *(SchemeBug(*row) for row in terms.BUGS),
)  # fmt: skip
