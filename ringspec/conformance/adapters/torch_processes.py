"""A PyTorch function as a target: W processes, each with a forward pass and autograd's backward pass.

A target is an implementation under test. Its author writes ``function(q, k, v, *, group, call)``, which computes one
rank's results from its q [B, H, n, D], k [B, Hkv, n, D] and v [B, Hkv, n, Dv]. ``group`` is the process group (gloo on
CPU, NCCL with one GPU per process), ``call`` a :class:`~ringspec.conformance.adapters.torch_worker.LocalCall`. The
function returns o, or (o, lse), differentiable by autograd; lse must be differentiable if the target claims to support
dlse.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from ringspec.conformance.adapters.torch_launched import launched
from ringspec.conformance.adapters.torch_pool import Pool
from ringspec.conformance.adapters.torch_ranks import (
    check_operation,
    gathered,
    local_arrays,
    raise_changed,
)
from ringspec.conformance.adapters.wire import call_message, most_bytes, plain, stored
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.declared import check_name
from ringspec.conformance.target.protocol import Call, Failed, Result
from ringspec.conformance.target.versions import (
    Installed,
    agreed,
    said_installed,
    under_test,
)
from ringspec.errors import OptionError, shown
from ringspec.standins import standin
from ringspec.tensorfile import write_tensors

__all__ = ["TorchTarget"]

DEVICES = ("cpu", "cuda")
START_SECONDS = 120.0
CALL_SECONDS = 60.0


class TorchTarget:
    """A differentiable PyTorch function as a target.

    ``function``      'package.module:name', 'path/file.py:name', or a function at the top level
                      of a module or file
    ``capabilities``  what the function claims; the possible operations are ring-forward, ring-backward, block-forward,
                      context_parallel-forward, context_parallel-backward
    ``device``        'cpu' or 'cuda'
    ``options``       keyword arguments for the function, plain data; ``notes``: for the report
    ``timeout``       seconds for one call, ``start_timeout`` for starting the processes
    ``python``        the interpreter of the processes; its environment needs torch, NumPy and ml_dtypes, but not
                      ringspec, and all its packages are used as installed
    ``packages``      distributions whose versions the report names, in addition to the function's package
    ``standins``      packages to replace in the ranks by :mod:`ringspec.standins`, such as ('flash_attn',) or
                      ('flash_attn==2.6',), before the function is loaded; a note says so in the report
    ``pools``         how many pools of processes (one for each W) stay alive between calls

    ``run`` raises Refused, Failed (an exception of a rank, with its traceback), Crashed, Exited, TimedOut,
    Garbage and Mutated. ``printed``: what the ranks wrote during the last call. ``installed``: the package versions
    in the ranks; reading it before the first call starts the processes of the smallest W, and versions that differ
    between ranks raise Failed. A backward pass recomputes the forward pass; o and lse in a call of the backward
    pass alone are ignored.

    >>> target = TorchTarget("my_package.ring:attention", Capabilities(workers=(2, 4)))
    >>> target.name, target.device
    ('attention', 'cpu')
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        capabilities: Capabilities | None = None,
        *,
        name: str | None = None,
        device: str = "cpu",
        options: Mapping[str, Any] | None = None,
        timeout: float | None = CALL_SECONDS,
        start_timeout: float = START_SECONDS,
        python: str | None = None,
        pools: int = 4,
        notes: tuple[str, ...] = (),
        packages: tuple[str, ...] = ("torch",),
        standins: tuple[str, ...] | str = (),
    ) -> None:
        check_name("a device", device, DEVICES)
        if type(pools) is not int or pools < 1:
            raise OptionError("pools >= 1", shown(pools), "leave it at 4")
        self.function, self.name, self.python = named(function, name, python)
        self.capabilities = Capabilities() if capabilities is None else capabilities
        self.device = device
        self.options = plain(options or {})
        self.timeout = CALL_SECONDS if timeout is None else timeout
        self.start_timeout = start_timeout
        self.standins = (standins,) if isinstance(standins, str) else tuple(standins)
        self.notes = (*notes, *(standin(one).note for one in self.standins))
        self.packages = under_test(packages, self.function)
        self._installed: Installed | None = None
        self.printed = ""
        self.most_pools = pools
        self.pools: dict[int, Pool] = {}
        self.here: int | None = None

    def run(self, call: Call) -> Result:
        """Run one call on ``call.workers`` processes."""
        check_operation(call)
        self.printed = ""
        pool = self.pool(call.workers)
        requests = []
        for rank in range(call.workers):
            given, results = (pool.folder / f"{rank}.{kind}" for kind in ("given", "results"))
            write_tensors(given, local_arrays(call, rank))
            results.unlink(missing_ok=True)  # of an earlier call
            message = call_message(call, str(given), str(results))
            requests.append(message | {"packages": self.packages})
        replies = pool.ask(requests, self.timeout)
        self.printed = pool.printed
        raise_changed(replies)
        self.note(agreed([*map(said_installed, replies)]))
        files = [f"{rank}.results" for rank in range(call.workers)]
        return gathered([stored(pool.folder, file, most_bytes(call)) for file in files])

    def pool(self, workers: int) -> Pool:
        """Return the pool of W processes; if there are too many pools, close the least recently used one."""
        pool = self.pools.pop(workers, None)
        if pool is None or not pool.alive:
            while len(self.pools) >= self.most_pools:
                self.pools.pop(next(iter(self.pools))).close()
            names = ("function", "options", "device", "packages", "standins")
            setup = {name: getattr(self, name) for name in names}
            pool = Pool(workers, setup, self.python, self.start_timeout, self.here)
            self.note(pool.installed)
        self.pools[workers] = pool
        return pool

    @property
    def installed(self) -> Installed:
        """The versions of the packages in the ranks; empty if they cannot be started."""
        if self._installed is None:
            self._installed = Installed()
            with contextlib.suppress(Failed, OSError, OptionError):  # each case will report it
                self.pool(min(self.capabilities.workers or (1,)))
        return self._installed

    def note(self, said: Installed) -> None:
        """Add the packages that ranks report; a later report of a package replaces an earlier one."""
        self._installed = (self._installed or Installed()).merged(said)

    def close(self) -> None:
        """End all processes."""
        while self.pools:
            self.pools.popitem()[1].close()

    def debug(self, rank: int) -> None:
        """Compute one rank of every call in this process, without a time limit; ``rank``: its number.

        This has no effect if ``python`` is not this process's interpreter, because it may have another torch.
        """
        if self.python == sys.executable:
            self.close()
            # A process can be a rank of only one group at a time.
            self.here, self.timeout, self.most_pools = rank, math.inf, 1

    def under_torchrun(self) -> TorchTarget:
        """Use the processes that torchrun started, on one host or many, instead of starting processes.

        On rank 0, return a target that claims only W = WORLD_SIZE. On all other ranks, answer calls until rank 0
        closes its target, then exit.
        """
        target: TorchTarget = launched(self)
        return target


