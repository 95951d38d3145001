"""Interrupts and forks: what has begun ends, no thread is left behind, and the next call is right."""

import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from fast.interrupting import (
    END,
    TILES,
    blas_threads,
    dense_bits,
    ends_well,
    forked,
    inputs,
    interrupted,
    lines_of,
    nothing_is_left,
    ring_bits,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from threadpoolctl import threadpool_limits

from ringspec import fast
from ringspec.fast.team import first_before, run_tasks
from ringspec.fast.threads import BLAS_LIMIT
from ringspec.problem.options import check

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
CALLS = {
    "ring": lambda x, pieces: ring_bits(x, pieces),
    "ring of one thread": lambda x, pieces: ring_bits(x, fast.pieces(threads=1, sizes=TILES)),
    "ring with map": lambda x, pieces: ring_bits(x, {**pieces, "each": map}),
    "dense": lambda x, pieces: dense_bits(x),
}


def sweep(name, chosen):
    """Interrupt a call at the ``chosen`` of its lines, one after another."""
    x, pieces = inputs(), fast.pieces(threads=2, sizes=TILES)
    want = CALLS[name](x, fast.pieces(threads=1, sizes=TILES))
    lines = lines_of(lambda: CALLS[name](x, pieces))
    with threadpool_limits(2, user_api="blas"):
        before, reached = blas_threads(), []
        for line in chosen(lines):
            came = interrupted(lambda: CALLS[name](x, pieces), line)
            nothing_is_left()
            assert blas_threads() == before, line
            assert CALLS[name](x, pieces) == want, line
            reached.append(came)
    # How often a call looks whether its threads have ended depends on the machine.
    assert sum(reached) >= 0.8 * len(reached)


@pytest.mark.parametrize("name", CALLS)
def test_after_an_interrupt_at_any_line_nothing_is_left_and_the_next_call_is_right(name):
    sweep(name, lambda lines: random.Random(name).sample(range(1, lines + 1), 4))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("name", CALLS)
def test_after_an_interrupt_at_every_line_nothing_is_left_and_the_next_call_is_right(name, part):
    sweep(name, lambda lines: range(1 + part, lines + 1, 8))


@pytest.mark.parametrize(
    "stride",
    [pytest.param(15, id="fifteenth"), pytest.param(1, id="every", marks=pytest.mark.slow)],
)
def test_an_interrupt_at_a_line_of_one_call_of_tasks_waits_for_those_that_have_begun(stride):
    """Of 12 tasks none begins after the call has ended, and none is cut off."""

    def call(begun, done):
        def task(n):
            begun.append(n)
            time.sleep(0.001)
            done.append(n)

        run_tasks([lambda n=n: task(n) for n in range(12)], 2)

    lines = lines_of(lambda: call([], []))
    reached = []
    for line in range(1, lines + 1, stride):
        begun, done = [], []
        came = interrupted(lambda b=begun, d=done: call(b, d), line)
        reached.append(came)
        assert len(begun) == len(done), line
        nothing_is_left()
        count = len(begun)
        # In another thread: this one may hold a lock.
        other = threading.Thread(target=call, args=(begun, done), daemon=True)
        other.start()
        other.join(END)
        assert len(begun) == count + 12, line
    assert sum(reached) >= 0.8 * len(reached)


def test_an_interrupt_that_breaks_a_lock_of_the_executor_comes_out_as_that(monkeypatch):
    """As CPython's Condition.wait does where the signal comes before it has its lock again."""

    def submit(*given):
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("release unlocked lock")

    def call():
        run_tasks([lambda: None] * 3, 2)

    with monkeypatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "submit", submit)
        try:
            raise ValueError("what the caller handles meanwhile")
        except ValueError:
            with pytest.raises(KeyboardInterrupt):
                call()
    nothing_is_left()
    call()


def test_an_interrupt_ends_blocks_within_workers_after_the_tile_at_hand():
    began, tiles = threading.Event(), []

    def tile(n):
        tiles.append(n)
        began.set()
        time.sleep(0.01)

    def worker(r):
        run_tasks([lambda n=n: tile(n) for n in range(2000)], 2)

    # A second of its own for a busy machine; all tiles take 40 seconds.
    timer = threading.Thread(
        target=lambda: (began.wait(END), os.kill(os.getpid(), signal.SIGINT)), daemon=True
    )
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            fast.pieces(threads=2)["each"](worker, range(4))
    finally:
        signal.signal(signal.SIGINT, previous)
        timer.join()
    count = len(tiles)
    nothing_is_left()
    assert 0 < count == len(tiles) < 1000


PROGRAM = """
import random, signal, sys
from fast.interrupting import TILES, inputs, nothing_is_left, ring_bits
from ringspec import fast

def compute(signum, frame):
    raise KeyboardInterrupt

x, pieces = inputs(n=48), fast.pieces(threads=2, sizes=TILES)
want = ring_bits(x, pieces)
signal.signal(signal.SIGALRM, compute)
times, came = random.Random(int(sys.argv[1])), 0
for _ in range(int(sys.argv[2])):
    try:
        signal.setitimer(signal.ITIMER_REAL, times.uniform(1e-4, 0.03))
        ring_bits(x, pieces)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        came += 1
    assert ring_bits(x, pieces) == want
nothing_is_left()
print("interrupts", came)
try:
    signal.setitimer(signal.ITIMER_REAL, 0.005)
    while True:
        ring_bits(x, pieces)
except KeyboardInterrupt:
    print("ends")
"""


