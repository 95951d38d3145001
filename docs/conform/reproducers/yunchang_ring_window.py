"""yunchang's ring with a window: are the results right? In 0.6.4 they are not.

    pip install torch==2.13.0; pip install --no-deps yunchang==0.6.4
    python yunchang_ring_window.py [causal]

Two processes under gloo on a CPU, with two tokens each, call ``ring_flash_attn_func`` in bfloat16, causal and with
window_size=(1, 0). Dense float64 functions of this file replace the two of flash-attn that the ring calls, which need a
GPU. The results are compared with dense float64 attention of all tokens. With "causal", without a window, they are right.
Exit status: 1 if a result is wrong, 0 if all are right.
"""

import sys
import tempfile
import types
from importlib.machinery import ModuleSpec

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

W, N = 2, 2  # workers, tokens of each; one head, D = 1, scale = 1
WINDOW = (-1, -1) if "causal" in sys.argv else (1, 0)
Q, K, V, DY = [1.0, 2, 0, 1], [0.0, 1, 2, 1], [1.0, 3, 0, 2], [1.0, 1, 2, 1]


def scores(q, k, scale, causal, window):
    """[B, H, n, m]; the window is relative to the first query and key, which is flash-attn's for n = m."""
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * scale
    distance = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None]
    left, right = window[0], 0 if causal else window[1]
    hidden = (left >= 0) & (distance < -left) | (right >= 0) & (distance > right)
    return s.masked_fill(hidden, -torch.inf)


def _flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, **rest):
    window = rest["window_size_left"], rest["window_size_right"]
    s = scores(q, k, softmax_scale, causal, window)
    o = torch.einsum("bhij,bjhd->bihd", s.softmax(3), v.double())
    return o.to(q.dtype), s.logsumexp(3).float(), None, None


def _flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, *rest, **more):
    scale, causal, left, right = rest[1:5]
    dout, q, k, v, out = (x.double() for x in (dout, q, k, v, out))
    p = (scores(q, k, scale, causal, (left, right)) - softmax_lse.double()[..., None]).exp()
    dp = torch.einsum("bihd,bjhd->bhij", dout, v)
    ds = p * (dp - (dout * out).sum(3).transpose(1, 2)[..., None]) * scale
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
    whole = (torch.tensor(x).view(W, 1, N, 1, 1).bfloat16() for x in (Q, K, V, DY))
    q, k, v, dy = (x[rank] for x in whole)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    named = {"softmax_scale": 1.0, "causal": True, "window_size": WINDOW}
    o = ring_flash_attn_func(*leaves, **named, group=dist.group.WORLD)
    o.backward(dy)
    torch.save([x.flatten().tolist() for x in (o, q.grad, k.grad, v.grad)], f"{folder}/{rank}")
    dist.barrier()


def dense():
    """o, dq, dk, dv of the whole sequence in float64, by autograd of a softmax."""
    leaves = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (Q, K, V)]
    q, k, v = (x.view(1, -1, 1, 1) for x in leaves)
    o = scores(q, k, 1.0, True, WINDOW)[0, 0].softmax(1) @ v.flatten()
    o.backward(torch.tensor(DY, dtype=torch.float64))
    return [x.tolist() for x in (o, *(x.grad for x in leaves))]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (folder,), nprocs=W)
        got = [torch.load(f"{folder}/{rank}") for rank in range(W)]
    wrong = False
    for number, (name, wants) in enumerate(zip(("o", "dq", "dk", "dv"), dense(), strict=True)):
        for token, want in enumerate(wants):
            found = got[token // N][number][token % N]
            wrong |= not (right := abs(found - want) <= 0.05)
            said = f"{'right' if right else 'WRONG'}: {name} of worker {token // N}, token {token}"
            print(f"{said}: got {found:.7f}, float64 {want:.7f}")
    sys.exit(1 if wrong else 0)
