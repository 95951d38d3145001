"""diffusers' context parallelism checked by hand: a program without ringspec, run by test_diffusers.py.

    python by_hand_diffusers.py RING_DEGREE ULYSSES_DEGREE

Processes under gloo run the installed, unmodified package in float32; flash-attn's two functions are those of
by_hand_zhuzilin.py, dense in float64. The results are compared with dense float64 attention of the whole sequence.
Prints JSON: for o, dq, dk and dv, the largest error of each rank divided by the largest number.
"""

import json
import sys

import by_hand_zhuzilin as dense
from by_hand_ranks import on_ranks

B, H, N, D = 2, 6, 4, 8
SCALE = 0.5
NAMES = ("o", "dq", "dk", "dv")


def inputs(workers):
    import torch

    made = torch.Generator().manual_seed(7)
    return [torch.randn(B, N * workers, H, D, generator=made) for _ in NAMES]


def backward(dout, q, k, v, out, lse, *rest):
    """The kernel reads the memory of lse as [B, H, n], whatever its view."""
    batch, n, heads, _ = q.shape
    lse = lse.as_strided((batch, heads, n), (heads * n, n, 1))
    return dense._flash_attn_backward(dout, q, k, v, out, lse, *rest)


def rank_results(rank, ring, ulysses):
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    workers = ring * ulysses
    from diffusers.models import _modeling_parallel as settings
    from diffusers.models import attention_dispatch as module

    module._wrapped_flash_attn_forward = dense._flash_attn_forward
    module._wrapped_flash_attn_backward = backward
    context = settings.ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses)
    parallel = settings.ParallelConfig(context_parallel_config=context)
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    parallel.setup(rank, workers, torch.device("cpu"), mesh=mesh)
    *leaves, dy = (x.chunk(workers, dim=1)[rank].clone() for x in inputs(workers))
    leaves = [x.requires_grad_() for x in leaves]
    o = module._templated_context_parallel_attention(
        *leaves,
        scale=SCALE,
        forward_op=module._flash_attention_forward_op,
        backward_op=module._flash_attention_backward_op,
        _parallel_config=parallel,
    )
    o.backward(dy)
    return [x.detach().double().tolist() for x in (o, *(x.grad for x in leaves))]


def right(workers):
    """o, dq, dk, dv of the whole sequence, in float64, by autograd of a dense softmax."""
    import torch

    *leaves, dy = (x.double() for x in inputs(workers))
    q, k, v = leaves = [x.requires_grad_() for x in leaves]
    o = torch.einsum("bhij,bjhd->bihd", dense.scores(q, k, False, SCALE).softmax(3), v)
    o.backward(dy)
    return [x.detach() for x in (o, *(x.grad for x in leaves))]


def main(ring, ulysses):
    import torch

    workers = ring * ulysses
    got = on_ranks(workers, rank_results, ring, ulysses)
    report = {}
    for number, (name, want) in enumerate(zip(NAMES, right(workers), strict=True)):
        parts = [torch.tensor(got[rank][number], dtype=torch.float64) for rank in range(workers)]
        pairs = zip(parts, want.chunk(workers, dim=1), strict=True)
        report[name] = [float((x - y).abs().max() / want.abs().max()) for x, y in pairs]
    print(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
