"""Calls of long sequences, and their truth blockwise in float64 by torch, on a GPU if there is one.

Truth is cross-checked on sampled rows and columns in NumPy's longdouble, which shares no arithmetic with
it. Row scales are those of ringspec.compare.row_scale, blockwise.
"""

import numpy as np

from ringspec.compare.verdict import judge_tensor
from ringspec.conformance.judge.bounds import bounds_of
from ringspec.conformance.judge.recipe import recipe_for
from ringspec.conformance.target.protocol import Call
from ringspec.conformance.target.results import frozen
from ringspec.formats import load, store
from ringspec.rings.layouts import make_layout, shard

RESULTS = ("o", "lse", "dq", "dk", "dv")
BLOCK = 1024


def long_call(tokens, workers, layout, *, heads=4, key_heads=2, head_dim=128, causal=True, seed=0):
    """A call in bfloat16, and its global q, k, v, dy as float64 arrays of bfloat16 numbers."""
    rng = np.random.default_rng(seed)
    sizes = {"q": heads, "k": key_heads, "v": key_heads, "dy": heads}
    stored = {
        name: store(rng.standard_normal((1, count, tokens, head_dim)), "bfloat16")
        for name, count in sizes.items()
    }
    places = make_layout(layout, tokens, workers)
    index = np.asarray(places.table)
    call = Call(
        id=f"long/{layout}-{'causal-' if causal else ''}s{tokens}-w{workers}",
        operation="ring",
        passes=("forward", "backward"),
        workers=workers,
        tensors={name: frozen(shard(x, places)) for name, x in stored.items()},
        terms={"scale": head_dim**-0.5} | ({"causal": True} if causal else {}),
        formats={"inputs": "bfloat16", "outputs": "bfloat16", "statistics": "float32"},
        layout=layout,
        index_q=index,
        index_k=index,
        position_q=index[:, None],
        position_k=index[:, None],
    )
    return call, {name: load(x) for name, x in stored.items()}


