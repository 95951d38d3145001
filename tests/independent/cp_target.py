"""``cp_program.py`` as a target of ringspec, right or with a fault: ``ringspec check tests/independent/cp_target.py:right``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from ringspec.conformance.adapters.numpy_lists import NumPyTarget
from ringspec.conformance.target.capabilities import (
    SCHEME_FEATURES,
    SCHEME_OPERATIONS,
    SCHEMES,
    Capabilities,
)
from ringspec.conformance.target.protocol import Call

# `ringspec check` loads this file by its path, pytest as independent.cp_target.
if str(Path(__file__).parents[1]) not in sys.path:
    sys.path.append(str(Path(__file__).parents[1]))

from independent.cp_program import Program

CLAIMS = Capabilities(
    operations=SCHEME_OPERATIONS,
    schemes=SCHEMES,
    layouts=("contiguous", "striped", "zigzag", "zigzag_per_document", "zigzag_padded"),
    masks=("causal", "window", "documents"),
    features=(*SCHEME_FEATURES, "prefix"),
    formats=("float32",),
)
PLAIN = ("scheme", "mesh", "terms")
TABLES = ("index_q", "index_k", "heads_q", "heads_k")


def job_of(call: Call, dtype: Any = np.float64) -> dict[str, Any]:
    """A call as plain data, without the batch axis."""
    job: dict[str, Any] = {name: getattr(call, name) for name in PLAIN}
    job |= {name: getattr(call, name).tolist() for name in TABLES}
    job |= {name: getattr(call, name)[:, 0].tolist() for name in ("position_q", "position_k")}
    return job | {name: [x[0].astype(dtype) for x in each] for name, each in call.tensors.items()}


def target(fault: str | None = None, dtype: Any = np.float64, **variant: Any) -> NumPyTarget:
    """The program as a target, computing in ``dtype``; ``variant`` are other correct ways: chunk, backwards."""

    def split(call):
        with np.errstate(all="ignore"):
            found = Program(job_of(call, dtype), fault, **variant).run()
        return {name: [x[None].astype(np.float32) for x in each] for name, each in found.items()}

    return NumPyTarget(split, CLAIMS, name="independent context parallelism")


right = target()
