"""Threads that share tasks: all are done, in rounds within rounds, and what fails is the same every time."""

import threading
import time

import numpy as np
import pytest

import ringspec as rs
from ringspec import fast
from ringspec.fast.team import HERE, each, run_tasks

TILES = fast.TileSizes(rows=16, keys=32, granule=16, chunk=32)


def within_seconds(function, seconds=600):
    """What a function returns, called in a thread: a deadlock must fail a test and not hang it."""
    got = []
    caller = threading.Thread(target=lambda: got.append(function()), daemon=True)
    caller.start()
    caller.join(seconds)
    assert got, "deadlock"
    return got[0]


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (5, 3, 2), (2, 9, 4)])
def test_every_task_of_rounds_within_rounds_is_done_once(threads, sizes):
    done: list[tuple[int, ...]] = []

    def task(*at):
        if len(at) < len(sizes):
            below = [lambda n=n: task(*at, n) for n in range(sizes[len(at)])]
            run_tasks(below, threads)
            finished = {one[: len(at)] for one in list(done)}
            assert at in finished or not at  # a call returns when its own tasks are done
            assert sum(one[: len(at)] == at for one in list(done)) == np.prod(sizes[len(at) :])
        else:
            time.sleep(0.0002)
            done.append(at)

    within_seconds(lambda: (task(), True))
    assert sorted(done) == list(np.ndindex(*sizes))
    assert HERE.crew is None


def test_a_thread_without_tasks_takes_those_of_another_workers_block():
    """Two short workers and one of many tasks: the other thread must do some of these."""
    who: set[int] = set()
    helped = threading.Event()

    def first():
        who.add(threading.get_ident())
        helped.wait(200)

    def later():
        who.add(threading.get_ident())
        if len(who) == 2:
            helped.set()

    def worker(r):
        run_tasks([lambda: None] if r else [first] + [later] * 39, 2)

    within_seconds(lambda: (each(worker, range(3), threads=2), True))
    assert len(who) == 2


def test_a_thread_whose_own_tasks_are_done_goes_on_with_its_worker_and_takes_no_others():
    """A worker would wait for a task of another's block, and two threads for each other in turn."""
    begun, helped, took = threading.Event(), threading.Event(), []

    def worker(r):
        def piece():
            if r == 0:
                assert begun.wait(200)
            begun.set()
            time.sleep(0.003)
            if r == 1:
                took.append(threading.get_ident())
                if len(set(took)) == 2:
                    helped.set()
                elif len(took) == 20:
                    helped.wait(200)

        run_tasks([piece] * (2 if r == 0 else 40), 2)
        return threading.get_ident() in took

    early, late = within_seconds(lambda: each(worker, range(2), threads=2))
    assert late and not early
    assert len(set(took)) == 2  # it helps as soon as no worker is left


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_the_first_failure_in_the_order_of_the_tasks_is_raised(threads):
    ended = []

    def task(number):
        time.sleep(0.001 * (5 - number % 5))
        ended.append(number)
        if number in (3, 4, 7):
            raise KeyError(number)

    def run():
        with pytest.raises(KeyError, match="3"):
            each(task, range(50), threads=threads)
        count = len(ended)
        time.sleep(0.02)
        return len(ended) == count < 20  # nobody is at work any more, later tasks were dropped

    assert within_seconds(run)


def test_a_failure_within_a_block_of_one_worker_reaches_the_caller_and_leaves_no_thread_at_work():
    def worker(r):
        def piece():
            if r == 2:
                raise ValueError("in worker 2")

        run_tasks([piece] * 4, 2)

    def run():
        with pytest.raises(ValueError, match="worker 2"):
            each(worker, range(6), threads=2)
        return each(lambda r: r * r, range(6), threads=2) == [0, 1, 4, 9, 16, 25]

    assert within_seconds(run)


def test_a_task_may_wait_for_a_thread_of_its_own_that_has_tasks_too():
    """That thread's call finds the other threads taken by the call that waits for it."""

    def task(r):
        done = []
        other = threading.Thread(target=lambda: run_tasks([lambda: done.append(r)] * 3, 2))
        other.start()
        other.join(20)
        return len(done), other.is_alive()

    assert within_seconds(lambda: each(task, range(4), threads=2)) == [(3, False)] * 4


@pytest.mark.parametrize("threads", [1, 3])
def test_functions_side_by_side_have_the_callers_settings(threads):
    def divide(x):
        return np.ones(1) / x

    with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        each(divide, [np.ones(1), np.zeros(1)], threads=threads)
    with np.errstate(divide="ignore"):
        assert np.isinf(each(divide, [np.ones(1), np.zeros(1)], threads=threads)[1]).all()


@pytest.mark.parametrize("recipe", ["float64", "float32"])
@pytest.mark.parametrize("circulation", ["kv", "q", "gather"])
def test_a_ring_has_the_same_bits_for_any_threads_and_without_what_is_kept(circulation, recipe):
    random = np.random.default_rng(0)
    q, dy = random.normal(size=(2, 1, 4, 96, 8))
    k, v = random.normal(size=(2, 1, 2, 96, 8))
    seen = set()
    for threads in (1, 2, 5):
        pieces = fast.pieces(threads=threads, sizes=TILES)
        for changed in ({}, {"each": map}, plain_blocks()):
            run = rs.ring(
                q, k, v, dy, workers=3, layout="zigzag", causal=True, recipe=recipe,
                circulation=circulation, **{**pieces, **changed},
            )  # fmt: skip
            parts = [x for w in run.workers for x in (w.o, w.lse, w.dq, w.dk, w.dv)]
            seen.add(b"".join(x.tobytes() for x in parts))
    assert len(seen) == 1


def plain_blocks():
    """Blocks that keep nothing from call to call."""
    return {
        "block_forward": lambda *a: fast.block_forward(*a, sizes=TILES),
        "block_backward": lambda *a: fast.block_backward(*a, sizes=TILES),
    }
