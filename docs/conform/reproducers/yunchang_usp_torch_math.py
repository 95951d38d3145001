"""yunchang's USP with AttnType.TORCH_MATH and a ring of 2 workers: is o right? In 0.6.4 it is not.

    pip install torch==2.13.0; pip install --no-deps yunchang==0.6.4
    python yunchang_usp_torch_math.py [RING_DEGREE]

Two processes (or RING_DEGREE) under gloo on a CPU, with one token each, call ``LongContextAttention``. The results are
compared with dense float64 attention of all tokens. With RING_DEGREE = 1 they are right, because nothing is merged.
Exit status: 1 if a result is wrong, 0 if all are right.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

W = int(sys.argv[1]) if len(sys.argv) > 1 else 2
# One token for each worker, one head, D = 1; scale = 1.
Q, K, V = ([1.0, 2.0, 0.0][:W], [0.0, 1.0, 2.0][:W], [1.0, 3.0, 0.0][:W])


def worker(rank, folder):
    import yunchang
    from yunchang.kernels import AttnType

    dist.init_process_group("gloo", f"file://{folder}/meet", world_size=W, rank=rank)
    yunchang.set_seq_parallel_pg(1, W, rank, W)
    attention = yunchang.LongContextAttention(attn_type=AttnType.TORCH_MATH)
    q, k, v = (torch.tensor(x[rank]).view(1, 1, 1, 1) for x in (Q, K, V))
    torch.save(attention(q, k, v, softmax_scale=1.0).item(), f"{folder}/{rank}")
    dist.barrier()


def dense():
    """o of the whole sequence in float64."""
    q, k, v = (torch.tensor(x, dtype=torch.float64) for x in (Q, K, V))
    return (torch.outer(q, k).softmax(1) @ v).tolist()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (folder,), nprocs=W)
        got = [torch.load(f"{folder}/{rank}") for rank in range(W)]
    wrong = False
    for rank, (found, want) in enumerate(zip(got, dense(), strict=True)):
        right = abs(found - want) <= 1e-5
        wrong |= not right
        said = "right" if right else "WRONG"
        print(f"{said}: o of worker {rank}: got {found:.7f}, float64 {want:.7f}")
    sys.exit(1 if wrong else 0)
