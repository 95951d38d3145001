"""Common code of the instructions: operand checks, and the arithmetic of operators with two operands.

A tile has up to 128 *partitions*. The elements of a partition are called free elements, and their number is the *free
size* of the tile. A (P,1) tile has P partitions with one element each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nki_impl.sim.errors import DtypeError, PlacementError, ShapeError
from nki_impl.sim.isa.enums import engine as Engine
from nki_impl.sim.isa.enums import unknown_engine
from nki_impl.sim.machine.core import Core, current
from nki_impl.sim.memory.storage import PSUM
from nki_impl.sim.operators.ops import Op
from nki_impl.sim.tensor.access import read, read_raw, tile
from nki_impl.sim.tensor.dtypes import FLOAT32_MIN, to_float32
from nki_impl.sim.tensor.idle import Idle
from nki_impl.sim.tensor.views import NkiTensor

Array = NDArray[Any]
Scalar = float | int | NkiTensor

SBUF_FREE = 65536
PSUM_FREE = 4096
FLOAT32_MAX = -FLOAT32_MIN


def free_size(tensor: NkiTensor) -> int:
    """Return the number of elements per partition."""
    array = tensor._array
    return array.size // array.shape[0]


def flat(array: Array) -> Array:
    """Return ``array`` as (partitions, free elements)."""
    return array if array.ndim == 2 else array.reshape(array.shape[0], -1)


def exchanged(array: Array) -> Array:
    """Return ``array`` with its first and last axis exchanged: a view of a fresh copy, which is read fast in this order.

    Rows far apart share a few sets of the processor's cache. Read column by column, they push each other out, so the
    copy puts the rows of each block of one middle index together. For (128, 1, 16, 128) this takes a fourth of the time.
    """
    last = array.ndim - 1
    middle = range(1, last)
    near = array.transpose(*middle, 0, last).copy()
    return near.transpose(last, *range(last - 1), last - 1)


def selected(kept: Array, values: Array, fill: Any, out: Array | None) -> Array:
    """Return ``values`` where ``kept`` is True, and the number ``fill`` elsewhere; stored in ``out`` if that is given.

    np.where takes twice as long if one of its choices is a number.
    """
    if out is None:
        out = values.copy()
    else:
        np.copyto(out, values)
    np.copyto(out, fill, where=~kept)
    return out


def same_size(first: NkiTensor, name: str, second: NkiTensor, other: str) -> None:
    """Raise :class:`ShapeError` unless both tensors have the same partition count and the same free size."""
    a, b = first._array, second._array
    if a.shape != b.shape and (a.shape[0] != b.shape[0] or a.size != b.size):
        raise ShapeError(
            other,
            f"the partitions and free size of {name}, {a.shape[0]} x {free_size(first)}",
            f"{b.shape[0]} x {free_size(second)}",
            "slice both alike; nothing is broadcast implicitly, use .broadcast or .ap (stride 0)",
        )


def one_per_partition(tensor: NkiTensor, operand: str, partitions: int) -> NkiTensor:
    """Return ``tensor`` as a tile that has ``partitions`` partitions with one element each."""
    tensor = tile(tensor, operand)
    if tensor._array.shape[0] != partitions or tensor._array.size != partitions:
        raise ShapeError(
            operand, f"({partitions}, 1)", tensor.shape, "slice or reduce it to one column"
        )
    return tensor


def scalar_operand(
    value: Any, operand: str, partitions: int, float32: bool = True, idle: Idle | None = None
) -> Any:
    """Return a Python number as np.float32, or a (P,1) tile as a float32 column.

    ``float32``: if True, the tile must have dtype float32, as instructions such as tensor_scalar require. ``idle``: as
    in :func:`read_flat`.
    """
    if isinstance(value, NkiTensor):
        column = one_per_partition(value, operand, partitions)
        if float32 and column.dtype.name != "float32":
            raise DtypeError(operand, "a float32 tile", column.dtype, "tensor_copy it to float32")
        return read_flat(column, operand, idle).reshape(partitions, 1)
    return immediate(value, operand)


def immediate(value: Any, operand: str) -> np.float32:
    """Return a Python number as float32; raises :class:`DtypeError` for anything else."""
    if type(value) is float and abs(value) <= FLOAT32_MAX:
        return np.float32(value)  # without np.errstate, which takes longer than the conversion
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise DtypeError(operand, "a number or a (P,1) tile", repr(value), "pass a float")
    with np.errstate(over="ignore"):
        return np.float32(value)


def combine(op: Op, a: Any, b: Any, reverse: bool = False, out: Array | None = None) -> Array:
    """Return ``a op b`` (``b op a`` if ``reverse``) in float32; comparisons give 1.0 or 0.0."""
    if reverse:
        a, b = b, a
    if op.kind == "compare":
        return op.apply(a, b).astype(np.float32)
    if out is not None and isinstance(op.apply, np.ufunc):
        result: Array = op.apply(a, b, out=out)
        return result
    result = op.apply(a, b)
    return result


def generation_op(op: Op, core: Core, operand: str) -> None:
    """Raise :class:`~nki_impl.sim.errors.TargetError` if the operator ``op`` does not exist on the core's target."""
    if op.kind == "arith4" and core.generation < 4:
        from nki_impl.sim.errors import TargetError

        raise TargetError(
            operand,
            f"nl.{op.name} exists from NeuronCore-v4 on",
            core.target,
            "use another operator",
        )


