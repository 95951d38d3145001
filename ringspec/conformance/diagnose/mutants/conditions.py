"""Predicates that tell whether a bug can change the results of a call.

A call is one request to the program under test: a ring, a single block, or a merge of partial results. Each docstring
states when its predicate is true.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ringspec.conformance.target.protocol import Call

Condition = Callable[[Call], bool]


def when(*conditions: Condition) -> Condition:
    """All ``conditions`` are true."""
    return lambda call: all(condition(call) for condition in conditions)


def either(*conditions: Condition) -> Condition:
    return lambda call: any(condition(call) for condition in conditions)


def ring(least: int = 1) -> Condition:
    """The call is a ring of at least ``least`` workers."""
    return lambda call: call.operation == "ring" and call.workers >= least


def anything(call: Call) -> bool:
    """Always true."""
    return True


def attends(call: Call) -> bool:
    """The call computes attention; it is not only a merge."""
    return call.operation != "merge"


def merges(call: Call) -> bool:
    """The call merges partial results: a ring of at least two workers, or a merge."""
    return call.operation == "merge" or ring(2)(call)


def forward(call: Call) -> bool:
    return "forward" in call.passes


def in_parts(call: Call) -> bool:
    """Blocks may hold only part of the keys: the call is a ring of at least two workers, or a single block."""
    return call.operation == "block" or ring(2)(call)


def backward(call: Call) -> bool:
    return "backward" in call.passes


def circulates(*ways: str) -> Condition:
    return lambda call: call.circulation in ways


def layout(*names: str) -> Condition:
    return lambda call: call.layout in names


def term(*names: str) -> Condition:
    """The call passes every option in ``names``, with a value other than None or False."""
    return lambda call: all(given(call, name) for name in names)


def without(*names: str) -> Condition:
    return lambda call: not any(given(call, name) for name in names)


def given(call: Call, name: str) -> bool:
    value = call.terms.get(name)
    return value is not None and value is not False


def tensor(*names: str) -> Condition:
    """The call passes every tensor in ``names``."""
    return lambda call: all(name in call.tensors for name in names)


def packed(call: Call) -> bool:
    """The call packs several documents into one sequence, by ``cu_seqlens`` or segment ids."""
    return "segments_q" in call.tensors or call.terms.get("cu_seqlens") is not None


def drops(call: Call) -> bool:
    return "keep" in call.tensors or call.terms.get("dropout_p", 0.0) > 0


def grouped(call: Call) -> bool:
    """Several query heads read one key head."""
    return attends(call) and call.worker("q", 0).shape[1] > call.worker("k", 0).shape[1]


def batches(least: int) -> Condition:
    return lambda call: attends(call) and call.worker("q", 0).shape[0] >= least


def hides(call: Call) -> bool:
    """Some pair of a query and a key may be masked."""
    return (
        any(given(call, name) for name in ("causal", "window"))
        or packed(call)
        or padded(call)
        or any(name in call.tensors for name in ("mask", "bound_min", "bias"))
    )


def padded(call: Call) -> bool:
    """Some slot (place in a worker's block) holds no token."""
    return any(x is not None and bool((x < 0).any()) for x in (call.index_q, call.index_k))


def square(call: Call) -> bool:
    """A block has as many queries as keys."""
    return attends(call) and call.worker("q", 0).shape[2] == call.worker("k", 0).shape[2]


def unequal(call: Call) -> bool:
    """The number of queries differs from the number of keys."""
    return attends(call) and tokens(call.index_q) != tokens(call.index_k)


def tokens(index: np.ndarray | None) -> int:
    return 0 if index is None else int((index >= 0).sum())
