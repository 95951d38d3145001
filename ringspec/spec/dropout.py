"""The counter-based keep mask of dropout: the same for every layout, ring size and block order.

Each (key position, query position, head, batch) has one random word: Philox4x32-10 of a counter made from these four
numbers (DROP-1). Every worker can therefore compute the same mask in the forward and in the backward pass, without
storing or sending it. The mask multiplies P in P V and also dP; lse and p are those before dropout (FWD-7).

``generator``  Philox4x32-10, output word 0
``key``        (seed mod 2^32, seed >> 32)
``counter``    (pk_j, pq_i, query head, batch), each modulo 2^32; position -1, which a negative q_offset
               can give, becomes 2^32 - 1
``kept``       iff word >= floor(dropout_p 2^32), with 0 <= dropout_p < 1 (DROP-2)

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011),
https://doi.org/10.1145/2063384.2063405.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ringspec.problem.model import Array, Booleans, Columns, Integers, Rows, Terms, columns_of

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


def philox4x32_10(counter: NDArray, key: NDArray) -> NDArray[np.uint32]:
    """Apply ten rounds of Philox to counter [..., 4] and key [..., 2] of 32-bit words; return uint32 [..., 4].

    >>> philox4x32_10(np.zeros(4, np.uint32), np.zeros(2, np.uint32)).tolist()
    [1713891541, 3781805453, 3159862348, 2600524760]
    """
    c0, c1, c2, c3 = (counter[..., word].astype(np.uint64) for word in range(4))
    k0, k1 = (key[..., word].astype(np.uint64) for word in range(2))
    for _ in range(ROUNDS):
        product0 = c0 * np.uint64(MULTIPLIERS[0])
        product1 = c2 * np.uint64(MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            (product1 >> HALF) ^ c1 ^ k0,
            product1 & LOW,
            (product0 >> HALF) ^ c3 ^ k1,
            product0 & LOW,
        )
        k0 = (k0 + np.uint64(KEY_STEPS[0])) & LOW
        k1 = (k1 + np.uint64(KEY_STEPS[1])) & LOW
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1).astype(np.uint32)


def keep_mask(
    position_q: Integers,
    position_k: Integers,
    *,
    heads: Integers,
    batches: Integers,
    dropout_p: float,
    dropout_seed: int,
) -> Booleans:
    """DROP-1, DROP-2: return booleans [B, H, n_q, n_k], True where the entry of P is kept.

    ``position_q`` and ``position_k`` are int64 [B, n] or [1, n]; ``heads`` and ``batches`` are the int64 global indices
    of query heads and batches. ``dropout_seed`` is below 2**64. The module docstring defines counter, key and threshold.
    """
    words = np.broadcast_arrays(
        position_k[:, None, None, :] % 2**32,
        position_q[:, None, :, None] % 2**32,
        heads[None, :, None, None] % 2**32,
        batches[:, None, None, None] % 2**32,
    )
    key = np.array([dropout_seed % 2**32, dropout_seed >> 32], dtype=np.uint32)
    word = philox4x32_10(np.stack(words, axis=-1), key)[..., 0]
    return word >= np.uint32(math.floor(dropout_p * 2**32))


def keep_factor(rows: Rows, columns: Columns, terms: Terms, batch: int) -> Array | float:
    """Return keep / (1 - dropout_p), which multiplies P and dP; 1.0 if dropout_p is 0 and there is no given keep mask.

    The result is float64, broadcastable to [B, H, n_q, n_k] with B = ``batch``. A keep mask from the caller replaces
    the counter-based mask (DROP-3). Only tokens are sharded, so local head and batch indices are the global ones.
    """
    if rows.keep is not None:
        return columns_of(rows.keep, columns) / (1.0 - terms.dropout_p)
    if terms.dropout_p == 0:
        return 1.0
    kept = keep_mask(
        rows.position,
        columns.position,
        heads=np.arange(terms.heads, dtype=np.int64),
        batches=np.arange(batch, dtype=np.int64),
        dropout_p=terms.dropout_p,
        dropout_seed=terms.dropout_seed,
    )
    return kept / (1.0 - terms.dropout_p)
