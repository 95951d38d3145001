"""Blocks and gradients that travel in the wrong direction, not far enough, or into a buffer that is in use.

A bug replaces one or a few of the functions that compute a ring; these functions are called pieces and are listed in
:class:`~ringspec.conformance.diagnose.mutants.hooks.Hooks`. The owner of a block is the worker that holds it at the
start; later the block visits the other workers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ringspec.conformance.diagnose.mutants.conditions import (
    backward,
    circulates,
    hides,
    layout,
    ring,
    term,
    when,
)
from ringspec.conformance.diagnose.mutants.hooks import At, Hop, Results, Side, hop
from ringspec.conformance.diagnose.mutants.mutant import guise, mutant
from ringspec.conformance.target.protocol import Call
from ringspec.problem.model import Array
from ringspec.spec.worker import KeySide, QuerySide

INPUTS = {KeySide: ("k", "v"), QuerySide: ("q", "dy", "lse", "row_term")}


def with_inputs_of(side: Side, other: Side, *names: str) -> Side:
    """Return the block ``side`` with tensors of the block ``other``.

    The block keeps its owner. ``names``: the tensors to replace; by default all inputs.
    """
    taken = {name: getattr(other, name) for name in names or INPUTS[type(side)]}
    return dataclasses.replace(side, **taken)


def against(where: Hop) -> Hop:
    return dataclasses.replace(where, direction=-where.direction)


def keys_against(where: Hop, sides: Sequence[Side]) -> list[Side]:
    right, wrong = hop(where, sides), hop(against(where), sides)
    return [with_inputs_of(a, b) for a, b in zip(right, wrong, strict=True)]


def saved_keys_against(where: Hop, sides: Sequence[Side]) -> list[Side]:
    if where.phase == "forward" or not isinstance(sides[0], KeySide):
        return hop(where, sides)
    return keys_against(where, sides)


def owner_of_other_direction(at: At) -> tuple[QuerySide, KeySide]:
    """Mask the visiting block as if it were the block that visits in a ring of the opposite direction."""
    other = (at.worker + at.direction * at.step) % at.workers
    if at.key.owner == at.visitor(at.step):
        return at.query, with_inputs_of(at.key, at.all_keys[other], "columns")
    return with_inputs_of(at.query, at.all_queries[other], "rows"), at.key


def gradients_against(where: Hop, sides: Sequence[Side]) -> list[Side]:
    right, wrong = hop(where, sides), hop(against(where), sides)
    if where.phase == "forward":
        return right
    names = ("dk", "dv") if isinstance(sides[0], KeySide) else ("dq", "dbias")
    return [with_inputs_of(a, b, *names) for a, b in zip(right, wrong, strict=True)]


def not_home(where: Hop, sides: Sequence[Side]) -> list[Side]:
    return list(sides) if where.last else hop(where, sides)


def kept_when_idle(where: Hop, sides: Sequence[KeySide]) -> list[KeySide]:
    """Transfer blocks, but let a worker keep its old dk and dv if keys of a later worker arrive.

    Under a causal mask the worker has nothing to compute with these keys.
    """
    arrived = hop(where, sides)
    if where.phase == "forward" or where.last:
        return arrived
    return [
        with_inputs_of(new, old, "dk", "dv") if new.owner > worker else new
        for worker, (new, old) in enumerate(zip(arrived, sides, strict=True))
    ]


def received_in_place(where: Hop, sides: Sequence[Side]) -> list[Side]:
    """Transfer blocks; from the second transfer on, each worker receives into the buffer that it sends from."""
    right, buffers = hop(where, sides), list(sides)
    if where.step == 0 or where.last:
        return right
    for worker in range(where.workers):
        source = (worker - where.direction) % where.workers
        buffers[worker] = with_inputs_of(right[worker], buffers[source])
    return buffers


def keys_received_in_place(where: Hop, sides: Sequence[Side]) -> list[Side]:
    """Transfer k and v; from the second transfer on, workers receive into the buffers that they send from.

    Worker 0 sends first, then worker 1, and so on.
    """
    right, buffers = hop(where, sides), list(sides)
    if where.step == 0 or where.last or not isinstance(sides[0], KeySide):
        return right
    for source in range(where.workers):
        worker = (source + where.direction) % where.workers
        buffers[worker] = with_inputs_of(right[worker], buffers[source])
    return buffers


def inside_halves(where: Hop, sides: Sequence[Side]) -> list[Side]:
    half = where.workers // 2
    return [sides[(r - where.direction) % half] for r in range(where.workers)]


def open_chain(where: Hop, sides: Sequence[Side]) -> list[Side]:
    """Transfer blocks along an open chain, whose first worker receives nothing and keeps its block."""
    arrived, end = hop(where, sides), 0 if where.direction == 1 else -1
    arrived[end] = sides[end]
    return arrived


def strides_ignored(where: Hop, sides: Sequence[KeySide]) -> list[KeySide]:
    """Transfer blocks; after the first transfer, k and v are read with tokens and heads in the wrong order."""
    arrived = hop(where, sides)
    if where.step > 0 or where.last:
        return arrived
    return [dataclasses.replace(side, k=reread(side.k), v=reread(side.v)) for side in arrived]


def reread(x: Array | None) -> Array:
    assert x is not None
    return x.swapaxes(1, 2).reshape(x.shape)


def pair_misread(results: Results) -> Results:
    """Return wrong gradients: dk + dv of the worker as dk, and dk + dv of the next worker as dv.

    The cause is a pair (received, sent), in which each entry is a stack of dk and dv. The caller takes the pair for
    (dk, dv), and autograd sums each stack.
    """
    stacks = [dk + dv for dk, dv in zip(results["dk"], results["dv"], strict=True)]
    workers = len(stacks)
    sent = [stacks[(r + 1) % workers] for r in range(workers)]
    return results | {"dk": stacks, "dv": sent}


def own_part(owner: int, parts: Sequence[KeySide]) -> Sequence[KeySide]:
    return parts[owner : owner + 1]


def causal_diagonal(call: Call) -> bool:
    return term("causal")(call) and layout("contiguous")(call)


KEY_RING = when(ring(2), circulates("kv"), backward)
QUERY_RING = when(ring(2), circulates("q"), backward)

BUGS = (
    mutant(
        "ring-direction-of-keys",
        "keys travel against the direction that the mask assumes",
        "The mask is computed for one direction of the ring, and the keys travel in the other. "
        "The bug needs at least three workers. Without a mask the forward pass is correct.",
        "pytorch/pytorch/pull/129514", "zhuzilin/ring-flash-attention/pull/10",
        flags=("ring-direction",),
        applies=when(ring(3), circulates("kv", "q")),
        supposes=hides,
        hop=keys_against,
        guises=(
            guise(
                "in the backward pass only",
                when(ring(3), circulates("kv"), backward),
                hop=saved_keys_against,
            ),
            guise(
                "gradients travel with their keys, and only the mask is wrong",
                when(ring(3), circulates("kv", "q")),
                sees=owner_of_other_direction,
            ),
        ),
    ),
    mutant(
        "ring-direction",
        "gradients travel against the direction of the blocks that they belong to",
        "The accumulators are sent to one neighbour and the blocks to the other. With two "
        "workers both neighbours are the same worker, and the bug has no effect.",
        "pytorch/pytorch/pull/129514",
        flags=("ring-direction",),
        applies=when(ring(3), circulates("kv", "q"), backward),
        hop=gradients_against,
    ),
    mutant(
        "dkv-not-home",
        "dk and dv stop one hop short of their owner",
        "dk and dv skip the final hop, which would return them to their owner. Each worker returns "
        "the gradients of its neighbour's keys.",
        "zhuzilin/ring-flash-attention/pull/10",
        flags=("dkv-not-home",),
        applies=KEY_RING,
        hop=not_home,
    ),
    mutant(
        "dq-one-hop-short",
        "dq stops one hop short of its owner in the Q ring",
        "dq skips the final hop, which would return it to its owner. Each worker returns the dq "
        "of its neighbour's queries.",
        flags=("dq-not-home",),
        applies=QUERY_RING,
        hop=not_home,
    ),
    mutant(
        "dkv-kept-on-skipped-steps",
        "dk and dv are not passed on by workers that skip a block",
        "A worker that skips a fully masked block ignores the accumulators that arrived with it "
        "and sends its previous ones again. Without a causal mask no block is skipped.",
        "zhuzilin/ring-flash-attention/pull/10",
        flags=("dkv-not-home",),
        applies=when(KEY_RING, causal_diagonal),
        hop=kept_when_idle,
    ),
    mutant(
        "buffer-reuse",
        "a block is received into the buffer that is still being sent",
        "From the second transfer on, each worker receives into the buffer that it sends from. "
        "One block then reaches every worker, and the others are lost. The bug needs at least "
        "three workers.",
        "zhuzilin/ring-flash-attention/commit/8c83989", "NVIDIA/TransformerEngine/pull/951",
        flags=("buffer-reuse",),
        applies=when(ring(3), circulates("kv", "q")),
        hop=received_in_place,
        guises=(
            guise(
                "keys and values only; worker 0 sends first, then worker 1, and so on",
                when(ring(3), circulates("kv", "q")),
                hop=keys_received_in_place,
            ),
        ),
    ),
    mutant(
        "group-ranks",
        "ranks within a process group are used as global ranks",
        "Each half of the workers is a process group, and its ranks 0 to W / 2 - 1 are taken for "
        "global ones. Blocks then circulate only among the first half of the workers, and the "
        "second half receives copies of them.",
        "zhuzilin/ring-flash-attention/commit/7895974",
        flags=("group-ranks",),
        applies=when(
            ring(4), circulates("kv", "q"), lambda call: call.workers % 2 == 0
        ),
        hop=inside_halves,
    ),
    mutant(
        "ring-not-closed",
        "the last worker does not send to the first",
        "The transfer that closes the ring is missing, so the first worker computes with its own "
        "block in every step.",
        flags=("ring-direction",),
        applies=when(ring(2), circulates("kv", "q")),
        hop=open_chain,
    ),
    mutant(
        "strides-ignored",
        "tensors are sent as if their memory were contiguous",
        "Keys and values that are views into a packed tensor arrive with heads and tokens mixed "
        "up. The worker's own block is correct. A single key head hides the bug.",
        "zhuzilin/ring-flash-attention/commit/1cad320", "zhuzilin/ring-flash-attention/commit/22f0e1d",
        applies=when(
            ring(2), circulates("kv"), lambda call: call.worker("k", 0).shape[1] > 1
        ),
        hop=strides_ignored,
    ),
    mutant(
        "dkv-transfer-misread",
        "dk is returned as dk + dv, and dv as dk + dv of the neighbouring worker",
        "The last transfer returns (received, sent), each a stack of dk and dv. The caller reads "
        "this pair as (dk, dv), and autograd sums each stack to the shape of its input. So dk "
        "becomes dk + dv of the worker's own keys, and dv becomes dk + dv of the keys that it "
        "returned to their owner. o and dq are correct, and no error is raised.",
        "lucidrains/ring-attention-pytorch",
        applies=when(
            KEY_RING, lambda call: call.worker("k", 0).shape == call.worker("v", 0).shape
        ),
        results=pair_misread,
    ),
    mutant(
        "dkv-not-reduced",
        "dk and dv of gathered keys are not summed over the workers",
        "Each worker gathers all keys, but returns only its own contribution to the gradients of "
        "its own keys.",
        applies=when(ring(2), circulates("gather"), backward),
        reduced=own_part,
    ),
)  # fmt: skip
