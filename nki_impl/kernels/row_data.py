"""Row data: numbers for each query row that the backward pass needs and that travel with the queries.

They are stored as *planes*, [128, tiles] in float32, with row t at [t % 128, t // 128]. An *item* is a key head with the
query heads that share it. It has two planes for each query head: ``bias`` (-lse) and ``delta`` (dy_o_sum).
"""

from __future__ import annotations

from nki_impl.kernels.masks import FLOOR, HIDDEN
from nki_impl.kernels.tiles import (
    ROWS,
    STRETCH,
    DType,
    Tensor,
    load_columns,
    load_numbers,
    tile_count,
)
from nki_impl.lang import nisa, nl


def fill_planes(planes: Tensor, o: Tensor, dy: Tensor, lse: Tensor, narrow: DType) -> None:
    """Compute and write bias and delta of each query head, from o, dy [group, D, s] and lse [group, 128, tiles].

    ``narrow`` is the dtype to which bias, delta and the products dy * o are rounded.
    """
    length = o.shape[2]
    for g in range(o.shape[0]):
        nisa.dma_copy(dst=planes[2 * g], src=bias_of(lse[g], length, narrow))
        for start in range(0, length, STRETCH):
            stop = min(start + STRETCH, length)
            part = planes[2 * g + 1, :, start // ROWS : tile_count(stop)]
            nisa.dma_copy(dst=part, src=delta_of(o[g], dy[g], start, stop, narrow))


def bias_of(lse: Tensor, length: int, narrow: DType) -> Tensor:
    """Compute -lse [128, tiles] of ``length`` rows; 0 in the padding, whatever lse has there. Where lse is -inf, return a value for which exp(score + bias) is always 0."""
    tile = load_numbers(lse, length)
    # For an empty row, bias = HIDDEN - FLOOR = FLOOR: so low that exp(s + FLOOR) is 0 for every s.
    empty = nl.ndarray(lse.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=empty, data=tile, op0=nl.less, operand0=FLOOR, op1=nl.multiply, operand1=HIDDEN
    )
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.maximum, operand0=FLOOR)
    bias = nl.ndarray(lse.shape, dtype=narrow, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=bias, data1=empty, data2=tile, op=nl.subtract)
    return bias


def delta_of(o: Tensor, dy: Tensor, start: int, stop: int, narrow: DType) -> Tensor:
    """Compute dy_o_sum of rows start..stop-1, as [128, tiles].

    It is the sum over D of dy * o, computed by a matrix product with ones.
    """
    o_tile, dy_tile = load_columns(o, start, stop), load_columns(dy, start, stop)
    width, length = o_tile.shape
    products = nl.ndarray((width, length), dtype=narrow, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=products, data1=dy_tile, data2=o_tile, op=nl.multiply)
    ones = nl.ndarray((width, 1), dtype=narrow, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    sums = nl.ndarray((ROWS, length // ROWS), dtype=nl.float32, buffer=nl.psum)
    for t in range(length // ROWS):
        nisa.nc_matmul(
            dst=sums[:, t : t + 1],
            stationary=products[:, t * ROWS : (t + 1) * ROWS],
            moving=ones,
            accumulate=False,
        )
    delta = nl.ndarray((ROWS, length // ROWS), dtype=narrow, buffer=nl.sbuf)
    nisa.tensor_copy(dst=delta, src=sums)
    return delta


def load_plane(planes: Tensor, index: int, start: int, stop: int) -> Tensor:
    """Load rows start..stop-1 of one plane, [128, tiles]."""
    tile = nl.ndarray((ROWS, tile_count(stop - start)), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=planes[index, :, start // ROWS : tile_count(stop)])
    return tile
