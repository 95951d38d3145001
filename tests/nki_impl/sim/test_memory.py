"""Storages, the mask of written elements, the accounts of SBUF and PSUM, and the roundings."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import numpy as np
import pytest

from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim import nki
from nki_impl.sim.errors import (
    CapacityError,
    DtypeError,
    LaunchError,
    OutputError,
    PartitionError,
    ShapeError,
    UninitializedError,
)
from nki_impl.sim.machine.core import Core, acting_as, current
from nki_impl.sim.memory.liveness import Life, fits_quadrants
from nki_impl.sim.memory.storage import CoreMemory, RankMemory
from nki_impl.sim.tensor.access import is_written, to_numpy
from nki_impl.sim.tensor.dtypes import ALL, round_once

from .tiles import empty, normal, tile


def test_outside_a_launch_an_allocation_says_how_to_launch() -> None:
    with pytest.raises(LaunchError, match="launch with"):
        nl.ndarray((128, 1), nl.float32)


def test_an_error_names_operation_operand_limit_got_line_and_fix(core: Core) -> None:
    with pytest.raises(PartitionError) as caught:
        nl.ndarray((129, 1), nl.float32)
    error = caught.value
    assert (error.operation, error.operand, error.got) == ("ndarray", "shape", "129")
    assert "128" in error.limit and error.fix
    assert error.line.startswith(__file__) and error.line.split(":")[-1].isdigit()
    assert all(
        part in str(error)
        for part in (error.operation, error.limit, error.got, error.fix, error.line)
    )


def test_an_instruction_names_itself_in_its_errors(core: Core) -> None:
    with pytest.raises(DtypeError) as caught:
        nisa.memset(empty((128, 4)), None)
    assert caught.value.operation == "memset"


@pytest.mark.parametrize("shape", [(129, 1), (128,), (256, 4)])
def test_an_on_chip_tensor_has_a_partition_dimension_of_at_most_128(
    core: Core, shape: tuple[int, ...]
) -> None:
    with pytest.raises(PartitionError):
        nl.ndarray(shape, nl.float32)


@pytest.mark.parametrize("shape", [(), (0, 4), (128, 2.5), (128, -1)])
def test_a_shape_is_positive_integers(core: Core, shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError):
        nl.ndarray(shape, nl.float32)


@pytest.mark.parametrize("dtype", [np.float64, "uint64", None, "float8"])
def test_a_dtype_that_the_device_lacks_is_refused(core: Core, dtype: object) -> None:
    with pytest.raises(DtypeError, match=r"nl\.float32"):
        nl.ndarray((128, 1), dtype)


def test_reading_memory_that_nobody_wrote_raises_whatever_the_dtype(core: Core) -> None:
    for dtype in (nl.float32, nl.bfloat16, nl.int32, nl.uint8):
        with pytest.raises(UninitializedError, match="512 of 512"):
            nisa.tensor_scalar(empty((128, 4), dtype), empty((128, 4), dtype), nl.add, 1.0)


def test_a_tile_written_in_parts_can_be_read_when_the_last_part_is_written(core: Core) -> None:
    half = empty((128, 8))
    nisa.memset(half[:, 0:4], 1.0)
    assert not is_written(half) and is_written(half[:, 1:3])
    with pytest.raises(UninitializedError, match="512 of 1024"):
        nisa.tensor_scalar(empty((128, 8)), half, nl.add, 1.0)
    nisa.tensor_scalar(empty((128, 4)), half[:, 0:4], nl.add, 1.0)
    nisa.memset(half[:, 4:8], 2.0)
    assert is_written(half) and half.storage.mask is None


def test_writing_the_same_part_twice_does_not_count_twice(core: Core) -> None:
    part = empty((128, 8))
    nisa.memset(part[:, 0:4], 1.0)
    nisa.memset(part[:, 0:4], 1.0)
    nisa.memset(part[:, 2:6], 1.0)
    assert not is_written(part) and part.storage.missing == 128 * 2


def test_a_copy_on_chip_carries_holes_along_and_computing_with_them_raises(core: Core) -> None:
    source, moved = empty((128, 8)), empty((128, 8))
    nisa.memset(source[:, 0:4], 1.0)
    nisa.memset(moved, 5.0)
    nisa.tensor_copy(moved, source)
    assert is_written(moved[:, 0:4]) and not is_written(moved)
    with pytest.raises(UninitializedError):
        nisa.tensor_scalar(empty((128, 8)), moved, nl.add, 1.0)
    nisa.memset(moved[:, 4:8], 0.0)
    assert is_written(moved)


def test_a_wholly_unwritten_tile_copies_as_unwritten(core: Core) -> None:
    moved = tile(normal(128, 8))
    nisa.tensor_copy(moved[:, 0:4], empty((128, 4)))
    assert is_written(moved[:, 4:8]) and not is_written(moved[:, 0:1])


def test_dma_does_not_carry_holes(core: Core) -> None:
    with pytest.raises(UninitializedError):
        nisa.dma_copy(nl.ndarray((128, 4), nl.float32, nl.shared_hbm), empty((128, 4)))


def test_the_mask_follows_a_view_with_a_smaller_dtype(core: Core) -> None:
    words = empty((128, 4), nl.int32)
    halves = words.view(nl.int16)
    nisa.memset(halves[:, 0:2], 7)
    assert is_written(words[:, 0:1]) and not is_written(words[:, 1:2])
    nisa.memset(halves[:, 2:3], 7)
    assert not is_written(words[:, 1:2])
    nisa.memset(halves[:, 3:8], 7)
    assert is_written(words) and words.storage.missing == 0


def test_a_kernel_input_refuses_writes(core: Core) -> None:
    given = tile(normal(4, 4), buffer=nl.shared_hbm)
    given.storage.read_only = True
    with pytest.raises(OutputError, match="kernel input"):
        nisa.dma_copy(given, tile(normal(4, 4)))


def test_to_numpy_refuses_what_was_not_written(core: Core) -> None:
    with pytest.raises(UninitializedError):
        to_numpy(nl.ndarray((4,), nl.float32, nl.shared_hbm))


def test_sbuf_has_212984_usable_bytes_and_dropping_the_last_view_frees(core: Core) -> None:
    tiles = [empty((1, 1024), nl.uint8) for _ in range(207)]
    tiles.append(empty((1, 1016), nl.uint8))
    assert core.memory.sbuf_live == core.memory.sbuf_high == 212984
    with pytest.raises(CapacityError, match="212984"):
        empty((1, 1), nl.uint8)
    view = tiles.pop()[:, 0:1]
    with pytest.raises(CapacityError):
        empty((1, 1), nl.uint8)
    del view
    empty((1, 1016), nl.uint8)
    tiles.clear()
    assert core.memory.sbuf_live == 0 and core.memory.sbuf_high == 212984


def test_trn3_has_more_and_none_means_unlimited() -> None:
    with acting_as(Core(target="trn3", memory=CoreMemory(4))) as core:
        held = empty((1, 245752), nl.uint8)
        assert core.memory.sbuf_live == 245752 and held.size
    with acting_as(Core(memory=CoreMemory(3, None))):
        empty((1, 256 * 1024))


def test_psum_has_8_banks_and_a_tile_never_straddles_two(core: Core) -> None:
    held = [empty((128, 512), nl.float32, nl.psum) for _ in range(7)]
    held.append(empty((128, 384), nl.float32, nl.psum))
    held.append(empty((128, 128), nl.float32, nl.psum))
    assert core.memory.psum_live == [2048] * 8 and core.memory.psum_high == 16384
    with pytest.raises(CapacityError, match="8 banks"):
        empty((128, 1), nl.float32, nl.psum)
    held.pop()
    empty((128, 64), nl.float32, nl.psum)
    held.clear()
    assert core.memory.psum_live == [0] * 8


def test_two_psum_tiles_of_three_quarters_of_a_bank_need_two_banks(core: Core) -> None:
    held = [empty((128, 384), nl.float32, nl.psum) for _ in range(8)]
    with pytest.raises(CapacityError):
        empty((128, 384), nl.float32, nl.psum)
    assert len(held) == 8


def test_a_psum_tile_of_several_banks_needs_empty_ones(core: Core) -> None:
    small = empty((128, 1), nl.float32, nl.psum)
    empty((128, 7 * 512), nl.float32, nl.psum)
    with pytest.raises(CapacityError):
        empty((128, 8 * 512), nl.float32, nl.psum)
    del small
    empty((128, 8 * 512), nl.float32, nl.psum)


def test_placed_tensors_count_as_the_highest_byte(core: Core) -> None:
    a = nl.ndarray((128, 4), nl.float32, nl.sbuf, address=(0, 1024))
    b = nl.ndarray((128, 4), nl.float32, nl.sbuf, address=(0, 1024))
    assert core.memory.sbuf_high == 1040
    with pytest.raises(CapacityError):
        empty((1, 212984 - 1039), nl.uint8)
    del a, b
    nl.ndarray((128, 4), nl.float32, nl.sbuf, address=(0, 0))
    assert core.memory.sbuf_high == 1040
    empty((1, 212984), nl.uint8)
    with pytest.raises(CapacityError):
        nl.ndarray((128, 4), nl.float32, nl.sbuf, address=(0, 212984))
    with pytest.raises(ShapeError):
        nl.ndarray((128, 4), nl.float32, nl.sbuf, address=(5, 0))
    with pytest.raises(ShapeError):
        nl.ndarray((128, 512), nl.float32, nl.psum, address=(0, 1024))


def test_what_is_freed_when_does_not_depend_on_the_garbage_collector(core: Core) -> None:
    gc.disable()
    try:
        for _ in range(1000):
            empty((128, 1024))
        assert core.memory.sbuf_high <= 8192 and core.memory.sbuf_live == 0
    finally:
        gc.enable()


def test_both_cores_of_a_rank_share_hbm_by_name_and_else_by_order() -> None:
    shared = RankMemory(2)
    cores = [Core(core=c, lnc=2, shared=shared) for c in (0, 1)]
    with acting_as(cores[0]):
        first = nl.ndarray((4,), nl.float32, nl.shared_hbm)
        named = nl.ndarray((4,), nl.float32, nl.shared_hbm, name="buffer")
        alone = nl.ndarray((2,), nl.float32, nl.shared_hbm, name="only here")
        second = nl.ndarray((8,), nl.float32, nl.shared_hbm)
        private = nl.ndarray((4,), nl.float32, nl.hbm)
    with acting_as(cores[1]):
        assert nl.ndarray((4,), nl.float32, nl.shared_hbm).storage is first.storage
        assert nl.ndarray((8,), nl.float32, nl.shared_hbm).storage is second.storage
        assert nl.ndarray((4,), nl.float32, nl.shared_hbm, name="buffer").storage is named.storage
        assert nl.ndarray((4,), nl.float32, nl.hbm).storage is not private.storage
        again = nl.ndarray((4,), nl.float32, nl.shared_hbm, name="buffer")
        assert again.storage is not named.storage
    assert alone.storage.owner == (0, None)


def test_cores_that_disagree_about_a_shared_shape_are_told() -> None:
    shared = RankMemory(2)
    with acting_as(Core(core=0, lnc=2, shared=shared)):
        kept = nl.ndarray((4,), nl.float32, nl.shared_hbm)
    with (
        acting_as(Core(core=1, lnc=2, shared=shared)),
        pytest.raises(ShapeError, match="both cores"),
    ):
        nl.ndarray((5,), nl.float32, nl.shared_hbm)
    assert kept.size == 4


def test_on_one_core_every_shared_allocation_is_new(core: Core) -> None:
    a = nl.ndarray((4,), nl.float32, nl.shared_hbm, name="x")
    b = nl.ndarray((4,), nl.float32, nl.shared_hbm, name="x")
    assert a.storage is not b.storage


def test_bfloat16_is_rounded_once_to_nearest_even() -> None:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, 100_000, dtype=np.uint32)
    bits[:4] = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF]
    numbers = bits.view(np.float32)
    numbers = numbers[np.isfinite(numbers)]
    expected = numbers.view(np.uint32).astype(np.uint64)
    expected = (expected + 0x7FFF + ((expected >> 16) & 1)) >> 16
    assert (round_once(numbers, nl.bfloat16).view(np.uint16) == expected).all()


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_floats_become_integers_by_nearest_even_with_saturation(name: str) -> None:
    dtype = getattr(nl, name)
    info = np.iinfo(dtype.storage)
    numbers = np.float32([0.5, 1.5, 2.5, -0.5, -1.5, 3.49, 1e20, -1e20, np.inf, -np.inf])
    expected = [0, 2, 2, 0, max(-2, info.min), 3, info.max, info.min, info.max, info.min]
    assert round_once(numbers, dtype).tolist() == expected
    assert round_once(np.float32([np.nan]), dtype)[0] == 0


def test_tfloat32_keeps_10_fraction_bits() -> None:
    numbers = np.float32([1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 + 2**-20, np.inf])
    assert round_once(numbers, nl.tfloat32).tolist() == [1.0, 1 + 2**-9, 1 + 2**-10, np.inf]


def test_every_dtype_has_its_size_and_equals_its_name() -> None:
    assert {d.name: d.itemsize for d in ALL} == {
        "bool": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4,
        "float16": 2, "float32": 4, "bfloat16": 2, "tfloat32": 4, "float8_e4m3": 1,
        "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fn_x4": 4, "float8_e5m2_x4": 4,
        "float4_e2m1fn_x4": 2, "float8_e8m0fnu": 1,
    }  # fmt: skip
    assert all(d == d.name and str(d) == d.name for d in ALL)
    assert all({d.name: 1}[d] for d in ALL if not d.is_packed)


def test_instructions_are_counted_by_engine_with_elements_flops_and_bytes(core: Core) -> None:
    a, b = tile(normal(64, 32), nl.bfloat16), tile(normal(64, 16), nl.bfloat16)
    nisa.nc_matmul(empty((32, 16), nl.float32, nl.psum), a, b)
    nisa.dma_copy(empty((64, 32), nl.bfloat16), a)
    nisa.activation(empty((64, 32)), nl.exp, a)
    nisa.tensor_tensor(empty((64, 16)), b, b, nl.add)
    got = {key: (t.instructions, t.elements, t.flops, t.bytes) for key, t in core.tallies.items()}
    assert got == {
        ("tensor", "nc_matmul"): (1, 512, 2 * 64 * 32 * 16, 0),
        ("dma", "dma_copy"): (1, 2048, 0, 4096),
        ("scalar", "activation"): (1, 2048, 0, 0),
        ("vector", "tensor_tensor"): (1, 1024, 0, 0),
    }
    assert core.index == 4


def test_hooks_see_every_instruction_and_every_access_to_hbm(core: Core) -> None:
    steps: list[str] = []
    accesses: list[tuple[str, bool]] = []
    core.on_instruction = lambda one: steps.append(one.operation)
    core.on_access = lambda one, tensor, write: accesses.append((tensor.name, write))
    source = tile(normal(4, 4), buffer=nl.hbm)
    nisa.dma_copy(nl.ndarray((4, 4), nl.float32, nl.shared_hbm, name="out"), source)
    nisa.memset(empty((4, 4)), 1.0)
    assert steps == ["dma_copy", "memset"]
    assert accesses == [("", False), ("out", True)]


def test_current_is_restored_when_an_error_leaves_the_block(core: Core) -> None:
    with pytest.raises(RuntimeError), acting_as(Core(rank=3)):
        raise RuntimeError
    assert current() is core


def test_doubling_the_work_of_a_memory_does_not_raise_its_high_water_mark(core: Core) -> None:
    for _ in range(2):
        kept = [empty((128, 10)) for _ in range(3)]
        del kept
    assert core.memory.sbuf_high == 3 * 40


def rounds(count: int, keep: bool, partitions: int = 128) -> Any:
    """Allocate ``count`` tiles of 120 KiB, one after the other; each is used, the first one again at the end."""

    def kernel(x: Any) -> Any:
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        tiles = []
        for _ in range(count):
            tile = nl.ndarray((partitions, 30720), nl.float32)
            nisa.memset(dst=tile[0:2, 0:4], value=1.0)
            tiles.append(tile)
        nisa.dma_copy(dst=out, src=tiles[0 if keep else -1][0:2, 0:4])
        return out

    return kernel


def test_a_tile_occupies_sbuf_from_its_first_to_its_last_use_in_a_launch() -> None:
    x = np.ones((2, 4), np.float32)
    assert np.array_equal(nki.simulate(rounds(5, keep=False))(x), x)
    with pytest.raises(CapacityError, match="212984") as caught:
        nki.simulate(rounds(2, keep=True))(x)
    assert "test_memory.py" in caught.value.line


@pytest.mark.parametrize(("partitions", "fit"), [(32, 4), (33, 2), (64, 2), (65, 1)])
def test_tiles_of_few_partitions_share_the_bytes_of_others(partitions: int, fit: int) -> None:
    x = np.ones((2, 4), np.float32)

    def kernel(x: Any, count: int) -> Any:
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        tiles = [nl.ndarray((partitions, 30720), nl.float32) for _ in range(count)]
        for one in tiles:
            nisa.memset(dst=one[0:2, 0:4], value=1.0)
        for one in tiles:
            nisa.dma_copy(dst=out, src=one[0:2, 0:4])
        return out

    assert np.array_equal(nki.simulate(kernel)(x, fit), x)
    with pytest.raises(CapacityError, match="212984"):
        nki.simulate(kernel)(x, fit + 1)


def test_a_tile_of_65_to_96_partitions_leaves_the_last_32_to_others() -> None:
    def kernel(x: Any, large: int, small: int) -> Any:
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        tiles = [nl.ndarray((rows, 30720), nl.float32) for rows in (small, large)]
        for one in tiles:
            nisa.memset(dst=one[0:2, 0:4], value=1.0)
        for one in tiles:
            nisa.dma_copy(dst=out, src=one[0:2, 0:4])
        return out

    x = np.ones((2, 4), np.float32)
    assert np.array_equal(nki.simulate(kernel)(x, 96, 32), x)
    for partitions in (97, 32), (96, 33):
        with pytest.raises(CapacityError, match="212984"):
            nki.simulate(kernel)(x, *partitions)


def test_small_tiles_are_placed_together_if_a_larger_one_needs_the_rest() -> None:
    small, again = Life(1, 1, 10, False, 1), Life(1, 9, 10, False, 4)
    assert fits_quadrants([small, again, Life(2, 9, 15, False, 65)], 0, 20)
    assert not fits_quadrants([small, again, Life(2, 9, 15, False, 97)], 0, 20)


def loads_before_uses(source: str, in_order: bool = False) -> Any:
    """Load two tiles of 120 KiB from an input or from another tensor, and then use one after the other."""

    def kernel(x: Any) -> Any:
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        src = x
        if source == "scratch":
            src = nl.ndarray(x.shape, x.dtype, buffer=nl.private_hbm)
            nisa.dma_copy(dst=src, src=x)
        tiles = [nl.ndarray((128, 30720), nl.float32) for _ in range(2)]
        with nl.no_reorder() if in_order else contextlib.nullcontext():
            for one in tiles:
                nisa.dma_copy(dst=one[0:2, 0:4], src=src)
        for one in tiles if source != "twice" else [*tiles, tiles[0]]:
            nisa.dma_copy(dst=out, src=one[0:2, 0:4])
        return out

    return kernel


def test_the_load_of_an_input_can_wait_for_the_first_use_of_its_tile() -> None:
    x = np.ones((2, 4), np.float32)
    assert np.array_equal(nki.simulate(loads_before_uses("input"))(x), x)


@pytest.mark.parametrize(
    ("source", "in_order"), [("twice", False), ("scratch", False), ("input", True)]
)
def test_a_load_that_cannot_wait_occupies_sbuf(source: str, in_order: bool) -> None:
    x = np.ones((2, 4), np.float32)
    with pytest.raises(CapacityError, match="212984"):
        nki.simulate(loads_before_uses(source, in_order))(x)


def test_a_tile_occupies_its_bank_of_psum_from_its_first_to_its_last_use() -> None:
    def kernel(x: Any, again: int) -> Any:
        out, source = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm), nl.load(x)
        tiles = [nl.ndarray((2, 512), nl.float32, buffer=nl.psum) for _ in range(12)]
        for one in tiles:
            nisa.tensor_copy(dst=one[:, 0:4], src=source)
        for one in tiles[:again]:
            nisa.tensor_copy(dst=source, src=one[:, 0:4])
        nisa.dma_copy(dst=out, src=source)
        return out

    x = np.ones((2, 4), np.float32)
    assert np.array_equal(nki.simulate(kernel)(x, 7), x)
    with pytest.raises(CapacityError, match="8 banks"):
        nki.simulate(kernel)(x, 12)


def test_a_tile_that_is_larger_than_sbuf_is_refused_at_once() -> None:
    def kernel(x: Any) -> None:
        nl.ndarray((2, 60000), nl.float32)
        raise AssertionError("not reached")

    with pytest.raises(CapacityError):
        nki.simulate(kernel)(np.ones((2, 4), np.float32))