def truth(inputs, scale, causal):
    """o, lse, dq, dk, dv [B, H, S(, D)] and ``scale.*``, in float64."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v, dy = (torch.from_numpy(inputs[n]).to(device) for n in ("q", "k", "v", "dy"))
    heads, tokens = q.shape[1:3]
    group = heads // k.shape[1]
    made = {n: torch.zeros_like(x) for n, x in zip(RESULTS, (q, q[..., 0], q, k, v), strict=True)}
    sums = {n: torch.zeros_like(x) for n, x in made.items()}
    for head in range(heads):
        for start in range(0, tokens, BLOCK):
            at = slice(start, start + BLOCK)
            keys = k[0, head // group], v[0, head // group]
            rows = q[0, head, at], dy[0, head, at]
            add_block(made, sums, head, head // group, at, rows, keys, scale, causal)
    scales = {f"scale.{n}": x if n == "lse" else x.amax(-1) for n, x in sums.items()}
    return {name: x.cpu().numpy() for name, x in (made | scales).items()}


def add_block(made, sums, head, key_head, at, rows, keys, scale, causal):
    """One block of query rows against all keys that they see."""
    import torch

    (q, dy), (k, v) = rows, keys
    if causal:
        k, v = k[: at.start + len(q)], v[: at.start + len(q)]
    s, size = scale * (q @ k.T), scale * (q.abs() @ k.abs().T)
    if causal:
        hidden = torch.ones_like(s, dtype=torch.bool).triu(at.start + 1)
        s, size = s.masked_fill(hidden, -torch.inf), size.masked_fill(hidden, 0.0)
    lse = torch.logsumexp(s, dim=1)
    p, kappa = torch.exp(s - lse[:, None]), 1.0 + size.amax(1)
    o, absolute = p @ v, p @ v.abs()
    dz = p * (dy @ v.T - (dy * o).sum(1)[:, None])
    a = p * (dy.abs() @ v.abs().T + (dy.abs() * absolute).sum(1)[:, None]) * kappa[:, None]
    seen = slice(0, len(k))
    made["o"][0, head, at], sums["o"][0, head, at] = o, kappa[:, None] * absolute
    made["lse"][0, head, at], sums["lse"][0, head, at] = lse, kappa + lse.abs()
    made["dq"][0, head, at], sums["dq"][0, head, at] = scale * dz @ k, scale * a @ k.abs()
    made["dk"][0, key_head, seen] += scale * dz.T @ q
    sums["dk"][0, key_head, seen] += scale * a.T @ q.abs()
    made["dv"][0, key_head, seen] += p.T @ dy
    sums["dv"][0, key_head, seen] += (kappa[:, None] * p).T @ dy.abs()


def cross_check(inputs, scale, causal, values, rng, samples=3):
    """The largest difference of sampled rows and columns from longdouble, in units of their scale."""
    q, k, v, dy = (inputs[n].astype(np.longdouble) for n in ("q", "k", "v", "dy"))
    tokens, group = q.shape[2], q.shape[1] // k.shape[1]
    worst = 0.0
    for at in rng.integers(0, tokens, samples):
        head = int(rng.integers(0, q.shape[1]))
        own = k[0, head // group], v[0, head // group]
        seen = slice(0, at + 1 if causal else tokens)
        s = scale * (own[0][seen] @ q[0, head, at])
        lse = np.log(np.exp(s - s.max()).sum()) + s.max()
        p = np.exp(s - lse)
        o = p @ own[1][seen]
        dz = p * (own[1][seen] @ dy[0, head, at] - dy[0, head, at] @ o)
        found = {"o": o, "lse": lse, "dq": scale * (dz @ own[0][seen])}
        for name, x in found.items():
            error = np.abs(x - values[name][0, head, at]).max()
            worst = max(worst, float(error / values[f"scale.{name}"][0, head, at]))
        worst = max(worst, column_error(q, k, v, dy, scale, causal, values, head // group, at))
    return worst


def column_error(q, k, v, dy, scale, causal, values, key_head, at):
    """dk and dv of one key: sums over all rows that see it, of all heads of its group."""
    group = q.shape[1] // k.shape[1]
    dk, dv = np.zeros(k.shape[3], np.longdouble), np.zeros(v.shape[3], np.longdouble)
    for head in range(key_head * group, (key_head + 1) * group):
        rows = slice(at if causal else 0, None)
        s = scale * (q[0, head, rows] @ k[0, key_head, at])
        p = np.exp(s - values["lse"][0, head, rows])
        delta = (dy[0, head, rows] * values["o"][0, head, rows]).sum(1)
        dz = p * (dy[0, head, rows] @ v[0, key_head, at] - delta)
        dk, dv = dk + scale * (dz @ q[0, head, rows]), dv + p @ dy[0, head, rows]
    return max(
        float(
            np.abs(x - values[name][0, key_head, at]).max()
            / values[f"scale.{name}"][0, key_head, at]
        )
        for name, x in (("dk", dk), ("dv", dv))
    )


def verdicts(claims, call, values, outputs):
    """One verdict for each claimed tensor of each worker, by the bounds of the declared recipe."""
    bounds = bounds_of(claims, call)
    used = recipe_for(claims, call.formats)
    formats = dict.fromkeys(("dq", "dk", "dv"), used.gradients) | {
        "o": used.outputs,
        "lse": used.lse,
    }
    found = []
    for name in outputs:
        for worker, got in enumerate(outputs[name]):
            want, scale = (values[n][:, :, call.index_q[worker]] for n in (name, f"scale.{name}"))
            rounded = store(want, formats[name])
            factor, floor = bounds.factors[name], bounds.floors[name]
            found.append(
                judge_tensor(name, got, want, rounded, scale, factor, floor=floor, worker=worker)
            )
    return found
