"""A causal KV ring in float32, for one batch entry, with sinks, a bias and dropout; each fault is a function."""

from functools import partial

import numpy as np
from conformance.readout.told_features import Planted

from ringspec.conformance.target.protocol import Result
from ringspec.spec.dropout import keep_mask


def right_sinks(x, worker, **state):
    return x


def right_dsinks(p, row, **state):
    return -(p * row[..., None]).sum(axis=1)


def right_bias(bias, r, step, n, **state):
    """The part of the biases, one array [H, n, W n] for each worker, that worker r adds in a step.

    The columns, and those of masks and of the gradient, are in the order of the workers.
    """
    return columns(bias[r], r - step, n)


def right_dbias(dbias, ds, r, step, n, **state):
    """Add a block's dS to worker r's gradient of the bias, in place."""
    columns(dbias, r - step, n)[...] += ds


def right_drop(masks, r, step, n, use, phase, p, seed):
    """Dropout's factors on a block's weights in o ('o'), dv ('dv') or dS ('p'), on dp ('dp') and in row sums ('l').

    ``masks``: one mask [H, n, W n] of kept pairs for each worker.
    """
    return 1 if use in ("l", "p") else columns(masks[r], r - step, n) / np.float32(1 - p)


def masks_of(call, seed, n, heads):
    """The masks of a call for a seed, or the ones that it gives."""
    if "keep" in call.tensors:
        return [np.asarray(x)[0][..., call.index_q.ravel()] for x in call.tensors["keep"]]
    tokens = call.index_q.reshape(1, -1)
    given = {"dropout_p": call.terms["dropout_p"], "dropout_seed": seed}
    mask = keep_mask(tokens, tokens, heads=np.arange(heads), batches=np.zeros(1, int), **given)[0]
    return np.split(mask, call.workers, axis=1)


