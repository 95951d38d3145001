"""Problems that try the mathematics of the kernels, and a plain dense answer to each, in float64.

The dense answer loops over rows and writes the definition down once more, without blocks, workers or
a running maximum; its gradients are differences of its forward.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from correct_kernels.ring import Ring
from numpy.typing import NDArray

Array = NDArray[Any]
BATCH, HEADS, KEY_HEADS, HEAD_DIM, VALUE_DIM = 2, 4, 2, 5, 3
SCALE = 0.37

TERMS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (4, 0)},
    "one-sided-window": {"window": (None, 2)},
    "segments": {"segments": True},
    "bounds": {"bounds": True},
    "mask-and-sinks": {"mask": True, "sinks": True},
    "bias-softcap": {"bias": (BATCH, 1, None, None), "softcap": 1.5, "causal": True},
    "key-bias": {"bias": (1, HEADS, 1, None), "sinks": True},
    "row-bias": {"bias": (1, 1, None, 1)},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 2**40 + 5},
    "keep": {"dropout_p": 0.25, "keep": True, "causal": True},
}
LAYOUTS = ("contiguous", "striped", "zigzag", "padded")


@dataclasses.dataclass(frozen=True)
class Whole:
    """The problem in the order of the tokens: arrays of :class:`Ring` without workers, and dy, dlse."""

    tensors: dict[str, Array]
    terms: dict[str, Any]
    dy: Array
    dlse: Array


def whole(kind: str, tokens_q: int, tokens_k: int, seed: int = 0) -> Whole:
    """Random numbers for the terms of ``kind``."""
    rng = np.random.default_rng([seed, list(TERMS).index(kind)])
    wanted = dict(TERMS[kind])
    tensors = {
        "q": rng.normal(size=(BATCH, HEADS, tokens_q, HEAD_DIM)) * 2,
        "k": rng.normal(size=(BATCH, KEY_HEADS, tokens_k, HEAD_DIM)),
        "v": rng.normal(size=(BATCH, KEY_HEADS, tokens_k, VALUE_DIM)),
    }
    if wanted.pop("segments", False):
        tensors["segments_q"] = np.sort(rng.integers(-1, 3, (BATCH, tokens_q)), axis=1)
        tensors["segments_k"] = np.sort(rng.integers(-1, 3, (BATCH, tokens_k)), axis=1)
    if wanted.pop("bounds", False):
        tensors["bound_min"] = rng.integers(-1, tokens_k, (1, tokens_q))
        tensors["bound_max"] = tensors["bound_min"] + rng.integers(0, 8, (1, tokens_q))
    pairs = (BATCH, HEADS, tokens_q, tokens_k)
    if "mask" in wanted:
        tensors["mask"] = rng.random(pairs) < 0.6
        tensors["mask"][:, :, 3] = False  # a row without keys
    if "keep" in wanted:
        tensors["keep"] = rng.random(pairs) < 0.75
    if "bias" in wanted:
        shape = [given or full for given, full in zip(wanted["bias"], pairs, strict=True)]
        tensors["bias"] = rng.normal(size=shape)
        tensors["bias"][rng.random(shape) < 0.2] = -np.inf
    if "sinks" in wanted:
        tensors["sinks"] = rng.normal(size=(HEADS, 2))
    terms = {name: x for name, x in wanted.items() if name not in tensors}
    dy, dlse = rng.normal(size=(*pairs[:3], VALUE_DIM)), rng.normal(size=pairs[:3])
    return Whole(tensors, terms, dy, dlse)


def table(layout: str, tokens: int, workers: int) -> Array:
    """Token of each worker's slot [W, n], -1 for padding."""
    if layout == "striped":
        return np.arange(tokens).reshape(-1, workers).T
    if layout == "contiguous":
        return np.arange(tokens).reshape(workers, -1)
    if layout == "zigzag":
        chunks = np.arange(tokens).reshape(2 * workers, -1)
        return np.stack([np.r_[chunks[r], chunks[-1 - r]] for r in range(workers)])
    order = np.random.default_rng(7).permutation(tokens)
    return np.stack([np.r_[part, -1] for part in order.reshape(workers, -1)])


