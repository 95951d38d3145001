"""What orders the accesses of two cores to shared HBM, and what does not."""

from __future__ import annotations

import contextlib
import inspect
import itertools

import numpy as np
import pytest

from nki_impl.sim import collectives as ncc
from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim.errors import LaunchError, RaceError, RaceWarning, UninitializedError
from nki_impl.sim.machine.launch import run_ranks

pytestmark = pytest.mark.filterwarnings("error::nki_impl.sim.errors.RaceWarning")

X = np.arange(32, dtype=np.float32).reshape(8, 4)
SEEDS = (None, 0, 1, 2, 3, 4)


def shared(name="", shape=(8, 4), dtype=nl.float32):
    return nl.ndarray(shape, dtype, nl.shared_hbm, name=name)


def mine(tensor):
    """The half of this core."""
    core = nl.program_id(0)
    return tensor[4 * core : 4 * core + 4]


def others(tensor):
    """The half of the other core."""
    core = nl.program_id(0)
    return tensor[4 - 4 * core : 8 - 4 * core]


def tile(value=0.0):
    out = nl.ndarray((4, 4), nl.float32)
    nisa.memset(out, value)
    return out


def line_of(kernel, text):
    """The line of the kernel whose source contains ``text``."""
    lines, first = inspect.getsourcelines(kernel)
    return first + next(i for i, line in enumerate(lines) if text in line)


def races(kernel, *texts, world=1):
    """Every interleaving reports a race and names exactly the lines that hold ``texts``."""
    for seed in SEEDS:
        with pytest.raises(RaceError) as caught:
            run_ranks(kernel, [(X,)] * world, lnc=2, interleave=seed)
        for text in texts:
            assert f"{__file__}:{line_of(kernel, text)})" in str(caught.value)


def is_in_program_order(kernel, *texts, world=1):
    """Every interleaving warns that only the program orders two accesses, names their lines, and gives the same bits."""
    want = None
    for seed in SEEDS:
        with pytest.warns(RaceWarning, match="holds only if the compiler keeps it") as caught:
            got = run_ranks(kernel, [(X,)] * world, lnc=2, interleave=seed).results
        for text in texts:
            line = f"{__file__}:{line_of(kernel, text)})"
            assert all(line in str(one.message) for one in caught)
        want = want or got
        assert all(a.tobytes() == b.tobytes() for a, b in zip(want, got, strict=True))


def is_ordered(kernel, world=1):
    """No interleaving reports a race, and all give the same bits."""
    want = run_ranks(kernel, [(X,)] * world, lnc=2).results
    for seed in SEEDS:
        got = run_ranks(kernel, [(X,)] * world, lnc=2, interleave=seed).results
        assert all(a.tobytes() == b.tobytes() for a, b in zip(want, got, strict=True))
    return want


def test_a_read_of_what_the_other_core_wrote_needs_a_barrier():
    def missing(x):
        t, out = shared(), shared()
        nisa.dma_copy(dst=mine(t), src=mine(x))  # write
        nisa.dma_copy(dst=mine(out), src=others(t))  # read
        return out

    def present(x):
        t, out = shared(), shared()
        nisa.dma_copy(dst=mine(t), src=mine(x))
        nisa.core_barrier(t, (0, 1))
        nisa.dma_copy(dst=mine(out), src=others(t))
        return out

    # Written by both before either reads, or read before it is written: both are a race.
    races(missing, "# write", "# read")
    assert np.array_equal(is_ordered(present)[0], np.concatenate([X[4:], X[:4]]))


def test_a_write_of_what_the_other_core_reads_needs_a_barrier():
    def missing(x):
        t, out = shared(), shared()
        nisa.dma_copy(dst=mine(t), src=mine(x))
        nisa.core_barrier(t, (0, 1))
        nisa.dma_copy(dst=mine(out), src=others(t))  # read
        nisa.dma_copy(dst=mine(t), src=tile())  # write
        return out

    def present(x):
        t, out = shared(), shared()
        nisa.dma_copy(dst=mine(t), src=mine(x))
        nisa.core_barrier(t, (0, 1))
        nisa.dma_copy(dst=mine(out), src=others(t))
        nisa.core_barrier(t, (0, 1))
        nisa.dma_copy(dst=mine(t), src=tile())
        return out

    races(missing, "# read", "# write")
    is_ordered(present)


def test_two_writes_of_different_bits_are_a_race():
    def kernel(x):
        out = shared()
        nisa.dma_copy(dst=out[:4], src=tile(1.0 + nl.program_id(0)))  # write
        return out

    races(kernel, "# write")


