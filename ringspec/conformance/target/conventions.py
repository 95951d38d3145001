"""Convert arrays between the conventions that a target declares and those of the suite.

A target is the program under test. The conventions are the order of axes, the base of the lse, the lse of an empty row
(a query that sees no key), and the array library. Nothing else is changed. dlse and dsinks always refer to the natural
lse.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Call
from ringspec.conformance.target.results import Due, read_only
from ringspec.errors import DtypeError, described
from ringspec.formats import format_of, load, name_of, store

# The axes of [B, H, n, d] in the order of the target. If "B" is not among them, the batch axis, of size 1, is dropped.
ORDERS = {
    "BHSD": (0, 1, 2, 3),
    "BSHD": (0, 2, 1, 3),
    "SBHD": (2, 0, 1, 3),
    "HSD": (0, 1, 2, 3),
    "SHD": (0, 2, 1, 3),
}
TURNED = ("q", "k", "v", "dy", "o", "dq", "dk", "dv")
ROWS = ("lse", "dlse", "delta")
LSE_INPUTS = ("lse", "parts_lse")


def as_seen(call: Call, claims: Capabilities) -> Call:
    """Convert a call to the target's conventions: axes of q, k, v, dy, o, and the base of an input lse.

    lse, dlse and delta stay [B, H, n], or become [H, n] if the target's order of axes has no B. Two kinds of tensors
    keep their axes: those of a merge, and those with one axis for queries and one for keys, such as a bias. An lse that
    is converted to base 2 is rounded to its format again.
    """
    plain = claims.axes == "BHSD" and claims.lse != "base2"
    if plain and claims.lse_of_empty_rows == "minus-infinity":
        return call
    tensors = {
        name: tuple(read_only(seen(name, x, call, claims)) for x in per_worker)
        for name, per_worker in call.tensors.items()
    }
    return dataclasses.replace(call, tensors=tensors)


def seen(name: str, x: NDArray, call: Call, claims: Capabilities) -> NDArray:
    """Convert one array of one worker to the target's conventions."""
    if name in LSE_INPUTS:
        x = lse_out(x, claims)
    return x if call.operation == "merge" else turned(name, x, claims.axes)


def turned(name: str, x: NDArray, axes: str) -> NDArray:
    """Convert an array with axes [B, H, n, d] to the target's order of axes.

    >>> turned("q", np.zeros((1, 2, 5, 4)), "SHD").shape
    (5, 2, 4)
    """
    if name not in (*ROWS, *TURNED):
        return x
    turned = x.transpose(ORDERS[axes]) if name in TURNED else x
    return turned if "B" in axes else turned[0]


def turned_back(name: str, x: NDArray, axes: str) -> NDArray:
    """Undo :func:`turned`.

    >>> turned_back("q", np.zeros((5, 2, 4)), "SHD").shape
    (1, 2, 5, 4)
    """
    if name not in (*ROWS, *TURNED):
        return x
    whole = x if "B" in axes else x[None]
    return whole.transpose(np.argsort(ORDERS[axes])) if name in TURNED else whole


def shape_seen(name: str, shape: tuple[int, ...], axes: str) -> tuple[int, ...]:
    """Convert a shape [B, H, n, d] to the target's order of axes.

    >>> shape_seen("o", (1, 2, 5, 4), "BSHD"), shape_seen("lse", (1, 2, 5), "SHD")
    ((1, 5, 2, 4), (2, 5))
    """
    return turned(name, np.broadcast_to(0, shape), axes).shape


def lse_out(x: NDArray, claims: Capabilities) -> NDArray:
    """Convert a natural lse to the target's convention."""
    values, storage = load(x, "lse"), name_of(x.dtype)
    assert storage is not None
    if claims.lse == "base2":
        values = values / math.log(2.0)
    if claims.lse_of_empty_rows == "plus-infinity":
        values = np.where(np.isneginf(values), np.inf, values)
    return store(values, storage)


def lse_back(x: NDArray, claims: Capabilities) -> NDArray:
    """Convert a returned lse to base e, with -inf in empty rows.

    The result is float64 if it was converted. A target may declare that its empty rows have a finite lse. That is
    replaced later, by :func:`settle_empty_rows`, which knows which rows are empty.
    """
    if claims.lse == "natural" and claims.lse_of_empty_rows != "plus-infinity":
        return x
    values = load(x, "lse")
    if claims.lse == "base2":
        values = values * math.log(2.0)
    if claims.lse_of_empty_rows == "plus-infinity":
        values = np.where(
            np.isposinf(values), -np.inf, np.where(np.isneginf(values), np.nan, values)
        )
    return values


def settle_empty_rows(got: NDArray, want: NDArray, claims: Capabilities) -> NDArray:
    """Write -inf into the empty rows of an lse if the target declares a finite value for them.

    ``want`` is the correct lse. NaN and infinities are not replaced, so that the comparison reports them.
    """
    if claims.lse_of_empty_rows != "finite":
        return got
    values = load(got, "lse")
    return np.where(np.isneginf(want) & np.isfinite(values), -np.inf, values)


def to_numpy(x: Any, what: str = "array") -> NDArray:
    """Convert a NumPy, PyTorch or JAX array to a NumPy array of the same dtype and bits.

    Raises :class:`~ringspec.errors.DtypeError` for anything that is not an array of numbers.

    >>> to_numpy([1.0, 2.0]).dtype
    dtype('float64')
    """
    try:
        if hasattr(x, "detach") and hasattr(x, "cpu"):
            return from_torch(x)
        if np.ma.is_masked(x):
            raise TypeError("a masked array, whose masked elements have no value")
        array = np.asarray(x)
    except Exception as error:
        raise DtypeError(
            f"{what} as an array", described(x, error), "return arrays of numbers"
        ) from None
    if array.dtype.kind in "OUSMm":
        raise DtypeError(
            f"{what} as an array of numbers", f"dtype {array.dtype}", "return arrays of numbers"
        )
    return array


def from_torch(x: Any) -> NDArray:
    """Convert a PyTorch tensor to a NumPy array; the bits of bfloat16, which NumPy lacks, are reinterpreted."""
    plain = x.detach().cpu().contiguous()
    if str(plain.dtype) == "torch.bfloat16":
        bits: NDArray = plain.view(sys.modules["torch"].int16).numpy()
        return bits.view(format_of("bfloat16").dtype)
    array: NDArray = plain.resolve_conj().resolve_neg().numpy()
    return array


def due_formats(name: str, due: Due, recipe: Any) -> tuple[str, ...]:
    """List the formats that a result may have: that of the call, and that of the target's declared recipe."""
    if recipe is None:
        return (due.format,)
    own = {"o": recipe.outputs, "lse": recipe.lse, "dsinks": recipe.lse}
    return (due.format, own.get(name, recipe.gradients))
