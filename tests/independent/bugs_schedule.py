"""Bugs of the schedule: who meets whom, what travels, which buffer holds it."""

from __future__ import annotations

from typing import Any

import torch
from independent import torch_forward as right
from independent.catalogue import bug
from independent.torch_ring import Ring
from torch import Tensor


def turned_round(ring: Ring, held: list[Any]) -> list[Any]:
    return [held[(r + ring.direction) % ring.workers] for r in range(ring.workers)]


@bug(
    "travel",
    "A3",
    "In the backward pass keys and values travel against the direction in which the owner of a "
    "block is computed; their gradients travel the right way.",
    "causal",
)
def kv_turns_round_in_backward(ring, what, held, step):
    if what == "kv back":
        return turned_round(ring, held)
    return right.travel(ring, what, held, step)


@bug(
    "travel",
    "A1",
    "The accumulators of dk and dv travel against keys and values, and end with the wrong owners.",
    "plain",
)
def dkv_against_kv(ring, what, held, step):
    if what == "dkv":
        return turned_round(ring, held)
    return right.travel(ring, what, held, step)


@bug(
    "travel",
    "A3 I5",
    "The last hop of dk and dv is left out: they end one worker before their owner.",
    "plain",
)
def dkv_one_hop_short(ring, what, held, step):
    if what == "dkv" and step == ring.workers - 1:
        return held
    return right.travel(ring, what, held, step)


@bug(
    "travel",
    "A3",
    "In the Q ring the last hop of dq is left out: it ends one worker before its owner.",
    "q-ring",
)
def dq_one_hop_short(ring, what, held, step):
    if what == "dq" and step == ring.workers - 1:
        return held
    return right.travel(ring, what, held, step)


@bug(
    "travel",
    "A3",
    "A worker whose next block is skipped does not take over the dk and dv that arrive, and keeps "
    "its old ones.",
    "causal",
)
def dkv_stay_on_skipped_steps(ring, what, held, step):
    moved = right.travel(ring, what, held, step)
    if what != "dkv" or step == ring.workers - 1:
        return moved
    for r in range(ring.workers):
        b = ring.do.owner(ring, r, step + 1)
        if ring.do.skip(ring, r, b, ring.do.visible(ring, r, b)):
            moved[r] = held[r]
    return moved


@bug(
    "travel",
    "G6 G7",
    "From the second hop on, keys and values are received into the buffer that is still being "
    "sent, so that a worker hands on what has just arrived.",
    "plain",
)
def receives_into_the_buffer_it_sends(ring, what, held, step):
    if not what.startswith("kv") or step == 0:
        return right.travel(ring, what, held, step)
    held = list(held)
    for r in range(ring.workers):
        held[(r + ring.direction) % ring.workers] = held[r]
    return held


@bug(
    "travel",
    "G7 B17",
    "Values are used before they have arrived: at every step from the second on a worker pairs the "
    "keys of this step with the values of the step before.",
    "plain",
)
def values_one_step_late(ring, what, held, step):
    moved = right.travel(ring, what, held, step)
    if not what.startswith("kv") or step > 0:
        return moved
    return [(new[0], old[1]) for new, old in zip(moved, held, strict=True)]


@bug(
    "travel",
    "G6 G7",
    "Worker 1 misses its first receive in the forward pass: it uses its own keys and values "
    "twice, and hands them on in place of what it should have.",
    "plain",
)
def one_worker_misses_a_receive(ring, what, held, step):
    moved = right.travel(ring, what, held, step)
    if what == "kv" and step == 0 and ring.workers > 1:
        moved[1] = held[1]
    return moved


@bug(
    "travel",
    "B13",
    "Keys and values are sent as views without their strides: what arrives on the first hop has "
    "its heads and tokens in the order of memory.",
    "plain",
)
def sent_views_lose_their_strides(ring, what, held, step):
    moved = right.travel(ring, what, held, step)
    if not what.startswith("kv") or step > 0 or ring.circulation == "gather":
        return moved
    return [tuple(x.transpose(1, 2).contiguous().view(x.shape) for x in pair) for pair in moved]


