"""Bugs of masks, positions, windows, packing, bias and heads."""

from __future__ import annotations

import torch
from independent import torch_forward as right
from independent.catalogue import also, bug
from independent.torch_ring import Ring
from torch import Tensor


def slots(token: Tensor) -> Tensor:
    return torch.arange(len(token))


def local(ring: Ring, a: int, b: int) -> tuple[Tensor, Tensor]:
    """Slots in place of positions."""
    return slots(ring.token_q[a])[None, None, :, None], slots(ring.token_k[b])[None, None, None, :]


@bug(
    "causal",
    "A2",
    "The causal triangle of local indices is laid over every block, not only over the diagonal one.",
    "causal",
)
def causal_triangle_on_every_step(ring, a, b):
    rows, columns = local(ring, a, b)
    return columns <= rows


@bug(
    "causal",
    "A10 B14",
    "The ring computes full attention whatever mask was asked for: causality is ignored.",
    "causal",
)
def causality_ignored(ring, a, b):
    return torch.ones(1, 1, len(ring.token_q[a]), len(ring.token_k[b]), dtype=torch.bool)


@bug(
    "causal",
    "F9",
    "Causality is written as a window of (-1, 0), and -1 is taken literally: nothing is visible, "
    "o is 0 and lse is -inf everywhere.",
    "causal",
)
def causal_taken_as_an_empty_band(ring, a, b):
    return torch.zeros(1, 1, len(ring.token_q[a]), len(ring.token_k[b]), dtype=torch.bool)


@bug(
    "causal",
    "A15",
    "Causal striped: only the first bucket of 8 keys of a block has its right positions, and later "
    "buckets get those of the first.",
    "striped",
)
def positions_of_the_first_bucket(ring, a, b):
    rows, columns = right.places(ring, a, b)
    return columns[..., slots(ring.token_k[b]) % 8] <= rows


@bug(
    "causal",
    "A15",
    "Causal striped: the diagonal of every block but the own one is shifted by -1, also where the "
    "keys come from an earlier worker.",
    "striped",
)
def striped_shift_for_every_other_worker(ring, a, b):
    rows, columns = local(ring, a, b)
    return columns <= rows - int(a != b)


@bug(
    "places",
    "A16",
    "Positions are those of a contiguous layout though tokens lie in another one.",
    "zigzag",
)
def positions_of_a_contiguous_layout(ring, a, b):
    rows, columns = local(ring, a, b)
    return rows + a * rows.shape[2], columns + b * columns.shape[3]


@bug(
    "places",
    "A16",
    "Zigzag: the second chunk of worker r is taken for chunk W + r, where it is 2W - 1 - r.",
    "zigzag",
)
def zigzag_without_its_turn(ring, a, b):
    def chunks(worker: int, token: Tensor) -> Tensor:
        half = len(token) // 2
        t = slots(token)
        second = (ring.workers + worker) * half + t - half
        return torch.where(t < half, worker * half + t, second)

    rows, columns = chunks(a, ring.token_q[a]), chunks(b, ring.token_k[b])
    return rows[None, None, :, None], columns[None, None, None, :]


@bug(
    "places",
    "A5",
    "Positions were not sharded with the tokens: every worker numbers its own from 0.",
    "window",
)
def positions_not_sharded(ring, a, b):
    return local(ring, a, b)


@bug(
    "causal",
    "",
    "In the second half of each worker's rows the diagonal is one too low: a token does not see "
    "itself.",
    "striped",
)
def diagonal_off_by_one_in_half_of_the_rows(ring, a, b):
    rows, columns = right.places(ring, a, b)
    late = slots(ring.token_q[a]) >= len(ring.token_q[a]) // 2
    return columns <= rows - late[:, None].long()


@bug(
    "causal",
    "",
    "On worker 1 alone the diagonal is one too high: each of its tokens sees the next one.",
    "causal",
)
def one_worker_sees_the_next_token(ring, a, b):
    rows, columns = right.places(ring, a, b)
    return columns <= rows + int(a == 1)


@bug(
    "causal",
    "",
    "Causal striped: the blocks that the last ring step brings are masked one diagonal too low.",
    "striped",
)
def last_step_masks_one_too_low(ring, a, b):
    rows, columns = right.places(ring, a, b)
    step = ((a - b) * ring.direction) % ring.workers
    late = step == ring.workers - 1 and step > 0
    return columns <= rows - ring.workers * int(late)


@bug(
    "places",
    "F12",
    "Queries are aligned with the first key where the call aligns them with the last one: their "
    "offset is ignored.",
    "end-aligned",
)
def query_offset_ignored(ring, a, b):
    _, columns = right.places(ring, a, b)
    return ring.token_q[a][None, None, :, None], columns


@bug(
    "window",
    "F8",
    "The window is laid over local indices in each block, as though every block were the diagonal "
    "one.",
    "two-sided",
)
def window_of_each_block(ring, a, b):
    rows, columns = local(ring, a, b)
    left, to_the_right = ring.window
    gap = columns - rows
    seen = torch.ones_like(gap, dtype=torch.bool)
    if left is not None:
        seen &= gap >= -left
    return seen if to_the_right is None else seen & (gap <= to_the_right)


