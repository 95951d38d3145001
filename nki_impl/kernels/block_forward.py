"""Attention of one query tile (128 rows) over a stretch of keys, as an unnormalised output with softmax statistics.

A *stretch* is a range of at most 2048 keys. Its scores are all on chip at once, so the row maximum is taken before the
first exponential, and nothing is rescaled within a stretch.

Source of the method: Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691, algorithm 1.
"""

from __future__ import annotations

from nki_impl.kernels.masks import FLOOR, hide_scaled
from nki_impl.kernels.merge import Partial
from nki_impl.kernels.tiles import (
    KEYS,
    ROWS,
    Tensor,
    tile_count,
    transpose_chunks,
    zero_padding,
)
from nki_impl.lang import nisa, nl


def block_forward(
    q: Tensor, k: Tensor, v: Tensor, low: Tensor, high: Tensor, first_key: int, scale: float
) -> Partial:
    """Compute the partial result of a query tile over the keys first_key .. first_key + n - 1.

    ``q`` [D, 128], ``k`` [D, n], ``v`` [128, tiles of n, D] are on chip and have one dtype; n is at most STRETCH. If n is
    not a multiple of 128, v is padded with zeros. ``low``, ``high`` [128, 1] float32: a row sees the keys
    low <= j < high; both are None without a mask.
    """
    scores, n = masked_scores(q, k, low, high, first_key, scale)
    length = scores.shape[1]
    p = nl.ndarray((ROWS, tile_count(length) * ROWS), dtype=v.dtype, buffer=nl.sbuf)
    zero_padding(p, length)
    l = nl.ndarray((ROWS, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(
        dst=p[:, :length],
        op=nl.exp,
        data=scores,
        bias=n,
        reduce_op=nl.add,
        reduce_res=l,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    return Partial(weighted_values(p, v), l, n)


def masked_scores(
    q: Tensor, k: Tensor, low: Tensor, high: Tensor, first_key: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the scores scale * q k [128, n], with HIDDEN for masked keys, and the negated row maximum [128, 1]."""
    length = k.shape[1]
    scores = nl.ndarray((ROWS, length), dtype=nl.float32, buffer=nl.sbuf)
    tops = nl.ndarray((ROWS, (length + KEYS - 1) // KEYS), dtype=nl.float32, buffer=nl.sbuf)
    for start in range(0, length, KEYS):
        stop, i = min(start + KEYS, length), start // KEYS
        product = nl.ndarray((ROWS, stop - start), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=product, stationary=q, moving=k[:, start:stop], accumulate=False)
        tile, top = scores[:, start:stop], tops[:, i : i + 1]
        if high is not None:
            hide_scaled(tile, product, scale, low, high, first_key + start, top)
        else:
            nisa.tensor_scalar_reduce(
                dst=tile, data=product, op0=nl.multiply, operand0=scale, reduce_op=nl.maximum, reduce_res=top
            )  # fmt: skip
    n = nl.ndarray((ROWS, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=n, op=nl.maximum, data=tops, axis=1, negate=True, keepdims=True)
    nisa.tensor_scalar(dst=n, data=n, op0=nl.minimum, operand0=-FLOOR)
    return scores, n


def weighted_values(p: Tensor, v: Tensor) -> Tensor:
    """Compute o = P V [128, D] float32 from P [128, n] and v [128, n / 128, D], accumulated in one PSUM bank."""
    length, width = p.shape[1], v.shape[2]
    product = nl.ndarray((ROWS, width), dtype=nl.float32, buffer=nl.psum)
    for start in range(0, length, KEYS):
        stop = min(start + KEYS, length)
        chunks = (stop - start) // ROWS
        turned = nl.ndarray((ROWS, chunks, ROWS), dtype=p.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=turned, src=transpose_chunks(p[:, start:stop]))
        for c in range(chunks):
            chunk = start // ROWS + c
            nisa.nc_matmul(
                dst=product, stationary=turned[:, c, :], moving=v[:, chunk, :], accumulate=chunk > 0
            )
    o = nl.ndarray((ROWS, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=o, src=product)
    return o