def dealt(x: Array, index: Array, axis: int) -> list[Array]:
    """The rows of each worker; padding gets zeros."""
    parts = []
    for tokens in index:
        part = np.take(x, np.maximum(tokens, 0), axis=axis)
        shape = [1] * part.ndim
        shape[axis] = len(tokens)
        parts.append(np.where(tokens.reshape(shape) >= 0, part, np.zeros_like(part)))
    return parts


def ring_of(problem: Whole, layout: str, workers: int, **more: Any) -> tuple[Ring, Array, Array]:
    """The ring of a problem in float64, and the tables of queries and keys."""
    index_q, index_k = (
        table(layout, problem.tensors[name].shape[2], workers) for name in ("q", "k")
    )
    tensors: dict[str, Any] = {}
    for name, x in problem.tensors.items():
        if name == "sinks":
            tensors[name] = x
        elif x.ndim == 4:
            shared = x.shape[2] == 1
            index = index_k if name in ("k", "v") else index_q
            tensors[name] = [x] * workers if shared else dealt(x, index, 2)
        else:
            tensors[name] = dealt(x, index_k if name == "segments_k" else index_q, 1)
    places = {
        f"{what}_{side}": list(np.maximum(index, 0)[:, None] if what == "position" else index)
        for what in ("token", "position")
        for side, index in (("q", index_q), ("k", index_k))
    }
    ring = Ring(**tensors, **places, **problem.terms, scale=SCALE, format="float64", **more)
    return ring, index_q, index_k


def dense_row(problem: Whole, keep: Array | None, b: int, h: int, i: int) -> tuple[Array, float]:
    """o and lse of one row, straight from the definition."""
    tensors, terms = problem.tensors, problem.terms
    j = np.arange(tensors["k"].shape[2])
    head = h // (HEADS // KEY_HEADS)
    s = SCALE * tensors["k"][b, head] @ tensors["q"][b, h, i]
    seen = np.ones(len(j), dtype=bool)
    if "bias" in tensors:
        row = np.broadcast_to(tensors["bias"], (BATCH, HEADS, *tensors["bias"].shape[2:]))[b, h]
        s = s + row[min(i, len(row) - 1)]
        seen &= s > -np.inf
    if terms.get("softcap"):
        s = terms["softcap"] * np.tanh(s / terms["softcap"])
    if terms.get("causal"):
        seen &= j <= i
    left, right = terms.get("window") or (None, None)
    seen &= (j - i >= -left) if left is not None else True
    seen &= (j - i <= right) if right is not None else True
    if "segments_q" in tensors:
        own = tensors["segments_q"][b, i]
        seen &= (tensors["segments_k"][b] == own) & (own >= 0)
    if "bound_min" in tensors:
        seen &= (j >= tensors["bound_min"][0, i]) & (j < tensors["bound_max"][0, i])
    if "mask" in tensors:
        seen &= tensors["mask"][b, h, i]
    sinks = tensors["sinks"][h] if "sinks" in tensors else np.zeros(0)
    total = np.exp(s[seen]).sum() + np.exp(sinks).sum()
    if total == 0:
        return np.zeros(VALUE_DIM), -np.inf
    p = np.where(seen, np.exp(np.where(seen, s, 0.0)), 0.0) / total
    if keep is not None:
        p = p * keep[b, h, i] / (1 - terms["dropout_p"])
    return p @ tensors["v"][b, head], float(np.log(total))


def dense(problem: Whole, keep: Array | None = None) -> dict[str, Array]:
    """o [B, H, S, Dv] and lse [B, H, S]."""
    o, lse = np.zeros_like(problem.dy), np.zeros_like(problem.dlse)
    for index in np.ndindex(lse.shape):
        o[index], lse[index] = dense_row(problem, keep, *index)
    return {"o": o, "lse": lse}


def loss(problem: Whole, keep: Array | None) -> float:
    """The number whose gradients dy and dlse stand for; rows without keys contribute nothing."""
    found = dense(problem, keep)
    lse = np.where(np.isfinite(found["lse"]), found["lse"], 0.0)
    return float((found["o"] * problem.dy).sum() + (lse * problem.dlse).sum())


def difference(
    problem: Whole, keep: Array | None, name: str, direction: Array, h: float = 2e-4
) -> float:
    """The derivative of the loss along a direction of one tensor, by a difference of fourth order."""

    def at(t: float) -> float:
        moved = problem.tensors[name] + t * direction
        return loss(dataclasses.replace(problem, tensors={**problem.tensors, name: moved}), keep)

    return (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