@bug("steps", "", "The ring stops one step early, in both passes: one block is never met.", "plain")
def stops_one_step_early(ring, what):
    return max(ring.workers - 1, 1)


@bug(
    "steps",
    "",
    "The backward ring stops one step early; the accumulators therefore end one hop short as well.",
    "plain",
)
def backward_stops_one_step_early(ring, what):
    return ring.workers if what == "forward" else max(ring.workers - 1, 1)


@bug(
    "owner",
    "A1",
    "The owner of the guest is computed as rank + step though blocks come from rank - step: every "
    "block gets the mask of another one.",
    "causal",
)
def owner_with_the_wrong_sign(ring, worker, step):
    return (worker + ring.direction * step) % ring.workers


@bug(
    "skip",
    "A2",
    "The predicate by which a causal ring skips blocks is inverted (rank <= step for step <= rank): "
    "workers leave out their own diagonal and most of their past.",
    "causal",
)
def skips_by_the_inverted_predicate(ring, a, b, seen):
    step = ((a - b) * ring.direction) % ring.workers
    return not bool(seen.any()) or (ring.causal and a > step)


@bug(
    "block_operands",
    "B1",
    "Every step of the backward is differentiated against the worker's own keys and values, those "
    "of step 0, because they are read from what was saved and not from what travelled.",
    "plain",
)
def backward_reads_step_0_keys(ring, worker, own, guest):
    if ring.circulation == "q":
        return own, guest
    return own, (ring.k[worker], ring.v[worker])


@bug(
    "block_operands",
    "B1",
    "In the backward the keys of step 0 are read at every step, but the values that travelled.",
    "plain",
)
def backward_reads_step_0_keys_and_right_values(ring, worker, own, guest):
    if ring.circulation == "q":
        return own, guest
    return own, (ring.k[worker], guest[1])


@bug(
    "travel",
    "B1",
    "In the Q ring lse and dy_o_sum stay where they are while queries and dy travel.",
    "q-ring",
)
def row_statistics_stay_at_home(ring, what, held, step):
    moved = right.travel(ring, what, held, step)
    if what != "q":
        return moved
    return [(*new[:2], *old[2:]) for new, old in zip(moved, held, strict=True)]


@bug(
    "finish",
    "G9",
    "Only worker 0 writes its o; the others leave zeros. Their lse is right.",
    "plain",
)
def only_worker_0_writes_its_output(ring, worker, o, lse):
    o, lse = right.finish(ring, worker, o, lse)
    return (o if worker == 0 else torch.zeros_like(o)), lse


@bug(
    "add",
    "I4",
    "dk and dv of the last step overwrite what the accumulators hold, where they should be added.",
    "plain",
)
def last_step_overwrites_dkv(ring, what, worker, total, share):
    return share if what in ("dk", "dv") else total + share


@bug("add", "", "dq is what the last step gave: earlier steps are overwritten.", "plain")
def dq_of_the_last_step_only(ring, what, worker, total, share):
    return share if what == "dq" else total + share


@bug(
    "block_operands",
    "B2",
    "Saved keys and values are transposed (heads and tokens) a second time in the backward, which "
    "no shape reveals where there are as many heads as tokens.",
    "square",
)
def keys_transposed_again_when_square(ring, worker, own, guest):
    def again(x: Tensor) -> Tensor:
        return x.transpose(1, 2) if x.dim() == 4 and x.shape[1] == x.shape[2] else x

    if ring.circulation == "q":
        return tuple(again(x) for x in own), guest
    return own, tuple(again(x) for x in guest)


@bug(
    "merge_all",
    "",
    "Each ring step overwrites o and lse of the step before: what remains is the last block that "
    "was met.",
    "plain",
)
def last_block_overwrites_the_rest(ring, found):
    return found[-1]
