"""yunchang's ring with float16 inputs: does dq have the precision of float16? In 0.6.4 it does not.

    pip install torch==2.13.0; pip install --no-deps yunchang==0.6.4
    python yunchang_ring_float16.py [bfloat16]

Two processes under gloo on a CPU, with one token each, call ``ring_flash_attn_func``. The two functions of flash-attn
that the ring calls need a GPU, so a module of this file takes the place of flash_attn: dense, computed in float64 and
rounded once. The results are compared with dense float64 attention of both tokens. A result is right if its relative
error is at most that of one unit in the last place, 2**-10 for float16 and 2**-7 for bfloat16.
Exit status: 1 if a result is wrong, 0 if all are right.
"""

import sys
import tempfile
import types
from importlib.machinery import ModuleSpec

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

W = 2
FORMAT = "bfloat16" if "bfloat16" in sys.argv else "float16"
UNIT = 2**-7 if FORMAT == "bfloat16" else 2**-10  # in the last place, for numbers from 1 to 2
# One token for each worker, one head, D = 1; scale = 1. Both probabilities are 1/2 and dq = K[1], so the inputs and all
# results are exact in the format of the inputs.
Q, K, V, DY = ([0.0, 0.0], [0.0, 1 + 3 * UNIT], [0.0, 2.0], [2.0, 2.0])


def _flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, **rest):
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * softmax_scale
    o = torch.einsum("bhij,bjhd->bihd", s.softmax(3), v.double())
    return o.to(q.dtype), s.logsumexp(3).float(), None, None


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, *more, **rest
):
    dout, q, k, v, out = (x.double() for x in (dout, q, k, v, out))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * softmax_scale
    p = (s - softmax_lse.double()[..., None]).exp()
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
    from yunchang import ring_flash_attn_func

    dist.init_process_group("gloo", f"file://{folder}/meet", world_size=W, rank=rank)
    dtype = getattr(torch, FORMAT)
    q, k, v, dy = (torch.tensor(x[rank], dtype=dtype).view(1, 1, 1, 1) for x in (Q, K, V, DY))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = ring_flash_attn_func(*leaves, softmax_scale=1.0, group=dist.group.WORLD)
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
            right = abs(found - want) <= UNIT * abs(want)
            wrong |= not right
            said = "right" if right else "WRONG"
            print(f"{said}: {name} of worker {rank}: got {found:.10f}, float64 {want:.10f}")
    sys.exit(1 if wrong else 0)
