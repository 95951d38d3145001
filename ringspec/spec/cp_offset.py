"""The causal offset between two blocks, which gives their causal mask in local indices (RING-8 to RING-10).

Query i of worker a attends to key j of worker b iff j <= i + offset, where i and j count from the start of their
blocks. Context parallel (cp) kernels use this offset. The other files compare global positions
(:mod:`~ringspec.spec.masks`), with the same result. Each of the W = ``workers`` workers holds ``n_q`` queries and
``n_k`` keys. The query with global index i has position i + ``q_offset``.
"""

from __future__ import annotations


def cp_offset(
    layout: str, a: int, b: int, *, workers: int, n_q: int, n_k: int, q_offset: int = 0
) -> int:
    """RING-8, RING-9: the offset for queries of worker a and keys of worker b in the given layout::

        contiguous    a n_q - b n_k + q_offset; for n_q = n_k = n and q_offset = 0 this is (a - b) n:
                      all pairs are visible if a > b, the lower triangle if a = b, none if a < b
        striped       floor((a + q_offset - b) / W); for q_offset = 0 this is 0 if a >= b, else -1

    >>> cp_offset("contiguous", 2, 1, workers=4, n_q=8, n_k=8)
    8
    >>> [cp_offset("striped", a, 1, workers=4, n_q=8, n_k=8) for a in range(4)]
    [-1, 0, 0, 0]
    """
    if layout == "contiguous":
        return a * n_q - b * n_k + q_offset
    return (a + q_offset - b) // workers  # striped


def zigzag_offsets(
    a: int, b: int, *, workers: int, n_q: int, n_k: int, q_offset: int = 0
) -> tuple[tuple[int, int], tuple[int, int]]:
    """RING-10: the offsets between the two query chunks of worker a and the two key chunks of worker b under 'zigzag'.

    The offset is c n_q/2 - d n_k/2 + q_offset for query chunk c and key chunk d. Worker r holds chunks r and
    2W - 1 - r, in this order. The result is indexed [query chunk][key chunk], in the same order. Local indices count
    from the start of each chunk, which has half of the worker's tokens.
    """
    chunk_q, chunk_k = n_q // 2, n_k // 2
    low, high = (
        tuple(c * chunk_q - d * chunk_k + q_offset for d in (b, 2 * workers - 1 - b))
        for c in (a, 2 * workers - 1 - a)
    )
    return (low[0], low[1]), (high[0], high[1])
