"""Attention near the speed of this machine's matrix products; :mod:`ringspec.spec` remains the definition.

The specification is written to be read; this package is for long sequences. It computes the same results
in tiles, with NumPy and threads, in float64 or float32. The memory that it needs grows linearly with the
sequence length. Nothing in ``ringspec.spec`` imports this package; ``ringspec.ring`` accepts its functions as
arguments:

>>> import numpy as np, ringspec as rs
>>> from ringspec import fast
>>> q = k = v = np.ones((1, 2, 8, 4))
>>> run = rs.ring(q, k, v, v, workers=4, causal=True, **fast.pieces(threads=2))
>>> bool(abs(run.dq - fast.attention_backward(q, k, v, v, causal=True).dq).max() < 1e-15)
True

Its modules, in reading order:

``plan``                        finds the tiles that a mask hides, from positions alone
``job``                         one attention problem, or one block of a ring, prepared for tiling
``forward``, ``backward``       the passes over one head
``passes``                      splits a pass over all heads into tasks
``dense``, ``blocks``, ``merge``   the public functions
``team``, ``threads``, ``forks``   running tasks on threads
``kept``                        a cache of values derived from read-only arrays
"""

from ringspec.fast.blocks import block_backward, block_forward, blocks
from ringspec.fast.dense import attention, attention_backward
from ringspec.fast.merge import accumulate, merge_states, pieces
from ringspec.fast.plan import TileSizes

__all__ = [
    "TileSizes",
    "accumulate",
    "attention",
    "attention_backward",
    "block_backward",
    "block_forward",
    "blocks",
    "merge_states",
    "pieces",
]
