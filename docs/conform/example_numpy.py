"""Ring attention in NumPy as a target: keys, values and their positions travel around the ring.

ringspec check docs/conform/example_numpy.py:target
"""

import numpy as np

from ringspec.conformance.adapters.numpy_lists import NumPyTarget
from ringspec.conformance.target import Capabilities


def ring_attention(q, k, v, scale, position_q, position_k, formats, causal=False):
    """Lists with one array per worker: o [B, H, n, D] in the output format of the call, lse [B, H, n] in float32.

    One state per worker is carried through all steps. 16-bit inputs are widened: all arithmetic is in float32.
    """
    workers, o, lse = len(q), [], []
    q, k, v = ([x.astype(np.float32) for x in given] for given in (q, k, v))
    for r in range(workers):
        total, weight, m = 0.0, 0.0, np.float32(-np.inf)
        for step in range(workers):
            block = (r - step) % workers
            s = scale * (q[r] @ k[block].swapaxes(2, 3))
            if causal:
                hidden = position_k[block][:, None, None, :] > position_q[r][:, None, :, None]
                s = np.where(hidden, -np.inf, s)
            new = np.maximum(m, s.max(axis=3, keepdims=True))
            old, p = np.exp(m - np.maximum(new, -1e38)), np.exp(s - np.maximum(new, -1e38))
            total = total * old + p @ v[block]
            weight, m = weight * old + p.sum(axis=3, keepdims=True), new
        o.append((total / weight).astype(formats["outputs"]))
        lse.append((m + np.log(weight))[..., 0])
    return {"o": o, "lse": lse}


target = NumPyTarget(
    ring_attention,
    Capabilities(
        operations=("ring-forward",),
        layouts=("contiguous", "striped", "zigzag"),
        masks=("causal",),
        features=("scale", "unequal-lengths"),
        formats=("bfloat16", "float16", "float32"),
        head_ratios=(1,),
    ),
)
