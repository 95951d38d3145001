"""The tensor engine: products, accumulation in PSUM, transposition, and its limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim.errors import (
    DtypeError,
    MatmulError,
    PlacementError,
    SimulatorWarning,
    UninitializedError,
)
from nki_impl.sim.machine.core import Core, acting_as

from ..tiles import Array, bf16, empty, normal, tile, values


def exact_product(a: Array, b: Array) -> Array:
    return a.T.astype(np.float64) @ b.astype(np.float64)


def psum(*shape: int, dtype: Any = nl.float32) -> nl.NkiTensor:
    return empty(shape, dtype, nl.psum)


@pytest.mark.parametrize("dtype", [nl.bfloat16, nl.float16, nl.float32])
@pytest.mark.parametrize(
    ("k", "m", "n"), [(128, 128, 512), (64, 32, 48), (1, 1, 1), (128, 1, 512), (7, 128, 3)]
)
def test_the_product_is_stationary_transposed_times_moving_in_float32(
    core: Core, dtype: Any, k: int, m: int, n: int
) -> None:
    a, b, c = tile(normal(k, m), dtype), tile(normal(k, n, seed=1), dtype), psum(m, n)
    nisa.nc_matmul(c, a, b)
    truth = exact_product(values(a), values(b))
    scale = np.abs(values(a)).T.astype(np.float64) @ np.abs(values(b)).astype(np.float64)
    # Inner products of length k in float32, any order: |error| <= k u sum |a b|.
    assert (np.abs(values(c) - truth) <= k * 2.0**-24 * scale).all()


def test_products_of_16_bit_numbers_are_exact_before_they_are_added(core: Core) -> None:
    a, b, c = (
        tile(normal(1, 16), nl.bfloat16),
        tile(normal(1, 16, seed=1), nl.bfloat16),
        psum(16, 16),
    )
    nisa.nc_matmul(c, a, b)
    assert np.array_equal(values(c).astype(np.float64), exact_product(values(a), values(b)))


def test_free_dimensions_are_flattened_and_16_bit_kinds_mix(core: Core) -> None:
    a, b, c = tile(normal(8, 2, 3), nl.bfloat16), tile(normal(8, 4, 5), nl.float16), psum(6, 20)
    nisa.nc_matmul(c, a, b)
    truth = exact_product(values(a).reshape(8, 6), values(b).reshape(8, 20))
    assert np.allclose(values(c), truth, atol=1e-5)


def test_accumulate_false_overwrites_true_adds_none_starts_and_then_adds(core: Core) -> None:
    a, b = tile(np.ones((2, 4))), tile(np.ones((2, 6)))
    c = psum(4, 6)
    expected = [(None, 2), (None, 4), (True, 6), (False, 2), (True, 4), (None, 6)]
    for accumulate, result in expected:
        nisa.nc_matmul(c, a, b, accumulate=accumulate)
        assert (values(c) == result).all(), accumulate


def test_none_decides_element_by_element(core: Core) -> None:
    a, b, c = tile(np.ones((2, 4))), tile(np.ones((2, 6))), psum(4, 6)
    nisa.nc_matmul(c[:, 0:4], a, b[:, 0:4])
    nisa.nc_matmul(c[:, 2:6], a, b[:, 0:4])
    assert values(c)[0].tolist() == [2, 2, 4, 4, 2, 2]


def test_another_writer_ends_the_accumulation(core: Core) -> None:
    a, b, c = tile(np.ones((2, 4))), tile(np.ones((2, 6))), psum(4, 6)
    nisa.nc_matmul(c, a, b)
    nisa.memset(c, 5.0)
    nisa.nc_matmul(c, a, b)
    assert (values(c) == 2).all()


def test_adding_to_what_no_matmul_started_raises_unless_asked_for(core: Core) -> None:
    a, b = tile(np.ones((2, 4))), tile(np.ones((2, 6)))
    with pytest.raises(MatmulError, match="24 of 24 elements not started"):
        nisa.nc_matmul(psum(4, 6), a, b, accumulate=True)
    filled = psum(4, 6)
    nisa.memset(filled, 10.0)
    with pytest.raises(MatmulError):
        nisa.nc_matmul(filled, a, b, accumulate=True)
    core.strict_matmul = False
    nisa.nc_matmul(filled, a, b, accumulate=True)
    assert (values(filled) == 12).all()
    with pytest.raises(MatmulError):
        nisa.nc_matmul(psum(4, 6), a, b, accumulate=True)


def operands(dtype: Any = nl.float32, **given: Any) -> dict[str, Any]:
    """Legal operands of a small product, with some replaced."""
    legal = {
        "dst": psum(32, 48),
        "stationary": tile(normal(64, 32), dtype),
        "moving": tile(normal(64, 48), dtype),
    }
    return {**legal, **given}


OTHER = {nl.float32: nl.bfloat16, nl.bfloat16: nl.float32}
WRONG: dict[str, Any] = {
    "dst in SBUF": lambda kind: {"dst": empty((32, 48))},
    "dst bfloat16 on trn2": lambda kind: {"dst": psum(32, 48, dtype=nl.bfloat16)},
    "dst of another M": lambda kind: {"dst": psum(31, 48)},
    "dst of another N": lambda kind: {"dst": psum(32, 47)},
    "dst transposed": lambda kind: {"dst": psum(48, 32)},
    "K differs": lambda kind: {"moving": tile(normal(63, 48), kind)},
    "M above 128": lambda kind: {"stationary": tile(normal(64, 129), kind), "dst": psum(128, 48)},
    "N above 512": lambda kind: {"moving": tile(normal(64, 513), kind), "dst": psum(32, 513)},
    "stationary in PSUM": lambda kind: {"stationary": tile(normal(64, 32), kind, nl.psum)},
    "moving in PSUM": lambda kind: {"moving": tile(normal(64, 48), kind, nl.psum)},
    "bfloat16 with float32": lambda kind: {"moving": tile(normal(64, 48), OTHER[kind])},
    "float32 with bfloat16": lambda kind: {"stationary": tile(normal(64, 32), OTHER[kind])},
    "integers": lambda kind: {"moving": tile(np.ones((64, 48)), nl.int32)},
    "dst across two banks": lambda kind: {"dst": psum(32, 1024)[:, 480:528]},
    "tile size alone": lambda kind: {"tile_size": (64, 128)},
    "tile size of 48": lambda kind: {"tile_size": (48, 128), "tile_position": (0, 0)},
    "tile too small": lambda kind: {"tile_size": (32, 128), "tile_position": (0, 0)},
    "tile position off": lambda kind: {"tile_size": (64, 128), "tile_position": (32, 0)},
    "no identity": lambda kind: {"is_transpose": True},
}


@pytest.mark.parametrize("dtype", OTHER)
@pytest.mark.parametrize("what", WRONG)
def test_each_limit_of_a_product_raises(core: Core, what: str, dtype: Any) -> None:
    nisa.nc_matmul(**operands(dtype))
    with pytest.raises(MatmulError) as caught:
        nisa.nc_matmul(**operands(dtype, **WRONG[what](dtype)))
    assert caught.value.operation == "nc_matmul" and caught.value.fix


def test_a_product_inside_the_second_bank_of_a_large_tile_is_fine(core: Core) -> None:
    c = psum(32, 1024)
    nisa.nc_matmul(**operands(dst=c[:, 512:560]))
    nisa.nc_matmul(**operands(tile_size=(64, 128), tile_position=(64, 0)))


def test_operands_in_hbm_unwritten_or_in_a_fast_mode_are_refused(core: Core) -> None:
    with pytest.raises(PlacementError):
        nisa.nc_matmul(**operands(moving=tile(normal(64, 48), None, nl.hbm)))
    with pytest.raises(UninitializedError, match="moving"):
        nisa.nc_matmul(**operands(moving=empty((64, 48))))
    with pytest.raises(MatmulError, match="float8 with double_row"):
        nisa.nc_matmul(**operands(dst=psum(16, 24), perf_mode=nisa.matmul_perf_mode.double_row))
    with pytest.raises(DtypeError):
        nisa.nc_matmul(**operands(moving=normal(64, 48)))


def test_trn3_allows_wider_products_into_bfloat16() -> None:
    with acting_as(Core(target="trn3")):
        a, b = tile(np.ones((2, 4)), nl.bfloat16), tile(np.full((2, 1024), 1.25), nl.bfloat16)
        c = psum(4, 1024, dtype=nl.bfloat16)
        nisa.nc_matmul(c, a, b)
        nisa.nc_matmul(c, a, b)
        assert (values(c) == 5).all()


@pytest.mark.parametrize("dtype", [nl.float32, nl.bfloat16, nl.float16, nl.int32])
def test_a_transposition_is_exact_for_every_dtype(core: Core, dtype: Any) -> None:
    data = tile(normal(128, 96) * 100, dtype)
    out = psum(96, 128, dtype=dtype)
    nisa.nc_transpose(out, data)
    assert np.array_equal(out.array.view(np.uint8), data.array.T.copy().view(np.uint8))


def test_transposition_keeps_nan_and_flattens(core: Core) -> None:
    array = bf16(normal(4, 2, 3))
    array[0, 0] = [np.nan, np.inf, -0.0]
    out = psum(6, 4, dtype=nl.bfloat16)
    nisa.nc_transpose(out, tile(array, nl.bfloat16))
    assert np.array_equal(out.array.astype(np.float32), array.reshape(4, 6).T, equal_nan=True)


def test_the_vector_engine_transposes_blocks_of_32_anywhere(core: Core) -> None:
    data, out = tile(normal(32, 16)), empty((16, 32))
    nisa.nc_transpose(out, data)
    nisa.nc_transpose(out, tile(normal(32, 16), None, nl.psum), engine=nisa.engine.vector)
    assert ("vector", "nc_transpose") in core.tallies and (
        "tensor",
        "nc_transpose",
    ) not in core.tallies


def test_each_limit_of_a_transposition_raises(core: Core) -> None:
    data = tile(normal(64, 48))
    with pytest.raises(MatmulError, match="32 x 32"):
        nisa.nc_transpose(empty((48, 64)), data)
    with pytest.raises(PlacementError):
        nisa.nc_transpose(empty((48, 64)), data, engine=nisa.engine.tensor)
    with pytest.raises(PlacementError):
        nisa.nc_transpose(psum(48, 64), data, engine=nisa.engine.scalar)
    with pytest.raises(MatmulError):
        nisa.nc_transpose(psum(64, 48), data)
    with pytest.raises(MatmulError, match="128 x 128"):
        nisa.nc_transpose(psum(128, 64), tile(normal(64, 129)))
    with pytest.raises(DtypeError):
        nisa.nc_transpose(psum(48, 64, dtype=nl.bfloat16), data)


def test_is_transpose_multiplies_by_an_identity(core: Core) -> None:
    a, c = tile(normal(64, 32)), psum(32, 64)
    nisa.nc_matmul(c, a, nl.shared_identity_matrix(64, nl.float32), is_transpose=True)
    assert np.array_equal(values(c), values(a).T)


def test_is_transpose_moves_bits_and_keeps_unwritten_elements_unwritten(core: Core) -> None:
    a, c = empty((64, 4)), psum(4, 64)
    nisa.memset(a[:, 1:2], float("inf"))
    nisa.memset(a[:, 3:4], 2.0)
    nisa.nc_matmul(c, a, nl.shared_identity_matrix(64, nl.float32), is_transpose=True)
    out = empty((4, 64))
    nisa.tensor_copy(out, c)
    with pytest.raises(UninitializedError):
        values(out)
    copied = empty((2, 64))
    for row, source in enumerate((1, 3)):
        nisa.dma_copy(copied[row : row + 1], out[source : source + 1])
    assert np.isinf(values(copied)[0]).all() and (values(copied)[1] == 2).all()
    with pytest.raises(MatmulError, match="accumulate"):
        nisa.nc_matmul(
            c, a, nl.shared_identity_matrix(64, nl.float32), is_transpose=True, accumulate=True
        )


def test_is_transpose_into_bfloat16_warns_on_trn2_and_no_other_product_may(core: Core) -> None:
    a, c = tile(normal(64, 32), nl.bfloat16), psum(32, 64, dtype=nl.bfloat16)
    identity = nl.shared_identity_matrix(64, nl.bfloat16)
    with pytest.warns(SimulatorWarning, match="documentation requires a float32 dst on trn2.*bwmm"):
        nisa.nc_matmul(c, a, identity, is_transpose=True)
    assert np.array_equal(values(c), values(a).T)
    with pytest.raises(MatmulError, match="float32"):
        nisa.nc_matmul(c, a, identity)


def test_double_row_contracts_both_rows_of_float8(core: Core) -> None:
    a, b = tile(normal(16, 2, 8), nl.float8_e4m3), tile(normal(16, 2, 24, seed=1), nl.float8_e5m2)
    c = psum(8, 24)
    nisa.nc_matmul(c, a, b, perf_mode="double_row")
    truth = np.einsum("krm,krn->mn", values(a).astype(np.float64), values(b))
    assert np.allclose(values(c), truth, atol=1e-5)
    with pytest.raises(MatmulError, match="column tiling"):
        nisa.nc_matmul(c, a, b, perf_mode="double_row", tile_position=(0, 0), tile_size=(128, 64))
    with pytest.raises(DtypeError, match="perf_mode"):
        nisa.nc_matmul(c, a, b, perf_mode="triple_row")


def test_nc_transpose_keeps_all_bits_of_bfloat16(core: Core) -> None:
    bits = np.arange(2**16, dtype=np.uint16).reshape(4, 128, 128)
    for given in bits:
        x, out = empty((128, 128), nl.bfloat16), empty((128, 128), nl.bfloat16, nl.psum)
        x.array[...] = given.view(x.array.dtype)
        x.storage.set_all_written()
        nisa.nc_transpose(out, x)
        assert np.array_equal(out.array.view(np.uint16), given.T)
