"""The vector engine's copies and element-wise arithmetic against NumPy, and their limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim.errors import (
    DtypeError,
    PlacementError,
    ShapeError,
    SimulatorWarning,
    TargetError,
    UninitializedError,
    UnsupportedError,
)
from nki_impl.sim.machine.core import Core, acting_as

from ..tiles import bf16, empty, normal, tile, values

F32 = np.float32
BINARY: list[tuple[Any, Any]] = [
    (nl.add, np.add), (nl.subtract, np.subtract), (nl.multiply, np.multiply), (nl.divide, np.divide),
    (nl.maximum, np.maximum), (nl.minimum, np.minimum), (nl.equal, np.equal), (nl.not_equal, np.not_equal),
    (nl.less, np.less), (nl.less_equal, np.less_equal), (nl.greater, np.greater),
    (nl.greater_equal, np.greater_equal),
    (nl.logical_and, np.logical_and), (nl.logical_or, np.logical_or), (nl.logical_xor, np.logical_xor),
]  # fmt: skip


def grid(seed: int) -> Any:
    """Small integers as floats, so that ties and zeros occur."""
    return np.random.default_rng(seed).integers(-2, 3, (16, 24)).astype(F32)


@pytest.mark.parametrize(("op", "numpy"), BINARY)
@pytest.mark.parametrize("dtype", [nl.float32, nl.bfloat16, nl.int32])
def test_tensor_tensor_computes_in_float32_and_rounds_once(
    core: Core, op: Any, numpy: Any, dtype: Any
) -> None:
    x, y = grid(0) + F32(0.25), grid(1) + F32(0.25)
    out = empty((16, 24), dtype)
    nisa.tensor_tensor(out, tile(x), tile(y, None, nl.psum), op)
    exact = numpy(x, y).astype(F32)
    expected = {nl.float32: exact, nl.bfloat16: bf16(exact), nl.int32: np.rint(exact)}[dtype]
    assert np.array_equal(values(out), expected)


def test_bfloat16_inputs_are_widened_before_the_sum_is_rounded(core: Core) -> None:
    x, y = bf16(normal(128, 64)), bf16(normal(128, 64, seed=1))
    out = empty((128, 64), nl.bfloat16)
    nisa.tensor_tensor(out, tile(x, nl.bfloat16), tile(y, nl.bfloat16), nl.add)
    assert np.array_equal(values(out), bf16(x + y))


def test_in_place_and_shapes_of_equal_free_size(core: Core) -> None:
    x, y = normal(8, 12), normal(8, 3, 4, seed=1)
    t = tile(x)
    nisa.tensor_tensor(t, t, tile(y), nl.add)
    assert np.array_equal(values(t), x + y.reshape(8, 12))


def test_stride_0_is_how_to_broadcast(core: Core) -> None:
    x, column = normal(8, 6), normal(8, 1, seed=1)
    out = empty((8, 6))
    nisa.tensor_tensor(out, tile(x), tile(column).ap([[1, 8], [0, 6]]), nl.multiply)
    assert np.array_equal(values(out), x * column)


def test_int32_is_exact_outside_the_vector_engine_and_float32_on_it(core: Core) -> None:
    big = np.array([[2**24 + 1, 2**31 - 1, -(2**31)]])
    t, one, out = tile(big, nl.int32), tile(np.ones((1, 3)), nl.int32), empty((1, 3), nl.int32)
    nisa.tensor_tensor(out, t, one, nl.add)
    assert values(out).tolist() == [[2**24 + 2, -(2**31), -(2**31) + 1]]
    nisa.tensor_tensor(out, t, one, nl.add, engine=nisa.engine.vector)
    assert values(out).tolist() == [[2**24, 2**31 - 1, -(2**31)]]
    nisa.tensor_tensor(out, tile(big, nl.int32, nl.psum), one, nl.add)
    assert values(out)[0, 0] == 2**24
    assert {engine for engine, _ in core.tallies} == {"gpsimd", "vector"}


@pytest.mark.parametrize("dtype", [nl.uint8, nl.int16, nl.int32, nl.uint32])
def test_bit_operators_work_on_the_bits(core: Core, dtype: Any) -> None:
    x = np.random.default_rng(0).integers(0, 100, (4, 8)).astype(dtype.storage)
    y = np.random.default_rng(1).integers(0, 7, (4, 8)).astype(dtype.storage)
    for op in (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift):
        out = empty((4, 8), dtype)
        nisa.tensor_tensor(out, tile(x, dtype), tile(y, dtype), getattr(nl, op.__name__))
        assert np.array_equal(out.array, op(x, y)), op
    nisa.tensor_scalar(out, tile(x, dtype), nl.bitwise_and, 15, op1=nl.left_shift, operand1=1)
    assert np.array_equal(out.array, (x & 15) << 1)
    nisa.tensor_scalar(out, tile(x, dtype), nl.invert, None)
    assert np.array_equal(out.array, ~x)


def test_each_rule_of_tensor_tensor_raises(core: Core) -> None:
    a, out = tile(normal(8, 6)), empty((8, 6))
    in_psum = tile(normal(8, 6), None, nl.psum)
    with pytest.raises(ShapeError, match="nothing is broadcast"):
        nisa.tensor_tensor(out, a, tile(normal(8, 1)), nl.add)
    with pytest.raises(ShapeError):
        nisa.tensor_tensor(out, a, tile(normal(1, 6)), nl.add)
    with pytest.raises(ShapeError):
        nisa.tensor_tensor(empty((8, 5)), a, a, nl.add)
    with pytest.raises(PlacementError, match="at most one"):
        nisa.tensor_tensor(out, in_psum, in_psum, nl.add)
    with pytest.raises(PlacementError, match="GpSimd"):
        nisa.tensor_tensor(out, a, in_psum, nl.power)
    with pytest.raises(PlacementError, match="engine"):
        nisa.tensor_tensor(out, a, a, nl.add, engine=nisa.engine.scalar)
    with pytest.raises(DtypeError, match="integer tile"):
        nisa.tensor_tensor(out, a, a, nl.bitwise_and)
    with pytest.raises(DtypeError, match="operator of nki.language"):
        nisa.tensor_tensor(out, a, a, np.add)
    with pytest.raises(DtypeError, match=r"nl\.exp"):
        nisa.tensor_tensor(out, a, a, nl.exp)
    with pytest.raises(TargetError, match="abs_max"):
        nisa.tensor_tensor(out, a, a, nl.abs_max)
    with pytest.raises(UninitializedError, match="data2"):
        nisa.tensor_tensor(out, a, empty((8, 6)), nl.add)
    with pytest.raises(PlacementError):
        nisa.tensor_tensor(out, a, tile(normal(8, 6), None, nl.hbm), nl.add)


def test_free_sizes_end_at_64k_elements_and_4k_in_psum(core: Core) -> None:
    wide = nl.zeros((1, 65537), nl.int8)
    with pytest.raises(ShapeError, match="65536"):
        nisa.tensor_scalar(wide, wide, nl.add, 1.0)
    in_psum = nl.zeros((1, 4097), nl.int8, nl.psum)
    with pytest.raises(ShapeError, match="4096"):
        nisa.reciprocal(nl.zeros((1, 4097), nl.int8), in_psum)


@pytest.mark.parametrize("reverse0", [False, True])
@pytest.mark.parametrize("reverse1", [False, True])
def test_tensor_scalar_applies_one_or_two_operators(
    core: Core, reverse0: bool, reverse1: bool
) -> None:
    x, column = normal(16, 24), normal(16, 1, seed=1)
    out = empty((16, 24))
    first = F32(0.3) - x if reverse0 else x - F32(0.3)
    nisa.tensor_scalar(out, tile(x), nl.subtract, 0.3, reverse0=reverse0)
    assert np.array_equal(values(out), first)
    second = column / first if reverse1 else first / column
    nisa.tensor_scalar(out, tile(x), nl.subtract, 0.3, reverse0, nl.divide, tile(column), reverse1)
    assert np.array_equal(values(out), second)


def test_the_intermediate_of_tensor_scalar_is_not_rounded(core: Core) -> None:
    x = bf16(normal(128, 8))
    out = empty((128, 8), nl.bfloat16)
    nisa.tensor_scalar(out, tile(x, nl.bfloat16), nl.multiply, 1.01, op1=nl.add, operand1=0.001)
    assert np.array_equal(values(out), bf16(x * F32(1.01) + F32(0.001)))


def test_tensor_scalar_casts_to_unsigned_with_saturation(core: Core) -> None:
    out = empty((1, 4), nl.uint32)
    nisa.tensor_scalar(out, tile(np.array([[0, 1, 2, 3]]), nl.uint32), nl.add, -1.5)
    assert values(out).tolist() == [[0, 0, 0, 2]]


def test_unary_operators_take_no_operand(core: Core) -> None:
    x = normal(8, 4)
    out = empty((8, 4))
    nisa.tensor_scalar(out, tile(x), nl.abs, None, op1=nl.multiply, operand1=2.0)
    assert np.array_equal(values(out), np.abs(x) * 2)
    nisa.tensor_scalar(out, tile(np.abs(x)), nl.rsqrt, 0, engine=nisa.engine.gpsimd)
    assert np.array_equal(values(out), F32(1) / np.sqrt(np.abs(x)))
    with pytest.raises(DtypeError):
        nisa.tensor_scalar(out, tile(x), nl.abs, 1.0)


def test_each_rule_of_tensor_scalar_raises(core: Core) -> None:
    a, out = tile(normal(8, 6)), empty((8, 6))
    with pytest.raises(ShapeError, match=r"\(8, 1\)"):
        nisa.tensor_scalar(out, a, nl.add, tile(normal(8, 2)))
    with pytest.raises(ShapeError):
        nisa.tensor_scalar(out, a, nl.add, tile(normal(7, 1)))
    with pytest.raises(DtypeError, match="float32 tile"):
        nisa.tensor_scalar(out, a, nl.add, tile(normal(8, 1), nl.bfloat16))
    with pytest.raises(DtypeError, match="bit operators with bit operators"):
        nisa.tensor_scalar(out, a, nl.add, 1.0, op1=nl.bitwise_and, operand1=1)
    with pytest.raises(DtypeError, match="integer tile"):
        nisa.tensor_scalar(out, a, nl.bitwise_and, 1)
    with pytest.raises(DtypeError, match="int for a bit operator"):
        nisa.tensor_scalar(
            empty((8, 6), nl.int32), tile(np.ones((8, 6)), nl.int32), nl.bitwise_and, 1.0
        )
    with pytest.raises(DtypeError, match="operand1"):
        nisa.tensor_scalar(out, a, nl.add, 1.0, operand1=1.0)
    with pytest.raises(DtypeError):
        nisa.tensor_scalar(out, a, nl.add, None)  # type: ignore[arg-type]
    with pytest.raises(TargetError, match="scalar engine"):
        nisa.tensor_scalar(out, a, nl.subtract, 1.0, engine=nisa.engine.scalar)
    with pytest.raises(TargetError, match="GpSimd"):
        nisa.tensor_scalar(out, a, nl.add, 1.0, engine=nisa.engine.gpsimd)
    with pytest.raises(UninitializedError, match="operand0"):
        nisa.tensor_scalar(out, a, nl.add, empty((8, 1)))


@pytest.mark.parametrize("reverse0", [False, True])
@pytest.mark.parametrize("reverse1", [False, True])
def test_scalar_tensor_tensor(core: Core, reverse0: bool, reverse1: bool) -> None:
    x, y, column = normal(16, 24), normal(16, 24, seed=1), bf16(normal(16, 1, seed=2))
    first = column - x if reverse0 else x - column
    for operand in (tile(y), None):
        operand = tile(y) if operand is None else operand
        dst = operand
        nisa.scalar_tensor_tensor(
            dst,
            tile(x, None, nl.psum),
            nl.subtract,
            tile(column, nl.bfloat16),
            nl.divide,
            operand,
            reverse0,
            reverse1,
        )
        assert np.array_equal(values(dst), y / first if reverse1 else first / y)


def test_scalar_tensor_tensor_with_a_number_rounds_once(core: Core) -> None:
    x, y = bf16(normal(8, 6)), bf16(normal(8, 6, seed=1))
    out = tile(y, nl.bfloat16)
    nisa.scalar_tensor_tensor(out, tile(x, nl.bfloat16), nl.multiply, 0.37, nl.add, out)
    assert np.array_equal(values(out), bf16(x * F32(0.37) + y))


def test_each_rule_of_scalar_tensor_tensor_raises(core: Core) -> None:
    a, out = tile(normal(8, 6)), empty((8, 6))
    in_psum = tile(normal(8, 6), None, nl.psum)
    with pytest.raises(PlacementError):
        nisa.scalar_tensor_tensor(out, in_psum, nl.add, 1.0, nl.add, in_psum)
    with pytest.raises(ShapeError):
        nisa.scalar_tensor_tensor(out, a, nl.add, 1.0, nl.add, tile(normal(8, 1)))
    with pytest.raises(DtypeError):
        nisa.scalar_tensor_tensor(out, a, nl.bitwise_and, 1, nl.add, a)
    with pytest.raises(ShapeError):
        nisa.scalar_tensor_tensor(out, a, nl.add, tile(normal(8, 6)), nl.add, a)


@pytest.mark.parametrize("source", [nl.float32, nl.bfloat16, nl.float16, nl.int32, nl.uint8])
@pytest.mark.parametrize("target", [nl.float32, nl.bfloat16, nl.float16, nl.int32, nl.uint8])
def test_tensor_copy_casts_through_float32(core: Core, source: Any, target: Any) -> None:
    t, out = tile(normal(16, 24) * 40, source), empty((16, 24), target)
    nisa.tensor_copy(out, t)
    wide = t.array.astype(F32)
    if target is source:
        assert np.array_equal(out.array, t.array)
    elif target.is_float:
        assert np.array_equal(values(out), wide.astype(target.storage).astype(F32))
    else:
        assert np.array_equal(values(out), np.clip(np.rint(wide), target.low, target.high))


def test_tensor_copy_accepts_the_former_dtype_of_dst_with_a_warning_that_names_the_release(
    core: Core,
) -> None:
    x, out = tile(normal(8, 16), None, nl.psum), empty((8, 16), nl.bfloat16)
    with pytest.warns(SimulatorWarning, match=r"tensor_copy: dtype was removed in Neuron 2\.27"):
        nisa.tensor_copy(dst=out, src=x, dtype=nl.bfloat16)  # type: ignore[call-arg]
    assert np.array_equal(values(out), bf16(normal(8, 16)))


def test_a_former_dtype_that_dst_does_not_have_is_an_error(core: Core) -> None:
    x, out = tile(normal(8, 16)), empty((8, 16), nl.bfloat16)
    with pytest.raises(DtypeError, match=r"dtype: bfloat16 as dst has: .* 2\.27 .* got float32"):
        nisa.tensor_copy(out, x, dtype=nl.float32)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["dtype", "mask"])
def test_the_call_of_beta_1_without_dst_is_an_error_that_names_the_release(
    core: Core, name: str
) -> None:
    x = tile(normal(8, 16))
    with pytest.raises(
        UnsupportedError, match=rf"tensor_copy: {name}: no {name}: removed in Neuron 2\.27"
    ):
        nisa.tensor_copy(x, **{name: nl.float32})  # type: ignore[arg-type, call-arg]


def test_other_instructions_refuse_the_former_dtype(core: Core) -> None:
    x, out = tile(normal(8, 16)), empty((8, 16))
    with pytest.raises(UnsupportedError, match=r"tensor_tensor: dtype: no dtype: .* 2\.27"):
        nisa.tensor_tensor(out, x, x, nl.add, dtype=nl.float32)  # type: ignore[call-arg]


def test_tensor_copy_of_equal_dtypes_is_bit_exact(core: Core) -> None:
    words = np.array([[0x7FC00001, 0x80000000, 0x00000001, 2**31 - 1]], np.int64)
    t = tile(words, nl.int32)
    out = empty((1, 4), nl.float32)
    nisa.tensor_copy(out, t.view(nl.float32))
    assert np.array_equal(out.view(nl.int32).array, t.array)
    large = tile(np.array([[2**24 + 1]]), nl.int32)
    nisa.tensor_copy(same := empty((1, 1), nl.int32), large)
    assert values(same).item() == 2**24 + 1


def test_each_rule_of_tensor_copy_raises(core: Core) -> None:
    with pytest.raises(ShapeError):
        nisa.tensor_copy(empty((8, 6)), tile(normal(6, 8)))
    with pytest.raises(PlacementError, match="GpSimd"):
        nisa.tensor_copy(
            empty((8, 6)), tile(normal(8, 6), None, nl.psum), engine=nisa.engine.gpsimd
        )
    with pytest.raises(PlacementError):
        nisa.tensor_copy(nl.ndarray((8, 6), nl.float32, nl.hbm), tile(normal(8, 6)))
    with acting_as(Core(target="trn1")), pytest.raises(TargetError):
        nisa.tensor_copy(empty((8, 6)), tile(normal(8, 6)), engine=nisa.engine.scalar)


def test_memset_writes_what_the_dtype_can_hold(core: Core) -> None:
    for dtype, value, expected in [
        (nl.bfloat16, 1.01, bf16(np.array([1.01], F32))[0]), (nl.float32, -3.4028235e38, F32(-3.4028235e38)),
        (nl.bfloat16, -3.4028235e38, -np.inf), (nl.int32, -7, -7), (nl.uint32, 2**32 - 1, 2**32 - 1),
        (nl.float32, 0, 0), (nl.bfloat16, -256, -256), (nl.uint32, 0.0, 0),
    ]:  # fmt: skip
        t = empty((4, 3), dtype)
        nisa.memset(t, value)
        assert (values(t) == expected).all()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (nl.float32, 2**24 + 1),
        (nl.bfloat16, 257),
        (nl.float32, True),
        (nl.int32, 0.5),
        (nl.int32, 2.0),
        (nl.int32, float("nan")),
        (nl.uint8, 256.0),
        (nl.uint8, -1),
        (nl.uint8, 256),
        (nl.int32, True),
        (nl.float32, None),
    ],
)
def test_memset_refuses_a_value_of_the_other_class(core: Core, dtype: Any, value: Any) -> None:
    with pytest.raises(DtypeError, match="value"):
        nisa.memset(empty((4, 3), dtype), value)


def test_reciprocal_divides_in_float32(core: Core) -> None:
    x = normal(8, 6)
    out = empty((8, 6), nl.bfloat16)
    nisa.reciprocal(out, tile(x, None, nl.psum))
    assert np.array_equal(values(out), bf16(F32(1) / x))
    nisa.reciprocal(zero := empty((1, 1)), tile(np.zeros((1, 1))))
    assert values(zero).item() == np.inf


# Picking elements and partitions --------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
def test_a_predicated_copy_leaves_the_other_elements(core: Core, reverse: bool) -> None:
    x, y = normal(8, 6), normal(8, 6, seed=1)
    chosen = normal(8, 6, seed=2) > 0
    dst = tile(x)
    nisa.tensor_copy_predicated(dst, tile(y), tile(chosen, nl.uint8), reverse_pred=reverse)
    assert np.array_equal(values(dst), np.where(chosen != reverse, y, x))
    nisa.tensor_copy_predicated(dst, 2.5, tile(np.ones((8, 6)), nl.uint32))
    assert (values(dst) == 2.5).all()


def test_a_predicated_copy_writes_and_reads_only_where_it_should(core: Core) -> None:
    chosen = np.zeros((8, 6), bool)
    chosen[:, :3] = True
    half = empty((8, 6))
    nisa.memset(half[:, 0:3], 1.0)
    dst = empty((8, 6))
    nisa.tensor_copy_predicated(dst, half, tile(chosen, nl.uint8))
    assert (values(dst[:, 0:3]) == 1).all()
    with pytest.raises(UninitializedError):
        values(dst)
    with pytest.raises(UninitializedError, match="src"):
        nisa.tensor_copy_predicated(dst, half, tile(~chosen, nl.uint8))


def test_each_rule_of_a_predicated_copy_raises(core: Core) -> None:
    dst, ones = tile(normal(8, 6)), tile(np.ones((8, 6)), nl.uint8)
    with pytest.raises(DtypeError, match="predicate"):
        nisa.tensor_copy_predicated(dst, dst, tile(np.ones((8, 6))))
    with pytest.raises(DtypeError, match="src"):
        nisa.tensor_copy_predicated(dst, tile(normal(8, 6), nl.bfloat16), ones)
    with pytest.raises(ShapeError):
        nisa.tensor_copy_predicated(dst, tile(normal(8, 1)), ones)
    with pytest.raises(PlacementError):
        nisa.tensor_copy_predicated(
            dst, tile(normal(8, 6), None, nl.psum), tile(np.ones((8, 6)), nl.uint8, nl.psum)
        )


def test_a_stream_shuffle_permutes_inside_each_quadrant(core: Core) -> None:
    x = normal(128, 5)
    mask = np.random.default_rng(3).integers(0, 32, 32).tolist()
    out = empty((128, 5))
    nisa.nc_stream_shuffle(out, tile(x), mask)
    expected = np.concatenate([x[q : q + 32][mask] for q in range(0, 128, 32)])
    assert np.array_equal(values(out), expected)


def test_mask_255_leaves_a_partition_and_one_row_is_replicated_in_place(core: Core) -> None:
    t = empty((128, 2))
    nisa.memset(t[0:1, :], 7.0)
    for quadrant in range(4):
        nisa.nc_stream_shuffle(t[32 * quadrant : 32 * quadrant + 32, :], t[0:1, :], [0] * 32)
    assert (values(t) == 7).all()
    keep = tile(np.arange(32.0)[:, None])
    nisa.nc_stream_shuffle(keep, keep, [255] * 31 + [0])
    assert values(keep).ravel().tolist() == [*range(31), 0]


def test_each_rule_of_a_shuffle_raises(core: Core) -> None:
    t = tile(normal(64, 4))
    with pytest.raises(DtypeError, match="shuffle_mask"):
        nisa.nc_stream_shuffle(t, t, [0] * 31)
    with pytest.raises(DtypeError, match="shuffle_mask"):
        nisa.nc_stream_shuffle(t, t, [32] * 32)
    with pytest.raises(DtypeError):
        nisa.nc_stream_shuffle(empty((64, 4), nl.bfloat16), t, [0] * 32)
    with pytest.raises(ShapeError):
        nisa.nc_stream_shuffle(empty((64, 3)), t, [0] * 32)
    with pytest.raises(ShapeError, match="partition 32"):
        nisa.nc_stream_shuffle(empty((64, 4)), t[0:1, :], [0] * 32)
    with pytest.raises(UninitializedError):
        nisa.nc_stream_shuffle(t, empty((64, 4)), [0] * 32)


def test_a_shuffle_carries_unwritten_elements_as_unwritten_ones(core: Core) -> None:
    source, out = empty((32, 4)), tile(np.full((32, 4), 7.0))
    nisa.memset(source[:, 0:2], 1.0)
    nisa.nc_stream_shuffle(out, source, [3] * 31 + [255])
    assert (values(out[:, 0:2])[:31] == 1).all()
    with pytest.raises(UninitializedError):
        values(out[:, 2:4])
    last = empty((1, 4))
    nisa.dma_copy(last, out[31:32])
    assert (values(last) == 7).all()


def test_max8_sorts_the_8_largest(core: Core) -> None:
    x = normal(16, 40)
    out = empty((16, 8))
    nisa.max8(out, tile(x))
    assert np.array_equal(values(out), -np.sort(-x, axis=1)[:, :8])
    with pytest.raises(ShapeError):
        nisa.max8(out, tile(normal(16, 7)))
    with pytest.raises(ShapeError):
        nisa.max8(empty((16, 7)), tile(x))
