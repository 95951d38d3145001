"""ringspec: the executable specification of ring attention.

``ringspec/spec/`` is the specification: short files, to be read in the order that :mod:`ringspec.spec` lists.
:mod:`ringspec.problem` validates the arguments of a call, and :mod:`ringspec.rings` runs a whole ring in one process.
:mod:`ringspec.schemes` has all other ways to split attention over ranks.

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
)
from ringspec.rings.cost import Cost, cost, timeline
from ringspec.rings.layouts import make_layout, shard, unpermute, unshard
from ringspec.rings.merging import merge_partials
from ringspec.rings.replay_as import replay_as
from ringspec.rings.ring import ring
from ringspec.rings.run import Run, WorkerResult
from ringspec.rings.schedules import backward_schedule, cp_offset, forward_schedule
from ringspec.rings.validator import validate
from ringspec.schemes.api import context_parallel
from ringspec.schemes.run import RankResult, SchemeRun
from ringspec.schemes.scheme import Scheme
from ringspec.spec.dense_backward import Gradients
from ringspec.spec.dense_forward import Forward
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
    "RankResult",
    "Recipe",
    "RingspecError",
    "Run",
    "Schedule",
    "Scheme",
    "SchemeRun",
    "WorkerResult",
    "__version__",
    "attention",
    "attention_backward",
    "attention_block_backward",
    "backward_schedule",
    "context_parallel",
    "cost",
    "cp_offset",
    "forward_schedule",
    "make_layout",
    "merge_partials",
    "read_tensors",
    "replay_as",
    "ring",
    "shard",
    "timeline",
    "unpermute",
    "unshard",
    "validate",
    "write_tensors",
]
