"""Launching: decorators, grids, arguments, results, targets, counters."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import threading
import types

import ml_dtypes
import numpy as np
import pytest

from nki_impl.sim import collectives as ncc
from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim.errors import (
    DtypeError,
    LaunchError,
    OutputError,
    SimulatorError,
    UninitializedError,
)
from nki_impl.sim.machine.launch import jit, run_ranks, simulate

X = np.arange(12, dtype=np.float32).reshape(4, 3)


def shared(x, name=""):
    return nl.ndarray(x.shape, x.dtype, nl.shared_hbm, name=name)


def double(x):
    """Return twice x."""
    tile, out = nl.ndarray(x.shape, x.dtype), shared(x)
    nisa.dma_copy(dst=tile, src=x)
    nisa.tensor_scalar(tile, tile, nl.multiply, 2.0)
    nisa.dma_copy(dst=out, src=tile)
    return out


def halves(x):
    """Each core doubles its own rows."""
    core = nl.program_id(0)
    rows = x.shape[0] // nl.num_programs(0)
    tile, out = nl.ndarray((rows, x.shape[1]), x.dtype), shared(x)
    nisa.dma_copy(dst=tile, src=x[core * rows : (core + 1) * rows])
    nisa.tensor_scalar(tile, tile, nl.multiply, 2.0)
    nisa.dma_copy(dst=out[core * rows : (core + 1) * rows], src=tile)
    return out


@pytest.mark.parametrize(
    "make", [jit, jit(), jit(platform_target="trn2"), lambda f: jit(jit(f)), simulate]
)
def test_a_kernel_is_called_with_arrays_and_returns_arrays(make):
    got = make(double)(X)
    assert isinstance(got, np.ndarray)
    assert np.array_equal(got, 2 * X)
    assert np.array_equal(make(double)(x=X), 2 * X)


def test_a_kernel_keeps_the_name_and_docstring_of_its_function():
    kernel = jit(double)
    assert (kernel.__name__, kernel.__doc__) == ("double", "Return twice x.")
    assert "double" in repr(kernel)


@pytest.mark.parametrize("run", [lambda k, x: k(x), lambda k, x: simulate(k)(x)])
def test_a_grid_of_two_runs_two_cores_on_one_shared_memory(run):
    kernel = jit(halves)
    assert np.array_equal(run(kernel[2], X), 2 * X)
    assert np.array_equal(run(kernel[1], X), 2 * X)
    assert np.array_equal(run(kernel[(2,)], X), 2 * X)


def test_the_grid_is_what_the_kernel_sees():
    def kernel(x, seen):
        axes = nl.program_ndim()
        seen.append((axes, nl.num_programs(0) if axes else 1, nl.program_id(0) if axes else 0))

    seen: list = []
    kernel = jit(kernel)
    kernel(X, seen)
    kernel[1](X, seen)
    assert seen == []  # a list argument is copied, like every argument of a launch

    log: list = []

    def logging(x):
        axes = nl.program_ndim()
        log.append((axes, nl.num_programs(0), nl.program_id(0) if axes else 0))

    jit(logging)(X)
    jit(logging)[1](X)
    jit(logging)[2](X)
    assert log == [(0, 1, 0), (1, 1, 0), (1, 2, 0), (1, 2, 1)]


@pytest.mark.parametrize("grid", [0, 3, 8, True, (2, 2), "2"])
def test_a_grid_is_one_or_two(grid):
    with pytest.raises(LaunchError, match="grid"):
        jit(double)[grid]


def test_a_kernel_called_in_a_kernel_is_an_ordinary_call():
    inner = jit(double)

    def outer(x):
        return inner(inner(x))

    assert np.array_equal(jit(outer)(X), 4 * X)

    def outer_with_grid(x):
        return inner[2](x)

    assert np.array_equal(jit(outer_with_grid)[2](X), 2 * X)


def test_operations_outside_a_launch_are_refused():
    with pytest.raises(LaunchError, match="outside"):
        nl.ndarray((4, 4), nl.float32)
    with pytest.raises(LaunchError):
        ncc.rank_id()


def test_arguments_pass_through_and_defaults_hold():
    def kernel(x, factor, shift=1.0, *, names=("a",)):
        out, tile = shared(x), nl.ndarray(x.shape, x.dtype)
        nisa.dma_copy(dst=tile, src=x)
        nisa.tensor_scalar(tile, tile, nl.multiply, factor, op1=nl.add, operand1=shift)
        nisa.dma_copy(dst=out, src=tile)
        assert names == ("b",)
        return out

    got = run_ranks(kernel, [{"x": X, "factor": 3.0, "names": ("b",)}]).results[0]
    assert np.array_equal(got, 3 * X + 1)


def test_arrays_inside_tuples_lists_and_dicts_are_inputs():
    def kernel(group):
        out = nl.ndarray((4, 3), nl.float32, nl.shared_hbm)
        first, second = group["pair"]
        assert second[0].name == "group['pair'][1][0]"
        tile, other = nl.ndarray((4, 3), nl.float32), nl.ndarray((4, 3), nl.float32)
        nisa.dma_copy(dst=tile, src=first)
        nisa.dma_copy(dst=other, src=second[0])
        nisa.tensor_tensor(tile, tile, other, nl.add)
        nisa.dma_copy(dst=out, src=tile)
        return {"sum": out, "nothing": None}

    got = jit(kernel)({"pair": (X, [X + 1])})
    assert np.array_equal(got["sum"], 2 * X + 1)
    assert got["nothing"] is None


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int32, np.uint8])
def test_dtypes_survive_the_way_in_and_out(dtype):
    def kernel(x):
        out = shared(x)
        nisa.dma_copy(dst=out, src=x)
        return out

    x = X.astype(dtype)
    got = jit(kernel)(np.asfortranarray(x))
    assert got.dtype == x.dtype
    assert np.array_equal(got, x)


def test_arrays_of_other_libraries_come_in_and_numpys_scalars_stay_constants():
    class Foreign:
        def __array__(self, dtype=None, copy=None):
            return X

    def kernel(x, factor):
        tile, out = nl.ndarray(x.shape, x.dtype), shared(x)
        nisa.dma_copy(dst=tile, src=x)
        nisa.tensor_scalar(tile, tile, nl.multiply, float(factor))
        nisa.dma_copy(dst=out, src=tile)
        return out

    assert np.array_equal(simulate(kernel)(Foreign(), np.float32(3)), 3 * X)


@pytest.mark.parametrize("dtype", [np.float64, np.uint64])
def test_dtypes_that_the_device_lacks_are_refused(dtype):
    with pytest.raises(DtypeError, match="cast the array"):
        jit(double)(X.astype(dtype))


@pytest.mark.parametrize("given", [(X, X), {"y": X}, ()])
def test_arguments_that_do_not_fit_the_signature_are_refused(given):
    with pytest.raises(LaunchError, match="arguments"):
        run_ranks(double, [given])


@pytest.mark.parametrize(("arguments", "lnc"), [([], 1), ([(X,)], 3), ([X], 1), ([(X,)], 0)])
def test_launches_that_make_no_sense_are_refused(arguments, lnc):
    with pytest.raises(LaunchError):
        run_ranks(double, arguments, lnc=lnc)


def test_a_grid_and_another_lnc_are_refused():
    with pytest.raises(LaunchError, match=r"lnc=1 and kernel\[2\]"):
        run_ranks(jit(halves)[2], [(X,)], lnc=1)


def test_a_wrong_number_of_arguments_is_refused_with_the_signature_of_the_kernel():
    with pytest.raises(
        LaunchError, match=r"^simulate: arguments: those of double\(x\); got missing"
    ):
        simulate(double)()


# Inputs and outputs.


def overwrite(x):
    tile = nl.ndarray(x.shape, x.dtype)
    nisa.memset(tile, 7.0)
    nisa.dma_copy(dst=x, src=tile)


def test_a_kernel_input_is_read_only():
    for launch in (jit(overwrite), lambda x: run_ranks(overwrite, [(x,)])):
        x = X.copy()
        with pytest.raises(OutputError, match="kernel input x"):
            launch(x)
        assert np.array_equal(x, X)


@pytest.mark.parametrize("lnc", [1, 2])
def test_simulate_changes_the_callers_arrays_where_the_kernel_writes_its_inputs(lnc):
    x, y = X.copy(), X.copy()

    def kernel(x, y):
        core = nl.program_id(0)
        overwrite(x[2 * core : 2 * core + 2])
        return x

    got = simulate(jit(kernel)[lnc])(x, y)
    want = X.copy()
    want[: 2 * lnc] = 7
    assert np.array_equal(x, want)
    assert np.array_equal(got, want)
    assert np.array_equal(y, X)


def test_run_ranks_updates_inputs_when_asked_to():
    xs = [X.copy(), X.copy()]
    run_ranks(overwrite, [(x,) for x in xs], update_inputs=True)
    assert all((x == 7).all() for x in xs)


@pytest.mark.parametrize("buffer", ["sbuf", "private_hbm", "hbm"])
def test_a_result_is_in_shared_hbm(buffer):
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, getattr(nl, buffer))
        nisa.dma_copy(dst=out, src=x)
        return out

    with pytest.raises(OutputError, match="result: a tensor in nl.shared_hbm"):
        jit(kernel)(X)


def test_a_result_is_no_input():
    with pytest.raises(OutputError, match="the input x"):
        jit(lambda x: (x, x))(X)


@pytest.mark.parametrize("returned", [3.0, "text", X])
def test_a_result_is_a_tensor(returned):
    with pytest.raises(OutputError, match="result"):
        jit(lambda x: returned)(X)


def test_an_output_with_a_hole_is_refused_by_name():
    def kernel(x):
        full, holed = shared(x), shared(x, "holed")
        nisa.dma_copy(dst=full, src=x)
        nisa.dma_copy(dst=holed[:3], src=x[:3])
        return full, holed

    with pytest.raises(
        UninitializedError, match=r"result\[1\].*holed \(4, 3\), of which 3 of 12"
    ) as caught:
        jit(kernel)(X)
    allocated = inspect.getsourcelines(shared)[1] + 1  # the line of its nl.ndarray
    assert f"(at {__file__}:{allocated})" in str(caught.value)


def test_cores_that_return_different_tensors_are_refused():
    def kernel(x):
        first, second = shared(x, "first"), shared(x, "second")
        for out in (first, second):
            nisa.dma_copy(dst=out, src=x)
        return (first, second)[nl.program_id(0)]

    with pytest.raises(OutputError, match="both cores return the same"):
        jit(kernel)[2](X)


def test_results_keep_their_structure():
    def kernel(x):
        out = double(x)
        return out, [out.reshape((3, 4)), None]

    first, (second, none) = jit(kernel)(X)
    assert np.array_equal(first, 2 * X)
    assert np.array_equal(second, (2 * X).reshape(3, 4))
    assert none is None


# Ranks.


def test_ranks_run_side_by_side_on_their_own_arguments():
    outcome = run_ranks(double, [(X + rank,) for rank in range(5)])
    assert [np.array_equal(got, 2 * (X + rank)) for rank, got in enumerate(outcome.results)] == [
        True
    ] * 5


def test_an_error_names_rank_core_operation_and_line():
    def kernel(x):
        if ncc.rank_id()._state == 2 and nl.program_id(0) == 1:
            nisa.dma_copy(dst=shared(x)[:2], src=x)

    with pytest.raises(SimulatorError) as caught:
        run_ranks(kernel, [(X,)] * 4, lnc=2)
    assert str(caught.value).startswith("[rank 2 core 1] dma_copy: dst: ")
    line = kernel.__code__.co_firstlineno + 2
    assert f"{__file__}:{line})" in str(caught.value)
    assert not [t for t in threading.enumerate() if t.name.startswith("rank ")]


def test_an_error_of_the_kernels_own_keeps_its_type_and_gets_a_note():
    def kernel(x):
        assert ncc.rank_id()._state != 1, "the kernel's own check"

    with pytest.raises(AssertionError, match="own check") as caught:
        run_ranks(kernel, [(X,)] * 2)
    assert caught.value.__notes__ == ["raised on rank 1 core 0 of 2 ranks x 1 cores"]


def test_ranks_share_no_memory():
    def kernel(x):
        t = shared(x, "same name")
        nisa.dma_copy(dst=t, src=x)
        out = shared(x)
        nisa.dma_copy(dst=out, src=t)
        return out

    for seed in range(4):
        got = run_ranks(kernel, [(X + r,) for r in range(3)], interleave=seed).results
        assert all(np.array_equal(got[r], X + r) for r in range(3))


# Targets.


def generation(x):
    return nisa.get_nc_version()


def target_of(kernel, **options):
    seen = []

    def looking(x):
        seen.append(nisa.get_nc_version().value)

    looking.__name__ = "looking"
    run_ranks(kernel(looking), [(X,)], **options)
    return {2: "trn1", 3: "trn2", 4: "trn3"}[int(seen[0])]


def test_the_target_is_the_argument_the_kernels_the_environments_or_trn2(monkeypatch):
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    assert target_of(jit) == "trn2"
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "gen4")
    assert target_of(jit) == "trn3"
    assert target_of(jit(platform_target="trn1")) == "trn1"
    assert target_of(jit(platform_target="trn1"), target="gen3") == "trn2"
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "tpu")
    with pytest.raises(LaunchError, match="tpu"):
        target_of(jit)


# Counters.


def test_an_outcome_is_frozen_and_counts_what_was_done():
    def kernel(a, b):
        sa, sb = nl.ndarray((64, 32), nl.bfloat16), nl.ndarray((64, 128), nl.bfloat16)
        nisa.dma_copy(dst=sa, src=a)
        nisa.dma_copy(dst=sb, src=b)
        product = nl.ndarray((32, 128), nl.float32, nl.psum)
        nisa.nc_matmul(product, sa, sb)
        tile = nl.ndarray((32, 128), nl.float32)
        nisa.tensor_copy(tile, product)
        out = nl.ndarray((32, 128), nl.float32, nl.shared_hbm)
        nisa.dma_copy(dst=out, src=tile)
        return out

    rng = np.random.default_rng(0)
    a = rng.standard_normal((64, 32), np.float32).astype(ml_dtypes.bfloat16)
    b = rng.standard_normal((64, 128), np.float32).astype(ml_dtypes.bfloat16)
    outcome = run_ranks(kernel, [(a, b)] * 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        outcome.switches = 1  # type: ignore[misc]
    one = outcome.ranks[0]
    assert one.instructions == 5
    assert one.matmul_flops == 2 * 64 * 32 * 128
    assert one.dma_bytes == 64 * 32 * 2 + 64 * 128 * 2 + 32 * 128 * 4
    assert one.collective_bytes == one.hops == 0
    assert one.sbuf_high == outcome.sbuf_high == 32 * 2 + 128 * 2 + 128 * 4
    assert one.psum_high == outcome.psum_high == 128 * 4
    assert outcome.total.instructions == 15
    assert outcome.total.matmul_flops == 3 * one.matmul_flops
    assert one.of_engine("dma").instructions == 3


# PyTorch tensors, without PyTorch: only what the launcher asks of them.


def test_torch_tensors_come_back_as_torch_tensors(monkeypatch):
    fake = types.ModuleType("torch")

    class Tensor:
        def __init__(self, array, dtype=None):
            self.array, self.dtype = array, dtype or f"torch.{array.dtype}"
            self.shape = array.shape

        def detach(self):
            return self

        cpu = contiguous = detach

        def numpy(self):
            return self.array

        def view(self, dtype):
            kinds = {fake.int16: np.int16, fake.bfloat16: np.int16}
            return Tensor(self.array.view(kinds[dtype]), dtype)

        def copy_(self, other):
            self.array[...] = other.array

    fake.Tensor, fake.int16, fake.bfloat16 = Tensor, "torch.int16", "torch.bfloat16"
    fake.from_numpy = Tensor
    monkeypatch.setitem(sys.modules, "torch", fake)

    got = simulate(double)(Tensor(X))
    assert isinstance(got, Tensor)
    assert np.array_equal(got.array, 2 * X)
    half = X.astype(ml_dtypes.bfloat16)
    got = simulate(double)(Tensor(half.view(np.int16), "torch.bfloat16"))
    assert got.dtype == "torch.bfloat16"
    assert np.array_equal(got.array.view(ml_dtypes.bfloat16), half + half)
    x = Tensor(X.copy())
    assert simulate(overwrite)(x) is None
    assert (x.array == 7).all()
