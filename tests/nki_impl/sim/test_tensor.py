"""Tensors and registers as Python sees them: attributes, indexing, and values that stay on the device."""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest

from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim import nki
from nki_impl.sim.errors import DynamicValueError, PartitionError, UnsupportedError, ViewError
from nki_impl.sim.machine.core import Core

from .tiles import empty, tile

SHAPE = (64, 64, 64)


def test_attributes_of_a_fresh_tensor(core: Core) -> None:
    t = nl.ndarray((128, 64), nl.bfloat16, nl.psum, name="scores")
    assert (t.shape, t.strides, t.offset, t.ndim, t.size) == ((128, 64), (64, 1), 0, 2, 128 * 64)
    assert (t.dtype, t.buffer, t.name) == (nl.bfloat16, nl.psum, "scores")
    assert t.get_pattern() == [[64, 128], [1, 64]]
    assert t.is_contiguous() and not t.is_indirect()


def test_indexing_on_chip_keeps_the_partition_dimension_and_rank_two(core: Core) -> None:
    t = empty(SHAPE)
    cases: list[tuple[Any, tuple[int, ...]]] = [
        ((0, 0, 10), (1, 1)),
        ((slice(None), 0), (64, 64)),
        ((slice(None), 0, 10), (64, 1)),
        ((slice(0, 64), 0, slice(0, 64)), (64, 64)),
        ((slice(None), slice(None), slice(None, None, 2)), (64, 64, 32)),
        (Ellipsis, SHAPE),
        ((0, Ellipsis, slice(None)), (1, 64, 64)),
        ((Ellipsis, 3), (64, 64)),
        (5, (1, 64, 64)),
        (nl.ds(32, 32), (32, 64, 64)),
    ]
    for key, shape in cases:
        assert t[key].shape == shape, key


def test_indexing_in_hbm_drops_dimensions_down_to_rank_one(core: Core) -> None:
    t = nl.ndarray((4, 128, 32), nl.float32, nl.shared_hbm)
    assert [t[k].shape for k in (0, (0, 1), (0, 1, 2), (slice(1, 3), 5))] == [
        (128, 32),
        (32,),
        (1,),
        (2, 32),
    ]


def test_an_index_selects_what_numpy_selects(core: Core) -> None:
    array = np.arange(8 * 6 * 4, dtype=np.float32).reshape(8, 6, 4)
    t = tile(array)
    assert np.array_equal(t[2:5, 1, ::2].array, array[2:5, 1, ::2])
    assert np.array_equal(t[3, :, 1:3].array, array[3:4, :, 1:3])
    assert t[2:5, 1, ::2].offset == 2 * 24 + 4 and t[2:5, 1, ::2].strides == (24, 2)


@pytest.mark.parametrize(
    "key", [slice(5, 4), slice(0, 65), slice(-1, None), slice(None, -1), 64, -1]
)
def test_reversed_and_outside_slices_are_refused(core: Core, key: Any) -> None:
    with pytest.raises(ViewError) as caught:
        empty((64, 64))[:, key]
    assert caught.value.operand == "dimension 1" and caught.value.operation.endswith("__getitem__")


def test_partitions_have_no_step(core: Core) -> None:
    t = empty((64, 64))
    with pytest.raises(PartitionError):
        t[::2, :]
    with pytest.raises(PartitionError):
        t.slice(0, 0, 64, 2)
    assert nl.ndarray((64, 64), nl.float32, nl.hbm)[::2].shape == (32, 64)


@pytest.mark.parametrize(
    ("start", "count"), [(0, 128), (0, 65), (64, 64), (64, 33), (32, 32), (96, 32), (96, 1), (0, 1)]
)
def test_engines_reach_partitions_from_these_starts(core: Core, start: int, count: int) -> None:
    nisa.memset(empty((128, 2))[start : start + count, :], 0.0)


@pytest.mark.parametrize(("start", "count"), [(1, 1), (16, 16), (33, 2), (32, 33), (32, 65)])
def test_engines_do_not_reach_partitions_from_other_starts(
    core: Core, start: int, count: int
) -> None:
    with pytest.raises(PartitionError, match="start at partition"):
        nisa.memset(empty((128, 2))[start : start + count, :], 0.0)


