"""The scheduler: every core runs the kernel in its own thread, and one thread runs at a time.

A run has W ranks with one or two physical cores each. For every (rank, core) there is a *worker*: a thread that
executes the kernel's function from the first line to the last. The right to run is called the *baton*. Only the worker
that holds the baton runs, so a run is a deterministic function of the program and its inputs. The baton is passed on

- when a worker must wait for others (:meth:`Machine.meet`): at barriers, exchanges and collectives;
- with ``interleave=SEED``, also at random instructions (:meth:`Machine.step`), to a random worker.

Without ``interleave``, the baton goes to the next worker, in the order (rank, core), that can run. A correct kernel
gives the same bits in every order.

A run ends early for one of the following reasons. It then raises one error, and no thread is left running:

- an error in one worker: all others are stopped where they are;
- no worker can run, and some wait: :class:`~nki_impl.sim.errors.DeadlockError` says which worker waits for which,
  in which operation, at which line;
- a worker has returned while others wait for it: :class:`~nki_impl.sim.errors.CollectiveError`.

A run of one worker takes place in the caller's thread, so that a debugger sees an ordinary call.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from nki_impl.sim.errors import CollectiveError, DeadlockError, SimulatorError, kernel_line

if TYPE_CHECKING:
    from nki_impl.sim.machine.races import Detector
    from nki_impl.sim.memory.storage import Storage

# On average, one instruction in this many passes the baton on if the run is interleaved.
SWITCH_EVERY = 8


class Stopped(BaseException):
    """Raised in a worker to stop it after another worker has failed.

    It is not an Exception, so that kernels do not catch it.
    """


@dataclass(eq=False)
class Worker:
    """One physical core of one rank, and the thread that runs its kernel.

    ``races``: the race detector of the rank; None if the rank has one core. ``issued``: the number of meetings that
    this worker has joined, for each group of members; the n-th meeting of one member is matched with the n-th of all
    other members. ``exchanged``: the HBM tensors that the worker's collectives used, with the operation. ``hops``: the
    number of transfers. ``prepared``: the collective of variable length that was prepared and not yet triggered.
    ``yields``: True while it runs only if no other can.
    """

    rank: int
    core: int
    wake: threading.Lock = field(default_factory=threading.Lock)
    machine: Machine | None = None
    races: Detector | None = None
    issued: Counter[Hashable] = field(default_factory=Counter)
    exchanged: WeakKeyDictionary[Storage, str] = field(default_factory=WeakKeyDictionary)
    hops: int = 0
    prepared: Any = None  # an exchange.variable.Prepared, whose module imports this one
    waits_in: Meeting | None = None
    yields: bool = False
    finished: bool = False
    result: Any = None

    def __str__(self) -> str:
        return f"rank {self.rank} core {self.core}"


@dataclass(frozen=True)
class Arrival:
    """One worker's arrival at a meeting: the operation that it called, the line of the kernel, and the data passed."""

    operation: str
    line: str
    payload: Any


@dataclass(eq=False)
class Meeting:
    """A synchronisation point at which all members must arrive before any of them continues."""

    members: Sequence[Worker]
    arrived: dict[Worker, Arrival] = field(default_factory=dict)
    result: Any = None

    def missing(self) -> list[Worker]:
        """Return the members that have not arrived, in their order."""
        return [worker for worker in self.members if worker not in self.arrived]


