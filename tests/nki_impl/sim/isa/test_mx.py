"""The packed formats and the MX instructions of trn3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim.errors import DtypeError, MatmulError, ShapeError, TargetError, UninitializedError
from nki_impl.sim.machine.core import Core, acting_as
from nki_impl.sim.packages.neuron_dtypes import static_cast
from nki_impl.sim.tensor.packed import pack, unpack

from ..tiles import Array, bf16, empty, normal, tile, values

PACKED = [nl.float8_e4m3fn_x4, nl.float8_e5m2_x4]


@pytest.fixture
def trn3() -> Iterator[Core]:
    with acting_as(Core(target="trn3")) as one:
        yield one


def packed_tile(numbers: Array, dtype: Any) -> nl.NkiTensor:
    held = pack(numbers.astype(np.float32), dtype)
    out = nl.ndarray(held.shape, dtype)
    out.array[...] = held
    out.storage.set_all_written()
    return out


def scale_tile(scales: Array) -> nl.NkiTensor:
    """Put the scales [K / 8, F] into the first four partitions of each quadrant; the rest is not written."""
    out = empty((len(scales) * 8, scales.shape[1]), nl.uint8)
    for row, line in enumerate(scales):
        at = row // 4 * 32 + row % 4
        nisa.dma_copy(out[at : at + 1], tile(line[None], nl.uint8))
    return out


@pytest.mark.parametrize("dtype", [*PACKED, nl.float4_e2m1fn_x4])
def test_number_i_of_an_element_is_in_the_bits_from_i_times_its_width(dtype: Any) -> None:
    numbers = np.float32([[0.5, -1.0, 2.0, 6.0], [0.0, 3.0, -0.5, 1.5]])
    held = pack(numbers, dtype)
    assert held.shape == (2, 1) and held.dtype == dtype.storage
    assert np.array_equal(unpack(held, dtype), numbers)
    width = held.itemsize * 2
    word = int(held.view(f"<u{held.itemsize}")[0, 0])
    half = {8: {0.5: 0x30}, 4: {0.5: 0x1}}[width].get(0.5)
    if dtype is nl.float8_e5m2_x4:
        half = 0x38
    assert word & (2**width - 1) == half


@pytest.mark.parametrize(
    ("dtype", "fraction", "bias", "specials"),
    [
        (nl.float8_e4m3, 3, 7, {0x78: np.inf} | dict.fromkeys(range(0x79, 0x80), np.nan)),
        (nl.float8_e4m3fn, 3, 7, {0x7F: np.nan}),
        (nl.float8_e5m2, 2, 15, {0x7C: np.inf} | dict.fromkeys(range(0x7D, 0x80), np.nan)),
    ],
)
def test_every_byte_of_a_float8_tile_is_read_as_the_number_that_the_format_defines(
    trn3: Core, dtype: Any, fraction: int, bias: int, specials: dict[int, float]
) -> None:
    held = empty((16, 32), dtype)
    held.array[:, ::2] = np.arange(256, dtype=np.uint8).reshape(16, 16).view(dtype.storage)
    held.storage.set_all_written()
    out = empty((16, 16))
    nisa.tensor_copy(out, held[:, ::2])
    for byte, got in enumerate(values(out).ravel()):
        exponent, rest = (byte & 0x7F) >> fraction, byte & (1 << fraction) - 1
        size = (rest / 2**fraction + (exponent > 0)) * 2.0 ** (max(exponent, 1) - bias)
        expected = specials.get(byte & 0x7F, size) * (-1 if byte & 0x80 else 1)
        assert np.array_equal(got, np.float32(expected), equal_nan=True), byte


def test_static_cast_packs_unpacks_and_rounds() -> None:
    x = normal(3, 8)
    held = static_cast(x, nl.float8_e5m2_x4)
    assert held.shape == (3, 2)
    assert np.array_equal(
        static_cast(held, np.float32), static_cast(static_cast(x, nl.float8_e5m2), np.float32)
    )
    assert static_cast(held, nl.float8_e5m2).dtype == nl.float8_e5m2


def test_packed_tiles_move_but_no_other_instruction_computes_with_them(trn3: Core) -> None:
    source = packed_tile(normal(32, 16), nl.float8_e4m3fn_x4)
    out = empty((32, 4), nl.float8_e4m3fn_x4)
    nisa.tensor_copy(out, source)
    assert np.array_equal(out.array, source.array)
    nisa.memset(out, 0.0)
    assert not out.array.view(np.uint32).any()
    for attempt in (
        lambda: nisa.tensor_tensor(empty((32, 4)), source, source, nl.add),
        lambda: nisa.tensor_copy(empty((32, 4)), source),
        lambda: nisa.tensor_copy(out, tile(normal(32, 4))),
        lambda: nisa.dma_copy(empty((32, 4)), source),
    ):
        with pytest.raises(DtypeError, match="only in nc_matmul_mx, quantize_mx"):
            attempt()
    with pytest.raises(DtypeError):
        nisa.memset(out, 1.0)


@pytest.mark.parametrize("dtype", PACKED)
def test_quantize_mx_scales_by_the_largest_exponent_of_8_partitions_and_4_numbers(
    trn3: Core, dtype: Any
) -> None:
    x = bf16(normal(64, 24) * np.float32(2) ** np.random.default_rng(2).integers(-20, 20, (64, 24)))
    out, scale = empty((64, 6), dtype), empty((64, 6), nl.uint8)
    nisa.quantize_mx(out, tile(x, nl.bfloat16), scale)
    top, largest = (8, 448.0) if dtype is nl.float8_e4m3fn_x4 else (15, 57344.0)
    got = unpack(out.array, dtype)
    for block, column in np.ndindex(8, 6):
        part = x[8 * block : 8 * block + 8, 4 * column : 4 * column + 4]
        exponent = int(np.floor(np.log2(np.abs(part).max())))
        at = block // 4 * 32 + block % 4
        assert scale.array[at, column] == exponent - top + 127
        expected = np.clip(part / 2.0 ** (exponent - top), -largest, largest)
        numbers = got[8 * block : 8 * block + 8, 4 * column : 4 * column + 4]
        # Half an ulp of the format: 3 or 2 fraction bits; subnormals below.
        bound = np.maximum(np.abs(expected) * 2.0 ** (-4 if top == 8 else -3), 2.0**-10)
        assert (np.abs(numbers - expected) <= bound).all()
    with pytest.raises(UninitializedError):
        values(scale[4:5])


@pytest.mark.parametrize("dtype", PACKED)
def test_the_bits_of_a_scale_are_the_same_in_both_scale_dtypes(trn3: Core, dtype: Any) -> None:
    x = tile(bf16(normal(64, 24)), nl.bfloat16)
    octets, powers = empty((64, 6), nl.uint8), empty((64, 6), nl.float8_e8m0fnu)
    nisa.quantize_mx(empty((64, 6), dtype), x, octets)
    nisa.quantize_mx(empty((64, 6), dtype), x, powers)
    for start in (0, 32):
        at = slice(start, start + 4)
        assert np.array_equal(octets.array[at], powers.array[at].view(np.uint8))


def test_partitions_of_a_scale_tile_without_scales_stay_unwritten(trn3: Core) -> None:
    scale = empty((64, 6), nl.uint8)
    nisa.quantize_mx(
        empty((64, 6), nl.float8_e4m3fn_x4), tile(bf16(normal(64, 24)), nl.bfloat16), scale
    )
    out = nl.ndarray((64, 6), nl.uint8, buffer=nl.shared_hbm)
    with pytest.raises(UninitializedError, match="336 of 384 elements"):
        nisa.dma_copy(out, scale)
    for start in (0, 32):
        nisa.dma_copy(out[start : start + 4], scale[start : start + 4])
    with pytest.raises(UninitializedError):
        values(out)


def test_quantize_mx_keeps_the_scales_of_other_tensors_in_the_same_tile(trn3: Core) -> None:
    scale = empty((64, 6), nl.uint8)
    nisa.dma_copy(scale[4:8], tile(np.full((4, 6), 77), nl.uint8))
    nisa.memset(scale[32:64], 78)
    nisa.quantize_mx(
        empty((32, 6), nl.float8_e5m2_x4), tile(bf16(normal(32, 24)), nl.bfloat16), scale[0:32]
    )
    assert (scale.array[4:8] == 77).all() and (values(scale[32:64]) == 78).all()
    assert values(scale[0:4]).max() < 128
    with pytest.raises(UninitializedError, match="144 of 192"):
        nisa.dma_copy(nl.ndarray((32, 6), nl.uint8, buffer=nl.hbm), scale[0:32])


@pytest.mark.parametrize("dtype", [*PACKED, nl.float4_e2m1fn_x4])
def test_a_packed_element_counts_as_written_when_all_its_bytes_are(trn3: Core, dtype: Any) -> None:
    packed, c = empty((32, 4), dtype), empty((4, 4), nl.float32, nl.psum)
    scales = tile(np.full((32, 4), 127), nl.uint8)
    octets = packed.view(nl.uint8)
    last = octets.shape[1] - 1
    nisa.memset(octets[:, 0:last], 0)
    for read in (
        lambda: nisa.dma_copy(nl.ndarray((32, 4), dtype, buffer=nl.hbm), packed),
        lambda: nisa.nc_matmul_mx(c, packed, packed, scales, scales),
    ):
        with pytest.raises(UninitializedError, match="32 of"):
            read()
    nisa.memset(octets[:, last : last + 1], 0)
    nisa.nc_matmul_mx(c, packed, packed, scales, scales)
    assert (values(c) == 0).all()


def test_matmul_mx_multiplies_scaled_blocks_and_sums_four_numbers(trn3: Core) -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-6, 7, (64, n)).astype(np.float32) for n in (4 * 5, 4 * 7))
    sa, sb = rng.integers(120, 135, (8, 5)), rng.integers(120, 135, (8, 7))
    c = empty((5, 7), nl.float32, nl.psum)
    given = [packed_tile(a, nl.float8_e4m3fn_x4), packed_tile(b, nl.float8_e5m2_x4)]
    nisa.nc_matmul_mx(c, *given, scale_tile(sa), scale_tile(sb))
    b = unpack(given[1].array, nl.float8_e5m2_x4)
    wide_a = a.reshape(64, 5, 4) * 2.0 ** (np.repeat(sa, 8, axis=0)[..., None] - 127.0)
    wide_b = b.reshape(64, 7, 4) * 2.0 ** (np.repeat(sb, 8, axis=0)[..., None] - 127.0)
    want = np.einsum("kmq,knq->mn", wide_a, wide_b)
    most = np.einsum("kmq,knq->mn", np.abs(wide_a), np.abs(wide_b))
    assert (np.abs(values(c) - want) <= 256 * 2.0**-24 * most).all()
    nisa.nc_matmul_mx(c, *given, scale_tile(sa), scale_tile(sb))
    assert (np.abs(values(c) - 2 * want) <= 512 * 2.0**-24 * most).all()


def test_matmul_mx_reads_the_scales_that_it_needs_and_only_them(trn3: Core) -> None:
    a = packed_tile(normal(32, 16), nl.float8_e4m3fn_x4)
    scales = empty((32, 4), nl.uint8)
    c = empty((4, 4), nl.float32, nl.psum)
    nisa.memset(scales[0:3], 127)
    with pytest.raises(UninitializedError, match="stationary_scale"):
        nisa.nc_matmul_mx(c, a, a, scales, scales)
    nisa.memset(scales[0:4], 127)
    nisa.nc_matmul_mx(c, a, a, scales, scales)


def test_mx_instructions_refuse_wrong_operands_and_targets(trn3: Core) -> None:
    a, scales = (
        packed_tile(normal(32, 16), nl.float8_e4m3fn_x4),
        tile(np.full((32, 4), 127), nl.uint8),
    )
    c = empty((4, 4), nl.float32, nl.psum)
    with pytest.raises(DtypeError, match="packed"):
        nisa.nc_matmul_mx(c, tile(normal(32, 4), nl.bfloat16), a, scales, scales)
    with pytest.raises(ShapeError, match="moving_scale"):
        nisa.nc_matmul_mx(c, a, a, scales, scales[:, 0:3])
    with pytest.raises(MatmulError, match="PSUM"):
        nisa.nc_matmul_mx(empty((4, 4)), a, a, scales, scales)
    with pytest.raises(DtypeError, match="float8_e5m2_x4 or float8_e4m3fn_x4"):
        nisa.quantize_mx(
            empty((32, 4), nl.float4_e2m1fn_x4), tile(normal(32, 16), nl.bfloat16), scales
        )
    with acting_as(Core(target="trn2")), pytest.raises(TargetError):
        nisa.nc_matmul_mx(c, a, a, scales, scales)
