"""Striped rows to contiguous ones: every value at its place, bit for bit, with the least traffic."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nki_impl.kernels import ring_attention_unpermute
from nki_impl.sim.machine.launch import run_ranks

DTYPES = [ml_dtypes.bfloat16, np.float16, np.float32, np.int32, np.uint8]


def striped(x: np.ndarray, workers: int) -> np.ndarray:
    """[W, bs, s, d] of [bs, W * s, d]: rank r holds tokens t * W + r."""
    return np.stack([x[:, rank::workers] for rank in range(workers)])


def contiguous(x: np.ndarray, workers: int) -> np.ndarray:
    """[W, bs, s, d] of [bs, W * s, d]: rank r holds tokens r * s + t."""
    return np.stack(np.split(x, workers, axis=1))


def arguments(x: np.ndarray, **options: Any) -> list[dict[str, Any]]:
    return [{"x": part, **options} for part in x]


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: np.dtype(t).name)
def test_every_row_arrives_bit_for_bit(workers: int, lnc: int, dtype: Any) -> None:
    batch, length, width = 3, 4 * workers, 8
    x = np.random.default_rng(0).integers(0, 2**8, (batch, workers * length, width, 4), np.uint8)
    bits = np.ascontiguousarray(x[..., : np.dtype(dtype).itemsize]).view(dtype)[..., 0]
    run = run_ranks(
        ring_attention_unpermute,
        arguments(striped(bits, workers), num_workers=workers),
        lnc=lnc,
        interleave=5,
    )
    got = np.stack(run.results)
    assert got.dtype == bits.dtype
    assert got.tobytes() == contiguous(bits, workers).tobytes()


def test_groups_side_by_side_go_by_the_order_of_their_lists() -> None:
    groups = ((0, 2), (3, 1))
    x = np.arange(2 * 8, dtype=np.float32).reshape(2, 8, 1)
    local = np.empty((4, 1, 4, 1), np.float32)
    for i, group in enumerate(groups):
        local[list(group)] = striped(x[i : i + 1], 2)
    got = run_ranks(
        ring_attention_unpermute, arguments(local, num_workers=2, replica_groups=groups)
    ).results
    for i, group in enumerate(groups):
        assert (np.stack([got[r] for r in group]) == contiguous(x[i : i + 1], 2)).all()


def test_a_rank_sends_only_the_rows_that_others_need() -> None:
    workers, length, width = 4, 16, 8
    x = np.zeros((workers, 1, length, width), np.float32)
    run = run_ranks(ring_attention_unpermute, arguments(x, num_workers=workers))
    assert run.ranks[0].of_engine("collective").bytes == length * width * 4 * 3 // 4


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
@pytest.mark.parametrize("length", [1, 5, 6, 15])
@pytest.mark.parametrize("lnc", [1, 2])
def test_a_length_that_the_ring_does_not_divide(workers: int, length: int, lnc: int) -> None:
    x = np.arange(2 * workers * length * 3, dtype=np.float32).reshape(2, workers * length, 3)
    given = arguments(striped(x, workers), num_workers=workers)
    got = np.stack(run_ranks(ring_attention_unpermute, given, lnc=lnc, interleave=3).results)
    assert (got == contiguous(x, workers)).all()


@pytest.mark.parametrize("ids", ["rank", "position"])
def test_any_length_in_groups_side_by_side(ids: str) -> None:
    groups = ((0, 1, 2), (3, 4, 5)) if ids == "position" else ((5, 0, 2), (3, 1, 4))
    x = np.arange(2 * 15, dtype=np.float32).reshape(2, 15, 1)
    local = np.empty((6, 1, 5, 1), np.float32)
    for i, group in enumerate(groups):
        local[list(group)] = striped(x[i : i + 1], 3)
    given = arguments(local, num_workers=3, replica_groups=groups)
    got = run_ranks(ring_attention_unpermute, given, ring_ids=ids).results
    for i, group in enumerate(groups):
        assert (np.stack([got[r] for r in group]) == contiguous(x[i : i + 1], 3)).all()
