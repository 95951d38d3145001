"""core_barrier and sendrecv: what they do, and each of their rules broken once."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim.errors import (
    CollectiveError,
    DeadlockError,
    DtypeError,
    LaunchError,
    PlacementError,
    RaceError,
    ShapeError,
    SimulatorWarning,
    TargetError,
    UninitializedError,
)
from nki_impl.sim.machine.launch import run_ranks

X = np.arange(32, dtype=np.float32).reshape(2, 4, 4)
SEEDS = (None, 0, 1, 2)


def refused(kernel, error, match, lnc=2, **options):
    with pytest.raises(error, match=match) as caught:
        run_ranks(kernel, [(X,)], lnc=lnc, **options)
    message = str(caught.value)
    assert f"(at {__file__}:" in message
    return message


def tile_of(x, dtype=None):
    out = nl.ndarray((4, 4), dtype or x.dtype)
    nisa.dma_copy(dst=out, src=x[nl.program_id(0)])
    return out


def exchange(src, dst, send_to=None, recv_from=None, pipe_id=0):
    other = 1 - nl.program_id(0)
    nisa.sendrecv(
        src,
        dst,
        other if send_to is None else send_to,
        other if recv_from is None else recv_from,
        pipe_id,
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int32])
def test_sendrecv_swaps_the_tiles_of_both_cores_bit_by_bit(dtype, seed):
    def kernel(x):
        src, dst = tile_of(x), nl.ndarray((4, 4), x.dtype)
        exchange(src, dst)
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        nisa.dma_copy(dst=out[nl.program_id(0)], src=dst)
        return out

    x = X.astype(dtype)
    got = run_ranks(kernel, [(x,), (x + dtype(1),)], lnc=2, interleave=seed).results
    for rank in range(2):
        assert np.array_equal(got[rank], (x + dtype(rank))[::-1])


def test_a_core_may_send_to_itself_when_both_do():
    def kernel(x):
        src, dst = tile_of(x), nl.ndarray((4, 4), x.dtype)
        me = nl.program_id(0)
        exchange(src, dst, me, me)
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        nisa.dma_copy(dst=out[me], src=dst)
        return out

    assert np.array_equal(run_ranks(kernel, [(X,)], lnc=2).results[0], X)


@pytest.mark.parametrize("seed", SEEDS)
def test_exchanges_pair_off_by_pipe_and_in_order(seed):
    def kernel(x):
        src = tile_of(x)
        double = nl.ndarray((4, 4), x.dtype)
        nisa.tensor_scalar(double, src, nl.multiply, 2.0)
        a, b = nl.ndarray((4, 4), x.dtype), nl.ndarray((4, 4), x.dtype)
        exchange(src, a, pipe_id=0)
        exchange(double, b, pipe_id=1)
        exchange(b, a, pipe_id=0)
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        nisa.dma_copy(dst=out[nl.program_id(0)], src=a)
        return out

    # The last exchange returns to each core the double of its own tile.
    assert np.array_equal(run_ranks(kernel, [(X,)], lnc=2, interleave=seed).results[0], 2 * X)


def test_a_tile_may_be_exchanged_in_place():
    def kernel(x):
        both = tile_of(x)
        exchange(both, both)
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        nisa.dma_copy(dst=out[nl.program_id(0)], src=both)
        return out

    assert np.array_equal(run_ranks(kernel, [(X,)], lnc=2).results[0], X[::-1])


def test_sendrecv_works_on_sbuf():
    def kernel(x):
        src = tile_of(x)
        exchange(src, nl.ndarray((4, 4), x.dtype, nl.shared_hbm, name="t"))

    refused(kernel, PlacementError, "dst: a tile in SBUF")


def test_tiles_of_one_core_have_one_dtype():
    def kernel(x):
        exchange(tile_of(x), nl.ndarray((4, 4), nl.bfloat16))

    refused(kernel, DtypeError, "dst")


def test_tiles_of_one_core_have_one_shape():
    def kernel(x):
        exchange(tile_of(x), nl.ndarray((4, 5), x.dtype))

    refused(kernel, ShapeError, "dst")


def test_tiles_of_both_cores_have_one_shape():
    def kernel(x):
        size = 2 + nl.program_id(0)
        exchange(tile_of(x)[:, :size], nl.ndarray((4, size), x.dtype))

    message = refused(kernel, ShapeError, "both cores")
    assert "rank 0 core 0: (4, 2) float32" in message
    assert "rank 0 core 1: (4, 3) float32" in message


def test_cores_are_numbered_0_and_1():
    def kernel(x):
        exchange(tile_of(x), nl.ndarray((4, 4), x.dtype), send_to=2)

    refused(kernel, CollectiveError, "send_to_rank")


def test_who_is_sent_to_receives_from_the_sender():
    def kernel(x):
        me = nl.program_id(0)
        exchange(tile_of(x), nl.ndarray((4, 4), x.dtype), send_to=1 - me, recv_from=me)

    message = refused(kernel, CollectiveError, "recv_from_rank")
    assert message.count(__file__) == 3


def test_a_tile_that_was_never_written_is_not_sent():
    def kernel(x):
        exchange(nl.ndarray((4, 4), x.dtype), nl.ndarray((4, 4), x.dtype))

    refused(kernel, UninitializedError, "src")


@pytest.mark.parametrize("columns", [3, 4])
def test_elements_that_were_not_written_remain_so_when_they_are_sent(columns):
    def kernel(x):
        src, dst = nl.ndarray((4, 4), x.dtype), nl.ndarray((4, 4), x.dtype)
        out = nl.ndarray((2, 4, columns), x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=src[:, 0:3], src=x[nl.program_id(0), :, 0:3])
        exchange(src, dst)
        nisa.dma_copy(dst=out[nl.program_id(0)], src=dst[:, 0:columns])
        return out

    x = np.arange(32, dtype=np.float32).reshape(2, 4, 4)
    if columns == 3:
        assert np.array_equal(run_ranks(kernel, [(x,)], lnc=2).results[0], x[::-1, :, 0:3])
    else:
        with pytest.raises(UninitializedError, match="4 of 16"):
            run_ranks(kernel, [(x,)], lnc=2)


def test_different_pipes_never_meet():
    def kernel(x):
        exchange(tile_of(x), nl.ndarray((4, 4), x.dtype), pipe_id=nl.program_id(0))

    refused(kernel, DeadlockError, "waits in sendrecv")


def shared(name="t"):
    return nl.ndarray((4, 4), nl.float32, nl.shared_hbm, name=name)


@pytest.mark.parametrize("operation", ["core_barrier", "sendrecv"])
def test_both_need_two_cores(operation):
    def kernel(x):
        if operation == "core_barrier":
            nisa.core_barrier(shared(), (0, 1))
        else:
            exchange(tile_of(x), nl.ndarray((4, 4), x.dtype))

    refused(kernel, LaunchError, "two cores", lnc=1)


@pytest.mark.parametrize("operation", ["core_barrier", "sendrecv"])
def test_both_exist_from_the_third_generation_on(operation):
    def kernel(x):
        if operation == "core_barrier":
            nisa.core_barrier(shared(), (0, 1))
        else:
            exchange(tile_of(x), nl.ndarray((4, 4), x.dtype))

    refused(kernel, TargetError, "trn1", target="trn1")


@pytest.mark.parametrize("cores", [(0,), (1, 0), (0, 2)])
def test_a_barrier_names_both_cores(cores):
    def kernel(x):
        nisa.core_barrier(shared(), cores)

    refused(kernel, CollectiveError, "cores")


def test_a_barrier_is_on_shared_hbm():
    def kernel(x):
        nisa.core_barrier(nl.ndarray((4, 4), nl.float32, nl.private_hbm), (0, 1))

    refused(kernel, PlacementError, "shared_hbm")


def test_a_barrier_on_a_tile_is_accepted_with_a_warning_and_orders_no_memory():
    def kernel(x, reads):
        core, t, out, new = nl.program_id(0), shared("t"), shared("out"), tile_of(x)
        nisa.dma_copy(dst=t[2 * core : 2 * core + 2], src=new[:2])
        nisa.core_barrier(new, (0, 1))
        half = slice(2 - 2 * core, 4 - 2 * core) if reads else slice(2 * core, 2 * core + 2)
        nisa.dma_copy(dst=out[half], src=t[half])
        return out

    with pytest.warns(SimulatorWarning, match="core_barrier: .* shared HBM"):
        (out,) = run_ranks(kernel, [(X, False)], lnc=2).results
    assert np.array_equal(out, np.concatenate((X[0, :2], X[1, :2])))
    with pytest.warns(SimulatorWarning), pytest.raises(RaceError):
        run_ranks(kernel, [(X, True)], lnc=2)


def test_both_cores_pass_a_tile_to_a_barrier_or_none_does():
    def kernel(x):
        data = tile_of(x) if nl.program_id(0) else shared("t")
        nisa.core_barrier(data, (0, 1))

    with pytest.warns(SimulatorWarning):
        message = refused(kernel, CollectiveError, "same tensor")
    assert "rank 0 core 0: t" in message and "rank 0 core 1: a tile in SBUF" in message


def test_a_barrier_is_on_one_tensor():
    def kernel(x):
        first, second = shared("first"), shared("second")
        nisa.core_barrier((first, second)[nl.program_id(0)], (0, 1))

    message = refused(kernel, CollectiveError, "same tensor")
    assert "rank 0 core 0: first" in message
    assert "rank 0 core 1: second" in message


def test_a_barrier_that_one_core_leaves_out_is_named():
    def kernel(x):
        t = shared()
        if nl.program_id(0) == 0:
            nisa.core_barrier(t, (0, 1))

    refused(kernel, CollectiveError, "rank 0 core 1 returned from the kernel")
