"""Reductions along the free dimensions and the reduce registers of the vector engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim.errors import (
    DtypeError,
    PlacementError,
    RangeSelectError,
    ShapeError,
    TargetError,
    UninitializedError,
)
from nki_impl.sim.machine.core import Core, acting_as

from ..tiles import bf16, empty, normal, tile, values

F32 = np.float32
LOW = F32(np.finfo(F32).min)
Cmd = nisa.reduce_cmd


@pytest.mark.parametrize(("op", "numpy"), [(nl.maximum, np.max), (nl.minimum, np.min)])
@pytest.mark.parametrize(("axis", "numpy_axis"), [(2, 2), ([2], 2), ((1, 2), (1, 2)), (-1, 2)])
def test_tensor_reduce_is_numpys_reduction(
    core: Core, op: Any, numpy: Any, axis: Any, numpy_axis: Any
) -> None:
    x = normal(16, 3, 8)
    expected = numpy(x, axis=numpy_axis)
    for negate in (False, True):
        out = empty((16, expected.size // 16))
        nisa.tensor_reduce(out, op, tile(x), axis, negate=negate)
        assert np.array_equal(values(out), (-expected if negate else expected).reshape(out.shape))


def test_a_sum_is_of_float32_numbers_and_rounded_once(core: Core) -> None:
    x = bf16(normal(16, 512))
    out, wide = empty((16, 1), nl.bfloat16), empty((16, 1))
    nisa.tensor_reduce(out, nl.add, tile(x, nl.bfloat16), 1)
    nisa.tensor_reduce(wide, nl.add, tile(x, nl.bfloat16), 1, keepdims=True)
    truth = x.astype(np.float64).sum(axis=1, keepdims=True)
    assert (
        np.abs(values(wide) - truth) <= 512 * 2.0**-24 * np.abs(x).sum(axis=1, keepdims=True)
    ).all()
    assert np.array_equal(values(out), bf16(values(wide)))


def test_other_reductions(core: Core) -> None:
    x = np.random.default_rng(0).integers(0, 4, (8, 6))
    for op, expected in [
        (nl.multiply, x.prod(axis=1)), (nl.bitwise_or, np.bitwise_or.reduce(x, axis=1)),
        (nl.bitwise_xor, np.bitwise_xor.reduce(x, axis=1)), (nl.logical_and, x.all(axis=1)),
        (nl.logical_or, x.any(axis=1)), (nl.subtract, x[:, 0] - x[:, 1:].sum(axis=1)),
    ]:  # fmt: skip
        out = empty((8, 1), nl.int32)
        nisa.tensor_reduce(out, op, tile(x, nl.int32), 1)
        assert np.array_equal(values(out)[:, 0], expected), op


@pytest.mark.parametrize("axis", [0, (0, 1), (1,), 3, (0, 1, 2), []])
def test_reduced_dimensions_are_a_trailing_run_without_the_partitions(
    core: Core, axis: Any
) -> None:
    with pytest.raises(ShapeError, match="axis"):
        nisa.tensor_reduce(empty((4, 1)), nl.add, tile(normal(4, 3, 2)), axis)


def test_each_rule_of_tensor_reduce_raises(core: Core) -> None:
    with pytest.raises(ShapeError, match="dst"):
        nisa.tensor_reduce(empty((4, 2)), nl.add, tile(normal(4, 3)), 1)
    with pytest.raises(DtypeError):
        nisa.tensor_reduce(empty((4, 1)), nl.divide, tile(normal(4, 3)), 1)
    with pytest.raises(DtypeError):
        nisa.tensor_reduce(empty((4, 1)), nl.bitwise_or, tile(normal(4, 3)), 1)
    with pytest.raises(DtypeError, match="negate"):
        nisa.tensor_reduce(
            empty((4, 1), nl.int32), nl.bitwise_or, tile(np.ones((4, 3)), nl.int32), 1, negate=True
        )


def test_tensor_scalar_reduce_reduces_float32_values_not_the_rounded_ones(core: Core) -> None:
    x = normal(16, 64)
    out, res = empty((16, 64), nl.bfloat16), empty((16, 1))
    nisa.tensor_scalar_reduce(out, tile(x, None, nl.psum), nl.multiply, 0.3, nl.maximum, res)
    assert np.array_equal(values(out), bf16(x * F32(0.3)))
    assert np.array_equal(values(res), (x * F32(0.3)).max(axis=1, keepdims=True))
    nisa.tensor_scalar_reduce(
        out, tile(x), nl.subtract, tile(normal(16, 1)), nl.add, res, reduce_res_negate=True
    )
    assert np.allclose(values(res), -(x - normal(16, 1)).sum(axis=1, keepdims=True), atol=1e-4)


def test_registers_go_on_with_reduce_and_load_reduce(core: Core) -> None:
    x = normal(16, 64)
    out, res = empty((16, 32)), empty((16, 1))
    nisa.tensor_scalar_reduce(out, tile(x[:, :32]), nl.add, 0.0, nl.maximum)
    nisa.tensor_scalar_reduce(
        out, tile(x[:, 32:]), nl.add, 0.0, nl.maximum, res, reduce_cmd=Cmd.reduce
    )
    assert np.array_equal(values(res), x.max(axis=1, keepdims=True))
    start = tile(np.full((16, 1), 2.0))
    nisa.tensor_scalar_reduce(
        out,
        tile(x[:, :32]),
        nl.add,
        0.0,
        nl.maximum,
        res,
        reduce_cmd=Cmd.load_reduce,
        reduce_init=start,
    )
    assert np.array_equal(values(res), np.maximum(x[:, :32].max(axis=1, keepdims=True), 2))


def test_registers_never_reset_or_passed_by_an_idle_instruction_are_poisoned(core: Core) -> None:
    x, out, res = tile(normal(16, 8)), empty((16, 8)), empty((16, 1))
    with pytest.raises(UninitializedError, match="reset_reduce"):
        nisa.tensor_scalar_reduce(out, x, nl.add, 0.0, nl.maximum, res, reduce_cmd=Cmd.reduce)
    nisa.tensor_scalar_reduce(out, x, nl.add, 0.0, nl.maximum)
    nisa.select_reduce(out, tile(np.ones((16, 8)), nl.uint8), x, 0.0)
    with pytest.raises(UninitializedError):
        nisa.tensor_scalar_reduce(out, x, nl.add, 0.0, nl.maximum, res, reduce_cmd=Cmd.reduce)
    nisa.tensor_scalar_reduce(out, x, nl.add, 0.0, nl.maximum)
    with pytest.raises(UninitializedError, match="other partitions"):
        nisa.tensor_scalar_reduce(
            out[0:8], x[0:8], nl.add, 0.0, nl.maximum, res[0:8], reduce_cmd=Cmd.reduce
        )


def test_each_rule_of_tensor_scalar_reduce_raises(core: Core) -> None:
    x, out, res = tile(normal(16, 8)), empty((16, 8)), empty((16, 1))
    with pytest.raises(DtypeError, match="reverse0"):
        nisa.tensor_scalar_reduce(out, x, nl.subtract, 0.0, nl.add, res, reverse0=True)
    with pytest.raises(DtypeError, match="reduce_op"):
        nisa.tensor_scalar_reduce(out, x, nl.add, 0.0, nl.subtract, res)
    with pytest.raises(DtypeError, match="reduce_cmd"):
        nisa.tensor_scalar_reduce(out, x, nl.add, 0.0, nl.add, res, reduce_cmd=Cmd.idle)
    with pytest.raises(DtypeError, match="reduce_init"):
        nisa.tensor_scalar_reduce(out, x, nl.add, 0.0, nl.add, res, reduce_init=0.0)
    with pytest.raises(DtypeError, match="reduce_init"):
        nisa.tensor_scalar_reduce(out, x, nl.add, 0.0, nl.add, res, reduce_cmd=Cmd.load_reduce)
    with pytest.raises(ShapeError, match="reduce_res"):
        nisa.tensor_scalar_reduce(out, x, nl.add, 0.0, nl.add, empty((16, 2)))


# range_select ---------------------------------------------------------------------------------------


def bounds(*pairs: tuple[float, float]) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    low, high = zip(*pairs, strict=True)
    return tile(np.array(low)[:, None]), tile(np.array(high)[:, None])


@pytest.mark.parametrize("start", [0, 5, -3])
@pytest.mark.parametrize(
    ("op0", "op1"),
    [
        (nl.greater_equal, nl.less_equal),
        (nl.greater, nl.less),
        (nl.equal, nl.less),
        (nl.less, nl.greater),
    ],
)
def test_range_select_is_numpys_where_over_positions(
    core: Core, start: int, op0: Any, op1: Any
) -> None:
    x = normal(4, 12)
    low, high = bounds((0, 3), (2, 9), (5, 4), (-1, 100))
    out, res = empty((4, 12)), empty((4, 1))
    nisa.range_select(
        out, tile(x, None, nl.psum), op0, op1, low, high, range_start=start, reduce_res=res
    )
    j = start + np.arange(12, dtype=F32)[None]
    numpy0, numpy1 = (getattr(np, op.__name__) for op in (op0, op1))
    expected = np.where(numpy0(j, values(low)) & numpy1(j, values(high)), x, LOW)
    assert np.array_equal(values(out), expected)
    assert np.array_equal(values(res), expected.max(axis=1, keepdims=True))


def test_a_row_without_a_kept_element_has_the_lowest_float32_as_maximum(core: Core) -> None:
    low, high = bounds((5, 4))
    out, res = empty((1, 8), nl.bfloat16), empty((1, 1))
    nisa.range_select(
        out, tile(normal(1, 8)), nl.greater_equal, nl.less_equal, low, high, reduce_res=res
    )
    assert (values(out) == -np.inf).all() and values(res).item() == LOW
    nisa.range_select(
        out, tile(normal(1, 8)), nl.greater_equal, nl.less, low, high, on_false_value=-3.4028235e38
    )


@pytest.mark.parametrize("op", [nl.equal, nl.less, nl.less_equal, nl.greater, nl.greater_equal])
@pytest.mark.parametrize(
    "bound", [(0, 0), (7, 7), (-1, -1), (8, 8), (-1, 8), (3, 3), (-np.inf, np.nan), (np.nan, 9)]
)
def test_range_select_with_bounds_that_keep_all_or_nothing_or_are_nan(
    core: Core, op: Any, bound: tuple[float, float]
) -> None:
    x, out = normal(2, 8), empty((2, 8))
    low, high = bounds((bound[0], -1), (bound[1], -1))
    for ops in ((op, nl.greater), (nl.greater, op)):
        first, second = (low, high) if ops[0] is op else (high, low)
        nisa.range_select(out, tile(x), *ops, first, second)
        kept = getattr(np, op.__name__)(np.arange(8, dtype=F32)[None], values(low))
        assert np.array_equal(values(out), np.where(kept, x, LOW))


def test_range_select_keeps_the_maximum_over_tiles_in_the_registers(core: Core) -> None:
    x = normal(4, 16)
    low, high = bounds((0, 5), (3, 12), (9, 8), (15, 20))
    out, res = empty((4, 8)), empty((4, 1))
    for start, cmd in ((0, Cmd.reset_reduce), (8, Cmd.reduce)):
        nisa.range_select(
            out, tile(x[:, start : start + 8]), nl.greater_equal, nl.less_equal, low, high,
            reduce_cmd=cmd, reduce_res=res, range_start=start,
        )  # fmt: skip
    j = np.arange(16)[None]
    kept = (j >= values(low)) & (j <= values(high))
    assert np.array_equal(values(res), np.where(kept, x, LOW).max(axis=1, keepdims=True))


def test_reset_alone_starts_from_below_every_number(core: Core) -> None:
    low, high = bounds((0, 100))
    x, out, res = -np.abs(normal(1, 8)) - 1, empty((1, 8)), empty((1, 1))
    for cmd in (Cmd.reset, Cmd.reduce):
        nisa.range_select(out, tile(x), nl.greater_equal, nl.less, low, high, cmd, res)
    assert values(res).item() == x.max()


def test_each_rule_of_range_select_raises(core: Core) -> None:
    low, high = bounds((0, 3), (0, 3))
    x, out = tile(normal(2, 8)), empty((2, 8))

    def select(**given: Any) -> None:
        legal: dict[str, Any] = {
            "dst": out, "on_true_tile": x, "comp_op0": nl.greater_equal, "comp_op1": nl.less, "bound0": low,
            "bound1": high,
        }  # fmt: skip
        nisa.range_select(**{**legal, **given})

    select()
    for wrong in (0.0, -1e30, -np.inf):
        with pytest.raises(RangeSelectError, match="on_false_value"):
            select(on_false_value=wrong)
    for bound in (tile(normal(1, 1)), tile(normal(2, 2)), tile(normal(2, 1), nl.bfloat16)):
        with pytest.raises(RangeSelectError, match="bound1"):
            select(bound1=bound)
    with pytest.raises(RangeSelectError, match="comp_op0"):
        select(comp_op0=nl.not_equal)
    with pytest.raises(DtypeError):
        select(comp_op0=nl.add)
    with pytest.raises(DtypeError, match="reduce_op"):
        select(reduce_op=nl.add)
    with pytest.raises(DtypeError, match="floating"):
        select(on_true_tile=tile(np.ones((2, 8)), nl.int32))
    with pytest.raises(RangeSelectError, match="range_start"):
        select(range_start=1.5)
    with pytest.raises(RangeSelectError, match="2\\*\\*24"):
        select(range_start=2**24 - 7)
    with pytest.raises(ShapeError):
        select(dst=empty((2, 7)))
    select(range_start=2**24 - 8)


def test_range_select_needs_trn2_and_exponential_trn3() -> None:
    low, high = (0.0, 3.0)
    with acting_as(Core(target="trn1")), pytest.raises(TargetError, match="NeuronCore-v3"):
        nisa.range_select(empty((1, 8)), tile(normal(1, 8)), nl.less, nl.less, *bounds((low, high)))
    with acting_as(Core(target="trn2")), pytest.raises(TargetError, match="NeuronCore-v4"):
        nisa.exponential(empty((1, 8)), tile(normal(1, 8)))
    with acting_as(Core(target="trn3")):
        x, out, res = normal(4, 8), empty((4, 8), nl.bfloat16), empty((4, 1))
        nisa.exponential(out, tile(x), tile(x.max(axis=1, keepdims=True)), res, Cmd.reset_reduce)
        expected = np.exp(x - x.max(axis=1, keepdims=True))
        assert np.array_equal(values(out), bf16(expected))
        assert np.allclose(values(res), expected.sum(axis=1, keepdims=True), rtol=1e-6)


# select_reduce --------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
def test_select_reduce_is_numpys_where(core: Core, reverse: bool) -> None:
    x, chosen, column = normal(8, 6), normal(8, 6, seed=1) > 0, normal(8, 1, seed=2)
    out, res = empty((8, 6), nl.bfloat16), empty((8, 1))
    nisa.select_reduce(
        out,
        tile(chosen, nl.uint8),
        tile(x),
        tile(column),
        res,
        Cmd.reset_reduce,
        reverse_pred=reverse,
    )
    expected = np.where(chosen != reverse, x, column)
    assert np.array_equal(values(out), bf16(expected))
    assert np.array_equal(values(res), expected.max(axis=1, keepdims=True))
    nisa.select_reduce(out, tile(chosen, nl.int16), tile(x), -1.5)
    assert np.array_equal(values(out), bf16(np.where(chosen, x, F32(-1.5))))


def test_select_reduce_reads_on_true_only_where_it_is_selected(core: Core) -> None:
    half, out = empty((4, 6)), empty((4, 6))
    nisa.memset(half[:, 0:3], 1.0)
    chosen = np.zeros((4, 6))
    chosen[:, :3] = 1
    nisa.select_reduce(out, tile(chosen, nl.uint8), half, 0.0)
    assert np.array_equal(values(out), chosen)
    with pytest.raises(UninitializedError):
        nisa.select_reduce(out, tile(chosen, nl.uint8), half, 0.0, reverse_pred=True)


def test_each_rule_of_select_reduce_raises(core: Core) -> None:
    x, ones, out = tile(normal(4, 6)), tile(np.ones((4, 6)), nl.uint8), empty((4, 6))
    with pytest.raises(DtypeError, match="predicate"):
        nisa.select_reduce(out, tile(np.ones((4, 6)), nl.uint32), x, 0.0)
    with pytest.raises(DtypeError, match="on_true"):
        nisa.select_reduce(out, ones, tile(np.ones((4, 6)), nl.int32), 0.0)
    with pytest.raises(PlacementError):
        nisa.select_reduce(
            out, tile(np.ones((4, 6)), nl.uint8, nl.psum), tile(normal(4, 6), None, nl.psum), 0.0
        )
    with pytest.raises(DtypeError, match="reduce_op"):
        nisa.select_reduce(out, ones, x, 0.0, reduce_op=nl.add)
    with pytest.raises(DtypeError, match="reduce_cmd"):
        nisa.select_reduce(out, ones, x, 0.0, reduce_cmd=Cmd.load_reduce)
    with pytest.raises(ShapeError):
        nisa.select_reduce(out, ones, x, tile(normal(4, 2)))
