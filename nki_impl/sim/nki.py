"""The simulator's module ``nki``, which ``import nki`` imports inside :func:`nki_impl.sim.install.installed`."""

from __future__ import annotations

from nki_impl.sim import collectives, isa, language
from nki_impl.sim.machine.launch import jit, simulate
from nki_impl.sim.tensor.dtypes import DType as dtype

__all__ = ["collectives", "dtype", "isa", "jit", "language", "simulate"]
