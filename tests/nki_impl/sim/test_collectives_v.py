"""Collectives of variable length against a direct NumPy statement, and each of their rules broken once."""

from __future__ import annotations

import inspect
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nki_impl.sim import collectives as ncc
from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim.errors import (
    CollectiveError,
    DtypeError,
    PlacementError,
    RaceError,
    ShapeError,
    TargetError,
    UninitializedError,
    UnsupportedError,
)
from nki_impl.sim.machine.launch import run_ranks

SHAPE = (6, 4)
SLOT = 8
# Row s: what rank s sends to each rank; unequal, with a zero, and a rank that sends nothing.
COUNTS = {
    1: [[5]],
    3: [[3, 0, 8], [1, 7, 2], [0, 0, 0]],
    4: [[3, 0, 8, 1], [1, 7, 2, 5], [0, 0, 0, 0], [6, 2, 1, 4]],
}
GATHERED = [5, 0, 8, 3]


def barrier(tensor: Any) -> None:
    if nl.num_programs(0) == 2:
        nisa.core_barrier(tensor, (0, 1))


def copied(x: Any, name: str) -> Any:
    """A named tensor in shared HBM with the values of x, safe to read on both cores."""
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm, name)
    nisa.dma_copy(out, x)
    barrier(out)
    return out


def zeros(shape: Any, dtype: Any, name: str) -> Any:
    out = nl.ndarray(shape, dtype, nl.shared_hbm, name)
    nisa.dma_copy(out, nl.zeros(shape, dtype))
    barrier(out)
    return out


def on_chip(x: Any) -> Any:
    """The metadata x in SBUF, on one partition."""
    out = nl.ndarray((1, *x.shape), x.dtype)
    nisa.dma_copy(out, x.reshape((1, *x.shape)))
    return out


def result(x: Any) -> Any:
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    nisa.dma_copy(out, x)
    return out


def metadata(world: int, places: bool = False) -> list[Any]:
    """Row 1 packs what a rank sends; row 3 packs what it receives, in reverse order of the ranks."""
    sent = np.array(COUNTS[world], np.uint32)
    rows = []
    for rank in range(world):
        got = sent[:, rank]
        begin = got[::-1].cumsum()[::-1] - got
        table = [sent[rank], sent[rank].cumsum() - sent[rank], np.full(world, 99), begin]
        rows.append(np.array(table[: 4 if places else 3], np.uint32))
    return rows


def drawn(world: int, dtype: Any = np.float32) -> list[Any]:
    return [
        np.random.default_rng(rank).standard_normal(SHAPE).astype(dtype) for rank in range(world)
    ]


def whole(x: Any, table: Any, dst: Any, operation: str, group: Any, **options: Any) -> None:
    getattr(ncc, operation)([copied(x, "src")], [dst], group, table, **options)


def split(x: Any, table: Any, dst: Any, operation: str, group: Any, **options: Any) -> None:
    """Write the source only after the prepare."""
    src = nl.ndarray(x.shape, x.dtype, nl.shared_hbm, "src")
    handle = getattr(ncc, operation + "_prepare")([src], [dst], group, table, **options)
    nisa.dma_copy(src, x)
    barrier(src)
    getattr(ncc, operation + "_trigger")(handle)


def exchanged(xs, tables, operation, issue=whole, chip=False, groups=(), lnc=1, target=None, **options):  # fmt: skip
    """Return (dst, metadata) of each rank."""
    n = tables[0].shape[1]

    def kernel(x, table):
        held = on_chip(table) if chip else copied(table, "metadata")
        dst = zeros((n, SLOT), x.dtype, "dst")
        issue(x, held, dst, operation, ncc.ReplicaGroup(groups), **options)
        after = held.reshape((1, held.size)) if chip else held
        return result(dst), result(after)

    arguments = list(zip(xs, tables, strict=True))
    got = run_ranks(kernel, arguments, lnc=lnc, target=target).results
    return [(dst, after.reshape(tables[0].shape)) for dst, after in got]


