"""Merging partial softmaxes: against float64, with empty rows, in any number, and finishing."""

from __future__ import annotations

import numpy as np
import pytest

from nki_impl.kernels.masks import FLOOR
from nki_impl.kernels.merge import Partial, finish, log_sum_exp, merge, take
from nki_impl.lang import nisa, nki, nl
from nki_impl.sim.machine.launch import run_ranks

from .reference import DTYPES, ROUNDOFF, worst

WIDTH = 64


@nki.jit
def merge_all(o, l, n, dtype, lse_dtype):
    """o, l, n [blocks, 128, D or 1] merged in order: (o of dtype, lse, and the state o, l, n)."""
    blocks, rows, width = o.shape
    states = []
    for i in range(blocks):
        tiles = []
        for source in (o, l, n):
            tile = nl.ndarray((rows, source.shape[2]), dtype=nl.float32, buffer=nl.sbuf)
            nisa.dma_copy(dst=tile, src=source[i])
            tiles.append(tile)
        states.append(Partial(tiles[0], tiles[1], tiles[2]))
    held = Partial(
        nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf),
        nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf),
        nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf),
    )
    take(held, states[0])
    for state in states[1:]:
        merge(held, state)
    normalised = nl.ndarray((rows, width), dtype=dtype, buffer=nl.sbuf)
    finish(held, normalised)
    lse = nl.ndarray((rows, 1), dtype=lse_dtype, buffer=nl.sbuf)
    log_sum_exp(held.l, held.n, lse)
    out = []
    for tile in (normalised, lse, held.o, held.l, held.n):
        copy = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=copy, src=tile)
        out.append(copy)
    return tuple(out)


def run(o, l, m, dtype=nl.float32, lse_dtype=nl.float32):
    f32 = np.float32
    arguments = (o.astype(f32), l.astype(f32), (-m).astype(f32), dtype, lse_dtype)
    return run_ranks(merge_all, [arguments]).results[0]


def draw(blocks: int, spread: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    l = rng.uniform(1, 100, (blocks, 128, 1)).astype(np.float32)
    m = (spread * rng.standard_normal((blocks, 128, 1))).astype(np.float32)
    return (rng.standard_normal((blocks, 128, WIDTH)) * l).astype(np.float32), l, m


@pytest.mark.parametrize("blocks", [1, 2, 3, 8])
@pytest.mark.parametrize("spread", [0.1, 30.0, 1e30])
def test_merged_blocks_are_the_softmax_over_all_of_them(blocks: int, spread: float) -> None:
    o, l, m = draw(blocks, spread)
    got = run(o, l, m)
    wide_o, wide_l, wide_m = (x.astype(np.float64) for x in (o, l, m))
    top = wide_m.max(axis=0)
    c = np.exp(wide_m - top)
    total, total_o = (c * wide_l).sum(axis=0), (c * wide_o).sum(axis=0)
    # The exponents are exact; the weights, products and sums each round once per merge.
    u = 8 * blocks * ROUNDOFF["float32"] * (1 + np.minimum(spread, 100))
    sizes = (c * np.abs(wide_o)).sum(axis=0)
    assert worst(got[0], total_o / total, u * sizes / total) <= 1
    assert worst(got[1], top + np.log(total), u * (1 + np.abs(top))) <= 1
    assert worst(got[2], total_o, u * sizes) <= 1
    assert worst(got[3], total, u * total) <= 1
    assert (got[4] == -m.max(axis=0)).all()


def test_an_empty_block_changes_no_bit_wherever_it_comes() -> None:
    o, l, m = draw(3, 5.0)
    o[1], l[1], m[1] = 0, 0, FLOOR
    with_it, without = run(o, l, m), run(o[[0, 2]], l[[0, 2]], m[[0, 2]])
    first = run(o[[1, 0, 2]], l[[1, 0, 2]], m[[1, 0, 2]])
    for a, b, c in zip(with_it, without, first, strict=True):
        assert (a == b).all()
        assert (c == b).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_empty_blocks_give_zero_and_minus_infinity(dtype: str) -> None:
    o, l, m = np.zeros((3, 128, WIDTH)), np.zeros((3, 128, 1)), np.full((3, 128, 1), FLOOR)
    kind = getattr(nl, dtype)
    got = run(o, l, m, kind, kind)
    assert (got[0].astype(np.float32) == 0).all()
    assert np.isneginf(got[1].astype(np.float32)).all()
    assert (got[3] == 0).all()


def test_o_is_rounded_once_at_the_end() -> None:
    o, l, m = draw(8, 1.0)
    wide = run(o, l, m)
    narrow = run(o, l, m, nl.bfloat16, nl.bfloat16)
    assert (narrow[0] == wide[0].astype(DTYPES["bfloat16"])).all()
    assert (narrow[1] == wide[1].astype(DTYPES["bfloat16"])).all()
    assert all((a == b).all() for a, b in zip(narrow[2:], wide[2:], strict=True))
