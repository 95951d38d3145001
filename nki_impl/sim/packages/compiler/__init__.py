"""``nki.compiler``: tracing a kernel runs it on the simulator, which compiles nothing."""

from nki_impl.sim.packages.compiler import frontend
from nki_impl.sim.packages.compiler import frontend as ncc_driver

__all__ = ["frontend", "ncc_driver"]