def named(
    function: str | Callable[..., Any], name: str | None, python: str | None
) -> tuple[str, str, str]:
    """Return the import path of a function, the name of the target, and the interpreter of its processes.

    >>> named("package.module:ring", None, "python3")
    ('package.module:ring', 'ring', 'python3')
    """
    spec = function_spec(function)
    name = spec.rpartition(":")[2] if name is None else name
    return spec, name, sys.executable if python is None else python


def function_spec(function: str | Callable[..., Any]) -> str:
    """Return the text by which another process can import a function.

    >>> function_spec("package.module:name")
    'package.module:name'
    """
    if isinstance(function, str):
        place, _, name = function.rpartition(":")
        if not place or not name:
            fix = "write package.module:name or path/file.py:name"
            raise OptionError("a function to import", shown(function), fix)
        return f"{Path(place).resolve()}:{name}" if place.endswith(".py") else function
    name = getattr(function, "__qualname__", "")
    if not name or "<" in name:
        fix = "define it at the top level of a module, or pass 'module:name'"
        raise OptionError("a function that another process can import", shown(function), fix)
    # If a file was loaded by its path, its module name is known only in this process.
    top = function.__module__.partition(".")[0]
    importable = top != "__main__" and PathFinder.find_spec(top) is not None
    source = inspect.getsourcefile(function)
    if source is not None and not importable:
        return f"{Path(source).resolve()}:{name}"
    return f"{function.__module__}:{name}"
