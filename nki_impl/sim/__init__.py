"""A functional simulator of NKI: the language, the instructions and the collectives, on one or more ranks.

In reading order: ``tensor`` (number formats, rounding, views, reads and writes), ``memory`` (storages and capacity),
``machine`` (cores, launches, and a scheduler that lets several cores take turns), ``operators``, ``isa`` (the
instructions, by engine), ``language`` (``nki.language``), ``collectives`` and ``exchange`` (data between ranks).

The simulator is deterministic: it computes in program order, in float32, and rounds once per write. If a kernel breaks
a rule of the machine, the simulator raises an exception of ``errors``. It does not model time.
"""

# Imported first, because nki_impl.sim.machine.sync and nki_impl.sim.isa import each other.
from nki_impl.sim import isa as isa
