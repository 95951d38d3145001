"""A PyTorch ring attention as a target: keys and values travel, partial results are merged by LSE.

    ringspec smoke docs/conform/example_torch.py:target
    ringspec check docs/conform/example_torch.py:target

The function computes what one rank does. It takes any layout, because it masks by positions, which
travel with their keys.
"""

from ringspec.conformance.adapters.torch_processes import TorchTarget
from ringspec.conformance.target import Capabilities


def rotated(x, group, call):
    """The block of the previous rank; in the backward pass, its gradient travels in the other direction."""
    import torch
    from torch.distributed.nn.functional import all_to_all_single

    if call.workers == 1:
        return x
    # Everything goes to the next rank, nothing to the others.
    give, take = [0] * call.workers, [0] * call.workers
    give[(call.rank + 1) % call.workers] = take[call.rank - 1] = x.numel()
    flat = x.contiguous().reshape(-1)
    got = all_to_all_single(torch.empty_like(flat), flat, take, give, group=group)
    return got.reshape(x.shape)


def ring_attention(q, k, v, *, group, call):
    """o [B, H, n, D] and lse [B, H, n] of this rank's queries."""
    import torch

    wide, shared = torch.float32, q.shape[1] // k.shape[1]
    rows, columns = call.position_q[:, None, :, None], call.position_k
    o = torch.zeros(*q.shape[:3], v.shape[3], dtype=wide)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=wide)
    for step in range(call.workers):
        if step:
            k, v, columns = (rotated(x, group, call) for x in (k, v, columns))
        keys, values = (x.repeat_interleave(shared, dim=1).to(wide) for x in (k, v))
        s = call.scale * (q.to(wide) @ keys.transpose(2, 3))
        if call.causal:
            s = s.masked_fill(columns[:, None, None, :] > rows, -torch.inf)
        both = torch.logaddexp(lse, torch.logsumexp(s, dim=3))
        # A row that has seen no key has lse -inf; with 0 in its place, its weights are 0, not NaN.
        base = both.masked_fill(both == -torch.inf, 0.0)
        o = o * torch.exp(lse - base)[..., None] + torch.exp(s - base[..., None]) @ values
        lse = both
    return o.to(q.dtype), lse


target = TorchTarget(
    ring_attention,
    Capabilities(
        layouts=("contiguous", "striped", "zigzag"),
        circulations=("kv",),
        directions=(1,),
        formats=("float32", "bfloat16"),
        features=("scale",),
    ),
)