def test_two_writes_of_the_same_bits_are_none_and_each_core_may_read_its_own():
    def kernel(x):
        table, out = shared("table"), shared()
        nisa.dma_copy(dst=table, src=x)
        nisa.dma_copy(dst=mine(out), src=others(table))
        return out

    is_ordered(kernel)


def test_nan_is_the_same_bits_as_nan():
    def kernel(x):
        out = shared()
        nisa.dma_copy(dst=out[:4], src=tile(float("nan")))
        nisa.dma_copy(dst=out[4:], src=tile())
        return out

    is_ordered(kernel)


def test_a_read_before_ones_own_write_of_the_same_bits_is_a_race():
    def kernel(x):
        table, out = shared("table"), shared()
        nisa.dma_copy(dst=table, src=x)
        nisa.core_barrier(table, (0, 1))
        if nl.program_id(0) == 0:
            nisa.dma_copy(dst=out, src=table)  # read
        nisa.dma_copy(dst=table, src=x)  # write
        return out

    races(kernel, "# read", "# write")


def test_different_parts_of_one_tensor_are_no_race():
    def kernel(x):
        t, out = shared(), shared()
        core = nl.program_id(0)
        # Every other column: the regions interleave in memory.
        columns = t.ap([[4, 8], [2, 2]], offset=core)
        nisa.dma_copy(dst=columns, src=x.ap([[4, 8], [2, 2]], offset=core))
        nisa.dma_copy(dst=out.ap([[4, 8], [2, 2]], offset=core), src=columns)
        return out

    assert np.array_equal(is_ordered(kernel)[0], X)


def test_one_element_in_common_is_a_race():
    def kernel(x):
        out = shared()
        core = nl.program_id(0)
        rows = out[3 * core : 3 * core + 4]
        nisa.dma_copy(dst=rows, src=tile(float(core)))  # write
        return out

    with pytest.raises(RaceError, match="; 4 elements"):
        run_ranks(kernel, [(X,)], lnc=2)


def test_a_barrier_on_an_unrelated_tensor_orders_nothing_else():
    def kernel(x):
        t, u, out = shared(), shared("u"), shared()
        nisa.dma_copy(dst=mine(t), src=mine(x))  # write
        nisa.core_barrier(u, (0, 1))
        nisa.dma_copy(dst=mine(out), src=others(t))  # read
        return out

    races(kernel, "# write", "# read")


def test_a_barrier_on_keys_does_not_order_values():
    def kernel(x):
        k, v, out = shared("k"), shared("v"), shared()
        nisa.dma_copy(dst=mine(k), src=mine(x))
        nisa.dma_copy(dst=mine(v), src=mine(x))  # write
        nisa.core_barrier(k, (0, 1))
        product, right = tile(), tile()
        nisa.dma_copy(dst=product, src=others(k))
        nisa.dma_copy(dst=right, src=others(v))  # read
        nisa.tensor_tensor(product, product, right, nl.multiply)
        nisa.dma_copy(dst=mine(out), src=product)
        return out

    races(kernel, "# write", "# read")


def test_a_barrier_on_a_view_orders_the_whole_tensor():
    def kernel(x):
        t, out = shared("t", (2, 4, 4)), shared()
        core = nl.program_id(0)
        nisa.dma_copy(dst=t[core], src=mine(x))
        nisa.core_barrier(t[0].view(nl.uint16), (0, 1))
        nisa.dma_copy(dst=mine(out), src=t[1 - core])
        return out

    assert np.array_equal(is_ordered(kernel)[0], np.concatenate([X[4:], X[:4]]))


def test_a_barrier_waits_for_what_its_tensor_was_computed_from():
    """Core 1 overwrites K after a barrier on T, which core 0 wrote after it had read K."""

    def kernel(x, early):
        k, t, out = shared("k"), shared("t"), shared()
        nisa.dma_copy(dst=k, src=x)
        nisa.core_barrier(k, (0, 1))
        if early:
            nisa.dma_copy(dst=mine(t), src=mine(x))
        half = tile()
        nisa.dma_copy(dst=half, src=others(k))  # read
        if not early:
            nisa.dma_copy(dst=mine(t), src=half)
        nisa.core_barrier(t, (0, 1))
        nisa.dma_copy(dst=mine(k), src=tile(3.0))  # write
        nisa.dma_copy(dst=mine(out), src=half)
        return out

    def after_the_read(x):
        return kernel(x, False)

    want = np.concatenate([X[4:], X[:4]])
    assert np.array_equal(is_ordered(after_the_read)[0], want)
    # If t was written before k was read, t does not depend on k.
    for seed in SEEDS:
        with pytest.raises(RaceError, match="dma_copy: k"):
            run_ranks(kernel, [(X, True)], lnc=2, interleave=seed)


