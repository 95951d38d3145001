"""A JAX function as a target (implementation under test): ``shard_map`` over a named axis, forward and vjp.

The author of a target writes ``function(q, k, v, *, axis_name, call)``. It computes one worker's results from its q [B,
H, n, D], k [B, Hkv, n, D] and v [B, Hkv, n, Dv], with collectives over ``axis_name``. ``call`` is a
:class:`~ringspec.conformance.adapters.torch_worker.LocalCall` with JAX arrays and a traced ``rank``; ``call.tensors``
has the further inputs. In the operation 'context_parallel', ``axis_name`` is a tuple: the named axes of the call's
mesh, outermost first. The function returns o, or (o, lse). If a call has dlse, lse is differentiated too.

One separate process computes everything, on ``devices`` CPU devices or on the GPUs of this machine. The process starts
at the first call, and again at the first call after a crash. It is not forked, because JAX does not survive a fork, and
it cannot change its number of CPU devices after it has started.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from ringspec.conformance.adapters import rank_start
from ringspec.conformance.adapters.command import CommandTarget
from ringspec.conformance.adapters.torch_processes import named
from ringspec.conformance.adapters.torch_ranks import check_operation
from ringspec.conformance.adapters.wire import plain
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.declared import check_name
from ringspec.conformance.target.protocol import Call, Result
from ringspec.conformance.target.versions import Installed, under_test
from ringspec.errors import OptionError, shown

__all__ = ["JaxTarget"]

PLATFORMS = ("cpu", "gpu")
WORKER = "ringspec.conformance.adapters.jax_worker"
START_SECONDS = 120.0
CALL_SECONDS = 120.0


class JaxTarget:
    """A JAX function for ``shard_map`` as a target.

    ``function``      'package.module:name', 'path/file.py:name', or a function at the top level
                      of a module or file
    ``capabilities``  what the function claims; the possible operations are ring-forward, ring-backward, block-forward,
                      context_parallel-forward, context_parallel-backward
    ``platform``      'cpu' or 'gpu'
    ``devices``       number of CPU devices, which limits W; on GPUs, all are used
    ``options``       keyword arguments for the function, plain data; ``notes``: for the report
    ``timeout``       seconds for one call including compilation; ``start_timeout``: for importing JAX
    ``python``        the interpreter of the process; its environment needs jax, NumPy and ml_dtypes, but not
                      ringspec, and all its packages are used as installed
    ``packages``      distributions whose versions the report names, in addition to the function's package

    64-bit types are enabled for float64 calls only. Results keep the dtype that the function gave them. ``run``
    raises Refused, Failed (an exception, with its traceback), Crashed, Exited and TimedOut. A backward pass
    recomputes the forward pass; o and lse in a call of only the backward pass are ignored.

    >>> target = JaxTarget("my_package.ring:attention", Capabilities(workers=(2, 4)))
    >>> target.name, target.platform
    ('attention', 'cpu')
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        capabilities: Capabilities | None = None,
        *,
        name: str | None = None,
        platform: str = "cpu",
        devices: int = 8,
        options: Mapping[str, Any] | None = None,
        timeout: float | None = CALL_SECONDS,
        start_timeout: float = START_SECONDS,
        python: str | None = None,
        notes: tuple[str, ...] = (),
        packages: tuple[str, ...] = ("jax",),
    ) -> None:
        check_name("a platform", platform, PLATFORMS)
        if type(devices) is not int or devices < 1:
            raise OptionError("devices >= 1", shown(devices), "leave it at 8")
        self.function, self.name, self.python = named(function, name, python)
        self.capabilities = Capabilities() if capabilities is None else capabilities
        self.platform = platform
        self.devices = devices
        self.options = plain(options or {})
        self.notes = notes
        self.packages = under_test(packages, self.function)
        self.timeout = CALL_SECONDS if timeout is None else timeout
        self.start_timeout = start_timeout
        self._program: CommandTarget | None = None

    def run(self, call: Call) -> Result:
        """Run one call on the first ``call.workers`` devices."""
        check_operation(call)
        program = self.program()
        program.timeout = self.timeout
        return program.run(call)

    def program(self) -> CommandTarget:
        """Return the process; it starts with the first request."""
        if self._program is None:
            self._program = CommandTarget(self.command(), start_timeout=self.start_timeout)
        return self._program

    @property
    def installed(self) -> Installed:
        """The versions of the packages in the process; empty if it cannot be started."""
        with contextlib.suppress(OptionError):  # each case will report it
            return self.program().installed
        return Installed()

    @property
    def printed(self) -> str:
        """The output of the process during the last call."""
        return "" if self._program is None else self._program.log

    def close(self) -> None:
        """End the process."""
        program, self._program = self._program, None
        if program is not None:
            program.close()

    def command(self) -> tuple[str, ...]:
        """Return the command line of the process; raise OptionError if its interpreter is missing."""
        if shutil.which(self.python) is None:
            raise OptionError("a Python interpreter", shown(self.python), "pass its path")
        setup = {
            "function": self.function,
            "options": self.options,
            "platform": self.platform,
            "devices": self.devices,
            "packages": self.packages,
        }
        return (self.python, str(rank_start.__file__), WORKER, json.dumps(setup))
