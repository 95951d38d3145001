"""Bugs of lse, of the merge, of empty rows, of sinks, and of the precision of what is carried."""

from __future__ import annotations

import math

import torch
from independent import torch_backward, torch_forward
from independent.catalogue import also, bug
from independent.torch_forward import INFINITY
from independent.torch_ring import Ring
from torch import Tensor

right = torch_forward
LN2 = math.log(2.0)


def weighted(one, other, weights: tuple[Tensor, Tensor], lse: Tensor):
    """o of two partial results under given weights, an empty one left out."""
    parts = zip((one[0], other[0]), weights, strict=True)
    return sum(torch.where(w[..., None] > 0, o * w[..., None], 0.0) for o, w in parts), lse


def narrowed(ring: Ring, x: Tensor) -> Tensor:
    return x.to(ring.narrow).to(ring.wide)


# The base of lse


@bug(
    "leave",
    "C1 C2 C4 C6",
    "Blocks return their lse to base 2 and the ring merges it as a natural one; the final lse is "
    "turned into a natural one.",
    "plain",
)
def base_2_lse_merged_as_natural(ring, m, l, acc):
    o, lse = right.leave(ring, m, l, acc)
    return o, lse / LN2


@also("base_2_lse_merged_as_natural", "add_sinks")
def _made_natural_at_last(ring, worker, o, lse):
    return right.add_sinks(ring, worker, o, lse * LN2)


@bug("merge", "C3", "Natural lse of blocks are merged as though they had base 2.", "plain")
def natural_lse_merged_as_base_2(ring, one, other):
    lse = torch.logaddexp(one[1] * LN2, other[1] * LN2) / LN2
    some = lse > -INFINITY
    shares = (torch.where(some, torch.exp2(x - lse), 0.0) for x in (one[1], other[1]))
    return weighted(one, other, tuple(shares), lse)


@bug(
    "finish",
    "C1 C13",
    "The lse that is reported has base 2. o and the gradients are right.",
    "plain",
)
def lse_reported_in_base_2(ring, worker, o, lse):
    return told(ring, worker, o, lse, lse / LN2)


def told(ring: Ring, worker: int, o: Tensor, lse: Tensor, wrong: Tensor) -> tuple[Tensor, Tensor]:
    """A wrong lse for the caller, while the ring keeps the right one for its own backward."""
    ring.kept = {**getattr(ring, "kept", {}), worker: lse.to(ring.statistics)}
    return right.finish(ring, worker, o, wrong)


@also("lse_reported_in_base_2", "saved")
def kept(ring, worker, lse):
    return torch_backward.saved(ring, worker, getattr(ring, "kept", {}).get(worker, lse))


@bug("finish", "C5", "lse is converted from base 2 to natural twice.", "plain")
def lse_rebased_twice(ring, worker, o, lse):
    return told(ring, worker, o, lse, lse * LN2)


also("lse_rebased_twice", "saved")(kept)


