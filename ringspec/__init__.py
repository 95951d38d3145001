"""ringspec: the executable specification of ring attention.

Read ``ringspec/spec/`` in this order, each a short file:

1. ``essence``         ring attention in one page: forward and backward, without options
2. ``masks``           who may attend to whom
3. ``dropout``         the counter-based keep mask
4. ``definition``      dense attention and its gradient
5. ``online_softmax``  the running state (m, l, o): start, absorb, merge, finish
6. ``block``           one query block against one key block, forward and backward
7. ``layout``          which token lies on which worker
8. ``schedule``        who sends what to whom, as data
9. ``worker``          what one worker holds, receives and sends
10. ``forward``        the forward pass of one worker
11. ``backward``       the backward pass of one worker, both circulations
12. ``rules``          the index of rules; every other file names the ones that it states

Around it lie ``ringspec/problem/``, what a call consists of:

13. ``model``          tensors, rows, columns and terms
14. ``checks``         each argument in the one form that the rest works with, or an error
15. ``options``        the keywords of every function

and ``ringspec/rings/``, the whole ring in one process:

16. ``attention``, ``layouts``, ``schedules``  public functions: arguments checked, then the specification
17. ``ring``, ``lockstep``, ``run``  the whole ring, its loop over workers, and its result
18. ``validator``      the proof that a schedule is one
19. ``cost``, ``show`` what it costs, and how it prints

>>> import numpy as np
>>> import ringspec as rs
>>> q = k = v = np.ones((1, 2, 8, 4))
>>> run = rs.ring(q, k, v, workers=4, causal=True)
>>> bool(abs(run.o - rs.attention(q, k, v, causal=True).o).max() < 1e-15)
True
"""

from ringspec.errors import RingspecError
from ringspec.recipes import RECIPES, Recipe
from ringspec.rings.attention import (
    attention,
    attention_backward,
    attention_block_backward,
    merge_partials,
)
from ringspec.rings.cost import Cost, cost, timeline
from ringspec.rings.layouts import make_layout, shard, unpermute, unshard
from ringspec.rings.ring import ring
from ringspec.rings.run import Run, WorkerResult
from ringspec.rings.schedules import backward_schedule, cp_offset, forward_schedule
from ringspec.rings.validator import validate
from ringspec.spec.definition import Forward, Gradients
from ringspec.spec.layout import Layout
from ringspec.spec.schedule import Schedule
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
