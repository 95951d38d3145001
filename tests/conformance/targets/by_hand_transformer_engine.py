"""TransformerEngine's context parallelism checked by hand, without ringspec's judge; run by test_transformer_engine.py.

    python by_hand_transformer_engine.py MODE FORMAT MASK DTYPE WORKERS [BACKEND [LEFT RIGHT]]

MODE: p2p, all_gather, a2a. FORMAT: bshd, sbhd, thd (three documents, packed), same (two documents of one length, packed)
or padded (documents with padding). MASK: causal or full. BACKEND: fa2 (the default), fa3 or fused. LEFT, RIGHT: a
window. Processes under gloo run the published attn_forward_func_with_cp over ringspec's stand-ins; nothing else of
ringspec is used. The results are compared with dense float64 attention of the whole sequence, by torch's autograd.
Padding is NaN in q, k, v and dy, and is not compared. Prints JSON: for o, dq, dk and dv of all workers the largest error divided by the largest number, and for the
stand-in's own attention of one block the largest difference from torch's autograd.
"""

import json
import os
import sys

from by_hand_ranks import on_ranks

B, H, HKV, D = 1, 4, 4, 16
SCALE = 0.3


def lengths_of(form, workers):
    """Lengths of the documents."""
    known = {"thd": (4, 8, 2), "same": (8, 8), "padded": (3.2, 8, 0.4)}
    return [int(one * workers) for one in known.get(form, (16,))]


def rooms_of(form, workers):
    """Slots of the documents: multiples of 2 W."""
    return [-(-one // (2 * workers)) * 2 * workers for one in lengths_of(form, workers)]


def tokens_of(rank, workers, form):
    """The tokens of a worker: chunks r and 2 W - 1 - r of each document's slots; -1 for padding."""
    found, first = [], 0
    for length, room in zip(lengths_of(form, workers), rooms_of(form, workers), strict=True):
        chunk = room // (2 * workers)
        for number in (rank, 2 * workers - 1 - rank):
            places = range(number * chunk, (number + 1) * chunk)
            found += [first + one if one < length else -1 for one in places]
        first += length
    return found


def inputs(dtype, total):
    import torch

    made = torch.Generator().manual_seed(11)
    heads = (H, HKV, HKV, H)
    return [
        torch.randn(B, total, h, D, generator=made, dtype=torch.float64).to(getattr(torch, dtype))
        for h in heads
    ]


def dense(q, k, v, hidden):
    """Attention [B, S, H, D] in float64, without the pairs in hidden."""
    import torch

    s = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(H // HKV, 2)) * SCALE
    p = s.masked_fill(hidden, -torch.inf).softmax(3)
    return torch.einsum("bhij,bjhd->bihd", p, v.repeat_interleave(H // HKV, 2))


def right(form, mask, dtype, workers, window):
    """o, dq, dk, dv of the whole sequence in float64, by autograd."""
    import torch

    lengths = lengths_of(form, workers)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    hidden = document[:, None] != document
    if mask == "causal":
        hidden |= torch.ones_like(hidden).triu(1)
    if window:
        at = torch.arange(len(hidden))
        distance = at - at[:, None]
        hidden |= (distance < -window[0]) | (distance > window[1])
    q, k, v, dy = (x.double() for x in inputs(dtype, sum(lengths)))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = dense(*leaves, hidden)
    o.backward(dy)
    return [x.detach() for x in (o, *(x.grad for x in leaves))]


def held(x, at):
    """The tokens of a worker, [B, n, H, D], and NaN in padding."""
    import torch

    own = x[:, at].clone()
    own[:, torch.tensor(at) < 0] = torch.nan
    return own


def rank_results(rank, mode, form, mask, dtype, workers, backend, window):
    import torch
    import torch.distributed as dist

    from ringspec.standins import installed

    lengths, rooms = lengths_of(form, workers), rooms_of(form, workers)
    at = tokens_of(rank, workers, form)
    q, k, v, dy = (held(x, at) for x in inputs(dtype, sum(lengths)))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    starts, padded = (
        torch.tensor([0, *each]).cumsum(0).to(torch.int32) for each in (lengths, rooms)
    )
    packed = form not in ("bshd", "sbhd")
    kind = {"causal": "causal", "full": "no_mask"}[mask]
    if packed:
        kind = {"causal": "padding_causal", "full": "padding"}[mask]
    if lengths == rooms:
        padded = starts
    with installed("flash_attn", "flash_attn_interface", "transformer_engine_torch"):
        from transformer_engine.pytorch.attention.dot_product_attention.context_parallel import (
            attn_forward_func_with_cp,
        )

        given = [x[0] if packed else x for x in leaves]
        if form == "sbhd":
            given = [x.transpose(0, 1).contiguous() for x in given]
        o = attn_forward_func_with_cp(
            True,
            *given,
            starts,
            starts,
            max(rooms),
            max(rooms),
            padded if packed else None,
            padded if packed else None,
            0.0,
            dist.group.WORLD,
            list(range(workers)),
            torch.cuda.Stream(),
            mode,
            softmax_scale=SCALE,
            qkv_format="thd" if packed else form,
            attn_mask_type=kind,
            use_fused_attention=backend == "fused",
            use_flash_attn_3=backend == "fa3",
            pad_between_seqs=lengths != rooms,
            window_size=window or ((-1, 0) if mask == "causal" else (-1, -1)),
        )
        o = o.transpose(0, 1) if form == "sbhd" else o.view(q.shape)
        o.backward(dy)
    assert "ringspec.conformance" not in sys.modules
    return [x.detach().double().tolist() for x in (o, *(x.grad for x in leaves))]


def block_difference(mask):
    """The largest difference of the stand-in's attention of one float64 block from torch's autograd."""
    import torch

    from ringspec.standins import installed

    q, k, v, dy = inputs("float64", 12)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    hidden = torch.zeros(12, 12, dtype=torch.bool)
    if mask == "causal":
        hidden = torch.ones_like(hidden).triu(1)
    found = []
    with installed("flash_attn[exact]"):
        from flash_attn import flash_attn_func

        for function in (
            lambda *x: flash_attn_func(*x, softmax_scale=SCALE, causal=mask == "causal"),
            lambda *x: dense(*x, hidden),
        ):
            o = function(*leaves)
            found.append([o, *torch.autograd.grad(o, leaves, dy)])
    return max(float((a - b).detach().abs().max()) for a, b in zip(*found, strict=True))


def main(mode, form, mask, dtype, workers, backend="fa2", window=None):
    import torch

    given = (mode, form, mask, dtype, workers, backend, window)
    got = on_ranks(workers, rank_results, *given, over_standins=True)
    report = {"block": block_difference(mask)}
    wanted = right(form, mask, dtype, workers, window)
    for number, (name, want) in enumerate(zip(("o", "dq", "dk", "dv"), wanted, strict=True)):
        found = torch.full_like(want, torch.nan)
        for rank in range(workers):
            values = torch.tensor(got[rank][number], dtype=torch.float64)
            at = torch.tensor(tokens_of(rank, workers, form))
            found[:, at[at >= 0]] = values[:, at >= 0]
        report[name] = float((found - want).abs().max() / want.abs().max())
    print(json.dumps(report))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rest = sys.argv[6:]
    main(*sys.argv[1:5], int(sys.argv[5]), *rest[:1], tuple(map(int, rest[1:])) or None)