def test_a_barrier_on_what_does_not_depend_on_an_earlier_read_orders_it_only_by_the_program():
    def kernel(x):
        k, t, out, half = shared("k"), shared("t"), shared(), tile()
        nisa.dma_copy(dst=k, src=x)
        nisa.core_barrier(k, (0, 1))
        nisa.dma_copy(dst=half, src=others(k))  # read
        nisa.dma_copy(dst=mine(t), src=mine(x))
        nisa.core_barrier(t, (0, 1))
        nisa.dma_copy(dst=mine(k), src=tile(3.0))  # write
        nisa.dma_copy(dst=mine(out), src=half)
        return out

    is_in_program_order(kernel, "# read", "# write")


def test_a_barrier_orders_writes_of_other_tensors_that_its_tensor_depends_on():
    """Core 0 writes K, reads it back and computes T from it; core 1 reads K after a barrier on T."""

    def kernel(x):
        k, t, out, half = shared("k"), shared("t"), shared(), tile()
        nisa.dma_copy(dst=mine(k), src=mine(x))
        nisa.dma_copy(dst=half, src=mine(k))
        nisa.dma_copy(dst=mine(t), src=half)
        nisa.core_barrier(t, (0, 1))
        nisa.dma_copy(dst=mine(out), src=others(k))
        return out

    assert np.array_equal(is_ordered(kernel)[0], np.concatenate([X[4:], X[:4]]))


def test_a_write_that_no_barrier_orders_is_a_race_in_later_phases_too():
    def kernel(x):
        t, u, out = shared(), shared("u"), shared()
        nisa.dma_copy(dst=mine(t), src=mine(x))  # write
        for _ in range(3):
            nisa.core_barrier(u, (0, 1))
        nisa.dma_copy(dst=mine(out), src=others(t))  # read
        return out

    races(kernel, "# write", "# read")


def test_a_collective_orders_its_sources_and_destinations():
    def kernel(x):
        src, dst, out = shared("src"), shared("dst"), shared()
        nisa.dma_copy(dst=src, src=x)
        ncc.all_reduce([src], [dst], ncc.ReplicaGroup(()), nl.add)
        nisa.dma_copy(dst=mine(src), src=mine(dst))
        nisa.dma_copy(dst=mine(out), src=others(dst))
        return out

    is_ordered(kernel, world=2)


def test_a_collective_orders_no_other_tensor():
    def kernel(x):
        t, out = shared(), shared()
        src, dst = shared("src"), shared("dst")
        nisa.dma_copy(dst=src, src=x)
        nisa.dma_copy(dst=mine(t), src=mine(x))  # write
        ncc.all_reduce([src], [dst], ncc.ReplicaGroup(()), nl.add)
        nisa.dma_copy(dst=mine(out), src=others(t))  # read
        return out

    races(kernel, "# write", "# read", world=2)


def test_a_read_of_what_neither_core_writes_in_time_is_uninitialised():
    def kernel(x):
        t, out = shared(), shared()
        nisa.dma_copy(dst=mine(out), src=others(t))  # read
        nisa.core_barrier(t, (0, 1))
        nisa.dma_copy(dst=mine(t), src=mine(x))
        return out

    for seed in SEEDS:
        with pytest.raises(UninitializedError, match=f":{line_of(kernel, '# read')}\\)"):
            run_ranks(kernel, [(X,)], lnc=2, interleave=seed)


def test_sendrecv_does_not_order_shared_memory():
    def kernel(x):
        t, out = shared(), shared()
        nisa.dma_copy(dst=t, src=x)
        nisa.core_barrier(t, (0, 1))
        nisa.dma_copy(dst=mine(t), src=tile(2.0))  # write
        send, receive = tile(), tile()
        other = 1 - nl.program_id(0)
        nisa.sendrecv(send, receive, other, other, 0)
        nisa.dma_copy(dst=mine(out), src=others(t))  # read
        return out

    races(kernel, "# write", "# read")


def halves_read_by_both(sends, receives):
    """Each core reads both halves of a tensor and rewrites its own; ``sends`` makes the tile that it sends in between."""

    def kernel(x):
        core = nl.program_id(0)
        t, out = shared(), shared()
        nisa.dma_copy(dst=mine(t), src=mine(x))
        nisa.core_barrier(t, (0, 1))
        theirs, new, received = tile(), tile(3.0), tile()
        nisa.dma_copy(dst=theirs, src=others(t))  # read
        nisa.sendrecv(sends(theirs), received, 1 - core, 1 - core, 0)
        if receives:
            nisa.tensor_copy(new, received)
        nisa.dma_copy(dst=mine(t), src=new)  # write
        nisa.core_barrier(t, (0, 1))
        nisa.dma_copy(dst=out, src=t)
        return out

    return kernel


