"""The problem of a setting: two calls of a target, the readout with special inputs and the proof with random ones.

A *target* is the implementation under test. Its *claims* say what it supports.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.cases.calls import call_of, forward_alone
from ringspec.conformance.cases.model import Outputs
from ringspec.conformance.cases.problems import over
from ringspec.conformance.readout.problem.geometry import Geometry, positions
from ringspec.conformance.readout.problem.pairs import Pairs, inputs_of, pairs_of
from ringspec.conformance.readout.problem.settings import BATCH, DTYPES, ODD_SLOTS, Setting
from ringspec.conformance.readout.problem.shapes import SCALE, Shape, geometry_for
from ringspec.conformance.readout.problem.spread import spread_out, with_mark
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Call
from ringspec.formats import load, store
from ringspec.problem.model import Array, Integers
from ringspec.vectors.catalogue import build
from ringspec.vectors.format.case import Case, Ring, TensorRecipe

# Relative to the sizes of a number's parts. Those of 16-bit formats leave room for 16-bit partial results and lse.
COARSE = 0.05
PROOF_DIM = 12  # no power of two, whose scale would hide in another factor
REASON = "Results that spell out the weight of each pair of tokens."
Asked = tuple[Case, Call]
TOLERANCES = {"float64": 2e-4, "float32": 2e-4, "float16": 0.02, "bfloat16": COARSE}


@dataclass(frozen=True)
class Problem:
    """Two calls of a target: the results of the first spell out what it computes, the second has random inputs.

    ``call`` and ``proof`` are these calls, in the same ring. What is read from ``call`` must also explain the results
    of ``proof``. ``cases`` are the cases of the two calls; their expected results decide whether the target passes.
    ``asked`` are the calls that the target gets. If ``spread`` is above 1, these calls have ``spread`` slots for each
    token of ``call`` and ``proof``, because the target needs whole tiles. In a problem about batches, they have one
    head, and batch entries in place of the heads of ``call`` and ``proof``. ``requires`` are the claims that the calls in
    ``asked`` need.
    """

    pairs: Pairs
    tolerance: float
    call: Call
    proof: Call
    asked: tuple[Call, Call]
    cases: tuple[Case, Case]
    requires: Mapping[str, Any]
    spread: int = 1

    @property
    def id(self) -> str:
        return self.cases[0].id

    @property
    def inputs(self) -> dict[str, Array]:
        """q, dy [W, H, n, dim] and k, v [W, Hkv, n, dim] of ``call``."""
        inputs = inputs_of(self.pairs, self.call.worker("q", 0).shape[3])
        return inputs if self.spread == 1 else with_mark(inputs)

    @property
    def of_other_sizes(self) -> bool:
        """Tell whether the problem has another number of workers or slots than most."""
        geometry = self.pairs.geometry
        return geometry.slots == ODD_SLOTS or f"-w{geometry.workers}" in self.id

    def results(self, outputs: Sequence[Outputs]) -> list[Outputs]:
        """Return the results of ``call`` and ``proof``, given the outputs of the calls in ``asked``."""
        if self.pairs.geometry.batches:
            return [{name: exchanged(x) for name, x in one.items()} for one in outputs]
        if self.spread == 1:
            return list(outputs)
        return [
            {name: tuple(x[:, :, :: self.spread] for x in shards) for name, shards in one.items()}
            for one in outputs
        ]

    def in_batches(self, results: Outputs) -> tuple[Call, Outputs]:
        """Return ``call`` and its results, in a problem about batches with batch entries in place of heads."""
        if not self.pairs.geometry.batches:
            return self.call, results
        return self.asked[0], {name: exchanged(x) for name, x in results.items()}


def terms_of(setting: Setting, geometry: Geometry, claims: Capabilities) -> dict[str, Any]:
    """Return the terms of the calls of a problem, apart from a scale of 1/sqrt(D)."""
    every: dict[str, Any] = {
        "scale": SCALE if setting.scaled else None,
        "causal": geometry.causal or None,
        "window": geometry.window,
        "cu_seqlens": geometry.documents and (*geometry.documents, geometry.tokens),
        "softcap": geometry.softcap,
    }
    if geometry.dropout is not None:
        every["dropout_p"] = geometry.dropout[0]
        every["dropout_seed"] = geometry.dropout[1] if "dropout" in claims.features else None
    return {name: value for name, value in every.items() if value is not None}


def tables_of(pairs: Pairs, claims: Capabilities) -> dict[str, NDArray]:
    """Return the tensors of a call over pairs of tokens, [a, h, i, (b, j)]: bias and, without counters, keep."""
    counted = "dropout" in claims.features or pairs.keep is None
    keep = None if counted else np.asarray(pairs.keep, bool)
    return {name: x for name, x in (("bias", pairs.bias), ("keep", keep)) if x is not None}


def problem(setting: Setting, storage: str, shape: Shape, claims: Capabilities) -> Problem:
    """Build the problem of a setting: its two calls, and a case for each."""
    workers, heads, group, spread = shape.workers, shape.heads, shape.group, shape.spread
    id, geometry = setting.id, geometry_for(setting, shape, claims)
    layout, circulation, direction = geometry.layout, geometry.circulation, geometry.direction
    pairs = pairs_of(geometry, shape.dim)
    terms = terms_of(setting, geometry, claims)

    def asked(id: str, dim: int, inputs: Mapping[str, Array] | None, spread: int = 1) -> Asked:
        """Return a case and its call, with inputs [W, heads, n, dim]; None: random inputs.

        If ``spread`` is above 1, only the call has the inputs. The case does not have them, and is not used to judge
        results.
        """
        slots = shape.slots * spread
        table = positions(layout, workers, slots) if spread > 1 else geometry.position
        order = np.argsort(table.ravel(), kind="stable")[len(geometry.padding) :]
        whole = {name: in_order(x, order) for name, x in (inputs or {}).items()}
        given: dict[str, Any] = {}
        if spread == 1:
            given = {name: TensorRecipe("values", values=x.tolist()) for name, x in whole.items()}
        if pairs.dlse is not None:
            chosen = in_order(pairs.dlse[..., None], order)[..., 0].tolist()
            given["dlse"] = TensorRecipe("values", values=chosen) if inputs else True
        for name, table in tables_of(pairs, claims).items():
            whole_table = in_order(table, order)[..., order].tolist()
            given[name] = TensorRecipe("values", values=whole_table)
        if pairs.sinks is not None:
            given["sinks"] = TensorRecipe("values", values=pairs.sinks.tolist())
        dtype, tokens = DTYPES[storage], len(order)
        dense = build.case(
            id, REASON, "", S=tokens, H=heads, Hkv=heads // group, D=dim, dtype=dtype, **given, **terms
        )  # fmt: skip
        rows = tuple(map(tuple, table.tolist())) if layout == "table" else None
        case = over(dense, id, Ring(workers, layout, circulation, direction, rows, rows))
        tensors = (
            {} if spread == 1 else {f"in.{name}": store(x, storage) for name, x in whole.items()}
        )
        call = call_of(case, tensors)
        call = dataclasses.replace(call, circulation=circulation, direction=direction)
        return case, call if "ring-backward" in claims.operations else forward_alone(call)

    proof_id, free = f"{id}-proof", claims.head_dims is None and claims.value_dims is None
    proof_dim = PROOF_DIM if free else shape.dim
    read, tolerance = inputs_of(pairs, shape.dim), TOLERANCES[storage]
    if spread == 1:
        first, second = asked(id, shape.dim, read), asked(proof_id, proof_dim, None)
        calls = first[1], second[1]
        cases, requires = (first[0], second[0]), first[0].requires
        if not geometry.batches:
            return Problem(pairs, tolerance, *calls, calls, cases, requires)
        apart = with_batches(first[1]), with_batches(second[1])
        return Problem(pairs, tolerance, *calls, apart, cases, {**requires, "batch": BATCH})
    random = inputs_in(asked(proof_id, proof_dim, None)[1])
    both = ((id, shape.dim, with_mark(read)), (proof_id, proof_dim, with_mark(random)))
    first, second = (asked(*one) for one in both)
    large = [asked(id, dim, spread_out(x, spread), spread) for id, dim, x in both]
    return Problem(
        pairs,
        tolerance,
        first[1],
        second[1],
        (large[0][1], large[1][1]),
        (first[0], second[0]),
        large[0][0].requires,
        spread,
    )


def with_batches(call: Call) -> Call:
    """Return a call with batch entries in place of its heads."""
    return dataclasses.replace(
        call, tensors={name: exchanged(x) for name, x in call.tensors.items()}
    )


def exchanged(shards: Sequence[NDArray]) -> tuple[NDArray, ...]:
    """Exchange the axes of batch and heads, the first two, in the array of each worker."""
    return tuple(np.ascontiguousarray(np.swapaxes(x, 0, 1)) for x in shards)


def inputs_in(call: Call) -> dict[str, Array]:
    """Return the inputs [W, heads, n, dim] of a call with batch size 1."""
    names = [name for name in ("q", "k", "v", "dy") if name in call.tensors]
    return {name: np.stack([load(x)[0] for x in call.tensors[name]]) for name in names}


def in_order(x: NDArray, order: Integers) -> NDArray:
    """Rearrange arrays of workers [W, heads, n, d] into one array [1, heads, S, d] in the order of the tokens."""
    workers, heads, slots, width = x.shape
    return x.swapaxes(0, 1).reshape(heads, workers * slots, width)[None, :, order]
