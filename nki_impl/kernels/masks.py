"""Masks as two numbers per query row: key j of one rank is visible to the row if low <= j < high.

Let t be the index of the row on its rank, ``a`` the ring position of that rank, and ``b`` the ring position of the rank
that owns the keys. A rank holds s rows. A causal mask requires j <= t + cp_offset:

- contiguous layout: cp_offset = (a - b) * s, so a row sees all keys, the keys up to its own index, or none;
- striped layout: cp_offset = -1 if a < b, else 0.

Bounds (:mod:`bounds`) also require low <= j < high with two numbers that the caller gives.

A mask is data, not a branch of the program, because all ranks run the same program, and only the device knows a and b.
"""

from __future__ import annotations

from dataclasses import dataclass

from nki_impl.kernels.bounds import Bounds
from nki_impl.kernels.tiles import ROWS, Tensor, tile_count
from nki_impl.lang import nisa, nl

HIDDEN = -3.4028234663852886e38
"""The score of a masked key: the most negative float32, the only fill value that range_select supports."""
FLOOR = HIDDEN / 2
"""The least row maximum. exp(HIDDEN - FLOOR) = 0, so a row without visible keys has l = 0 and o = 0."""


@dataclass
class Mask(nl.NKIObject):  # type: ignore[name-defined]
    """The parameters of a mask: whether it is ``causal``, whether the layout is ``striped``, and the bounds or None."""

    causal: bool
    striped: bool
    bounds: Bounds | None


def is_triangle(mask: Mask, step: int) -> bool:
    """Return whether, in this step, no row t on any rank attends to a key j > t.

    Tiles above the diagonal can then be left out.
    """
    return mask.causal and (mask.striped or step == 0)


def row_limits(mask: Mask, rows: int, query_position: Tensor, key_position: Tensor) -> Tensor:
    """Compute ``high`` [128, s / 128] of one step for the causal mask alone: key j is visible to row t if j < high.

    ``query_position`` and ``key_position`` are [128, 1] tiles with the ring positions of the ranks that own the queries
    and the keys. At step 0 one of the two is None: both owners are the same rank, and the offset is 0.
    """
    tiles = tile_count(rows)
    high = nl.ndarray((ROWS, tiles), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=high, pattern=[[ROWS, tiles]], offset=1, channel_multiplier=1)
    if query_position is not None and key_position is not None:
        offset = cp_offset(mask, rows, query_position, key_position)
        nisa.tensor_scalar(dst=high, data=high, op0=nl.add, operand0=offset)
    return high


def cp_offset(mask: Mask, rows: int, query_position: Tensor, key_position: Tensor) -> Tensor:
    """Compute the largest j - t for which key j is visible to row t, as [128, 1] float32; exact below 2^24 tokens."""
    offset = nl.ndarray((ROWS, 1), dtype=nl.float32, buffer=nl.sbuf)
    op = nl.less if mask.striped else nl.subtract
    factor = -1.0 if mask.striped else float(rows)
    nisa.tensor_tensor(dst=offset, data1=query_position, data2=key_position, op=op)
    nisa.tensor_scalar(dst=offset, data=offset, op0=nl.multiply, operand0=factor)
    return offset


def within_bounds(high: Tensor, bound_max: Tensor) -> Tensor:
    """Compute min(high, bound_max) [128, s / 128]: one past the last key that the mask and the bounds allow."""
    both = nl.ndarray(high.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=both, data1=high, data2=bound_max, op=nl.minimum)
    return both


def no_lower_bound(tiles: int) -> Tensor:
    """Make ``low`` [128, tiles] for rows without bounds: all 0."""
    low = nl.ndarray((ROWS, tiles), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=low, value=0.0)
    return low


def visible_range(causal_high: Tensor, bounds: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Combine the limit of the causal mask and the bounds into ``low`` and ``high`` [128, tiles].

    ``causal_high`` and both ``bounds`` are None if there is no such mask. Without any mask, low and high are None.
    """
    bound_min, bound_max = bounds
    if bound_min is None and causal_high is None:
        return None, None
    if bound_min is None:
        return no_lower_bound(causal_high.shape[1]), causal_high
    if causal_high is None:
        return bound_min, bound_max
    return bound_min, within_bounds(causal_high, bound_max)


def hide_scaled(
    scores: Tensor,
    products: Tensor,
    scale: float,
    low: Tensor,
    high: Tensor,
    first_key: int,
    top: Tensor,
) -> None:
    """Compute scale * products in float32, and write HIDDEN for masked keys; the arguments are as in :func:`hide`.

    The scale is applied before the mask, so that a negative scale cannot change the sign of HIDDEN.
    """
    if scale == 1.0:
        hide(scores, products, low, high, first_key, top)
    else:
        nisa.activation(dst=scores, op=nl.copy, data=products, scale=scale)
        hide(scores, scores, low, high, first_key, top)


def hide(
    scores: Tensor, given: Tensor, low: Tensor, high: Tensor, first_key: int, top: Tensor
) -> None:
    """Copy ``given`` to ``scores`` where key j has low <= first_key + j < high, and write HIDDEN elsewhere.

    ``top`` [128, 1], unless it is None, gets the row maxima of the result. ``given`` may be in PSUM. ``low`` and
    ``high`` are [128, 1].
    """
    nisa.range_select(
        dst=scores,
        on_true_tile=given,
        comp_op0=nl.greater_equal,
        comp_op1=nl.less,
        bound0=low,
        bound1=high,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
        reduce_res=top,
        reduce_op=nl.maximum,
        range_start=first_key,
        on_false_value=HIDDEN,
    )
