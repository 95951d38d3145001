"""Dense attention in float64 for the tests of the stand-ins: row by row in NumPy, without ringspec."""

import numpy as np


def visible(queries, keys, causal, window):
    """Which key each query sees; query and key are aligned at the bottom right corner."""
    left, right = window
    seen = np.zeros((queries, keys), bool)
    for i in range(queries):
        at = i + keys - queries
        for j in range(keys):
            late = (causal and j > at) or (not causal and right >= 0 and j > at + right)
            early = left >= 0 and j < at - left
            seen[i, j] = not (late or early)
    return seen


def attention(q, k, v, dy, seen, scale, softcap=0.0):
    """o, lse, dq, dk, dv of q [B, Sq, H, D] and k, v [B, Sk, Hkv, D]; +inf and 0 in rows without keys."""
    batch, queries, heads, _ = q.shape
    group = heads // k.shape[2]
    o, lse = np.zeros_like(q), np.full((batch, heads, queries), np.inf)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                at = np.flatnonzero(seen[i])
                if not len(at):
                    continue
                keys, values = k[b, at, h // group], v[b, at, h // group]
                z = keys @ q[b, i, h] * scale
                s = softcap * np.tanh(z / softcap) if softcap else z
                lse[b, h, i] = s.max() + np.log(np.exp(s - s.max()).sum())
                p = np.exp(s - lse[b, h, i])
                o[b, i, h] = p @ values
                ds = p * (values @ dy[b, i, h] - dy[b, i, h] @ o[b, i, h])
                dz = ds * (1 - (s / softcap) ** 2) if softcap else ds
                dq[b, i, h] = dz @ keys * scale
                dk[b, at, h // group] += np.outer(dz, q[b, i, h]) * scale
                dv[b, at, h // group] += np.outer(p, dy[b, i, h])
    return o, lse, dq, dk, dv


def ulp(x, digits, smallest):
    """The distance of neighbouring numbers at x, of a format with this many significant bits."""
    _, exponent = np.frexp(np.abs(x))
    return 2.0 ** np.maximum(exponent - digits, smallest)
