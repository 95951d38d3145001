"""Closed forms against counting: pairs, bytes and times of every small ring, by exact equality."""

import itertools

import numpy as np
import pytest

import ringspec as rs
from ringspec.plan.hardware import PRESETS
from ringspec.plan.pairs import band, blocks, step_pairs, worker_pairs
from ringspec.plan.spans import pairs_by_worker
from ringspec.plan.times import counts, plan_pass, rates, simple
from ringspec.plan.workload import workload
from ringspec.problem.options import check
from ringspec.rings.layouts import make_layout
from ringspec.spec.schedule import visitor

LAYOUTS = ("contiguous", "striped", "zigzag")
CIRCULATIONS = ("kv", "q", "gather")
MASKS = {
    "none": (False, None),
    "causal": (True, None),
    "window both": (False, (3, 1)),
    "window left": (False, (5, None)),
    "window right": (False, (None, 2)),
    "causal window": (True, (4, 4)),
    "own position alone": (True, (0, 0)),
    "causal wide window": (True, (11, None)),
}


def counted_by_hand(layout, workers, n, causal, window):
    """Pairs [a, b] by looking at every query and key, with nothing of ringspec but the layout's rule."""
    length = n * workers
    where = {
        "contiguous": lambda p: p // n,
        "striped": lambda p: p % workers,
        "zigzag": lambda p: min(p // (n // 2), 2 * workers - 1 - p // (n // 2)),
    }[layout]
    left, right = window or (None, None)
    pairs = np.zeros((workers, workers), dtype=np.int64)
    for i, j in itertools.product(range(length), repeat=2):
        seen = not causal or j <= i
        seen &= left is None or j >= i - left
        seen &= right is None or j <= i + right
        pairs[where(i), where(j)] += seen
    return pairs


SIZES = [(1, 6), (2, 4), (3, 2), (4, 6), (5, 4), (8, 2)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_are_those_that_looking_at_every_pair_finds(layout, mask):
    for workers, n in SIZES:
        by_hand = counted_by_hand(layout, workers, n, *MASKS[mask])
        form = blocks(layout, workers, n, band(workers * n, *MASKS[mask]))
        a, b = np.indices((workers, workers))
        assert form.pairs(a, b).tolist() == by_hand.tolist(), (workers, n)
        for moves in ("keys", "queries"):
            met = [[visitor(r, t, workers) for r in range(workers)] for t in range(workers)]
            table = np.array(
                [
                    [by_hand[(r, v) if moves == "keys" else (v, r)] for r, v in enumerate(row)]
                    for row in met
                ]
            )
            counted = step_pairs(form, moves)
            assert counted.most.tolist() == table.max(axis=1).tolist(), (workers, n, moves)
            assert counted.least.tolist() == table.min(axis=1).tolist(), (workers, n, moves)
            assert counted.total.tolist() == table.sum(axis=1).tolist(), (workers, n, moves)
            assert worker_pairs(form, moves).tolist() == table.sum(axis=0).tolist()


@pytest.mark.parametrize("layout", ["contiguous", "striped"])
def test_blocks_of_an_odd_number_of_tokens(layout):
    for mask in MASKS.values():
        for workers, n in [(1, 1), (3, 1), (2, 5), (4, 3), (5, 7)]:
            by_hand = counted_by_hand(layout, workers, n, *mask)
            form = blocks(layout, workers, n, band(workers * n, *mask))
            assert form.pairs(*np.indices((workers, workers))).tolist() == by_hand.tolist()


# --- against ringspec.rings.cost ---------------------------------------------------------------

SHAPE = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 6}


def simulated(layout, circulation, backward, workers, n, causal, window, recipe):
    """The cost of the discrete simulation."""
    q, k, v = (np.ones((2, h, workers * n, d)) for h, d in ((4, 8), (2, 8), (2, 6)))
    problem = check(q, k, v, {"causal": causal, "window": window})
    table = make_layout(layout, workers * n, workers, None)
    maker = rs.backward_schedule if backward else rs.forward_schedule
    recipes = rs.RECIPES[recipe]
    return rs.cost(problem, maker(circulation, workers), table, table, recipes)


RECIPES = ("float64", "bf16", "nki_low")


BOTH = list(itertools.product(LAYOUTS, CIRCULATIONS))


@pytest.mark.parametrize(("layout", "circulation"), BOTH)
def test_counts_and_times_are_those_of_the_discrete_simulation(layout, circulation):
    """Pairs, bytes and hops exactly, the timeline up to rounding, for W = 1 .. 8 and both passes."""
    compare_with_simulation(layout, circulation, every=11, sizes=(2, 4))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "circulation"), BOTH)
