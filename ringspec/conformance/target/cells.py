"""Cells of the operation 'context_parallel': a rank holds some tokens times some heads of a tensor.

All numbers are global. A token of -1 is a padding slot. A cell (token, head) may be on several ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.target.protocol import Call
from ringspec.formats import load
from ringspec.vectors.format.shards import cut, whole

OF_KEYS = ("k", "v", "dk", "dv")
OF_HEADS = ("sinks", "dsinks")  # [h, N] of the heads of a rank
OF_PAIRS = ("bias", "keep")  # [1|B, 1|h, n, Sk]: own queries, all keys


def shards_of(call: Call, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the tokens [W, n] and the heads [W, h] of all ranks for one tensor of a call or result."""
    tokens, heads = (
        (call.index_k, call.heads_k) if name in OF_KEYS else (call.index_q, call.heads_q)
    )
    assert tokens is not None and heads is not None
    return tokens, heads


def cut_of(call: Call, name: str, x: NDArray) -> list[NDArray]:
    """Return what each rank holds of a global tensor of a call."""
    tokens, heads = shards_of(call, name)
    if name in OF_HEADS:
        return [x[of] for of in heads]
    if name in OF_PAIRS and x.shape[1] == 1:
        heads = np.zeros((len(tokens), 1), np.int64)
    return cut(x, tokens, heads)


def global_of(call: Call, name: str) -> NDArray:
    """Return a tensor of a call in global order, float64 or bool; of several copies, that of the lowest rank."""
    tokens, heads = shards_of(call, name)
    parts = [x if x.dtype == np.bool_ else load(x) for x in call.tensors[name]]
    if name in OF_HEADS:
        found = np.zeros((int(heads.max()) + 1, parts[0].shape[1]))
        for part, of in zip(parts, heads, strict=True):
            found[of] = part
        return found
    if name in OF_PAIRS and parts[0].shape[1] == 1:
        heads = np.zeros((len(tokens), 1), np.int64)
    return whole(parts, tokens, heads, int(tokens.max()) + 1, int(heads.max()) + 1)


def positions_of(call: Call) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the global positions of all queries [Sq] and of all keys [Sk]."""
    found = []
    for index, position in ((call.index_q, call.position_q), (call.index_k, call.position_k)):
        assert index is not None and position is not None
        whole = np.zeros(int(index.max()) + 1, dtype=np.int64)
        for at, own in zip(index, position[:, 0], strict=True):
            whole[at[at >= 0]] = own[at >= 0]
        found.append(whole)
    return found[0], found[1]
