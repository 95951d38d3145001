"""The attention block: one query tile against a stretch of keys, forward; two stretches, backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nki_impl.kernels.block_backward import Keys, Queries, block_backward
from nki_impl.kernels.block_forward import block_forward
from nki_impl.kernels.masks import FLOOR
from nki_impl.kernels.tiles import columns_to_rows, load_columns, load_rows
from nki_impl.lang import nisa, nki, nl
from nki_impl.sim.machine.launch import run_ranks

from .reference import DTYPES, FLOAT32_OPERATIONS, ROUNDOFF, worst
from .running import turned

F32 = FLOAT32_OPERATIONS * ROUNDOFF["float32"]


def load(x: Any) -> Any:
    """A copy on chip of an array of at most 128 partitions."""
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    return tile


def store(tile: Any) -> Any:
    """A copy in shared HBM of a tile."""
    out = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


@nki.jit
def forward_kernel(q, k, v, low, high, first_key, scale):
    """block_forward of q [D, 128], k [D, n], v [n, D], low and high [128, 1] or None."""
    n = k.shape[1]
    bounds = (None, None) if high is None else (load(low), load(high))
    part = block_forward(
        load(q), load_columns(k, 0, n), load_rows(v, 0, n), *bounds, first_key, scale
    )
    return store(part.o), store(part.l), store(part.n)


@nki.jit
def backward_kernel(q, k, v, dy, bias, delta, low, high, first_key, scale, is_triangle):
    """block_backward of q, dy [D, m], k, v [D, n], row numbers [128, m / 128] or None."""
    q_tile, dy_tile, k_tile = load(q), load(dy), load(k)
    sums = []
    for x in (q, k, v):
        total = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=total, value=1.0)
        sums.append(total)
    rows = (columns_to_rows(q_tile), columns_to_rows(dy_tile), columns_to_rows(k_tile))
    limits = (None, None) if high is None else (load(low), load(high))
    queries = Queries(
        0, q_tile, rows[0], dy_tile, rows[1], load(bias), load(delta), *limits, sums[0]
    )
    keys = Keys(first_key, k_tile, rows[2], load(v), sums[1], sums[2])
    block_backward(queries, keys, scale, is_triangle)
    return store(sums[0]), store(sums[1]), store(sums[2])


def draw(dtype: str, *shapes: tuple[int, int], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes]


def column(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).reshape(-1, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", [128, 640, 2048])
@pytest.mark.parametrize("width", [64, 128])
def test_statistics_and_unnormalised_output_of_one_tile(dtype: str, keys: int, width: int) -> None:
    q, k, v = draw(dtype, (128, width), (keys, width), (keys, width))
    scale = 0.2
    o, l, n = run_ranks(forward_kernel, [(turned(q), turned(k), v, None, None, 0, scale)]).results[
        0
    ]
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    s, sizes = scale * q @ k.T, scale * np.abs(q) @ np.abs(k).T
    m = s.max(axis=1, keepdims=True)
    e = np.exp(s - m)
    kappa = 1 + sizes.max(axis=1, keepdims=True)
    assert worst(-n, m, F32 * kappa) <= 1
    assert worst(l, e.sum(axis=1, keepdims=True), F32 * kappa * e.sum(axis=1, keepdims=True)) <= 1
    assert worst(o, e @ v, (ROUNDOFF[dtype] + F32 * kappa) * (e @ np.abs(v))) <= 1
    assert o.dtype == l.dtype == n.dtype == np.float32


def test_bounds_are_inclusive_below_and_exclusive_above() -> None:
    """With equal scores l counts the visible keys, and o of one-hot values says which they are."""
    rng = np.random.default_rng(0)
    keys, first = 128, 256
    low, high = rng.integers(first - 20, first + keys + 20, (2, 128))
    q, k = np.zeros((64, 128), np.float32), np.zeros((64, keys), np.float32)
    for part in (slice(0, 64), slice(64, 128)):
        v = np.eye(keys, dtype=np.float32)[:, part]
        o, l, n = run_ranks(
            forward_kernel, [(q, k, np.ascontiguousarray(v), column(low), column(high), first, 1.0)]
        ).results[0]
        j = first + np.arange(keys)
        seen = (low[:, None] <= j) & (j < high[:, None])
        assert seen.any(axis=1).sum() > 20 and (~seen.any(axis=1)).sum() > 20
        assert (o == seen[:, part]).all()
        assert (l[:, 0] == seen.sum(axis=1)).all()
        assert (n[:, 0] == np.where(seen.any(axis=1), 0.0, np.float32(-FLOOR))).all()


def test_a_negative_scale_and_huge_scores_stay_finite() -> None:
    q, k, v = draw("float32", (128, 64), (256, 64), (256, 64))
    o, l, n = run_ranks(forward_kernel, [(turned(q), turned(k), v, None, None, 0, -1e30)]).results[
        0
    ]
    best = (-(q.astype(np.float64) @ k.T.astype(np.float64))).argmax(axis=1)
    assert np.isfinite(n).all()
    assert (l == 1).all()
    assert (o == v[best]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "keys"), [(128, 128), (640, 384), (256, 1152)])
def test_gradients_of_one_block(dtype: str, rows: int, keys: int) -> None:
    width, scale = 64, 0.2
    q, k, v, dy = draw(dtype, (rows, width), (keys, width), (keys, width), (rows, width))
    rng = np.random.default_rng(1)
    bias = rng.uniform(-9, -7, rows).astype(np.float32)
    delta = rng.standard_normal(rows).astype(np.float32)
    planes = [turned(x.reshape(-1, 128)) for x in (bias, delta)]
    got = run_ranks(
        backward_kernel,
        [(*(turned(x) for x in (q, k, v, dy)), *planes, None, None, 0, scale, False)],
    ).results[0]
    check_gradients(got, (q, k, v, dy), bias, delta, np.ones((rows, keys), bool), scale, dtype)


@pytest.mark.parametrize("first_key", [0, 256])
def test_tiles_above_the_diagonal_are_left_out_and_nothing_else(first_key: int) -> None:
    rows, keys, width, scale = 896, 640, 64, 1.0
    q, k, v, dy = draw("float32", (rows, width), (keys, width), (keys, width), (rows, width))
    q *= 0.2
    bias, delta = np.full(rows, -7, np.float32), np.zeros(rows, np.float32)
    t = np.arange(rows)
    low = np.maximum(0, t - 300)
    high = t + 1
    planes = [turned(x.astype(np.float32).reshape(-1, 128)) for x in (bias, delta, low, high)]
    arguments = [*(turned(x) for x in (q, k, v, dy)), *planes, first_key, scale]
    outcomes = [run_ranks(backward_kernel, [(*arguments, skip)]) for skip in (True, False)]
    # Exponentials: 128 rows of a query tile for each key of a tile that reaches to the diagonal.
    reached = [
        (row, start)
        for row in range(0, rows, 128)
        for start in range(0, keys, 512)
        if first_key + start <= row + 127
    ]
    computed = sum(128 * min(512, keys - start) for _, start in reached)
    exponentials = [
        sum(row.elements for row in outcome.total.rows if row.operation == "activation")
        for outcome in outcomes
    ]
    assert exponentials == [computed, rows * keys]
    j = first_key + np.arange(keys)
    seen = (low[:, None] <= j) & (j < high[:, None])
    # Within the bound and not bit for bit: products of fewer columns may be summed in another order.
    for outcome in outcomes:
        check_gradients(outcome.results[0], (q, k, v, dy), bias, delta, seen, scale, "float32")


def check_gradients(
    got: Any, tensors: Any, bias: Any, delta: Any, seen: Any, scale: float, dtype: str
) -> None:
    """The block adds its gradients to what was there, 1 everywhere."""
    u = ROUNDOFF[dtype]
    q, k, v, dy = (x.astype(np.float64) for x in tensors)
    s = scale * q @ k.T
    p = np.where(seen, np.exp(s + bias[:, None]), 0)
    kappa = F32 * (1 + (scale * np.abs(q) @ np.abs(k).T).max(axis=1) + np.abs(bias))[:, None]
    ds = p * (dy @ v.T - delta[:, None])
    noise = u * np.abs(ds) + kappa * p * (np.abs(dy) @ np.abs(v).T + np.abs(delta)[:, None])
    dq, dk, dv = (turned(x) for x in got)
    one = F32
    assert worst(dq, 1 + scale * ds @ k, one + scale * noise @ np.abs(k)) <= 1
    assert worst(dk, 1 + scale * ds.T @ q, one + scale * noise.T @ np.abs(q)) <= 1
    assert worst(dv, 1 + p.T @ dy, one + (u * p + kappa * p).T @ np.abs(dy)) <= 1
