"""Operators called on tiles, such as ``nl.add(x, y)``: allocate a tile, issue the instruction, return the tile.

The result is in SBUF and has the requested dtype. If none is requested, it has the widest dtype of the operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nki_impl.sim import isa
from nki_impl.sim.errors import DtypeError, ShapeError, UnsupportedError
from nki_impl.sim.machine.core import current
from nki_impl.sim.memory.allocate import new_tensor
from nki_impl.sim.operators.ops import OPS
from nki_impl.sim.operators.tokens import ON_TILES, multiply
from nki_impl.sim.tensor.access import read_raw, tile, write
from nki_impl.sim.tensor.dtypes import DType, as_dtype
from nki_impl.sim.tensor.views import NkiTensor


def promoted(*operands: object) -> DType:
    """Return the dtype of a result: the widest float dtype of the operands or, without a float, the widest dtype.

    Of equally wide dtypes, the first is returned.
    """
    kinds = [o.dtype for o in operands if isinstance(o, NkiTensor)]
    if not kinds:
        raise DtypeError(
            "x", "at least one tile", operands, "compute with Python numbers in Python"
        )
    return max(kinds, key=lambda kind: (kind.is_float, kind.itemsize))


def binary(function: Callable[..., Any], x: Any, y: Any, dtype: object) -> NkiTensor:
    """Compute ``function`` of two tiles, or of a tile and a number.

    A free dimension with length 1 in one tile is repeated to its length in the other tile.
    """
    kind = promoted(x, y) if dtype is None else as_dtype(dtype)
    if isinstance(x, NkiTensor) and isinstance(y, NkiTensor):
        x, y = _repeated(x, y.shape), _repeated(y, x.shape)
        out = new_tensor(x.shape, kind)
        isa.tensor_tensor(out, x, y, function)
        return out
    swapped = not isinstance(x, NkiTensor)
    tile, number = (y, x) if swapped else (x, y)
    out = new_tensor(tile.shape, kind)
    isa.tensor_scalar(out, tile, function, number, reverse0=swapped)
    return out


def _repeated(x: NkiTensor, shape: tuple[int, ...]) -> NkiTensor:
    """Return ``x`` with its free dimensions of length 1 repeated to the lengths in ``shape``, if the ranks agree."""
    if len(shape) == x.ndim:
        for dim in range(1, x.ndim):
            if x.shape[dim] == 1 != shape[dim]:
                x = x.broadcast(dim, shape[dim])
    return x


def unary(function: Callable[..., Any], x: Any, dtype: object) -> NkiTensor:
    """Compute ``function`` of a tile."""
    kind = promoted(x) if dtype is None else as_dtype(dtype)
    out = new_tensor(x.shape, kind)
    meaning = OPS[function]
    if meaning.name == "reciprocal":
        isa.reciprocal(out, x)
    elif meaning.name == "negative":
        isa.tensor_scalar(out, x, multiply, -1.0)
    elif meaning.kind == "activation":
        isa.activation(out, function, x)
    elif meaning.kind in ("unary", "bit1"):
        isa.tensor_scalar(out, x, function, None)  # type: ignore[arg-type]
    else:
        raise UnsupportedError(
            "op", "an operator of one tile", meaning.name, "call the instruction"
        )
    return out


def reduced(
    function: Callable[..., Any],
    x: NkiTensor,
    axis: int | tuple[int, ...],
    dtype: object,
    keepdims: bool,
) -> NkiTensor:
    """Reduce the trailing free dimensions ``axis`` of ``x``."""
    axes = {a % x.ndim for a in ([axis] if isinstance(axis, int) else axis)}
    shape = [1 if d in axes else n for d, n in enumerate(x.shape) if keepdims or d not in axes]
    shape += [1] * (2 - len(shape))
    out = new_tensor(shape, promoted(x) if dtype is None else dtype)
    isa.tensor_reduce(out, function, x, axis, keepdims=keepdims)
    return out


def broadcast_to(x: NkiTensor, shape: Any, dtype: Any = None) -> NkiTensor:
    """Return a new tile of ``shape`` in which each dimension of ``x`` with length 1 is repeated; partitions, too.

    ``x`` and ``shape`` have the same rank. If ``x`` already has the shape and dtype, ``x`` itself is returned.
    """
    x = tile(x, "x")
    kind = x.dtype if dtype is None else as_dtype(dtype)
    lengths = tuple(shape)
    if lengths == x.shape and kind is x.dtype:
        return x
    if len(lengths) != x.ndim or any(
        a not in (1, b) for a, b in zip(x.shape, lengths, strict=True)
    ):
        raise ShapeError(
            "shape", f"{x.shape}, except that dimensions of length 1 may be longer", lengths,
            "reshape or expand_dim first",
        )  # fmt: skip
    out = new_tensor(lengths, kind)
    current().begin("broadcast_to")
    write(out, np.broadcast_to(read_raw(x, "x"), lengths))
    current().count("vector", out.size)
    return out


ON_TILES.update(binary=binary, unary=unary)
