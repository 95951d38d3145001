"""Links over MPI, and ``ring_mpi``: one process for each worker, on one machine or on many.

Only buffers of bytes are sent (``Isend``, ``Irecv``); no object is pickled. A waiting rank polls with pauses. So it
uses little CPU time, answers when another rank asks whether it is alive, and stops waiting after a bounded time. This
module needs the extra ``mpi``; the first call starts MPI.

Source: MPI 4.1, sections 3.7 and 7.4, https://www.mpi-forum.org/docs/.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike

from ringspec.comm.agreement import digest, meet
from ringspec.comm.control import Control
from ringspec.comm.library import kept, mpi
from ringspec.comm.links import Pending
from ringspec.comm.ring import ring_over
from ringspec.comm.wire import Buffer
from ringspec.errors import LayoutError, LostWorkerError, OptionError, RingspecError, shown
from ringspec.rings.run import Run

TIMEOUT = 60.0
# After this fraction of the timeout, a waiting rank asks its neighbours whether they are alive.
ASKING = 0.6
# Time in seconds for the neighbours to write their last lines as well.
GRACE_SECONDS = 1.0
SHORTEST_SLEEP, LONGEST_SLEEP = 2e-5, 2e-3
# Exit status of a run that lost a rank.
LOST = 4
Log = Callable[[str], None]
# Started and not known to be finished. After an error nobody waits for them, but the MPI library still uses their
# buffers, so they must not be freed: that ended some ranks with a segmentation fault.
UNFINISHED: dict[int, Pending] = {}


def to_stderr(line: str) -> None:
    """Write a line in one call and unbuffered, so that it is not lost if this process is killed."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class MpiLinks:
    """The links of this rank over ``comm``, a communicator that nothing else uses.

    ``timeout``: seconds within which another rank must answer the question whether it is alive. If the rank answers,
    this rank waits for its message for up to twice this time. ``log``: a function that is called before each wait that
    blocks, with a line that names the step and the other rank. ``first``: the number, among all ranks, of rank 0 of
    these links.
    """

    def __init__(
        self, comm: Any, control: Control, timeout: float, log: Log | None, first: int = 0
    ) -> None:
        if not 0 < timeout < float("inf"):
            raise OptionError("a timeout of more than 0 seconds", shown(timeout), "pass timeout=60")
        self.comm, self.control, self.timeout, self.log = comm, control, timeout, log
        self.first = first
        self.neighbours: set[int] = set()

    @property
    def rank(self) -> int:
        rank: int = self.comm.Get_rank()
        return rank

    @property
    def size(self) -> int:
        size: int = self.comm.Get_size()
        return size

    def name(self, rank: int) -> str:
        """Return the name of a rank, such as 'rank 5', with its number among all ranks."""
        return f"rank {self.first + rank}"

    def send(self, target: int, tag: int, buffer: Buffer, what: str) -> Pending:
        self.neighbours.add(target)
        request = self.comm.Isend([buffer, mpi().BYTE], target, tag)
        return started(Pending(target, what, buffer, request))

    def receive(self, source: int, tag: int, size: int, what: str) -> Pending:
        self.neighbours.add(source)
        buffer = np.empty(size, np.uint8)
        request = self.comm.Irecv([buffer, mpi().BYTE], source, tag)
        return started(Pending(source, what, buffer, request))

    def wait(self, pending: Pending) -> Buffer:
        """Wait and return the buffer; raise LostWorkerError after the time limit, or another rank's error."""
        return self.awaited(pending, 2 * self.timeout)

    def awaited(self, pending: Pending, longest: float) -> Buffer:
        """Wait and return the buffer; ``longest`` is the time limit, in seconds, for a rank that is alive."""
        assert pending.buffer is not None
        if is_finished(pending):
            return pending.buffer
        if self.log is not None:
            self.log(f"ringspec: {self.name(self.rank)} {pending.what}")
        self.control.doing = pending.what
        began, pause = time.monotonic(), SHORTEST_SLEEP
        asking, judging = began + ASKING * self.timeout, math.inf
        while not is_finished(pending):
            self.look(pending)
            now = time.monotonic()
            if now > asking:
                # The time counts from the question, so that a rank that was itself stopped does not give up immediately.
                asking, judging = math.inf, now + (1 - ASKING) * self.timeout
                for neighbour in self.neighbours:
                    self.control.ask(self.first + neighbour)
            if now > judging:
                asking, judging = now + ASKING * self.timeout, math.inf
                self.check_alive(pending)
                if now - began > longest:
                    raise self.lost(pending, "no message")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_SLEEP)
        self.control.doing = f"computes; before that it {pending.what}"
        return pending.buffer

    def look(self, pending: Pending) -> None:
        """Receive side messages (``control``), and raise an error that another rank sent.

        If the error says that a rank is lost, this rank adds to the message what it was waiting for.
        """
        try:
            self.control.look()
        except LostWorkerError as error:
            found = error.got.partition(": ")[0]
            got = f"{found}: {self.name(self.rank)} {pending.what}"
            raise LostWorkerError(error.expected, got, error.fix) from None

    def check_alive(self, pending: Pending) -> None:
        """Raise LostWorkerError if a neighbour that was asked does not answer."""
        answers = self.control.answers
        silent = [r for r in sorted(self.neighbours) if self.first + r not in answers]
        if silent:
            names = ", ".join(map(self.name, silent))
            raise self.lost(pending, f"{names} {'does' if len(silent) == 1 else 'do'} not answer")

    def lost(self, pending: Pending, what: str) -> LostWorkerError:
        """Return the LostWorkerError to raise, and send it to the other ranks, so that they stop as well."""
        answer = self.control.answers.get(self.first + pending.peer)
        alive = "" if answer is None else f"; {self.name(pending.peer)} is alive and {answer}"
        error = LostWorkerError(
            f"every rank to answer within {self.timeout:g} s",
            f"{what}: {self.name(self.rank)} {pending.what}{alive}",
            "find out whether that rank hangs or was stopped, or pass a larger timeout",
        )
        self.control.stop(error)
        return error

    def stop(self, error: RingspecError) -> None:
        self.control.stop(error)


