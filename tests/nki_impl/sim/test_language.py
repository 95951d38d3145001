"""nki.language: allocation, sizes, loops, the launch grid, and operators called on tiles."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim.errors import CapacityError, DtypeError, OutputError, RaceError, ShapeError
from nki_impl.sim.machine.core import Core, acting_as
from nki_impl.sim.machine.launch import run_ranks
from nki_impl.sim.tensor import dtypes

from .tiles import bf16, empty, normal, tile, values


def test_zeros_ones_full_fill_every_memory(core: Core) -> None:
    for buffer in (nl.sbuf, nl.psum, nl.hbm, nl.shared_hbm):
        assert values(nl.zeros((4, 3), nl.bfloat16, buffer)).max() == 0
        assert values(nl.ones((4, 3), nl.int32, buffer)).min() == 1
        assert values(nl.full((4, 3), 2.5, nl.float16, buffer)).min() == 2.5


def test_ndarray_takes_lists_dtype_names_and_no_name(core: Core) -> None:
    t = nl.ndarray([4, 3], "bfloat16", buffer=nl.shared_hbm, name=None)
    assert (t.shape, t.dtype, t.name) == ((4, 3), nl.bfloat16, "")


def test_tile_sizes_of_trn2_and_trn3(core: Core) -> None:
    size = nl.tile_size
    assert (size.pmax, size.psum_fmax, size.psum_bank_fmax_bytes, size.psum_num_banks) == (
        128,
        512,
        2048,
        8,
    )
    assert (size.gemm_stationary_fmax, size.gemm_moving_fmax, size.bn_stats_fmax) == (128, 512, 512)
    assert (size.sbuf_fmax_bytes, size.sbuf_fmax, size.sbuf_size_bytes) == (
        229376,
        57344,
        28 * 2**20,
    )
    with acting_as(Core(target="trn3")):
        assert size.sbuf_size_bytes == 32 * 2**20


def test_a_tile_of_the_whole_available_sbuf_fits_and_not_a_byte_more(core: Core) -> None:
    held = empty((1, nl.tile_size.total_available_sbuf_size), nl.uint8)
    with pytest.raises(CapacityError):
        empty((1, 1), nl.uint8)
    assert held.size


def test_buffers_are_told_apart() -> None:
    asked = [nl.is_hbm, nl.is_sbuf, nl.is_psum, nl.is_on_chip]
    table = {b: [ask(b) for ask in asked] for b in nl.MemoryRegion}
    assert table == {
        nl.sbuf: [False, True, False, True],
        nl.psum: [False, False, True, True],
        nl.private_hbm: [True, False, False, False],
        nl.shared_hbm: [True, False, False, False],
    }
    assert nl.hbm is nl.private_hbm


def test_the_static_ranges_are_pythons() -> None:
    for ours in (nl.affine_range, nl.sequential_range, nl.static_range):
        assert list(ours(4)) == [0, 1, 2, 3]
        assert list(ours(1, 8, 3)) == [1, 4, 7]
    assert nl.ds(16, 8) == slice(16, 24)


def test_a_dynamic_range_gives_registers_and_takes_them_as_bounds(core: Core) -> None:
    bound = nisa.register_alloc(7)
    assert [r.read("i") for r in nl.dynamic_range(1, bound, 2)] == [1, 3, 5]
    with pytest.raises(DtypeError, match="register_alloc"):
        nisa.register_move(next(iter(nl.dynamic_range(3))), 0)


def test_the_launch_grid_is_seen_by_the_kernel() -> None:
    with acting_as(Core()):
        assert (nl.program_ndim(), nl.num_programs(0), nl.program_id(0)) == (0, 1, 0)
    with acting_as(Core(core=1, lnc=2, grid=2)):
        assert (nl.program_ndim(), nl.num_programs(axes=0), nl.program_id(axis=0)) == (1, 2, 1)
        with pytest.raises(ShapeError):
            nl.program_id(1)


def test_the_identity_is_uint8_by_default_and_can_be_written_to_a_tile(core: Core) -> None:
    eye = nl.shared_identity_matrix(8)
    assert eye.dtype is nl.uint8 and np.array_equal(values(eye), np.eye(8))
    target = empty((16, 16), nl.bfloat16)
    assert nl.shared_identity_matrix(16, nl.bfloat16, target) is target
    assert np.array_equal(values(target), np.eye(16))
    with pytest.raises(ShapeError):
        nl.shared_identity_matrix(8, nl.bfloat16, target)


def test_a_shared_constant_lies_in_hbm_and_is_not_written(core: Core) -> None:
    constant = nl.shared_constant(np.arange(6, dtype=np.float32).reshape(2, 3))
    out = empty((2, 3))
    nisa.dma_copy(out, constant)
    assert values(out).ravel().tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(OutputError):
        nisa.dma_copy(constant, out)


def test_load_and_store_move_between_hbm_and_sbuf(core: Core) -> None:
    h = tile(normal(8, 4), nl.bfloat16, nl.hbm)
    t = nl.load(h[0:4, :], dtype=nl.float32)
    out = nl.ndarray((4, 4), nl.float32, nl.shared_hbm)
    nl.store(out, t)
    assert t.buffer is nl.sbuf and np.array_equal(values(out), values(h)[0:4])


def test_operators_called_on_tiles_compute(core: Core) -> None:
    x, y = normal(8, 6), normal(8, 6, seed=1)
    a, b = tile(x), tile(y)
    assert np.array_equal(values(nl.add(a, b)), x + y)
    assert np.array_equal(values(nl.subtract(1.0, a)), np.float32(1) - x)
    assert np.array_equal(values(nl.subtract(a, 1.0)), x - np.float32(1))
    assert np.array_equal(values(nl.multiply(a, b, dtype=nl.bfloat16)), bf16(x * y))
    assert np.array_equal(values(nl.exp(a)), np.exp(x))
    assert np.array_equal(values(nl.negative(a)), -x)
    assert np.array_equal(values(nl.abs(a)), np.abs(x))
    assert np.array_equal(values(nl.reciprocal(a)), np.float32(1) / x)
    assert np.array_equal(values(nl.less(a, b)), (x < y).astype(np.float32))
    assert nl.add(tile(x, nl.bfloat16), tile(np.ones((8, 6)), nl.int32)).dtype is nl.bfloat16
    with pytest.raises(DtypeError) as caught:
        nl.add(1.0, 2.0)
    assert caught.value.operation == "add"


def test_reductions_called_on_tiles_compute(core: Core) -> None:
    x = normal(8, 3, 4)
    t = tile(x)
    assert np.allclose(values(nl.sum(t, axis=(1, 2))), x.sum(axis=(1, 2))[:, None], rtol=1e-6)
    assert np.array_equal(values(nl.max(t, axis=2)), x.max(axis=2))
    assert np.array_equal(values(nl.min(t, axis=2, keepdims=True)), x.min(axis=2, keepdims=True))


def test_device_print_shows_values_and_no_reorder_does_nothing(core: Core, capsys: Any) -> None:
    with nl.no_reorder():
        nl.device_print("scores", tile(np.full((1, 2), 1.5)))
    assert "scores [rank 0 core 0]" in (text := capsys.readouterr().out) and "1.5" in text


def test_a_shared_constant_may_be_the_name_of_a_file(core: Core, tmp_path: Any) -> None:
    np.save(tmp_path / "rotation.npy", np.eye(3, dtype=np.float32))
    constant = nl.shared_constant(str(tmp_path / "rotation.npy"))
    assert constant.buffer is nl.shared_hbm and np.array_equal(values(constant), np.eye(3))


def test_numpy_takes_every_dtype_and_compares_it() -> None:
    for dtype in dtypes.ALL:
        assert np.zeros(2, dtype).dtype == dtype.storage
        assert copy.deepcopy(dtype) is dtype and pickle.loads(pickle.dumps(dtype)) is dtype  # noqa: S301
        if dtype is not nl.tfloat32:
            assert np.dtype(dtype) == dtype and dtype == np.dtype(dtype)
        if dtype.is_packed:
            assert {np.dtype(dtype): 1}[dtype] == 1 and {dtype: 1}[np.dtype(dtype)] == 1
    assert nl.float32 != np.dtype(np.float16) and nl.tfloat32 != np.dtype(np.float32)
    assert nl.bool is nl.bool_ and nl.range is range
    with pytest.raises(AttributeError):
        nl.complex64  # noqa: B018


def test_both_cores_share_a_constant() -> None:
    def kernel(x: Any, differ: Any) -> Any:
        table = np.full((1, 4), nl.program_id(0) if differ else 7, np.float32)
        constant, out = nl.shared_constant(table), nl.ndarray((2, 4), x.dtype, nl.shared_hbm)
        me = nl.program_id(0)
        nisa.dma_copy(out[me : me + 1], constant)
        return out

    x = np.zeros((1, 4), np.float32)
    assert (run_ranks(kernel, [(x, False)], lnc=2).results[0] == 7).all()
    with pytest.raises(RaceError, match="same values on both cores"):
        run_ranks(kernel, [(x, True)], lnc=2)


@pytest.mark.parametrize("dtype", [np.bool_, ml_dtypes.float8_e4m3, np.float64])
def test_a_constant_has_a_dtype_of_the_documented_list(core: Core, dtype: Any) -> None:
    with pytest.raises(DtypeError):
        nl.shared_constant(np.zeros((1, 4), dtype))
