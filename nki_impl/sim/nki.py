"""The namespace ``nki`` as the simulator offers it: what ``import nki`` gives under :func:`installed`."""

from __future__ import annotations

from nki_impl.sim import collectives, isa, language
from nki_impl.sim.dtypes import DType as dtype
from nki_impl.sim.launch import jit, simulate

__all__ = ["collectives", "dtype", "isa", "jit", "language", "simulate"]
