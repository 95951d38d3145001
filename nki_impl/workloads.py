"""The kernels that ``python -m nki_impl profile`` runs, by name, with arguments for them.

A *workload* is a function that takes a :class:`Shape` and returns a kernel and its arguments for each rank. The kernels
of this package are called by their names. Any other kernel is given as ``package.module:function``, and its module must
define a function ``workload(shape)``.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nki_impl.sim.tensor import dtypes

DTYPES = {"bf16": dtypes.bfloat16, "fp16": dtypes.float16, "fp32": dtypes.float32}


@dataclass(frozen=True)
class Shape:
    """The size of a run: ranks, cores per rank, batch, heads, rows per rank, and head dimension."""

    world: int = 4
    lnc: int = 1
    batch: int = 1
    heads: int = 1
    rows: int = 256
    dim: int = 128
    dtype: str = "bf16"
    causal: bool = False
    striped: bool = False
    seed: int = 0


Arguments = list[dict[str, Any]]
Workload = Callable[[Shape], tuple[Callable[..., Any], Arguments]]


def _draw(shape: Shape, rank: int, name: str, *sizes: int) -> NDArray[Any]:
    rng = np.random.default_rng([shape.seed, rank, *name.encode()])
    return rng.standard_normal(sizes, np.float32).astype(DTYPES[shape.dtype].storage)


def _kernel(name: str) -> Callable[..., Any]:
    kernels = importlib.import_module("nki_impl.kernels")
    found: Callable[..., Any] = getattr(kernels, name)
    return found


def ring_attention_spmd_fwd(shape: Shape) -> tuple[Callable[..., Any], Arguments]:
    """Return the forward kernel with ``training``, and random inputs for it in contiguous or striped layout."""
    sizes = (shape.batch, shape.heads)
    scale = 1 / math.sqrt(shape.dim)
    arguments: Arguments = []
    for rank in range(shape.world):
        q = _draw(shape, rank, "q", *sizes, shape.dim, shape.rows)
        if shape.causal:
            q = (q.astype(np.float32) * scale).astype(q.dtype)
        arguments.append(
            {
                "q": q,
                "k": _draw(shape, rank, "k", *sizes, shape.dim, shape.rows),
                "v": _draw(shape, rank, "v", *sizes, shape.rows, shape.dim),
                "replica_groups": (tuple(range(shape.world)),),
                "num_workers": shape.world,
                "softmax_scale": 1.0 if shape.causal else scale,
                "use_causal_mask": shape.causal,
                "striped_input": shape.striped,
                "training": True,
            }
        )
    return _kernel("ring_attention_spmd_fwd"), arguments


def ring_attention_spmd_bwd(shape: Shape) -> tuple[Callable[..., Any], Arguments]:
    """Return the backward kernel, and inputs for it: random q, k, v, o and dy, and a constant lse.

    The counted work is that of a real backward pass, but the gradients have no meaning.
    """
    sizes = (shape.batch, shape.heads, shape.dim, shape.rows)
    arguments: Arguments = []
    for rank in range(shape.world):
        given: dict[str, Any] = {
            f"{name}_ref": _draw(shape, rank, name, *sizes) for name in ("q", "k", "v", "o", "dy")
        }
        tiles = (shape.batch, shape.heads, 128, shape.rows // 128)
        given |= {
            "lse_ref": np.full(tiles, math.log(shape.world * shape.rows) + 0.5, np.float32),
            "use_causal_mask": shape.causal,
            "softmax_scale": 1.0 if shape.causal else 1 / math.sqrt(shape.dim),
            "num_workers": shape.world,
            "lnc_size": shape.lnc,
            "replica_groups": (tuple(range(shape.world)),),
            "striped_attention": shape.striped,
        }
        arguments.append(given)
    return _kernel("ring_attention_spmd_bwd"), arguments


def ring_attention_unpermute(shape: Shape) -> tuple[Callable[..., Any], Arguments]:
    """Return the kernel that converts striped rows to contiguous rows, and inputs for it."""
    items = shape.batch * shape.heads
    arguments: Arguments = [
        {
            "x": _draw(shape, rank, "x", items, shape.rows, shape.dim),
            "replica_groups": (tuple(range(shape.world)),),
            "num_workers": shape.world,
        }
        for rank in range(shape.world)
    ]
    return _kernel("ring_attention_unpermute"), arguments


WORKLOADS: dict[str, Workload] = {
    "ring_attention_spmd_fwd": ring_attention_spmd_fwd,
    "ring_attention_spmd_bwd": ring_attention_spmd_bwd,
    "ring_attention_unpermute": ring_attention_unpermute,
}


def find_workload(name: str, shape: Shape) -> tuple[Callable[..., Any], Arguments]:
    """Return the kernel called ``name`` and arguments for it; raises LookupError."""
    if name in WORKLOADS:
        try:
            return WORKLOADS[name](shape)
        except (ImportError, AttributeError) as error:
            raise LookupError(f"the kernel {name} is not in this version: {error}") from error
    module_name, _, function = name.partition(":")
    if not function:
        raise LookupError(
            f"expected {', '.join(WORKLOADS)} or package.module:function; got {name!r}"
        )
    try:
        module = importlib.import_module(module_name)
        kernel, arguments = getattr(module, function), module.workload(shape)
    except (ImportError, AttributeError) as error:
        raise LookupError(
            f"expected package.module:function, a module that Python can import and that also has a function "
            f"workload(shape); got {name!r} ({error})"
        ) from error
    return kernel, arguments
