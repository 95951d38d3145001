"""diffusers' ring attention checked by hand: a program without ringspec, run by test_diffusers.py.

    python by_hand_diffusers_ring.py WORKERS

Processes under gloo run the ring of the installed diffusers unmodified, in float64. The two functions of flash-attn that
it calls are written here, dense in float64. Prints JSON: for o, dq, dk and dv the largest error against dense float64
attention of the whole sequence, divided by the largest correct number.
"""

import sys

import by_hand_ranks


def kernel_forward(q, k, v, dropout_p, scale, *rest):
    import torch

    s = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    lse = s.logsumexp(3)
    o = torch.einsum("bhij,bjhd->bihd", (s - lse[..., None]).exp(), v)
    return o, lse, torch.empty(0), torch.empty(0)


def kernel_backward(dy, q, k, v, o, lse, dq, dk, dv, dropout_p, scale, *rest):
    """Writes dq, dk, dv from the o and lse that the ring passes; flash-attn reads lse as [B, H, n], whatever its view."""
    import torch

    batch, n, heads, _ = q.shape
    lse = lse.as_strided((batch, heads, n), (heads * n, n, 1))
    p = (torch.einsum("bihd,bjhd->bhij", q, k) * scale - lse[..., None]).exp()
    delta = (dy * o).sum(3).transpose(1, 2)
    ds = p * (torch.einsum("bihd,bjhd->bhij", dy, v) - delta[..., None]) * scale
    dq.copy_(torch.einsum("bhij,bjhd->bihd", ds, k))
    dk.copy_(torch.einsum("bhij,bihd->bjhd", ds, q))
    dv.copy_(torch.einsum("bhij,bihd->bjhd", p, dy))


def attention(q, k, v, rank, workers):
    import torch
    from diffusers.models import _modeling_parallel as parallel
    from diffusers.models import attention_dispatch as dispatch
    from torch.distributed.device_mesh import init_device_mesh

    dispatch._wrapped_flash_attn_forward = kernel_forward
    dispatch._wrapped_flash_attn_backward = kernel_backward
    ring = parallel.ContextParallelConfig(ring_degree=workers, convert_to_fp32=False)
    config = parallel.ParallelConfig(context_parallel_config=ring)
    mesh = init_device_mesh("cpu", (workers, 1), mesh_dim_names=("ring", "ulysses"))
    config.setup(rank, workers, torch.device("cpu"), mesh=mesh)
    o, _ = dispatch._templated_context_parallel_attention(
        q,
        k,
        v,
        scale=by_hand_ranks.SCALE,
        return_lse=True,
        forward_op=dispatch._flash_attention_forward_op,
        backward_op=dispatch._flash_attention_backward_op,
        _parallel_config=config,
    )
    return o


if __name__ == "__main__":
    by_hand_ranks.main(attention, int(sys.argv[1]), dtype="float64")