@pytest.mark.parametrize("chip", [False, True])
@pytest.mark.parametrize("issue", [whole, split])
@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("world", [1, 3, 4])
def test_all_to_all_v_moves_the_counted_elements(world, lnc, issue, chip):
    xs, tables, counts = drawn(world), metadata(world), np.array(COUNTS[world])
    got = exchanged(xs, tables, "all_to_all_v", issue, chip, lnc=lnc)
    for rank, (dst, after) in enumerate(got):
        want = np.zeros((world, SLOT), np.float32)
        for sender in range(world):
            n, start = counts[sender, rank], tables[sender][1, rank]
            want[sender, :n] = xs[sender].ravel()[start : start + n]
        assert np.array_equal(dst, want)
        assert np.array_equal(after[2], counts[:, rank])
        assert np.array_equal(after[:2], tables[rank][:2])


@pytest.mark.parametrize("issue", [whole, split])
@pytest.mark.parametrize("world", [3, 4])
def test_all_to_all_v_writes_to_the_places_of_row_3(world, issue):
    xs, tables, counts = drawn(world, ml_dtypes.bfloat16), metadata(world, True), COUNTS[world]
    for rank, (dst, _) in enumerate(exchanged(xs, tables, "all_to_all_v", issue, has_rdispls=True)):
        parts = [
            xs[s].ravel()[tables[s][1, rank] :][: counts[s][rank]] for s in reversed(range(world))
        ]
        want = np.zeros(world * SLOT, ml_dtypes.bfloat16)
        packed = np.concatenate(parts)
        want[: len(packed)] = packed
        assert np.array_equal(dst.ravel(), want)


@pytest.mark.parametrize("operation", ["all_gather_v", "all_to_all_v"])
@pytest.mark.parametrize("chip", [False, True])
def test_known_receive_counts_leave_row_2_alone(operation, chip):
    got = exchanged(drawn(4), metadata(4), operation, chip=chip, lnc=2, recv_counts_known=True)
    for _, after in got:
        assert (after[2] == 99).all()


@pytest.mark.parametrize("chip", [False, True])
@pytest.mark.parametrize("issue", [whole, split])
@pytest.mark.parametrize("groups", [(), ((3, 1, 0, 2),), ((0, 1, 2, 3), (7, 6, 5, 4))])
def test_all_gather_v_sends_one_part_to_all_ranks_of_the_group(groups, issue, chip):
    rings = groups or ((0, 1, 2, 3),)
    world = 4 * len(rings)
    xs = drawn(world)
    counts = [(GATHERED * 2)[rank] for rank in range(world)]
    # Only the first column of rows 0 and 1 counts.
    tables = [np.array([[n, 77, 77, 77], [rank, 77, 77, 77], [99] * 4], np.uint32)
              for rank, n in enumerate(counts)]  # fmt: skip
    got = exchanged(xs, tables, "all_gather_v", issue, chip, groups, lnc=2)
    for ring in rings:
        want = np.zeros((4, SLOT), np.float32)
        for place, s in enumerate(ring):
            want[place, : counts[s]] = xs[s].ravel()[s : s + counts[s]]
        for rank in ring:
            assert np.array_equal(got[rank][0], want)
            assert got[rank][1][2].tolist() == [counts[s] for s in ring]


def test_trn3_takes_whole_devices():
    xs = drawn(8)
    tables = [np.array([[1] * 4, range(4), [0] * 4], np.uint32)] * 8
    groups = ((0, 1, 2, 3), (4, 5, 6, 7))
    got = exchanged(xs, tables, "all_to_all_v", groups=groups, lnc=2, target="trn3")
    assert [got[5][0][s, 0] for s in range(4)] == [xs[4 + s].ravel()[1] for s in range(4)]


def test_elements_that_nothing_is_received_for_stay_unwritten():
    def kernel(x, table):
        dst = nl.ndarray((3, SLOT), x.dtype, nl.shared_hbm, "dst")
        whole(x, copied(table, "metadata"), dst, "all_to_all_v", ncc.ReplicaGroup(()))
        one = nl.ndarray((1, 1), nl.float32)
        nisa.dma_copy(one, dst[2:3, 0:1])
        nisa.tensor_scalar(one, one, nl.add, 1.0)

    with pytest.raises(UninitializedError):
        run_ranks(kernel, list(zip(drawn(3), metadata(3), strict=True)))


