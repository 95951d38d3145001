"""xfuser's xFuserLongContextAttention checked by hand: a program without ringspec, run by test_xfuser.py.

    python by_hand_xfuser.py KERNEL ULYSSES RING DTYPE full|causal|window [noise|many-heads]

KERNEL: a value of yunchang's AttnType, fa or fa3. ULYSSES, RING: the degrees; their product is the number of ranks.
window: causal, and at most 5 tokens back. noise, many-heads: the tokens, heads, head dimension and window (100) of the
suite's cases 'noise/' and 'noise/many-heads-bf16'. Processes under gloo run the unmodified package; flash-attn's
functions are those of by_hand_zhuzilin.py, dense in float64. torch.cuda says that there is a GPU while xfuser is
imported, which it requires, and yunchang gets the name update_npu_out, which xfuser imports and no release has. The
results are compared with dense float64 attention of the whole sequence. Prints JSON: for o, dq, dk and dv the largest
error of each rank, divided by the largest number, and how many numbers are not representable in bfloat16.
"""

import functools
import json
import logging
import sys
import types
from importlib.machinery import ModuleSpec
from unittest import mock

import by_hand_zhuzilin as dense
from by_hand_ranks import on_ranks

logging.disable(logging.WARNING)  # xfuser writes messages to standard output
SCALE = 0.25
SIZES = {"noise": (4, 384, 64, (100, 0)), "many-heads": (64, 128, 64, (100, 0))}
B, H, TOKENS, D, WINDOW = 1, 4, 0, 16, (5, 0)  # TOKENS 0: 8 for each rank
for word in sys.argv[6:]:
    H, TOKENS, D, WINDOW = SIZES[word]
NAMES = ("o", "dq", "dk", "dv")


def fa3_forward(q, k, v, softmax_scale, causal, window_size, **unused):
    found = dense._flash_attn_forward(
        q, k, v, 0.0, softmax_scale, causal, *window_size, 0.0, None, False
    )
    return *found[:2], None, None


def fa3_backward(
    dout, q, k, v, out, lse, *, dq, dk, dv, softmax_scale, causal, window_size, **unused
):
    rest = (0.0, softmax_scale, causal, *window_size, 0.0, None, False)
    dense._flash_attn_backward(dout, q, k, v, out, lse, dq, dk, dv, *rest)


def flash_attn():
    """Put flash-attn 2 and 3, with the functions that yunchang and xfuser import, into sys.modules."""
    package, interface = types.ModuleType("flash_attn"), types.ModuleType("flash_attn_interface")
    package.__path__, package.__spec__ = [], ModuleSpec("flash_attn", None, is_package=True)
    package.__version__ = "2.8.3"
    package.flash_attn_func = package.flash_attn_varlen_func = None
    for name in ("_flash_attn_forward", "_flash_attn_backward"):
        setattr(interface, name, getattr(dense, name))
        setattr(interface, name.replace("attn", "attn_varlen"), None)
    third = types.ModuleType("flash_attn_interface")
    third.__spec__ = ModuleSpec("flash_attn_interface", None)
    third._flash_attn_forward, third._flash_attn_backward = fa3_forward, fa3_backward
    third.flash_attn_func = third.flash_attn_varlen_func = None
    sys.modules |= {"flash_attn": package, "flash_attn.flash_attn_interface": interface}
    sys.modules["flash_attn_interface"] = third


@functools.cache
def imported():
    """Import xfuser and return the class, the kernels and xfuser's functions for groups."""
    import torch

    flash_attn()
    import yunchang.ring.utils

    answers = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: "none",
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: types.SimpleNamespace(gcnArchName=""),
    }
    with (
        mock.patch.multiple(torch.cuda, **answers),
        mock.patch.object(torch.version, "cuda", "12.8"),
        mock.patch.object(yunchang.ring.utils, "update_npu_out", None, create=True),
    ):
        import xfuser.core.distributed as groups
        import xfuser.core.long_ctx_attention as longs
        from xfuser.core.long_ctx_attention import ring  # noqa: F401  # longs imports it when it is used
    return longs.xFuserLongContextAttention, longs.AttnType, groups


def inputs(dtype, workers):
    import torch

    made = torch.Generator().manual_seed(7)
    size = (B, TOKENS or 8 * workers, H, D)
    return [torch.randn(size, generator=made, dtype=torch.float64).to(dtype) for _ in range(4)]


def rank_results(rank, kernel, ulysses, ring, dtype, mask):
    import torch

    workers = ulysses * ring
    layer, kernels, groups = imported()
    groups.init_distributed_environment(
        world_size=workers, rank=rank, local_rank=rank, backend="gloo"
    )
    groups.initialize_model_parallel(ulysses_degree=ulysses, ring_degree=ring, backend="gloo")
    given = inputs(getattr(torch, dtype), workers)
    q, k, v, dy = (x.chunk(workers, dim=1)[rank].contiguous() for x in given)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    named = {"window_size": WINDOW} if mask == "window" else {}
    attention = layer(attn_type=kernels.from_string(kernel))
    o = attention(None, *leaves, softmax_scale=SCALE, causal=mask != "full", **named)
    results = [o]
    if ring > 1:  # otherwise gradients are sent to the rank itself, which gloo refuses
        o.backward(dy)
        results += [x.grad for x in leaves]
    return [x.detach().double().tolist() for x in results]


def right(dtype, workers, mask):
    """o, dq, dk, dv of the whole sequence, in float64, by autograd of a dense softmax."""
    import torch

    q, k, v, dy = (x.double() for x in inputs(dtype, workers))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    window = WINDOW if mask == "window" else ()
    p = dense.scores(q, k, mask != "full", SCALE, *window).softmax(3)
    o = torch.einsum("bhij,bjhd->bihd", p, v)
    o.backward(dy)
    return [x.detach() for x in (o, *(x.grad for x in leaves))]


def main(kernel, ulysses, ring, dtype, mask):
    import torch

    workers = ulysses * ring
    imported()  # once for all ranks, because it takes long
    given = (kernel, ulysses, ring, dtype, mask)
    got = on_ranks(workers, rank_results, *given, method="fork")
    report = {}
    for number, (name, want) in enumerate(
        zip(NAMES, right(getattr(torch, dtype), workers, mask), strict=True)
    ):
        if number == len(got[0]):
            break
        parts = [torch.tensor(results[number], dtype=torch.float64) for results in got]
        errors = zip(parts, want.chunk(workers, dim=1), strict=True)
        report[name] = {
            "errors": [float((x - y).abs().max() / want.abs().max()) for x, y in errors],
            "finer_than_bfloat16": sum(int((x.bfloat16().double() != x).sum()) for x in parts),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:6])
