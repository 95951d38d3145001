"""Ring attention in one page: forward, and backward with travelling keys or with travelling queries, in float64.

``q[r]`` is the part of q that worker r holds, and the arrays of all workers are in one process. There are no options:
only a causal mask, the default scale, and as many key heads as query heads. Arrays are [..., S, D], where the leading
axes (batch, heads) are left to NumPy's broadcasting; m, l, lse and delta keep a last axis of length 1.
:func:`ringspec.ring` has the options. With only ``causal=True``, it gives the same results bit for bit for every D
whose ``D ** -0.5`` is the float64 nearest to 1/sqrt(D), which holds for all D below 1769.

To stay short, this page sends every block W times, so that each block ends at its owner. The schedules of
:mod:`~ringspec.spec.schedule` send k and v (or q, dy, lse and delta) W - 1 times: only gradients make the last hop.

    s_ij   = scale <q_i, k_j>  where key j is visible to query i, else -infinity; scale = 1/sqrt(D)
    lse_i  = log sum_j exp(s_ij)                          p_ij = exp(s_ij - lse_i)
    o_i    = sum_j p_ij v_j

    delta_i = <dy_i, o_i>                                 dy = dL/do
    ds_ij   = p_ij (<dy_i, v_j> - delta_i)
    dq_i    = scale sum_j ds_ij k_j      dk_j = scale sum_i ds_ij q_i      dv_j = sum_i p_ij dy_i

Liu, Zaharia, Abbeel, Ring Attention, https://arxiv.org/abs/2310.01889.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Tokens = NDArray[np.int64]
Shards = list[Array]  # one array for each worker
State = tuple[Array, Array, Array]  # m, l and o of some rows, over the keys seen so far


def visible(token_q: Tokens, token_k: Tokens) -> NDArray[np.bool_]:
    """Return the causal mask [n_q, n_k]: a query attends to keys at or before its own global position."""
    return token_k[None, :] <= token_q[:, None]


def scores(q: Array, k: Array, mask: NDArray[np.bool_]) -> Array:
    """Return the scores s [..., n_q, n_k], with -infinity where the mask hides the pair."""
    scale = q.shape[-1] ** -0.5
    return np.where(mask, scale * (q @ k.swapaxes(-1, -2)), -np.inf)


# One worker, no blocks.


def attention(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Return o [..., S, Dv] and lse [..., S, 1] (a natural logarithm) of causal softmax attention."""
    token = np.arange(q.shape[-2])
    s = scores(q, k, visible(token, token))
    m = s.max(axis=-1, keepdims=True)
    e = np.exp(s - m)
    l = e.sum(axis=-1, keepdims=True)
    return (e / l) @ v, m + np.log(l)


def attention_backward(q: Array, k: Array, v: Array, dy: Array) -> tuple[Array, Array, Array]:
    """Return dq, dk, dv of a loss L, from dy = dL/do."""
    token = np.arange(q.shape[-2])
    o, lse = attention(q, k, v)
    delta = (dy * o).sum(axis=-1, keepdims=True)
    return block_backward(q, k, v, dy, lse, delta, visible(token, token))


# One block of queries against one block of keys.


def block_forward(q: Array, k: Array, v: Array, mask: NDArray[np.bool_]) -> State:
    """Return m = max_j s_ij, l = sum_j exp(s_ij - m) and the unnormalised o = sum_j exp(s_ij - m) v_j."""
    s = scores(q, k, mask)
    m = s.max(axis=-1, keepdims=True)
    e = np.exp(s - finite(m))
    return m, e.sum(axis=-1, keepdims=True), e @ v


def finite(m: Array) -> Array:
    """Replace m by 0 in a row that has seen no key: exp(-inf - 0) is 0, but exp(-inf + inf) would be NaN."""
    return np.where(np.isneginf(m), 0.0, m)


def start(q: Array, v: Array) -> State:
    """Return the state of rows that have seen no key."""
    rows = q.shape[:-1]
    return np.full((*rows, 1), -np.inf), np.zeros((*rows, 1)), np.zeros((*rows, v.shape[-1]))


def merge(a: State, b: State) -> State:
    """Merge two states of the same rows over different keys into the state over all of these keys (online softmax)."""
    m = np.maximum(a[0], b[0])
    weight_a, weight_b = np.exp(a[0] - finite(m)), np.exp(b[0] - finite(m))
    return m, weight_a * a[1] + weight_b * b[1], weight_a * a[2] + weight_b * b[2]


def finish(state: State) -> tuple[Array, Array]:
    """Return o and lse of rows that have seen all keys; every row sees at least the key of its own token."""
    m, l, o = state
    return o / l, m + np.log(l)


def block_backward(
    q: Array, k: Array, v: Array, dy: Array, lse: Array, delta: Array, mask: NDArray[np.bool_]
) -> tuple[Array, Array, Array]:
    """Return what one block of queries and one of keys add to dq, dk, dv; lse and delta are those of whole rows."""
    p = np.exp(scores(q, k, mask) - lse)
    ds = p * (dy @ v.swapaxes(-1, -2) - delta)
    scale = q.shape[-1] ** -0.5
    return scale * (ds @ k), scale * (ds.swapaxes(-1, -2) @ q), p.swapaxes(-1, -2) @ dy


