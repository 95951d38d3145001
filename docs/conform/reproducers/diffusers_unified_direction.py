"""diffusers' unified attention, Ulysses 2 x ring 3: are dk and dv right? In 0.42.1 they are not.

    pip install torch==2.13.0 diffusers==0.42.1
    python diffusers_unified_direction.py [RING]

Six processes under gloo on a CPU, with one token each, call ``dispatch_attention_fn`` with the backend "flash". The two
functions of flash-attn that the ring calls need a GPU, so dense float64 ones of this file take their place. The results
are compared with dense float64 attention of all tokens. With RING = 2 there are four processes, and all results are
right. Exit status: 1 if a result is wrong, 0 if all are right.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

RING, ULYSSES = int((sys.argv[1:] or ["3"])[0]), 2
W = RING * ULYSSES
# One token for each worker, D = 1, scale = 1. The two heads have the same numbers; head 0 is compared.
Q, K, V, DY = (
    [1.0, 2.0, 0.0, 1.0, 0.0, 2.0][:W],
    [0.0, 1.0, 2.0, 1.0, 3.0, 0.0][:W],
    [1.0, 3.0, 0.0, 2.0, 1.0, 4.0][:W],
    [1.0, 1.0, 2.0, 1.0, 3.0, 1.0][:W],
)


def flash_forward(q, k, v, dropout_p, scale, *rest):
    q, k, v = (x.double() for x in (q, k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    o = torch.einsum("bhij,bjhd->bihd", s.softmax(3), v)
    return o.float(), s.logsumexp(3).float(), None, torch.empty(0)


def flash_backward(dy, q, k, v, o, lse, dq, dk, dv, dropout_p, scale, *rest):
    dy, q, k, v, o = (x.double() for x in (dy, q, k, v, o))
    lse = lse.double().reshape(
        q.shape[0], q.shape[2], q.shape[1]
    )  # [B, H, n]; one head meets the kernel
    p = (torch.einsum("bihd,bjhd->bhij", q, k) * scale - lse[..., None]).exp()
    dp = torch.einsum("bihd,bjhd->bhij", dy, v)
    ds = p * (dp - (dy * o).sum(3).transpose(1, 2)[..., None]) * scale
    dq.copy_(torch.einsum("bhij,bjhd->bihd", ds, k))
    dk.copy_(torch.einsum("bhij,bihd->bjhd", ds, q))
    dv.copy_(torch.einsum("bhij,bihd->bjhd", p, dy))


def worker(rank, folder):
    from diffusers.models import _modeling_parallel, attention_dispatch

    attention_dispatch._wrapped_flash_attn_forward = flash_forward
    attention_dispatch._wrapped_flash_attn_backward = flash_backward
    dist.init_process_group("gloo", f"file://{folder}/meet", world_size=W, rank=rank)
    ring = _modeling_parallel.ContextParallelConfig(ring_degree=RING, ulysses_degree=ULYSSES)
    config = _modeling_parallel.ParallelConfig(context_parallel_config=ring)
    mesh = init_device_mesh("cpu", (RING, ULYSSES), mesh_dim_names=("ring", "ulysses"))
    config.setup(rank, W, torch.device("cpu"), mesh=mesh)
    q, k, v, dy = (torch.tensor(x[rank]).expand(1, 1, 2, 1) for x in (Q, K, V, DY))
    q, k, v = leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = attention_dispatch.dispatch_attention_fn(
        *leaves, scale=1.0, backend="flash", parallel_config=config
    )
    o.backward(dy)
    torch.save([x[0, 0, 0, 0].item() for x in (o, q.grad, k.grad, v.grad)], f"{folder}/{rank}")
    dist.barrier()


def dense():
    """o, dq, dk, dv of the whole sequence in float64, by autograd of a softmax."""
    q, k, v = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (Q, K, V))
    o = torch.outer(q, k).softmax(1) @ v
    o.backward(torch.tensor(DY, dtype=torch.float64))
    return [x.tolist() for x in (o, q.grad, k.grad, v.grad)]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (folder,), nprocs=W)
        got = [torch.load(f"{folder}/{rank}") for rank in range(W)]
    wrong = False
    for number, (name, wants) in enumerate(zip(("o", "dq", "dk", "dv"), dense(), strict=True)):
        for rank, want in enumerate(wants):
            found = got[rank][number]
            right = abs(found - want) <= 1e-5
            wrong |= not right
            said = "right" if right else "WRONG"
            print(f"{said}: {name} of worker {rank}: got {found:.7f}, float64 {want:.7f}")
    sys.exit(1 if wrong else 0)
