"""ringspec: the executable specification of ring attention.

Read ``ringspec/spec/`` in this order, each a short file:

1. ``essence``         ring attention in one page: forward and backward, without options
2. ``rules``           the table of rules; every other file names the ones that it states
3. ``problem``         tensors, rows, columns and terms: what an attention problem consists of
4. ``checks``          each argument in the one form that the rest works with, or an error
5. ``options``         the keywords of every function
6. ``masks``           who may attend to whom
7. ``dropout``         the counter-based keep mask
8. ``attention``       dense attention and its gradient: the definition
9. ``online_softmax``  the running state (m, l, o): start, absorb, merge, finish
10. ``block_attention`` one query block against one key block, forward and backward
11. ``layout``         which token lies on which worker
12. ``schedule``       who sends what to whom, as data
13. ``validator``      the proof that a schedule is one
14. ``worker``         what one worker holds, receives and sends
15. ``ring_forward``   the forward pass of one worker
16. ``ring_backward``  the backward pass of one worker, both circulations
17. ``ring``, ``run``  the whole ring in one process, and its result
18. ``cost``, ``show`` what it costs, and how it prints

>>> import numpy as np
>>> import ringspec as rs
>>> q = k = v = np.ones((1, 2, 8, 4))
>>> run = rs.ring(q, k, v, workers=4, causal=True)
>>> bool(abs(run.o - rs.attention(q, k, v, causal=True).o).max() < 1e-15)
True
"""

from ringspec.errors import RingspecError
from ringspec.recipes import RECIPES, Recipe
from ringspec.spec.attention import (
    Forward,
    Gradients,
    attention,
    attention_backward,
    attention_block_backward,
    merge_partials,
)
from ringspec.spec.cost import Cost, cost, timeline
from ringspec.spec.layout import Layout, make_layout, shard, unpermute, unshard
from ringspec.spec.ring import ring
from ringspec.spec.run import Run, WorkerResult
from ringspec.spec.schedule import Schedule, backward_schedule, cp_offset, forward_schedule
from ringspec.spec.validator import validate
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
    "attention_block_backward",
    "backward_schedule",
    "cost",
    "cp_offset",
    "forward_schedule",
    "make_layout",
    "merge_partials",
    "read_tensors",
    "ring",
    "shard",
    "timeline",
    "unpermute",
    "unshard",
    "validate",
    "write_tensors",
]
