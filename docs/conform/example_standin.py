"""A ring that calls flash-attn for each block, as a target on a CPU: the option `standins` replaces flash-attn.

    ringspec smoke docs/conform/example_standin.py:target

The upper part is an implementation as it would run on GPUs: it knows nothing of ringspec. The lower part
connects it.
"""

import torch
import torch.distributed as dist


def blocks_of(x, group):
    """The x of each rank, gathered."""
    every = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, x.contiguous(), group=group)
    return every


class RingAttention(torch.autograd.Function):
    """Causal or full attention of [B, n, H, D] in contiguous shards; each block is a call of the kernel."""

    @staticmethod
    def forward(ctx, q, k, v, scale, causal, group):
        from flash_attn.flash_attn_interface import _flash_attn_forward

        rank = dist.get_rank(group)
        o = lse = None
        for source, (keys, values) in enumerate(
            zip(blocks_of(k, group), blocks_of(v, group), strict=True)
        ):
            if causal and source > rank:
                continue
            diagonal = causal and source == rank
            block_o, block_lse, _, _ = _flash_attn_forward(
                q, keys, values, 0.0, scale, diagonal, -1, -1, 0.0, None, False
            )
            block_o = block_o.float()
            if o is None:
                o, lse = block_o, block_lse
                continue
            both = torch.logaddexp(lse, block_lse)
            old, new = (torch.exp(x - both).transpose(1, 2)[..., None] for x in (lse, block_lse))
            o, lse = old * o + new * block_o, both
        ctx.save_for_backward(q, k, v, o.to(q.dtype), lse)
        ctx.given = (scale, causal, group)
        ctx.mark_non_differentiable(lse)
        return o.to(q.dtype), lse

    @staticmethod
    def backward(ctx, dout, _):
        from flash_attn.flash_attn_interface import _flash_attn_backward

        q, k, v, o, lse = ctx.saved_tensors
        scale, causal, group = ctx.given
        rank = dist.get_rank(group)
        zeros = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
        dq, sums = (
            zeros[0],
            [[x.clone() for x in zeros[1:]] for _ in range(dist.get_world_size(group))],
        )
        for source, (keys, values) in enumerate(
            zip(blocks_of(k, group), blocks_of(v, group), strict=True)
        ):
            if causal and source > rank:
                continue
            diagonal = causal and source == rank
            new = [torch.empty_like(x) for x in (q, keys, values)]
            _flash_attn_backward(
                dout, q, keys, values, o, lse, *new, 0.0, scale, diagonal, -1, -1, 0.0, None, False
            )
            dq += new[0]
            sums[source] = [x.float() for x in new[1:]]
        # Each block's gradients go to the rank that owns the keys, in float32.
        for pair in sums:
            for x in pair:
                dist.all_reduce(x, group=group)
        dk, dv = sums[rank]
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None, None


# Five lines connect it: a function of one rank, and a target that says what the ring supports.
from ringspec.conformance.adapters.torch_processes import TorchTarget  # noqa: E402
from ringspec.conformance.target import Capabilities  # noqa: E402


def attention(q, k, v, *, group, call):
    return RingAttention.apply(q, k, v, call.scale, call.causal, group)


CLAIMS = Capabilities(axes="BSHD", formats=("bfloat16", "float16"), workers=(2, 3), circulations=("gather",), head_dims=range(8, 257, 8), value_dim_equals_head_dim=True)  # fmt: skip
target = TorchTarget(attention, CLAIMS, standins=("flash_attn",))
