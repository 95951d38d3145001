"""``nisa.topk``: the largest values of each group of 16 partitions."""

from __future__ import annotations

import numpy as np
import pytest

from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim.errors import (
    DtypeError,
    PlacementError,
    ShapeError,
    UninitializedError,
    UnsupportedError,
)
from nki_impl.sim.machine.core import Core

from ..tiles import bf16, empty, normal, tile, values


def snake(lists, width):
    """Element i of list g at [16 g + i % 16, i // 16]; the rest is larger than all elements."""
    out = np.full((16 * len(lists), width), 1000.0)
    for g, one in enumerate(lists):
        for i, value in enumerate(one):
            out[16 * g + i % 16, i // 16] = value
    return out


def largest(lists, k, extra=0):
    """Run topk, and return the values and indices of each group in order."""
    n = len(lists[0])
    src = tile(snake(lists, -(-n // 16) + extra), nl.bfloat16)
    val, idx = empty((16 * len(lists), k), nl.bfloat16), empty((16 * len(lists), k), nl.uint32)
    nisa.topk(val_dst=val, idx_dst=idx, src=src, n=n)
    columns = [values(out[:, 0 : k // 16]) for out in (val, idx)]
    return [
        [out[16 * g + j % 16, j // 16] for j in range(k)]
        for out in columns
        for g in range(len(lists))
    ]


@pytest.mark.parametrize(
    ("n", "k", "groups", "extra"), [(42, 16, 2, 0), (200, 48, 8, 3), (64, 64, 1, 0)]
)
def test_topk_gives_each_groups_largest_values_in_ascending_order_and_their_indices(
    core: Core, n, k, groups, extra
):
    lists = bf16(normal(groups, n))
    got = largest(lists, k, extra)
    for g in range(groups):
        assert sorted(lists[g])[-k:] == got[g]
        assert [lists[g][i] for i in got[groups + g]] == got[g]
        assert len(set(got[groups + g])) == k


def test_topk_ignores_what_follows_element_n_even_if_it_was_never_written(core: Core):
    src = empty((16, 2), nl.bfloat16)
    nisa.memset(src[0:16, 0:1], 1.0)
    nisa.topk(empty((16, 16), nl.bfloat16), empty((16, 16), nl.uint32), src, 16)
    with pytest.raises(UninitializedError, match="src"):
        nisa.topk(empty((16, 16), nl.bfloat16), empty((16, 16), nl.uint32), src, 17)


def test_what_topk_writes_after_result_k_counts_as_never_written(core: Core):
    val, idx = tile(np.zeros((16, 18)), nl.bfloat16), tile(np.zeros((16, 18)), nl.uint32)
    nisa.topk(val, idx, tile(snake([np.arange(30.0)], 2), nl.bfloat16), 30)
    assert values(idx[0:16, 0:1])[:, 0].tolist() == list(range(12, 28))
    assert values(idx[0:2, 1:2])[:, 0].tolist() == [28, 29]
    assert values(val[0:16, 2:18]).max() == 0  # positions that topk does not write
    with pytest.raises(UninitializedError, match="14 of 16"):
        values(val[0:16, 1:2])


def test_of_equal_values_topk_takes_the_smaller_index(core: Core):
    assert largest([np.float32([5] * 40)], 16)[1] == list(range(15, -1, -1))


def test_topk_refuses_what_the_documentation_forbids(core: Core):
    def call(p=16, width=2, n=20, k=8, kind=nl.bfloat16, val=nl.bfloat16, idx=nl.uint32, **changes):
        nisa.topk(
            **{
                "val_dst": empty((p, k), val),
                "idx_dst": empty((p, k), idx),
                "src": tile(np.ones((p, width)), kind),
                "n": n,
            }
            | changes
        )

    call()
    for wrong in ({"p": 24}, {"n": 7}, {"n": 65536}, {"n": 33}, {"n": 8, "k": 9}, {"n": 20.0}):
        with pytest.raises(ShapeError):
            call(**wrong)
    with pytest.raises(ShapeError, match="idx_dst"):
        call(idx_dst=empty((16, 9), nl.uint32))
    for dtype in ({"kind": nl.float32}, {"val": nl.float32}, {"idx": nl.int32}):
        with pytest.raises(DtypeError):
            call(**dtype)
    with pytest.raises(PlacementError):
        call(val_dst=empty((16, 8), nl.bfloat16, nl.psum))
    with pytest.raises(UnsupportedError, match="rank of NaN"):
        call(src=tile(np.full((16, 2), np.nan), nl.bfloat16))
