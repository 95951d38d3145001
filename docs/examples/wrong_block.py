"""One block with one mistake, for ``ringspec explain``: its backward pass computes delta from the block's own keys.

ringspec explain docs/examples/wrong_block.py:target
"""

import numpy as np

from ringspec.conformance.adapters.numpy_lists import NumPyTarget
from ringspec.conformance.target import Capabilities


def block(q, k, v, scale, position_q, position_k, dy=None, lse=None, delta=None, causal=False):
    """o and lse of queries with one block of keys; with dy and lse, what the block adds to dq, dk and dv."""
    q, k, v = q[0], k[0], v[0]
    s = scale * (q @ k.swapaxes(2, 3))
    if causal:
        s = np.where(position_k[0][:, None, None, :] > position_q[0][:, None, :, None], -np.inf, s)
    if dy is None:
        m = np.maximum(s.max(axis=3, keepdims=True), np.float32(-1e30))
        p = np.exp(s - m)
        l = p.sum(axis=3, keepdims=True)
        empty = l == 0
        o = p @ v / np.where(empty, 1, l)
        lse = np.where(empty, -np.inf, m + np.log(np.where(empty, 1, l)))
        return {"o": [o.astype(q.dtype)], "lse": [lse[..., 0].astype(q.dtype)]}
    p = np.exp(s - lse[0][..., None])
    dp = dy[0] @ v.swapaxes(2, 3)
    ds = scale * p * (dp - (p * dp).sum(axis=3, keepdims=True))  # the mistake: delta is given
    dq, dk, dv = ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dy[0]
    return {"dq": [dq.astype(q.dtype)], "dk": [dk.astype(q.dtype)], "dv": [dv.astype(q.dtype)]}


target = NumPyTarget(
    block,
    Capabilities(
        operations=("block-forward", "block-backward"),
        masks=("causal",),
        features=("positions", "empty-rows"),
        head_ratios=(1,),
    ),
)
