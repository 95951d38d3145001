"""Faults between the tiles of keys in which a kernel computes a block, and faults of the buffers that it adds up in."""

import numpy as np
import pytest

from ringspec.conformance.diagnose.mutants import MUTANTS, MutantTarget
from ringspec.conformance.run.explain import explain_target
from ringspec.conformance.target import Capabilities
from ringspec.conformance.target.protocol import Result


def ring(call, tile, alpha=None, returned=None, uncleared=0):
    """A causal KV ring in float32, whose running softmax takes ``tile`` keys at a time; contiguous, one batch entry.

    ``alpha(m_old, m_new, scale)``: the factor of the running o. ``returned``: the order of the heads of o.
    ``uncleared``: the number of steps of whose dk and dv a block's buffer still holds the sums.
    """
    W, scale = call.workers, np.float32(call.terms["scale"])
    q, k, v, dy = (
        [np.asarray(x, np.float32)[0] for x in call.tensors[name]] for name in ("q", "k", "v", "dy")
    )
    group, n = len(q[0]) // len(k[0]), q[0].shape[1]
    k, v = ([np.repeat(x, group, axis=0) for x in shards] for shards in (k, v))
    o, lse, dq = [], [], []
    dk, dv = ([np.zeros_like(x) for x in shards] for shards in (k, v))
    for r in range(W):
        m = np.full((len(q[r]), n, 1), -np.inf, np.float32)
        l, acc = np.zeros_like(m), np.zeros((*m.shape[:2], v[r].shape[2]), np.float32)
        for step in range(r + 1):
            for start in range(0, n, tile):
                s = scores(q[r], k[r - step], scale, step)[:, :, start : start + tile]
                new = np.maximum(m, s.max(axis=2, keepdims=True))
                c = np.exp(m - new)
                p = np.exp(s - new)
                l = c * l + p.sum(axis=2, keepdims=True)
                acc = acc * (c if alpha is None else alpha(m, new, scale))
                acc += p @ v[r - step][:, start : start + tile]
                m = new
        o.append(acc / l)
        lse.append(m + np.log(l))
        delta = (o[r] * dy[r]).sum(axis=2, keepdims=True)
        dq.append(np.zeros_like(q[r]))
        held = []
        for step in range(W):
            s = scores(q[r], k[r - step], scale, step if step <= r else -1)
            p = np.exp(s - lse[r])
            ds = p * (dy[r] @ v[r - step].swapaxes(1, 2) - delta) * scale
            dq[r] += ds @ k[r - step]
            held.append((ds.swapaxes(1, 2) @ q[r], p.swapaxes(1, 2) @ dy[r]))
            for of_dk, of_dv in held[-1 - uncleared :]:
                dk[r - step] += of_dk
                dv[r - step] += of_dv
    of_keys = (len(k[0]) // group, group, n, -1)
    results = {
        "o": [x if returned is None else x[returned] for x in o],
        "lse": [x[..., 0] for x in lse],
        "dq": dq,
        "dk": [x.reshape(of_keys).sum(axis=1) for x in dk],
        "dv": [x.reshape(of_keys).sum(axis=1) for x in dv],
    }
    return Result(**{name: [x[None] for x in shards] for name, shards in results.items()})


def scores(q, k, scale, step):
    """Scores of a block; ``step`` 0 is masked in part, and -1 wholly."""
    s = scale * q @ k.swapaxes(1, 2)
    if step == 0:
        s = np.where(np.tri(*s.shape[1:], dtype=bool), s, -np.inf)
    return np.full_like(s, -np.inf) if step < 0 else s.astype(np.float32)


class Target:
    name = "ring in tiles"
    capabilities = Capabilities(
        circulations=("kv",), directions=(1,), workers=(3,), head_ratios=(2,), only_causal=True, batch=(1,)
    )  # fmt: skip

    def __init__(self, **faults):
        self.faults = faults

    def run(self, call):
        with np.errstate(invalid="ignore"):
            return ring(call, **{"tile": 3, **self.faults})


def not_rescaled(old, new, scale):
    return np.where(np.isneginf(old), 0, 1).astype(np.float32)


def unscaled(old, new, scale):
    return np.exp((old - new) / scale)


def of_first_head(old, new, scale):
    c = np.exp(old - new)
    return np.repeat(c[::2], 2, axis=0)


def test_a_ring_that_merges_tile_by_tile_is_right():
    assert explain_target(Target()).right


@pytest.mark.parametrize(
    ("faults", "sentence"),
    [
        (
            {"alpha": not_rescaled},
            "In the forward pass, between tiles of 3 keys of all blocks, the running o is not rescaled when the maximum rises "
            "(l is).",
        ),
        pytest.param(
            {"alpha": unscaled, "tile": 2},
            "In the forward pass, between tiles of 2 keys of all blocks, the running o is rescaled by the exponential of the "
            "unscaled difference of the maxima (l is correct).",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"alpha": of_first_head},
            "In the forward pass, between tiles of 3 keys of all blocks, the running o is rescaled by the factor of the first "
            "query head of each key head (l is correct).",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"returned": [0, 2, 1, 3]},
            "In the forward pass, the returned o is that of the heads in another order (h mod group, then h // group).",
            marks=pytest.mark.slow,
        ),
        (
            {"uncleared": 9},
            "In the backward pass, a block's dk and dv still contain those of the earlier steps (the buffer is not cleared).",
        ),
    ],
    ids=["not-rescaled", "unscaled", "first-head", "order-of-heads", "not-cleared"],
)
def test_a_fault_between_tiles_or_in_a_buffer_is_named(faults, sentence):
    told = explain_target(Target(**faults))
    assert told.wrong == len(told.told.explained) > 0
    assert told.sentences[0] == sentence


def test_gradients_that_are_read_as_a_stack_of_both_are_named():
    told = explain_target(MutantTarget(MUTANTS["dkv-transfer-misread"], "float32"))
    assert told.sentences == (
        "In the backward pass, dk is returned as dk + dv, and dv as the dk + dv of the next worker.",
    )
    assert told.wrong == len(told.told.explained) > 0
