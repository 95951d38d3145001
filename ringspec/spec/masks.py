"""Which query may attend to which key: conditions on global positions, all of which must hold (MASK-1 to MASK-9).

A pair of query i and key j is visible iff both slots hold a token (LAYOUT-5) and every condition in use allows it:

``causal``    pk_j <= pq_i
``window``    -left <= pk_j - pq_i <= right, both ends inclusive; either side may be unbounded
``segments``  seg_q_i == seg_k_j, and both >= 0; a negative id is padding
``bounds``    bound_min_i <= pk_j < bound_max_i
``mask``      the entry of a dense mask is True
``bias``      the entry of the bias is not -inf; -inf hides the pair even with a soft cap, and its dbias is 0

pq_i and pk_j are global positions, not array indices (MASK-8): pq_i = i + q_offset and pk_j = j. If the caller gives
positions, they are used as they are, and q_offset is ignored. q_offset = 0 aligns the first query with the first key;
q_offset = Sk - Sq aligns the last query with the last key. Blocks from other workers are masked by the same conditions.
Packed documents (cu_seqlens) are segments, and tokens after the last document are padding (MASK-5, computed by
``segments_from_cu_seqlens`` of ``problem.checks``).

The functions :func:`causal`, :func:`window`, :func:`segments` and :func:`bounds` take int64 arrays [B, n] or [1, n]
with one number per query or key. They return booleans [B, n_q, n_k] or [1, n_q, n_k], True where the condition allows
the pair.
"""

from __future__ import annotations

import numpy as np

from ringspec.problem.model import Booleans, Columns, Integers, Rows, Terms, columns_of


def causal(position_q: Integers, position_k: Integers) -> Booleans:
    """MASK-1: return True where position_k <= position_q."""
    return position_k[:, None, :] <= position_q[:, :, None]


def window(
    position_q: Integers, position_k: Integers, sides: tuple[int | None, int | None]
) -> Booleans:
    """MASK-2: return True where -left <= position_k - position_q <= right.

    ``sides`` is (left, right), with None for an unbounded side.
    """
    left, right = sides
    distance = position_k[:, None, :] - position_q[:, :, None]
    allowed = np.ones(distance.shape, dtype=np.bool_)
    if left is not None:
        allowed &= distance >= -left
    if right is not None:
        allowed &= distance <= right
    return allowed


def segments(segment_q: Integers, segment_k: Integers) -> Booleans:
    """MASK-3, MASK-5: return True where segment_q == segment_k and both are >= 0 (negative: padding)."""
    same = segment_q[:, :, None] == segment_k[:, None, :]
    return same & (segment_q >= 0)[:, :, None] & (segment_k >= 0)[:, None, :]


def bounds(bound_min: Integers, bound_max: Integers, position_k: Integers) -> Booleans:
    """MASK-4: return True where bound_min <= position_k < bound_max, with the bounds of each query row."""
    key = position_k[:, None, :]
    return (bound_min[:, :, None] <= key) & (key < bound_max[:, :, None])


def padding(index_q: Integers, index_k: Integers) -> Booleans:
    """LAYOUT-5: return booleans [n_q, n_k], True where both slots hold a token.

    ``index_q`` [n_q] and ``index_k`` [n_k] are global tokens, -1 for a padding slot.
    """
    return (index_q >= 0)[:, None] & (index_k >= 0)[None, :]


def visible(rows: Rows, columns: Columns, terms: Terms) -> Booleans:
    """MASK-9: return booleans [B|1, H|1, n_q, n_k], True for pairs that every condition allows.

    >>> from ringspec.problem.options import check
    >>> problem = check(np.ones((1, 1, 3, 1)), np.ones((1, 1, 3, 1)), np.ones((1, 1, 3, 1)),
    ...                 {"causal": True})
    >>> visible(problem.rows, problem.columns, problem.terms)[0, 0].astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    allowed = padding(rows.index, columns.index)[None, None]
    if terms.causal:
        allowed = allowed & causal(rows.position, columns.position)[:, None]
    if terms.window is not None:
        allowed = allowed & window(rows.position, columns.position, terms.window)[:, None]
    if rows.segment is not None and columns.segment is not None:
        allowed = allowed & segments(rows.segment, columns.segment)[:, None]
    if rows.bound_min is not None and rows.bound_max is not None:
        allowed = allowed & bounds(rows.bound_min, rows.bound_max, columns.position)[:, None]
    if rows.mask is not None:  # MASK-6
        allowed = allowed & columns_of(rows.mask, columns)
    if rows.bias is not None:  # MASK-7
        allowed = allowed & ~np.isneginf(columns_of(rows.bias, columns))
    return allowed