# W workers. First every worker computes; then each sends to the next one (direction 1) and receives from the
# previous one: x[r] = x[r - 1] on all workers at once (worker 0 receives from worker W - 1).


def shards(layout: str, length: int, workers: int) -> list[Tokens]:
    """Return the global tokens in the slots of each worker; a token's index is also its position."""
    token = np.arange(length)
    if layout == "contiguous":
        return list(token.reshape(workers, -1))
    if layout == "striped":
        return list(token.reshape(-1, workers).T)
    chunk = token.reshape(2 * workers, -1)  # zigzag: the causal mask gives all workers equal work
    return [np.concatenate([chunk[r], chunk[2 * workers - 1 - r]]) for r in range(workers)]


def ring_forward(q: Shards, k: Shards, v: Shards, token: list[Tokens]) -> tuple[Shards, Shards]:
    """Return o[r] and lse[r] of every worker. k and v travel; at step t worker r holds those of worker r - t."""
    ranks, token_k = range(len(q)), token
    state = [start(q[r], v[r]) for r in ranks]
    for _step in ranks:
        for r in ranks:
            part = block_forward(q[r], k[r], v[r], visible(token[r], token_k[r]))
            state[r] = merge(state[r], part)
        k, v = [k[r - 1] for r in ranks], [v[r - 1] for r in ranks]
        token_k = [token_k[r - 1] for r in ranks]
    done = [finish(state[r]) for r in ranks]
    return [o for o, _ in done], [lse for _, lse in done]


def ring_backward_kv(
    q: Shards, k: Shards, v: Shards, dy: Shards, o: Shards, lse: Shards, token: list[Tokens]
) -> tuple[Shards, Shards, Shards]:
    """Return dq, dk, dv of every worker. dq stays. k, v travel with dk, dv, which end at their owner after W hops."""
    ranks, token_k = range(len(q)), token
    delta = [(dy[r] * o[r]).sum(axis=-1, keepdims=True) for r in ranks]
    dq, dk, dv = ([np.zeros_like(x[r]) for r in ranks] for x in (q, k, v))
    for _step in ranks:
        for r in ranks:
            mask = visible(token[r], token_k[r])
            share = block_backward(q[r], k[r], v[r], dy[r], lse[r], delta[r], mask)
            dq[r], dk[r], dv[r] = dq[r] + share[0], dk[r] + share[1], dv[r] + share[2]
        k, v = [k[r - 1] for r in ranks], [v[r - 1] for r in ranks]
        token_k = [token_k[r - 1] for r in ranks]
        dk, dv = [dk[r - 1] for r in ranks], [dv[r - 1] for r in ranks]
    return dq, dk, dv


def ring_backward_q(
    q: Shards, k: Shards, v: Shards, dy: Shards, o: Shards, lse: Shards, token: list[Tokens]
) -> tuple[Shards, Shards, Shards]:
    """Return dq, dk, dv of every worker. dk, dv stay. q, dy, lse, delta travel with dq, which ends at its owner."""
    ranks, token_q = range(len(q)), token
    delta = [(dy[r] * o[r]).sum(axis=-1, keepdims=True) for r in ranks]
    dq, dk, dv = ([np.zeros_like(x[r]) for r in ranks] for x in (q, k, v))
    for _step in ranks:
        for r in ranks:
            mask = visible(token_q[r], token[r])
            share = block_backward(q[r], k[r], v[r], dy[r], lse[r], delta[r], mask)
            dq[r], dk[r], dv[r] = dq[r] + share[0], dk[r] + share[1], dv[r] + share[2]
        q, dy = [q[r - 1] for r in ranks], [dy[r - 1] for r in ranks]
        lse, delta = [lse[r - 1] for r in ranks], [delta[r - 1] for r in ranks]
        token_q = [token_q[r - 1] for r in ranks]
        dq = [dq[r - 1] for r in ranks]
    return dq, dk, dv


def ring(
    q: Array, k: Array, v: Array, dy: Array, workers: int, layout: str, circulation: str
) -> tuple[Array, ...]:
    """Return o, lse, dq, dk, dv in global order: cut into shards, run the ring, gather the results."""
    token = shards(layout, q.shape[-2], workers)
    q_r, k_r, v_r, dy_r = ([x.take(own, axis=-2) for own in token] for x in (q, k, v, dy))
    o, lse = ring_forward(q_r, k_r, v_r, token)
    backward = ring_backward_kv if circulation == "kv" else ring_backward_q
    dq, dk, dv = backward(q_r, k_r, v_r, dy_r, o, lse, token)
    slot = np.argsort(np.concatenate(token))  # where each token lies: the inverse permutation
    return tuple(np.concatenate(x, axis=-2).take(slot, axis=-2) for x in (o, lse, dq, dk, dv))
