"""A ring attention kernel in NumPy float32, each of whose rounding points can be replaced.

Written from the definition of attention and of the ring, with no code of ringspec: each block gives a softmax
state (m, l, o), states are merged, and the backward circulates keys and values with their gradients. A kernel
is right with :data:`BF16`; a precision fault is one or two of its points replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Rounding = Callable[[Array], Array]
Shards = list[Array]


def to(dtype: type) -> Rounding:
    """Round to a type, to nearest even, and return float32."""
    return lambda x: np.asarray(x, np.float32).astype(dtype).astype(np.float32)


def keep(x: Array) -> Array:
    """Leave float32 as it is."""
    return np.asarray(x, np.float32)


def product(a: Array, b: Array) -> Array:
    """Matrix product accumulated in float32."""
    return np.matmul(a, b)


bfloat16 = to(ml_dtypes.bfloat16)
# Points in the order in which a value meets them; what is not listed in a kernel keeps float32.
POINTS = (
    "q", "k", "v", "scores", "m", "exp", "l", "p_forward", "block_o", "carried_o", "o", "lse",
    "backward_lse", "p_wide", "p_backward", "dy_o", "delta", "dp", "ds", "block_dq", "carried_dq",
    "block_dkv", "carried_dkv", "gradients",
)  # fmt: skip
BF16: Mapping[str, Rounding] = {
    "p_forward": bfloat16,
    "p_backward": bfloat16,
    "o": bfloat16,
    "ds": bfloat16,
    "gradients": bfloat16,
}


@dataclass(frozen=True)
class Kernel:
    """``points``: rounding by name; ``matmul``: the matrix product, float32 by default.

    ``carried``: P is relative to the running maximum, as where one state goes through all blocks.
    """

    points: Mapping[str, Rounding]
    matmul: Callable[[Array, Array], Array] = product
    carried: bool = False

    def at(self, point: str, x: Array) -> Array:
        return self.points.get(point, keep)(x)


@dataclass(frozen=True)
class Problem:
    """Shards by worker: q [B, H, n, D], k and v [B, Hkv, n, d]; ``visible(a, b)`` [n, n] of two workers."""

    q: Shards
    k: Shards
    v: Shards
    scale: float
    direction: int
    visible: Callable[[int, int], NDArray[np.bool_]]

    @property
    def workers(self) -> int:
        return len(self.q)

    @property
    def group(self) -> int:
        return self.q[0].shape[1] // self.k[0].shape[1]

    def owner(self, worker: int, step: int) -> int:
        """Whose keys a worker holds in a step."""
        return (worker - self.direction * step) % self.workers


def heads(x: Array, group: int) -> Array:
    """One key head for each query head."""
    return np.repeat(x, group, axis=1)


def over_group(x: Array, group: int) -> Array:
    batch, count, *rest = x.shape
    return x.reshape(batch, count // group, group, *rest).sum(axis=2, dtype=np.float32)


def scores(kernel: Kernel, problem: Problem, worker: int, owner: int) -> Array:
    """s [B, H, n, n] of one block; -inf where the mask hides a pair."""
    q = kernel.at("q", problem.q[worker])
    k = kernel.at("k", heads(problem.k[owner], problem.group))
    s = kernel.at("scores", np.float32(problem.scale) * kernel.matmul(q, k.swapaxes(2, 3)))
    return np.where(problem.visible(worker, owner), s, np.float32(-np.inf))


def shifted(x: Array, m: Array) -> Array:
    """exp(x - m); 0 where x is -inf, also where m is."""
    return np.exp(x - np.where(np.isneginf(m), np.float32(0), m))


def forward(kernel: Kernel, problem: Problem) -> tuple[Shards, Shards]:
    """o and lse of each worker."""
    outputs, sums = [], []
    for worker in range(problem.workers):
        q, v = problem.q[worker], problem.v[worker]
        m = np.full(q.shape[:3], -np.inf, np.float32)
        l, o = np.zeros_like(m), np.zeros((*q.shape[:3], v.shape[3]), np.float32)
        for step in range(problem.workers):
            owner = problem.owner(worker, step)
            s = scores(kernel, problem, worker, owner)
            block_m = kernel.at("m", s.max(axis=3))
            block_m = np.maximum(m, block_m) if kernel.carried else block_m
            e = kernel.at("exp", shifted(s, block_m[..., None]))
            v = kernel.at("v", heads(problem.v[owner], problem.group))
            block_o = kernel.at("block_o", kernel.matmul(kernel.at("p_forward", e), v))
            block_l = kernel.at("l", e.sum(axis=3, dtype=np.float32))
            top = np.maximum(m, block_m)
            old, new = shifted(m, top), shifted(block_m, top)
            l = kernel.at("l", old * l + new * block_l)
            o = kernel.at("carried_o", old[..., None] * o + new[..., None] * block_o)
            m = top
        some = l > 0
        outputs.append(kernel.at("o", o / np.where(some, l, np.float32(1))[..., None]))
        log = m + np.log(np.where(some, l, np.float32(1)))
        sums.append(kernel.at("lse", np.where(some, log, np.float32(-np.inf))))
    return outputs, sums


def backward(
    kernel: Kernel, problem: Problem, dy: Shards, o: Shards, lse: Shards
) -> tuple[Shards, Shards, Shards]:
    """dq, dk and dv of each worker from dy and the results of the forward."""
    dq = [np.zeros_like(x) for x in problem.q]
    dk, dv = ([np.zeros_like(x) for x in side] for side in (problem.k, problem.v))
    delta = [
        kernel.at("delta", kernel.at("dy_o", a * b).sum(axis=3, dtype=np.float32))
        for a, b in zip(dy, o, strict=True)
    ]
    read = [kernel.at("backward_lse", x) for x in lse]
    for step in range(problem.workers):
        for worker in range(problem.workers):
            owner = problem.owner(worker, step)
            s = scores(kernel, problem, worker, owner)
            p = kernel.at("p_wide", shifted(s, read[worker][..., None]))
            v = kernel.at("v", heads(problem.v[owner], problem.group))
            k = kernel.at("k", heads(problem.k[owner], problem.group))
            dp = kernel.matmul(dy[worker], v.swapaxes(2, 3)) - delta[worker][..., None]
            ds = kernel.at("ds", p * kernel.at("dp", dp))
            scale = np.float32(problem.scale)
            shares = (
                scale * kernel.matmul(ds.swapaxes(2, 3), problem.q[worker]),
                kernel.matmul(kernel.at("p_backward", p).swapaxes(2, 3), dy[worker]),
            )
            for total, share in zip((dk, dv), shares, strict=True):
                block = kernel.at("block_dkv", over_group(share, problem.group))
                total[owner] = kernel.at("carried_dkv", total[owner] + block)
            block = kernel.at("block_dq", scale * kernel.matmul(ds, k))
            dq[worker] = kernel.at("carried_dq", dq[worker] + block)
    return tuple([kernel.at("gradients", x) for x in side] for side in (dq, dk, dv))
