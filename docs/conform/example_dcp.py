"""Decode context parallelism in NumPy as a target of schemes: local attention, then a merge by LSE.

    ringspec smoke docs/conform/example_dcp.py:target

Replace ``local_attention`` and ``merged`` by calls of your kernels. Each rank holds some query heads of all queries, and
some keys of the cache for all query heads of its group.
"""

import numpy as np

from ringspec.conformance.adapters.numpy_lists import NumPyTarget
from ringspec.conformance.target import Capabilities


def local_attention(q, k, v, visible, scale):
    """o and lse of one rank's keys; a row that sees no key has o = 0 and lse = -inf."""
    s = np.where(visible, scale * (q @ k.swapaxes(2, 3)), -np.inf)
    top = np.maximum(s.max(axis=3, keepdims=True, initial=-np.inf), -1e30)
    p = np.exp(s - top)
    total = p.sum(axis=3, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    return p @ v / np.maximum(total, 1e-30), lse


def merged(parts):
    """The merge of partial results; a part with lse = -inf has the weight 0, whatever its o is."""
    o, lse = (np.stack(x) for x in zip(*parts, strict=True))
    top = np.maximum(lse.max(axis=0), -1e30)
    weight = np.exp(lse - top)
    total = weight.sum(axis=0)
    o = np.where(weight[..., None] > 0, o, 0.0)
    with np.errstate(divide="ignore"):
        return (weight[..., None] * o).sum(axis=0) / np.maximum(total, 1e-30)[
            ..., None
        ], top + np.log(total)


def decode(
    q, k, v, scale, heads_q, heads_k, index_k, position_q, position_k, causal=False, interleave=1
):
    """o [B, h, n, Dv] and lse [B, h, n] of each rank's query heads; ``index_k`` already follows the interleave."""
    q, k, v = ([x.astype(np.float32) for x in given] for given in (q, k, v))
    every = np.concatenate(q, axis=1)  # q of all heads, all-gathered in the order of ranks
    group = (heads_q.max() + 1) // (heads_k.max() + 1)
    key_heads = heads_q.ravel() // group
    parts = []
    for rank in range(len(q)):
        visible = index_k[rank] >= 0
        if causal:
            visible = visible & (position_k[rank, 0] <= position_q[rank, 0][:, None])
        parts.append(
            local_attention(every, k[rank][:, key_heads], v[rank][:, key_heads], visible, scale)
        )
    o, lse = merged(parts)
    return {"o": np.split(o, len(q), axis=1), "lse": np.split(lse, len(q), axis=1)}


target = NumPyTarget(
    decode,
    Capabilities(
        operations=("context_parallel-forward",),
        schemes=("dcp",),
        meshes=("dcp",),
        features=("empty-ranks", "multi-token-decode", "mla"),
        formats=("float32",),
    ),
)