def test_the_bytes_that_a_rank_sends_to_others_are_counted():
    def kernel(x, table):
        dst = zeros((3, SLOT), x.dtype, "dst")
        whole(x, copied(table, "metadata"), dst, "all_to_all_v", ncc.ReplicaGroup(()))

    counted = run_ranks(kernel, list(zip(drawn(3), metadata(3), strict=True))).ranks
    sent = [counters.collective_bytes for counters in counted]
    assert sent == [(0 + 8) * 4, (1 + 2) * 4, 0]


# Rules.


def refused(error, match, change=None, operation="all_to_all_v", world=3, lnc=1, issue=whole, **options):  # fmt: skip
    """Run with metadata that ``change`` altered; the error must match."""
    tables = metadata(world, options.get("has_rdispls", False))
    for table in tables if change else ():
        change(table)
    with pytest.raises(error, match=match):
        exchanged(drawn(world), tables, operation, issue, lnc=lnc, **options)


def put(row: int, column: int, value: int) -> Any:
    def change(table: Any) -> None:
        table[row, column] = value

    return change


@pytest.mark.parametrize("issue", [whole, split])
def test_a_part_beyond_the_source_is_refused(issue):
    refused(CollectiveError, "24 elements; got 8 elements from 17 on", put(1, 2, 17), issue=issue,
            world=3)  # fmt: skip


def test_a_count_beyond_its_part_of_the_destination_is_refused():
    refused(CollectiveError, "received parts that fit: 8 elements", put(0, 1, 9))


def test_a_gathered_count_beyond_its_part_of_the_destination_is_refused():
    refused(CollectiveError, "fit: 8 elements", put(0, 0, 9), "all_gather_v", world=4, lnc=2)


def test_a_place_beyond_the_destination_is_refused():
    refused(CollectiveError, "fit: 1 elements from 23", put(3, 0, 23), has_rdispls=True)


def test_received_parts_that_overlap_are_refused():
    refused(CollectiveError, "do not overlap", put(3, 0, 0), has_rdispls=True)


def test_a_run_of_another_size_than_the_metadata_is_refused():
    with pytest.raises(ShapeError, match=r"metadata_tensor: shape \(3, 3\)"):
        exchanged(drawn(3), [np.zeros((3, 2), np.uint32)] * 3, "all_to_all_v")


@pytest.mark.parametrize("rows", [3, 4])
def test_the_metadata_have_a_row_3_exactly_if_it_is_used(rows):
    table = [np.zeros((rows, 3), np.uint32)] * 3
    with pytest.raises(ShapeError, match="metadata_tensor"):
        exchanged(drawn(3), table, "all_to_all_v", has_rdispls=rows == 3)


def test_the_metadata_are_uint32():
    with pytest.raises(DtypeError, match="uint32"):
        exchanged(drawn(3), [np.zeros((3, 3), np.int32)] * 3, "all_to_all_v")


def run3(kernel: Any, error: type[Exception], match: str, lnc: int = 1, world: int = 3) -> None:
    with pytest.raises(error, match=match):
        run_ranks(kernel, list(zip(drawn(world), metadata(world), strict=True)), lnc=lnc)


ALL = ncc.ReplicaGroup(())


def test_the_metadata_are_not_in_psum():
    def kernel(x, table):
        held = nl.ndarray((1, 3, 3), nl.uint32, nl.psum)
        whole(x, held, zeros((3, SLOT), x.dtype, "dst"), "all_to_all_v", ALL)

    run3(kernel, PlacementError, "metadata_tensor")


def test_the_metadata_are_no_kernel_input():
    def kernel(x, table):
        whole(x, table, zeros((3, SLOT), x.dtype, "dst"), "all_to_all_v", ALL)

    run3(kernel, CollectiveError, "metadata_tensor: .* the kernel input table")


def test_the_metadata_are_contiguous():
    def kernel(x, table):
        wide = zeros((3, 4), nl.uint32, "wide")
        whole(x, wide[:, 0:3], zeros((3, SLOT), x.dtype, "dst"), "all_to_all_v", ALL)

    run3(kernel, ShapeError, "contiguous")


