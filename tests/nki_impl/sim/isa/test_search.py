"""Instructions that find and gather elements."""

from __future__ import annotations

import numpy as np
import pytest

from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim.errors import (
    DtypeError,
    OutOfBoundsError,
    ShapeError,
    TargetError,
    UninitializedError,
    UnsupportedError,
)
from nki_impl.sim.machine.core import Core, acting_as

from ..tiles import empty, normal, tile, values

ABSENT = 2**32 - 1


def test_find_index8_gives_the_first_occurrence_and_all_ones_for_an_absent_value(core: Core):
    data = np.float32([[5, 1, 5, 2, 3, 4, 6, 7, 8], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
    wanted = np.float32([[5, 2, 8, 9, 1, 3, 4, 6], [8, 7, 6, 5, 4, 3, 2, -1]])
    out = empty((2, 8), nl.uint32)
    nisa.nc_find_index8(out, tile(data), tile(wanted))
    assert values(out).tolist() == [[0, 3, 8, ABSENT, 1, 4, 5, 6], [8, 7, 6, 5, 4, 3, 2, ABSENT]]
    short = empty((2, 8), nl.uint16)
    nisa.nc_find_index8(short, tile(data), tile(wanted))
    assert values(short)[0].tolist() == [0, 3, 8, 2**16 - 1, 1, 4, 5, 6]


def test_find_index8_finds_the_next_occurrence_for_an_equal_value(core: Core) -> None:
    data = np.float32([[5, 1, 5, 2, 5, 1, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]])
    wanted = np.float32([[5, 5, 1, 5, 1, 5, 1, 6], [7, 7, 6, 5, 4, 3, 2, 1]])
    out = empty((2, 8), nl.uint32)
    nisa.nc_find_index8(out, tile(data), tile(wanted))
    assert values(out).tolist() == [
        [0, 2, 1, 4, 5, ABSENT, ABSENT, 6],
        [7, ABSENT, 6, 5, 4, 3, 2, 1],
    ]


def test_find_index8_refuses_other_sizes_and_dtypes(core: Core):
    data, wanted = tile(normal(4, 16)), tile(normal(4, 8))
    with pytest.raises(DtypeError, match="uint16 or uint32"):
        nisa.nc_find_index8(empty((4, 8), nl.int32), data, wanted)
    with pytest.raises(ShapeError, match="4 partitions of 8 elements"):
        nisa.nc_find_index8(empty((4, 8), nl.uint32), data, tile(normal(4, 7)))
    with pytest.raises(ShapeError, match="8 to 16384"):
        nisa.nc_find_index8(empty((4, 8), nl.uint32), tile(normal(4, 7)), wanted)


def test_match_replace8_replaces_equal_values_one_after_the_other(core: Core):
    data = tile(np.float32([[5, 1, 5, 2, 3, 4, 6, 5]]))
    out, at = empty((1, 8)), empty((1, 8), nl.uint32)
    wanted = tile(np.float32([[5, 5, 6, 9, 4, 3, 2, 1]]))
    nisa.nc_match_replace8(out, data, wanted, float("-inf"), dst_idx=at)
    assert values(at).tolist() == [[0, 2, 6, ABSENT, 5, 4, 3, 1]]
    assert values(out)[0, 7] == 5 and np.isneginf(values(out)[0, :7]).all()


def test_match_replace8_may_write_its_own_data(core: Core):
    data = tile(np.arange(8, dtype=np.float32)[None])
    nisa.nc_match_replace8(data, data, tile(np.float32([[0, 1, 2, 3, 9, 9, 9, 9]])), 7.0)
    assert values(data).tolist() == [[7, 7, 7, 7, 4, 5, 6, 7]]


def test_nonzero_with_count_writes_indices_padding_and_count_on_every_16th_partition(core: Core):
    source = np.zeros((33, 5), np.float32)
    source[0], source[32] = [0, 1, 0, 2, 0], [1, 1, 1, 1, 1]
    source[1] = 1
    out = empty((33, 6), nl.int32)
    nisa.nonzero_with_count(out, tile(source), index_offset=10, padding_val=-3)
    assert values(out[0:1]).tolist() == [[11, 13, -3, -3, -3, 2]]
    assert values(out[16:17]).tolist() == [[-3] * 5 + [0]]
    assert values(out[32:33]).tolist() == [[10, 11, 12, 13, 14, 5]]
    with pytest.raises(UninitializedError):
        values(out[1:2])


def test_nonzero_with_count_of_an_unwritten_partition_counts_as_unwritten(core: Core):
    source, out = empty((32, 4)), empty((32, 5), nl.int32)
    nisa.memset(out, 7)
    nisa.memset(source[0:16], 1.0)
    nisa.nonzero_with_count(out, source)
    assert values(out[0:1]).tolist() == [[0, 1, 2, 3, 4]]
    assert (values(out[1:16]) == 7).all()
    part = empty((16, 5), nl.int32)
    nisa.dma_copy(part[0:15], out[1:16])
    with pytest.raises(UninitializedError):
        nisa.dma_copy(part[0:1], out[16:17])


def test_nonzero_with_count_needs_trn2_one_more_element_and_int32(core: Core):
    source = tile(normal(16, 4))
    with pytest.raises(ShapeError, match="16 x 5"):
        nisa.nonzero_with_count(empty((16, 4), nl.int32), source)
    with pytest.raises(DtypeError, match="int32"):
        nisa.nonzero_with_count(empty((16, 5), nl.uint32), source)
    with acting_as(Core(target="trn1")), pytest.raises(TargetError):
        nisa.nonzero_with_count(empty((16, 5), nl.int32), source)


def test_n_gather_takes_flattened_elements_of_the_same_partition(core: Core):
    data = normal(3, 2, 5)
    at = np.array([[0, 9, 5], [1, 1, 4], [8, 7, 6]])
    out = empty((3, 3))
    nisa.nc_n_gather(out, tile(data), tile(at, nl.uint32))
    assert np.array_equal(values(out), np.take_along_axis(data.reshape(3, 10), at, axis=1))
    with pytest.raises(OutOfBoundsError, match="0 <= index < 10"):
        nisa.nc_n_gather(out, tile(data), tile(at + 1, nl.uint32))


def test_n_gather_reads_only_what_the_indices_name(core: Core):
    data = empty((2, 4))
    nisa.memset(data[:, 0:2], 1.5)
    out = empty((2, 2))
    nisa.nc_n_gather(out, data, tile(np.array([[0, 1], [1, 0]]), nl.uint32))
    assert (values(out) == 1.5).all()
    with pytest.raises(UninitializedError):
        nisa.nc_n_gather(out, data, tile(np.array([[0, 1], [1, 2]]), nl.uint32))


def test_local_gather_shares_indices_among_16_partitions_counted_down_the_partitions(core: Core):
    data = normal(32, 40)
    at = np.random.default_rng(1).integers(0, 40, (32, 2))
    out = empty((32, 20))
    nisa.local_gather(out, tile(data), tile(at, nl.uint16), num_valid_indices=20)
    for group in range(2):
        rows = slice(16 * group, 16 * group + 16)
        order = [at[16 * group + i % 16, i // 16] for i in range(20)]
        assert np.array_equal(values(out)[rows], data[rows][:, order])
    with pytest.raises(UnsupportedError, match="num_elem_per_idx"):
        nisa.local_gather(out, tile(data), tile(at, nl.uint16), num_elem_per_idx=2)


def test_local_gather_of_partitions_without_data_counts_as_unwritten_there(core: Core):
    data, out, copy = empty((64, 4)), empty((64, 3)), empty((64, 3))
    nisa.memset(data[0:32], 2.5)
    at = tile(np.zeros((64, 1), int), nl.uint16)
    nisa.local_gather(out, data, at, num_valid_indices=3)
    assert (values(out[0:32]) == 2.5).all()
    with pytest.raises(UninitializedError):
        nisa.nc_matmul(empty((3, 3), buffer=nl.psum), out, tile(np.ones((64, 3))))
    nisa.memset(data[32:64, 1:4], 2.5)  # element 0, which is gathered, is forgotten
    with pytest.raises(UninitializedError):
        nisa.local_gather(copy, data, at, num_valid_indices=3)
    with pytest.raises(UninitializedError):
        nisa.local_gather(copy, empty((64, 4)), at, num_valid_indices=3)
