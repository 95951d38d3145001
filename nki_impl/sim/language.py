"""``nki.language``: dtypes, memories, allocation, loops, the launch grid, and the operators.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/nki.language.html
"""

from __future__ import annotations

import os
import sys as _sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from nki_impl.sim import isa as _isa
from nki_impl.sim.errors import DtypeError as _DtypeError
from nki_impl.sim.errors import RaceError as _RaceError
from nki_impl.sim.errors import ShapeError as _ShapeError
from nki_impl.sim.machine import core as _core
from nki_impl.sim.machine.loops import bound as _bound
from nki_impl.sim.machine.loops import fori_loop, while_loop
from nki_impl.sim.memory.allocate import new_tensor as _new_tensor
from nki_impl.sim.memory.registers import VirtualRegister as _VirtualRegister
from nki_impl.sim.memory.storage import PSUM_BANKS as _PSUM_BANKS
from nki_impl.sim.memory.storage import SBUF_PARTITION_BYTES as _SBUF_PARTITION_BYTES
from nki_impl.sim.memory.storage import SBUF_USABLE_BYTES as _SBUF_USABLE_BYTES
from nki_impl.sim.memory.storage import MemoryRegion
from nki_impl.sim.operators.elementwise import broadcast_to
from nki_impl.sim.operators.elementwise import reduced as _reduced
from nki_impl.sim.operators.tokens import (
    abs,
    abs_max,
    abs_min,
    add,
    arctan,
    bitwise_and,
    bitwise_or,
    bitwise_xor,
    ceil,
    copy,
    cos,
    divide,
    equal,
    erf,
    erf_dx,
    exp,
    floor,
    fmod,
    gelu,
    gelu_apprx_sigmoid,
    gelu_apprx_sigmoid_dx,
    gelu_apprx_tanh,
    gelu_dx,
    greater,
    greater_equal,
    invert,
    left_shift,
    less,
    less_equal,
    log,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    maximum,
    minimum,
    mish,
    mod,
    multiply,
    negative,
    not_equal,
    power,
    reciprocal,
    relu,
    right_shift,
    rsqrt,
    sigmoid,
    sign,
    silu,
    silu_dx,
    sin,
    softplus,
    sqrt,
    square,
    subtract,
    tan,
    tanh,
    trunc,
)
from nki_impl.sim.public_names import no_such_name as _no_such_name
from nki_impl.sim.tensor import dtypes as dtypes
from nki_impl.sim.tensor.access import is_written as _is_written
from nki_impl.sim.tensor.access import write as _write
from nki_impl.sim.tensor.dtypes import (
    DType,
    bfloat16,
    bool_,
    float4_e2m1fn_x4,
    float8_e4m3,
    float8_e4m3fn,
    float8_e4m3fn_x4,
    float8_e5m2,
    float8_e5m2_x4,
    float8_e8m0fnu,
    float16,
    float32,
    int8,
    int16,
    int32,
    int64,
    tfloat32,
    uint8,
    uint16,
    uint32,
)
from nki_impl.sim.tensor.dtypes import as_dtype as _as_dtype
from nki_impl.sim.tensor.objects import NKIObject
from nki_impl.sim.tensor.views import NkiTensor

sbuf = MemoryRegion.sbuf
psum = MemoryRegion.psum
private_hbm = MemoryRegion.private_hbm
hbm = private_hbm
shared_hbm = MemoryRegion.shared_hbm
bypass = "bypass"
"""Operator that does nothing; only operations of NeuronCore-v4 accept it."""


class _TileSize(NKIObject):
    """Sizes of the hardware, in elements, bytes or banks. ``nl.tile_size`` is the only instance."""

    pmax: int = 128
    psum_fmax: int = 512
    psum_bank_fmax: int = 512
    psum_bank_fmax_bytes: int = 2048
    gemm_stationary_fmax: int = 128
    gemm_moving_fmax: int = 512
    bn_stats_fmax: int = 512
    psum_min_align: int = 4
    sbuf_min_align: int = 1

    @property
    def psum_num_banks(self) -> int:
        """Banks per partition of PSUM."""
        return _PSUM_BANKS

    @property
    def sbuf_fmax_bytes(self) -> int:
        """Bytes per partition of SBUF on the current target."""
        return _SBUF_PARTITION_BYTES[_core.generation()]

    @property
    def sbuf_fmax(self) -> int:
        """Float32 elements per partition of SBUF."""
        return self.sbuf_fmax_bytes // 4

    @property
    def sbuf_size_bytes(self) -> int:
        """Bytes of SBUF, all partitions together."""
        return self.sbuf_fmax_bytes * self.pmax

    @property
    def total_available_sbuf_size(self) -> int:
        """Bytes per partition of SBUF that a kernel may use."""
        return _SBUF_USABLE_BYTES[_core.generation()]


tile_size = _TileSize()


def is_hbm(buffer: Any) -> bool:
    """Return True for private or shared HBM."""
    return buffer in (MemoryRegion.private_hbm, MemoryRegion.shared_hbm)


