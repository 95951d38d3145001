"""Elements that nobody wrote, in lanes of a rectangle that hold no data, may be computed but not used."""

from __future__ import annotations

import numpy as np
import pytest

from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim.errors import UninitializedError
from nki_impl.sim.machine.core import Core
from nki_impl.sim.tensor.access import is_written
from nki_impl.sim.tensor.views import NkiTensor

from .tiles import empty, normal, tile, values


def ragged() -> NkiTensor:
    """Two columns: the first is a full tile of 8 partitions, the second a last tile of 4."""
    t = empty((8, 2))
    nisa.memset(t[:, 0:1], 2.0)
    nisa.memset(t[0:4, 1:2], 3.0)
    return t


WANT = np.array([[2, 3]] * 4 + [[2, np.nan]] * 4, np.float32)

INSTRUCTIONS = {
    "tensor_tensor": lambda dst, t: nisa.tensor_tensor(dst, t, t, nl.maximum),
    "tensor_tensor, second": lambda dst, t: nisa.tensor_tensor(dst, tile(np.zeros((8, 2))), t, nl.add),
    "tensor_scalar": lambda dst, t: nisa.tensor_scalar(dst, t, nl.multiply, 1.0),
    "two operators": lambda dst, t: nisa.tensor_scalar(dst, t, nl.add, 1.0, op1=nl.add, operand1=-1.0),
    "scalar_tensor_tensor": lambda dst, t: nisa.scalar_tensor_tensor(dst, t, nl.add, 0.0, nl.minimum, t),
    "activation": lambda dst, t: nisa.activation(dst, nl.copy, t),
    "tensor_reduce": lambda dst, t: nisa.tensor_reduce(dst, nl.maximum, t.reshape((8, 2, 1)), axis=2),
}  # fmt: skip


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_results_of_idle_lanes_are_unwritten_and_all_others_right(core: Core, name: str) -> None:
    dst = tile(np.full((8, 2), 7.0))
    INSTRUCTIONS[name](dst, ragged())
    assert np.array_equal(values(dst[:, 0:1]), WANT[:, 0:1])
    assert np.array_equal(values(dst[0:4, 1:2]), WANT[:4, 1:2])
    for p in range(4, 8):
        assert not is_written(dst.ap([[2, 1], [1, 1]], offset=2 * p + 1))


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_a_position_that_no_partition_wrote_is_an_error_at_once(core: Core, name: str) -> None:
    forgotten = empty((8, 2))
    nisa.memset(forgotten[:, 0:1], 2.0)
    with pytest.raises(UninitializedError, match="8 of 16 elements"):
        INSTRUCTIONS[name](empty((8, 2)), forgotten)


def test_an_instruction_in_place_keeps_idle_lanes_unwritten(core: Core) -> None:
    t = ragged()
    nisa.tensor_scalar(t, t, nl.multiply, 2.0)
    assert not is_written(t) and is_written(t[:, 0:1]) and is_written(t[0:4])
    nisa.memset(t[:, 1:2], 0.0)
    assert is_written(t)


def test_one_unwritten_element_makes_the_reduction_of_its_partition_unwritten(core: Core) -> None:
    out = empty((8, 1))
    nisa.tensor_reduce(out, nl.add, ragged(), axis=1)
    assert np.array_equal(values(out[0:4]), np.full((4, 1), 5.0))
    with pytest.raises(UninitializedError):
        values(out[0:8])


def test_an_idle_lane_of_a_scalar_operand_makes_its_whole_partition_unwritten(core: Core) -> None:
    column, out = empty((8, 1)), empty((8, 6))
    nisa.memset(column[0:4], 1.0)
    nisa.tensor_scalar(out, tile(np.ones((8, 6))), nl.add, column)
    assert (values(out[0:4]) == 2).all() and not is_written(out[:, 0:1])
    nisa.activation(out, nl.copy, tile(np.ones((8, 6))), bias=column)
    assert (values(out[0:4]) == 2).all() and not is_written(out[:, 0:1])


def test_what_leaves_the_idle_lanes_is_an_error(core: Core) -> None:
    t = empty((8, 2))
    nisa.tensor_scalar(t, ragged(), nl.add, 1.0)
    product = nl.ndarray((2, 4), nl.float32, buffer=nl.psum)
    with pytest.raises(UninitializedError, match="4 of 16"):
        nisa.nc_matmul(product, t, tile(normal(8, 4)))
    with pytest.raises(UninitializedError, match="4 of 16"):
        nisa.dma_copy(nl.ndarray((8, 2), nl.float32, nl.shared_hbm), t)
    turned = nl.ndarray((2, 8), nl.float32, buffer=nl.psum)
    with pytest.raises(UninitializedError, match="4 of 16"):
        nisa.nc_transpose(turned, t)


def test_registers_do_not_take_up_idle_lanes(core: Core) -> None:
    cmd = nisa.reduce_cmd.reset_reduce
    with pytest.raises(UninitializedError, match="data"):
        nisa.activation(empty((8, 2)), nl.copy, ragged(), reduce_op=nl.add, reduce_cmd=cmd)


def test_garbage_in_idle_lanes_causes_no_warning_of_a_range(core: Core) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nisa.activation(empty((8, 2)), nl.sin, ragged())
