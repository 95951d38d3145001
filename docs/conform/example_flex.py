"""FlexAttention as a target: every rank gathers all keys, and a mask function compares positions.

    ringspec smoke docs/conform/example_flex.py:target

On a CPU FlexAttention has no backward pass, so only the forward pass is claimed; on a GPU, omit ``operations`` and
pass ``device="cuda"``.
"""

from ringspec.conformance.adapters.torch_processes import TorchTarget
from ringspec.conformance.target import Capabilities


def gathered(x, group, dim):
    """The blocks of all ranks, in the order of the ranks; in the backward pass, gradients are summed."""
    import torch
    from torch.distributed.nn.functional import all_gather

    return torch.cat(all_gather(x.contiguous(), group=group), dim=dim)


def attention(q, k, v, *, group, call):
    """o [B, H, n, D] of this rank's queries over the keys of all ranks, and lse [B, H, n]."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    k, v = gathered(k, group, 2), gathered(v, group, 2)
    rows, columns = call.position_q, gathered(call.position_k, group, 1)  # [1, n], [1, S]

    def visible(b, h, i, j):
        return columns[0, j] <= rows[0, i]

    mask = None
    if call.causal:
        mask = create_block_mask(visible, None, None, q.shape[2], k.shape[2], device=q.device.type)
    return flex_attention(
        q,
        k,
        v,
        block_mask=mask,
        scale=call.scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_lse=True,
    )


target = TorchTarget(
    attention,
    Capabilities(
        operations=("ring-forward",),
        layouts=("contiguous", "striped", "zigzag"),
        circulations=("gather",),
        features=("scale",),
    ),
)
