"""A functional simulator of the NKI subset that ring attention kernels need.

In reading order: ``dtypes`` (formats and rounding), ``memory`` (storages and capacity), ``tensor``
and ``patterns`` (views), ``access`` (reads and writes), ``core`` (one physical core, the entry point of
instructions), ``ops`` (operators), ``isa/`` (the instructions by engine), ``language`` (``nki.language``),
``machine`` (several cores that take turns), ``collectives``, ``launch``.

The simulator is deterministic: it computes in program order, in float32, and rounds once per write. If a kernel
breaks a rule of the machine it raises an exception of ``errors``. It does not model time.
"""

# Imported first, because nki_impl.sim.machine.sync and nki_impl.sim.isa import each other.
from nki_impl.sim import isa as isa
