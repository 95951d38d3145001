"""GpSimd: affine patterns, masks, and reduction over partitions; SBUF only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim.errors import DtypeError, PlacementError, ShapeError, UninitializedError
from nki_impl.sim.machine.core import Core

from ..tiles import bf16, empty, normal, tile, values


def affine(partitions: int, pattern: Any, offset: int, multiplier: int) -> Any:
    """The documented loop, in Python."""
    counts = [count for _, count in pattern]
    out = np.zeros((partitions, *counts), np.int64)
    for at in np.ndindex(*out.shape):
        out[at] = (
            offset
            + at[0] * multiplier
            + sum(i * step for i, (step, _) in zip(at[1:], pattern, strict=True))
        )
    return out


PATTERNS: list[Any] = [
    [[1, 12]],
    [[-1, 12]],
    [[10, 3], [1, 4]],
    [[0, 2], [5, 3], [-7, 2]],
    [[100, 1], [10, 2], [3, 3], [1, 2]],
]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("dtype", [nl.int32, nl.float32, nl.uint8])
def test_iota_is_the_documented_loop(core: Core, pattern: Any, dtype: Any) -> None:
    out = empty((5, 12), dtype)
    nisa.iota(out, pattern, offset=7, channel_multiplier=3)
    expected = affine(5, pattern, 7, 3).reshape(5, 12)
    assert np.array_equal(values(out), np.clip(expected, 0, 255) if dtype is nl.uint8 else expected)


def test_iota_computes_in_int32_before_the_cast(core: Core) -> None:
    out = empty((1, 2))
    nisa.iota(out, [[1, 2]], offset=2**24)
    assert values(out).tolist() == [[2**24, 2**24]]
    nisa.iota(exact := empty((1, 2), nl.int32), [[1, 2]], offset=2**24)
    assert values(exact).tolist() == [[2**24, 2**24 + 1]]
    nisa.iota(exact, [[1, 2]], offset=2**31 - 1)
    assert values(exact).tolist() == [[2**31 - 1, -(2**31)]]


@pytest.mark.parametrize(
    "op", [nl.equal, nl.not_equal, nl.less, nl.less_equal, nl.greater, nl.greater_equal]
)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_affine_select_keeps_where_the_expression_compares_with_0(
    core: Core, op: Any, pattern: Any
) -> None:
    x = normal(5, 12)
    out = empty((5, 12))
    nisa.affine_select(out, pattern, 3, tile(x), -5.5, cmp_op=op, offset=-4)
    kept = getattr(np, op.__name__)(affine(5, pattern, -4, 3).reshape(5, 12), 0)
    assert np.array_equal(values(out), np.where(kept, x, np.float32(-5.5)))


def test_the_default_comparison_is_equal_and_a_causal_mask_is_greater_equal(core: Core) -> None:
    x = np.ones((8, 8), np.float32)
    out = empty((8, 8))
    nisa.affine_select(out, [[-1, 8]], 1, tile(x), 0.0)
    assert np.array_equal(values(out), np.eye(8))
    nisa.affine_select(out, [[-1, 8]], 1, tile(x), 0.0, nl.greater_equal, 2)
    assert np.array_equal(values(out), np.tri(8, 8, 2))


def test_affine_select_in_place_and_the_fill_is_rounded_to_dst(core: Core) -> None:
    t = tile(np.ones((4, 4)), nl.bfloat16)
    nisa.affine_select(t, [[-1, 4]], 1, t, -3.4028235e38, nl.greater_equal)
    assert np.array_equal(values(t), np.where(np.tri(4), 1, -np.inf))
    out = empty((4, 4), nl.bfloat16)
    nisa.affine_select(out, [[-1, 4]], 1, tile(normal(4, 4)), 1.01, nl.greater_equal)
    assert np.array_equal(values(out), bf16(np.where(np.tri(4), normal(4, 4), np.float32(1.01))))


@pytest.mark.parametrize("op", [nl.add, nl.maximum])
def test_partitions_are_reduced(core: Core, op: Any) -> None:
    x = normal(64, 3, 4)
    out = empty((1, 3, 4))
    nisa.tensor_partition_reduce(out, op, tile(x))
    expected = x.sum(axis=0) if op is nl.add else x.max(axis=0)
    assert np.allclose(values(out)[0], expected, atol=1e-5)


def test_gpsimd_does_not_reach_psum(core: Core) -> None:
    x, in_psum = tile(normal(4, 8)), tile(normal(4, 8), None, nl.psum)
    with pytest.raises(PlacementError, match="dst"):
        nisa.iota(in_psum, [[1, 8]])
    with pytest.raises(PlacementError, match="on_true_tile"):
        nisa.affine_select(empty((4, 8)), [[1, 8]], 1, in_psum, 0.0)
    with pytest.raises(PlacementError, match="dst"):
        nisa.affine_select(in_psum, [[1, 8]], 1, x, 0.0)
    with pytest.raises(PlacementError, match="data"):
        nisa.tensor_partition_reduce(empty((1, 8)), nl.add, in_psum)
    with pytest.raises(PlacementError):
        nisa.memset(in_psum, 0.0, engine=nisa.engine.gpsimd)


def test_each_rule_of_patterns_raises(core: Core) -> None:
    out = empty((4, 8))
    for pattern in ([[1, 7]], [[1, 2], [1, 2]], [], [[1, 1]] * 5, [[1, 2, 4]]):
        with pytest.raises(ShapeError, match="pattern"):
            nisa.iota(out, pattern)
    with pytest.raises(DtypeError, match="pattern"):
        nisa.iota(out, [[0.5, 8]])
    with pytest.raises(DtypeError, match="offset"):
        nisa.iota(out, [[1, 8]], offset=1.0)
    with pytest.raises(DtypeError, match="channel_multiplier"):
        nisa.iota(out, [[1, 8]], channel_multiplier=nisa.register_alloc(1))
    with pytest.raises(DtypeError, match="cmp_op"):
        nisa.affine_select(out, [[1, 8]], 1, tile(normal(4, 8)), 0.0, nl.add)
    with pytest.raises(UninitializedError):
        nisa.affine_select(out, [[1, 8]], 1, empty((4, 8)), 0.0)
    with pytest.raises(ShapeError):
        nisa.tensor_partition_reduce(empty((2, 8)), nl.add, tile(normal(4, 8)))
    with pytest.raises(DtypeError):
        nisa.tensor_partition_reduce(empty((1, 8)), nl.multiply, tile(normal(4, 8)))