def computed_from(source):
    out, total = tile(), nl.ndarray((4, 1), nl.float32)
    nisa.tensor_reduce(dst=total, op=nl.add, data=source, axis=1)
    nisa.tensor_scalar(out, tile(), nl.add, total)
    return out


def overwritten_after(source):
    """A tile that is written only after an instruction that reads it and ``source``."""
    out = tile(5.0)
    nisa.tensor_tensor(tile(), source, out, nl.add)
    nisa.memset(out, 2.0)
    return out


@pytest.mark.parametrize("sends", [computed_from, overwritten_after])
def test_what_depends_on_a_received_tile_follows_the_reads_that_the_tile_depends_on(sends):
    is_ordered(halves_read_by_both(sends, receives=True))


@pytest.mark.parametrize("in_register", [False, True])
@pytest.mark.parametrize("from_received", [False, True])
def test_a_write_at_a_received_index_follows_the_reads_that_the_index_depends_on(
    in_register, from_received
):
    def kernel(x):
        core = nl.program_id(0)
        t, out, theirs, received = shared(), shared(), tile(), tile()
        nisa.dma_copy(dst=mine(t), src=mine(x))
        nisa.core_barrier(t, (0, 1))
        nisa.dma_copy(dst=theirs, src=others(t))  # read
        zeros = tile()
        nisa.tensor_scalar(zeros, theirs, nl.multiply, 0.0)
        nisa.sendrecv(zeros, received, 1 - core, 1 - core, 0)
        index = nl.ndarray((1, 1), nl.int32)
        nisa.tensor_copy(index, (received if from_received else tile())[0:1, 0:1])
        if in_register:
            register = nisa.register_alloc()
            nisa.register_load(register, index)
            index = register
        place = t.ap([[4, 4], [1, 4]], offset=16 * core, scalar_offset=index, indirect_dim=0)
        nisa.dma_copy(dst=place, src=tile(3.0))  # write
        nisa.core_barrier(t, (0, 1))
        nisa.dma_copy(dst=out, src=t)
        return out

    if from_received:
        is_ordered(kernel)
    else:
        is_in_program_order(kernel, "# write", "# read")


def test_a_sendrecv_of_a_tile_does_not_order_reads_that_the_tile_does_not_depend_on():
    races(halves_read_by_both(lambda theirs: tile(2.0), True), "# write", "# read")


def test_a_write_after_a_sendrecv_that_it_does_not_depend_on_is_ordered_only_by_the_program():
    """AWS's attention_block_tkg writes V after a sendrecv of what the other core computed from V."""
    is_in_program_order(halves_read_by_both(computed_from, receives=False), "# write", "# read")


def test_a_read_after_a_sendrecv_is_not_ordered_by_it():
    def kernel(x):
        core = nl.program_id(0)
        t, out, received = shared(), shared(), tile()
        nisa.dma_copy(dst=mine(t), src=mine(x))
        nisa.core_barrier(t, (0, 1))
        nisa.sendrecv(tile(2.0), received, 1 - core, 1 - core, 0)
        theirs = tile()
        nisa.dma_copy(dst=theirs, src=others(t))  # read
        nisa.dma_copy(dst=mine(t), src=received)  # write
        nisa.dma_copy(dst=mine(out), src=theirs)
        return out

    races(kernel, "# write", "# read")


# What else than the data of tiles orders the instructions of a core, by the documentation.


def read_and_rewritten(before, after):
    """Each core reads both halves of a tensor and rewrites its own, with a sendrecv in between.

    ``before(theirs)``: make the tile to send after the read; ``after(received)``: the index at which to write, 0.
    """

    def kernel(x):
        core = nl.program_id(0)
        t, out, theirs, received = shared(), shared(), tile(), tile()
        nisa.dma_copy(dst=mine(t), src=mine(x))
        nisa.core_barrier(t, (0, 1))
        nisa.dma_copy(dst=theirs, src=others(t))  # read
        nisa.sendrecv(before(theirs), received, 1 - core, 1 - core, 0)
        index = after(received)
        place = t.ap([[4, 4], [1, 4]], offset=16 * core, scalar_offset=index, indirect_dim=0)
        nisa.dma_copy(dst=place, src=tile(3.0))  # write
        nisa.core_barrier(t, (0, 1))
        nisa.dma_copy(dst=out, src=t)
        return out

    return kernel