def columns(x, owner, n):
    owner = owner % (x.shape[2] // n)
    return x[:, :, owner * n : (owner + 1) * n]


class Blocks:
    """The inputs of a call, with key heads repeated, and the scores and dropout of its blocks."""

    def __init__(self, call, bias, drop, seed):
        self.workers, self.scale = call.workers, np.float32(call.terms["scale"])
        self.index = call.index_q
        self.q, k, v, self.dy = (
            [np.asarray(x, np.float32)[0] for x in call.tensors[name]]
            for name in ("q", "k", "v", "dy")
        )
        self.group, self.n = len(self.q[0]) // len(k[0]), k[0].shape[1]
        self.k, self.v = ([np.repeat(x, self.group, axis=0) for x in shards] for shards in (k, v))
        sinks = call.tensors.get("sinks", [None] * call.workers)
        self.sinks = [x if x is None else np.asarray(x, np.float32)[:, None] for x in sinks]
        order = self.index.ravel()
        biases = call.tensors.get("bias", ())
        self.biases = [np.asarray(x, np.float32)[0][..., order] for x in biases]
        self.bias, self.drop = bias, drop
        self.p, self.seed = call.terms.get("dropout_p"), call.terms.get("dropout_seed", 0)
        if self.p:
            seeds = self.seed, self.seed if seed is None else seed(self.seed)
            masks = [masks_of(call, x, self.n, len(self.q[0])) for x in seeds]
            self.masks = dict(zip(("forward", "backward"), masks, strict=True))

    def scores(self, r, step, phase):
        s = self.scale * self.q[r] @ self.k[r - step].swapaxes(1, 2)
        if self.biases:
            more = {"scale": self.scale, "phase": phase, "workers": self.workers}
            s = s + self.bias(self.biases, r, step, self.n, **more)
        return np.where(self.visible(r, step), s, -np.inf).astype(np.float32)

    def visible(self, r, step):
        return self.index[r - step][None] <= self.index[r][:, None]

    def steps(self, r):
        """The steps in which some query of worker r sees a key."""
        return [step for step in range(self.workers) if self.visible(r, step).any()]

    def dropped(self, x, r, step, use, phase):
        if not self.p:
            return x
        more = {"use": use, "phase": phase, "p": self.p, "seed": self.seed}
        return (x * self.drop(self.masks[phase], r, step, self.n, **more)).astype(np.float32)


def ring(
    call,
    of_o=right_sinks,
    of_lse=right_sinks,
    dsinks=right_dsinks,
    lse_of_p=None,
    bias=right_bias,
    dbias=right_dbias,
    drop=right_drop,
    seed=None,
):
    """Return the results of the ring.

    ``of_o``, ``of_lse``: the sinks of a row as they enter o and lse, given the sinks [H, 1, N]. ``dsinks(p, row)``:
    the gradient of one worker's sinks, given their weights [H, n, N] and delta [H, n]. ``lse_of_p``: lse in the
    backward pass, given lse and the lse without sinks. ``bias`` and ``dbias``: as :func:`right_bias` and
    :func:`right_dbias`. ``drop``: as :func:`right_drop`. ``seed``: the seed of dropout in the backward pass.
    """
    blocks = Blocks(call, bias, drop, seed)
    W, n, scale = blocks.workers, blocks.n, blocks.scale
    q, k, v, dy, sinks = blocks.q, blocks.k, blocks.v, blocks.dy, blocks.sinks
    found = {name: [] for name in ("o", "lse", "dq", "dsinks", "dbias")}
    dk, dv = ([np.zeros_like(x) for x in shards] for shards in (k, v))
    for r in range(W):
        m, l, acc = np.float32(-100), np.float32(0), np.float32(0)
        for step in blocks.steps(r):
            s = blocks.scores(r, step, "forward")
            new = np.maximum(m, s.max(axis=2, keepdims=True))
            p = np.exp(s - new)
            l = np.exp(m - new) * l + blocks.dropped(p, r, step, "l", "forward").sum(
                axis=2, keepdims=True
            )
            acc = np.exp(m - new) * acc + blocks.dropped(p, r, step, "o", "forward") @ v[r - step]
            m = new
        state = {
            "scale": scale,
            "workers": W,
            "m": m,
            "steps": len(blocks.steps(r)),
            "sinks": sinks[r],
        }
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
        for step in blocks.steps(r):
            p = np.exp(blocks.scores(r, step, "backward") - used)
            dp = blocks.dropped(dy[r] @ v[r - step].swapaxes(1, 2), r, step, "dp", "backward")
            ds = blocks.dropped(p, r, step, "p", "backward") * (dp - delta)
            if blocks.biases:
                dbias(of_bias, ds, r, step, n, scale=scale)
            ds *= scale
            dq += ds @ k[r - step]
            dk[r - step] += ds.swapaxes(1, 2) @ q[r]
            dv[r - step] += blocks.dropped(p, r, step, "dv", "backward").swapaxes(1, 2) @ dy[r]
        if blocks.biases:
            found["dbias"].append(of_bias[None][..., np.argsort(blocks.index.ravel())])
        if sinks[r] is not None:
            weights = np.exp(sinks[r] - lse)
            found["dsinks"].append(dsinks(weights, delta[..., 0], worker=r, lse=lse, **state))
        for name, x in (("o", o), ("lse", lse[..., 0]), ("dq", dq)):
            found[name].append(x[None])
    of_keys = (-1, blocks.group, n, k[0].shape[2])
    for name, shards in (("dk", dk), ("dv", dv)):
        found[name] = [x.reshape(of_keys).sum(axis=1)[None] for x in shards]
    return Result(**{name: shards or None for name, shards in found.items()})


FEATURES = ("sinks", "bias", "dropout")
Target = partial(Planted, ring, "contiguous", FEATURES)


def with_layout(layout, **faults):
    """The ring as a target of another layout, with faults."""
    return Planted(ring, layout, FEATURES, **faults)
