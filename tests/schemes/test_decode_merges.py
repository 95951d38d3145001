"""One decode scheme, two merges: AG+RS and A2A are replayed from the partial results that a run records."""

import numpy as np
import pytest

import ringspec as rs
from ringspec.formats import round_to, store

UNIT = 2.0**-8  # largest relative error of a rounding to bfloat16


def partial_results(n_k):
    """Return o and lse of every rank of a dcp group before the merge, and the merged o, all in float64."""
    generator = np.random.default_rng(n_k)
    q, k, v = (
        generator.standard_normal((1, heads, n, 16)) for heads, n in ((8, 3), (2, n_k), (2, n_k))
    )
    run = rs.context_parallel(
        q, k, v, mesh={"dcp": 4}, scheme="dcp", causal=True, q_offset=n_k - 3, record=True
    )
    parts = []
    for rank in range(4):
        state = run.state(rank, 1, when="computed").parts["state"]
        assert state.shard.heads == tuple(range(8))
        m, l, o = (state.tensors[name] for name in ("m", "l", "o"))
        some = np.where(l > 0, l, 1)
        lse = np.where(l > 0, m + np.log(some), -np.inf)
        parts.append((np.where(l[..., None] > 0, o / some[..., None], np.nan), lse))
    return parts, run.o


def merged(parts):
    """Return the exact merge, and the sum of the magnitudes of its terms, in float64; the o of an empty part does not count."""
    o, lse = (np.array(x, dtype=np.float64) for x in zip(*parts, strict=True))
    weight = np.exp(lse - lse.max(axis=0))
    weight /= weight.sum(axis=0)
    terms = np.where(weight[..., None] > 0, weight[..., None] * o, 0.0)
    return terms.sum(axis=0), np.abs(terms).sum(axis=0)


@pytest.mark.parametrize("n_k", [3, 21], ids=["a rank without keys", "keys on every rank"])
def test_both_merges_of_a_decode_replay_from_recorded_partial_results(n_k):
    parts, whole = partial_results(n_k)
    assert np.abs(merged(parts)[0] - whole).max() <= 1e-14
    stored = [
        (store(round_to(o, "bfloat16"), "bfloat16"), lse.astype(np.float32)) for o, lse in parts
    ]
    want, size = merged(stored)
    a2a, ag_rs = (
        rs.merge_partials(stored, recipe=name).o.astype(np.float64)
        for name in ("vllm_dcp_a2a", "vllm_dcp_ag_rs")
    )
    # A2A rounds the sum once, AG+RS each of 4 terms and each of 3 sums; 2e-6 is for weights in float32.
    assert (np.abs(a2a - want) <= UNIT * np.abs(want) + 2e-6 * size).all()
    assert (np.abs(ag_rs - want) <= 4 * UNIT * size).all()
    assert (np.abs(ag_rs - want) > UNIT * np.abs(want) + 2e-6 * size).any()