def zeros_from(source):
    out = tile()
    nisa.tensor_scalar(out, source, nl.multiply, 0.0)
    return out


def index_from(received):
    index = nl.ndarray((1, 1), nl.int32)
    nisa.tensor_copy(index, received[0:1, 0:1])
    return index


def loaded_from(received):
    return 2 * nisa.scalar_load(index_from(received)) + 0


def summed_in_registers(source):
    """A tile that reads ``source`` only through the reduce registers of the scalar engine."""
    total, out, zeros = nl.ndarray((4, 1), nl.float32), tile(), zeros_from(source)
    nisa.activation(
        tile(), nl.copy, zeros, reduce_op=nl.add, reduce_cmd=nisa.reduce_cmd.reset_reduce
    )
    nisa.activation(
        tile(),
        nl.copy,
        tile(),
        reduce_op=nl.add,
        reduce_cmd=nisa.reduce_cmd.reduce,
        reduce_res=total,
    )
    nisa.tensor_scalar(out, tile(), nl.add, total)
    return out


def at_the_same_address(source):
    """A tile at an address that an instruction before has read ``source`` into."""
    first = nl.ndarray((4, 4), nl.float32, nl.sbuf, address=(0, 64))
    nisa.tensor_copy(first, source)
    second = nl.ndarray((4, 2), nl.float32, nl.sbuf, address=(0, 72))
    nisa.memset(second, 0.0)
    third = nl.ndarray((4, 4), nl.float32, nl.sbuf, address=(0, 64))
    nisa.memset(third, 0.0)
    return third


@pytest.mark.parametrize("before", [zeros_from, summed_in_registers, at_the_same_address])
@pytest.mark.parametrize("after", [index_from, loaded_from])
def test_registers_scalars_and_addresses_pass_dependences_on(before, after):
    is_ordered(read_and_rewritten(before, after))


@pytest.mark.parametrize("early", [True, False])
def test_a_core_that_reads_back_what_it_wrote_may_find_what_the_other_core_writes(early):
    """Core 0 sends what it wrote to T, and core 1 overwrites T with it plus one. Core 0 reads T before or after."""

    def kernel(x):
        core = nl.program_id(0)
        t, out, new, received, back = shared("t"), shared(), tile(2.0), tile(), tile()
        nisa.dma_copy(dst=t[4:], src=x[4:])
        if core == 0:
            nisa.dma_copy(dst=t[:4], src=new)
            if early:
                nisa.dma_copy(dst=new, src=t[:4])
            else:
                nisa.dma_copy(dst=back, src=t[:4])  # read
                nisa.tensor_scalar(new, new, nl.add, 0.0)
        nisa.sendrecv(new, received, 1 - core, 1 - core, 0)
        if core == 1:
            nisa.tensor_scalar(received, received, nl.add, 1.0)
            nisa.dma_copy(dst=t[:4], src=received)  # write
        nisa.dma_copy(dst=mine(out), src=back)
        return out, t

    if early:
        results = [run_ranks(kernel, [(X,)], lnc=2, interleave=seed).results for seed in SEEDS]
        assert all((one[0][1][:4] == 3.0).all() for one in results)
    else:
        races(kernel, "# read", "# write")


@pytest.mark.parametrize("how", ["no_reorder", "depends_on", "two blocks"])
def test_no_reorder_and_depends_on_order_what_no_data_order(how):
    def kernel(x):
        core = nl.program_id(0)
        t, out, theirs, received = shared(), shared(), tile(), tile()
        nisa.dma_copy(dst=mine(t), src=mine(x))
        nisa.core_barrier(t, (0, 1))
        sent, new = tile(), tile(3.0)
        with nl.no_reorder() if how == "no_reorder" else contextlib.nullcontext():
            with nl.no_reorder() if how == "two blocks" else contextlib.nullcontext():
                read = nisa.dma_copy(dst=theirs, src=others(t))  # read
            with nl.no_reorder() if how == "two blocks" else contextlib.nullcontext():
                exchange = nisa.sendrecv(sent, received, 1 - core, 1 - core, 0)
                write = nisa.dma_copy(dst=mine(t), src=new)  # write
        if how == "depends_on":
            exchange.depends_on(read)
            write.depends_on(exchange)
        nisa.core_barrier(t, (0, 1))
        nisa.dma_copy(dst=out, src=t)
        return out

    if how == "two blocks":
        races(kernel, "# write", "# read")
    else:
        is_ordered(kernel)


