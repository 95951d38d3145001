"""Ring attention kernels in AWS NKI (Neuron Kernel Interface), and a simulator that runs them on several ranks.

- ``nki_impl.kernels``: forward, backward and unpermute kernels, which use NKI through :mod:`nki_impl.lang`.
- ``nki_impl.lang``: imports NKI from the simulator or from the official packages, as RINGSPEC_NKI selects.
- ``nki_impl.sim``: the simulator. :func:`nki_impl.sim.machine.launch.run_ranks` runs a kernel on W ranks, each with
  one core or two. ``python -m nki_impl.sim script.py`` runs a script and gives it the simulator as ``import nki``.
  :func:`nki_impl.sim.coverage.coverage` lists the names of NKI that the simulator implements.
- ``python -m nki_impl profile``: counts the work of a kernel and estimates its time on trn2.

The kernels and the simulator import nothing from ringspec.
"""
