"""ring-flash-attention checked by hand: a program without ringspec, run by test_zhuzilin.py.

    python by_hand_zhuzilin.py VARIANT DTYPE WORKERS [noise]

Processes under gloo run the unmodified package; flash-attn's two functions are written here, dense in float64. The
results are compared with dense float64 attention of the whole sequence. Prints JSON: for o, dq, dk and dv of all
workers the largest error divided by the largest number, and how many numbers are not representable in bfloat16. noise:
the tokens and head dimension of the suite's case noise/full-contiguous-w2-fp16.
"""

import json
import sys
import types
from importlib.machinery import ModuleSpec

from by_hand_ranks import on_ranks

B, H, HKV = 1, 4, 2
N, D = (192, 64) if "noise" in sys.argv[4:] else (8, 16)  # spawned processes have the same words
SCALE = 0.25
LAYOUTS = {
    "ring": lambda rank, workers: list(range(rank * N, (rank + 1) * N)),
    "stripe": lambda rank, workers: list(range(rank, N * workers, workers)),
    "zigzag": lambda rank, workers: [
        half * N // 2 + i for half in (rank, 2 * workers - 1 - rank) for i in range(N // 2)
    ],
}


def scores(q, k, causal, scale, left=-1, right=-1):
    """Scores in float64, -inf where a key is hidden; masks and windows end at the last query and the last key."""
    import torch

    s = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * scale
    queries, keys = s.shape[2:]
    distance = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    hidden = (distance > 0) if causal else torch.zeros(queries, keys, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    return s.masked_fill(hidden, -torch.inf)


def wide(x, q):
    return x.double().repeat_interleave(q.shape[2] // x.shape[2], 2)


def narrow(x, k):
    """The sum over the query heads that share a head of k."""
    return x.unflatten(2, (k.shape[2], -1)).sum(3)


def _flash_attn_forward(
    q,
    k,
    v,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    return_softmax,
):
    import torch

    s = scores(q, wide(k, q), causal, softmax_scale, window_size_left, window_size_right)
    lse = s.logsumexp(3)
    # A query that sees no key has o = 0 and lse = +inf (normalize_softmax_lse in flash-attn's softmax.h).
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    o = torch.einsum("bhij,bjhd->bihd", (s - lse[..., None]).exp(), wide(v, q))
    return o.to(q.dtype), lse.float(), None, None


def _flash_attn_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
    rng_state=None,
):
    import torch

    s = scores(q, wide(k, q), causal, softmax_scale, window_size_left, window_size_right)
    p = (s - softmax_lse.double()[..., None]).exp()
    dp = torch.einsum("bihd,bjhd->bhij", dout.double(), wide(v, q))
    delta = (dout.double() * out.double()).sum(3).transpose(1, 2)
    ds = p * (dp - delta[..., None]) * softmax_scale
    dq.copy_(torch.einsum("bhij,bjhd->bihd", ds, wide(k, q)))
    dk.copy_(narrow(torch.einsum("bhij,bihd->bjhd", ds, q.double()), k))
    dv.copy_(narrow(torch.einsum("bhij,bihd->bjhd", p, dout.double()), k))


def imported():
    """Import ring_flash_attn over the two functions of this file."""
    package, interface = types.ModuleType("flash_attn"), types.ModuleType("flash_attn_interface")
    package.__path__, package.__spec__ = [], ModuleSpec("flash_attn", None, is_package=True)
    for name in ("forward", "backward"):
        setattr(interface, f"_flash_attn_{name}", globals()[f"_flash_attn_{name}"])
        setattr(interface, f"_flash_attn_varlen_{name}", None)
    sys.modules |= {"flash_attn": package, "flash_attn.flash_attn_interface": interface}
    import ring_flash_attn

    return {
        "ring": ring_flash_attn.ring_flash_attn_func,
        "zigzag": ring_flash_attn.zigzag_ring_flash_attn_func,
        "stripe": ring_flash_attn.stripe_flash_attn_func,
    }


def inputs(dtype, workers):
    import torch

    made = torch.Generator().manual_seed(7)
    heads = (H, HKV, HKV, H)
    return [
        torch.randn(B, N * workers, h, D, generator=made, dtype=torch.float64).to(dtype)
        for h in heads
    ]


def rank_results(rank, workers, variant, dtype):
    import torch
    import torch.distributed as dist

    function = imported()[variant]
    at = LAYOUTS[variant](rank, workers)
    q, k, v, dy = (x[:, at].contiguous() for x in inputs(getattr(torch, dtype), workers))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = function(*leaves, softmax_scale=SCALE, causal=True, group=dist.group.WORLD)
    o.backward(dy)
    return [x.detach().double().tolist() for x in (o, *(x.grad for x in leaves))]


def right(dtype, workers):
    """o, dq, dk, dv of the whole sequence, in float64, by autograd of a dense softmax."""
    import torch

    q, k, v, dy = (x.double() for x in inputs(dtype, workers))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    p = scores(q, wide(k, q), True, SCALE).softmax(3)
    o = torch.einsum("bhij,bjhd->bihd", p, wide(v, q))
    o.backward(dy)
    return [x.detach() for x in (o, *(x.grad for x in leaves))]


def main(variant, dtype, workers):
    import torch

    got = on_ranks(workers, rank_results, workers, variant, dtype)
    report = {}
    for number, (name, want) in enumerate(
        zip(("o", "dq", "dk", "dv"), right(getattr(torch, dtype), workers), strict=True)
    ):
        found = torch.empty_like(want)
        for rank in range(workers):
            values = torch.tensor(got[rank][number], dtype=torch.float64)
            found[:, LAYOUTS[variant](rank, workers)] = values
        finer = int((found.bfloat16().double() != found).sum())
        error = float((found - want).abs().max() / want.abs().max())
        report[name] = {"error": error, "finer_than_bfloat16": finer}
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