def pick_engine(given: Engine, allowed: tuple[Engine, ...], default: Engine) -> str:
    """Return the name of the engine that runs the instruction.

    Raises :class:`PlacementError` for an engine that cannot run it.
    """
    if given is unknown_engine or given is None:
        return default._name_  # the property name costs a call
    if given not in allowed:
        raise PlacementError(
            "engine", "one of " + ", ".join(one.name for one in allowed), given, "leave it unknown"
        )
    return given._name_


def no_psum(engine: str, *operands: tuple[NkiTensor, str]) -> None:
    """Raise :class:`PlacementError` if ``engine`` is GpSimd and an operand is in PSUM, which GpSimd cannot access."""
    if engine != "gpsimd":
        return
    for tensor, name in operands:
        if tensor._storage.buffer is PSUM:
            raise PlacementError(
                name,
                "a tile in SBUF, the only memory of GpSimd",
                "psum",
                "tensor_copy it to SBUF first",
            )


def not_both_psum(a: NkiTensor, first: str, b: NkiTensor, second: str) -> None:
    """Raise :class:`PlacementError` if both inputs of an instruction are in PSUM."""
    if a._storage.buffer is PSUM and b._storage.buffer is PSUM:
        raise PlacementError(
            second,
            f"at most one of {first} and {second} in PSUM",
            "both",
            "tensor_copy one to SBUF first",
        )


def free_limit(tensor: NkiTensor, operand: str) -> None:
    """Raise :class:`ShapeError` if a partition has more than 64K elements (4K in PSUM)."""
    size = free_size(tensor)
    if size <= PSUM_FREE:
        return
    limit = PSUM_FREE if tensor._storage.buffer is PSUM else SBUF_FREE
    if size > limit:
        raise ShapeError(operand, f"at most {limit} elements per partition", size, "split the tile")


def integer_tiles(*operands: tuple[NkiTensor, str]) -> None:
    """Raise :class:`DtypeError` unless all tiles have an integer dtype, because bit operators do not cast."""
    for tensor, name in operands:
        if tensor.dtype.is_float:
            raise DtypeError(
                name,
                "an integer tile for a bit operator",
                tensor.dtype,
                "view it as an integer dtype",
            )


def raw_flat(tensor: NkiTensor, operand: str, idle: Idle | None = None) -> Array:
    """Return the elements of a tensor in their own dtype, as (partitions, free elements); ``idle``: see read_flat."""
    if idle is None:
        return flat(read_raw(tensor, operand))
    idle.admit(tensor, operand)
    return flat(tensor._array)


def read_flat(tensor: NkiTensor, operand: str, idle: Idle | None = None) -> NDArray[np.float32]:
    """Return the elements of a tensor as float32 (partitions, free elements); the caller must not change the result.

    ``idle`` notes elements that were never written in lanes without data; None: they are an error, too.
    """
    if idle is None:
        return flat(read(tensor, operand))
    idle.admit(tensor, operand)
    return flat(to_float32(tensor._array))


__all__ = [
    "Array", "Core", "Engine", "Idle", "Scalar", "combine", "current", "flat", "free_limit", "free_size",
    "generation_op", "immediate", "integer_tiles", "no_psum", "not_both_psum", "one_per_partition",
    "pick_engine", "raw_flat", "read_flat", "same_size", "scalar_operand",
]  # fmt: skip