@bug("window", "F5 F6", "The window is ignored.", "window")
def window_ignored(ring, a, b):
    return torch.ones(1, 1, len(ring.token_q[a]), len(ring.token_k[b]), dtype=torch.bool)


@bug(
    "window",
    "F11",
    "The window reaches one token too far to the left: a number of visible tokens is passed where "
    "a distance is meant, and both ends count.",
    "window",
)
def window_one_too_wide(ring, a, b):
    rows, columns = right.places(ring, a, b)
    left, to_the_right = ring.window
    gap = columns - rows
    seen = torch.ones_like(gap, dtype=torch.bool)
    if left is not None:
        seen &= gap >= -left - 1
    return seen if to_the_right is None else seen & (gap <= to_the_right)


@bug(
    "segments",
    "E1 E7",
    "Packed documents attend to each other: their boundaries never reach the ring.",
    "documents",
)
def documents_ignored(ring, a, b):
    return torch.ones(1, 1, len(ring.token_q[a]), len(ring.token_k[b]), dtype=torch.bool)


@bug(
    "segments",
    "E5 E6",
    "Each worker counts documents from 0 at its own first token, so that numbers of different "
    "workers do not mean the same document.",
    "documents",
)
def documents_counted_by_each_worker(ring, a, b):
    rows, columns = ring.segments_q[a], ring.segments_k[b]
    rows, columns = rows - rows[:, :1], columns - columns[:, :1]
    return rows[:, None, :, None] == columns[:, None, None, :]


@bug(
    "segments",
    "E2",
    "Lengths of documents are floored to a multiple of W: the tokens behind it are not attended to.",
    "documents",
)
def document_lengths_floored(ring, a, b):
    number, token = torch.cat(ring.segments_k, dim=1)[:, None, :], torch.cat(ring.token_k)
    own = ring.segments_k[b][:, :, None]
    same = (number == own) & (token >= 0)
    before = (same & (token < ring.token_k[b][:, None])).sum(dim=2)
    kept = before < same.sum(dim=2) // ring.workers * ring.workers
    return right.segments(ring, a, b) & kept[:, None, None, :]


@bug(
    "segments",
    "E4",
    "Padding is a document like others: its rows attend to it, and o, lse and gradients are not 0 "
    "there.",
    "documents-padded",
)
def padding_attends_to_padding(ring, a, b):
    return ring.segments_q[a][:, None, :, None] == ring.segments_k[b][:, None, None, :]


@bug(
    "of_keys",
    "J22",
    "The bias is read at local indices of the keys, as though every block were the first one.",
    "bias",
)
def bias_at_local_columns(ring, pairs, a, b):
    if pairs is not ring.bias or pairs[a].shape[-1] == 1:
        return right.of_keys(ring, pairs, a, b)
    return pairs[a][..., slots(ring.token_k[b])]


@bug(
    "biased",
    "",
    "The bias is scaled with the scores: scale * (q k + bias).",
    "bias",
)
def bias_inside_the_scale(ring, z, a, b, tile):
    return z + (right.biased(ring, z, a, b, tile) - z) * ring.scale


@bug("biased", "", "The bias is added behind the soft cap, where it belongs before it.", "softcap")
def bias_behind_the_softcap(ring, z, a, b, tile):
    ring.waiting = right.biased(ring, z, a, b, tile) - z
    return z


@also("bias_behind_the_softcap", "cap")
def _with_the_bias_that_waits(ring, what, z):
    s, t = right.cap(ring, what, z)
    return s + ring.waiting, t


@bug("cap", "B14", "The soft cap is applied in the forward and missing in the backward.", "softcap")
def backward_without_softcap(ring, what, z):
    return right.cap(ring, what, z) if what == "forward" else (z, None)


@bug(
    "spread",
    "F16",
    "Grouped heads: query head h reads key head h mod Hkv, where it should read h div G.",
    "heads",
)
def heads_dealt_in_turn(ring, x):
    return x.repeat(1, ring.heads // ring.key_heads, 1, 1)


@also("heads_dealt_in_turn", "gather_heads")
def _gathered_as_dealt(ring, x):
    batch, _, *rest = x.shape
    return x.reshape(batch, -1, ring.key_heads, *rest).sum(dim=1)


@bug(
    "factor",
    "F4",
    "Dropout: every block uses the keep mask of the first block of keys.",
    "dropout",
)
def same_keep_mask_for_every_block(ring, a, b, what):
    return right.factor(ring, a, 0, what)


@bug("factor", "", "Dropout: what is kept is not divided by 1 - p, in either pass.", "dropout")
def dropout_without_rescaling(ring, a, b, what):
    found = right.factor(ring, a, b, what)
    return None if found is None else (found > 0).to(found.dtype)


@bug(
    "factor",
    "F1",
    "The backward draws a keep mask of its own and does not repeat that of the forward.",
    "dropout",
)
def backward_draws_another_keep_mask(ring, a, b, what):
    found = right.factor(ring, a, b, what)
    return found if found is None or what == "o" else found.roll(1, dims=-1)
