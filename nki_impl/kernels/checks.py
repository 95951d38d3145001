"""Checks of a kernel's arguments before anything runs; each raises AssertionError and says what was expected."""

from __future__ import annotations

from typing import Any

from nki_impl.kernels.tiles import ROWS, DType, Tensor
from nki_impl.lang import nl

MAX_HEAD_DIM = 128
EXACT_IN_FLOAT32 = 2**24
DTYPES = (nl.bfloat16, nl.float16, nl.float32)


def check_tensors(tensors: tuple[Tensor, ...], shape: Any, dtype: DType) -> None:
    """Require that all tensors have ``shape`` and ``dtype``, which must be one of the three supported dtypes."""
    assert dtype in DTYPES, f"expected bfloat16, float16 or float32, got {dtype}"
    for tensor in tensors:
        assert tuple(tensor.shape) == shape, f"expected shape {shape}, got {tensor.shape}"
        assert tensor.dtype == dtype, f"expected {dtype} as q has, got {tensor.dtype}"


def check_sizes(heads: int, key_heads: int, length: int, width: int, workers: int) -> None:
    """Require that heads form whole groups, that rows fill whole tiles, and that the head dimension is at most 128.

    All positions in the ring must be below 2^24, so that float32 represents them exactly.
    """
    assert heads % key_heads == 0, f"{key_heads} key heads do not divide {heads} query heads"
    assert width <= MAX_HEAD_DIM, f"expected d <= {MAX_HEAD_DIM}, got {width}: see tp_q and tp_k"
    assert length % ROWS == 0, f"expected a length on one rank divisible by {ROWS}, got {length}"
    assert length * workers < EXACT_IN_FLOAT32, f"positions must be below {EXACT_IN_FLOAT32}"


def check_masks(
    causal: bool, striped: bool, bound_min: Tensor, bound_max: Tensor, shape: tuple[int, int]
) -> None:
    """Require a causal mask for striped input. If there are bounds, require striped input and both bounds."""
    assert causal or not striped, "striped input needs a causal mask"
    has_min, has_max = bound_min is not None, bound_max is not None
    assert has_min == has_max, "expected bound_min and bound_max together"
    if has_min:
        assert causal and striped, "bounds need a causal mask and striped input"
        assert tuple(bound_min.shape) == shape, f"expected bound_min {shape}, got {bound_min.shape}"
        assert tuple(bound_max.shape) == shape, f"expected bound_max {shape}, got {bound_max.shape}"


def check_groups(replica_groups: Any, num_workers: int) -> None:
    """Require disjoint groups of num_workers ranks each, which cover the ranks 0, 1, ... of the launch."""
    assert num_workers >= 1, f"expected num_workers >= 1, got {num_workers}"
    if replica_groups is not None:
        ranks: list[int] = []
        for group in replica_groups:
            assert len(group) == num_workers, f"expected {num_workers} ranks in each replica group"
            ranks.extend(group)
        for rank in range(len(ranks)):
            assert rank in ranks, f"expected each rank in one replica group; {rank} is in none"


def given_scale(softmax_scale: float | None, width: int) -> float:
    """Return ``softmax_scale``, or 1/sqrt(width) if it is None or 0."""
    if softmax_scale is None or softmax_scale == 0:
        return 1.0 / width**0.5
    return float(softmax_scale)


def forward_scale(softmax_scale: float | None, causal: bool, width: int) -> float:
    """Return the scale of the forward pass: :func:`given_scale`, or 1.0 with a causal mask.

    With a causal mask, q must be multiplied by the scale before the call.
    """
    if not causal:
        return given_scale(softmax_scale, width)
    assert softmax_scale is None or softmax_scale == 1.0, (
        f"under a causal mask multiply q by the scale before the call; got {softmax_scale}"
    )
    return 1.0
