"""The gradients of one stretch (at most 2048 rows) of queries against one stretch of keys.

The probabilities P are recomputed from the scores and the lse of the forward pass; nothing is rescaled. The gradients
dQ, dK and dV are stored by columns, [D, n], like q, k and v, so that every product is 512 wide. dV^T and dK^T of a key
tile (512 keys) are accumulated in PSUM over all query tiles (128 rows). dQ^T of four query tiles is accumulated in PSUM
over the chunks of 128 keys of a key tile. dS, the gradient of the scores, is the only matrix [rows, keys] that is
transposed.

Source of the method: Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691, algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from nki_impl.kernels.masks import hide_scaled
from nki_impl.kernels.tiles import (
    KEYS,
    ROWS,
    Tensor,
    tile_count,
    transpose_chunks,
    zero_padding,
)
from nki_impl.lang import nisa, nl

TILES = 4
"""Query tiles whose dQ^T is computed by one product: 4 * 128 columns."""


@dataclass
class Queries(nl.NKIObject):  # type: ignore[name-defined]
    """A stretch of query rows on chip, which starts at row ``first``.

    ``q``, ``dy`` [D, n] and ``q_rows``, ``dy_rows`` [128, n / 128, D] have the input dtype. ``bias`` (-lse), ``delta``
    (dy_o_sum), ``low`` and ``high`` are [128, n / 128] float32. A row sees the keys low <= j < high; ``low`` and
    ``high`` are None without a mask. ``dq`` [D, n] float32 is the accumulator. n is padded to whole tiles; in the
    padding, q and dy are 0, and so are all their gradients.
    """

    first: int
    q: Tensor
    q_rows: Tensor
    dy: Tensor
    dy_rows: Tensor
    bias: Tensor
    delta: Tensor
    low: Tensor
    high: Tensor
    dq: Tensor


@dataclass
class Keys(nl.NKIObject):  # type: ignore[name-defined]
    """A stretch of keys on chip, which starts at key ``first``.

    ``k``, ``v`` [D, n] and ``k_rows`` [128, tiles of n, D], padded with zeros, have the input dtype. The accumulators
    ``dk`` and ``dv`` [D, n] are float32; without mixed precision, they have the input dtype.
    """

    first: int
    k: Tensor
    k_rows: Tensor
    v: Tensor
    dk: Tensor
    dv: Tensor


def block_backward(queries: Queries, keys: Keys, scale: float, is_triangle: bool) -> None:
    """Add the gradients of ``queries`` against ``keys`` to ``queries.dq``, ``keys.dk`` and ``keys.dv``.

    ``is_triangle``: no row attends to a key with a larger index than its own, so tiles above the diagonal are left out.
    """
    for start in range(0, keys.k.shape[1], KEYS):
        stop = min(start + KEYS, keys.k.shape[1])
        first = 0
        if is_triangle:
            first = max(0, (keys.first + start - queries.first) // ROWS)
        if first < queries.q.shape[1] // ROWS:
            key_tile(queries, keys, (start, stop), first, scale)


def key_tile(queries: Queries, keys: Keys, span: tuple[int, int], first: int, scale: float) -> None:
    """Compute the gradients of one key tile against query tile ``first`` and all later ones.

    ``span`` is (start, stop) of the key tile in its stretch.
    """
    start, stop = span
    width = keys.k.shape[0]
    dk = nl.ndarray((width, stop - start), dtype=nl.float32, buffer=nl.psum)
    dv = nl.ndarray((width, stop - start), dtype=nl.float32, buffer=nl.psum)
    tiles = queries.q.shape[1] // ROWS
    for group in range(first - first % TILES, tiles, TILES):
        begin, end = max(group, first), min(group + TILES, tiles)
        chunks = tile_count(stop - start)
        turned = nl.ndarray((ROWS, chunks, TILES * ROWS), dtype=keys.k.dtype, buffer=nl.sbuf)
        for t in range(begin, end):
            p, ds = score_tile(queries, keys, span, t, scale)
            nisa.nc_matmul(
                dst=dv, stationary=queries.dy_rows[:, t, :], moving=p, accumulate=t > first
            )
            nisa.nc_matmul(
                dst=dk,
                stationary=queries.q_rows[:, t, :],
                moving=ds[:, : stop - start],
                accumulate=t > first,
            )
            place = (t - group) * ROWS
            nisa.tensor_copy(dst=turned[:, :, place : place + ROWS], src=transpose_chunks(ds))
        add_dq(
            queries,
            keys,
            start,
            turned[:, :, (begin - group) * ROWS : (end - group) * ROWS],
            begin,
            scale,
        )
    add_scaled(keys.dk[:, start:stop], dk, scale)
    add_scaled(keys.dv[:, start:stop], dv, 1.0)


def score_tile(
    queries: Queries, keys: Keys, span: tuple[int, int], t: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute P and dS [128, keys] of one query tile, rounded to the input dtype for the matrix products.

    dS is padded with zeros to whole chunks of 128 keys. P = exp(scale * q k - lse). dS = P * (dy v - delta) uses P before rounding.
    """
    start, stop = span
    tile = (ROWS, stop - start)
    rows = slice(t * ROWS, (t + 1) * ROWS)
    products = nl.ndarray(tile, dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(
        dst=products, stationary=queries.q[:, rows], moving=keys.k[:, start:stop], accumulate=False
    )
    p_exact = nl.ndarray(tile, dtype=nl.float32, buffer=nl.sbuf)
    bias = queries.bias[:, t : t + 1]
    if queries.high is None:
        nisa.activation(dst=p_exact, op=nl.exp, data=products, bias=bias, scale=scale)
    else:
        low, high = queries.low[:, t : t + 1], queries.high[:, t : t + 1]
        scores = nl.ndarray(tile, dtype=nl.float32, buffer=nl.sbuf)
        hide_scaled(scores, products, scale, low, high, keys.first + start, None)
        nisa.activation(dst=p_exact, op=nl.exp, data=scores, bias=bias)
    p = nl.ndarray(tile, dtype=keys.k.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=p, src=p_exact, engine=nisa.engine.scalar)

    dp = nl.ndarray(tile, dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(
        dst=dp, stationary=queries.dy[:, rows], moving=keys.v[:, start:stop], accumulate=False
    )
    ds = nl.ndarray((ROWS, tile_count(stop - start) * ROWS), dtype=keys.k.dtype, buffer=nl.sbuf)
    zero_padding(ds, stop - start)
    nisa.scalar_tensor_tensor(
        dst=ds[:, : stop - start],
        data=dp,
        op0=nl.subtract,
        operand0=queries.delta[:, t : t + 1],
        op1=nl.multiply,
        operand1=p_exact,
    )
    return p, ds


def add_dq(
    queries: Queries, keys: Keys, start: int, turned: Tensor, begin: int, scale: float
) -> None:
    """Add scale * K^T dS^T to dQ^T of query tile ``begin`` and the tiles after it.

    ``turned`` is dS^T, in chunks of 128 keys.
    """
    chunks, columns = turned.shape[1], turned.shape[2]
    product = nl.ndarray((keys.k.shape[0], columns), dtype=nl.float32, buffer=nl.psum)
    for c in range(chunks):
        k_rows = keys.k_rows[:, start // ROWS + c, :]
        nisa.nc_matmul(dst=product, stationary=k_rows, moving=turned[:, c, :], accumulate=c > 0)
    add_scaled(queries.dq[:, begin * ROWS : begin * ROWS + columns], product, scale)


def add_scaled(total: Tensor, product: Tensor, scale: float) -> None:
    """Add scale * product to ``total``; compute in float32, and round once to the dtype of ``total``."""
    nisa.scalar_tensor_tensor(
        dst=total, data=product, op0=nl.multiply, operand0=scale, op1=nl.add, operand1=total
    )