def test_dma_reaches_any_partition(core: Core) -> None:
    t = empty((128, 2))
    nisa.dma_copy(t[17:20, :], tile(np.ones((3, 2))))
    assert t.array[17:20].min() == 1.0


OPERATORS = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.lt,
    operator.le, operator.gt, operator.ge, operator.eq, operator.ne, operator.and_, operator.or_,
]  # fmt: skip


@pytest.mark.parametrize("op", OPERATORS)
def test_a_tensor_and_a_register_refuse_python_operators(core: Core, op: Any) -> None:
    for value in (tile(np.ones((1, 1))), nisa.register_alloc(1)):
        with pytest.raises(DynamicValueError):
            op(value, 1)
        with pytest.raises(DynamicValueError):
            op(1, value)


@pytest.mark.parametrize("use", [bool, int, float, list, operator.neg, abs, operator.index])
def test_a_tensor_and_a_register_have_no_python_value(core: Core, use: Any) -> None:
    for value in (tile(np.ones((1, 1))), nisa.register_alloc(1)):
        with pytest.raises(DynamicValueError, match="only on the device"):
            use(value)


def test_a_register_is_no_index_and_has_none(core: Core) -> None:
    register = nisa.register_alloc(1)
    with pytest.raises(DynamicValueError):
        register[0]
    with pytest.raises(DynamicValueError, match="scalar_offset"):
        empty((128, 4))[:, register]
    with pytest.raises(DynamicValueError):
        empty((128, 4))[:, tile(np.ones((1, 1)), nl.int32)]
    with pytest.raises(DynamicValueError):
        empty((128, 4))[:, register:register]


def test_branching_on_a_tile_is_refused_but_asking_for_none_is_not(core: Core) -> None:
    t = tile(np.ones((1, 1)))
    register = nisa.register_alloc(1)
    assert t is not None and t != None and not (t == None)  # noqa: E711
    assert register != None and not (register == None)  # noqa: E711
    with pytest.raises(DynamicValueError):
        if t == t:
            pass


def test_tiles_are_not_assigned_to(core: Core) -> None:
    with pytest.raises(UnsupportedError, match="tensor_copy"):
        empty((128, 4))[:, 0:1] = tile(np.ones((128, 1)))


def test_tensors_can_be_keys_and_a_user_class_can_hold_them(core: Core) -> None:
    t = empty((1, 1))
    assert {t: 1}[t] == 1

    class Buffers(nl.NKIObject):
        pass

    assert Buffers(scores=t).scores is t  # type: ignore[attr-defined]


def test_dataclass_takes_attributes_without_annotation_as_fields() -> None:
    @dataclass
    class Step(nl.NKIObject):
        scale: float
        index = None
        _hidden = 1

        def twice(self) -> float:
            return 2 * self.scale

    step = Step(1.5, index=3)  # type: ignore[call-arg]
    assert (step.scale, step.index, step.twice()) == (1.5, 3, 3.0)
    assert [one.name for one in fields(Step)] == ["scale", "index"]


def test_the_truth_of_a_whole_kernel_input_means_that_it_was_passed() -> None:
    def kernel(x: Any, bias: Any = None, other: Any = None) -> Any:
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=bias if bias and not other else x)
        return out

    zeros = np.zeros((1, 1), np.float32)
    assert nki.simulate(kernel)(zeros + 1, zeros)[0, 0] == 0
    assert nki.simulate(kernel)(zeros + 1)[0, 0] == 1


@pytest.mark.parametrize(
    "condition",
    [
        lambda x, t: nl.equal(t, t),
        lambda x, t: t,
        lambda x, t: x[0:1],
        lambda x, t: x[0, 0],
        lambda x, t: nl.load(x),
        lambda x, t: nl.ndarray((2, 2), nl.float32, buffer=nl.shared_hbm),
        lambda x, t: x.select(1, 0),
    ],
    ids=["comparison", "tile", "row", "element", "loaded", "allocated", "selected"],
)
def test_the_truth_of_any_other_tensor_is_an_error(condition: Any) -> None:
    def kernel(x: Any) -> None:
        assert condition(x, nl.load(x))

    with pytest.raises(DynamicValueError, match=r"bool\(\)"):
        nki.simulate(kernel)(np.ones((2, 2), np.float32))
