"""Convert a call to a problem whose inputs are explicit numbers, from which smaller calls can be made.

The tensors are global, not divided among workers. :func:`case_of` makes a golden case from such a problem, so that
results can be compared with exact values (:func:`ringspec.conformance.cases.problems.judged`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.cases.calls import (
    OF_KEYS,
    OF_QUERIES,
    PAIRS,
    QUERY_ROWS,
    call_of,
    with_claimed_passes,
)
from ringspec.conformance.cases.problems import tensors_of
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Call, PerWorker
from ringspec.formats import load
from ringspec.problem.options import default_scale
from ringspec.vectors.format.case import Case, CaseFormats, Inputs, Ring, Shape, TensorRecipe
from ringspec.vectors.format.inputs import BOOLEANS, INTEGERS, NAMES
from ringspec.vectors.format.requires import requires

BOTH = ("forward", "backward")
OF_FORWARD = (
    "o",
    "lse",
)  # inputs of a call of only the backward pass; they follow from the other inputs


@dataclass(frozen=True)
class Explicit:
    """A problem with explicit numbers.

    ``tensors``: global arrays by name, in float64, int64 or bool. ``ring``: None for a block, and for
    a scheme, which has ``ranks``. The other fields are those
    of :class:`ringspec.vectors.format.case.Case`.
    """

    operation: str
    passes: tuple[str, ...]
    formats: CaseFormats
    ring: Ring | None
    terms: Mapping[str, Any]
    tensors: Mapping[str, NDArray]
    ranks: int = 1

    @property
    def shape(self) -> Shape:
        q, k, v = (self.tensors[name].shape for name in ("q", "k", "v"))
        return Shape(q[0], q[1], k[1], q[2], k[2], q[3], v[3])

    @property
    def workers(self) -> int:
        return self.ranks if self.ring is None else self.ring.workers

    @property
    def default_scale(self) -> bool:
        """Tell whether scale is 1/sqrt(D)."""
        return bool(self.terms["scale"] == default_scale(self.shape.D))

    def key(self) -> tuple[Any, ...]:
        """Return a hashable value that is equal for equal problems."""
        arrays = tuple((name, x.shape, x.tobytes()) for name, x in sorted(self.tensors.items()))
        return self.passes, self.ring, tuple(sorted(self.terms.items())), arrays


def explicit_of(call: Call) -> Explicit:
    """Collect the inputs of a ring or block call from its workers."""
    ring = None
    if call.operation == "ring":
        ring = Ring(call.workers, call.layout, call.circulation, call.direction)
        if call.layout == "table":
            tables = (table.tolist() for table in (call.index_q, call.index_k) if table is not None)
            ring = Ring(call.workers, "table", call.circulation, call.direction, *tables)
    alone = call.operation == "ring" and call.passes == ("backward",)
    left_out = OF_FORWARD if alone else ()
    found = {n: whole(call, n, x) for n, x in call.tensors.items() if n not in left_out}
    found |= given_positions(call)
    tensors = {name: found[name] for name in NAMES if name in found}
    passes = BOTH if alone else call.passes
    formats = CaseFormats(**call.formats)
    return Explicit(call.operation, passes, formats, ring, dict(call.terms), tensors)


def whole(call: Call, name: str, shards: PerWorker) -> NDArray:
    """Join the parts of the workers to one global tensor."""
    arrays = [np.array(x) if x.dtype.kind in "ib" else load(x) for x in shards]
    same = all(np.array_equal(x, arrays[0]) for x in arrays)
    if name == "sinks" or (name in PAIRS and arrays[0].shape[2] == 1 and same):
        return arrays[0]
    axis = 2 if name in (*OF_QUERIES, *OF_KEYS, *PAIRS) else -1
    of_queries = name in (*OF_QUERIES, *PAIRS, *QUERY_ROWS)
    return in_order(arrays, call.index_q if of_queries else call.index_k, axis)


def in_order(arrays: list[NDArray], index: NDArray[np.int64] | None, axis: int) -> NDArray:
    """Concatenate the workers' arrays along an axis, in the order of the tokens, without padding."""
    assert index is not None
    tokens, every = index.ravel(), np.concatenate(arrays, axis=axis)
    slots = np.argsort(tokens, kind="stable")[int((tokens < 0).sum()) :]
    return np.take(every, slots, axis=axis)


def given_positions(call: Call) -> dict[str, NDArray]:
    """Return ``positions_q`` and ``positions_k``.

    Positions that are just the token numbers plus an offset are left out.
    """
    found = {}
    for name, index, position, first in (
        ("positions_q", call.index_q, call.position_q, call.terms.get("q_offset", 0)),
        ("positions_k", call.index_k, call.position_k, 0),
    ):
        if index is not None and position is not None:
            rows = in_order(list(position), index, -1)
            if not (rows == first + np.arange(rows.shape[1])).all():
                found[name] = rows
    return found


def case_of(problem: Explicit, id: str) -> Case:
    """Make the golden case of a problem. Errors in making or checking its inputs are raised unchanged."""
    tensors = {
        name: TensorRecipe("values", values=x.tolist()) for name, x in problem.tensors.items()
    }
    made = Case(
        id, "", problem.operation, problem.passes, (), (), problem.shape, problem.formats,
        dict(problem.terms), problem.ring, Inputs(id, tensors), "full",
    )  # fmt: skip
    return dataclasses.replace(made, requires=requires(made))


def call_for(claims: Capabilities, case: Case) -> Call:
    """Make the call of a problem, limited to the passes that the target claims."""
    tensors = tensors_of(case)
    return with_claimed_passes(call_of(case, tensors), case, claims, lambda: tensors)


def is_number(name: str) -> bool:
    """Tell whether an input holds floating-point numbers."""
    return name not in BOOLEANS and name not in INTEGERS
