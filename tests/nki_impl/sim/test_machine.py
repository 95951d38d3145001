"""Turns: one thread at a time, a fixed order, one error that ends all, deadlocks that are explained."""

from __future__ import annotations

import threading
import time

import pytest

from nki_impl.sim.errors import CollectiveError, DeadlockError
from nki_impl.sim.machine.turns import Machine, Meeting, Worker


def _nothing(meeting: Meeting) -> None:
    return None


def _bodies(machine, body):
    return [lambda worker=worker: body(worker) for worker in machine.workers]


def _simulator_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_workers_run_in_the_order_of_rank_and_core_and_one_at_a_time():
    machine = Machine(3, 2)
    log: list[tuple[str, str]] = []

    def body(worker: Worker) -> None:
        log.append(("enter", str(worker)))
        time.sleep(0.001)  # a second running thread would write in between
        log.append(("leave", str(worker)))
        machine.meet(worker, "all", "barrier", machine.workers, None, _nothing)
        log.append(("after", str(worker)))

    machine.run(_bodies(machine, body))
    names = [f"rank {rank} core {core}" for rank in range(3) for core in range(2)]
    assert log[:12] == [(what, name) for name in names for what in ("enter", "leave")]
    assert log[12:] == [("after", name) for name in [names[-1], *names[:-1]]]


def test_one_worker_runs_in_the_callers_thread_and_never_switches():
    machine = Machine(1)
    assert machine.run([threading.current_thread]) == [threading.current_thread()]
    assert machine.switches == 0


def test_no_switch_happens_between_meetings():
    machine = Machine(4)

    def body(worker: Worker) -> None:
        for _ in range(100):
            machine.step(worker)
        machine.meet(worker, "end", "barrier", machine.workers, None, _nothing)

    machine.run(_bodies(machine, body))
    assert machine.switches == 3


def test_interleaving_switches_at_instructions_and_the_same_seed_gives_the_same_order():
    def order(seed):
        machine = Machine(3, 1, interleave=seed)
        log: list[int] = []

        def body(worker: Worker) -> None:
            for _ in range(40):
                machine.step(worker)
                log.append(worker.rank)

        machine.run(_bodies(machine, body))
        return log

    plain = order(None)
    assert plain == sorted(plain)
    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1) != plain
    assert sorted(order(1)) == plain


def test_interleaving_hands_the_baton_to_any_other_not_only_to_the_next():
    machine = Machine(4, 1, interleave=5)
    log: list[int] = []

    def body(worker: Worker) -> None:
        for _ in range(60):
            machine.step(worker)
            log.append(worker.rank)

    machine.run(_bodies(machine, body))
    moves = {(b - a) % 4 for a, b in zip(log, log[1:], strict=False)}
    assert moves == {0, 1, 2, 3}


def test_an_error_in_one_worker_ends_all_with_that_error_and_its_place():
    machine = Machine(3, 2)

    def body(worker: Worker) -> None:
        if (worker.rank, worker.core) == (1, 1):
            raise ZeroDivisionError("only here")
        machine.meet(worker, "all", "barrier", machine.workers, None, _nothing)

    with pytest.raises(ZeroDivisionError, match="only here") as caught:
        machine.run(_bodies(machine, body))
    assert caught.value.__notes__ == ["raised on rank 1 core 1 of 3 ranks x 2 cores"]
    assert not _simulator_threads()


def test_an_error_in_the_first_worker_keeps_the_others_from_starting():
    machine = Machine(3)
    started = []

    def body(worker: Worker) -> None:
        started.append(worker.rank)
        raise KeyError(worker.rank)

    with pytest.raises(KeyError):
        machine.run(_bodies(machine, body))
    assert started == [0]
    assert not _simulator_threads()


def test_a_kernel_that_catches_exceptions_is_stopped_all_the_same():
    machine = Machine(2)

    def body(worker: Worker) -> str:
        if worker.rank == 1:
            raise ValueError("the cause")
        try:
            machine.meet(worker, "all", "barrier", machine.workers, None, _nothing)
        except Exception:
            return "swallowed"
        return "met"

    with pytest.raises(ValueError, match="the cause"):
        machine.run(_bodies(machine, body))
    assert machine.workers[0].result is None


def test_a_deadlock_is_reported_at_once_with_who_waits_for_what_and_where():
    machine = Machine(2)
    start = time.monotonic()

    def body(worker: Worker) -> None:
        key = f"meeting {worker.rank}"
        machine.meet(worker, key, f"wait{worker.rank}", machine.workers, None, _nothing)

    with pytest.raises(DeadlockError) as caught:
        machine.run(_bodies(machine, body))
    message = str(caught.value)
    assert "rank 0 core 0 waits in wait0 (" in message
    assert "for rank 1 core 0; rank 1 core 0 waits in wait1 (" in message
    assert f"{__file__}:" in message
    assert time.monotonic() - start < 60
    assert not _simulator_threads()


def test_a_deadlock_that_the_last_return_leaves_behind_is_reported():
    machine = Machine(3)
    pair = machine.workers[:2]

    def body(worker: Worker) -> None:
        if worker.rank < 2:
            machine.meet(worker, worker.rank, "pair", pair, None, _nothing)

    with pytest.raises(DeadlockError, match="rank 2 core 0 has returned"):
        machine.run(_bodies(machine, body))


@pytest.mark.parametrize("absent", [0, 2])
def test_a_worker_that_returns_while_others_wait_for_it_is_a_mismatch(absent):
    machine = Machine(3)

    def body(worker: Worker) -> None:
        if worker.rank != absent:
            machine.meet(worker, "all", "all_gather", machine.workers, None, _nothing)

    with pytest.raises(CollectiveError, match=f"rank {absent} core 0 returned from the kernel"):
        machine.run(_bodies(machine, body))
    assert not _simulator_threads()


def test_an_interrupt_stops_a_worker_at_its_next_instruction(monkeypatch):
    machine = Machine(2)
    real = machine._done.acquire
    calls = []

    class Done:
        def acquire(self):
            calls.append(None)
            if len(calls) == 2:
                time.sleep(0.02)
                raise KeyboardInterrupt
            return real()

        def release(self):
            machine_done.release()

    machine_done = machine._done
    monkeypatch.setattr(machine, "_done", Done())

    def body(worker: Worker) -> None:
        while True:
            machine.step(worker)

    with pytest.raises(KeyboardInterrupt):
        machine.run(_bodies(machine, body))
    assert not _simulator_threads()


def test_the_last_to_arrive_acts_once_for_all():
    machine = Machine(4)
    acted = []

    def action(meeting: Meeting) -> list[int]:
        acted.append(True)
        return [meeting.arrived[worker].payload for worker in meeting.members]

    def body(worker: Worker) -> list[int]:
        return machine.meet(worker, "all", "share", machine.workers, worker.rank**2, action)

    assert machine.run(_bodies(machine, body)) == [[0, 1, 4, 9]] * 4
    assert acted == [True]
