"""xFuserLongContextAttention with a window: are the results right? With a ring, in xfuser 0.7.0, they are not.

    pip install torch==2.13.0 triton xfuser==0.7.0 yunchang==0.6.4
    python xfuser_long_window.py [causal]

Two processes under gloo on a CPU, with two tokens each, call the class in bfloat16 with a ring of two, causal and with
window_size=(1, 0). Dense float64 functions of this file replace flash-attn's, which need a GPU. The results are compared
with dense float64 attention. With "causal", without a window, they are right. Exit status: 1 if a result is wrong.
"""

import logging
import sys
import tempfile
import types
from importlib.machinery import ModuleSpec
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

W, N = 2, 2  # workers, tokens of each; one head, D = 1, scale = 1
WINDOW = (-1, -1) if "causal" in sys.argv else (1, 0)
NAMES = ("o", "dq", "dk", "dv")
Q, K, V, DY = [1.0, 2, 0, 1], [0.0, 1, 2, 1], [1.0, 3, 0, 2], [1.0, 1, 2, 1]


def scores(q, k, scale, causal, window):
    """[B, H, n, m]; the window is relative to the first query and key, which is flash-attn's for n = m."""
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * scale
    distance = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None]
    left, right = window[0], 0 if causal else window[1]
    hidden = (left >= 0) & (distance < -left) | (right >= 0) & (distance > right)
    return s.masked_fill(hidden, -torch.inf)


def _flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, **rest):
    s = scores(q, k, softmax_scale, causal, (rest["window_size_left"], rest["window_size_right"]))
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
    # xfuser requires a GPU when it is imported, and a function for NPUs that no release of yunchang has.
    package, interface = types.ModuleType("flash_attn"), types.ModuleType("flash_attn_interface")
    package.__path__, package.__spec__ = [], ModuleSpec("flash_attn", None, is_package=True)
    vars(package).update(__version__="2.8.3", flash_attn_func=None, flash_attn_varlen_func=None)
    interface._flash_attn_forward = _flash_attn_forward
    interface._flash_attn_backward = _flash_attn_backward
    interface._flash_attn_varlen_forward = interface._flash_attn_varlen_backward = None
    sys.modules |= {"flash_attn": package, "flash_attn.flash_attn_interface": interface}
    import yunchang.ring.utils as rings

    logging.disable(logging.WARNING)
    gpu = {"is_available": True, "current_device": 0, "get_device_name": ""}
    gpu |= {"get_device_properties": mock.Mock(gcnArchName=""), "get_device_capability": (9, 0)}
    gpu = mock.patch.multiple(torch.cuda, **{k: mock.Mock(return_value=x) for k, x in gpu.items()})
    with gpu, mock.patch("torch.version.cuda", "12.8"):
        rings.update_npu_out = None
        import xfuser.core.long_ctx_attention as longs
        from xfuser.core import distributed as groups
        from xfuser.core.long_ctx_attention import ring  # noqa: F401
    dist.init_process_group("gloo", f"file://{folder}/meet", world_size=W, rank=rank)
    groups.init_distributed_environment(W, rank, local_rank=rank, backend="gloo")
    groups.initialize_model_parallel(ulysses_degree=1, ring_degree=W, backend="gloo")
    q, k, v, dy = (torch.tensor(x).view(W, 1, N, 1, 1).bfloat16()[rank] for x in (Q, K, V, DY))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    layer = longs.xFuserLongContextAttention()
    o = layer(None, *leaves, softmax_scale=1.0, causal=True, window_size=WINDOW)
    o.backward(dy)
    torch.save([x.flatten().tolist() for x in (o, q.grad, k.grad, v.grad)], f"{folder}/{rank}")
    dist.barrier()


if __name__ == "__main__":
    q, k, v = leaves = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (Q, K, V)]
    o = scores(q.view(1, -1, 1, 1), k.view(1, -1, 1, 1), 1.0, True, WINDOW)[0, 0].softmax(1) @ v
    o.backward(torch.tensor(DY, dtype=torch.float64))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (folder,), nprocs=W)
        got = [torch.load(f"{folder}/{rank}") for rank in range(W)]
    wrong = False
    for number, (name, wants) in enumerate(zip(NAMES, (o, q.grad, k.grad, v.grad), strict=True)):
        for token, want in enumerate(wants.tolist()):
            found = got[token // N][number][token % N]
            wrong |= not (right := abs(found - want) <= 0.05)
            said = f"{'right' if right else 'WRONG'}: {name} of worker {token // N}, token {token}"
            print(f"{said}: got {found:.7f}, float64 {want:.7f}")
    sys.exit(1 if wrong else 0)
