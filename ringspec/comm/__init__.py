"""A ring over several processes, called ranks: each rank runs one worker of the ring.

``ringspec.ring`` runs all workers in lockstep in one process. Here every worker is a separate process
(or thread) that calls the same step functions and exchanges raw buffers. In reading order:

``traffic``     the messages between the ranks in each step of a schedule
``wire``        a block as one buffer of bytes: a header of fixed size, then its arrays
``links``       the protocol by which a rank sends buffers to other ranks: start a send, start a receive, wait
``circulate``   the loop of one rank over the steps: send inputs, compute, wait for accumulators, add, send them
``agreement``   the comparison of arguments and errors between all ranks
``part``        the work of one rank: it is a worker of a ring, which may compute only a part of the batch
``ring``        ring attention on all ranks: compare arguments, compute, gather the results, combine them
``threads``     an implementation of the links between threads of one process
``control``     side messages: an error that stops all ranks, and the question 'are you alive?'
``mpi``         an implementation of the links over MPI (extra ``mpi``), and ``ring_mpi``

>>> import numpy as np
>>> from ringspec.comm.threads import ring_in_threads
>>> from ringspec.rings.ring import ring
>>> q = k = v = dy = np.arange(16.0).reshape(1, 1, 8, 2) / 16
>>> run = ring_in_threads(q, k, v, dy, workers=4, causal=True)
>>> np.array_equal(run.dq, ring(q, k, v, dy, workers=4, causal=True).dq)
True
"""

from ringspec.comm.mpi import ring_mpi
from ringspec.comm.ring import ring_over

__all__ = ["ring_mpi", "ring_over"]
