"""A functional simulator of the NKI subset that ring attention kernels need.

In reading order: ``dtypes`` (formats and the one rounding), ``memory`` (storages and capacity), ``tensor``
and ``patterns`` (views), ``access`` (reads and writes), ``core`` (one physical core, the entry of
instructions), ``ops`` (operators), ``isa/`` (the instructions by engine), ``language`` (``nki.language``),
``machine`` (many cores, one at a time), ``collectives``, ``launch``.

It computes every value in float32 and rounds once per write, in program order, deterministically, and
raises (``errors``) where a kernel breaks a rule of the machine. It models no timing.
"""

# First, because nki_impl.sim.machine.sync and nki_impl.sim.isa need each other.
from nki_impl.sim import isa as isa
