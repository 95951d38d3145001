"""ring-attention-pytorch on a CPU with 2 workers: are dk and dv right? In 0.5.20 they are not.

    pip install torch==2.13.0 ring-attention-pytorch==0.5.20
    python lucidrains_dkv.py

Two processes under gloo, with one token each, call ``ring_flash_attn``. The results are compared with dense float64
attention of both tokens. Exit status: 1 if a result is wrong, 0 if all are right.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

W = 2
# One token for each worker, one head, D = 1, so the scale is 1.
Q, K, V, DY = ([1.0, 2.0], [0.0, 1.0], [1.0, 3.0], [1.0, 2.0])


def worker(rank, folder):
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    dist.init_process_group("gloo", f"file://{folder}/meet", world_size=W, rank=rank)
    q, k, v, dy = (torch.tensor(x[rank]).view(1, 1, 1, 1) for x in (Q, K, V, DY))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = ring_flash_attn(*leaves, bucket_size=1, ring_reduce_col=True, ring_size=W)
    o.backward(dy)
    torch.save([x.item() for x in (o, q.grad, k.grad, v.grad)], f"{folder}/{rank}")
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
