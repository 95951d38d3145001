"""``nki.compiler``: the simulator has no compiler."""

from nki_impl.sim.packages.compiler import frontend
from nki_impl.sim.packages.compiler import frontend as ncc_driver

__all__ = ["frontend", "ncc_driver"]