@pytest.mark.parametrize("sends", [True, False])
def test_a_collective_passes_dependences_on(sends):
    """Core 1 overwrites T with what a collective made of the source, which both cores computed from T."""

    def kernel(x):
        t, src, dst, out = shared("t"), shared("src"), shared("dst"), shared()
        nisa.dma_copy(dst=t, src=x)
        nisa.core_barrier(t, (0, 1))
        half, sent = tile(), tile(2.0)
        nisa.dma_copy(dst=half, src=t[:4])  # read
        nisa.dma_copy(dst=src[:4], src=half if sends else sent)
        nisa.dma_copy(dst=src[4:], src=x[4:])
        ncc.all_reduce([src], [dst], ncc.ReplicaGroup(()), nl.add)
        if nl.program_id(0) == 1:
            nisa.dma_copy(dst=t[:4], src=dst[:4])  # write
        nisa.dma_copy(dst=mine(out), src=half)
        return out

    if sends:
        is_ordered(kernel, world=2)
    else:
        races(kernel, "# write", "# read", world=2)


def test_private_memory_and_one_core_know_no_races():
    def private(x):
        t, out = nl.ndarray((8, 4), nl.float32, nl.private_hbm), shared()
        nisa.dma_copy(dst=t, src=x)
        nisa.dma_copy(dst=mine(out), src=mine(t))
        return out

    is_ordered(private)


@pytest.mark.parametrize("core", [0, 1])
def test_a_source_rewritten_while_the_other_cores_collective_sends_it_is_a_race(core):
    def kernel(x):
        src, dst, out = shared("src"), shared("dst"), shared()
        nisa.dma_copy(dst=src, src=x)
        nisa.core_barrier(src, (0, 1))
        if nl.program_id(0) == core:
            nisa.dma_copy(dst=src[:4], src=tile())  # write
        ncc.collective_permute_implicit([[src]], [[dst]], ncc.ReplicaGroup(()))  # send
        nisa.dma_copy(dst=out, src=dst)
        return out

    races(kernel, "# write", "# send", world=2)


@pytest.mark.parametrize("core", [0, 1])
@pytest.mark.parametrize("late", ["read", "write"])
def test_a_destination_touched_while_the_other_cores_collective_fills_it_is_a_race(late, core):
    def kernel(x):
        src, dst, out = shared("src"), shared("dst"), shared()
        nisa.dma_copy(dst=src, src=x)
        nisa.dma_copy(dst=dst, src=x)
        nisa.core_barrier(src, (0, 1))
        nisa.core_barrier(dst, (0, 1))
        if nl.program_id(0) == core and late == "read":
            nisa.dma_copy(dst=out, src=dst)  # touch by read
        elif nl.program_id(0) == core:
            nisa.dma_copy(dst=dst, src=x)  # touch by write
        ncc.collective_permute_implicit([[src]], [[dst]], ncc.ReplicaGroup(()))  # receive
        nisa.dma_copy(dst=out, src=dst)
        return out

    races(kernel, f"# touch by {late}", "# receive", world=2)


def test_the_published_kernels_habit_of_copying_twice_before_a_collective_is_no_race():
    """Both cores copy the whole input, then issue the collective without a barrier."""

    def kernel(x):
        src, dst, out = shared("src"), shared("dst", (16, 4)), shared("", (16, 4))
        nisa.dma_copy(dst=src, src=x)
        ncc.all_gather([src], [dst], ncc.ReplicaGroup(()), 0)
        nisa.dma_copy(dst=out, src=dst)
        return out

    assert np.array_equal(is_ordered(kernel, world=2)[0], np.concatenate([X, X]))


def test_ping_pong_buffers_of_two_cores_are_ordered_by_their_collectives():
    def kernel(x):
        now, free, out = shared("ping"), shared("pong"), shared()
        nisa.dma_copy(dst=mine(now), src=mine(x))
        nisa.core_barrier(now, (0, 1))
        total = tile()
        for _ in range(3):
            ncc.collective_permute_implicit([[now]], [[free]], ncc.ReplicaGroup(()))
            now, free = free, now
            part = nl.ndarray((4, 4), nl.float32)
            nisa.dma_copy(dst=part, src=others(now))
            nisa.tensor_tensor(total, total, part, nl.add)
        nisa.dma_copy(dst=mine(out), src=total)
        return out

    is_ordered(kernel, world=3)


def gathered(t, x, rows):
    """Four rows of t, chosen by indices on the device."""
    index = nl.ndarray((4, 1), nl.int32)
    nisa.dma_copy(dst=index, src=rows)
    out = tile()
    nisa.dma_copy(dst=out, src=t.ap([[4, 4], [1, 4]], vector_offset=index, indirect_dim=0))
    return out


