"""PyTorch's attention on the CPU, as functions that ``ringspec bench`` puts beside the fast path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def torch_functions(
    q: Any, k: Any, v: Any, dy: Any, causal: bool, threads: int
) -> dict[str, Callable[[], object]]:
    """Forward and backward of scaled_dot_product_attention; nothing where torch is not installed.

    q, k, v, dy are NumPy arrays [B, H, S, D] of one type; torch gets ``threads`` threads.
    """
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
