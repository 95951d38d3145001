"""Each collective against a direct NumPy statement, and each of its rules broken once."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from nki_impl.sim import collectives as ncc
from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim.errors import (
    CollectiveError,
    DeadlockError,
    PlacementError,
    RaceError,
    TargetError,
    UninitializedError,
)
from nki_impl.sim.machine.launch import run_ranks

WORLDS = (1, 2, 3, 4, 8)
LNCS = (1, 2)


def hbm(shape, dtype, name):
    return nl.ndarray(shape, dtype, nl.shared_hbm, name=name)


def copied(x, name):
    """A named shared tensor with the values of x, safe to read on both cores."""
    out = hbm(x.shape, x.dtype, name)
    nisa.dma_copy(dst=out, src=x)
    if nl.num_programs(0) == 2:
        nisa.core_barrier(out, (0, 1))
    return out


def result(x):
    """A tensor that a kernel can return, with the values of x."""
    out = hbm(x.shape, x.dtype, "")
    nisa.dma_copy(dst=out, src=x)
    return out


def drawn(world, shape, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(world)]


def groups_of(world):
    """The whole run, and two groups side by side in an order of their own."""
    whole = (tuple(range(world)),)
    if world < 2:
        return [whole, ()]
    half = world // 2
    return [whole, (), (tuple(range(half))[::-1], tuple(range(half, world)))]


def listed(groups, world):
    return groups or (tuple(range(world)),)


def group_cases():
    return [(world, groups) for world in WORLDS for groups in groups_of(world)]


@pytest.mark.parametrize("lnc", LNCS)
@pytest.mark.parametrize(("world", "groups"), group_cases())
def test_permute_implicit_brings_the_data_of_the_entry_before_in_the_list(world, groups, lnc):
    def kernel(x):
        src, dst = copied(x, "src"), hbm(x.shape, x.dtype, "dst")
        ncc.collective_permute_implicit([[src]], [[dst]], ncc.ReplicaGroup(groups))
        return result(dst)

    xs = drawn(world, (3, 5), ml_dtypes.bfloat16)
    got = run_ranks(kernel, [(x,) for x in xs], lnc=lnc).results
    for ring in listed(groups, world):
        for place, rank in enumerate(ring):
            want = xs[ring[(place - 1) % len(ring)]]
            assert got[rank].dtype == want.dtype
            assert np.array_equal(got[rank], want)


@pytest.mark.parametrize("lnc", LNCS)
@pytest.mark.parametrize("world", WORLDS)
def test_a_ring_of_ping_pong_buffers_brings_home_what_processing_rank_id_names(world, lnc):
    def kernel(x, table):
        group = ncc.ReplicaGroup((tuple(range(world)),))
        seen = hbm((world, *x.shape), x.dtype, "")
        ids = hbm((world, 1), nl.float32, "")
        now, free = copied(x, "ping"), hbm(x.shape, x.dtype, "pong")
        for step in range(world):
            who = ncc.collective_permute_implicit_current_processing_rank_id(step, group)
            one = table.ap([[1, 1], [1, 1]], offset=0, scalar_offset=who, indirect_dim=1)
            nisa.dma_copy(dst=seen[step], src=now)
            nisa.dma_copy(dst=ids[step : step + 1], src=one)
            if step < world - 1:
                ncc.collective_permute_implicit([[now]], [[free]], group)
                now, free = free, now
        return seen, ids

    xs = drawn(world, (2, 4))
    table = np.arange(world, dtype=np.float32)[None]
    for rank, (seen, ids) in enumerate(
        run_ranks(kernel, [(x, table) for x in xs], lnc=lnc).results
    ):
        order = [(rank - step) % world for step in range(world)]
        assert ids.ravel().tolist() == order
        assert np.array_equal(seen, np.stack([xs[owner] for owner in order]))


@pytest.mark.parametrize(("ids", "want"), [("rank", [1, 0, 3, 2]), ("position", [0, 1, 1, 0])])
def test_processing_rank_id_in_a_group_is_its_entry_or_its_position(ids, want):
    def kernel(table):
        group = ncc.ReplicaGroup(((2, 3), (1, 0)))
        who = ncc.collective_permute_implicit_current_processing_rank_id(1, group)
        me = ncc.rank_id()
        out = hbm((2, 1), nl.int32, "")
        for row, index in enumerate((who, me)):
            one = table.ap([[1, 1], [1, 1]], offset=0, scalar_offset=index, indirect_dim=1)
            nisa.dma_copy(dst=out[row : row + 1], src=one)
        return out

    table = np.arange(4, dtype=np.int32)[None]
    got = run_ranks(kernel, [(table,)] * 4, ring_ids=ids).results
    assert [int(out[0, 0]) for out in got] == want
    assert [int(out[1, 0]) for out in got] == [0, 1, 2, 3]


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_permute_implicit_moves_each_channel(channels):
    def kernel(x):
        srcs = [[copied(x[c], f"src{c}")] for c in range(channels)]
        dsts = [[hbm(x[c].shape, x.dtype, f"dst{c}")] for c in range(channels)]
        ids = tuple(range(channels))
        ncc.collective_permute_implicit(srcs, dsts, ncc.ReplicaGroup(()), ids)
        out = hbm(x.shape, x.dtype, "")
        for c in range(channels):
            nisa.dma_copy(dst=out[c], src=dsts[c][0])
        return out

    xs = drawn(3, (channels, 2, 4))
    got = run_ranks(kernel, [(x,) for x in xs]).results
    for rank in range(3):
        assert np.array_equal(got[rank], xs[rank - 1])


@pytest.mark.parametrize("lnc", LNCS)
def test_permute_implicit_moves_slices_of_sbuf_between_cores_of_equal_number(lnc):
    def kernel(x):
        core = nl.program_id(0)
        src, dst = nl.ndarray((4, 6), x.dtype), nl.ndarray((4, 6), x.dtype)
        nisa.dma_copy(dst=src, src=x[core])
        halves = [(0, 3), (3, 6)]
        ncc.collective_permute_implicit(
            [[src[:, a:b]] for a, b in halves],
            [[dst[:, a:b]] for a, b in halves],
            ncc.ReplicaGroup(()),
            [0, 1],
        )
        out = hbm(x.shape, x.dtype, "")
        nisa.dma_copy(dst=out[core], src=dst)
        return out

    xs = drawn(3, (lnc, 4, 6))
    got = run_ranks(kernel, [(x,) for x in xs], lnc=lnc).results
    for rank in range(3):
        assert np.array_equal(got[rank], xs[rank - 1])


OPS = {"add": np.add, "minimum": np.minimum, "maximum": np.maximum}


@pytest.mark.parametrize("lnc", LNCS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", WORLDS)
def test_permute_reduce_sends_the_reduced_sources_rounded_once(world, op, lnc):
    def kernel(x, y):
        src0, src1, dst = copied(x, "src0"), copied(y, "src1"), hbm(x.shape, x.dtype, "dst")
        ncc.collective_permute_implicit_reduce(
            [[src0]], [[src1]], [[dst]], ncc.ReplicaGroup(()), getattr(nl, op)
        )
        return result(dst)

    xs = drawn(world, (3, 5), ml_dtypes.bfloat16, 1)
    ys = drawn(world, (3, 5), ml_dtypes.bfloat16, 2)
    got = run_ranks(kernel, list(zip(xs, ys, strict=True)), lnc=lnc).results
    for rank in range(world):
        x, y = (z[rank - 1].astype(np.float32) for z in (xs, ys))
        assert np.array_equal(got[rank], OPS[op](x, y).astype(ml_dtypes.bfloat16))


def test_a_gradient_that_travels_the_ring_is_added_in_the_order_of_the_hops():
    world = 4

    def kernel(x):
        group = ncc.ReplicaGroup((tuple(range(world)),))
        mine, now, free = copied(x, "mine"), copied(x, "ping"), hbm(x.shape, x.dtype, "pong")
        for _ in range(world - 1):
            ncc.collective_permute_implicit_reduce([[mine]], [[now]], [[free]], group, nl.add)
            now, free = free, now
        return result(now)

    xs = drawn(world, (4, 4))
    got = run_ranks(kernel, [(x,) for x in xs]).results
    for rank in range(world):
        # What arrives began as the partial of rank+1 and met each rank's own on its way.
        total = xs[(rank - 3) % world]
        for hop in (3, 2, 1):
            total = xs[(rank - hop) % world] + total
        assert np.array_equal(got[rank], total)


@pytest.mark.parametrize("lnc", LNCS)
@pytest.mark.parametrize(
    ("world", "pairs"),
    [(3, ((0, 1), (1, 2), (2, 0))), (4, ((0, 3), (3, 0), (1, 2), (2, 1))), (4, ((3, 1), (1, 3)))],
)
def test_permute_by_pairs_sends_from_source_to_target(world, pairs, lnc):
    def kernel(x, before):
        src, dst = copied(x, "src"), copied(before, "dst")
        ncc.collective_permute([src], [dst], pairs)
        return result(dst)

    xs, before = drawn(world, (2, 3), seed=1), drawn(world, (2, 3), seed=2)
    got = run_ranks(kernel, list(zip(xs, before, strict=True)), lnc=lnc).results
    source_of = {target: source for source, target in pairs}
    for rank in range(world):
        want = xs[source_of[rank]] if rank in source_of else before[rank]
        assert np.array_equal(got[rank], want)


@pytest.mark.parametrize("lnc", LNCS)
@pytest.mark.parametrize(("world", "groups"), group_cases())
def test_all_gather_concatenates_in_the_order_of_the_list(world, groups, lnc):
    def kernel(x, n):
        src, dst = copied(x, "src"), hbm((x.shape[0] * n, x.shape[1]), x.dtype, "dst")
        ncc.all_gather([src], [dst], ncc.ReplicaGroup(groups), 0)
        return result(dst)

    xs = drawn(world, (2, 5), np.float16)
    sizes = {rank: len(ring) for ring in listed(groups, world) for rank in ring}
    got = run_ranks(kernel, [(x, sizes[r]) for r, x in enumerate(xs)], lnc=lnc).results
    for ring in listed(groups, world):
        for rank in ring:
            assert np.array_equal(got[rank], np.concatenate([xs[r] for r in ring]))


@pytest.mark.parametrize("lnc", LNCS)
@pytest.mark.parametrize("dim", [0, 1])
def test_all_gather_in_sbuf_goes_along_either_dimension(dim, lnc):
    def kernel(x):
        core = nl.program_id(0)
        src = nl.ndarray((4, 6), x.dtype)
        nisa.dma_copy(dst=src, src=x[core])
        dst = nl.ndarray((12, 6) if dim == 0 else (4, 18), x.dtype)
        ncc.all_gather([src], [dst], ncc.ReplicaGroup(()), dim)
        out = hbm((x.shape[0], *dst.shape), x.dtype, "")
        nisa.dma_copy(dst=out[core], src=dst)
        return out

    xs = drawn(3, (lnc, 4, 6))
    got = run_ranks(kernel, [(x,) for x in xs], lnc=lnc).results
    for out in got:
        for core in range(lnc):
            assert np.array_equal(out[core], np.concatenate([x[core] for x in xs], axis=dim))


@pytest.mark.parametrize("lnc", LNCS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("world", "groups"), group_cases())
def test_all_reduce_adds_in_float32_in_list_order_and_rounds_once(world, groups, op, lnc):
    def kernel(x, y):
        srcs = [copied(x, "x"), copied(y, "y")]
        dsts = [hbm(x.shape, x.dtype, "x_all"), hbm(y.shape, y.dtype, "y_all")]
        ncc.all_reduce(srcs, dsts, ncc.ReplicaGroup(groups), getattr(nl, op))
        return result(dsts[0]), result(dsts[1])

    xs = drawn(world, (2, 5), ml_dtypes.bfloat16)
    ys = [np.arange(6, dtype=np.int32).reshape(2, 3) * (1 - 2 * r) + 2**24 for r in range(world)]
    got = run_ranks(kernel, list(zip(xs, ys, strict=True)), lnc=lnc).results
    for ring in listed(groups, world):
        total, count = xs[ring[0]].astype(np.float32), ys[ring[0]]
        for rank in ring[1:]:
            total = OPS[op](total, xs[rank].astype(np.float32))
            count = OPS[op](count, ys[rank])
        for rank in ring:
            assert np.array_equal(got[rank][0], total.astype(ml_dtypes.bfloat16))
            assert np.array_equal(got[rank][1], count)


@pytest.mark.parametrize("lnc", LNCS)
@pytest.mark.parametrize("world", WORLDS)
def test_reduce_scatter_leaves_each_rank_its_part_of_the_sum(world, lnc):
    def kernel(x):
        src, dst = copied(x, "src"), hbm((2, x.shape[1]), x.dtype, "dst")
        ncc.reduce_scatter([src], [dst], ncc.ReplicaGroup(()), 0, nl.add)
        return result(dst)

    xs = drawn(world, (2 * world, 3))
    got = run_ranks(kernel, [(x,) for x in xs], lnc=lnc).results
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    for rank in range(world):
        assert np.array_equal(got[rank], total[2 * rank : 2 * rank + 2])


@pytest.mark.parametrize("lnc", LNCS)
@pytest.mark.parametrize("world", WORLDS)
def test_all_to_all_is_a_transposition_of_ranks_and_parts(world, lnc):
    def kernel(x):
        src, dst = copied(x, "src"), hbm(x.shape, x.dtype, "dst")
        ncc.all_to_all([src], [dst], ncc.ReplicaGroup(()), 0)
        return result(dst)

    xs = drawn(world, (2 * world, 3))
    got = run_ranks(kernel, [(x,) for x in xs], lnc=lnc).results
    parts = np.stack(xs).reshape(world, world, 2, 3)
    assert np.array_equal(np.stack(got).reshape(parts.shape), parts.transpose(1, 0, 2, 3))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("lnc", LNCS)
def test_results_do_not_depend_on_who_runs_when(lnc, seed):
    def kernel(x):
        group = ncc.ReplicaGroup(((0, 1, 2), (4, 3)))
        now, free = copied(x, "ping"), hbm(x.shape, x.dtype, "pong")
        total = copied(x, "total")
        for _ in range(2):
            ncc.collective_permute_implicit([[now]], [[free]], group)
            now, free = free, now
            more = hbm(x.shape, x.dtype, "more")
            ncc.all_reduce([now], [more], group, nl.add)
            total = copied(more, "again")
        return result(total), result(now)

    xs = [(x,) for x in drawn(5, (4, 8))]
    plain = run_ranks(kernel, xs, lnc=lnc)
    mixed = run_ranks(kernel, xs, lnc=lnc, interleave=seed)
    assert mixed.switches > plain.switches
    for want, got in zip(plain.results, mixed.results, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(want, got, strict=True))


def test_traffic_is_counted_as_a_ring_has_it():
    def kernel(x):
        group = ncc.ReplicaGroup(())
        src, dst = copied(x, "src"), hbm(x.shape, x.dtype, "dst")
        every = hbm((4 * x.shape[0], x.shape[1]), x.dtype, "every")
        ncc.collective_permute_implicit([[src]], [[dst]], group)
        ncc.all_gather([src], [every], group, 0)
        return result(dst)

    size = 4 * 8 * 2
    for lnc in LNCS:
        outcome = run_ranks(kernel, [(x,) for x in drawn(4, (4, 8), np.float16)], lnc=lnc)
        for counters in outcome.ranks:
            assert counters.collective_bytes == size + 3 * size
            assert counters.hops == 1 + 3
    alone = run_ranks(_self_permute, [(drawn(1, (4, 8))[0],)])
    assert alone.ranks[0].collective_bytes == alone.ranks[0].hops == 0


def _self_permute(x):
    src, dst = copied(x, "src"), hbm(x.shape, x.dtype, "dst")
    ncc.collective_permute_implicit([[src]], [[dst]], ncc.ReplicaGroup(()))
    return result(dst)


# What must be refused. Each kernel breaks exactly one rule.

GROUP = ncc.ReplicaGroup(())
X = np.arange(12, dtype=np.float32).reshape(4, 3)


def refused(kernel, error, match, world=2, lnc=1, **options):
    with pytest.raises(error, match=match) as caught:
        run_ranks(kernel, [(X + r,) for r in range(world)], lnc=lnc, **options)
    message = str(caught.value)
    assert f"(at {__file__}:" in message
    return message


def permute(src, dst, group=GROUP, **options):
    ncc.collective_permute_implicit([[src]], [[dst]], group, **options)


def test_a_kernel_input_is_no_operand():
    def kernel(x):
        permute(x, hbm(x.shape, x.dtype, "dst"))

    message = refused(kernel, CollectiveError, "kernel input x")
    assert "collective_permute_implicit: src" in message
    assert message.count(__file__) == 1


def test_a_kernel_output_is_no_operand():
    def kernel(x):
        dst = hbm(x.shape, x.dtype, "dst")
        permute(copied(x, "src"), dst)
        return dst

    refused(kernel, CollectiveError, "dst, an operand of collective_permute_implicit")


def test_memory_without_a_name_is_no_operand():
    def kernel(x):
        permute(copied(x, "src"), hbm(x.shape, x.dtype, ""))

    refused(kernel, CollectiveError, "NCC_IBIR440")


def test_private_memory_is_no_operand_on_two_cores():
    def kernel(x):
        permute(copied(x, "src"), nl.ndarray(x.shape, x.dtype, nl.private_hbm, name="dst"))

    refused(kernel, CollectiveError, "dst in private HBM", lnc=2)
    run_ranks(kernel, [(X,), (X,)], lnc=1)


def test_psum_is_no_operand():
    def kernel(x):
        permute(copied(x, "src"), nl.ndarray((4, 3), nl.float32, nl.psum, name="dst"))

    refused(kernel, PlacementError, "in PSUM")


def test_hbm_and_sbuf_do_not_mix():
    def kernel(x):
        permute(copied(x, "src"), nl.ndarray((4, 3), nl.float32, name="dst"))

    refused(kernel, PlacementError, "all in SBUF")


def test_ping_pong_buffers_that_alias_are_refused():
    def kernel(x):
        both = hbm((8, 3), x.dtype, "both")
        nisa.dma_copy(dst=both[:4], src=x)
        nisa.dma_copy(dst=both[4:], src=x)
        permute(both[:4], both[4:])  # side by side: no element in common
        permute(both[:4], both[3:7])

    refused(kernel, CollectiveError, "share no element")


def test_a_buffer_permuted_onto_itself_is_refused():
    def kernel(x):
        src = copied(x, "src")
        permute(src, src)

    refused(kernel, CollectiveError, "share no element")


def test_two_channels_into_one_destination_are_refused():
    def kernel(x):
        a, b, dst = copied(x, "a"), copied(x, "b"), hbm(x.shape, x.dtype, "dst")
        ncc.collective_permute_implicit([[a], [b]], [[dst], [dst]], GROUP, [0, 1])

    refused(kernel, CollectiveError, "share no element")


def test_a_source_that_was_never_written_is_refused_with_its_rank():
    def kernel(x):
        src = hbm(x.shape, x.dtype, "src")
        rows = x.shape[0] if ncc.rank_id()._state == 1 else 3
        nisa.dma_copy(dst=src[:rows], src=x[:rows])
        permute(src, hbm(x.shape, x.dtype, "dst"))

    refused(kernel, UninitializedError, "src of rank 0 core 0")


@pytest.mark.parametrize(
    ("shape", "dtype", "match"), [((3, 4), nl.float32, "shape"), ((4, 3), nl.float16, "dtype")]
)
def test_source_and_destination_agree(shape, dtype, match):
    def kernel(x):
        permute(copied(x, "src"), hbm(shape, dtype, "dst"))

    refused(kernel, CollectiveError, match)


def test_all_gather_wants_room_for_all():
    def kernel(x):
        ncc.all_gather([copied(x, "src")], [hbm((4, 3), x.dtype, "dst")], GROUP, 0)

    refused(kernel, CollectiveError, r"shape \(8, 3\)")


def test_all_gather_in_hbm_goes_along_dimension_0_only():
    def kernel(x):
        ncc.all_gather([copied(x, "src")], [hbm((4, 6), x.dtype, "dst")], GROUP, 1)

    refused(kernel, CollectiveError, "collective_dim")


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_to_all"])
def test_what_is_split_divides_among_the_ranks(operation):
    def kernel(x):
        src = copied(x[:3], "src")
        dst = hbm((3, 3), x.dtype, "dst")
        extra = (nl.add,) if operation == "reduce_scatter" else ()
        getattr(ncc, operation)([src], [dst], GROUP, 0, *extra)

    refused(kernel, CollectiveError, "divisible by 2")


@pytest.mark.parametrize("operation", ["all_to_all", "collective_permute"])
def test_some_collectives_work_on_hbm_only(operation):
    def kernel(x):
        src, dst = nl.ndarray((4, 3), x.dtype), nl.ndarray((4, 3), x.dtype)
        nisa.dma_copy(dst=src, src=x)
        if operation == "all_to_all":
            ncc.all_to_all([src], [dst], GROUP, 0)
        else:
            ncc.collective_permute([src], [dst], ((0, 1), (1, 0)))

    refused(kernel, PlacementError, "works on HBM")


def test_several_tensors_at_once_are_for_hbm():
    def kernel(x):
        src, dst = nl.ndarray((4, 3), x.dtype), nl.ndarray((4, 3), x.dtype)
        nisa.dma_copy(dst=src, src=x)
        ncc.all_reduce([src, src], [dst, dst], GROUP, nl.add)

    refused(kernel, PlacementError, "several tensors")


def test_a_permute_takes_one_tensor_per_channel():
    def kernel(x):
        src, dst = copied(x, "src"), hbm(x.shape, x.dtype, "dst")
        ncc.collective_permute_implicit([[src, src]], [[dst, dst]], GROUP)

    refused(kernel, CollectiveError, "exactly 1")


@pytest.mark.parametrize("channels", [(1,), (0, 2), (0, 1, 2, 3, 4), ()])
def test_channels_count_from_0_to_3(channels):
    def kernel(x):
        src, dst = copied(x, "src"), hbm(x.shape, x.dtype, "dst")
        k = len(channels)
        ncc.collective_permute_implicit([[src]] * k, [[dst]] * k, GROUP, channels)

    refused(kernel, CollectiveError, "channel_ids")


def test_groups_that_are_not_the_whole_run_have_two_channels():
    def kernel(x):
        src = copied(x, "src")
        dsts = [[hbm(x.shape, x.dtype, f"dst{c}")] for c in range(3)]
        group = ncc.ReplicaGroup(((0, 1), (2, 3)))
        ncc.collective_permute_implicit([[src]] * 3, dsts, group, [0, 1, 2])

    refused(kernel, CollectiveError, "at most 2 channels", world=4)


@pytest.mark.parametrize("op", ["multiply", "subtract", "maximum_of_nothing"])
def test_reductions_are_add_minimum_maximum(op):
    def kernel(x):
        src, dst = copied(x, "src"), hbm(x.shape, x.dtype, "dst")
        ncc.all_reduce([src], [dst], GROUP, getattr(nl, op, nl.exp))

    with pytest.raises(Exception, match="op"):
        run_ranks(kernel, [(X,)] * 2)


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        (((0, 1), (1, 2)), "share no rank"),
        (((0, 0, 1, 2),), "share no rank"),
        (((0, 1),), "every rank of 0..2"),
        (((0, 1, 2, 3),), "every rank of 0..2"),
        (((0, 1, 2), ()), "every rank of 0..2"),
        ((0, 1, 2), "lists of ranks"),
        (3, "lists of ranks"),
        (((0, 1), (2.0,)), "integers"),
    ],
)
def test_groups_name_every_rank_once(groups, match):
    def kernel(x):
        permute(copied(x, "src"), hbm(x.shape, x.dtype, "dst"), ncc.ReplicaGroup(groups))

    refused(kernel, CollectiveError, f"replica_group: .*{match}", world=3)


def test_a_group_is_a_replica_group():
    def kernel(x):
        permute(copied(x, "src"), hbm(x.shape, x.dtype, "dst"), ((0, 1),))

    refused(kernel, CollectiveError, "wrap the lists")


@pytest.mark.parametrize(
    "pairs", [((0, 1),), ((0, 1), (1, 2)), ((0, 1), (0, 2)), ((0, 1), (1, 3), (3, 0)), (), (0, 1)]
)
def test_pairs_form_cycles_over_the_ranks(pairs):
    def kernel(x):
        ncc.collective_permute([copied(x, "src")], [hbm(x.shape, x.dtype, "dst")], pairs)

    refused(kernel, CollectiveError, "source_target_pairs", world=3)


@pytest.mark.parametrize("iteration", [-1, 1.0, True])
def test_an_iteration_is_a_count(iteration):
    def kernel(x):
        ncc.collective_permute_implicit_current_processing_rank_id(iteration, GROUP)

    refused(kernel, CollectiveError, "iteration_id")


def test_priority_exists_from_the_fourth_generation_on():
    def kernel(x):
        permute(copied(x, "src"), hbm(x.shape, x.dtype, "dst"), priority=1)

    refused(kernel, TargetError, "priority")
    run_ranks(kernel, [(X,)] * 2, target="trn3")


# Ranks that disagree.


def by_rank(first, second):
    """A kernel whose rank 0 does one thing and whose other ranks do another: no SPMD program."""

    def kernel(x):
        src, dst = copied(x, "src"), hbm(x.shape, x.dtype, "dst")
        (first if ncc.rank_id()._state == 0 else second)(src, dst)

    return kernel


def test_ranks_that_issue_different_operations_are_named():
    def gather(src, dst):
        ncc.all_reduce([src], [dst], GROUP, nl.add)

    message = refused(by_rank(permute, gather), CollectiveError, "sequence")
    assert "rank 1 core 0 issues all_reduce" in message
    assert "rank 0 core 0 issued collective_permute_implicit" in message
    assert message.count(__file__) == 2


@pytest.mark.parametrize(
    ("second", "match"),
    [
        (lambda src, dst: permute(src[:2], dst[:2]), r"src src \(2, 3\)"),
        (lambda src, dst: permute(dst, src), "src dst"),
        (lambda src, dst: permute(src, dst, ncc.ReplicaGroup(((1, 0),))), "groups"),
        (
            lambda src, dst: permute(
                copied(src.view(nl.int32), "src"), hbm((4, 3), nl.int32, "dst")
            ),
            "int32",
        ),
    ],
    ids=["shape", "name", "group", "dtype"],
)
def test_ranks_that_differ_in_one_thing_are_refused(second, match):
    def first(src, dst):
        permute(src, dst)

    def kernel(src, dst):
        nisa.dma_copy(dst=dst, src=src)
        second(src, dst)

    if match == "groups":
        # Another group is another meeting: both wait for ever.
        refused(by_rank(first, kernel), DeadlockError, "waits in collective_permute_implicit")
    else:
        refused(by_rank(first, kernel), CollectiveError, match)


def test_ranks_that_reduce_differently_are_refused():
    def reduce(op):
        return lambda src, dst: ncc.all_reduce([src], [dst], GROUP, op)

    refused(by_rank(reduce(nl.add), reduce(nl.maximum)), CollectiveError, "op=maximum")


def test_a_rank_that_leaves_out_its_last_collective_is_named():
    message = refused(by_rank(permute, lambda src, dst: None), CollectiveError, "returned")
    assert "rank 0 core 0 waits in collective_permute_implicit" in message
    assert "rank 1 core 0 returned" in message


def test_groups_entered_in_opposite_order_are_a_deadlock():
    def pair(group):
        def use(src, dst):
            permute(src, dst, ncc.ReplicaGroup(group))

        return use

    def kernel(x):
        src, dst = copied(x, "src"), hbm(x.shape, x.dtype, "dst")
        row, column = ((0, 1), (2, 3)), ((0, 2), (1, 3))
        first, second = (row, column) if ncc.rank_id()._state in (0, 3) else (column, row)
        pair(first)(src, dst)
        pair(second)(src, dst)

    message = refused(kernel, DeadlockError, "rank 0 core 0 waits", world=4)
    assert message.count("waits in") == 4


# Cores that disagree.


def by_core(first, second):
    def kernel(x):
        src, dst = copied(x, "src"), hbm(x.shape, x.dtype, "dst")
        (first if nl.program_id(0) == 0 else second)(src, dst)

    return kernel


def test_a_collective_that_one_core_leaves_out_is_named():
    message = refused(by_core(permute, lambda src, dst: None), CollectiveError, "returned", lnc=2)
    assert "rank 0 core 0 waits in collective_permute_implicit" in message
    assert "but rank 0 core 1 and rank 1 core 1 returned from the kernel" in message


def test_cores_that_pass_different_tensors_are_refused():
    def other(src, dst):
        permute(copied_again(src), dst)

    def copied_again(src):
        again = nl.ndarray(src.shape, src.dtype, nl.shared_hbm, name="src")
        nisa.dma_copy(dst=again, src=src)
        return again

    refused(by_core(permute, other), CollectiveError, "another allocation", lnc=2)


def test_a_core_in_a_barrier_and_the_other_in_a_collective_are_a_deadlock():
    def barrier(src, dst):
        nisa.core_barrier(src, (0, 1))

    message = refused(by_core(permute, barrier), DeadlockError, "waits in core_barrier", lnc=2)
    assert "rank 1 core 0 waits in collective_permute_implicit" in message


# Collectives and races: see test_races.py for what orders what.


def test_a_missing_barrier_before_a_collective_is_a_race_under_every_interleaving():
    def kernel(x, barrier):
        core = nl.program_id(0)
        src, dst = hbm(x.shape, x.dtype, "src"), hbm(x.shape, x.dtype, "dst")
        half = slice(2 * core, 2 * core + 2)
        nisa.dma_copy(dst=src[half], src=x[half])
        if barrier:
            nisa.core_barrier(src, (0, 1))
        permute(src, dst)
        out = hbm(x.shape, x.dtype, "")
        nisa.dma_copy(dst=out[half], src=dst[half])
        return out

    for seed in (None, 0, 1, 2, 3):
        got = run_ranks(kernel, [(X, True), (X + 1, True)], lnc=2, interleave=seed).results
        assert np.array_equal(got[0], X + 1)
        with pytest.raises(RaceError, match="core_barrier") as caught:
            run_ranks(kernel, [(X, False), (X + 1, False)], lnc=2, interleave=seed)
        assert str(caught.value).count(__file__) == 3
        assert "sends by a collective in collective_permute_implicit" in str(caught.value)
