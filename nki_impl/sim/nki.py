"""The simulator's module ``nki``, which ``import nki`` imports inside :func:`nki_impl.sim.install.installed`.

``builtin``, ``compiler``, ``cpu_simulate``, ``tensor`` and ``typing`` are not documented. AWS's kernels and their tests
use them.
"""

from __future__ import annotations

from nki_impl.sim import collectives, isa, language
from nki_impl.sim.machine.launch import jit, simulate
from nki_impl.sim.packages import builtin, compiler
from nki_impl.sim.packages import parameter_types as tensor
from nki_impl.sim.packages import parameter_types as typing
from nki_impl.sim.packages.simulator import cpu_simulate
from nki_impl.sim.tensor.dtypes import DType as dtype

__all__ = [
    "builtin", "collectives", "compiler", "cpu_simulate", "dtype", "isa", "jit", "language",
    "simulate", "tensor", "typing",
]  # fmt: skip
