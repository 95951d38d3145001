"""DMA: copies in row-major order, dtype changes, transposition, sums; and what DMA cannot do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim.errors import (
    DmaError,
    DtypeError,
    OutOfBoundsError,
    UninitializedError,
    UnsupportedError,
)
from nki_impl.sim.machine.core import Core

from ..tiles import Array, bf16, empty, normal, tile, values


def hbm(shape: tuple[int, ...], dtype: Any = nl.float32) -> nl.NkiTensor:
    return nl.ndarray(shape, dtype, nl.shared_hbm)


@pytest.mark.parametrize(
    ("source", "target"),
    [(nl.hbm, nl.sbuf), (nl.sbuf, nl.shared_hbm), (nl.hbm, nl.hbm), (nl.sbuf, nl.sbuf)],
)
def test_a_copy_walks_both_sides_in_row_major_order(core: Core, source: Any, target: Any) -> None:
    x = normal(4, 6)
    out = nl.ndarray((8, 3), nl.float32, target)
    nisa.dma_copy(out, tile(x, None, source))
    assert np.array_equal(values(out), x.reshape(8, 3))


def test_strided_sides_are_walked_in_their_own_order(core: Core) -> None:
    x = normal(6, 4)
    h = tile(x, None, nl.hbm)
    t = empty((4, 6))
    nisa.dma_copy(t, h.permute((1, 0)))
    assert np.array_equal(values(t), x.T)
    nisa.dma_copy(out := empty((3, 2)), h.ap([[8, 3], [1, 2]], offset=1))
    assert np.array_equal(values(out), x[::2, 1:3])


def test_different_dtypes_convert_through_float32_with_one_rounding(core: Core) -> None:
    x = normal(4, 6) * 100
    out = empty((4, 6), nl.bfloat16)
    nisa.dma_copy(out, tile(x, None, nl.hbm))
    assert np.array_equal(values(out), bf16(x))
    whole = empty((4, 6), nl.int32)
    nisa.dma_copy(whole, out)
    assert np.array_equal(values(whole), np.rint(bf16(x)))
    big = tile(np.array([[2**31 - 1]]), nl.int32)
    nisa.dma_copy(same := empty((1, 1), nl.int32), big)
    assert values(same).item() == 2**31 - 1


def test_each_rule_of_a_copy_raises(core: Core) -> None:
    t, h = tile(normal(4, 6)), hbm((4, 6))
    with pytest.raises(DmaError, match="psum"):
        nisa.dma_copy(h, tile(normal(4, 6), None, nl.psum))
    with pytest.raises(DmaError, match="psum"):
        nisa.dma_copy(empty((4, 6), nl.float32, nl.psum), t)
    with pytest.raises(DmaError, match="24 elements"):
        nisa.dma_copy(hbm((4, 5)), t)
    with pytest.raises(DmaError, match="engine"):
        nisa.dma_copy(h, t, engine=nisa.engine.scalar)
    with pytest.raises(DmaError, match="hwdge"):
        nisa.dma_copy(hbm((4, 6), nl.bfloat16), t, dge_mode=nisa.dge_mode.hwdge)
    with pytest.raises(UninitializedError):
        nisa.dma_copy(t, h)
    with pytest.raises(DtypeError):
        nisa.dma_copy(h, normal(4, 6))
    nisa.dma_copy(h, t, dge_mode=nisa.dge_mode.hwdge, engine=nisa.engine.sync)


@pytest.mark.parametrize("dtype", [nl.bfloat16, nl.float32, nl.int32])
@pytest.mark.parametrize(
    ("shape", "axes"), [((6, 5), (1, 0)), ((6, 4, 5), (2, 1, 0)), ((6, 4, 3, 5), (3, 1, 2, 0))]
)
@pytest.mark.parametrize("given", [False, True])
def test_a_transposition_is_numpys(
    core: Core, dtype: Any, shape: Any, axes: Any, given: bool
) -> None:
    x = tile(normal(*shape) * 50, dtype, nl.hbm)
    out = empty(tuple(shape[a] for a in axes), dtype)
    nisa.dma_transpose(out, x, axes if given else None)
    assert np.array_equal(out.array, x.array.transpose(axes))


def test_a_transposition_of_128_x_128_blocks_from_sbuf(core: Core) -> None:
    p = tile(normal(128, 512), nl.bfloat16)
    out = empty((128, 512), nl.bfloat16)
    nisa.dma_transpose(
        out.ap([[512, 128], [1, 1], [128, 4], [1, 128]]),
        p.ap([[512, 128], [1, 1], [128, 4], [1, 128]]),
    )
    for block in range(4):
        at = slice(128 * block, 128 * block + 128)
        assert np.array_equal(values(out)[:, at], values(p)[:, at].T)


def test_a_transposition_can_gather(core: Core) -> None:
    h, rows = tile(normal(16, 8), None, nl.hbm), tile(np.array([[3], [15], [0], [3]]), nl.uint32)
    out = empty((8, 4))
    nisa.dma_transpose(out, h.ap([[8, 4], [1, 8]], vector_offset=rows))
    assert np.array_equal(values(out), h.array[[3, 15, 0, 3]].T)


def test_indices_of_a_gathering_transposition_run_down_the_partitions(core: Core) -> None:
    h, rows = tile(normal(16, 8), None, nl.hbm), tile(np.array([[3, 15], [0, 4]]), nl.uint32)
    out = empty((8, 4))
    nisa.dma_transpose(out, h.ap([[8, 4], [1, 8]], vector_offset=rows))
    assert np.array_equal(values(out), h.array[[3, 0, 15, 4]].T)


def test_each_rule_of_a_transposition_raises(core: Core) -> None:
    x = tile(normal(6, 5), None, nl.hbm)
    with pytest.raises(DmaError, match="rank included"):
        nisa.dma_transpose(empty((5, 1, 6)), x)
    with pytest.raises(DmaError, match="rank included"):
        nisa.dma_transpose(empty((6, 5)), x)
    with pytest.raises(DmaError, match="axes"):
        nisa.dma_transpose(empty((6, 5)), x, (0, 1))
    with pytest.raises(DmaError, match="dtype"):
        nisa.dma_transpose(empty((5, 6), nl.bfloat16), x)
    with pytest.raises(DmaError, match="2 or 4 bytes"):
        nisa.dma_transpose(empty((5, 6), nl.uint8), tile(np.ones((6, 5)), nl.uint8))
    with pytest.raises(DmaError, match="SBUF"):
        nisa.dma_transpose(hbm((5, 6)), x)
    with pytest.raises(DmaError, match="psum"):
        nisa.dma_transpose(empty((5, 6)), tile(normal(6, 5), None, nl.psum))
    with pytest.raises(UnsupportedError):
        nisa.dma_transpose(empty((5, 6)), x, dge_mode=nisa.dge_mode.hwdge)
    with pytest.raises(DmaError, match="axes"):
        nisa.dma_transpose(empty((5, 6)), tile(normal(2, 2, 2, 2, 2), None, nl.hbm))


def test_dma_compute_adds_in_float32_and_rounds_once(core: Core) -> None:
    parts = [bf16(normal(4, 6, seed=s)) for s in range(3)]
    out = hbm((4, 6), nl.bfloat16)
    nisa.dma_compute(out, [tile(p, nl.bfloat16, nl.hbm) for p in parts], nl.add)
    assert np.array_equal(values(out), bf16(parts[0] + parts[1] + parts[2]))
    with pytest.raises(DmaError, match="reduce_op"):
        nisa.dma_compute(out, [out], nl.maximum)
    with pytest.raises(DmaError, match="scales"):
        nisa.dma_compute(out, [out], nl.add, scales=[2.0])
    with pytest.raises(DmaError, match="srcs"):
        nisa.dma_compute(out, [], nl.add)
    with pytest.raises(DmaError, match="elements"):
        nisa.dma_compute(out, [tile(normal(4, 5))], nl.add)


def rows_of(table: Array, indices: list[int]) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    """Return a table in HBM, and the view of the rows that the indices select."""
    h = tile(table, buffer=nl.hbm)
    index = tile(np.array(indices)[:, None], nl.int32)
    pattern = [[table.shape[1], len(indices)], [1, table.shape[1]]]
    return h, h.ap(pattern, vector_offset=index)


def test_dma_compute_adds_gathered_rows_to_a_tile(core: Core) -> None:
    table, x = normal(8, 5), normal(3, 5, seed=1)
    _, rows = rows_of(table, [6, 0, 6])
    t = tile(x)
    nisa.dma_compute(t[:, :], [rows, t[:, :]], nl.add)
    assert np.array_equal(values(t), table[[6, 0, 6]] + x)


def test_dma_compute_adds_a_tile_to_scattered_rows(core: Core) -> None:
    table, x = normal(8, 5), normal(3, 5, seed=1)
    h, rows = rows_of(table, [6, 0, 3])
    nisa.dma_compute(rows, [rows, tile(x)], nl.add)
    table[[6, 0, 3]] += x
    assert np.array_equal(values(h), table)


def test_rows_that_a_scatter_selects_twice_need_unique_indices_false(core: Core) -> None:
    table, x = normal(8, 5), normal(3, 5, seed=1)
    h, rows = rows_of(table, [6, 0, 6])
    with pytest.raises(DmaError, match="unique_indices.* row 6 2 times"):
        nisa.dma_compute(rows, [rows, tile(x)], nl.add)
    assert np.array_equal(values(h), table)
    nisa.dma_compute(rows, [tile(x), rows], nl.add, unique_indices=False)
    want = table.copy()
    for row, line in zip([6, 0, 6], x, strict=True):
        want[row] += line
    assert np.array_equal(values(h), want)


def test_dma_compute_with_indices_outside_the_table_is_an_error_or_adds_nothing(core: Core) -> None:
    table, x = normal(8, 5), normal(2, 5, seed=1)
    h, rows = rows_of(table, [8, 1])
    for dst in (rows, tile(x)):
        with pytest.raises(OutOfBoundsError, match="got 8"):
            nisa.dma_compute(dst, [rows, dst if dst is not rows else tile(x)], nl.add)
    nisa.dma_compute(rows, [rows, tile(x)], nl.add, oob_mode=nisa.oob_mode.skip)
    table[1] += x[1]
    assert np.array_equal(values(h), table)


def test_dma_compute_with_indices_needs_dst_among_two_sources_and_written_memory(
    core: Core,
) -> None:
    h, rows = rows_of(normal(8, 5), [2, 1])
    _, others = rows_of(normal(8, 5), [2, 1])
    t, u = tile(normal(2, 5)), tile(normal(2, 5))
    for dst, srcs in ((t, [rows, u]), (t, [rows, t, u]), (rows, [others, t]), (t, [t, t, rows])):
        with pytest.raises(DmaError, match="dst itself and one other"):
            nisa.dma_compute(dst, srcs, nl.add)
    with pytest.raises(DmaError, match="a tile in SBUF and rows in HBM"):
        nisa.dma_compute(rows, [rows, h[0:2]], nl.add)
    with pytest.raises(UnsupportedError, match="scalar_offset"):
        one = h.ap([[5, 1], [1, 5]], scalar_offset=tile(np.ones((1, 1)), nl.int32))
        nisa.dma_compute(t[0:1], [one, t[0:1]], nl.add)
    empty_rows = hbm((8, 5)).ap([[5, 2], [1, 5]], vector_offset=tile(np.ones((2, 1)), nl.int32))
    with pytest.raises(UninitializedError):
        nisa.dma_compute(t, [empty_rows, t], nl.add)
