"""Conventions written a second time, with plain loops and names, to hold the harness's own to."""

import dataclasses
import math

import numpy as np

from ringspec.formats import load, name_of, store

TURNED = ("q", "k", "v", "dy", "o", "dq", "dk", "dv")


def to_natural(x, axes):
    if axes == "BSHD":
        return np.swapaxes(x, 1, 2)
    if axes == "SBHD":
        return np.moveaxis(x, 0, 2)
    if axes == "HSD":
        return x[None]
    if axes == "SHD":
        return np.swapaxes(x, 0, 1)[None]
    return x


def from_natural(x, axes):
    if axes == "BSHD":
        return np.swapaxes(x, 1, 2)
    if axes == "SBHD":
        return np.moveaxis(x, 2, 0)
    if axes == "HSD":
        return x[0]
    if axes == "SHD":
        return np.swapaxes(x[0], 0, 1)
    return x


def natural(call, claims):
    """What the target sees, as the reference wants it."""
    if call.operation == "merge":
        tensors = dict(call.tensors)
    else:
        tensors = {}
        for name, arrays in call.tensors.items():
            if name in TURNED:
                arrays = tuple(to_natural(x, claims.axes) for x in arrays)
            elif name in ("lse", "dlse", "delta") and "B" not in claims.axes:
                arrays = tuple(x[None] for x in arrays)
            tensors[name] = arrays
    for name in ("lse", "parts_lse"):
        if name in tensors:
            tensors[name] = tuple(natural_lse(x, claims) for x in tensors[name])
    return dataclasses.replace(call, tensors=tensors)


def natural_lse(x, claims):
    values = load(x)
    if claims.lse == "base2":
        values = values * math.log(2)
    if claims.lse_of_empty_rows == "plus-infinity":
        assert not np.isneginf(values).any()
        values = np.where(np.isposinf(values), -np.inf, values)
    return store(values, name_of(x.dtype))


def answered(result, call, claims):
    """What the reference gives, as the target would."""
    if call.operation != "merge":
        for name in TURNED[4:]:
            arrays = getattr(result, name)
            if arrays is not None:
                setattr(result, name, [from_natural(x, claims.axes) for x in arrays])
    if result.lse is not None:
        result.lse = [own_lse(x, call, claims) for x in result.lse]
    if claims.lse == "hidden":
        result.lse = None
    return result


def own_lse(x, call, claims):
    values = load(x)
    if claims.lse == "base2":
        values = values / math.log(2)
    if claims.lse_of_empty_rows == "plus-infinity":
        values = np.where(np.isneginf(values), np.inf, values)
    if claims.lse_of_empty_rows == "finite":
        values = np.where(np.isneginf(values), -1e30, values)
    values = store(values, name_of(x.dtype))
    return values[0] if "B" not in claims.axes and call.operation != "merge" else values
