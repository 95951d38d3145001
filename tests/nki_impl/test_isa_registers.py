"""Scalar registers and the target's generation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim.errors import DtypeError, LaunchError, UninitializedError
from nki_impl.sim.machine.core import Core, acting_as

from .tiles import empty, tile, values


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
