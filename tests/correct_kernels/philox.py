"""The keep mask of dropout: Philox4x32-10 (https://doi.org/10.1145/2063384.2063405), output word 0."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LOW, SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
FIRST, SECOND = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
STEPS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10


def first_word(key: tuple[int, int], counter: tuple[NDArray, ...]) -> NDArray:
    """Output word 0 for each counter: four arrays of one shape, whose low 32 bits count."""
    words = [x.astype(np.uint64) & LOW for x in counter]
    for turn in range(ROUNDS):
        left, right = ((key[i] + turn * STEPS[i]) & 0xFFFFFFFF for i in range(2))
        a, b = words[0] * FIRST, words[2] * SECOND
        words = [
            (b >> SHIFT) ^ words[1] ^ np.uint64(left),
            b & LOW,
            (a >> SHIFT) ^ words[3] ^ np.uint64(right),
            a & LOW,
        ]
    return words[0]


def kept(
    seed: int, dropout_p: float, batch: int, heads: int, rows: NDArray, columns: NDArray
) -> NDArray:
    """Bool [B, H, n, m] from the positions of rows [1|B, n] and of columns [1|B, m].

    Key: the halves of ``seed``; counter: key position, query position, query head, batch.
    """
    counter = np.broadcast_arrays(
        columns[:, None, None, :],
        rows[:, None, :, None],
        np.arange(heads)[None, :, None, None],
        np.arange(batch)[:, None, None, None],
    )
    word = first_word((seed & 0xFFFFFFFF, seed >> 32), tuple(counter))
    return word >= np.uint64(int(dropout_p * 2.0**32))
