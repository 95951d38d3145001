"""On four ranks: what one rank does otherwise, every rank hears long before the time limit, by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from ranks.ringcases import W, inputs

from ringspec.comm.library import mpi
from ringspec.comm.mpi import ring_mpi

# A wait for a rank that does not come ends long after the test does.
TIMEOUT = 1000.0
rank, size = mpi().COMM_WORLD.Get_rank(), mpi().COMM_WORLD.Get_size()
assert size == W
what = sys.argv[1]


def observer(moment):
    if rank == 2 and moment.step == 1:
        raise ValueError("broken: here")


keywords = {
    "observer": {"observer": observer},
    "other ring size": {"ring_size": 2 if rank == 2 else 4},
    "no ring size": {"ring_size": 3 if rank == 2 else 4},
}[what]
try:
    ring_mpi(**inputs(1), **keywords, timeout=TIMEOUT)
except ValueError as error:
    text = f"{rank} {type(error).__name__} ({getattr(error, 'code', 'none')}): {getattr(error, 'got', error)}"
else:
    text = f"{rank} went on"
found = mpi().COMM_WORLD.gather(text)
if rank == 0:
    print("\n".join(found), flush=True)
