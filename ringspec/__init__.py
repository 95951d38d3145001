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

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ringspec.errors import RingspecError
from ringspec.recipes import RECIPES, Recipe
from ringspec.rings.attention import (
    attention,
    attention_backward,
    attention_block_backward,
)
from ringspec.rings.cost import Cost, cost, timeline
from ringspec.rings.layouts import make_layout, shard, unpermute, unshard
from ringspec.rings.ring import ring
from ringspec.rings.run import Run, WorkerResult
from ringspec.rings.schedules import backward_schedule, cp_offset, forward_schedule
from ringspec.rings.validator import validate
from ringspec.spec.dense_backward import Gradients
from ringspec.spec.dense_forward import Forward
from ringspec.spec.layout import Layout
from ringspec.spec.schedule import Schedule
from ringspec.tensorfile import read_tensors, write_tensors

if TYPE_CHECKING:
    from ringspec.rings.merging import merge_partials
    from ringspec.rings.replay_as import replay_as
    from ringspec.schemes.api import context_parallel
    from ringspec.schemes.run import RankResult, SchemeRun
    from ringspec.schemes.scheme import Scheme

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

# Names and their modules that are imported when first used: every process of a test would wait for them.
_LATER = {
    "RankResult": "ringspec.schemes.run",
    "Scheme": "ringspec.schemes.scheme",
    "SchemeRun": "ringspec.schemes.run",
    "context_parallel": "ringspec.schemes.api",
    "merge_partials": "ringspec.rings.merging",
    "merges": "ringspec.merges",
    "replay_as": "ringspec.rings.replay_as",
    "schemes": "ringspec.schemes",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_LATER[name])
    found = module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
