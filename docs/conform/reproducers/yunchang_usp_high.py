"""yunchang's USP 2 x 2 with set_seq_parallel_pg(use_ulysses_low=False), causal: are the results right? In 0.6.4: no.

    pip install torch==2.13.0; pip install --no-deps yunchang==0.6.4
    python yunchang_usp_high.py [low]

Four processes under gloo on a CPU, with one token each, given by ``EXTRACT_FUNC_DICT["basic"]``, call
``LongContextAttention`` in bfloat16. The two functions of flash-attn that the ring calls need a GPU, so a module of this
file takes the place of flash_attn: dense, computed in float64 and rounded once. The results are compared with dense
float64 attention of all tokens. With the argument "low", that is use_ulysses_low=True, they are right.
Exit status: 1 if a result is wrong, 0 if all are right.
"""

import sys
import tempfile
import types
from importlib.machinery import ModuleSpec

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

W = 4
LOW = "low" in sys.argv
# One token for each worker, D = 1, scale = 1. The two heads have the same numbers; head 0 is compared.
Q, K, V, DY = [1.0, 2, 0, 1], [0.0, 1, 2, 1], [1.0, 3, 0, 2], [1.0, 1, 2, 1]


def scores(q, k, scale, causal):
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * scale
    hidden = torch.ones(s.shape[2:], dtype=torch.bool).triu(1)
    return s.masked_fill(hidden, -torch.inf) if causal else s


def _flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, **rest):
    s = scores(q, k, softmax_scale, causal)
    o = torch.einsum("bhij,bjhd->bihd", s.softmax(3), v.double())
    return o.to(q.dtype), s.logsumexp(3).float(), None, None


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, *more, **rest
):
    dout, q, k, v, out = (x.double() for x in (dout, q, k, v, out))
    p = (scores(q, k, softmax_scale, causal) - softmax_lse.double()[..., None]).exp()
    dp = torch.einsum("bihd,bjhd->bhij", dout, v)
    ds = p * (dp - (dout * out).sum(3).transpose(1, 2)[..., None]) * softmax_scale
    dq.copy_(torch.einsum("bhij,bjhd->bihd", ds, k))
    dk.copy_(torch.einsum("bhij,bihd->bjhd", ds, q))
    dv.copy_(torch.einsum("bhij,bihd->bjhd", p, dout))


def worker(rank, folder):
    package, interface = types.ModuleType("flash_attn"), types.ModuleType("flash_attn_interface")
    package.__path__, package.__spec__ = [], ModuleSpec("flash_attn", None, is_package=True)
    package.__version__, package.flash_attn_func = "2.8.3", None
    for name in ("forward", "backward"):
        setattr(interface, f"_flash_attn_{name}", globals()[f"_flash_attn_{name}"])
        setattr(interface, f"_flash_attn_varlen_{name}", None)
    sys.modules |= {"flash_attn": package, "flash_attn.flash_attn_interface": interface}
    import yunchang

    dist.init_process_group("gloo", f"file://{folder}/meet", world_size=W, rank=rank)
    yunchang.set_seq_parallel_pg(2, 2, rank, W, use_ulysses_low=LOW)
    extract = yunchang.EXTRACT_FUNC_DICT["basic"]
    whole = (torch.tensor(x).view(1, W, 1, 1).expand(1, W, 2, 1).bfloat16() for x in (Q, K, V, DY))
    q, k, v, dy = (extract(x, rank, W, rd=2, ud=2) for x in whole)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = yunchang.LongContextAttention()(*leaves, softmax_scale=1.0, causal=True)
    o.backward(dy)
    torch.save([x[0, 0, 0, 0].item() for x in (o, q.grad, k.grad, v.grad)], f"{folder}/{rank}")
    dist.barrier()


def dense():
    """o, dq, dk, dv of the whole sequence in float64, by autograd of a softmax."""
    q, k, v = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (Q, K, V))
    hidden = torch.ones(W, W, dtype=torch.bool).triu(1)
    o = torch.outer(q, k).masked_fill(hidden, -torch.inf).softmax(1) @ v
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
            right = abs(found - want) <= 0.05
            wrong |= not right
            said = "right" if right else "WRONG"
            print(f"{said}: {name} of worker {rank}: got {found:.7f}, float64 {want:.7f}")
    sys.exit(1 if wrong else 0)
