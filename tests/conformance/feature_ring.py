"""A causal KV ring in float32, contiguous and for one batch entry, with sinks and a bias; each fault is a function."""

import numpy as np

from ringspec.conformance.target import Capabilities
from ringspec.conformance.target.protocol import Result


def right_sinks(x, worker, **state):
    return x


def right_dsinks(p, row, **state):
    return -(p * row[..., None]).sum(axis=1)


def right_bias(bias, r, step, n, **state):
    """The part of the biases, one array [H, n, W n] for each worker, that worker r adds in a step."""
    return columns(bias[r], r - step, n)


def right_dbias(dbias, ds, r, step, n, **state):
    """Add a block's dS to worker r's gradient of the bias, in place."""
    columns(dbias, r - step, n)[...] += ds


def columns(x, owner, n):
    return x[:, :, owner * n : (owner + 1) * n]


def ring(
    call,
    of_o=right_sinks,
    of_lse=right_sinks,
    dsinks=right_dsinks,
    lse_of_p=None,
    bias=right_bias,
    dbias=right_dbias,
):
    """Return the results of the ring.

    ``of_o``, ``of_lse``: the sinks of a row as they enter o and lse, given the sinks [H, 1, N]. ``dsinks(p, row)``:
    the gradient of one worker's sinks, given their weights [H, n, N] and delta [H, n]. ``lse_of_p``: lse in the
    backward pass, given lse and the lse without sinks. ``bias`` and ``dbias``: as :func:`right_bias` and
    :func:`right_dbias`.
    """
    W, scale = call.workers, np.float32(call.terms["scale"])
    q, k, v, dy = (
        [np.asarray(x, np.float32)[0] for x in call.tensors[name]] for name in ("q", "k", "v", "dy")
    )
    sinks = [None] * W
    if "sinks" in call.tensors:
        sinks = [np.asarray(x, np.float32)[:, None] for x in call.tensors["sinks"]]
    biases = [np.asarray(x, np.float32)[0] for x in call.tensors.get("bias", ())]
    group, n = len(q[0]) // len(k[0]), q[0].shape[1]
    k, v = ([np.repeat(x, group, axis=0) for x in shards] for shards in (k, v))
    found = {name: [] for name in ("o", "lse", "dq", "dsinks", "dbias")}
    dk, dv = ([np.zeros_like(x) for x in shards] for shards in (k, v))

    def scored(r, step, phase):
        s = scale * q[r] @ k[r - step].swapaxes(1, 2)
        if biases:
            s = s + bias(biases, r, step, n, scale=scale, phase=phase, workers=W)
        if step == 0:
            s = np.where(np.tri(n, dtype=bool), s, -np.inf)
        return s.astype(np.float32)

    for r in range(W):
        m, l, acc = np.float32(-100), np.float32(0), np.float32(0)
        for step in range(r + 1):
            s = scored(r, step, "forward")
            new = np.maximum(m, s.max(axis=2, keepdims=True))
            p = np.exp(s - new)
            l = np.exp(m - new) * l + p.sum(axis=2, keepdims=True)
            acc, m = np.exp(m - new) * acc + p @ v[r - step], new
        state = {"scale": scale, "workers": W, "m": m, "steps": r + 1, "sinks": sinks[r]}
        of_sinks = [np.float32(0)] * 2
        if sinks[r] is not None:
            of_sinks = [
                np.exp(f(sinks[r], r, **state) - m).sum(axis=2, keepdims=True)
                for f in (of_o, of_lse)
            ]
        o = acc / (l + of_sinks[0])
        lse = m + np.log(l + of_sinks[1])
        used = lse if lse_of_p is None else lse_of_p(lse, m + np.log(l))
        delta = (o * dy[r]).sum(axis=2, keepdims=True)
        dq = np.zeros_like(q[r])
        of_bias = np.zeros((len(q[r]), n, W * n), np.float32)
        for step in range(r + 1):
            p = np.exp(scored(r, step, "backward") - used)
            ds = p * (dy[r] @ v[r - step].swapaxes(1, 2) - delta)
            if biases:
                dbias(of_bias, ds, r, step, n, scale=scale)
            ds *= scale
            dq += ds @ k[r - step]
            dk[r - step] += ds.swapaxes(1, 2) @ q[r]
            dv[r - step] += p.swapaxes(1, 2) @ dy[r]
        if biases:
            found["dbias"].append(of_bias[None])
        if sinks[r] is not None:
            weights = np.exp(sinks[r] - lse)
            found["dsinks"].append(dsinks(weights, delta[..., 0], worker=r, lse=lse, **state))
        for name, x in (("o", o), ("lse", lse[..., 0]), ("dq", dq)):
            found[name].append(x[None])
    of_keys = (len(k[0]) // group, group, n, -1)
    for name, shards in (("dk", dk), ("dv", dv)):
        found[name] = [x.reshape(of_keys).sum(axis=1)[None] for x in shards]
    return Result(**{name: shards or None for name, shards in found.items()})


class Target:
    """The ring with faults, read in float32 with two query heads of a key head."""

    name = "ring with features"
    capabilities = Capabilities(
        circulations=("kv",), directions=(1,), workers=(3,), head_ratios=(2,), only_causal=True, batch=(1,),
        layouts=("contiguous",), masks=("causal",), formats=("float32",), features=("sinks", "bias"),
    )  # fmt: skip

    def __init__(self, **faults):
        self.faults = faults

    def run(self, call):
        with np.errstate(all="ignore"):
            return ring(call, **self.faults)
