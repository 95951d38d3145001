"""Philox4x32-10 of Salmon, Moraes, Dror and Shaw (https://doi.org/10.1145/2063384.2063405) in PyTorch.

Words are int64 tensors of values below 2^32; their products wrap as unsigned ones do, and the high half
is read off the wrapped bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOW = 0xFFFFFFFF
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
BUMPS = 0x9E3779B9, 0xBB67AE85


def halves(multiplier: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of a product of two words."""
    product = x * multiplier
    return (product >> 32) & LOW, product & LOW


def first_word(key: tuple[int, int], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Output word 0 after ten rounds."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = halves(MULTIPLIERS[0], c0)
        high1, low1 = halves(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + BUMPS[0]) & LOW, (k1 + BUMPS[1]) & LOW
    return c0


def keep(
    seed: int, dropout_p: float, batch: int, heads: int, rows: Tensor, columns: Tensor
) -> Tensor:
    """Bool [B, H, n, S] from positions of rows [1|B, n] and of columns [1|B, S]."""
    counter = torch.broadcast_tensors(
        columns[:, None, None, :] & LOW,
        rows[:, None, :, None] & LOW,
        torch.arange(heads)[None, :, None, None],
        torch.arange(batch)[:, None, None, None],
    )
    return first_word((seed & LOW, seed >> 32), counter) >= int(dropout_p * 2.0**32)
