"""Scalar registers and the target's generation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim import nki
from nki_impl.sim.errors import DtypeError, DynamicValueError, LaunchError, UninitializedError
from nki_impl.sim.machine.core import Core, acting_as

from ..tiles import empty, tile, values


@pytest.mark.parametrize("dtype", [nl.int32, nl.uint32, nl.int16, nl.uint8])
@pytest.mark.parametrize("buffer", [nl.sbuf, nl.hbm])
def test_a_value_goes_through_a_register(core: Core, dtype: Any, buffer: Any) -> None:
    register, other = nisa.register_alloc(), nisa.register_alloc(7)
    nisa.register_load(register, tile(np.array([[42]]), dtype, buffer))
    nisa.register_move(other, register)
    out = nl.ndarray((1, 1), dtype, buffer)
    nisa.register_store(out, other)
    assert values(out).item() == 42
    nisa.register_move(other, 5)
    nisa.register_store(out, other)
    assert values(out).item() == 5


def test_each_rule_of_registers_raises(core: Core) -> None:
    register = nisa.register_alloc()
    with pytest.raises(UninitializedError, match="register"):
        nisa.register_store(empty((1, 1), nl.int32), register)
    with pytest.raises(DtypeError, match="32 bits"):
        nisa.register_alloc(2**32)
    for wrong in (1.5, True, "3"):
        with pytest.raises(DtypeError):
            nisa.register_move(register, wrong)
    with pytest.raises(DtypeError, match="src"):
        nisa.register_load(register, tile(np.ones((1, 2)), nl.int32))
    with pytest.raises(DtypeError):
        nisa.register_load(register, tile(np.ones((1, 1))))
    with pytest.raises(DtypeError):
        nisa.register_load(register, 5)  # type: ignore[arg-type]
    with pytest.raises(UninitializedError):
        nisa.register_load(register, empty((1, 1), nl.int32))
    with pytest.raises(DtypeError, match="dst"):
        nisa.register_store(empty((1, 1)), nisa.register_alloc(1))
    with pytest.raises(DtypeError, match="holds 300"):
        nisa.register_store(empty((1, 1), nl.uint8), nisa.register_alloc(300))
    with pytest.raises(DtypeError, match="a register"):
        nisa.register_move(5, nisa.register_alloc(1))


def test_the_generation_is_that_of_the_target_and_trn2_outside_a_launch() -> None:
    assert nisa.get_nc_version() is nisa.nc_version.gen3
    for target, version in (("trn1", 2), ("trn2", 3), ("trn3", 4)):
        with acting_as(Core(target=target)):
            assert nisa.get_nc_version().value == version
    assert nisa.nc_version.gen2 < nisa.nc_version.gen3 <= nisa.nc_version.gen4


def test_an_instruction_returns_a_handle_that_orders_nothing_more(core: Core) -> None:
    first = nisa.memset(empty((1, 1)), 0.0)
    second = nisa.memset(empty((1, 1)), 0.0)
    assert second.depends_on(first) is second and (first.handle, second.handle) == (1, 2)


def test_registers_belong_to_a_launch() -> None:
    with pytest.raises(LaunchError):
        nisa.register_alloc(1)


# Scalars --------------------------------------------------------------------------------------------


def scalar(value: int, dtype: Any = nl.int32) -> Any:
    return nisa.scalar_load(tile(np.array([[value]]), dtype))


def stored(value: Any, buffer: Any = nl.sbuf) -> int:
    out = nl.ndarray((1, 1), value.dtype, buffer)
    nisa.scalar_store(out, value)
    return int(values(out).item())


def test_scalars_add_subtract_and_multiply_with_ints_and_scalars(core: Core) -> None:
    a, b = scalar(7), scalar(-3)
    results = [a + 2, 2 + a, a - 9, 9 - a, a * 4, 4 * a, a + b, a - b, a * b, -a, +b, a * 4 + 1 - b]
    assert [stored(one) for one in results] == [9, 9, -2, 2, 28, 28, 4, 10, -21, -7, -3, 32]
    c = a
    c += 1
    c *= b
    c -= 5
    assert (stored(c), stored(a, nl.hbm), a.dtype) == (-29, 7, nl.int32)


def test_scalars_wrap_to_32_bits(core: Core) -> None:
    assert stored(scalar(100000) * 100000) == 1410065408
    assert stored(scalar(2**31 - 1) + 1) == -(2**31)
    assert stored(-scalar(-(2**31))) == -(2**31)


def test_scalars_of_64_bits_keep_their_bits_and_wrap(core: Core) -> None:
    large = scalar(2**53 + 1, nl.int64)
    results = [
        large,
        large * 3,
        2**62 - large,
        large - large - 1,
        -large,
        scalar(100000, nl.int64) * 100000,
    ]
    expected = [2**53 + 1, 3 * (2**53 + 1), 2**62 - 2**53 - 1, -1, -(2**53) - 1, 10**10]
    assert [stored(one) for one in results] == expected
    assert stored(scalar(2**63 - 1, nl.int64) + 1, nl.hbm) == -(2**63)
    assert large.dtype == nl.int64


def test_a_64_bit_scalar_selects_elements_in_hbm(core: Core) -> None:
    table, out = tile(np.arange(12.0).reshape(4, 3), buffer=nl.hbm), empty((1, 3))
    nisa.dma_copy(out, table.ap([[3, 1], [1, 3]], scalar_offset=scalar(2, nl.int64) + 1))
    assert values(out).tolist() == [[9, 10, 11]]


def test_an_int64_array_goes_through_a_kernel_by_dma() -> None:
    def kernel(x: Any) -> Any:
        there, out = nl.ndarray((1, 2), nl.int64), nl.ndarray((1, 2), nl.int64, nl.shared_hbm)
        nisa.dma_copy(dst=there, src=x)
        nisa.scalar_store(there[:, 1:2], nisa.scalar_load(there[:, 0:1]) + 1)
        nisa.dma_copy(dst=out, src=there)
        return out

    assert nki.simulate(kernel)(np.array([[2**60, 5]])).tolist() == [[2**60, 2**60 + 1]]


def test_each_rule_of_64_bits_raises(core: Core) -> None:
    one, short, whole = scalar(1, nl.int64), scalar(1), tile(np.ones((1, 1)), nl.int64)
    on_chip = tile(np.ones((2, 4)))
    for use in (
        lambda: one + short,
        lambda: short * one,
        lambda: one + 2**63,
        lambda: nisa.scalar_store(empty((1, 1), nl.int32), one),
        lambda: nisa.scalar_store(empty((1, 1), nl.int64), short),
        lambda: on_chip.ap([[4, 1], [1, 4]], scalar_offset=one),
        lambda: list(nl.dynamic_range(0, one)),
        lambda: nisa.tensor_copy(empty((1, 1), nl.int64), whole),
        lambda: nisa.tensor_scalar(empty((1, 1)), whole, nl.add, 1.0),
        lambda: nisa.dma_copy(empty((1, 1), nl.int32), whole),
        lambda: nisa.dma_copy(empty((1, 1), nl.int64), tile(np.ones((1, 1)), nl.int32)),
        lambda: nisa.register_load(nisa.register_alloc(), whole),
    ):
        with pytest.raises(DtypeError):
            use()
    with pytest.raises(DynamicValueError):
        bool(one < 2)


def test_a_scalar_is_read_when_it_is_loaded_and_selects_elements_and_bounds_loops(
    core: Core,
) -> None:
    index = tile(np.array([[1]]), nl.int32)
    row = nisa.scalar_load(index)
    nisa.memset(index, 9)
    table, out = tile(np.arange(12.0).reshape(4, 3), buffer=nl.hbm), empty((1, 3))
    nisa.dma_copy(out, table.ap([[3, 1], [1, 3]], scalar_offset=row * 2 + 1))
    assert values(out).tolist() == [[9, 10, 11]]
    total = empty((1, 1))
    nisa.memset(total, 0.0)
    for _ in nl.dynamic_range(row, row + 4):
        nisa.tensor_scalar(total, total, nl.add, 1.0)
    assert values(total).item() == 4


def test_each_rule_of_scalars_raises(core: Core) -> None:
    one = scalar(1)
    for wrong in (1.5, True, nisa.register_alloc(1), 2**31):
        with pytest.raises((DtypeError, DynamicValueError)):
            one + wrong
    for source in (tile(np.ones((1, 1)), nl.uint32), tile(np.ones((1, 2)), nl.int32), 3):
        with pytest.raises(DtypeError, match="int32 or int64 tensor"):
            nisa.scalar_load(source)
    with pytest.raises(UninitializedError):
        nisa.scalar_load(empty((1, 1), nl.int32))
    for value in (3, nisa.register_alloc(3)):
        with pytest.raises(DtypeError, match="an NkiScalar"):
            nisa.scalar_store(empty((1, 1), nl.int32), value)
    with pytest.raises(DtypeError, match="int32 or int64 tensor"):
        nisa.scalar_store(empty((1, 1), nl.float32), one)
    for use in (
        lambda: bool(one),
        lambda: one < 2,
        lambda: one == 1,
        lambda: one // 2,
        lambda: int(one),
    ):
        with pytest.raises(DynamicValueError):
            use()
    for call in (
        lambda: nisa.register_store(empty((1, 1), nl.int32), one),
        lambda: nisa.register_move(nisa.register_alloc(), one),
        lambda: nisa.register_load(one, empty((1, 1), nl.int32)),
    ):
        with pytest.raises((DtypeError, UninitializedError)):
            call()
