"""Query rows in the forward pass: which of them a core computes, their running softmax in HBM, and their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nki_impl.kernels.masks import Mask
from nki_impl.kernels.merge import Partial, finish, log_sum_exp
from nki_impl.kernels.ring import Ring
from nki_impl.kernels.tiles import (
    ROWS,
    Tensor,
    load_columns,
    load_rows,
    rows_to_columns,
    store_rows,
    tile_count,
)
from nki_impl.lang import nisa, nl


@dataclass
class Forward(nl.NKIObject):  # type: ignore[name-defined]
    """The constants of a forward pass: inputs, outputs, and the buffers that hold the running softmax of every row.

    ``group`` is the number of query heads that share a key head. The running softmax is
    ``o_held`` [b, h, 128, tiles, D], ``l_held`` and ``n_held`` [b, h, 128, tiles], float32 in HBM (:mod:`merge`).
    ``zero_lse``: lse of a row without visible keys is 0 instead of -inf.
    """

    q: Tensor
    q_is_rows: bool
    o: Tensor
    lse: Tensor
    o_held: Tensor
    l_held: Tensor
    n_held: Tensor
    mask: Mask
    scale: float
    group: int
    workers: int
    zero_lse: bool


@dataclass
class Rows(nl.NKIObject):  # type: ignore[name-defined]
    """Query rows first..end-1 of head ``head`` of batch entry ``i``."""

    i: int
    head: int
    first: int
    end: int


def deal_rows(ring: Ring, b: int, h: int, s: int) -> Any:
    """Return the rows that this core computes: whole heads, and half of the last head if the number of heads is odd.

    The cores can split a head, because no result of the forward pass is an operand of a collective.
    """
    shares = []
    whole = b * h - b * h % ring.cores
    for item in range(ring.core, whole, ring.cores):
        shares.append(Rows(item // h, item % h, 0, s))
    for item in range(whole, b * h):
        middle = min((tile_count(s) + 1) // 2 * ROWS, s)
        first, end = ((0, middle), (middle, s))[ring.core]
        if first < end:
            shares.append(Rows(item // h, item % h, first, end))
    return tuple(shares)


def tile_of(state: Partial, t: int) -> Partial:
    """Return the state of query tile ``t`` as a view."""
    return Partial(state.o[:, t, :], state.l[:, t : t + 1], state.n[:, t : t + 1])


def load_queries(forward: Forward, rows: Rows) -> Tensor:
    """Load the queries ``rows`` as columns [D, n]."""
    head = forward.q[rows.i, rows.head]
    if forward.q_is_rows:
        return rows_to_columns(load_rows(head, rows.first, rows.end))
    return load_columns(head, rows.first, rows.end)


def load_state(forward: Forward, rows: Rows, step: int) -> Partial:
    """Load the running softmax: o [128, tiles, D], l and n [128, tiles].

    At step 0, allocate the tiles without loading anything.
    """
    a, z = rows.first // ROWS, tile_count(rows.end)
    state = Partial(
        nl.ndarray((ROWS, z - a, forward.o.shape[3]), dtype=nl.float32, buffer=nl.sbuf),
        nl.ndarray((ROWS, z - a), dtype=nl.float32, buffer=nl.sbuf),
        nl.ndarray((ROWS, z - a), dtype=nl.float32, buffer=nl.sbuf),
    )
    if step > 0:
        nisa.dma_copy(dst=state.o, src=forward.o_held[rows.i, rows.head, :, a:z, :])
        nisa.dma_copy(dst=state.l, src=forward.l_held[rows.i, rows.head, :, a:z])
        nisa.dma_copy(dst=state.n, src=forward.n_held[rows.i, rows.head, :, a:z])
    return state


def store_state(forward: Forward, rows: Rows, state: Partial) -> None:
    """Store the running softmax in HBM until the next step."""
    a, z = rows.first // ROWS, tile_count(rows.end)
    nisa.dma_copy(dst=forward.o_held[rows.i, rows.head, :, a:z, :], src=state.o)
    nisa.dma_copy(dst=forward.l_held[rows.i, rows.head, :, a:z], src=state.l)
    nisa.dma_copy(dst=forward.n_held[rows.i, rows.head, :, a:z], src=state.n)


def store_results(forward: Forward, rows: Rows, state: Partial) -> None:
    """Normalise once, after all W blocks, and write o and lse."""
    o = nl.ndarray(state.o.shape, dtype=forward.o.dtype, buffer=nl.sbuf)
    for t in range(state.o.shape[1]):
        finish(tile_of(state, t), o[:, t, :])
    store_rows(forward.o[rows.i, rows.head], rows.first, rows.end, o)
    if forward.lse is not None:
        lse = nl.ndarray(state.l.shape, dtype=forward.lse.dtype, buffer=nl.sbuf)
        log_sum_exp(state.l, state.n, lse, forward.zero_lse)
        rest = (rows.end - rows.first) % ROWS
        if rest > 0:
            zero_rows_from(lse[:, lse.shape[1] - 1 :], rest)
        a, z = rows.first // ROWS, tile_count(rows.end)
        nisa.dma_copy(dst=forward.lse[rows.i, rows.head, :, a:z], src=lse)


def zero_rows_from(column: Tensor, rest: int) -> None:
    """Write 0 to the rows from ``rest`` on of a column [128, 1]: the padding of the last tile, as in AWS's kernel."""
    # A write of these partitions alone could start at a partition that the engines cannot address.
    padded = nl.ndarray(column.shape, dtype=column.dtype, buffer=nl.sbuf)
    nisa.memset(dst=padded, value=0.0)
    nisa.tensor_copy(dst=padded[:rest], src=column[:rest])
    nisa.tensor_copy(dst=column, src=padded)
