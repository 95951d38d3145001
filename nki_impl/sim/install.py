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

PACKAGES = ("nki", "neuronxcc", "neuron_dtypes", "nki_cpu_simulator")
"""The packages that are replaced."""


@contextmanager
def installed() -> Iterator[None]:
    """Make ``import nki`` and imports of its submodules import the simulator inside the with block.

    The same holds for what published kernels import of ``neuronxcc`` and ``neuron_dtypes``. After the block,
    ``sys.modules`` has the entries for these packages that it had before. A kernel whose module was imported inside the
    block continues to use the simulator.
    """
    hidden = hide()
    show()
    try:
        yield
    finally:
        hide()
        sys.modules.update(hidden)


def show() -> None:
    """Add the simulator's modules to ``sys.modules``."""
    from nki_impl.sim.packages.modules import (
        cpu_simulator_modules,
        kernel_modules,
        simulator_modules,
    )

    sys.modules.update(simulator_modules() | kernel_modules() | cpu_simulator_modules())


def hide() -> dict[str, ModuleType]:
    """Remove all modules of :data:`PACKAGES` from ``sys.modules``, and return them."""
    named = [name for name in sys.modules if name.split(".")[0] in PACKAGES]
    return {name: sys.modules.pop(name) for name in named}
