"""A kernel of one's own on the simulator: each rank adds 1 to its tile, and the ranks add their tiles.

python docs/nki/sum_of_ranks.py
"""

import numpy as np

from nki_impl.lang import ncc, nisa, nki, nl
from nki_impl.sim.machine.launch import run_ranks


@nki.jit
def sum_of_ranks(x, ranks):
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
    # A collective takes named tensors that the kernel allocated, no inputs, and its results are not returned directly.
    mine = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="mine")
    total = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="total")
    nisa.dma_copy(dst=mine, src=tile)
    ncc.all_reduce([mine], [total], ncc.ReplicaGroup([list(range(ranks))]), op=nl.add)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=total)
    return out


if __name__ == "__main__":
    tiles = [np.full((128, 4), rank, np.float32) for rank in range(3)]
    run = run_ranks(sum_of_ranks, [(tile, 3) for tile in tiles])
    for rank, out in enumerate(run.results):
        print(rank, out[0])
    print(run.total.instructions, "instructions")