def test_counts_and_times_of_all_small_rings_are_those_of_the_simulation(layout, circulation):
    for size in (2, 4, 6, 8):
        compare_with_simulation(layout, circulation, every=1, sizes=(size,))


def compare_with_simulation(layout, circulation, every, sizes):
    """Every so manieth of all masks, W = 1 .. 8 and passes."""
    number = 0
    for backward, workers in itertools.product((False, True), range(1, 9)):
        for mask in MASKS.values():
            number += 1
            if number % every:
                continue
            n, recipe = sizes[number // every % len(sizes)], RECIPES[number % len(RECIPES)]
            told = simulated(layout, circulation, backward, workers, n, *mask, recipe)
            work = workload(
                workers * n, workers, causal=mask[0], window=mask[1], recipe_name=recipe, **SHAPE
            )
            found = counts(layout, circulation, backward, work)
            assert (found.steps.most * work.copies).tolist() == told.pairs.max(axis=1).tolist()
            assert (found.steps.least * work.copies).tolist() == told.pairs.min(axis=1).tolist()
            assert (found.steps.total * work.copies).tolist() == told.pairs.sum(axis=1).tolist()
            assert (found.workers * work.copies).tolist() == told.pairs.sum(axis=0).tolist()
            single = pairs_by_worker(layout, circulation, backward, work)
            assert (single * work.copies).tolist() == told.pairs.tolist()
            assert found.traffic.sent.tolist() == told.sent[:, 0].tolist()
            assert (told.sent == told.sent[:, :1]).all()
            assert found.traffic.hops == told.hops
            assert_times(told, found, work, layout, circulation, backward)


def assert_times(told, found, work, layout, circulation, backward):
    device = PRESETS["h200"].with_rates(
        flops_per_second=3e9, efficiency=0.7, bytes_per_second=4e7, latency=0
    )
    speed = rates(backward, work, device)
    for overlap in (True, False):
        bars = rs.timeline(
            told, pairs_per_second=speed.pairs, bytes_per_second=4e7, overlap=overlap
        )
        end = max(bar.stop for bar in bars)
        planned = plan_pass(layout, circulation, backward, work, device, overlap)
        assert planned.timeline_seconds == pytest.approx(end, rel=1e-12, abs=0)
        busy = speed.compute(found.steps.most, work)
        again = simple(busy, found.traffic, speed, circulation == "gather", overlap)
        assert again == planned.timeline_seconds
    assert planned.imbalance == pytest.approx(told.imbalance, rel=1e-14)
    assert planned.lockstep_imbalance == pytest.approx(told.lockstep_imbalance, rel=1e-14)
    maker = rs.backward_schedule if backward else rs.forward_schedule
    assert planned.name == maker(circulation, 2).name


# --- laws at any size -------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("workers", [1, 2, 7, 512, 65536])
def test_all_pairs_of_the_mask_are_counted_once_at_any_size(layout, workers):
    n = 48
    length = workers * n
    visible = {
        (False, None): length**2,
        (True, None): length * (length + 1) // 2,
        (True, (99, None)): sum(min(p, 99) + 1 for p in range(100)) + 100 * max(length - 100, 0)
        if length >= 100
        else length * (length + 1) // 2,
    }
    for mask, pairs in visible.items():
        form = blocks(layout, workers, n, band(length, *mask))
        for moves in ("keys", "queries"):
            counted = step_pairs(form, moves)
            assert sum(counted.total.tolist()) == pairs
            assert sum(worker_pairs(form, moves).tolist()) == pairs
            assert (counted.least * workers <= counted.total).all()
            assert (counted.total <= counted.most * workers).all()


def test_causal_imbalance_of_the_three_layouts_at_65536_workers():
    """Contiguous 2 - 1/W and less in both senses; zigzag exactly even; striped one diagonal off."""
    workers, n = 65536, 1024
    least, most = {}, {}
    for layout in LAYOUTS:
        form = blocks(layout, workers, n, band(workers * n, True, None))
        own = worker_pairs(form, "keys")
        least[layout], most[layout] = int(own.min()), int(own.max())
    assert least["zigzag"] == most["zigzag"]
    assert most["striped"] - least["striped"] == n * (workers - 1)
    assert most["contiguous"] == n * (n + 1) // 2 + (workers - 1) * n * n
    assert least["contiguous"] == n * (n + 1) // 2