def test_the_metadata_are_written_before_the_prepare():
    def kernel(x, table):
        held = nl.ndarray(table.shape, table.dtype, nl.shared_hbm, "metadata")
        src, dst = copied(x, "src"), zeros((3, SLOT), x.dtype, "dst")
        ncc.all_to_all_v_prepare([src], [dst], ALL, held)

    run3(kernel, UninitializedError, "metadata_tensor")


def test_the_source_is_written_before_the_trigger():
    def kernel(x, table):
        src = nl.ndarray(x.shape, x.dtype, nl.shared_hbm, "src")
        held = copied(table, "metadata")
        handle = ncc.all_to_all_v_prepare([src], [zeros((3, SLOT), x.dtype, "dst")], ALL, held)
        ncc.all_to_all_v_trigger(handle)

    run3(kernel, UninitializedError, "src")


def test_the_prepare_has_read_the_metadata():
    def kernel(x, table):
        held, dst = copied(table, "metadata"), zeros((3, SLOT), x.dtype, "dst")
        handle = ncc.all_to_all_v_prepare([copied(x, "src")], [dst], ALL, held)
        nisa.dma_copy(held, nl.full((3, 3), 1000, nl.uint32))
        ncc.all_to_all_v_trigger(handle)
        return result(dst)

    got = run_ranks(kernel, list(zip(drawn(3), metadata(3), strict=True))).results
    want = exchanged(drawn(3), metadata(3), "all_to_all_v")
    assert all(np.array_equal(a, b) for a, (b, _) in zip(got, want, strict=True))


@pytest.mark.parametrize("where", ["srcs", "dsts"])
def test_sources_and_destinations_are_in_hbm(where):
    def kernel(x, table):
        tensors = {"srcs": copied(x, "src"), "dsts": zeros((3, SLOT), x.dtype, "dst")}
        tensors[where] = nl.zeros((3, SLOT), x.dtype)
        held = copied(table, "metadata")
        ncc.all_to_all_v([tensors["srcs"]], [tensors["dsts"]], ALL, held)

    run3(kernel, PlacementError, f"{where}: tensors in HBM")


def test_there_is_one_source_and_one_destination():
    def kernel(x, table):
        src, dst = copied(x, "src"), zeros((3, SLOT), x.dtype, "dst")
        ncc.all_to_all_v([src, src], [dst, dst], ALL, copied(table, "metadata"))

    run3(kernel, CollectiveError, "exactly 1 tensor")


def test_the_destination_has_the_dtype_of_the_source():
    def kernel(x, table):
        dst = zeros((3, SLOT), nl.bfloat16, "dst")
        whole(x, copied(table, "metadata"), dst, "all_to_all_v", ALL)

    run3(kernel, CollectiveError, "dtype of the source")


def test_a_destination_that_cannot_be_divided_is_refused():
    def kernel(x, table):
        dst = zeros((1, 25), x.dtype, "dst")
        whole(x, copied(table, "metadata"), dst, "all_to_all_v", ALL)

    run3(kernel, ShapeError, "divisible by 3")


def test_the_metadata_are_no_destination():
    def kernel(x, table):
        held = copied(table, "metadata")
        src = zeros((5, 5), nl.uint32, "src")
        ncc.all_to_all_v([src], [held], ALL, held)

    run3(kernel, CollectiveError, "share no element", world=3)


def prepared(x: Any, table: Any, operation: str = "all_to_all_v", name: str = "") -> Any:
    n = table.shape[1]
    src, dst = copied(x, "src" + name), zeros((n, SLOT), x.dtype, "dst" + name)
    held = copied(table, "metadata" + name)
    return getattr(ncc, operation + "_prepare")([src], [dst], ALL, held)


@pytest.mark.parametrize("second", ["all_to_all_v", "all_gather_v"])
def test_a_second_prepare_before_the_trigger_is_refused(second):
    def kernel(x, table):
        prepared(x, table)
        prepared(x, table, second, "2")

    run3(kernel, CollectiveError, f"{second}_prepare was issued before the trigger", 2, 4)


def test_a_collective_without_parts_between_prepare_and_trigger_is_refused():
    def kernel(x, table):
        prepared(x, table)
        dst = zeros((3, SLOT), x.dtype, "dst2")
        whole(x, copied(table, "metadata2"), dst, "all_to_all_v", ALL)

    run3(kernel, CollectiveError, "all_to_all_v was issued before the trigger")


