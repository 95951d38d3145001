"""Ring attention in NumPy as a target: keys, values and their positions travel round the ring.

ringspec check docs/conform/example_numpy.py:target
"""

import numpy as np

from ringspec.conformance.adapters.numpy_lists import NumPyTarget
from ringspec.conformance.capabilities import Capabilities


def ring_attention(q, k, v, scale, position_q, position_k, causal=False):
    """Lists with one array a worker: o [B, H, n, D] and lse [B, H, n]."""
    workers, o, lse = len(q), [], []
    for r in range(workers):
        total, weight, m = 0.0, 0.0, -np.inf
        for step in range(workers):
            block = (r - step) % workers
            s = scale * q[r].astype(np.float64) @ k[block].swapaxes(2, 3)
            if causal:
                hidden = position_k[block][:, None, None, :] > position_q[r][:, None, :, None]
                s = np.where(hidden, -np.inf, s)
            new = np.maximum(m, s.max(axis=3, keepdims=True))
            old, p = np.exp(m - np.maximum(new, -1e300)), np.exp(s - np.maximum(new, -1e300))
            total = total * old + p @ v[block]
            weight, m = weight * old + p.sum(axis=3, keepdims=True), new
        o.append((total / weight).astype(q[r].dtype))
        lse.append((m + np.log(weight))[..., 0].astype(q[r].dtype))
    return {"o": o, "lse": lse}


target = NumPyTarget(
    ring_attention,
    Capabilities(
        operations=("ring-forward",),
        layouts=("contiguous", "striped", "zigzag"),
        masks=("causal",),
        features=("scale", "unequal-lengths"),
        formats=("float32",),
        head_ratios=(1,),
    ),
)
