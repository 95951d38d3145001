"""Ulysses in PyTorch as a target of schemes: tokens are exchanged for heads, and back after the attention.

    ringspec smoke docs/conform/example_ulysses.py:target
    ringspec check docs/conform/example_ulysses.py:target --only 'scheme/*'

The function computes what one rank does. It takes any layout, because it masks by positions. Key heads are repeated
before the exchange, so that any number of them can be divided.
"""

from ringspec.conformance.adapters.torch_processes import TorchTarget
from ringspec.conformance.target import Capabilities


def exchanged(x, group, split, joined):
    """Divide the axis ``split`` among the ranks of the group, and join what arrives along the axis ``joined``."""
    import torch
    from torch.distributed.nn.functional import all_to_all_single

    ranks = torch.distributed.get_world_size(group)
    give = torch.stack(x.chunk(ranks, dim=split)).contiguous()
    got = all_to_all_single(torch.empty_like(give), give, group=group)
    return torch.cat(list(got), dim=joined)


def gathered(positions, group):
    """Positions [1, n] of all ranks, in the order in which exchanged rows lie."""
    import torch

    every = [torch.empty_like(positions) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(every, positions.contiguous(), group=group)
    return torch.cat(every, dim=1)


def attention(q, k, v, rows, columns, call):
    """o [B, h, S, D] and lse [B, h, S] of all tokens and some heads, with the mask of their positions."""
    import torch

    s = call.scale * (q @ k.transpose(2, 3))
    hidden = torch.zeros(s.shape[-2:], dtype=torch.bool)
    if call.causal:
        hidden = columns > rows.T
    if "window" in call.terms:
        hidden = hidden | (rows.T - columns > call.terms["window"][0])
    s = s.masked_fill(hidden, -torch.inf)
    return torch.softmax(s, dim=3) @ v, torch.logsumexp(s, dim=3)


def ulysses(q, k, v, *, group, call):
    """o [B, H, n, D] and lse [B, H, n] of this rank's queries."""
    group = call.device_mesh["ulysses"].get_group()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    q, k, v = (exchanged(x, group, 1, 2) for x in (q, k, v))
    rows, columns = (gathered(x, group) for x in (call.position_q, call.position_k))
    o, lse = attention(q, k, v, rows, columns, call)
    return exchanged(o, group, 2, 1), exchanged(lse, group, 2, 1)


target = TorchTarget(
    ulysses,
    Capabilities(
        operations=("context_parallel-forward", "context_parallel-backward"),
        schemes=("ulysses",),
        layouts=("contiguous", "striped", "zigzag"),
        masks=("causal", "window"),
        features=("kv-replicas", "mla"),
        formats=("float32",),
    ),
)
