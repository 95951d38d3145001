"""The vector engine: copies, element-wise arithmetic and reductions along the free dimensions.

Every arithmetic instruction reads its tiles as float32, computes in float32, and rounds once when it writes. Nothing is
broadcast implicitly. Values can be repeated by a view of stride 0, or by a (P,1) tile (one element per partition) as
scalar operand.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/nki.isa.html
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nki_impl.sim.errors import DtypeError, ShapeError, TargetError
from nki_impl.sim.isa.common import (
    Array,
    Idle,
    combine,
    free_limit,
    generation_op,
    integer_tiles,
    no_psum,
    not_both_psum,
    pick_engine,
    raw_flat,
    read_flat,
    same_size,
    scalar_operand,
)
from nki_impl.sim.isa.enums import engine as Engine
from nki_impl.sim.isa.enums import gpsimd_engine, scalar_engine, unknown_engine, vector_engine
from nki_impl.sim.machine.core import current, instruction
from nki_impl.sim.memory.storage import SBUF
from nki_impl.sim.operators.ops import UNARY_KINDS, Op, find
from nki_impl.sim.tensor.access import (
    copy_bits,
    result_array,
    tile,
    write,
)
from nki_impl.sim.tensor.dtypes import round_once
from nki_impl.sim.tensor.overlap import check_copy
from nki_impl.sim.tensor.views import NkiTensor

ARITH = ("arith", "arith4", "compare")
BITS = ("bit", "bit1")
_ANY = (vector_engine, scalar_engine, gpsimd_engine)
_EXACT = {"int32", "uint32"}
_EXACT_OPS = {"add", "subtract", "multiply", "maximum", "minimum"}


@instruction
def tensor_copy(
    dst: NkiTensor, src: NkiTensor, engine: Engine = unknown_engine, name: str | None = None
) -> None:
    """Copy ``src`` to ``dst`` on chip: bit for bit between equal dtypes, otherwise through float32.

    ``src`` and ``dst`` have the same partition count and free size. Elements that were never written in ``src`` count
    as unwritten in ``dst``, too: they may be copied, but not used in computations.
    """
    core = current()
    dst, src = tile(dst, "dst"), tile(src, "src")
    same_size(src, "src", dst, "dst")
    chosen = pick_engine(engine, _ANY, vector_engine)
    no_psum(chosen, (dst, "dst"), (src, "src"))
    if chosen == "scalar" and core.generation < 3:
        raise TargetError(
            "engine",
            "trn2 or later for copies on the scalar engine",
            core.target,
            "use activation(nl.copy)",
        )
    check_copy(dst, src)
    copy_bits(dst, src)
    core.count(chosen, dst._array.size)


@instruction
def memset(
    dst: NkiTensor, value: Any, engine: Engine = unknown_engine, name: str | None = None
) -> None:
    """Fill ``dst`` with a Python number.

    The documentation requires an int for an integer tile, and a float for a floating-point tile. AWS's kernels pass 0.0
    for integer tiles and 0 for float tiles, so 0.0 is accepted, and so is an int that the float dtype represents
    exactly. A packed (x4) tile can only be filled with 0, whose bits are 0.
    """
    dst = tile(dst, "dst")
    chosen = pick_engine(engine, (vector_engine, gpsimd_engine), vector_engine)
    no_psum(chosen, (dst, "dst"))
    is_float = isinstance(value, (float, np.floating))
    is_int = isinstance(value, (int, np.integer)) and (
        not isinstance(value, bool) or dst.dtype.kind == "bool"
    )
    if dst.dtype.is_packed and value == 0:
        write(dst, np.zeros((1,), dst.dtype.storage).repeat(dst._array.size))
        current().count(chosen, dst._array.size)
        return
    if dst.dtype.is_integer and is_float and value == 0.0:
        value, is_int, is_float = 0, True, False
    if dst.dtype.is_float and is_int:
        held = round_once(np.array([value], np.float64).astype(np.float32), dst.dtype)
        is_float = int(value) == float(held[0])
    if dst.dtype.is_float and not is_float:
        raise DtypeError(
            "value", f"a float for a {dst.dtype} tile", repr(value), "write 1.0 instead of 1"
        )
    if dst.dtype.is_integer and not (is_int and dst.dtype.low <= int(value) <= dst.dtype.high):
        raise DtypeError(
            "value",
            f"an int from {dst.dtype.low} to {dst.dtype.high} for a {dst.dtype} tile",
            repr(value),
            "write an int",
        )
    filler = np.full((1,), value, np.float32 if is_float else np.int64)
    write(dst, np.broadcast_to(round_once(filler, dst.dtype), dst._array.shape))
    current().count(chosen, dst._array.size)


@instruction
def tensor_tensor(
    dst: NkiTensor,
    data1: NkiTensor,
    data2: NkiTensor,
    op: Any,
    engine: Engine = unknown_engine,
    name: str | None = None,
) -> None:
    """Compute dst = data1 op data2 element by element; at most one of data1 and data2 may be in PSUM.

    int32 and uint32 tiles outside PSUM are computed by GpSimd, exactly (modulo 2**32). On the vector engine all
    arithmetic passes through float32. nl.power runs on GpSimd. Bit operators accept only integers.
    """
    core = current()
    dst, data1, data2 = tile(dst, "dst"), tile(data1, "data1"), tile(data2, "data2")
    same_size(data1, "data1", data2, "data2")
    same_size(data1, "data1", dst, "dst")
    not_both_psum(data1, "data1", data2, "data2")
    free_limit(data1, "data1")
    meaning = find(op, "op", *ARITH, "bit")
    generation_op(meaning, core, "op")
    tiles = (dst, data1, data2)
    exact = (
        dst.dtype.name in _EXACT
        and all(t.dtype.name in _EXACT and t._storage.buffer is SBUF for t in tiles)
        and (meaning.name in _EXACT_OPS or meaning.kind == "compare")
        and engine is not vector_engine
    )
    chosen = pick_engine(
        engine,
        (vector_engine, gpsimd_engine),
        gpsimd_engine if exact or meaning.name == "power" else vector_engine,
    )
    no_psum(
        "gpsimd" if meaning.name == "power" else chosen,
        *zip(tiles, ("dst", "data1", "data2"), strict=True),
    )
    idle = Idle()
    if meaning.kind == "bit":
        _bit_widths(*zip(tiles, ("dst", "data1", "data2"), strict=True))
        a, b = raw_flat(data1, "data1", idle), raw_flat(data2, "data2", idle)
        write(dst, meaning.apply(a, b.view(a.dtype)).view(dst.dtype.storage))
    elif exact:
        a, b = (
            raw_flat(data1, "data1", idle).astype(np.int64),
            raw_flat(data2, "data2", idle).astype(np.int64),
        )
        write(dst, meaning.apply(a, b).astype(np.int64).astype(dst.dtype.storage))
    else:
        a, b = read_flat(data1, "data1", idle), read_flat(data2, "data2", idle)
        write(dst, combine(meaning, a, b, out=result_array(dst, a.shape)))
    idle.mark(dst)
    core.count(chosen, dst._array.size)


def _bit_widths(*operands: tuple[NkiTensor, str]) -> None:
    integer_tiles(*operands)
    width = operands[0][0].dtype.itemsize
    for tensor, operand in operands:
        if tensor.dtype.itemsize != width:
            raise DtypeError(
                operand,
                f"an integer of {width} bytes as dst is",
                tensor.dtype,
                "copy it to that dtype",
            )


def _scalar_step(
    values: Array,
    op: Op,
    operand: object,
    name: str,
    reverse: bool,
    float32: bool,
    out: Array | None = None,
    idle: Idle | None = None,
) -> Array:
    """Return ``values op operand``, or ``operand op values`` if ``reverse``; the operand is a number or (P,1) tile.

    The result is stored in ``out`` if that is given and the operator allows it.
    """
    if op.kind in UNARY_KINDS:
        if operand is not None and (isinstance(operand, NkiTensor) or operand != 0):
            raise DtypeError(
                name, f"None or 0 for the unary nl.{op.name}", repr(operand), "leave it out"
            )
        return op.apply(values).astype(np.float32)
    scalar = scalar_operand(operand, name, values.shape[0], float32, idle)
    return combine(op, values, scalar, reverse, out)


def _bit_step(values: Array, op: Op, operand: object, name: str, reverse: bool) -> Array:
    if op.kind == "bit1":
        return op.apply(values)
    if isinstance(operand, NkiTensor):
        integer_tiles((operand, name))
        scalar = raw_flat(tile(operand, name), name).astype(values.dtype)
        if scalar.shape != (values.shape[0], 1):
            raise ShapeError(name, f"({values.shape[0]}, 1)", scalar.shape, "slice one column")
    else:
        if isinstance(operand, bool) or not isinstance(operand, (int, np.integer)):
            raise DtypeError(name, "an int for a bit operator", repr(operand), "pass an int")
        scalar = np.array(operand & ((1 << 8 * values.itemsize) - 1), np.uint64).astype(
            values.dtype
        )
    return op.apply(scalar, values) if reverse else op.apply(values, scalar)


@instruction
def tensor_scalar(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: float | NkiTensor,
    reverse0: bool = False,
    op1: Any = None,
    operand1: float | NkiTensor | None = None,
    reverse1: bool = False,
    engine: Engine = unknown_engine,
    name: str | None = None,
) -> None:
    """Compute dst = (data op0 operand0) op1 operand1, where the operands are numbers or (P,1) float32 tiles.

    ``reverse0`` swaps the operands of op0, ``reverse1`` those of op1. Both operators are arithmetic
    (computed in float32), or both are bit operators (integers only, no cast).
    """
    core = current()
    dst, data = tile(dst, "dst"), tile(data, "data")
    same_size(data, "data", dst, "dst")
    free_limit(data, "data")
    first = find(op0, "op0", *ARITH, *BITS, "unary", "activation")
    second = None if op1 is None else find(op1, "op1", *ARITH, *BITS, "unary", "activation")
    chosen = _scalar_engine(engine, first, second)
    no_psum(chosen, (dst, "dst"), (data, "data"))
    if second is None and operand1 is not None:
        raise DtypeError("operand1", "None without op1", repr(operand1), "pass op1")
    if second is not None and (first.kind in BITS) != (second.kind in BITS):
        raise DtypeError(
            "op1",
            "bit operators with bit operators, arithmetic with arithmetic",
            f"nl.{first.name} and nl.{second.name}",
            "use two instructions",
        )
    if first.kind in BITS:
        _bit_widths((dst, "dst"), (data, "data"))
        bits = _bit_step(raw_flat(data, "data"), first, operand0, "operand0", reverse0)
        if second is not None:
            bits = _bit_step(bits, second, operand1, "operand1", reverse1)
        write(dst, bits.view(dst.dtype.storage))
    else:
        for one, operand in ((first, "op0"), (second, "op1")):
            if one is not None:
                generation_op(one, core, operand)
        idle = Idle()
        values = read_flat(data, "data", idle)
        out = result_array(dst, values.shape)
        if second is None:
            values = _scalar_step(values, first, operand0, "operand0", reverse0, True, out, idle)
        else:
            values = _scalar_step(values, first, operand0, "operand0", reverse0, True, None, idle)
            out = values if out is None else out
            values = _scalar_step(values, second, operand1, "operand1", reverse1, True, out, idle)
        write(dst, values)
        idle.mark(dst)
    core.count(chosen, dst._array.size)


def _scalar_engine(engine: Engine, first: Op, second: Op | None) -> str:
    chosen = pick_engine(engine, _ANY, vector_engine)
    names = (first.name, None if second is None else second.name)
    if chosen == "scalar" and names not in (("multiply", "add"), ("multiply", None), ("add", None)):
        raise TargetError(
            "engine",
            "multiply and add, multiply, or add on the scalar engine",
            names,
            "use the vector engine",
        )
    if chosen == "gpsimd" and "rsqrt" not in names:
        raise TargetError("engine", "GpSimd for nl.rsqrt only", names, "use the vector engine")
    return chosen


@instruction
def scalar_tensor_tensor(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: float | NkiTensor,
    op1: Any,
    operand1: NkiTensor,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> None:
    """Compute dst = (data op0 operand0) op1 operand1, where operand1 is a tile of the same size as data.

    Only arithmetic operators are supported. data and operand1 must not both be in PSUM. dst may be the same tile as
    data or operand1.
    """
    core = current()
    dst, data, operand1 = tile(dst, "dst"), tile(data, "data"), tile(operand1, "operand1")
    same_size(data, "data", operand1, "operand1")
    same_size(data, "data", dst, "dst")
    not_both_psum(data, "data", operand1, "operand1")
    free_limit(data, "data")
    first, second = find(op0, "op0", *ARITH), find(op1, "op1", *ARITH)
    generation_op(first, core, "op0")
    generation_op(second, core, "op1")
    idle = Idle()
    values = read_flat(data, "data", idle)
    values = _scalar_step(values, first, operand0, "operand0", reverse0, False, None, idle)
    out = result_array(dst, values.shape)
    if out is None:
        out = values  # which the first step made
    write(dst, combine(second, values, read_flat(operand1, "operand1", idle), reverse1, out=out))
    idle.mark(dst)
    core.count("vector", dst._array.size)


@instruction
def reciprocal(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> None:
    """Compute dst = 1 / data in float32."""
    dst, data = tile(dst, "dst"), tile(data, "data")
    same_size(data, "data", dst, "dst")
    free_limit(data, "data")
    idle = Idle()
    write(dst, np.float32(1) / read_flat(data, "data", idle))
    idle.mark(dst)
    current().count("vector", dst._array.size)