def test_rows_that_an_index_on_the_device_names_are_watched_row_by_row():
    def kernel(x, mixed):
        t, out = shared("t"), shared()
        nisa.dma_copy(dst=mine(t), src=mine(x))
        rows = nl.shared_constant(np.arange(8, dtype=np.int32)[:, None])
        own = 4 * nl.program_id(0)
        start = 2 if mixed else own
        nisa.dma_copy(dst=mine(out), src=gathered(t, x, rows[start : start + 4]))  # gather
        return out

    for seed in SEEDS:
        got = run_ranks(kernel, [(X, False)], lnc=2, interleave=seed).results[0]
        assert np.array_equal(got, X)
        with pytest.raises(RaceError, match="dma_copy: t"):
            run_ranks(kernel, [(X, True)], lnc=2, interleave=seed)


def test_views_with_a_smaller_dtype_are_told_apart_by_the_byte():
    def kernel(x):
        t, out = shared(), shared()
        nisa.dma_copy(dst=t, src=x)
        nisa.core_barrier(t, (0, 1))
        halves = t.view(nl.uint16)
        core = nl.program_id(0)
        if core == 1:
            nisa.dma_copy(dst=out, src=t)
        low = halves.ap([[8, 8], [2, 4]], offset=core)
        value = nl.ndarray((8, 4), nl.uint16)
        nisa.memset(value, 7)
        nisa.dma_copy(dst=low, src=value)
        return out

    races(kernel)


def test_unnamed_shared_tensors_are_one_by_their_order_and_named_ones_by_their_name():
    def kernel(x):
        if nl.program_id(0) == 1:
            extra = shared("only on core 1")
            nisa.dma_copy(dst=extra, src=x)
        first, second = shared(), shared()
        nisa.dma_copy(dst=mine(first), src=mine(x))
        nisa.dma_copy(dst=mine(second), src=others(x))
        return first, second

    first, second = is_ordered_pair(kernel)
    assert np.array_equal(first, X)
    assert np.array_equal(second, np.concatenate([X[4:], X[:4]]))


def is_ordered_pair(kernel):
    pairs = [run_ranks(kernel, [(X,)], lnc=2, interleave=seed).results[0] for seed in SEEDS]
    for pair in pairs:
        assert all(np.array_equal(a, b) for a, b in zip(pairs[0], pair, strict=True))
    return pairs[0]


# Random programs, against a direct statement of the rule over all pairs of accesses.


def drawn_program(rng):
    """Per phase and core a list of (kind, first row, rows), and the value each core writes there."""
    phases = []
    for _ in range(rng.integers(1, 4)):
        accesses = [
            [
                (("read", "write")[rng.integers(2)], int(start), int(rng.integers(1, 9 - start)))
                for start in rng.integers(0, 8, rng.integers(0, 3))
            ]
            for _ in range(2)
        ]
        phases.append((accesses, [0.0, 0.0] if rng.integers(2) else [1.0, 2.0]))
    return phases


def has_race(phases):
    for accesses, values in phases:
        writes = [set(), set()]
        exposed = [set(), set()]
        for core in (0, 1):
            for kind, start, count in accesses[core]:
                rows = set(range(start, start + count))
                if kind == "write":
                    writes[core] |= rows
                else:
                    exposed[core] |= rows - writes[core]
        if exposed[0] & writes[1] or exposed[1] & writes[0]:
            return True
        if values[0] != values[1] and writes[0] & writes[1]:
            return True
    return False


def play(x, phases):
    t, out = shared("t"), shared()
    nisa.dma_copy(dst=t, src=x)
    for accesses, values in phases:
        nisa.core_barrier(t, (0, 1))
        for kind, start, count in accesses[nl.program_id(0)]:
            rows = nl.ndarray((count, 4), nl.float32)
            if kind == "read":
                nisa.dma_copy(dst=rows, src=t[start : start + count])
            else:
                nisa.memset(rows, values[nl.program_id(0)])
                nisa.dma_copy(dst=t[start : start + count], src=rows)
    nisa.core_barrier(t, (0, 1))
    nisa.dma_copy(dst=out, src=t)
    return out


def test_the_verdict_on_random_programs_is_the_rules_and_no_matter_of_order():
    rng = np.random.default_rng(0)
    verdicts = []
    for _ in range(120):
        phases = drawn_program(rng)
        verdicts.append(has_race(phases))
        results = set()
        for seed in (None, 0, 1):
            try:
                out = run_ranks(play, [(X, phases)], lnc=2, interleave=seed).results[0]
            except RaceError:
                results.add("race")
            else:
                results.add(out.tobytes())
        assert len(results) == 1
        assert (results == {"race"}) == verdicts[-1]
    assert 30 < sum(verdicts) < 90