def test_other_collectives_between_prepare_and_trigger_are_allowed():
    def kernel(x, table):
        handle = prepared(x, table)
        sums = zeros(SHAPE, x.dtype, "sums")
        ncc.all_reduce([copied(x, "addend")], [sums], ALL, nl.add)
        ncc.all_to_all_v_trigger(handle)

    run_ranks(kernel, list(zip(drawn(3), metadata(3), strict=True)))


def test_a_prepare_without_a_trigger_is_refused():
    run3(lambda x, table: prepared(x, table) and None, CollectiveError, "the kernel ended before")


def test_a_second_trigger_is_refused():
    def kernel(x, table):
        handle = prepared(x, table)
        ncc.all_to_all_v_trigger(handle)
        ncc.all_to_all_v_trigger(handle)

    run3(kernel, CollectiveError, "no prepare waits")


@pytest.mark.parametrize("wrong", [None, "another instruction"])
def test_a_trigger_takes_what_the_prepare_returned(wrong):
    def kernel(x, table):
        prepared(x, table)
        other = nisa.memset(nl.ndarray((1, 1), nl.float32), 0.0)
        ncc.all_to_all_v_trigger(other if wrong else None)

    run3(kernel, CollectiveError, "prepare_instr")


def test_a_trigger_of_the_other_collective_is_refused():
    def kernel(x, table):
        ncc.all_gather_v_trigger(prepared(x, table))

    run3(kernel, CollectiveError, "all_to_all_v_prepare .* waits for a trigger")


def test_prepare_and_trigger_may_be_in_the_body_of_a_loop():
    def kernel(x, table):
        src, dst = copied(x, "src"), zeros((3, SLOT), x.dtype, "dst")
        held = copied(table, "metadata")

        def body(i):
            handle = ncc.all_to_all_v_prepare([src], [dst], ALL, held)
            ncc.all_to_all_v_trigger(handle)

        nl.fori_loop(0, 3, body)
        return result(dst)

    got = run_ranks(kernel, list(zip(drawn(3), metadata(3), strict=True))).results
    want = exchanged(drawn(3), metadata(3), "all_to_all_v")
    assert all(np.array_equal(a, b) for a, (b, _) in zip(got, want, strict=True))


def test_a_trigger_in_a_loop_without_its_prepare_is_refused():
    def kernel(x, table):
        handle = prepared(x, table)

        def body(i):
            ncc.all_to_all_v_trigger(handle)

        nl.fori_loop(0, 1, body)

    run3(kernel, CollectiveError, "a device loop began before the trigger")


def test_a_trigger_after_the_loop_of_its_prepare_is_refused():
    class Kept(nl.NKIObject):
        handle: Any = None

    def kernel(x, table):
        kept = Kept()
        src, dst = copied(x, "src"), zeros((3, SLOT), x.dtype, "dst")
        held = copied(table, "metadata")

        def body(i):
            kept.handle = ncc.all_to_all_v_prepare([src], [dst], ALL, held)

        nl.fori_loop(0, 1, body)
        ncc.all_to_all_v_trigger(kept.handle)

    run3(kernel, UnsupportedError, "another loop or iteration")


@pytest.mark.parametrize("operation", ["all_gather_v", "all_to_all_v"])
def test_the_parts_have_the_documented_parameters(operation):
    whole_, prepare, trigger = (
        [
            (p.name, p.default)
            for p in inspect.signature(getattr(ncc, operation + part)).parameters.values()
        ]
        for part in ("", "_prepare", "_trigger")
    )
    assert prepare == whole_
    assert trigger == [("prepare_instr", inspect.Parameter.empty), ("name", None)]


