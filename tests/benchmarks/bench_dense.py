"""Dense attention and rings of the fast path against the clock, beside what bounds them.

Every number is the least of several interleaved runs, and every ratio is of runs in one process: on a
shared machine seconds of different minutes say little.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from benchmarks.bench_products import backward_products, forward_products

from ringspec import fast
from ringspec.fast.backward import Seeds, operands_of
from ringspec.fast.dense import prepared
from ringspec.fast.passes import parts_of
from ringspec.fast.team import run_tasks
from ringspec.fast.threads import controller
from ringspec.rings.ring import ring

Line = dict[str, Any]
Timed = dict[str, Callable[[], object]]

HEADS, WIDTH = 4, 128
# Flops of a visible pair in units of D: two products of 2 D forward, five backward.
FLOPS = {"forward": 4, "backward": 10}
# Thread pools of other libraries spin for a while after a call.
PAUSE = 0.05
MATRIX, MATRICES = 1024, 4
# Naive attention holds a few S x S matrices of one head.
NAIVE_LONGEST = 4096


@dataclass(frozen=True)
class Setting:
    """One problem of B = 1, with H = 4 and D = 128 unless said otherwise, to be timed on ``threads``."""

    dtype: str
    length: int
    causal: bool
    threads: int
    repeats: int
    heads: int = HEADS
    width: int = WIDTH

    @property
    def pairs(self) -> int:
        """Visible pairs of all heads."""
        n = self.length
        return self.heads * (n * (n + 1) // 2 if self.causal else n * n)

    def tensors(self) -> tuple[Any, ...]:
        random = np.random.default_rng(self.length)
        shape = (1, self.heads, self.length, self.width)
        return tuple(random.standard_normal(shape).astype(self.dtype) for _ in range(4))


def interleaved(timed: Timed, repeats: int) -> dict[str, float]:
    """The least wall seconds of each function, called in turn after one call that is not counted."""
    least = dict.fromkeys(timed, math.inf)
    for repeat in range(repeats + 1):
        for name, function in timed.items():
            time.sleep(PAUSE)
            start = time.perf_counter()
            function()
            seconds = time.perf_counter() - start
            if repeat > 0:
                least[name] = min(least[name], seconds)
    return least


def square_products(dtype: str, threads: int) -> Callable[[], None]:
    """Products of square matrices, which BLAS does fastest, in each thread."""
    a = np.ones((MATRIX, MATRIX), dtype)
    outs = [np.empty_like(a) for _ in range(threads)]

    def several(out: Any) -> None:
        for _ in range(MATRICES):
            np.matmul(a, a, out=out)

    return lambda: run_tasks([lambda out=out: several(out) for out in outs], threads)  # type: ignore[misc]


def square_rate(seconds: float, threads: int) -> float:
    """Flops a second of :func:`square_products`."""
    return 2.0 * MATRICES * threads * MATRIX**3 / seconds


def dense_lines(setting: Setting) -> list[Line]:
    """Forward and backward of one problem, with ratios to products, torch, naive and the bound."""
    q, k, v, dy = setting.tensors()
    options: Any = {"causal": setting.causal}
    keywords: Any = {"dtype": setting.dtype, "threads": setting.threads, **options}
    result = fast.attention(q, k, v, **keywords)
    _, ahead = prepared(q, k, v, setting.dtype, None, options)
    _, job = prepared(q, k, v, setting.dtype, None, options, backward=True)
    seeds = Seeds(dy, np.zeros(q.shape[:3]), np.zeros(q.shape[:3]))
    threads = setting.threads
    operands = {at: operands_of(job, seeds, *at) for at in np.ndindex(*k.shape[:2])}
    timed: Timed = {
        "square": square_products(setting.dtype, threads),
        "forward": lambda: fast.attention(q, k, v, **keywords),
        "forward products": lambda: forward_products(ahead, threads),
        "backward": lambda: fast.attention_backward(q, k, v, dy, forward=result, **keywords),
        "backward products": lambda: backward_products(job, operands, parts_of(job), threads),
    }
    timed |= torch_functions(q, k, v, dy, setting.causal, threads)
    if setting.length <= NAIVE_LONGEST:
        for name, function in naive_functions(q, k, v, dy, setting.causal).items():
            timed[name] = functools.partial(with_blas_threads, function, threads)
    seconds = interleaved(timed, setting.repeats)
    rate = square_rate(seconds["square"], threads)
    lines = []
    for name, flops in FLOPS.items():
        bound = flops * setting.width * setting.pairs / rate
        line: Line = {
            "part": "dense",
            "pass": name,
            "dtype": setting.dtype,
            "length": setting.length,
            "causal": setting.causal,
            "seconds": seconds[name],
            "share of bound": bound / seconds[name],
        }
        for other in ("products", "torch", "naive"):
            if f"{name} {other}" in seconds:
                line[f"times {other}"] = seconds[name] / seconds[f"{name} {other}"]
        lines.append(line)
    return lines


def torch_functions(q: Any, k: Any, v: Any, dy: Any, causal: bool, threads: int) -> Timed:
    """Forward and backward of PyTorch's scaled_dot_product_attention on the CPU; nothing without torch."""
    try:
        import torch
    except ImportError:
        return {}
    torch.set_num_threads(threads)
    leaves = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    seed = torch.from_numpy(dy)
    attention = torch.nn.functional.scaled_dot_product_attention
    o = attention(*leaves, is_causal=causal)

    def forward() -> None:
        with torch.no_grad():
            attention(*leaves, is_causal=causal)

    def backward() -> None:
        torch.autograd.grad(o, leaves, seed, retain_graph=True)

    return {"forward torch": forward, "backward torch": backward}


