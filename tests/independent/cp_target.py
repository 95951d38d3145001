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
    SCHEME_TERMS,
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
    features=(*SCHEME_FEATURES, *SCHEME_TERMS, "prefix"),
    formats=("float32",),
)
PLAIN = ("scheme", "mesh", "terms")
TABLES = ("index_q", "index_k", "heads_q", "heads_k")


def job_of(call: Call, dtype: Any = np.float64, batch: int = 0) -> dict[str, Any]:
    """One element of a call's batch as plain data, without the batch axis."""
    job: dict[str, Any] = {name: getattr(call, name) for name in PLAIN}
    job |= {name: getattr(call, name).tolist() for name in TABLES}
    job |= {name: getattr(call, name)[:, 0].tolist() for name in ("position_q", "position_k")}
    sinks = {"sinks": [x.astype(dtype) for x in call.tensors.get("sinks", ())] or None}
    rest = {name: each for name, each in call.tensors.items() if name != "sinks"}
    job |= {"batch": batch} | sinks
    return job | {
        name: [x[min(batch, len(x) - 1)].astype(dtype) for x in each] for name, each in rest.items()
    }


def joined(name: str, parts: Any) -> Any:
    """The results of the elements of a batch; dsinks are sums over the batch."""
    return (sum(parts) if name == "dsinks" else np.stack(parts)).astype(np.float32)


def target(fault: str | None = None, dtype: Any = np.float64, **variant: Any) -> NumPyTarget:
    """The program as a target, computing in ``dtype``; ``variant`` are other correct ways: chunk, backwards."""

    def split(call):
        with np.errstate(all="ignore"):
            every = [
                Program(job_of(call, dtype, b), fault, **variant).run()
                for b in range(len(call.worker("q", 0)))
            ]
        if fault == "first-of-the-batch":
            every = every[:1] * len(every)
        return {
            name: [joined(name, parts) for parts in zip(*(one[name] for one in every), strict=True)]
            for name in every[0]
        }

    return NumPyTarget(split, CLAIMS, name="independent context parallelism")


right = target()
