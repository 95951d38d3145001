"""Wrong sinks, biases, dropout and batches of context parallelism.

Each function returns results of all ranks or a change, or None where the bug cannot occur. A bug changes a term in global
numbers, so that a rank takes the term of another head, token or element of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ringspec.conformance.diagnose.scheme_answers import Change, answer, merged, with_sinks
from ringspec.conformance.diagnose.scheme_world import Answer, World

Made = Answer | None


def changed(world: World, **fields: object) -> Answer:
    """Return the results of a program with other terms."""
    other = World(world.call)
    for name, value in fields.items():
        setattr(other, name, value)
    return answer(other, Change())


def sinks_ignored(world: World) -> Made:
    return None if world.sinks is None else changed(world, sinks=None)


def sinks_in_every_part(world: World) -> Made:
    if world.sinks is None or all(len(blocks) == 1 for blocks in world.all_blocks):
        return None
    other = World(world.call)
    other.sinks = None
    return answer(other, Change(merge=lambda parts: merged([with_sinks(world, x) for x in parts])))


def local_numbers(world: World) -> list[int] | None:
    """Return the number of each head among those of the rank that computes it; None if all ranks compute all heads."""
    axis = {"ulysses": "ulysses", "usp": "ulysses", "joint": "ulysses"}.get(world.call.scheme, "tp")
    parts = world.mesh.size(axis)
    return None if parts == 1 else [head % (world.heads // parts) for head in range(world.heads)]


def terms_of_local_heads(world: World) -> Made:
    """Sinks at home, in decoding, are those of the heads 0, 1, ... of a rank, whose share is its part of tp and dcp."""
    heads = local_numbers(world)
    if heads is None or (world.call.scheme == "dcp" and world.sinks is None):
        return None
    fields: dict[str, object] = {}
    if world.sinks is not None:
        each = len(world.heads_q[0]) if world.call.scheme == "dcp" else world.heads
        fields["sinks"] = world.sinks[[h % each for h in heads]]
    if world.bias is not None and world.bias.shape[1] > 1:
        fields["bias"] = world.bias[:, heads]
    if world.factor is not None:
        given = "keep" in world.call.tensors
        fields["factor"] = world.factor[:, heads] if given else world.dropped(heads=heads)
    return changed(world, **fields) if fields else None


def dropout_by_slots(world: World) -> Made:
    """Dropout numbers the rows and the keys of each block from 0."""
    if world.factor is None or "keep" in world.call.tensors or world.text:
        return None
    place_q, place_k = np.zeros_like(world.place_q), np.zeros_like(world.place_k)
    for rank in world.ranks:
        rows = world.tokens_q[rank]
        if world.mesh.size("ulysses") > 1:
            rows = world.exchanged(rank, world.tokens_q)
        keys = world.block_of(rank)
        place_q[rows[rows >= 0]] = np.flatnonzero(rows >= 0)
        place_k[keys] = np.arange(len(keys))
    return changed(world, factor=world.dropped(place_q, place_k))


def columns_are_slots(world: World) -> Made:
    """The keys of all ranks, in their order of slots, are taken for the columns of a bias or of a mask of dropout."""
    given = "keep" in world.call.tensors
    if world.bias is None and not given:
        return None
    order = [int(t) for row in world.tokens_k for t in row if t >= 0]
    if len(order) != world.keys or order == sorted(order):
        return None
    columns = np.arange(world.k.shape[2])
    columns[order] = np.arange(world.keys)
    fields: dict[str, object] = {}
    if world.bias is not None:
        fields["bias"] = world.bias[..., columns]
    if given and world.factor is not None:
        fields["factor"] = world.factor[..., columns]
    return changed(world, **fields)


def dlse_ignored(world: World) -> Made:
    return None if world.dlse is None else changed(world, dlse=None)


def first_of_the_batch(world: World) -> Made:
    if world.q.shape[0] == 1:
        return None
    return {name: [0 * x + x[:1] for x in own] for name, own in answer(world, Change()).items()}


Row = tuple[str, str, Callable[[World], Made]]
BUGS: Sequence[Row] = (
    ("scheme-sinks-ignored", "the sinks are not used", sinks_ignored),
    ("scheme-sinks-every-part", "the sinks count in every block or partial result", sinks_in_every_part),
    ("scheme-local-heads", "sinks, bias or dropout are those of heads 0, 1, ... on each rank", terms_of_local_heads),
    ("scheme-dropout-slots", "dropout numbers the rows and keys of each block from 0", dropout_by_slots),
    ("scheme-columns-slots", "the slots of all ranks are taken for the columns of a bias or keep mask", columns_are_slots),
    ("scheme-dlse-ignored", "the gradient of lse is not used", dlse_ignored),
    ("scheme-first-of-batch", "each element of the batch has the results of the first", first_of_the_batch),
)  # fmt: skip
