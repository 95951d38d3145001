"""Bounds for the ring kernels, computed from token positions with NumPy before a call.

The kernels take a range of local key indices for each query row. A mask is easier to say in tokens: a row sees the
tokens first <= token < last. :func:`position_ranges` makes such ranges for causal masks and windows, and
:func:`document_ranges` for packed documents; :func:`both` combines two. :func:`bounds_by_position` converts them to
bounds [W, b, s, 1] for any layout in which the tokens of a rank ascend.

Two documents of three tokens on three ranks in the zig-zag layout, with a causal mask; the bounds of row 1 of rank 0:

>>> zigzag = np.array([[0, 5], [1, 4], [2, 3]])
>>> causal = position_ranges(zigzag[0], causal=True)
>>> first, last = both(causal, document_ranges(zigzag[0], (0, 3, 6)))
>>> first.tolist(), last.tolist()
([0, 3], [1, 6])
>>> low, high = bounds_by_position(first[None], last[None], zigzag)
>>> low.shape, [(int(a), int(b)) for a, b in zip(low[:, 0, 1, 0], high[:, 0, 1, 0])]
((3, 1, 2, 1), [(1, 2), (1, 2), (1, 2)])
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["both", "bounds_by_position", "document_ranges", "position_ranges"]

Array = NDArray[Any]
Ranges = tuple[Array, Array]


def position_ranges(
    positions: ArrayLike,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
) -> Ranges:
    """Return ``first`` and ``last``, of the shape of ``positions``: a query sees the tokens first <= token < last.

    ``positions``    the position of each query, as integers
    ``causal``       a query sees no token after its own position
    ``window``       a query sees at most ``left`` tokens before and ``right`` tokens after its position; None: no limit
    """
    token = np.asarray(positions, np.int64)
    left, right = window
    first = np.zeros_like(token) if left is None else np.maximum(token - left, 0)
    last = np.full_like(token, np.iinfo(np.int64).max) if right is None else token + right + 1
    return first, np.minimum(last, token + 1) if causal else last


def document_ranges(
    tokens: ArrayLike, cu_seqlens: ArrayLike, cu_seqlens_k: ArrayLike | None = None
) -> Ranges:
    """Return ``first`` and ``last``, of the shape of ``tokens``: the tokens of the document of each query.

    ``tokens``          the token of each query, as integers
    ``cu_seqlens``      ascending; document i has the queries cu_seqlens[i] <= token < cu_seqlens[i + 1]. A query in no
                        document gets an empty range
    ``cu_seqlens_k``    the same for the keys; None: cu_seqlens
    """
    token, edges = np.asarray(tokens, np.int64), np.asarray(cu_seqlens, np.int64)
    of_keys = edges if cu_seqlens_k is None else np.asarray(cu_seqlens_k, np.int64)
    document = np.searchsorted(edges, token, side="right") - 1
    inside = (document >= 0) & (document < len(edges) - 1)
    document = np.where(inside, document, 0)
    first = of_keys[document]
    return first, np.where(inside, of_keys[document + 1], first)


def both(one: Ranges, other: Ranges) -> Ranges:
    """Return the ranges of the tokens that are in both ranges of a query."""
    return np.maximum(one[0], other[0]), np.minimum(one[1], other[1])


def bounds_by_position(first: ArrayLike, last: ArrayLike, tokens: ArrayLike) -> Ranges:
    """Return ``bound_min`` and ``bound_max`` [W, b, s, 1] in float32, for the rows of one rank.

    ``first``, ``last``   [b, s]: row t sees the tokens first <= token < last
    ``tokens``            [W, s_k]: the token of each local key, by ring position; they must ascend on each rank

    Raises ValueError if the tokens of a rank do not ascend, because a row may then see keys that are not a range.
    """
    held = np.asarray(tokens)
    if held.ndim != 2 or (np.diff(held, axis=1) <= 0).any():
        raise ValueError(
            f"expected tokens [W, s] that ascend on each rank, got shape {held.shape}. "
            "Fix: sort the rows of each rank by their token"
        )
    low, high = (
        np.stack([np.searchsorted(of_rank, np.asarray(x)) for of_rank in held])[..., None]
        for x in (first, last)
    )
    return low.astype(np.float32), np.maximum(low, high).astype(np.float32)
