"""A target that runs the specification's ring over MPI, with one rank for each worker.

A target is an implementation that the suite can test. ``mpiexec`` starts one program, which serves all calls. A call
for W workers runs on the first W ranks, in a communicator that is split from the world. The target needs the extra
``mpi``, and ``mpiexec`` on the path or in the folder of this Python interpreter.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from ringspec.conformance.adapters.command import CALL_SECONDS, CommandTarget
from ringspec.conformance.target.capabilities import OPERATIONS
from ringspec.conformance.target.protocol import Call, Result
from ringspec.conformance.targets.reference import reference_float64
from ringspec.errors import MissingPackageError

# The environment variable with the launcher and its options, for MPI libraries that need special options.
LAUNCHER = "RINGSPEC_MPIEXEC"
PROGRAM = (sys.executable, "-m", "ringspec.conformance.targets.mpi_rank")
RING = tuple(name for name in OPERATIONS if name.startswith("ring"))
NOTE = "each worker is an MPI rank, and all data between workers is sent as MPI messages"


class ReferenceMpi:
    """A target that runs rings over MPI. It rounds as the recipe of the input format says."""

    name = "reference-mpi"
    notes = (NOTE,)

    def __init__(self, timeout: float | None = CALL_SECONDS) -> None:
        claims = reference_float64.capabilities
        self.capabilities = claims.__class__(**vars(claims) | {"operations": RING})
        self.timeout = timeout
        self._ranks = 0
        self._program: CommandTarget | None = None

    def run(self, call: Call) -> Result:
        """Run one call. Raises MissingPackageError if there is no mpiexec."""
        if call.workers > self._ranks:
            self.close()
            self._ranks = max(4, call.workers)
        if self._program is None:
            self._program = CommandTarget([*launcher(), "-n", str(self._ranks), *PROGRAM])
        if self.timeout is not None:
            self._program.timeout = self.timeout
        return self._program.run(call)

    @property
    def log(self) -> str:
        """The output of the ranks during the last call."""
        return "" if self._program is None else self._program.log

    def close(self) -> None:
        """End the ranks."""
        if self._program is not None:
            self._program.close()
        self._program = None


def launcher() -> list[str]:
    """Return the command that starts MPI programs. Raises MissingPackageError if there is none."""
    words = shlex.split(os.environ.get(LAUNCHER, ""))
    if words:
        return words
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.is_file() else shutil.which("mpiexec")
    if found is None:
        raise MissingPackageError(
            "mpiexec on the path", "none", f"pip install '.[mpi]', or set {LAUNCHER}"
        )
    return [found]


reference_mpi = ReferenceMpi  # a class, which the loader of targets calls without arguments
