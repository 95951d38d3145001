"""ringspec: the executable specification of ring attention.

Read these short files in this order. They lie in ``ringspec/spec/``, except ``model``, which lies in
``ringspec/problem/``:

1. ``essence``         ring attention in one page: forward and backward, without options
2. ``model``           what a call consists of: tensors, rows, columns, terms, and the block of a computation
3. ``masks``           which query attends to which key
4. ``dropout``         the counter-based keep mask
5. ``definition``      dense attention and its gradient
6. ``online_softmax``  the running state (m, l, o): start, absorb, merge, finish
7. ``block``           one query block against one key block, forward and backward
8. ``layout``          which token lies on which worker; the causal offset of two blocks
9. ``schedule``        who sends what to whom, as data
10. ``worker``         what one worker holds, receives and sends
11. ``ring_forward``   the forward pass of one worker
12. ``ring_backward``  the backward pass of one worker, both circulations
13. ``rules``          the index of rules; every other file names the ones that it states

``recipe.to_p(x)`` and the like round x where ``ringspec/recipes.py`` says; in float64 they change nothing.

Before a call reaches these files, ``ringspec/problem/`` validates it:

14. ``checks``         each argument in the one form that the rest works with, or an error
15. ``options``        the keywords of every function

and ``ringspec/rings/`` runs the whole ring in one process:

16. ``attention``, ``layouts``, ``schedules``  public functions: arguments checked, then the specification
17. ``ring``, ``lockstep``, ``run``  the whole ring, its loop over workers, and its result
18. ``validator``      verifies a schedule, or says what is wrong with it
19. ``cost``, ``show`` what a ring costs, and how it prints

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