class Machine:
    """All workers of a run: W ranks of ``lnc`` cores, in the order (rank, core).

    >>> machine = Machine(world=2, lnc=1)
    >>> def body(worker):
    ...     total = lambda meeting: sum(arrival.payload for arrival in meeting.arrived.values())
    ...     return machine.meet(worker, "sum", "add", machine.workers, 10 + worker.rank, total)
    >>> machine.run([lambda worker=worker: body(worker) for worker in machine.workers])
    [21, 21]
    """

    def __init__(
        self,
        world: int,
        lnc: int = 1,
        interleave: int | None = None,
        ring_ids: Literal["rank", "position"] = "rank",
    ) -> None:
        self.ring_ids = ring_ids
        self.world = world
        self.lnc = lnc
        self.workers = [
            Worker(rank, core, machine=self) for rank in range(world) for core in range(lnc)
        ]
        self.meetings: dict[Hashable, Meeting] = {}
        self.switches = 0
        self._random = None if interleave is None else random.Random(interleave)
        self._stopping = False
        self._failure: tuple[Worker, BaseException] | None = None
        self._done = threading.Lock()
        self.on_interrupt: Callable[[], None] = lambda: None
        """Called when the user interrupts a run, to make the running worker call :meth:`step`."""

    @property
    def interleaved(self) -> bool:
        """Whether :meth:`step` may switch to another worker."""
        return self._random is not None

    @property
    def alone(self) -> bool:
        """Whether the run has only one worker, which never waits and never switches."""
        return len(self.workers) == 1

    def run(self, bodies: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one function per worker, in turns, and return their results in the workers' order."""
        if self.alone:
            return [bodies[0]()]
        threads = [
            threading.Thread(target=self._work, args=(worker, body), name=str(worker), daemon=True)
            for worker, body in zip(self.workers, bodies, strict=True)
        ]
        self._done.acquire()
        for worker, thread in zip(self.workers, threads, strict=True):
            worker.wake.acquire()
            thread.start()
        self._choose(self.workers[-1]).wake.release()
        try:
            self._done.acquire()
        except BaseException:
            # Interrupted by the user: the running worker stops at its next instruction, then all others.
            self._stopping = True
            self.on_interrupt()
            self._done.acquire()
            raise
        finally:
            for thread in threads:
                thread.join()
        if self._failure is not None:
            raise _named(self._failure[1], self._failure[0], self)
        return [worker.result for worker in self.workers]

    def cores_of(self, ranks: Iterable[int]) -> list[Worker]:
        """Return the workers of these ranks, rank by rank."""
        return [self.workers[rank * self.lnc + core] for rank in ranks for core in range(self.lnc)]

    def meet(
        self,
        worker: Worker,
        key: Hashable,
        operation: str,
        members: Sequence[Worker],
        payload: Any,
        action: Callable[[Meeting], Any],
    ) -> Any:
        """Wait until all ``members`` have arrived at the meeting ``key``; the last one to arrive runs ``action``.

        Returns the value that ``action`` returned, the same object for every member.
        """
        meeting = self.meetings.setdefault(key, Meeting(members))
        meeting.arrived[worker] = Arrival(operation, kernel_line(), payload)
        if len(meeting.arrived) < len(meeting.members):
            worker.waits_in = meeting
            self._refuse_absent(meeting)
            self._hand_over(worker)
            return meeting.result
        del self.meetings[key]
        meeting.result = action(meeting)
        for member in meeting.members:
            member.waits_in = None
        if self._random is not None and not self.alone:
            self._hand_over(worker)
        return meeting.result

    def step(self, worker: Worker) -> None:
        """Switch to another worker at random, or stop after an interruption; called before each instruction.

        A run that is not interleaved does not need these calls until it is interrupted.
        """
        if self._stopping:
            raise Stopped
        if self._random is not None and self._random.randrange(SWITCH_EVERY) == 0:
            self._hand_over(worker)

    def let_others_run(self, worker: Worker) -> None:
        """Run every other worker until none of them can continue without this one."""
        worker.yields = True
        try:
            self._hand_over(worker)
        finally:
            worker.yields = False

    def _work(self, worker: Worker, body: Callable[[], Any]) -> None:
        """Run a worker's thread from start to end."""
        worker.wake.acquire()
        try:
            if not self._stopping:
                worker.result = body()
        except Stopped:
            pass
        except BaseException as error:
            self._fail(worker, error)
        worker.finished = True
        if not self._stopping:
            try:
                for meeting in self.meetings.values():
                    self._refuse_absent(meeting)
            except SimulatorError as error:
                self._fail(worker, error)
        self._pass_on(worker)

    def _pass_on(self, worker: Worker) -> None:
        """Let another worker run when this one has finished, or report that all workers have finished."""
        try:
            self._choose(worker).wake.release()
        except DeadlockError as error:
            self._fail(worker, error)
            self._choose(worker).wake.release()
        except StopIteration:
            self._done.release()

    def _fail(self, worker: Worker, error: BaseException) -> None:
        """Record the first error of the run and stop all other workers."""
        if self._failure is None:
            self._failure = (worker, error)
        self._stopping = True

    def _hand_over(self, worker: Worker) -> None:
        """Let the next worker run and sleep until the baton comes back."""
        chosen = self._choose(worker)
        if chosen is worker:
            return
        self.switches += 1
        chosen.wake.release()
        worker.wake.acquire()
        if self._stopping:
            raise Stopped

    def _choose(self, worker: Worker) -> Worker:
        """Return the worker that runs next: the next one in order, or a random one with ``interleave``.

        Raises :class:`DeadlockError` if all workers wait, StopIteration if all have finished.
        """
        index = self.workers.index(worker) + 1
        order = self.workers[index:] + self.workers[:index]
        alive = [candidate for candidate in order if not candidate.finished]
        if not alive:
            raise StopIteration
        if self._stopping:
            return alive[0]
        able = [candidate for candidate in alive if candidate.waits_in is None]
        if not able:
            raise self._deadlock()
        ready = [candidate for candidate in able if not candidate.yields] or able
        return ready[0] if self._random is None else self._random.choice(ready)

    def _deadlock(self) -> DeadlockError:
        """Describe what every worker waits for."""
        return DeadlockError(
            "ranks and cores",
            "at least one core that can continue",
            self.situation(),
            "issue the same barriers and collectives, in the same order, on every core of every rank",
            operation="deadlock",
            line=next(x.waits_in.arrived[x].line for x in self.workers if x.waits_in is not None),
        )

    def situation(self) -> str:
        """Describe, for each worker, what it waits for, or that it has returned."""
        parts = []
        for worker in self.workers:
            meeting = worker.waits_in
            if worker.finished:
                parts.append(f"{worker} has returned")
            elif meeting is not None:
                mine = meeting.arrived[worker]
                missing = ", ".join(str(other) for other in meeting.missing())
                parts.append(f"{worker} waits in {mine.operation} ({mine.line}) for {missing}")
        return "; ".join(parts)

    def _refuse_absent(self, meeting: Meeting) -> None:
        """Raise CollectiveError if a member of a meeting has already returned from the kernel and cannot join it."""
        gone = [str(worker) for worker in meeting.missing() if worker.finished]
        if not gone:
            return
        worker, mine = next(iter(meeting.arrived.items()))
        raise CollectiveError(
            "sequence",
            "every core of every rank of the group must issue the same operations",
            f"{worker} waits in {mine.operation} ({mine.line}), but {' and '.join(gone)} returned "
            "from the kernel without it",
            "make the number of collectives and barriers the same on all ranks and cores",
            operation=mine.operation,
            line=mine.line,
        )


def _named(error: BaseException, worker: Worker, machine: Machine) -> BaseException:
    """Return ``error`` with a note that names the rank and core on which it happened."""
    if isinstance(error, SimulatorError):
        if not isinstance(error, DeadlockError):
            error.args = (f"[{worker}] {error}", *error.args[1:])
    else:
        error.add_note(f"raised on {worker} of {machine.world} ranks x {machine.lnc} cores")
    return error