def run_program(seed, times):
    """Interrupts by real signals, at random instants; the program must end by itself."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(seed), str(times)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=10 * END,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "ends" and "interrupts 0" not in done.stdout


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer signals here")
def test_a_program_that_signals_interrupt_computes_on_and_ends():
    run_program(seed=1, times=30)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer signals here")
@pytest.mark.parametrize("seed", range(8))
def test_programs_that_many_signals_interrupt_compute_on_and_end(seed):
    run_program(seed, times=300)


def fork_under_load(times):
    """Children of a process in which other threads compute all the time."""
    x, pieces = inputs(1), fast.pieces(threads=2, sizes=TILES)
    want, load = ring_bits(x, pieces), np.random.default_rng(2).normal(size=(3, 1, 2, 192, 16))
    dense = dense_bits(x)
    over = threading.Event()

    def compute():
        while not over.is_set():
            fast.attention(*load, sizes=fast.TileSizes(32, 32, 32, 32), threads=2)

    callers = [threading.Thread(target=compute, daemon=True) for _ in range(2)]
    for caller in callers:
        caller.start()
    try:
        for number in range(times):
            if number % 2:
                ends_well(forked(lambda: ring_bits(x, pieces), want))
            else:
                ends_well(forked(lambda: dense_bits(x), dense))
    finally:
        over.set()
        for caller in callers:
            caller.join(END)
    assert not any(caller.is_alive() for caller in callers)
    assert ring_bits(x, pieces) == want
    nothing_is_left()


@needs_fork
def test_children_of_forks_under_load_compute_and_end():
    fork_under_load(8)


@needs_fork
@pytest.mark.slow
def test_children_of_a_thousand_forks_under_load_compute_and_end():
    fork_under_load(1000)


@needs_fork
def test_a_fork_waits_for_the_tile_at_hand_and_no_other_begins_meanwhile():
    """BLAS holds locks in a product, which a child would copy."""
    inside, seen, over = set(), [], threading.Event()

    def tile(n):
        inside.add(n)
        time.sleep(0.002)
        inside.discard(n)

    def compute():
        while not over.is_set():
            run_tasks([lambda n=n: tile(n) for n in range(20)], 2)

    caller = threading.Thread(target=compute, daemon=True)
    caller.start()
    try:
        for _ in range(20):
            time.sleep(0.003)
            child = os.fork()
            if child == 0:
                os._exit(len(inside))
            seen.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    finally:
        over.set()
        caller.join(END)
    assert seen == [0] * 20


@needs_fork
def test_a_fork_in_a_task_gives_a_child_that_computes():
    x = inputs(3)
    want, children = dense_bits(x), []

    def task():
        children.append(forked(lambda: dense_bits(x), want))

    run_tasks([task] * 4, 2)
    for child in children:
        ends_well(child)
    assert len(children) == 4 and dense_bits(x) == want


@needs_fork
def test_a_child_has_blas_as_it_was_before_the_call_that_it_was_forked_in():
    with threadpool_limits(2, user_api="blas"):
        before, children = blas_threads(), []

        def found():
            return blas_threads(), len(BLAS_LIMIT.calls)

        run_tasks([lambda: children.append(forked(found, (before, 0)))], 2)
        ends_well(children[0])
        assert blas_threads() == before


class Machine(RuleBasedStateMachine):
    """Rings, interrupts, forks and changed inputs in any order; results are those of new pieces."""

    @initialize()
    def begin(self):
        self.pieces = fast.pieces(threads=2, sizes=TILES)
        self.blocks = fast.blocks(threads=2, sizes=TILES)
        self.buffer = inputs()
        self.view = self.buffer.view()
        self.view.flags.writeable = False

    def want(self):
        return ring_bits(self.buffer, fast.pieces(threads=1, sizes=TILES))

    @rule(workers=st.sampled_from([1, 2, 3]), given=st.sampled_from(["buffer", "view"]))
    def ring(self, workers, given):
        plain = fast.pieces(threads=1, sizes=TILES)
        x = getattr(self, given)
        assert ring_bits(x, self.pieces, workers) == ring_bits(self.buffer, plain, workers)

    @rule()
    def block(self):
        q, k, v, _ = self.view
        p = check(q, k, v, {})
        got = self.blocks[0](q, k, v, p.tile)
        new = fast.blocks(threads=1, sizes=TILES)[0](*self.buffer[:3], p.tile)
        assert got.o.tobytes() == new.o.tobytes() and got.l.tobytes() == new.l.tobytes()

    @rule(line=st.integers(1, 2500))
    def interrupt(self, line):
        interrupted(lambda: ring_bits(self.view, self.pieces), line)

    @rule(factor=st.sampled_from([0.5, 1.5, -1.0]), which=st.integers(0, 3))
    def change(self, factor, which):
        self.buffer[which] *= factor

    @rule()
    def fork(self):
        if hasattr(os, "fork"):
            ends_well(forked(lambda: ring_bits(self.view, self.pieces), self.want()))

    @invariant()
    def nothing_is_left(self):
        nothing_is_left()


Machine.TestCase.settings = settings(max_examples=2, stateful_step_count=8, deadline=None)
TestRingsInterruptsForksAndChanges = Machine.TestCase


def test_an_interrupt_while_a_wait_times_out_is_raised_itself():
    with pytest.raises(KeyboardInterrupt) as raised:
        try:
            raise queue.Empty
        except queue.Empty:
            raise KeyboardInterrupt  # noqa: B904
    assert first_before(raised.value, None) is raised.value
