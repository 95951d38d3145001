"""Divide a call into the arrays of each rank, and gather the results of the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringspec.conformance.target.protocol import (
    EVERY_TABLE,
    RESULTS,
    Call,
    Mutated,
    Refused,
    Result,
)


def check_operation(call: Call) -> None:
    """Raise Refused for an operation that a differentiable function of one worker cannot compute."""
    whole = call.operation in ("ring", "context_parallel")
    if not whole and (call.operation, *call.passes) != ("block", "forward"):
        raise Refused(f"{call.operation} {' and '.join(call.passes)}")


def local_arrays(call: Call, rank: int) -> dict[str, np.ndarray]:
    """Return one rank's inputs and its rows of the layout tables."""
    arrays = {name: per_worker[rank] for name, per_worker in call.tensors.items()}
    for name in EVERY_TABLE:
        table = getattr(call, name)
        if table is not None:
            arrays[name] = table[rank]
    return arrays


def raise_changed(replies: list[dict[str, Any]]) -> None:
    for rank, reply in enumerate(replies):
        if reply.get("changed"):
            raise Mutated(f"worker {rank} changed its input {', '.join(reply['changed'])}")


def gathered(arrays: list[dict[str, np.ndarray]]) -> Result:
    """Gather the results of all ranks; if only some ranks return a result, it is None for the others."""
    result = Result()
    for name in RESULTS:
        if any(name in one for one in arrays):
            setattr(result, name, [one.get(name) for one in arrays])
    return result
