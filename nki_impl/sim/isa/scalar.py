"""The scalar engine: activation functions with scale, bias and a running sum.

The reduce registers of the engine hold one float32 per partition. Unlike on the vector engine, ``reduce_cmd.idle``
leaves them unchanged. A (P,1) tile has one element per partition.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/generated/nki.isa.activation.html
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from nki_impl.sim.errors import DtypeError, kernel_line
from nki_impl.sim.isa.common import (
    Array,
    Idle,
    free_limit,
    read_flat,
    same_size,
    scalar_operand,
)
from nki_impl.sim.isa.enums import IDLE, LOAD_REDUCE, REDUCE, RESET_REDUCE
from nki_impl.sim.isa.enums import reduce_cmd as Cmd
from nki_impl.sim.isa.reduce import accumulate, reduction, store_registers
from nki_impl.sim.machine.core import Core, current, instruction
from nki_impl.sim.operators.ops import RANGES, Op, find
from nki_impl.sim.operators.tokens import add
from nki_impl.sim.tensor.access import result_array, tile, write
from nki_impl.sim.tensor.views import NkiTensor


class ActivationRangeWarning(UserWarning):
    """Warns of a value for which the hardware's result of an activation function is not specified."""


@instruction
def activation(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    bias: float | NkiTensor | None = None,
    scale: float | NkiTensor = 1.0,
    reduce_op: Any = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: Cmd = IDLE,
    name: str | None = None,
) -> None:
    """Compute dst = op(data * scale + bias) in float32, and optionally sum each partition.

    ``scale`` is a number or a (P,1) float32 tile. ``bias`` is None, a number (not on trn1) or a (P,1) tile of any dtype
    except tfloat32. ``reduce_op`` is nl.add; the sum is taken over the float32 values before they are rounded to dst.
    Values outside the range for which the function is specified cause an ActivationRangeWarning.
    """
    core = current()
    _activate(core, dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd)


@instruction
def activation_reduce(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    reduce_op: Any,
    reduce_res: NkiTensor,
    bias: float | NkiTensor | None = None,
    scale: float | NkiTensor = 1.0,
    name: str | None = None,
) -> None:
    """Run :func:`activation` with reduce_cmd=reset_reduce; ``reduce_res`` (P,1) is mandatory."""
    if reduce_res is None:
        raise DtypeError("reduce_res", "a (P,1) tile", None, "use activation, or pass a tile")
    _activate(current(), dst, op, data, bias, scale, reduce_op, reduce_res, RESET_REDUCE)


def _activate(
    core: Core,
    dst: NkiTensor,
    op: object,
    data: NkiTensor,
    bias: float | NkiTensor | None,
    scale: float | NkiTensor,
    reduce_op: object,
    reduce_res: NkiTensor | None,
    cmd: Cmd,
) -> None:
    dst, data = tile(dst, "dst"), tile(data, "data")
    same_size(data, "data", dst, "dst")
    free_limit(data, "data")
    meaning = find(op, "op", "activation", "unary")
    if cmd is LOAD_REDUCE:
        raise DtypeError(
            "reduce_cmd", "idle, reset, reduce or reset_reduce", cmd, "add the partial sums"
        )
    if cmd in (REDUCE, RESET_REDUCE):
        reduction(reduce_op, "reduce_op", {"add"})
    # A reduction would put what an idle lane holds into the registers of the engine.
    idle = Idle() if cmd is IDLE and reduce_res is None else None
    given = read_flat(data, "data", idle)
    values = _affine(core, given, bias, scale, idle)
    _warn_range(meaning, values if idle is None else idle.used(values))
    if isinstance(meaning.apply, np.ufunc):
        out = result_array(dst, values.shape)
        if out is None or not out.flags.c_contiguous:
            # NumPy may compute exp and its like in another way with other strides.
            out = None if values is given else values
        values = meaning.apply(values, out=out)
    else:
        values = meaning.apply(values)
    if values.dtype != np.float32:
        values = values.astype(np.float32)
    accumulate(core, "scalar", cmd, find(add, "reduce_op", "arith"), values)
    write(dst, values)
    if idle is not None:
        idle.mark(dst)
    store_registers(core, "scalar", reduce_res, values.shape[0])
    core.count("scalar", dst._array.size)


def _affine(
    core: Core,
    values: Array,
    bias: float | NkiTensor | None,
    scale: float | NkiTensor,
    idle: Idle | None,
) -> Array:
    """Return values * scale + bias; ``values`` itself is not changed."""
    scaled: Array | None = None
    if isinstance(scale, NkiTensor) or scale != 1.0:
        values = scaled = values * scalar_operand(scale, "scale", values.shape[0], idle=idle)
    if bias is None:
        return values
    if isinstance(bias, NkiTensor):
        if bias.dtype.name == "tfloat32":
            raise DtypeError("bias", "any dtype but tfloat32", bias.dtype, "cast it")
    elif core.generation < 3:
        raise DtypeError("bias", "None or a (P,1) tile on trn1", repr(bias), "memset a (P,1) tile")
    added = scalar_operand(bias, "bias", values.shape[0], False, idle)
    return np.add(values, added, out=scaled)


def _warn_range(meaning: Op, values: Array) -> None:
    limits = RANGES.get(meaning.name)
    if limits is None or not values.size:
        return
    size = np.abs(values) if meaning.name == "reciprocal" else values
    if not (size.min() >= limits[0] and size.max() <= limits[1]):
        warnings.warn(
            f"activation(nl.{meaning.name}): specified from {limits[0]!r} to {limits[1]!r}, got "
            f"{size.min()} to {size.max()} ({kernel_line()})",
            ActivationRangeWarning,
            stacklevel=4,
        )