def started(pending: Pending) -> Pending:
    """Keep a message and its buffer until :func:`is_finished` has returned True for it."""
    UNFINISHED[id(pending)] = pending
    return pending


def is_finished(pending: Pending) -> bool:
    """Return whether a message has been sent or received."""
    finished: bool = pending.handle.Test()
    if finished:
        UNFINISHED.pop(id(pending), None)
    return finished


def duplicated(comm: Any, timeout: float) -> Any:
    """Return two duplicates of a communicator, made without a call that could block forever."""
    made = [comm.Idup(), comm.Idup()]
    began = time.monotonic()
    while not all(request.Test() for _, request in made):
        if time.monotonic() - began > timeout:
            raise LostWorkerError(
                f"all {comm.Get_size()} ranks to start within {timeout:g} s",
                f"some did not: rank {comm.Get_rank()} waits at the start for all ranks",
                "check that all ranks call this, and that none hangs",
            )
        time.sleep(SHORTEST_SLEEP)
    return [duplicate for duplicate, _ in made]


def world_links(comm: Any = None, timeout: float = TIMEOUT, log: Log | None = None) -> MpiLinks:
    """Return links among all ranks of a communicator, by default COMM_WORLD; all of its ranks must call this function.

    The first call duplicates the communicator; later calls use the same duplicates.
    """
    world = mpi().COMM_WORLD if comm is None else comm
    made = world.Get_attr(kept())
    if made is None:
        first, second = duplicated(world, timeout)
        made = first, Control(second)
        world.Set_attr(kept(), made)
    links = MpiLinks(made[0], made[1], timeout, log)
    if log is not None:
        where = f"process {os.getpid()} on {mpi().Get_processor_name()}"
        log(f"ringspec: {links.name(links.rank)} is {where}")
    return links


