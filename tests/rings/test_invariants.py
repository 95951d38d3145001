"""The five invariants of a recorded run, and a run that breaks each."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

import ringspec as rs
from ringspec.comm.threads import ring_in_threads
from ringspec.errors import NotRecordedError
from ringspec.rings.invariants import INVARIANTS, broken_invariants
from ringspec.spec.block import block_forward
from ringspec.spec.layout import Layout

COVERAGE, SLOTS, ARRIVAL, ORDER, PADDING = INVARIANTS
# 10 tokens in 3 workers of 4 slots, in no order, with padding.
TABLE = [[3, -1, 0, 8], [1, 4, 9, -1], [2, 7, 6, 5]]


def tensors(length=12):
    return np.random.default_rng(4).normal(size=(4, 1, 2, length, 4))


def padded(**keywords):
    return rs.ring(*tensors(10), workers=3, layout=TABLE, causal=True, record=True, **keywords)


def names(run):
    return [broken.name for broken in broken_invariants(run)]


@pytest.mark.parametrize("circulation", ["kv", "q", "gather"])
def test_recorded_runs_keep_all_invariants(circulation):
    assert broken_invariants(padded(circulation=circulation)) == []
    for layout in ("contiguous", "striped", "zigzag"):
        options = {"layout": layout, "causal": True, "record": True, "circulation": circulation}
        assert broken_invariants(rs.ring(*tensors(), workers=3, **options)) == []


def test_a_run_of_threads_whose_messages_arrive_at_any_time_keeps_all_invariants():
    moments, lock = {}, threading.Lock()

    def observer(moment):
        time.sleep(0.002 * ((3 * moment.worker + moment.step) % 4))  # ranks are late in turn
        with lock:
            moments[moment.phase, moment.step, moment.worker] = moment

    run = ring_in_threads(*tensors(10), workers=3, layout=TABLE, causal=True, observer=observer)
    run = replace(run, moments=tuple(moments[at] for at in sorted(moments)))
    assert len(moments) == 18 and broken_invariants(run) == []
    assert all((getattr(run, name) == getattr(padded(), name)).all() for name in ("o", "dq", "dk"))


def test_a_step_that_is_left_out_or_done_twice_breaks_coverage():
    run = padded()
    first = next(moment for moment in run.moments if moment.pair is not None)
    assert names(replace(run, moments=run.moments[1:])) == [COVERAGE]
    broken = broken_invariants(replace(run, moments=(*run.moments, first)))
    assert [one.name for one in broken] == [COVERAGE] and "meet 2 times" in str(broken[0])


def test_a_token_in_two_slots_breaks_unique_slots():
    run = padded()
    table = run.layout_k.table.copy()
    table[0, 0] = 1
    assert names(replace(run, layout_k=Layout("table", table))) == [SLOTS]


def test_a_second_message_that_replaces_the_first_breaks_order_independent_of_arrival():
    run = padded()
    number = next(n for n, one in enumerate(run.moments) if one.received and one.pair)
    moment = run.moments[number]
    (other,) = (x for x in run.moments[number + 1].received[:1])
    moments = list(run.moments)
    moments[number] = replace(moment, received=(other, *moment.received))
    assert names(replace(run, moments=tuple(moments))) == [ARRIVAL]


@pytest.mark.parametrize("name", ["o", "lse"])
def test_results_in_the_order_of_the_slots_break_global_order_restored(name):
    run = padded()
    slots = np.concatenate([getattr(worker, name) for worker in run.workers], axis=2)[:, :, :10]
    assert names(replace(run, **{name: slots})) == [ORDER]


def test_a_block_that_reads_padding_slots_breaks_no_padding_read_as_valid():
    def careless(q, k, v, tile):
        state = block_forward(q, k, v, tile)
        return replace(state, o=state.o + v[:, :, tile.columns.index < 0].sum())

    assert names(padded(block_forward=careless)) == [PADDING]


def test_invariants_of_a_run_that_was_not_recorded_are_refused():
    with pytest.raises(NotRecordedError, match="record=True"):
        broken_invariants(rs.ring(*tensors(), workers=3))
