"""``ringspec simulate`` over MPI: each rank runs this program, rank 0 prints, and all ranks end together.

mpi4py is imported only if the command was started under ``mpiexec`` or with ``--comm mpi``.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource
from threadpoolctl import threadpool_limits

from ringspec.errors import LostWorkerError, OptionError, RingspecError
from ringspec.rings.run import Run

if TYPE_CHECKING:
    from ringspec.comm.mpi import MpiLinks

Function = TypeVar("Function", bound=Callable[..., Any])
# Variables that the launchers of MPICH, Open MPI and PMIx set.
LAUNCHED = (("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
LAST_SECONDS = 10.0
PRINTING_SECONDS = 1.0


def ranks_options(function: Function) -> Function:
    """Add the options --comm, --ring-size, --timeout and --waits to a command."""
    options = (
        click.option(
            "--comm",
            type=click.Choice(["auto", "lockstep", "mpi"]),
            default="auto",
            show_default=True,
            help="lockstep: all workers in one process; mpi: one worker on each MPI rank; auto: mpi under "
            "mpiexec, else lockstep.",
        ),
        click.option(
            "--ring-size",
            type=click.IntRange(1),
            metavar="N",
            help="With MPI: split the batch over rings of N ranks. [default: one ring of all ranks]",
        ),
        click.option(
            "--timeout",
            type=click.FloatRange(0, 86_400, min_open=True),
            default=60.0,
            show_default=True,
            metavar="SECONDS",
            help="With MPI: a rank that is silent for this time is reported as hanging.",
        ),
        click.option(
            "--waits/--no-waits",
            default=True,
            help="With MPI: report on stderr each wait that does not end at once.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


class Ranks:
    """The MPI ranks of this command, each of which is one worker of the ring."""

    def __init__(self, links: MpiLinks, ring_links: MpiLinks) -> None:
        self.links, self.ring_links, self.met = links, ring_links, False

    def ring(self, *tensors: Any, record: bool, workers: int, **keywords: Any) -> Run | None:
        """Run ``ringspec.ring`` over the ranks, and return the run on rank 0, None on the others.

        Raises OptionError if ``record`` is True: states cannot be recorded over MPI.
        """
        from ringspec.comm.ring import ring_over

        if record:
            raise OptionError(
                "no recorded states over MPI",
                "--save with recorded states",
                "pass --no-states as well",
            )
        if workers != self.ring_links.size:
            raise OptionError(
                f"--workers {self.ring_links.size}, one for each rank of a ring",
                f"--workers {workers}",
                f"leave --workers out, or start {workers} ranks: mpiexec -n {workers}",
            )
        self.met = True
        links = self.links
        run: Run | None = ring_over(links, *tensors, ring=self.ring_links, root=0, **keywords)
        return run


# None means that all workers run in this process.
Team = Ranks | None


def launched() -> int | None:
    """Return the number of ranks that an MPI launcher started; None if the command was started without a launcher."""
    for rank, size in LAUNCHED:
        if rank in os.environ and os.environ.get(size, "").isdigit():
            return int(os.environ[size])
    return None


@contextlib.contextmanager
def team(given: dict[str, Any]) -> Iterator[Team]:
    """Yield the MPI ranks that compute the ring, or None if one process computes it.

    If ``given["workers"]`` is missing, it becomes the ring size. If a rank raises an error, all ranks end, and rank 0
    prints the error.
    """
    how, ranks = given["comm"], launched()
    if how == "lockstep" or (how == "auto" and (ranks or 1) == 1):
        if ranks is not None and ranks > 1:
            raise_on_first(
                OptionError(
                    "one process for --comm lockstep",
                    f"{ranks} ranks, each of which would compute the whole ring",
                    "leave mpiexec out, or pass --comm mpi",
                )
            )
        if given["ring_size"] is not None:
            raise OptionError(
                "--ring-size with MPI", "no ranks", "start them: mpiexec -n N ringspec simulate ..."
            )
        yield None
        return
    with threadpool_limits(1), of_ranks(given) as ranks_team:
        yield ranks_team


def raise_on_first(error: RingspecError | click.UsageError) -> None:
    """Raise an error that all ranks have; only rank 0 prints it."""
    rank = next((os.environ[name] for name, _ in LAUNCHED if name in os.environ), "0")
    if rank != "0":
        # The launcher may end all ranks as soon as one ends, so give the first one time to print.
        time.sleep(PRINTING_SECONDS)
        raise click.exceptions.Exit(2)
    raise error


@contextlib.contextmanager
def usage_said_once() -> Iterator[None]:
    """Let only rank 0 print a usage error; every rank has the same error, because all have the same command line."""
    try:
        yield
    except click.UsageError as error:
        raise_on_first(error)


@contextlib.contextmanager
def of_ranks(given: dict[str, Any]) -> Iterator[Ranks]:
    from ringspec.comm import mpi

    try:
        links = mpi.world_links(None, given["timeout"], mpi.to_stderr if given["waits"] else None)
    except LostWorkerError as lost:
        mpi.end_all(lost)
        raise
    ranks = Ranks(links, links)
    try:
        size = links.size if given["ring_size"] is None else given["ring_size"]
        if links.size % size == 0:
            ranks.ring_links = mpi.split(links, size)
        source = click.get_current_context().get_parameter_source("workers")
        if source is ParameterSource.DEFAULT:
            given["workers"] = ranks.ring_links.size
        if links.size % size:
            raise OptionError(
                f"a number of ranks that --ring-size {size} divides",
                f"{links.size} ranks",
                f"start a multiple of {size}: mpiexec -n {size * (links.size // size + 1)}",
            )
        yield ranks
        rest(links)
    except RingspecError as error:
        leave(ranks, error)
    except click.exceptions.Exit:
        rest(links)
        raise
    except BaseException:
        traceback.print_exc()
        mpi.abort(1)


def rest(links: MpiLinks) -> None:
    """Wait until rank 0 has finished; meanwhile use almost no processor time and check that rank 0 is alive."""
    import numpy as np

    buffer = np.zeros(1, np.uint8)
    if links.rank == 0:
        for rank in range(1, links.size):
            what = f"waits at the end until {links.name(rank)} is ready to end"
            links.wait(links.send(rank, REST_TAG, buffer, what))
    else:
        what = f"waits at the end for the report of {links.name(0)}"
        links.awaited(links.receive(0, REST_TAG, 1, what), float("inf"))


REST_TAG = 16 * 1024 + 12


def leave(ranks: Ranks, error: RingspecError) -> None:
    """End all ranks; only one rank prints ``error``."""
    from ringspec.comm import mpi
    from ringspec.comm.agreement import meet

    links = ranks.links
    try:
        if not ranks.met and not isinstance(error, LostWorkerError):
            ranks.met = True
            meet(links, "at the start", error)
    except RingspecError as agreed:
        error = agreed
    if isinstance(error, LostWorkerError):
        mpi.end_all(error)
    if links.control.error is None:
        # All ranks have this error and no message is in transit.
        if links.rank:
            raise click.exceptions.Exit(2)
        raise error
    if links.rank == 0:
        click.echo(f"Error: {error}", err=True)
        sys.stdout.flush()
        mpi.abort(2)
    time.sleep(LAST_SECONDS)
    mpi.abort(2)