def split(links: MpiLinks, ring_size: int) -> MpiLinks:
    """Return links among the ranks of this rank's ring. With W = ``ring_size``, ring g has ranks g*W to g*W + W - 1.

    All ranks must call this function. If W does not divide the number of ranks, every rank raises LayoutError. If two
    ranks pass different values of W, every rank raises CommunicationError ('disagreement').
    """
    error = None
    if type(ring_size) is not int or ring_size < 1 or links.size % ring_size:
        error = LayoutError(
            f"a ring size that divides the {links.size} ranks",
            shown(ring_size),
            "start a multiple of the ring size: mpiexec -n N",
            code="worker-count",
        )
    # An MPI split could block, and with another W a rank has other neighbours; this call names a missing rank.
    meet(links, "before the ranks form rings", error, {"ring size": digest(ring_size)})
    if ring_size == links.size:
        return links
    group, worker = divmod(links.rank, ring_size)
    known = links.comm.Get_attr(kept())
    if known is None:
        known = {}
        links.comm.Set_attr(kept(), known)
    if ring_size not in known:
        known[ring_size] = links.comm.Split(group, worker)
    ring = known[ring_size]
    return MpiLinks(ring, links.control, links.timeout, links.log, group * ring_size)


def ring_mpi(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    dy: ArrayLike | None = None,
    *,
    comm: Any = None,
    ring_size: int | None = None,
    timeout: float = TIMEOUT,
    log: Log | None = None,
    abort: bool = True,
    **keywords: Any,
) -> Run | None:
    """Run ``ringspec.ring`` over MPI; call this function on every rank, with the same whole tensors.

    q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv], dy [B, H, Sq, Dv] have any float dtype and are in global
    order. With dy, the backward pass is computed as well. ``keywords`` are those of :func:`ringspec.rings.ring.ring`
    except ``workers`` and ``record``, and also ``root`` and ``observer`` of :func:`~ringspec.comm.ring_over`. The
    number of workers is the number of ranks, or ``ring_size``. The other parameters:

    ``comm``       an mpi4py communicator; default COMM_WORLD
    ``ring_size``  the number of workers of each ring, if the ranks form several rings, each of which computes a part of
                   the batch; default: one ring of all ranks
    ``timeout``    seconds within which another rank must answer that it is alive. If it answers, this rank waits for
                   its message for up to twice this time
    ``log``        a function that is called with a line of text before each wait that blocks
    ``abort``      what to do if a rank does not answer. True: print to stderr which rank it is, and end all ranks with
                   MPI_Abort, status 4. False: raise LostWorkerError on the ranks that noticed

    Returns the :class:`~ringspec.rings.run.Run` on every rank; if ``root`` is given, only this rank gets the run, and
    the others get None. Raises the errors of ``ringspec.ring`` on every rank, and CommunicationError ('disagreement')
    if arguments differ between ranks. After an error, messages may still be in transit, so end the program.
    """
    try:
        world = world_links(comm, timeout, log)
        ring = split(world, world.size if ring_size is None else ring_size)
        run: Run | None = ring_over(world, q, k, v, dy, ring=ring, **keywords)
        return run
    except LostWorkerError as lost:
        if not abort:
            raise
        end_all(lost)


def end_all(lost: LostWorkerError) -> NoReturn:
    """Print which rank is lost, wait a moment so that other ranks can print it too, and end all ranks."""
    to_stderr(f"ringspec: {lost}")
    time.sleep(GRACE_SECONDS)
    abort(LOST)


def abort(status: int) -> NoReturn:
    """End all ranks with MPI_Abort; the launcher exits with ``status``."""
    sys.stdout.flush()
    mpi().COMM_WORLD.Abort(status)
    raise SystemExit(status)
