"""A ring with one mistake, to see what a verdict looks like: dk and dv make one hop too few.

ringspec check docs/examples/wrong_ring.py:target --only ring/float32-zigzag-w4
"""

import numpy as np

from ringspec.conformance.adapters.numpy_lists import NumPyTarget
from ringspec.conformance.target import Capabilities


def next_worker(x):
    """Every worker sends to the next one: x[r] = x[r - 1]."""
    return [x[r - 1] for r in range(len(x))]


def ring_attention(q, k, v, scale, position_q, position_k, formats, dy=None, causal=False):
    """o and lse, and with dy also dq, dk, dv: lists with one array per worker, all arithmetic in float32."""
    workers = range(len(q))
    q, k, v = ([x.astype(np.float32) for x in given] for given in (q, k, v))

    def scores(r):
        s = scale * (q[r] @ k[r].swapaxes(2, 3))
        later = position_k[r][:, None, None, :] > position_q[r][:, None, :, None]
        return np.where(later, -np.inf, s) if causal else s

    o, l, m = [0.0] * len(q), [0.0] * len(q), [np.float32(-1e30)] * len(q)
    for _ in workers:
        for r in workers:
            s = scores(r)
            new = np.maximum(m[r], s.max(axis=3, keepdims=True))
            old, p, m[r] = np.exp(m[r] - new), np.exp(s - new), new
            o[r], l[r] = o[r] * old + p @ v[r], l[r] * old + p.sum(axis=3, keepdims=True)
        k, v, position_k = next_worker(k), next_worker(v), next_worker(position_k)
    o, lse = [o[r] / l[r] for r in workers], [m[r] + np.log(l[r]) for r in workers]
    out = {"o": [x.astype(formats["outputs"]) for x in o], "lse": [x[..., 0] for x in lse]}
    if dy is None:
        return out

    dy = [x.astype(np.float32) for x in dy]
    dq, dk, dv = ([np.zeros_like(x) for x in given] for given in (q, k, v))
    for step in workers:
        for r in workers:
            p = np.exp(scores(r) - lse[r])
            delta = (dy[r] * o[r]).sum(axis=3, keepdims=True)
            ds = scale * p * (dy[r] @ v[r].swapaxes(2, 3) - delta)
            dq[r] = dq[r] + ds @ k[r]
            dk[r] = dk[r] + ds.swapaxes(2, 3) @ q[r]
            dv[r] = dv[r] + p.swapaxes(2, 3) @ dy[r]
        k, v, position_k = next_worker(k), next_worker(v), next_worker(position_k)
        if step < len(q) - 1:  # the mistake: the last hop would return dk and dv
            dk, dv = next_worker(dk), next_worker(dv)
    gradients = {"dq": dq, "dk": dk, "dv": dv}
    return out | {n: [x.astype(formats["outputs"]) for x in g] for n, g in gradients.items()}


target = NumPyTarget(
    ring_attention,
    Capabilities(
        layouts=("contiguous", "striped", "zigzag"),
        masks=("causal",),
        features=("scale", "unequal-lengths"),
        formats=("bfloat16", "float32"),
        head_ratios=(1,),
    ),
)
