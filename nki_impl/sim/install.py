"""Make ``import nki`` import the simulator, so that kernels written for NKI run unmodified.

>>> with installed():
...     import nki.language as nl
>>> nl.__name__
'nki_impl.sim.language'
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

__all__ = ["installed"]

MODULES = ("nki", "nki.language", "nki.isa", "nki.collectives")
"""The documented modules; :func:`kernel_modules` has the undocumented ones that kernels also import."""


def simulator_modules() -> dict[str, ModuleType]:
    from nki_impl.sim import nki

    return dict(zip(MODULES, (nki, nki.language, nki.isa, nki.collectives), strict=True))


def kernel_modules() -> dict[str, ModuleType]:
    """Return the undocumented modules of ``nki`` that published kernels import.

    ``nki.language.opcode`` has the operators, ``nki.isa.constants`` has the enumerations, and ``nki.typing`` has the
    class ``tensor`` for annotations.
    """
    from nki_impl.sim.isa import enums
    from nki_impl.sim.operators import tokens
    from nki_impl.sim.tensor.views import NkiTensor

    typing = ModuleType("nki.typing", "Annotations of kernels.")
    typing.tensor = NkiTensor  # type: ignore[attr-defined]
    return {"nki.language.opcode": tokens, "nki.isa.constants": enums, "nki.typing": typing}


@contextmanager
def installed() -> Iterator[None]:
    """Make ``import nki`` and imports of its submodules import the simulator inside the with block.

    After the block, ``sys.modules`` has the entries for ``nki`` that it had before. A kernel whose module was imported
    inside the block continues to use the simulator.
    """
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_nki(name)}
    sys.modules.update(simulator_modules() | kernel_modules())
    try:
        yield
    finally:
        for name in [name for name in sys.modules if _is_nki(name)]:
            del sys.modules[name]
        sys.modules.update(hidden)


def _is_nki(name: str) -> bool:
    return name == "nki" or name.startswith("nki.")
