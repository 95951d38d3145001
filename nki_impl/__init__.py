"""Ring attention kernels in AWS NKI, and a simulator that runs them, collectives included.

- ``nki_impl.kernels``: forward, backward and unpermute, written against :mod:`nki_impl.lang`.
- ``nki_impl.lang``: takes NKI from the simulator or from the official packages (RINGSPEC_NKI).
- ``nki_impl.sim``: the simulator. :func:`nki_impl.sim.machine.launch.run_ranks` runs a kernel on W ranks of one
  or two cores; ``python -m nki_impl.sim script.py`` runs a script whose ``import nki`` is the simulator;
  :func:`nki_impl.sim.coverage.coverage` says which of NKI's names it offers.
- ``python -m nki_impl profile``: what a kernel does, counted, with an estimate for trn2.

Kernels and simulator import nothing of ringspec.
"""
