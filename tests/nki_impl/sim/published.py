"""Kernels that others have published, out of RINGSPEC_NKI_KERNELS, and what they must compute.

The directory holds checkouts side by side, of any of

    nki-library      https://github.com/aws-neuron/nki-library
    nki-samples      https://github.com/aws-neuron/nki-samples
    aws-neuron-sdk   https://github.com/aws-neuron/aws-neuron-sdk

Nothing of them is in this repository. docs/nki/external.md says which versions were run.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from nki_impl.sim.install import installed

Array = NDArray[Any]

BF16 = np.dtype(ml_dtypes.bfloat16)
UNIT = 2.0**-8  # of bfloat16: the relative error of one rounding is at most this
LIBRARY = "nki-library/src/nkilib_src"


def root() -> Path:
    return Path(os.environ["RINGSPEC_NKI_KERNELS"]).expanduser()


def kernel(module: str, name: str) -> Any:
    """``name`` of nkilib.``module``, which imports the simulator as nki."""
    path = root() / LIBRARY / "nkilib" / (module.replace(".", "/") + ".py")
    if not path.is_file():
        pytest.skip(f"there is no {path.relative_to(root())} in RINGSPEC_NKI_KERNELS")
    return getattr(_library(module), name)


def accepted(made: Any, arguments: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The arguments that the kernel of this release has; skip if it lacks one whose value is not the default.

    The fork, of which earlier versions of these tests were written, has more arguments than release 2.29.
    """
    known = inspect.signature(made.function).parameters
    lacking = {name for name in arguments if name not in known}
    for name in lacking:
        if name not in defaults or arguments[name] != defaults[name]:
            pytest.skip(f"the kernel of this release has no argument {name}")
    return {name: value for name, value in arguments.items() if name not in lacking}


def _library(module: str) -> ModuleType:
    """Import a module of the library; a second call gives the same one."""
    sys.path.insert(0, str(root() / LIBRARY))
    try:
        with installed():
            return importlib.import_module(f"nkilib.{module}")
    finally:
        sys.path.remove(str(root() / LIBRARY))


def program(path: str) -> ModuleType:
    """Import the file ``path`` of the directory with the simulator as nki; skip if it is not there."""
    file = root() / path
    if not file.is_file():
        pytest.skip(f"there is no {path} in RINGSPEC_NKI_KERNELS")
    if "neuronxcc" in file.read_text("utf-8"):
        pytest.skip(f"{path} is written for neuronxcc.nki, the API before nki")
    spec = importlib.util.spec_from_file_location(f"published_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with installed():
        spec.loader.exec_module(module)
    return module


def rms(got: Array, want: Array) -> float:
    """Root mean square of the error over that of ``want``."""
    difference = got.astype(np.float64) - want.astype(np.float64)
    return float(np.sqrt(np.mean(difference**2) / np.mean(want.astype(np.float64) ** 2)))


def normal(rng: np.random.Generator, *shape: int, dtype: Any = BF16, scale: float = 1.0) -> Array:
    return (rng.standard_normal(shape) * scale).astype(dtype)


@dataclass(frozen=True)
class Attention:
    """One head in float64: rows of o, maximum m, sum l, lse, P @ |v|, and the slack of a score."""

    o: Array
    m: Array
    l: Array
    lse: Array
    absolute: Array
    slack: Array
    p: Array


def attention(
    q: Array, k: Array, v: Array, scale: float, visible: Array, sink: Any = None
) -> Attention:
    """Softmax(scale q k^T where ``visible``) v by definition; ``sink`` joins the sum without a value."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = np.where(visible, q @ k.T * scale, -np.inf)
    m = scores.max(axis=1) if sink is None else np.maximum(scores.max(axis=1), sink)
    p = np.exp(scores - m[:, None])
    l = p.sum(axis=1) + (0.0 if sink is None else np.exp(sink - m))
    share = p / l[:, None]
    # A float32 dot product of D terms, times 4: of the sum, of exp, of the scale, and one to spare.
    slack = 4 * (q.shape[1] + 2) * 2.0**-24 * (np.abs(q) @ np.abs(k).T * abs(scale)).max(axis=1)
    return Attention(share @ v, m, l, m + np.log(l), share @ np.abs(v), slack, share)


def gradients(
    of: Attention, q: Array, k: Array, v: Array, dy: Array, scale: float
) -> tuple[Array, Array, Array]:
    """Return dq, dk, dv of one head in float64."""
    q, k, v, dy = (x.astype(np.float64) for x in (q, k, v, dy))
    ds = of.p * (dy @ v.T - (dy * of.o).sum(axis=1)[:, None])
    return ds @ k * scale, ds.T @ q * scale, of.p.T @ dy


def columns(x: Array) -> Array:
    """[.., S, D] as [.., D, S]."""
    return np.ascontiguousarray(x.swapaxes(-1, -2))


def tiles(rows: Array) -> Array:
    """[.., S] as [.., 128, S // 128]: row t at [t % 128, t // 128]."""
    return columns(rows.reshape(*rows.shape[:-1], -1, 128))


def rows(tiled: Array) -> Array:
    """[.., S] of [.., 128, S // 128]."""
    return tiled.swapaxes(-1, -2).reshape(*tiled.shape[:-2], -1)


def deal(x: Array, world: int, striped: bool) -> list[Array]:
    """[b, h, N, d] for each rank: a stretch, or every world-th row."""
    if striped:
        return [np.ascontiguousarray(x[:, :, rank::world]) for rank in range(world)]
    return [np.ascontiguousarray(part) for part in np.split(x, world, axis=2)]


def gather(parts: list[Array], striped: bool) -> Array:
    """Undo :func:`deal`."""
    if not striped:
        return np.concatenate(parts, axis=2)
    out = np.stack(parts, axis=3)  # [b, h, s, W, d]
    return out.reshape(*out.shape[:2], -1, out.shape[-1])


def documents(length: int, ends: tuple[int, ...]) -> tuple[Array, Array]:
    """Return for each row the first key of its document and the one after its last, float32."""
    first, last = np.zeros(length, np.float32), np.zeros(length, np.float32)
    for start, end in zip((0, *ends), ends, strict=False):
        first[start:end], last[start:end] = start, end
    return first, last
