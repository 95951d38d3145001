"""ringspec: the executable specification of ring attention.

Read ``ringspec/spec/`` in this order, each a short file:

1. ``rules``           the table of rules; every other file names the ones that it states
2. ``problem``         tensors, rows, columns and terms: what an attention problem consists of
3. ``options``         the keywords of every function and their checks
4. ``masks``           who may attend to whom
5. ``dropout``         the counter-based keep mask
6. ``attention``       dense attention and its gradient: the definition
7. ``online_softmax``  the running state (m, l, o): start, absorb, merge, finish
8. ``block_attention`` one query block against one key block, forward and backward
9. ``layout``          which token lies on which worker
10. ``schedule``       who sends what to whom, as data, and the validator
11. ``worker``         what one worker holds, receives and sends
12. ``ring_forward``   the forward pass of one worker
13. ``ring_backward``  the backward pass of one worker, both circulations
14. ``ring``           the whole ring in one process
15. ``cost``, ``show`` what it costs, and how it prints

>>> import numpy as np
>>> import ringspec as rs
>>> q = k = v = np.ones((1, 2, 8, 4))
>>> float(abs(rs.ring(q, k, v, workers=4, causal=True).o - rs.attention(q, k, v, causal=True).o).max())
0.0
"""

from ringspec.errors import RingspecError
from ringspec.recipes import RECIPES, Recipe
from ringspec.spec.attention import Forward, Gradients, attention, attention_backward
from ringspec.spec.cost import Cost, cost, timeline
from ringspec.spec.layout import Layout, shard, unpermute, unshard
from ringspec.spec.ring import Run, WorkerResult, ring
from ringspec.spec.schedule import (
    Schedule,
    backward_schedule,
    cp_offset,
    forward_schedule,
    validate,
)
from ringspec.tensorfile import read_tensors, write_tensors

__version__ = "0.1.0"
SPEC_VERSION = "1.0"

__all__ = [
    "RECIPES",
    "SPEC_VERSION",
    "Cost",
    "Forward",
    "Gradients",
    "Layout",
    "Recipe",
    "RingspecError",
    "Run",
    "Schedule",
    "WorkerResult",
    "__version__",
    "attention",
    "attention_backward",
    "backward_schedule",
    "cost",
    "cp_offset",
    "forward_schedule",
    "read_tensors",
    "ring",
    "shard",
    "timeline",
    "unpermute",
    "unshard",
    "validate",
    "write_tensors",
]
