"""Checks of a kernel's arguments before anything runs; each raises AssertionError and says what was expected."""

from __future__ import annotations

from typing import Any

from nki_impl.kernels.tiles import DType, Tensor
from nki_impl.lang import nl, warn

MAX_HEAD_DIM = 128
EXACT_IN_FLOAT32 = 2**24
DTYPES = (nl.bfloat16, nl.float16, nl.float32)


def check_tensors(tensors: tuple[Tensor, ...], shape: Any, dtype: DType) -> None:
    """Require that all tensors have ``shape`` and ``dtype``, which must be one of the three supported dtypes."""
    assert dtype in DTYPES, f"expected bfloat16, float16 or float32, got {dtype}"
    for tensor in tensors:
        assert tuple(tensor.shape) == shape, f"expected shape {shape}, got {tensor.shape}"
        assert tensor.dtype == dtype, f"expected {dtype} as q has, got {tensor.dtype}"


def check_sizes(
    heads: tuple[int, int], lengths: tuple[int, int], width: int, workers: int, causal: bool
) -> None:
    """Require that heads form whole groups, that there are rows, and that the head dimension is at most 128.

    ``heads`` and ``lengths`` are those of the queries and of the keys. With a causal mask, both lengths are equal. All
    positions in the ring must be below 2^24, so that float32 represents them exactly.
    """
    assert heads[0] % heads[1] == 0, f"{heads[1]} key heads do not divide {heads[0]} query heads"
    assert width <= MAX_HEAD_DIM, f"expected d <= {MAX_HEAD_DIM}, got {width}: see tp_q and tp_k"
    assert min(lengths) >= 1, f"expected at least one row on each rank, got {lengths}"
    assert lengths[0] == lengths[1] or not causal, (
        f"under a causal mask expected as many keys as queries on a rank, got {lengths}"
    )
    assert max(lengths) * workers < EXACT_IN_FLOAT32, f"positions must be below {EXACT_IN_FLOAT32}"


def check_bounds(
    causal: bool,
    striped: bool,
    bound_min: Tensor,
    bound_max: Tensor,
    sizes: tuple[int, int, int, int],
) -> None:
    """Require a causal mask for striped input, both bounds or none, and a shape of theirs that the masks allow.

    ``sizes`` is (num_workers, b, h, s).
    """
    workers, b, h, s = sizes
    assert causal or not striped, "striped input needs a causal mask"
    has_min, has_max = bound_min is not None, bound_max is not None
    assert has_min == has_max, "expected bound_min and bound_max together"
    if has_min:
        shape, by_position = tuple(bound_min.shape), (workers, b, s, 1)
        assert shape in ((b, s), (b * h, s, 1), by_position), (
            f"expected bound_min {(b, s)}, {(b * h, s, 1)} or {by_position}, got {shape}"
        )
        assert tuple(bound_max.shape) == shape, f"expected bound_max {shape}, got {bound_max.shape}"
        assert len(shape) == 4 or (causal and striped), (
            f"bounds {shape} need a causal mask and striped input; others are {by_position}"
        )


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


def forward_scale(
    softmax_scale: float | None, causal: bool, causal_scale: str, width: int
) -> float:
    """Return the scale of the forward pass: :func:`given_scale`, or 1.0 with a causal mask.

    With a causal mask, q must be multiplied by the scale before the call, unless ``causal_scale`` is "apply".
    """
    known = ("refuse", "ignore", "apply")
    assert causal_scale in known, f"expected causal_scale to be one of {known}, got {causal_scale}"
    if not causal or causal_scale == "apply":
        return given_scale(softmax_scale, width)
    is_default = softmax_scale is None or softmax_scale == 0 or softmax_scale == 1.0
    if not is_default and causal_scale == "ignore":
        warn(
            f"softmax_scale={softmax_scale} is ignored under a causal mask, as by AWS's kernel: "
            "scores are q k, so multiply q by the scale before the call"
        )
        return 1.0
    assert is_default, (
        f"under a causal mask multiply q by the scale before the call; got {softmax_scale}"
    )
    return 1.0
