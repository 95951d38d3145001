"""Convert golden cases to calls of a target and to the expected tensors of each worker.

A golden case is a problem with stored correct results. A call is one request to the target, the program under test. The
tensors of a golden case are global; those of a call are lists of one array per worker, in the order of the worker's
tokens. Dense attention is called as a ring of one worker. A call contains no expected values, with one exception: a
call of only the backward pass needs the rounded o and lse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Call, PerWorker
from ringspec.conformance.target.results import frozen, read_only
from ringspec.truth.sharded import layout_tensors, slots_of, tables_for
from ringspec.vectors.format.case import Case
from ringspec.vectors.format.inputs import inputs_of
from ringspec.vectors.generate import arguments_of

Tensors = Mapping[str, NDArray]
OF_QUERIES = ("q", "dy", "dlse", "lse", "delta", "o")
OF_KEYS = ("k", "v")
POSITIONS = ("positions_q", "positions_k")
PAIRS = ("bias", "mask", "keep")
QUERY_ROWS = ("segments_q", "bound_min", "bound_max")
SEGMENTS = ("segments_q", "segments_k")
GRADIENTS = ("dq", "dk", "dv", "dsinks", "dbias")


@dataclass(frozen=True)
class ExpectedTensor:
    """The correct values of one tensor; each field holds one array per worker.

    ``values``: correctly rounded to float64. ``rounded``: correctly rounded to the format of the case. ``scale``: the
    row scales, by which the errors of rows are divided; for o, dq, dk and dv they lack the last axis. ``real``: bool
    [n], True for slots (places in the worker's block) that hold a token; None if the tensor has no slots (dsinks, a
    bias shared by all queries).
    """

    values: PerWorker
    rounded: PerWorker
    scale: PerWorker
    real: PerWorker | None = None


def whole_inputs(case: Case, tensors: Tensors) -> dict[str, NDArray]:
    """Return the global inputs by name. Inputs that are not stored are drawn as the case says."""
    stored = {name[3:]: x for name, x in tensors.items() if name.startswith("in.")}
    return stored or inputs_of(case)


def call_of(case: Case, tensors: Tensors) -> Call:
    """Make the call of a golden case of any operation except 'schedule'.

    ``tensors``: from :meth:`ringspec.vectors.VectorSet.tensors`. The arrays of the call are read-only copies in storage
    dtypes. An error in drawing the inputs is raised unchanged.

    >>> from ringspec.vectors import open_set
    >>> core = open_set("core")
    >>> call = call_of(core.case("ring/zigzag-causal-w4"), core.tensors("ring/zigzag-causal-w4"))
    >>> call.workers, call.worker("q", 3).shape, call.index_q[3].tolist()
    (4, (1, 2, 4, 4), [6, 7, 8, 9])
    """
    assert case.formats is not None
    given = whole_inputs(case, tensors)
    formats = dataclasses.asdict(case.formats)
    if case.operation == "merge":
        parts = {name: frozen([x]) for name, x in given.items()}
        return Call(case.id, "merge", case.passes, 1, parts, {}, formats)
    index = slot_tables(case, tensors)
    workers = len(index["layout.q"])
    held = {n: held_by_workers(n, x, index) for n, x in given.items() if n not in POSITIONS}
    ring = case.ring
    return Call(
        case.id,
        "block" if case.operation == "block" else "ring",
        case.passes,
        workers,
        held,
        dict(case.terms),
        formats,
        "contiguous" if ring is None else ring.layout,
        "kv" if ring is None else ring.circulation,
        1 if ring is None else ring.direction,
        index_q=read_only(index["layout.q"]),
        index_k=read_only(index["layout.k"]),
        position_q=read_only(index["position.q"]),
        position_k=read_only(index["position.k"]),
    )


def slot_tables(case: Case, tensors: Tensors) -> dict[str, NDArray]:
    """Return ``layout.q``, ``layout.k`` [W, n] and ``position.q``, ``position.k`` [W, 1|B, n].

    They hold the token in each slot, and its position. A case of dense attention has W = 1.
    """
    names = ("layout.q", "layout.k", "position.q", "position.k")
    if all(name in tensors for name in names):
        return {name: tensors[name] for name in names}
    problem, _, tables = arguments_of(case, whole_inputs(case, tensors))
    return layout_tensors(problem, tables or tables_for(problem, "contiguous", 1, {}))


def held_by_workers(name: str, x: NDArray, index: Tensors) -> PerWorker:
    """Divide a global input among the workers."""
    if name == "sinks":
        return frozen([x] * len(index["layout.q"]))
    if name in PAIRS and x.shape[2] == 1:
        return frozen([x] * len(index["layout.q"]))
    if name in PAIRS or name in OF_QUERIES:
        return frozen(slots_of(x, index["layout.q"], 2, 0))
    if name in OF_KEYS:
        return frozen(slots_of(x, index["layout.k"], 2, 0))
    side = "layout.q" if name in QUERY_ROWS else "layout.k"
    return frozen(slots_of(np.atleast_2d(x), index[side], 1, -1 if name in SEGMENTS else 0))


def expected_of(case: Case, tensors: Tensors) -> dict[str, ExpectedTensor]:
    """Return the correct values of each result, by name; ``tensors`` must have all rows, not only a sample."""
    sums = ("dsinks_sum", "dbias_sum")
    names = [name.split(".")[1] for name in sorted(tensors) if name.endswith(".float64")]
    return {name: expected_tensor(case, name, tensors) for name in names if name not in sums}


def expected_tensor(case: Case, name: str, tensors: Tensors) -> ExpectedTensor:
    assert case.formats is not None
    storage = case.formats.statistics if name in ("lse", "dsinks") else case.formats.outputs
    values, scale = tensors[f"out.{name}.float64"], tensors[f"scale.{name}"]
    rounded = tensors[f"out.{name}.{storage}"]
    if case.operation != "ring":
        values, rounded, scale = values[None], rounded[None], scale[None]
    side = "k" if name in ("dk", "dv") else "q"
    real = None
    if case.operation == "ring":
        slots = tensors[f"layout.{side}"]
        if name not in ("dsinks", "dbias") or (name == "dbias" and values.shape[3] != 1):
            real = tuple(slots >= 0)
    return ExpectedTensor(tuple(values), tuple(rounded), tuple(scale), real)


def passes_for(case: Case, claims: Capabilities) -> tuple[str, ...]:
    """Return the passes of a case that a target claims; all passes if it claims none."""
    if case.operation not in ("attention", "ring") or len(case.passes) == 1:
        return case.passes
    return tuple(one for one in case.passes if f"ring-{one}" in claims.operations) or case.passes


def way(claims: Capabilities) -> dict[str, Any]:
    """Choose a circulation (what travels) and a direction that the target claims.

    If possible, these are 'kv' (keys and values) and 1 (worker r sends to r + 1).
    """
    ways, directions = claims.circulations or ("kv",), claims.directions or (1,)
    return {
        "circulation": "kv" if "kv" in ways else ways[0],
        "direction": 1 if 1 in directions else directions[0],
    }


def with_claimed_passes(
    call: Call, case: Case, claims: Capabilities, whole: Callable[[], Tensors]
) -> Call:
    """Limit a call to the passes that the target claims (:func:`passes_for`).

    ``whole()`` returns the tensors of the case with all rows. If only the backward pass is called, its o and lse are
    taken from these tensors.
    """
    passes = passes_for(case, claims)
    if passes == case.passes:
        return call
    return forward_alone(call) if passes == ("forward",) else backward_alone(call, case, whole())


def forward_alone(call: Call) -> Call:
    """Limit a call to its forward pass."""
    tensors = {name: x for name, x in call.tensors.items() if name not in ("dy", "dlse")}
    return dataclasses.replace(call, passes=("forward",), tensors=tensors)


def backward_alone(call: Call, case: Case, tensors: Tensors) -> Call:
    """Limit a call to its backward pass, with the correctly rounded o and lse of the forward pass (RING-13).

    ``tensors`` must have all rows, not only a sample.
    """
    given: dict[str, Any] = {}
    for name, storage in (("o", call.formats["outputs"]), ("lse", call.formats["statistics"])):
        x = tensors[f"out.{name}.{storage}"]
        given[name] = frozen(x if case.operation == "ring" else x[None])
    return dataclasses.replace(call, passes=("backward",), tensors={**call.tensors, **given})
