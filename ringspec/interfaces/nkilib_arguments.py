"""Check the arguments of the nkilib interface, and convert them to the layouts of the specification."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringspec.errors import OptionError, RefusedError, shown
from ringspec.formats import load
from ringspec.interfaces.ranks import Ring, ring_array, same_shape, tensor
from ringspec.problem.checks import as_array, finite_or_minus_infinity, is_integer, number
from ringspec.problem.model import Array, Integers
from ringspec.problem.options import default_scale
from ringspec.rings.layouts import lse_from_tiles, make_layout
from ringspec.spec.layout import TILE_ROWS, Layout

MAX_HEAD_DIM = 128
KEY_TILE = 512

Bounds = tuple[Integers, Integers] | None


def rows_first(x: ArrayLike, what: str, is_rows_first: bool) -> NDArray:
    """Return ``x`` as [W, b, h, s, d]; it is given in this order if ``is_rows_first``, otherwise as [W, b, h, d, s]."""
    if is_rows_first:
        return tensor(x, what, "W b h s d")
    return tensor(x, what, "W b h d s").swapaxes(3, 4)


def layout_of(striped: bool, length: int, workers: int) -> Layout:
    """Return the striped or contiguous layout of a sequence on ``workers`` ranks with ``length`` tokens each."""
    return make_layout("striped" if striped else "contiguous", length * workers, workers)


def check_forward_shapes(q: NDArray, k: NDArray, v: NDArray) -> None:
    """Check the shapes [W, b, h, s, d] of q, k and v, and the limits that the public kernel sets."""
    ranks, batch, heads, length, head_dim = q.shape
    if k.shape[2] != heads:
        raise RefusedError(
            "as many key heads as query heads",
            f"h = {heads} for q, {k.shape[2]} for k",
            "repeat the heads of k and v before the call",
        )
    same_shape("k", k, q.shape, "W b h s d")
    same_shape("v", v, q.shape, "W b h s d")
    if head_dim > MAX_HEAD_DIM:
        raise RefusedError(
            f"d <= {MAX_HEAD_DIM}",
            f"d = {head_dim}",
            "check tp_q and tp_k, which set the order of s and d",
        )
    check_length(length)


def check_backward_shapes(tensors: dict[str, NDArray]) -> None:
    """Check that all five tensors have the same shape [W, B, N, D, S], and that S is a whole number of tiles."""
    expected = tensors["q_ref"].shape
    if tensors["k_ref"].shape[2] != expected[2]:
        raise RefusedError(
            "as many key heads as query heads",
            f"N = {expected[2]} for q_ref, {tensors['k_ref'].shape[2]} for k_ref",
            "repeat the heads of k and v before the call",
        )
    for name, x in tensors.items():
        same_shape(name, x, expected, "W B N D S")
    length = expected[4]
    check_length(length)
    if length % min(KEY_TILE, length) != 0:
        raise RefusedError(
            f"S below {KEY_TILE} or divisible by it", f"S = {length}", "pad the sequence"
        )


def check_length(length: int) -> None:
    if length % TILE_ROWS != 0 or length == 0:
        raise RefusedError(
            f"a local sequence length divisible by {TILE_ROWS}",
            str(length),
            "pad the sequence, or check which axis is the sequence",
        )


def check_masks(causal: bool, striped: bool, bound_min: Any, bound_max: Any) -> None:
    """Refuse combinations of masks that the public kernels refuse."""
    if striped and not causal:
        raise RefusedError("a causal mask with striped input", "none", "pass use_causal_mask=True")
    if (bound_min is None) != (bound_max is None):
        raise RefusedError(
            "bound_min and bound_max together",
            "only " + ("bound_max" if bound_min is None else "bound_min"),
            "pass both: bound_min <= local key index < bound_max",
        )
    if bound_min is not None and not (causal and striped):
        raise RefusedError(
            "bounds with a causal mask and striped input",
            f"causal {causal}, striped {striped}",
            "bounds are local key indices, which are the same on every rank only when striped",
        )


def given_scale(softmax_scale: float | None, head_dim: int) -> float:
    """Return ``softmax_scale``, or 1/sqrt(d) if it is None or 0; the public kernels treat 0 as None."""
    if softmax_scale is None or number(softmax_scale, "softmax_scale") == 0:
        return default_scale(head_dim)
    return number(softmax_scale, "softmax_scale")


def forward_scale(softmax_scale: float | None, causal: bool, head_dim: int) -> float:
    """Return the scale of the forward pass: 1.0 with a causal mask (q is pre-scaled), else :func:`given_scale`."""
    if not causal:
        return given_scale(softmax_scale, head_dim)
    if softmax_scale is not None and number(softmax_scale, "softmax_scale") != 1.0:
        raise RefusedError(
            "softmax_scale None or 1.0 under a causal mask",
            repr(softmax_scale),
            "multiply q by the scale before the call",
        )
    return 1.0


def check_lnc_size(lnc_size: Any) -> int:
    if not is_integer(lnc_size) or lnc_size not in (1, 2):
        raise RefusedError("lnc_size 1 or 2", shown(lnc_size), "pass lnc_size=1")
    return int(lnc_size)


def local_bounds(bound_min: Any, bound_max: Any, shape: tuple[int, ...]) -> Bounds:
    """Return (bound_min, bound_max) as int64 [W, b, s], the indices of keys on their rank; None without bounds."""
    if bound_min is None:
        return None
    ranks, batch, _, length, _ = shape
    low, high = (
        whole_numbers(x, what, (ranks, batch, length))
        for x, what in ((bound_min, "bound_min"), (bound_max, "bound_max"))
    )
    return low, high


def whole_numbers(x: Any, what: str, shape: tuple[int, int, int]) -> Integers:
    """Return ``x`` as int64, clipped to 0..s; it must contain whole numbers, in any integer or float dtype."""
    given = as_array(x, what)
    same_shape(what, given, shape, "W b s")
    values = given.astype(np.float64) if given.dtype.kind in "iu" else load(given, what)
    if not (values == np.rint(values)).all():
        raise OptionError(
            f"{what} of whole numbers",
            "a fraction or NaN",
            "bounds are local key indices",
            code="bounds",
        )
    return np.clip(values, 0, shape[2]).astype(np.int64)


def global_bounds(
    bounds: Bounds, group: Ring, layout: Layout
) -> tuple[Integers | None, Integers | None]:
    """Convert bounds on a key's index on its rank to bounds [b, S] on its global position, in global row order.

    Local key j of ring position r is token j*W + r with r < W. So low <= j < high is equivalent to low*W <= j*W + r <
    high*W (rule LAYOUT-2).
    """
    if bounds is None:
        return None, None
    low, high = (ring_array(x, group, layout, axis=1) * layout.workers for x in bounds)
    return low, high


def lse_rows(lse_ref: Any, shape: tuple[int, int, int, int]) -> Array:
    """Convert lse from the kernel's tiles [W, B, N, 128, S // 128] to [W, B, N, S] (rule LAYOUT-7)."""
    tiles = tensor(lse_ref, "lse_ref", "W B N 128 S//128")
    ranks, batch, heads, length = shape
    expected = (ranks, batch, heads, TILE_ROWS, length // TILE_ROWS)
    same_shape("lse_ref", tiles, expected, "W B N 128 S//128")
    values = finite_or_minus_infinity(tiles, "lse_ref")
    return np.stack([lse_from_tiles(x) for x in values])
