"""The vector engine's reductions, and the instructions that use its reduce registers.

The engine has one float32 register per partition, which keeps its value between instructions. The instructions
tensor_scalar_reduce, range_select, select_reduce and exponential share these registers. The argument ``reduce_cmd`` of
an instruction says what happens to them. ``reset_reduce`` starts a new reduction, ``reduce`` continues a reduction,
``load_reduce`` starts from ``reduce_init``, and ``reset`` only resets. After ``idle`` the values are undefined, and
``reduce`` raises :class:`~nki_impl.sim.errors.UninitializedError`. If ``reduce_res``, a tile with one element per
partition (P,1), is given, the registers are written to it.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/nki.isa.html
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nki_impl.sim.errors import DtypeError, RangeSelectError, ShapeError
from nki_impl.sim.isa.common import (
    Array,
    Idle,
    combine,
    flat,
    free_limit,
    generation_op,
    immediate,
    integer_tiles,
    not_both_psum,
    one_per_partition,
    raw_flat,
    read_flat,
    same_size,
    scalar_operand,
    selected,
)
from nki_impl.sim.isa.enums import IDLE, LOAD_REDUCE, REDUCE, RESET, RESET_REDUCE
from nki_impl.sim.isa.enums import reduce_cmd as Cmd
from nki_impl.sim.machine.core import Core, current, instruction, instruction_from
from nki_impl.sim.operators.ops import Op, find
from nki_impl.sim.operators.tokens import add, maximum
from nki_impl.sim.tensor.access import check_read_where, result_array, tile, write
from nki_impl.sim.tensor.dtypes import FLOAT32_MIN, to_float32
from nki_impl.sim.tensor.views import NkiTensor

ARITH = ("arith", "arith4", "compare")
_REDUCTIONS = {
    "add", "subtract", "multiply", "maximum", "minimum", "abs_max", "abs_min",
    "bitwise_and", "bitwise_or", "bitwise_xor", "logical_and", "logical_or", "logical_xor",
}  # fmt: skip


def reduction(op: object, operand: str, allowed: set[str]) -> Op:
    """Return the Op of a reduction operator; raise :class:`DtypeError` unless its name is in ``allowed``."""
    meaning = find(op, operand, *ARITH, "bit")
    if meaning.name not in allowed:
        raise DtypeError(
            operand,
            "one of nl." + ", nl.".join(sorted(allowed)),
            f"nl.{meaning.name}",
            "use one of them",
        )
    return meaning


@instruction
def tensor_reduce(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    axis: Any,
    negate: bool = False,
    keepdims: bool = False,
    name: str | None = None,
) -> None:
    """Reduce the trailing free dimensions ``axis`` of ``data``, and write the results to dst.

    ``axis`` is an int or consecutive ints that end at the last dimension and exclude dimension 0. ``negate`` flips the
    sign of the result of an arithmetic operator. ``keepdims`` keeps each reduced dimension with length 1 in the
    result's shape. This shape need not be that of dst, because only the numbers of elements are compared.
    """
    core = current()
    dst, data = tile(dst, "dst"), tile(data, "data")
    meaning = reduction(op, "op", _REDUCTIONS)
    generation_op(meaning, core, "op")
    axes = [axis] if isinstance(axis, (int, np.integer)) else sorted(axis)
    rank = data.ndim
    axes = sorted(a % rank if -rank <= a < rank else rank + 1 for a in axes)
    if not axes or axes[0] == 0 or axes != list(range(axes[0], rank)):
        raise ShapeError(
            "axis", f"consecutive dimensions of {data.shape} up to the last, without dimension 0", axis,
            "transpose first, or reduce partitions with a matmul",
        )  # fmt: skip
    free_limit(data, "data")
    p = data.shape[0]
    inner = math.prod(data.shape[axes[0] :])
    outer = data.size // inner
    if dst.shape[0] != p or dst.size != outer:
        raise ShapeError(
            "dst",
            f"{p} partitions x {outer // p}",
            f"{dst.shape[0]} x {dst.size // dst.shape[0]}",
            "slice dst",
        )
    assert meaning.reduce is not None
    idle = Idle()
    if meaning.kind == "bit":
        integer_tiles((dst, "dst"), (data, "data"))
        if negate:
            raise DtypeError(
                "negate", "an arithmetic operator", f"nl.{meaning.name}", "negate it yourself"
            )
        write(dst, meaning.reduce(raw_flat(data, "data", idle).reshape(outer, inner)))
    else:
        values = meaning.reduce(read_flat(data, "data", idle).reshape(outer, inner))
        write(dst, -values if negate else values)
    idle.reduce(inner)
    idle.mark(dst)
    core.count("vector", data._array.size)


def accumulate(
    core: Core,
    engine: str,
    cmd: Cmd,
    op: Op,
    values: Array,
    init: Any = None,
    name: str = "reduce_cmd",
) -> None:
    """Update the reduce registers of ``engine`` with float32 ``values`` (partitions, free), as ``cmd`` says."""
    partitions = values.shape[0]
    if cmd is RESET_REDUCE:
        assert op.reduce is not None
        core.accumulators[engine] = op.reduce(values)
        return
    if cmd is IDLE:
        if engine == "vector":
            core.accumulators[engine] = None
        return
    if cmd is REDUCE:
        before: Any = core.accumulator(engine, partitions)
    elif cmd is LOAD_REDUCE:
        if init is None:
            raise DtypeError(
                "reduce_init", "a number or a (P,1) tile with load_reduce", None, "pass reduce_init"
            )
        loaded = scalar_operand(init, "reduce_init", partitions)
        before = np.broadcast_to(np.reshape(loaded, -1), (partitions,)).astype(np.float32)
    elif isinstance(cmd, Cmd):
        before = np.full(partitions, op.start, np.float32)
    else:
        raise DtypeError(name, "a member of nisa.reduce_cmd", repr(cmd), "pass the member")
    if cmd is RESET:
        core.accumulators[engine] = before
        return
    assert op.reduce is not None
    core.accumulators[engine] = op.apply(before, op.reduce(values))


def store_registers(
    core: Core, engine: str, reduce_res: NkiTensor | None, partitions: int, negate: bool = False
) -> None:
    """Write the reduce registers to ``reduce_res``; do nothing if that is None."""
    if reduce_res is None:
        return
    res = one_per_partition(reduce_res, "reduce_res", partitions)
    held = core.accumulator(engine, partitions)
    write(res, -held if negate else held, "reduce_res")


@instruction
def tensor_scalar_reduce(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: float | NkiTensor,
    reduce_op: Any,
    reduce_res: NkiTensor | None = None,
    reverse0: bool = False,
    reduce_cmd: Cmd = RESET_REDUCE,
    reduce_init: float | NkiTensor | None = None,
    reduce_res_negate: bool = False,
    name: str | None = None,
) -> None:
    """Compute dst = data op0 operand0, and reduce the float32 values of each partition to ``reduce_res``.

    ``reduce_op`` is add, multiply, maximum or minimum. The machine does not support ``reverse0``.
    """
    core = current()
    dst, data = tile(dst, "dst"), tile(data, "data")
    same_size(data, "data", dst, "dst")
    free_limit(data, "data")
    meaning = reduction(reduce_op, "reduce_op", {"add", "multiply", "maximum", "minimum"})
    first = find(op0, "op0", *ARITH, "unary")
    generation_op(first, core, "op0")
    if reverse0:
        raise DtypeError("reverse0", "False (not supported yet)", True, "rewrite the operation")
    if reduce_cmd is IDLE or reduce_cmd is RESET:
        raise DtypeError(
            "reduce_cmd", "reset_reduce, reduce or load_reduce", reduce_cmd, "use tensor_scalar"
        )
    if reduce_init is not None and reduce_cmd is not LOAD_REDUCE:
        raise DtypeError(
            "reduce_init",
            "None unless reduce_cmd is load_reduce",
            repr(reduce_init),
            "leave it out",
        )
    values = read_flat(data, "data")
    if first.kind == "unary":
        values = first.apply(values).astype(np.float32)
    else:
        scalar = scalar_operand(operand0, "operand0", values.shape[0])
        values = combine(first, values, scalar, out=result_array(dst, values.shape))
    accumulate(core, "vector", reduce_cmd, meaning, values, reduce_init)
    write(dst, values)
    store_registers(core, "vector", reduce_res, values.shape[0], reduce_res_negate)
    core.count("vector", dst._array.size)


@instruction_from(3)
def range_select(
    dst: NkiTensor,
    on_true_tile: NkiTensor,
    comp_op0: Any,
    comp_op1: Any,
    bound0: NkiTensor,
    bound1: NkiTensor,
    reduce_cmd: Cmd = RESET_REDUCE,
    reduce_res: NkiTensor | None = None,
    reduce_op: Any = maximum,
    range_start: Any = 0,
    on_false_value: Any = ...,
    name: str | None = None,
) -> None:
    """Copy element j of each partition if comp_op0(range_start + j, bound0) and comp_op1(range_start + j, bound1).

    Elsewhere dst gets FLOAT32_MIN, the most negative float32 and the only fill value that the machine supports (-inf in
    bfloat16 and float16). Bounds are float32, one per partition; positions are compared in float32. The maximum of the
    float32 values is written to the reduce registers and, if given, to reduce_res. In a row in which no element is
    copied, the maximum is FLOAT32_MIN.
    """
    core = current()
    dst, on_true = tile(dst, "dst"), tile(on_true_tile, "on_true_tile")
    same_size(on_true, "on_true_tile", dst, "dst")
    free_limit(on_true, "on_true_tile")
    if not on_true.dtype.is_float:
        raise DtypeError("on_true_tile", "a floating-point tile", on_true.dtype, "cast it")
    if on_false_value is not ... and immediate(on_false_value, "on_false_value") != np.float32(
        FLOAT32_MIN
    ):
        raise RangeSelectError(
            "on_false_value", f"only {FLOAT32_MIN!r}", on_false_value, "use affine_select"
        )
    meaning = reduction(reduce_op, "reduce_op", {"maximum"})
    if isinstance(range_start, bool) or not isinstance(range_start, (int, np.integer)):
        raise RangeSelectError(
            "range_start",
            "an int known when the kernel is traced",
            repr(range_start),
            "pass an int",
        )
    data = read_flat(on_true, "on_true_tile")
    partitions, size = data.shape
    if range_start < -(2**24) or range_start + size > 2**24:
        raise RangeSelectError(
            "range_start",
            "positions up to 2**24, exact in float32",
            range_start,
            "shift the bounds",
        )
    positions = np.arange(range_start, range_start + size, dtype=np.float32)[None, :]
    kept = _compare(comp_op0, "comp_op0", positions, _bound(bound0, "bound0", partitions))
    kept &= _compare(comp_op1, "comp_op1", positions, _bound(bound1, "bound1", partitions))
    values = selected(kept, data, np.float32(FLOAT32_MIN), result_array(dst, data.shape))
    accumulate(core, "vector", reduce_cmd, meaning, values)
    write(dst, values)
    store_registers(core, "vector", reduce_res, partitions)
    core.count("vector", dst._array.size)


def _bound(bound: NkiTensor, operand: str, partitions: int) -> NDArray[np.float32]:
    bound = tile(bound, operand)
    if bound.size != bound.shape[0] or bound.shape[0] < partitions or bound.dtype.name != "float32":
        raise RangeSelectError(
            operand,
            f"a float32 tile ({partitions}, 1)",
            f"{bound.dtype} {bound.shape}",
            "copy it to such a tile",
        )
    used = bound if bound.shape[0] == partitions else bound.slice(0, 0, partitions)
    return read_flat(used, operand)


def _compare(op: object, operand: str, positions: Array, bound: Array) -> NDArray[np.bool_]:
    meaning = find(op, operand, "compare")
    if meaning.name not in ("equal", "less", "less_equal", "greater", "greater_equal"):
        raise RangeSelectError(
            operand,
            "nl.equal, less, less_equal, greater or greater_equal",
            f"nl.{meaning.name}",
            "use one of them",
        )
    out: NDArray[np.bool_] = meaning.apply(positions, bound)
    return out


@instruction
def select_reduce(
    dst: NkiTensor,
    predicate: NkiTensor,
    on_true: NkiTensor,
    on_false: float | NkiTensor,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: Cmd = IDLE,
    reduce_op: Any = maximum,
    reverse_pred: bool = False,
    name: str | None = None,
) -> None:
    """Compute dst = on_true where predicate is not 0, and dst = on_false (a number or a (P,1) tile) elsewhere.

    The maximum of each partition can be kept in the reduce registers and reduce_res. ``predicate`` is int8, uint8,
    int16 or uint16. predicate and on_true must not both be in PSUM. on_true must not be a 32-bit integer tile.
    """
    core = current()
    dst, predicate, on_true = (
        tile(dst, "dst"),
        tile(predicate, "predicate"),
        tile(on_true, "on_true"),
    )
    same_size(on_true, "on_true", predicate, "predicate")
    same_size(on_true, "on_true", dst, "dst")
    not_both_psum(on_true, "on_true", predicate, "predicate")
    if predicate.dtype.kind not in ("int", "uint") or predicate.dtype.itemsize > 2:
        raise DtypeError("predicate", "int8, uint8, int16 or uint16", predicate.dtype, "cast it")
    if on_true.dtype.name in ("int32", "uint32", "tfloat32"):
        raise DtypeError(
            "on_true", "any dtype but int32, uint32, tfloat32", on_true.dtype, "cast it"
        )
    if reduce_cmd is LOAD_REDUCE or reduce_cmd is RESET:
        raise DtypeError(
            "reduce_cmd", "idle, reset_reduce or reduce", reduce_cmd, "use one of them"
        )
    meaning = reduction(reduce_op, "reduce_op", {"maximum"})
    chosen = (raw_flat(predicate, "predicate") != 0) != bool(reverse_pred)
    check_read_where(on_true, chosen.reshape(on_true._array.shape), "on_true")
    other = scalar_operand(on_false, "on_false", chosen.shape[0], float32=False)
    values = np.where(chosen, to_float32(flat(on_true._array)), other)
    accumulate(core, "vector", reduce_cmd, meaning, values)
    write(dst, values)
    store_registers(core, "vector", reduce_res, values.shape[0])
    core.count("vector", dst._array.size)


@instruction_from(4)
def exponential(
    dst: NkiTensor,
    src: NkiTensor,
    max_value: float | NkiTensor = 0.0,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: Cmd = IDLE,
    reduce_init: float | NkiTensor = 0.0,
    name: str | None = None,
) -> None:
    """Compute dst = exp(src - max_value), with an optional sum of each partition (trn3 only)."""
    core = current()
    dst, src = tile(dst, "dst"), tile(src, "src")
    same_size(src, "src", dst, "dst")
    values = read_flat(src, "src") - scalar_operand(max_value, "max_value", src._array.shape[0])
    np.exp(values, out=values)
    meaning = find(add, "reduce_op", "arith")
    accumulate(core, "vector", reduce_cmd, meaning, values, reduce_init)
    write(dst, values)
    store_registers(core, "vector", reduce_res, values.shape[0])
    core.count("vector", dst._array.size)
