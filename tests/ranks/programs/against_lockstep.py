"""On W ranks: the ring over messages beside lockstep on rank 0, in one run, as ratios.

mpiexec -n 4 python tests/ranks/programs/against_lockstep.py

Prints for each problem: wall time of lockstep over that of the ranks; processor time of all ranks
over that of lockstep; and the share of the ranks' wall time that went by in waits.
"""

import time

import numpy as np

from ringspec.comm.library import mpi
from ringspec.comm.mpi import MpiLinks, ring_mpi
from ringspec.rings.ring import ring

comm = mpi().COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
waited = [0.0]
plain_wait = MpiLinks.awaited


def timed_wait(self, pending, longest):
    began = time.perf_counter()
    try:
        return plain_wait(self, pending, longest)
    finally:
        waited[0] += time.perf_counter() - began


MpiLinks.awaited = timed_wait


def rested():
    """All ranks arrive, asleep: rank 0 may still be at its lockstep run."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.01)


def measured(function, *arguments, **keywords):
    """Wall and processor seconds of a call, each the best of three."""
    runs = []
    for _ in range(3):
        wall, cpu = time.perf_counter(), time.process_time()
        function(*arguments, **keywords)
        runs.append((time.perf_counter() - wall, time.process_time() - cpu))
    return min(wall for wall, _ in runs), min(cpu for _, cpu in runs)


def total(value):
    every = np.zeros(size)
    comm.Allgather(np.array([value]), every)
    return float(every.sum())


for tokens, causal, layout in (
    (1024, False, "contiguous"),
    (4096, False, "contiguous"),
    (4096, True, "contiguous"),
    (4096, True, "zigzag"),
):
    rng = np.random.default_rng(0)
    x = {name: rng.standard_normal((1, 2, tokens, 64)) for name in ("q", "k", "v", "dy")}
    how = {"causal": causal, "layout": layout, "skip_masked": causal}
    alone = (0.0, 0.0)
    rested()
    if rank == 0:
        alone = measured(ring, **x, workers=size, **how)
    rested()
    waited[0] = 0.0
    wall, cpu = measured(ring_mpi, **x, root=0, **how)
    every, waits = total(cpu), total(waited[0]) / size / 3
    if rank == 0:
        name = f"S = {tokens}, {'causal' if causal else 'full'}, {layout}"
        print(
            f"{name}: {alone[0] / wall:.2f} times as fast as lockstep, "
            f"{every / alone[1]:.2f} of its processor time, "
            f"{waits / wall:.2f} of the time in waits",
            flush=True,
        )
