"""yunchang's UlyssesAttention with AttnType.TORCH_FLASH: is o right? In 0.6.4 it is not.

    pip install torch==2.13.0; pip install --no-deps yunchang==0.6.4
    python yunchang_ulysses_torch_flash.py [WORKERS]

Two processes (or WORKERS) under gloo on a CPU, with one token each and one head per worker, call ``UlyssesAttention``.
PyTorch's flash operator has no CPU implementation, so this file gives it one, dense in float64. The results are compared
with dense float64 attention of all tokens. With WORKERS = 1 they are right.
Exit status: 1 if a result is wrong, 0 if all are right.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

W = int(sys.argv[1]) if len(sys.argv) > 1 else 2
# W tokens and W heads, D = 1. All q and k are 0, so o is the mean of v over the tokens; v of head h is h in every token.


def flash(
    query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):
    s = torch.einsum("bhid,bhjd->bhij", query.double(), key.double()) * scale
    o, empty = torch.einsum("bhij,bhjd->bhid", s.softmax(3), value.double()), torch.empty(0)
    lse, n = s.logsumexp(3).float(), key.shape[2]
    return o.to(query.dtype), lse, empty, empty, query.shape[2], n, empty, empty, empty


def worker(rank, folder):
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", flash, "CPU")
    import yunchang
    from yunchang.kernels import AttnType

    dist.init_process_group("gloo", f"file://{folder}/meet", world_size=W, rank=rank)
    attention = yunchang.UlyssesAttention(attn_type=AttnType.TORCH_FLASH)
    q = k = torch.zeros(1, 1, W, 1)
    v = torch.arange(float(W)).view(1, 1, W, 1)
    torch.save(attention(q, k, v, softmax_scale=1.0).flatten().tolist(), f"{folder}/{rank}")
    dist.barrier()


def dense():
    """o of each head in float64; it is the same for every token."""
    q = k = torch.zeros(W, W, 1, dtype=torch.float64)  # [H, W, D]
    v = torch.arange(W, dtype=torch.float64).view(W, 1, 1).expand(W, W, 1)
    return ((q @ k.mT).softmax(2) @ v)[:, 0, 0].tolist()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (folder,), nprocs=W)
        got = [torch.load(f"{folder}/{rank}") for rank in range(W)]
    wrong = False
    for rank in range(W):
        for head, (found, want) in enumerate(zip(got[rank], dense(), strict=True)):
            right = abs(found - want) <= 1e-5
            wrong |= not right
            said = "right" if right else "WRONG"
            print(f"{said}: o of worker {rank}, head {head}: got {found:.7f}, float64 {want:.7f}")
    sys.exit(1 if wrong else 0)