def is_psum(buffer: Any) -> bool:
    """Return True for PSUM."""
    return buffer is MemoryRegion.psum


def is_sbuf(buffer: Any) -> bool:
    """Return True for SBUF."""
    return buffer is MemoryRegion.sbuf


def is_on_chip(buffer: Any) -> bool:
    """Return True for SBUF or PSUM."""
    return buffer in (MemoryRegion.sbuf, MemoryRegion.psum)


def ds(start: Any, size: Any) -> slice:
    """Return the slice of ``size`` elements that begins at ``start``."""
    return slice(start, start + size)


def affine_range(start: Any, stop: Any = None, step: Any = 1) -> range:
    """Return range(start, stop, step), because the simulator runs every loop in order."""
    return range(start) if stop is None else range(start, stop, step)


def sequential_range(start: Any, stop: Any = None, step: Any = 1) -> range:
    """Return range(start, stop, step), because the simulator runs every loop in order."""
    return range(start) if stop is None else range(start, stop, step)


def static_range(start: Any, stop: Any = None, step: Any = 1) -> range:
    """Return range(start, stop, step), because the simulator runs every loop in order."""
    return range(start) if stop is None else range(start, stop, step)


def dynamic_range(start: Any, stop: Any = None, step: Any = 1) -> Iterator[_VirtualRegister]:
    """Yield read-only registers with the values start, start + step, ... below stop.

    The arguments are ints or registers.
    """
    first, last = (0, start) if stop is None else (start, stop)
    for value in range(_bound(first, "start"), _bound(last, "stop"), _bound(step, "step")):
        yield _VirtualRegister(value, frozen=True)


def ndarray(
    shape: Any, dtype: Any, buffer: Any = sbuf, name: str | None = "", address: Any = None
) -> NkiTensor:
    """Allocate a tensor without writing to it; ``address`` = (start partition, byte) chooses the place.

    Raises :class:`~nki_impl.sim.errors.PartitionError` above 128 partitions on chip and
    :class:`~nki_impl.sim.errors.CapacityError` when SBUF or PSUM is full.
    """
    out = _new_tensor(shape, dtype, buffer, name, address)
    frame = _sys._getframe(1)
    out._storage.made_at = frame.f_code, frame.f_lasti
    return out


def full(
    shape: Any, fill_value: Any, dtype: Any, buffer: Any = sbuf, name: str | None = ""
) -> NkiTensor:
    """Allocate a tensor filled with a number, which is converted to int for an integer dtype, else to float."""
    out = _new_tensor(shape, dtype, buffer, name)
    value = float(fill_value) if out.dtype.is_float else int(fill_value)
    if is_on_chip(out.buffer):
        _isa.memset(out, value)
    else:
        _core.current().begin("full")
        _write(out, np.full(out.shape, value, np.float32 if out.dtype.is_float else np.int64))
    return out


def zeros(shape: Any, dtype: Any, buffer: Any = sbuf, name: str | None = "") -> NkiTensor:
    """Allocate a tensor of zeros."""
    return full(shape, 0, dtype, buffer, name)


def ones(shape: Any, dtype: Any, buffer: Any = sbuf, name: str | None = "") -> NkiTensor:
    """Allocate a tensor of ones."""
    return full(shape, 1, dtype, buffer, name)


_CONSTANT_DTYPES = (
    float32, float16, bfloat16, int32, int16, int8, uint32, uint16, uint8,
    float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float8_e4m3fn_x4, float8_e5m2_x4, float4_e2m1fn_x4, tfloat32,
)  # fmt: skip


def shared_constant(constant: Any) -> NkiTensor:
    """Return a tensor in shared HBM with the values of ``constant``: a NumPy array, or the name of a .npy file.

    Kernels cannot write it. Both cores of a rank share it, so their n-th constants must have the same values.

    Source: https://awsdocs-neuron.readthedocs-hosted.com/en/v2.32.0/nki/api/generated/nki.language.shared_constant.html
    """
    array = np.load(constant) if isinstance(constant, (str, os.PathLike)) else np.asarray(constant)
    dtype = _as_dtype(array.dtype, "constant")
    if dtype not in _CONSTANT_DTYPES:
        names = ", ".join(one.name for one in _CONSTANT_DTYPES)
        raise _DtypeError("constant", f"one of the dtypes {names}", dtype, "convert the array")
    out = _new_tensor(array.shape or (1,), dtype, shared_hbm, "constant")
    before = out.storage.raw.copy() if out.storage.read_only else None
    out.array[...] = array.reshape(out.shape)
    if before is not None and not np.array_equal(before, out.storage.raw):
        raise _RaceError(
            "constant",
            "the same values on both cores, which share the tensor",
            "other values than those of the other core",
            "create the same constants on both cores, in the same order",
        )
    out.storage.set_all_written()
    out.storage.read_only = True
    return out