@pytest.mark.parametrize(
    ("op", "operand", "want"),
    [
        ("bitwise_and", 0, ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("div", 4, ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mod", 4, ((0, 4), (1, 5), (2, 6), (3, 7))),
    ],
)
def test_a_group_may_be_made_by_an_operator_on_ranks(op, operand, want):
    operator = getattr(ncc.rg_partition_op, op)
    assert ncc.ReplicaGroup.from_partition_op(8, operator, operand) == ncc.ReplicaGroup(want)
    for bad in ((8, op, operand), (8, ncc.rg_partition_op.mod, 0)):
        with pytest.raises(CollectiveError):
            ncc.ReplicaGroup.from_partition_op(*bad)


# Targets and groups.


@pytest.mark.parametrize("operation", ["all_gather_v", "all_to_all_v"])
def test_trn3_has_no_prepare(operation):
    with pytest.raises(TargetError, match="NeuronSwitch"):
        exchanged(drawn(4), metadata(4), operation, split, lnc=2, target="trn3")


@pytest.mark.parametrize("operation", ["all_gather_v", "all_to_all_v"])
def test_trn1_has_no_collective_of_variable_length(operation):
    with pytest.raises(TargetError, match="trn2 or trn3"):
        exchanged(drawn(4), metadata(4), operation, target="trn1")


def test_all_gather_v_takes_groups_of_four_ranks_of_two_cores_and_no_places():
    refused(CollectiveError, "exactly 4 ranks", None, "all_gather_v", world=3, lnc=2)
    refused(CollectiveError, "LNC 2", None, "all_gather_v", world=4, lnc=1)
    refused(CollectiveError, "has_rdispls", None, "all_gather_v", 4, 2, has_rdispls=True)


@pytest.mark.parametrize("groups", [((0, 1), (2, 3)), ((2, 0), (1, 3))])
def test_places_need_groups_across_nodes(groups):
    tables = [np.zeros((4, 2), np.uint32)] * 4
    with pytest.raises(CollectiveError, match="different nodes"):
        exchanged(drawn(4), tables, "all_to_all_v", groups=groups, has_rdispls=True)
    exchanged(drawn(4), tables, "all_to_all_v", groups=((0, 2), (1, 3)), has_rdispls=True)


@pytest.mark.parametrize(
    "groups", [((0, 1, 2, 3),), ((0, 1, 2, 3), (5, 4, 6, 7)), ((0, 2, 4, 6), (1, 3, 5, 7))]
)
def test_trn3_needs_whole_devices_and_more_than_one(groups):
    world = 4 * len(groups)
    tables = [np.zeros((3, 4), np.uint32)] * world
    with pytest.raises(CollectiveError, match="whole devices"):
        exchanged(drawn(world), tables, "all_to_all_v", groups=groups, lnc=2, target="trn3")


def test_trn3_needs_two_cores():
    with pytest.raises(CollectiveError, match="LNC 2"):
        exchanged(drawn(4), metadata(4), "all_to_all_v", target="trn3")


# Two cores.


def test_both_cores_need_the_same_metadata():
    def kernel(x, table):
        held = on_chip(table)
        if nl.program_id(0) == 1:
            nisa.memset(held, 0)
        whole(x, held, zeros((3, SLOT), x.dtype, "dst"), "all_to_all_v", ALL)

    run3(kernel, CollectiveError, "metadata", lnc=2)


def test_metadata_of_the_other_core_need_a_barrier():
    def kernel(x, table):
        held = nl.ndarray(table.shape, table.dtype, nl.shared_hbm, "metadata")
        src, dst = copied(x, "src"), zeros((3, SLOT), x.dtype, "dst")
        if nl.program_id(0) == 0:
            nisa.dma_copy(held, table)
        ncc.all_to_all_v([src], [dst], ALL, held)

    run3(kernel, RaceError, "metadata", lnc=2)


def test_a_core_does_not_read_received_counts_while_the_other_is_in_the_collective():
    def kernel(x, table):
        held = copied(table, "metadata")
        src, dst = copied(x, "src"), zeros((3, SLOT), x.dtype, "dst")
        if nl.program_id(0) == 1:
            nl.load(held[2:3, :])
        ncc.all_to_all_v([src], [dst], ALL, held)

    run3(kernel, RaceError, "metadata", lnc=2)


def test_ranks_that_mix_whole_and_split_are_refused():
    def kernel(x, table):
        issue = whole if ncc.rank_id()._state == 0 else split
        dst = zeros((3, SLOT), x.dtype, "dst")
        issue(x, copied(table, "metadata"), dst, "all_to_all_v", ALL)

    run3(kernel, CollectiveError, "same collective")
