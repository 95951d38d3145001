"""Instructions for scalar registers and scalars (allocate, set, load, store), and the query for the target's generation.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/generated/nki.isa.register_alloc.html
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nki_impl.sim.errors import DtypeError
from nki_impl.sim.isa.enums import nc_version
from nki_impl.sim.machine import core as _core
from nki_impl.sim.machine.core import current, instruction
from nki_impl.sim.memory.registers import NkiScalar, VirtualRegister, checked_int
from nki_impl.sim.tensor.access import index_value, read_raw, resolve, write
from nki_impl.sim.tensor.dtypes import int32, int64
from nki_impl.sim.tensor.views import NkiTensor


def get_nc_version() -> nc_version:
    """Return the generation of the target: nc_version.gen3 for trn2."""
    return nc_version(_core.generation())


def register_alloc(x: int | None = None) -> VirtualRegister:
    """Return a new register with the value ``x``; if ``x`` is None, the register has no value yet."""
    current().begin("register_alloc")
    return VirtualRegister(x)


def _register(value: object, operand: str) -> VirtualRegister:
    if not isinstance(value, VirtualRegister) or isinstance(value, NkiScalar):
        raise DtypeError(
            operand, "a register", type(value).__name__, "allocate it with register_alloc"
        )
    return value


@instruction
def register_move(dst: Any, src: Any) -> None:
    """Set register ``dst`` to an int or to another register's value."""
    value = (
        _register(src, "src").read("src")
        if isinstance(src, VirtualRegister)
        else checked_int(src, "src")
    )
    _register(dst, "dst").assign(value)
    current().count("sync", 1)


@instruction
def register_load(dst: Any, src: NkiTensor) -> None:
    """Set register ``dst`` to the value of the one element of the integer tensor ``src`` (SBUF or HBM)."""
    if not isinstance(src, NkiTensor):
        raise DtypeError(
            "src", "a (1,1) integer tensor", type(src).__name__, "use register_move for ints"
        )
    static = resolve(src)
    assert static is not None
    _register(dst, "dst").assign(index_value(static, "src"))
    current().count("sync", 1)


@instruction
def register_store(dst: NkiTensor, src: Any) -> None:
    """Write the value of register ``src`` to the one element of the integer tensor ``dst`` (SBUF or HBM)."""
    if not isinstance(dst, NkiTensor) or dst.size != 1 or dst.dtype.is_float:
        raise DtypeError(
            "dst", "a (1,1) integer tensor", dst, "allocate nl.ndarray((1, 1), nl.int32)"
        )
    value = _register(src, "src").read("src")
    if not dst.dtype.low <= value <= dst.dtype.high:
        raise DtypeError("dst", f"a dtype that holds {value}", dst.dtype, "use int32 or uint32")
    write(dst, np.full(dst._array.shape, value, np.int64).astype(dst.dtype.storage))
    current().count("sync", 1)


def scalar_load(src: NkiTensor) -> NkiScalar:
    """Return the value of the (1,1) int32 or int64 tensor ``src`` (SBUF or HBM) as a scalar of this dtype."""
    core = current()
    core.begin("scalar_load")
    _check_scalar(src, "src")
    out = NkiScalar(0, src.dtype)
    if core.on_operands is not None:
        core.on_operands(core.core, core.index, ("dst", "src"), (out, src), {})
    static = resolve(src)
    assert static is not None
    core.count("sync", 1)
    out._state = int(read_raw(static, "src").item())
    return out


@instruction
def scalar_store(dst: NkiTensor, value: NkiScalar) -> None:
    """Write a scalar to the (1,1) tensor ``dst`` of its dtype (SBUF or HBM)."""
    _check_scalar(dst, "dst")
    if not isinstance(value, NkiScalar):
        raise DtypeError(
            "value", "an NkiScalar", type(value).__name__, "use scalar_load, or memset for an int"
        )
    if value.dtype is not dst.dtype:
        raise DtypeError("dst", f"the dtype of value, {value.dtype}", dst.dtype, "allocate it so")
    write(dst, np.full(dst._array.shape, value.read("value"), dst.dtype.storage))
    current().count("sync", 1)


def _check_scalar(tensor: object, operand: str) -> None:
    if not isinstance(tensor, NkiTensor) or tensor.size != 1 or tensor.dtype not in (int32, int64):
        raise DtypeError(
            operand,
            "a (1,1) int32 or int64 tensor",
            tensor if isinstance(tensor, NkiTensor) else type(tensor).__name__,
            "allocate nl.ndarray((1, 1), nl.int32)",
        )