def shared_identity_matrix(n: Any, dtype: Any = uint8, dst: NkiTensor | None = None) -> NkiTensor:
    """Return the n x n identity in SBUF, or write it to ``dst``. The default dtype is uint8."""
    out = _new_tensor((n, n), dtype) if dst is None else dst
    if out.shape != (n, n):
        raise _ShapeError("dst", f"({n}, {n})", out.shape, "allocate an n x n tile")
    _core.current().begin("shared_identity_matrix")
    _write(out, np.eye(n, dtype=np.float32))
    return out


def load(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Copy an HBM tensor to a new SBUF tile."""
    shape = src.shape if len(src.shape) > 1 else (1, *src.shape)
    out = _new_tensor(shape, src.dtype if dtype is None else dtype)
    _isa.dma_copy(out, src)
    return out


def store(dst: NkiTensor, value: NkiTensor) -> None:
    """Copy an SBUF tile to an HBM tensor."""
    _isa.dma_copy(dst, value)


def sum(x: Any, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Return a new tile with the sum over the trailing free dimensions ``axis``."""
    return _reduced(add, x, axis, dtype, keepdims)


def max(x: Any, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Return a new tile with the maximum over the trailing free dimensions ``axis``."""
    return _reduced(maximum, x, axis, dtype, keepdims)


def min(x: Any, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Return a new tile with the minimum over the trailing free dimensions ``axis``."""
    return _reduced(minimum, x, axis, dtype, keepdims)


def program_ndim() -> int:
    """Return 1 in a kernel launched with a grid, kernel[n](...), else 0."""
    return 1 if _core.current().grid else 0


def _axis(axis: object, operand: str) -> None:
    if axis not in (0, (0,), [0], None):
        raise _ShapeError(
            operand, "axis 0 of a grid with one dimension", axis, "launch with kernel[n]"
        )


def program_id(axis: Any = 0) -> int:
    """Return the number of this core within its rank."""
    _axis(axis, "axis")
    return _core.current().core


def num_programs(axes: Any = 0) -> int:
    """Return the number of cores that run this kernel on the rank."""
    _axis(axes, "axes")
    return _core.current().grid or 1


@contextmanager
def no_reorder() -> Iterator[None]:
    """Keep the order of the instructions, as the simulator always does; device loops are not allowed inside."""
    core = _core.current()
    if core.no_reorder == 0:
        core.block_start = core.index
    core.no_reorder += 1
    try:
        yield
    finally:
        core.no_reorder -= 1


def device_print(print_prefix: Any, tensor: NkiTensor) -> None:
    """Print the prefix, the core and the values of the tensor, even if some elements were never written."""
    core = _core.current()
    tensor.storage.fill_unwritten()
    note = "" if _is_written(tensor) else " (not all written)"
    print(f"{print_prefix} [rank {core.rank} core {core.core}] {tensor!r}{note}\n{tensor.array}")


def __getattr__(name: str) -> Any:
    # AWS's library uses nl.bool and nl.range. As globals here, they would hide Python's.
    if name == "bool":
        return bool_
    if name == "range":
        return range
    raise _no_such_name("nki.language", name)


__all__ = [
    "DType", "MemoryRegion", "NKIObject", "NkiTensor", "abs", "abs_max", "abs_min", "add",
    "affine_range", "arctan", "bfloat16", "bitwise_and", "bitwise_or", "bitwise_xor", "bool_",
    "broadcast_to", "bypass", "ceil", "copy", "cos", "device_print", "divide", "ds", "dynamic_range", "equal",
    "erf", "erf_dx", "exp", "float16", "float32", "float4_e2m1fn_x4", "float8_e4m3", "float8_e4m3fn",
    "float8_e4m3fn_x4", "float8_e5m2", "float8_e5m2_x4", "float8_e8m0fnu",
    "floor", "fmod", "fori_loop", "full", "gelu", "gelu_apprx_sigmoid", "gelu_apprx_sigmoid_dx",
    "gelu_apprx_tanh", "gelu_dx", "greater", "greater_equal", "hbm", "int16", "int32", "int64", "int8",
    "invert", "is_hbm", "is_on_chip", "is_psum", "is_sbuf", "left_shift", "less", "less_equal",
    "load", "log", "logical_and", "logical_not", "logical_or", "logical_xor", "max", "maximum",
    "min", "minimum", "mish", "mod", "multiply", "ndarray", "negative", "no_reorder",
    "not_equal", "num_programs", "ones", "power", "private_hbm", "program_id", "program_ndim",
    "psum", "reciprocal", "relu", "right_shift", "rsqrt", "sbuf", "sequential_range",
    "shared_constant", "shared_hbm", "shared_identity_matrix", "sigmoid", "sign", "silu",
    "silu_dx", "sin", "softplus", "sqrt", "square", "static_range", "store", "subtract", "sum",
    "tan", "tanh", "tfloat32", "tile_size", "trunc", "uint16", "uint32", "uint8", "while_loop",
    "zeros",
]  # fmt: skip
