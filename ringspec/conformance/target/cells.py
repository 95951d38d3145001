"""Cells of the operation 'context_parallel': a rank holds some tokens times some heads of a tensor.

All numbers are global. A token of -1 is a padding slot. A cell (token, head) may be on several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.target.protocol import Call
from ringspec.formats import load
from ringspec.problem.model import take

OF_KEYS = ("k", "v", "dk", "dv")


def shards_of(call: Call, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the tokens [W, n] and the heads [W, h] of all ranks for one tensor of a call or result."""
    tokens, heads = (
        (call.index_k, call.heads_k) if name in OF_KEYS else (call.index_q, call.heads_q)
    )
    assert tokens is not None and heads is not None
    return tokens, heads


def cut(
    x: NDArray, tokens: NDArray[np.int64], heads: NDArray[np.int64], fill: float = 0
) -> list[NDArray]:
    """Return each rank's cells [B, h, n, ...] of a global tensor [B, H, S, ...]; padding slots have ``fill``.

    >>> x = np.arange(6).reshape(1, 2, 3)
    >>> [one.tolist() for one in cut(x, np.array([[0, 2], [1, -1]]), np.array([[1], [0]]), 9)]
    [[[[3, 5]]], [[[1, 9]]]]
    """
    return [take(x[:, own], at, 2, fill) for at, own in zip(tokens, heads, strict=True)]


def put_together(
    parts: Sequence[NDArray], tokens: NDArray[np.int64], heads: NDArray[np.int64]
) -> NDArray:
    """Undo :func:`cut`; of several copies, the one of the lowest rank is returned. Floats become float64."""
    first = load(parts[0])
    shape = (first.shape[0], int(heads.max()) + 1, int(tokens.max()) + 1, *first.shape[3:])
    x = np.zeros(shape)
    for part, at, own in reversed(list(zip(parts, tokens, heads, strict=True))):
        real = np.flatnonzero(at >= 0)
        x[:, own[:, None], at[real]] = load(part)[:, :, real]
    return x


def global_of(call: Call, name: str) -> NDArray:
    """Return a tensor of a call in global order, float64."""
    return put_together(call.tensors[name], *shards_of(call, name))


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