# Places that both cores write: every program is compared with all of its interleavings.


def filled_twice(x, last):
    """Both cores write zeros and then ``last[core]``, as AWS's router_topk does without a barrier."""
    out = shared()
    nisa.dma_copy(dst=out[:4], src=tile())  # zeros
    nisa.dma_copy(dst=out[:4], src=tile(last[nl.program_id(0)]))  # entries
    nisa.dma_copy(dst=out[4:], src=tile())
    return out


def test_both_cores_may_write_zeros_and_then_the_same_entries():
    for seed in SEEDS:
        got = run_ranks(filled_twice, [(X, (2.0, 2.0))], lnc=2, interleave=seed).results[0]
        assert np.array_equal(got, np.repeat(np.float32([2.0, 0.0]), 16).reshape(8, 4))
        with pytest.raises(RaceError, match="core . writes .*, core . writes .*; 16 elements"):
            run_ranks(filled_twice, [(X, (2.0, 3.0))], lnc=2, interleave=seed)


def test_zeros_of_one_core_over_the_entries_of_the_other_are_a_race():
    """The initialisation of AWS's moe_cte: both cores clear the output, and then each core stores its half."""

    def kernel(x):
        out = shared()
        nisa.dma_copy(dst=out[:4], src=tile())
        nisa.dma_copy(dst=out[4:], src=tile())
        nisa.dma_copy(dst=mine(out), src=tile(1.0))
        return out

    races(kernel)


def test_different_last_writes_are_a_race_even_if_the_phase_ends_at_a_barrier():
    def kernel(x):
        t, out = shared("t"), shared()
        nisa.dma_copy(dst=t, src=x)
        nisa.dma_copy(dst=t[:4], src=tile(1.0 + nl.program_id(0)))  # write
        nisa.core_barrier(t, (0, 1))
        nisa.dma_copy(dst=mine(out), src=mine(t))
        return out

    races(kernel, "# write")


def one_place(x, programs):
    """Each core plays its program, letters r (read) and digits (write), on one place of shared memory."""
    t, out = shared("t"), shared()
    for i, letter in enumerate(programs[nl.program_id(0)]):
        if letter == "r":
            value = tile()
            nisa.dma_copy(dst=value, src=t[:4])
            nisa.dma_copy(dst=shared(f"{nl.program_id(0)} {i}", (4, 4)), src=value)
        else:
            nisa.dma_copy(dst=t[:4], src=tile(float(letter)))
    nisa.core_barrier(t, (0, 1))
    nisa.dma_copy(dst=t[4:], src=tile())
    nisa.core_barrier(t, (0, 1))
    nisa.dma_copy(dst=out, src=t)
    return out


def outcomes(programs):
    """What the cores read and what remains, for every order of the steps of both programs."""
    steps = [0] * len(programs[0]) + [1] * len(programs[1])
    found = set()
    for order in set(itertools.permutations(steps)):
        at, value, seen = [0, 0], "", []
        for core in order:
            letter = programs[core][at[core]]
            if letter == "r":
                seen.append((core, at[core], value))
            else:
                value = letter
            at[core] += 1
        found.add((value, tuple(sorted(seen))))
    return found


def test_writes_of_both_cores_are_a_race_exactly_if_their_order_can_be_seen():
    programs = ["1", "11", "21", "12", "1r", "1r2", "21r", "1r1", "1rr"]
    for pair in itertools.combinations_with_replacement(programs, 2):
        for both in {pair, pair[::-1]}:
            for seed in (None, 0, 1):
                try:
                    run_ranks(one_place, [(X, both)], lnc=2, interleave=seed)
                    race = False
                except RaceError:
                    race = True
                assert race == (len(outcomes(both)) > 1), both


def test_a_race_can_be_a_warning_so_that_results_are_still_computed():
    def kernel(x):
        out = shared()
        nisa.dma_copy(dst=out[:1], src=tile(1.0 + nl.program_id(0))[:1])  # write
        nisa.dma_copy(dst=out[1:], src=x[1:])
        return out

    with pytest.warns(RaceWarning, match="nothing orders the two; 4 elements") as caught:
        got = run_ranks(kernel, [(X,)], lnc=2, races="warn").results[0]
    assert len(caught) == 1
    assert np.array_equal(got[1:], X[1:])
    with pytest.raises(LaunchError, match="races"):
        run_ranks(kernel, [(X,)], lnc=2, races="ignore")
