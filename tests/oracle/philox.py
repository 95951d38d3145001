"""Philox4x32-10 and the dropout keep mask, written from the paper.

Source: J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC 2011, section 3.3, and the file `kat_vectors` of its Random123 library. Nothing here comes
from ringspec. The scalar function works on Python integers; the array function does the same
for many counters at once and is tested to equal it.
"""

from fractions import Fraction
from math import floor

import numpy as np

MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9  # golden ratio
WEYL_1 = 0xBB67AE85  # sqrt(3) - 1
WORD = 0xFFFFFFFF
ROUNDS = 10

# (counter, key, output) of Random123's kat_vectors, generator "philox4x32 10".
KNOWN_ANSWERS = (
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def philox4x32_10(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Return the four 32-bit output words for one counter (4 words) and one key (2 words).

    >>> [hex(word) for word in philox4x32_10((0, 0, 0, 0), (0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product_0 = MULTIPLIER_0 * c0
        product_1 = MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 & WORD,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 & WORD,
        )
        k0 = (k0 + WEYL_0) & WORD
        k1 = (k1 + WEYL_1) & WORD
    return c0, c1, c2, c3


def threshold(dropout_p: float) -> int:
    """Return floor(dropout_p * 2^32) of the float64 taken exactly."""
    return floor(Fraction(dropout_p) * 2**32)


def keep_one(
    position_q: int, position_k: int, head: int, batch: int, dropout_p: float, seed: int
) -> bool:
    """Return True where the definition keeps the pair (scalar, Python integers).

    >>> keep_one(0, 0, 0, 0, 0.25, 0)   # word 0 is 0x6627e8d5, 0.25 * 2^32 is 0x40000000
    True
    >>> keep_one(0, 0, 0, 0, 0.5, 0)
    False
    """
    counter = (position_k & WORD, position_q & WORD, head & WORD, batch & WORD)
    key = (seed & WORD, (seed >> 32) & WORD)
    return philox4x32_10(counter, key)[0] >= threshold(dropout_p)


def first_word_array(
    c0: np.ndarray, c1: np.ndarray, c2: np.ndarray, c3: np.ndarray, seed: int
) -> np.ndarray:
    """Return output word 0 for broadcast arrays of counter words: uint64 below 2^32."""
    word = np.uint64(WORD)
    shift = np.uint64(32)
    c0, c1, c2, c3 = (
        np.asarray(c).astype(np.int64).astype(np.uint64) & word for c in (c0, c1, c2, c3)
    )
    c0, c1, c2, c3 = np.broadcast_arrays(c0, c1, c2, c3)
    k0 = seed & WORD
    k1 = (seed >> 32) & WORD
    for _ in range(ROUNDS):
        product_0 = np.uint64(MULTIPLIER_0) * c0
        product_1 = np.uint64(MULTIPLIER_1) * c2
        c0 = (product_1 >> shift) ^ c1 ^ np.uint64(k0)
        c1 = product_1 & word
        c2 = (product_0 >> shift) ^ c3 ^ np.uint64(k1)
        c3 = product_0 & word
        k0 = (k0 + WEYL_0) & WORD
        k1 = (k1 + WEYL_1) & WORD
    return c0


def keep_array(
    positions_q: np.ndarray,
    positions_k: np.ndarray,
    heads: np.ndarray,
    batches: np.ndarray,
    dropout_p: float,
    seed: int,
) -> np.ndarray:
    """Return the keep mask bool [B, H, Sq, Sk] for positions [B|1, Sq] and [B|1, Sk].

    >>> zero = np.zeros((1, 1), dtype=np.int64)
    >>> keep_array(zero, zero, np.array([0]), np.array([0]), 0.25, 0).tolist()
    [[[[True]]]]
    """
    word = first_word_array(
        positions_k[:, None, None, :],
        positions_q[:, None, :, None],
        heads[None, :, None, None],
        batches[:, None, None, None],
        seed,
    )
    return word >= np.uint64(threshold(dropout_p))
