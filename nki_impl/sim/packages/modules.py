"""The modules by the names under which kernels and their tests import them."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NoReturn

from nki_impl.sim.errors import UnsupportedError
from nki_impl.sim.isa import enums
from nki_impl.sim.operators import tokens
from nki_impl.sim.packages import builtin, compiler, neuron_dtypes, parameter_types
from nki_impl.sim.packages.compiler import frontend


def _module(name: str, text: str, **members: Any) -> ModuleType:
    module = ModuleType(name, text)
    vars(module).update(members)
    return module


MODULES = ("nki", "nki.language", "nki.isa", "nki.collectives")
"""The documented modules; :func:`kernel_modules` has the others that kernels also import."""


def simulator_modules() -> dict[str, ModuleType]:
    """Return the documented modules."""
    from nki_impl.sim import nki

    return dict(zip(MODULES, (nki, nki.language, nki.isa, nki.collectives), strict=True))


def kernel_modules() -> dict[str, ModuleType]:
    """Return the undocumented modules of ``nki`` and other packages that published kernels and their tests import.

    ``nki.language.opcode`` has the operators, ``nki.isa.constants`` has the enumerations, and ``nki.typing`` has the
    classes for annotations. ``neuronxcc`` is the older name of ``nki``'s package.
    """
    cast = {"static_cast": neuron_dtypes.static_cast}
    modules: dict[str, ModuleType] = {
        "nki.language.opcode": tokens,
        "nki.language.dtypes": neuron_dtypes,
        "nki.isa.constants": enums,
        "nki.typing": parameter_types,
        "nki.tensor": parameter_types,
        "nki.builtin": builtin,
        "nki.compiler": compiler,
        "nki.compiler.frontend": frontend,
        "nki.compiler.ncc_driver": frontend,
        "neuron_dtypes": neuron_dtypes,
        "neuronxcc.nki.typing": parameter_types,
        "neuronxcc.starfish.support.dtype": _module("dtype", "Number formats.", **cast),
    }
    for name in list(modules):
        if name.startswith("neuronxcc."):
            parts = name.split(".")
            for end in range(len(parts) - 1, 0, -1):
                outer = ".".join(parts[:end])
                package = modules.setdefault(outer, _module(outer, "A package.", __path__=[]))
                setattr(package, parts[end], modules[f"{outer}.{parts[end]}"])
    return modules


def cpu_simulator_modules() -> dict[str, ModuleType]:
    """Return the package ``nki_cpu_simulator``, whose modules are those of the simulator."""
    from nki_impl.sim import nki

    top = "nki_cpu_simulator"
    inner = simulator_modules() | kernel_modules()
    modules = {f"{top}.{name}": one for name, one in inner.items() if name.split(".")[0] == "nki"}
    modules[top] = _module(top, "The simulator under the name that AWS's tests expect.", nki=nki)
    return modules


def missing_test_modules() -> dict[str, ModuleType]:
    """Return modules that AWS's tests import and that the published repository lacks.

    ``test.utils.scripts.remote_lock_scripts`` reserves cores of remote hosts, and ``test.utils.perf_analysis_private``
    reads traces of the device. A simulation uses neither.
    """
    outer = "test.utils.scripts"
    locks = _module(
        f"{outer}.remote_lock_scripts", "Locks of remote hosts.", LockResult=Lock, LockStatus=Lock
    )
    package = _module(outer, "Programs for remote hosts.", __path__=[], remote_lock_scripts=locks)
    traces = _module("test.utils.perf_analysis_private", "Traces.", analyze_trace=analyze_trace)
    return {outer: package, locks.__name__: locks, traces.__name__: traces}


def analyze_trace(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise :class:`UnsupportedError`."""
    raise _not_simulated("analyze_trace")


class Lock:
    """A lock of remote cores. The simulator uses none, so making one is an error."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise _not_simulated("a lock of remote cores")


def _not_simulated(what: str) -> UnsupportedError:
    return UnsupportedError(
        "test_mode", "a simulation, which needs no device", what, "pass --test-mode simulation"
    )
