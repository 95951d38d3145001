"""Names of ``nki.compiler.frontend`` and ``nki.compiler.ncc_driver``.

AWS's tests import them before they know whether a test compiles or simulates. The simulator does not compile, so every
use raises :class:`UnsupportedError`.
"""

from __future__ import annotations

from typing import Any, NoReturn

from nki_impl.sim.errors import UnsupportedError


class NKIFrontend:
    """A compiler frontend; the simulator has none."""

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise :class:`UnsupportedError`."""
        raise _no_compiler(type(self).__name__ + ".compile")


class ParserFrontend(NKIFrontend):
    """The frontend that parses a kernel's source."""


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
        "nki.compiler", "a simulation, because the simulator does not compile", f"a call of {name}",
        "run the tests with --test-mode simulation",
    )  # fmt: skip
