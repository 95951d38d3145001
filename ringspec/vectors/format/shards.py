"""What the tables of a scheme say, without knowing the scheme: who holds which cell (token, head).

Rank r holds the tokens ``layout.q[r]`` times the heads ``heads.q[r]`` of the queries, and the same for ``k``; -1 is an empty
slot. Element ``[r, b, i, j]`` of a result belongs to the head ``heads.q[r, i]`` and the token ``layout.q[r, j]``. A cell may be
on several ranks, whose copies are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ringspec.problem.model import take
from ringspec.vectors.format.case import Shape

__all__ = ["SIDES", "fault_of_shards", "held", "whole"]

SIDES = {"o": "q", "lse": "q", "dq": "q", "dk": "k", "dv": "k"}
Integers = NDArray[np.int64]


def held(tokens: Integers, heads: Integers, length: int, count: int) -> NDArray[np.bool_]:
    """Return [W, S, H]: whether each rank holds each cell, from tables [W, n] and [W, h]; S = ``length``, H = ``count``.

    >>> held(np.array([[0, 1], [2, -1]]), np.array([[0], [0]]), 3, 1)[:, :, 0].tolist()
    [[True, True, False], [False, False, True]]
    """
    has = np.zeros((len(tokens), length, count), np.bool_)
    for rank, (own, of) in enumerate(zip(tokens, heads, strict=True)):
        mark(has[rank], own, of)
    return has


def mark(cells: NDArray[np.bool_], tokens: Integers, heads: Integers) -> None:
    """Set the cells [S, H] that a rank holds to True."""
    cells[np.ix_(tokens[tokens >= 0], heads[heads >= 0])] = True


def cut(x: NDArray, tokens: Integers, heads: Integers, fill: float = 0) -> list[NDArray]:
    """Return each rank's cells [B, h, n, ...] of a global tensor [B, H, S, ...]; empty slots have ``fill``.

    >>> x = np.arange(6).reshape(1, 2, 3)
    >>> [one.tolist() for one in cut(x, np.array([[0, 2], [1, -1]]), np.array([[1], [0]]), 9)]
    [[[[3, 5]]], [[[1, 9]]]]
    """
    return [take(take(x, own, 2, fill), of, 1, fill) for own, of in zip(tokens, heads, strict=True)]


def whole(
    parts: Sequence[NDArray], tokens: Integers, heads: Integers, length: int, count: int
) -> NDArray:
    """Undo :func:`cut`: return [B, H, S, ...] in global order; of several copies, that of the lowest rank.

    A cell that no rank holds is 0.
    """
    first = parts[0]
    result = np.zeros((first.shape[0], count, length, *first.shape[3:]), first.dtype)
    for one, own, of in reversed(list(zip(parts, tokens, heads, strict=True))):
        slots, places = np.flatnonzero(own >= 0), np.flatnonzero(of >= 0)
        cells = one[:, places][:, :, slots]
        result[(slice(None), *np.ix_(of[places], own[slots]))] = cells
    return result


def fault_of_shards(shape: Shape, tensors: Mapping[str, NDArray]) -> tuple[str, str] | None:
    """Return what was expected and what came if the tables are wrong, or do not fit the results; None if all is right."""
    sizes = {"q": (shape.Sq, shape.H), "k": (shape.Sk, shape.Hkv)}
    for side, (length, count) in sizes.items():
        tokens, heads = tensors[f"layout.{side}"], tensors[f"heads.{side}"]
        for name, table, most in (("layout", tokens, length), ("heads", heads, count)):
            if not ((table >= -1) & (table < most)).all():
                return f"{name}.{side} from -1 to {most - 1}", "another number"
            ordered = np.sort(table, axis=1)
            if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any():
                return f"each number at most once in a row of {name}.{side}", "one twice"
        cells = np.zeros((length, count), np.bool_)  # not [W, S, H]: a file may name many ranks
        for own, of in zip(tokens, heads, strict=True):
            mark(cells, own, of)
        missing = np.argwhere(~cells)
        if missing.size:
            token, head = missing[0]
            return (
                f"tables of {side} with every token and head",
                f"none with token {token}, head {head}",
            )
    for name, x in tensors.items():
        group, _, rest = name.partition(".")
        tensor = SIDES.get(rest.partition(".")[0])
        if group == "position":
            tokens = tensors[f"layout.{rest}"]
            if x.shape[2] != tokens.shape[1]:
                return f"{name} with {tokens.shape[1]} slots", f"{x.shape[2]}"
        elif group in ("out", "scale") and tensor is not None:
            wanted = tensors[f"heads.{tensor}"].shape[1], tensors[f"layout.{tensor}"].shape[1]
            if x.shape[2:4] != wanted:
                return f"{name} with {wanted} heads and slots", f"{x.shape[2:4]}"
    return None
