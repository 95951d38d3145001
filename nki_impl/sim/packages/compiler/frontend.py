"""Names of ``nki.compiler.frontend`` and ``nki.compiler.ncc_driver``, as far as AWS's tests use them.

Some tests of AWS's library only trace a kernel (``trace_only``), in every mode of the suite. They pass if the kernel
runs through, and their kernels check shapes, strides and offsets with assertions. Here, tracing runs the kernel on the
simulator, with all its checks. There is no code for the device, so :class:`CompiledKernel` raises UnsupportedError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from nki_impl.sim.errors import UnsupportedError
from nki_impl.sim.machine.launch import Outcome
from nki_impl.sim.packages.simulator import on_ranks


@dataclass(frozen=True, eq=False)
class TracedKernel:
    """The result of :meth:`NKIFrontend.compile`; ``outcome`` is that of the run on the simulator."""

    outcome: Outcome

    @property
    def module(self) -> NoReturn:
        """Raise :class:`UnsupportedError`, because the simulator writes no MLIR."""
        raise _no_compiler("the MLIR module of a kernel")


class NKIFrontend:
    """A compiler frontend, which runs kernels on the simulator."""

    def compile(
        self,
        kernel: Callable[..., Any],
        inputs: Mapping[str, Any],
        target: str,
        lnc: int = 1,
        artifacts_dir: str | None = None,
        dump_python_ast: bool = False,
        output_names: list[str] | None = None,
    ) -> TracedKernel:
        """Run ``kernel`` on one rank with the given inputs, which do not change, and return the outcome.

        ``target``: trn1, trn2 or trn3. ``lnc``: the number of cores, 1 or 2. ``artifacts_dir`` and ``output_names``
        concern only files and names of a compilation, so they have no effect.

        Raises the exception of the kernel or the error of the simulator.
        """
        if dump_python_ast:
            raise _no_compiler("dump_python_ast=True")
        return TracedKernel(on_ranks(kernel, [inputs], lnc, target))


class ParserFrontend(NKIFrontend):
    """The frontend that parses a kernel's source; here the same as :class:`NKIFrontend`."""


class CompileOptions:
    """The options of a compilation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise _no_compiler("CompileOptions")


class CompiledKernel:
    """A compiled kernel."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise _no_compiler("CompiledKernel")

    @staticmethod
    def from_frontend(*args: Any, **kwargs: Any) -> NoReturn:
        """Raise :class:`UnsupportedError`."""
        raise _no_compiler("CompiledKernel.from_frontend")


def _no_compiler(name: str) -> UnsupportedError:
    return UnsupportedError(
        "nki.compiler", "a simulation, because the simulator writes no code for the device", name,
        "run the tests with --test-mode simulation",
    )  # fmt: skip