@bug(
    "finish",
    "C15",
    "lse is written for the first query head of each group only; the others keep zeros. o and "
    "the gradients are right.",
    "heads",
)
def lse_of_the_first_head_of_each_group(ring, worker, o, lse):
    first = torch.arange(ring.heads) % (ring.heads // ring.key_heads) == 0
    return told(ring, worker, o, lse, torch.where(first[:, None], lse, 0.0))


also("lse_of_the_first_head_of_each_group", "saved")(kept)


@bug(
    "saved",
    "B5",
    "The backward takes the natural lse for one of base 2: it computes exp2(s log2(e) - lse).",
    "plain",
)
def backward_takes_lse_for_base_2(ring, worker, lse):
    return torch_backward.saved(ring, worker, lse) * LN2


@bug("finish", "", "The lse that is saved and reported is rounded to 16 bits.", "plain", "float32")
def lse_in_16_bits(ring, worker, o, lse):
    return right.finish(ring, worker, o, lse.to(torch.bfloat16))


# The merge


@bug(
    "merge",
    "C7 C9",
    "The merge takes exp(lse) without subtracting a maximum: above 88 it overflows.",
    "huge",
)
def merge_exponentiates_raw_lse(ring, one, other):
    total = torch.exp(one[1]) + torch.exp(other[1])
    some = total > 0
    shares = (
        torch.where(some, torch.exp(x) / torch.where(some, total, 1.0), 0.0)
        for x in (one[1], other[1])
    )
    o = sum(x * w[..., None] for x, w in zip((one[0], other[0]), shares, strict=True))
    return o, torch.log(total)


@bug(
    "merge",
    "C8",
    "lse + log(1 + exp(block_lse - lse)) overflows where a later block outweighs the earlier ones.",
    "rising",
)
def merge_overflows_on_a_rising_lse(ring, one, other):
    gap = other[1] - one[1]
    lse = torch.where(one[1] == -INFINITY, other[1], one[1] + torch.log(1.0 + torch.exp(gap)))
    some = lse > -INFINITY
    shares = (torch.where(some, torch.exp(x - lse), 0.0) for x in (one[1], other[1]))
    return weighted(one, other, tuple(shares), lse)


@bug(
    "merge",
    "C7",
    "A step of the merge updates only the second half of a worker's rows.",
    "zigzag",
)
def merge_updates_half_of_the_rows(ring, one, other):
    o, lse = right.merge(ring, one, other)
    late = torch.arange(lse.shape[-1]) >= lse.shape[-1] // 2
    return torch.where(late[:, None], o, one[0]), torch.where(late, lse, one[1])


@bug("merge", "", "The two weights of the merge are exchanged; lse is right.", "plain")
def merge_weights_exchanged(ring, one, other):
    o, _ = right.merge(ring, (other[0], one[1]), (one[0], other[1]))
    return o, right.merge(ring, one, other)[1]


@bug(
    "merge",
    "D1 D2",
    "Merging two empty partial results computes (-inf) - (-inf), which is NaN.",
    "empty",
)
def merge_of_two_empty_parts_is_nan(ring, one, other):
    lse = torch.logaddexp(one[1], other[1])
    return sum(o * torch.exp(x - lse)[..., None] for o, x in (one, other)), lse


# Empty rows and sentinels


@bug("leave", "C11", "A row that sees no key of a block leaves it with lse = +inf.", "striped")
def empty_rows_of_a_block_have_lse_plus_infinity(ring, m, l, acc):
    o, lse = right.leave(ring, m, l, acc)
    return o, torch.where(l > 0, lse, INFINITY)


@bug("leave", "D3", "A row that sees no key of a block leaves it with lse = 0, o = 0.", "striped")
def empty_rows_of_a_block_have_lse_0(ring, m, l, acc):
    o, lse = right.leave(ring, m, l, acc)
    return o, torch.where(l > 0, lse, 0.0)


@bug("finish", "D4", "A row without keys gets lse = -49993.98 in place of -inf.", "empty")
def empty_rows_have_a_finite_lse(ring, worker, o, lse):
    return right.finish(ring, worker, o, torch.where(lse == -INFINITY, -49993.98, lse))


@bug(
    "update",
    "D5",
    "The running maximum starts at -50000: scores below it vanish, and their rows are taken for "
    "empty ones.",
    "very-low",
)
def maximum_starts_at_minus_50000(ring, state, s, keep, v):
    m, l, acc = state
    return right.update(ring, (m.clamp(min=-5e4), l, acc), s, keep, v)


@bug(
    "update",
    "D7",
    "A first tile that is wholly masked sets the running maximum to 0, and it stays there: rows "
    "whose scores are all near -200 underflow to nothing.",
    "low",
    "float32",
)
def masked_first_tile_pins_the_maximum(ring, state, s, keep, v):
    m, l, acc = right.update(ring, state, s, keep, v)
    return torch.where(m == -INFINITY, 0.0, m), l, acc


@bug(
    "update",
    "D11 D8",
    "A tile that is wholly masked for a row gives exp((-inf) - (-inf)), which is NaN.",
    "striped",
)
def masked_tile_gives_nan(ring, state, s, keep, v):
    m, l, acc = state
    top = torch.maximum(m, s.amax(dim=-1))
    p, shrink = torch.exp(s - top[..., None]), torch.exp(m - top)
    used = p if keep is None else p * keep
    product = ring.do.operand(ring, "p", used) @ v
    return top, l * shrink + p.sum(dim=-1), acc * shrink[..., None] + product


def small_tiles(ring, what):
    """So that a tile is wholly masked in short sequences as well."""
    return 4


for name in ("masked_first_tile_pins_the_maximum", "masked_tile_gives_nan"):
    also(name, "tile_size")(small_tiles)


# Sinks


@bug("add_sinks", "F13", "Sinks are dropped: plain softmax, and dsinks is 0.", "sinks")
def sinks_dropped(ring, worker, o, lse):
    return o, lse


@also("sinks_dropped", "sink_gradient")
def _none(ring, worker, lse, whole):
    return torch.zeros_like(ring.sinks[worker])


@bug(
    "leave",
    "",
    "Sinks are added to the denominator of every block, and so up to W times to a row.",
    "sinks",
)
def sinks_in_every_block(ring, m, l, acc):
    return right.add_sinks(ring, 0, *right.leave(ring, m, l, acc))


@also("sinks_in_every_block", "add_sinks")
def _there_already(ring, worker, o, lse):
    return o, lse


@bug(
    "add_sinks",
    "F14",
    "exp(sink) is added without a common maximum: a sink of 100 makes lse infinite.",
    "large-sink",
)
def sink_outside_the_maximum(ring, worker, o, lse):
    if ring.sinks is None:
        return o, lse
    sink = torch.exp(ring.sinks[worker].to(ring.wide)).sum(dim=-1)[None, :, None]
    top = torch.where(lse == -INFINITY, 0.0, lse)
    l = torch.where(lse == -INFINITY, 0.0, 1.0)
    return o * (l / (l + sink * torch.exp(-top)))[..., None], top + torch.log(
        l + sink * torch.exp(-top)
    )


@bug("add_sinks", "", "All heads use the sinks of the first one.", "sinks")
def sinks_of_the_first_head(ring, worker, o, lse):
    if ring.sinks is None:
        return o, lse
    sink = torch.logsumexp(ring.sinks[worker][0].to(ring.wide), dim=-1)
    whole = torch.logaddexp(lse, sink.expand_as(lse))
    return o * torch.exp(lse - whole)[..., None], whole


@bug("sink_gradient", "F15", "dsinks holds the rows of worker 0 alone.", "sinks")
def sink_gradient_of_worker_0(ring, worker, lse, whole):
    found = torch_backward.sink_gradient(ring, worker, lse, whole)
    return found if worker == 0 else torch.zeros_like(found)


# Precision


@bug(
    "leave",
    "G1 G2",
    "o of every block is 16-bit and is rounded again by every merge, one ring step after another.",
    "many-workers",
)
def partials_in_16_bits(ring, m, l, acc):
    o, lse = right.leave(ring, m, l, acc)
    return narrowed(ring, o), lse


@also("partials_in_16_bits", "merge_all")
def _rounded_at_each_step(ring, found):
    result = found[0]
    for part in found[1:]:
        o, lse = ring.do.merge(ring, result, part)
        result = narrowed(ring, o), lse
    return result


@bug(
    "add",
    "G1 G4",
    "dq, dk and dv are carried in 16 bits: each block's share and each sum is rounded.",
    "many-workers",
)
def gradients_carried_in_16_bits(ring, what, worker, total, share):
    return narrowed(ring, total + narrowed(ring, share))


@bug("operand", "", "P is truncated to 16 bits where it should be rounded to nearest.", "plain")
def p_truncated(ring, what, x):
    if what != "p" or ring.narrow != torch.bfloat16:
        return right.operand(ring, what, x)
    return (x.view(torch.int32) & -65536).view(torch.float32)


@bug(
    "gradient",
    "G3",
    "dq is always rounded to bfloat16, whatever the inputs are.",
    "plain",
    "float16",
)
def dq_always_bfloat16(ring, what, worker, x):
    return (x.to(torch.bfloat16) if what == "dq" else x).to(ring.out)
