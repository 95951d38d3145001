"""The arguments and results of a kernel: conversion between the caller's arrays and tensors in HBM.

Arrays may be NumPy arrays (also of dtype ml_dtypes.bfloat16), PyTorch tensors or arrays of other libraries. They may be
inside tuples, lists and dicts. All other arguments are passed unchanged. Results are NumPy arrays, or PyTorch tensors
if a PyTorch tensor was passed. This module never imports PyTorch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nki_impl.sim.errors import OutputError, UninitializedError, line_of
from nki_impl.sim.memory.storage import MemoryRegion, Storage
from nki_impl.sim.tensor.access import hbm_tensor, is_written, unwritten_count
from nki_impl.sim.tensor.dtypes import bfloat16
from nki_impl.sim.tensor.views import NkiTensor

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Input:
    """An array of the caller, and the kernel input that holds a copy of this array."""

    given: Any
    tensor: NkiTensor


def is_torch(value: object) -> bool:
    """Return whether ``value`` is a PyTorch tensor; False if PyTorch is not imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_array(value: object) -> bool:
    """Return whether ``value`` is a NumPy array, a PyTorch tensor, or another array that NumPy can read."""
    if isinstance(value, np.ndarray) or is_torch(value):
        return True
    return hasattr(value, "__array__") and not isinstance(value, (np.generic, NkiTensor, type))


def _from_torch(value: Any) -> Array:
    flat = value.detach().cpu().contiguous()
    if str(flat.dtype) == "torch.bfloat16":
        raw: Array = flat.view(sys.modules["torch"].int16).numpy()
        return raw.view(bfloat16.storage)
    out: Array = flat.numpy()
    return out


def as_torch(array: Array) -> Any:
    """Return a PyTorch tensor with the values and dtype of a NumPy array."""
    torch = sys.modules["torch"]
    if array.dtype == bfloat16.storage:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def load(name: str, value: Any, rank: int, lnc: int, read_only: bool, inputs: list[Input]) -> Any:
    """Return ``value`` with every array replaced by a kernel input, and append the kernel inputs to ``inputs``.

    The inputs of a rank are in shared HBM if the rank has two cores, otherwise in the private HBM of its core.
    """
    if is_array(value):
        array = _from_torch(value) if is_torch(value) else np.asarray(value)
        tensor = hbm_tensor(array, name, (rank, None if lnc > 1 else 0), read_only)
        tensor.storage.is_input = True
        inputs.append(Input(value, tensor))
        return tensor
    if type(value) in (tuple, list):
        return type(value)(
            load(f"{name}[{i}]", v, rank, lnc, read_only, inputs) for i, v in enumerate(value)
        )
    if type(value) is dict:
        return {
            k: load(f"{name}[{k!r}]", v, rank, lnc, read_only, inputs) for k, v in value.items()
        }
    return value


def write_back(inputs: list[Input]) -> None:
    """Copy the kernel inputs, which the kernel may have changed, back to the caller's arrays."""
    for item in inputs:
        if not (isinstance(item.given, np.ndarray) or is_torch(item.given)):
            continue  # an array of a library whose arrays never change
        held = item.tensor.array
        given = _from_torch(item.given) if is_torch(item.given) else item.given
        if np.array_equal(
            held.reshape(-1).view(np.uint8), np.ascontiguousarray(given).reshape(-1).view(np.uint8)
        ):
            continue
        if is_torch(item.given):
            item.given.copy_(as_torch(held.reshape(given.shape).copy()))
        else:
            given[...] = held.reshape(given.shape)


def each_tensor(value: Any, change: Callable[[str, NkiTensor], Any], path: str = "result") -> Any:
    """Return ``value`` with each tensor in it replaced by ``change(path, tensor)``."""
    if isinstance(value, NkiTensor):
        return change(path, value)
    if isinstance(value, (tuple, list)):
        return tuple(each_tensor(v, change, f"{path}[{i}]") for i, v in enumerate(value))
    if type(value) is dict:
        return {k: each_tensor(v, change, f"{path}[{k!r}]") for k, v in value.items()}
    if value is None:
        return None
    raise OutputError(
        path,
        "tensors in nl.shared_hbm, alone or in a tuple",
        type(value).__name__,
        "return only such tensors",
    )


def check_output(path: str, tensor: NkiTensor, inputs_too: bool) -> Storage:
    """Return the storage of a tensor that a kernel returns; raise OutputError if the tensor cannot be an output."""
    storage = tensor.storage
    if storage.is_input:
        if inputs_too:
            return storage
        raise OutputError(
            path, "a tensor that the kernel allocated", f"the input {storage.name}", "copy it"
        )
    if storage.buffer is not MemoryRegion.shared_hbm:
        raise OutputError(
            path,
            "a tensor in nl.shared_hbm",
            storage.buffer.value,
            "dma_copy it to a shared_hbm tensor",
        )
    if tensor.dynamic is not None:
        raise OutputError(path, "a static tensor", "a dynamic access pattern", "copy it first")
    storage.is_output = True
    return storage


def unload(path: str, tensor: NkiTensor) -> Array:
    """Return a copy of an output tensor; raises UninitializedError if an element was never written."""
    if not is_written(tensor):
        raise UninitializedError(
            path,
            "an output of which every element was written",
            f"{tensor.name or 'a tensor'} {tensor.shape}, of which {unwritten_count(tensor)} elements were never written",
            "write all of it, or return the part that is written; it is allocated in this line",
            operation="return",
            line=line_of(tensor.storage.made_at) if tensor.storage.made_at else None,
        )
    return tensor.array.copy()