def with_blas_threads(function: Callable[[], object], threads: int) -> None:
    """Call a function that has no threads of its own: BLAS's are then the only ones."""
    with controller().limit(limits=threads, user_api="blas"):
        function()


def naive_functions(q: Any, k: Any, v: Any, dy: Any, causal: bool) -> Timed:
    """What one would write first: whole S x S matrices, head by head, with BLAS's own threads."""
    length, scale = q.shape[2], q.dtype.type(1 / math.sqrt(q.shape[3]))
    hidden = ~np.tri(length, dtype=np.bool_) if causal else None

    def weights(h: int) -> Any:
        s = scale * (q[0, h] @ k[0, h].T)
        if hidden is not None:
            s[hidden] = -np.inf
        e = np.exp(s - s.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)

    def forward() -> None:
        for h in range(q.shape[1]):
            weights(h) @ v[0, h]

    def backward() -> None:
        for h in range(q.shape[1]):
            p = weights(h)
            dp = dy[0, h] @ v[0, h].T
            ds = p * (dp - (p * dp).sum(axis=1, keepdims=True))
            scale * (ds @ k[0, h]), scale * (ds.T @ q[0, h]), p.T @ dy[0, h]

    return {"forward naive": forward, "backward naive": backward}


def ring_lines(setting: Setting, workers: Sequence[int]) -> list[Line]:
    """Rings in lockstep with the fast blocks: forward, and forward with backward, beside W = 1."""
    q, k, v, dy = setting.tensors()
    pieces = fast.pieces(threads=setting.threads)
    timed: Timed = {"square": square_products(setting.dtype, setting.threads)}
    for name, seed in (("forward", None), ("both", dy)):
        for W in workers:

            def run(W: int = W, seed: Any = seed) -> None:
                ring(
                    q,
                    k,
                    v,
                    seed,
                    workers=W,
                    causal=setting.causal,
                    recipe=setting.dtype,
                    layout="zigzag" if setting.causal else "contiguous",
                    **pieces,
                )

            timed[f"{name} {W}"] = run
    seconds = interleaved(timed, setting.repeats)
    rate = square_rate(seconds["square"], setting.threads)
    lines = []
    for name, flops in (("forward", FLOPS["forward"]), ("both", sum(FLOPS.values()))):
        bound = flops * setting.width * setting.pairs / rate
        for W in workers:
            lines.append(
                {
                    "part": "ring",
                    "pass": name,
                    "dtype": setting.dtype,
                    "length": setting.length,
                    "causal": setting.causal,
                    "workers": W,
                    "seconds": seconds[f"{name} {W}"],
                    "share of bound": bound / seconds[f"{name} {W}"],
                    "times fewest workers": seconds[f"{name} {W}"]
                    / seconds[f"{name} {workers[0]}"],
                }
            )
    return lines


def machine_lines(threads: int) -> list[Line]:
    """Flops a second of square products: with one thread each, and as many threads."""
    lines = []
    for dtype in ("float32", "float64"):
        seconds = interleaved({"square": square_products(dtype, threads)}, 5)["square"]
        lines.append(
            {"part": "machine", "dtype": dtype, "gigaflops": square_rate(seconds, threads) / 1e9}
        )
    return lines
