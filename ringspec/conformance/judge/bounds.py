"""Compare the result of one call with the correct values: every worker, every tensor, a bound for each row.

The bound of a row's error is ``factor * row scale + floor`` (:mod:`ringspec.compare.bounds`). It depends on the recipe,
which says where the program under test rounds (:mod:`ringspec.conformance.judge.recipe`). The row scale is the
magnitude that a row's error is divided by. Statistical tests of whole tensors are in
:mod:`ringspec.conformance.judge.noise`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ringspec.compare.bounds import Sizes, bound_factors, bound_floors, merge_factors
from ringspec.compare.verdict import judge_tensor
from ringspec.conformance.cases.calls import ExpectedTensor, Tensors, expected_of
from ringspec.conformance.cases.model import Outputs
from ringspec.conformance.judge.recipe import recipe_for
from ringspec.conformance.judge.scales import with_all_rows
from ringspec.conformance.report.records import Finding
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.conventions import settle_empty_rows
from ringspec.conformance.target.protocol import Call, PerWorker
from ringspec.formats import load
from ringspec.vectors.format.case import Case

Expected = Mapping[str, ExpectedTensor]
MAGNITUDES = ("q", "k", "v", "dy", "dlse")


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The parts of the bounds that are the same for all rows of a tensor: ``factors`` and ``floors`` by tensor."""

    factors: dict[str, float]
    floors: dict[str, float]


def compared(
    claims: Capabilities, case: Case, tensors: Tensors, call: Call, outputs: Outputs
) -> tuple[Finding, ...]:
    """Compare the outputs of a call; return one :class:`Finding` for each tensor of each worker.

    ``tensors`` are those of the case, with ``out.*`` (correct values) and ``scale.*`` (row scales); ``call`` is made
    from the case. Every element of every output is compared, even if the case stores only sampled rows
    (:mod:`ringspec.conformance.judge.scales`). An lse that the program under test does not return is not compared.
    """
    expected = expected_of(case, with_all_rows(case, tensors))
    return findings_of(bounds_of(claims, call, expected), expected, outputs, claims)


def findings_of(
    bounds: Bounds, expected: Expected, outputs: Outputs, claims: Capabilities
) -> tuple[Finding, ...]:
    findings = []
    for name, got in outputs.items():
        if name in expected:
            for worker, x in enumerate(got):
                findings.append(finding_of(name, worker, x, expected[name], bounds, claims))
    return tuple(findings)


def finding_of(
    name: str,
    worker: int,
    got: NDArray,
    expected: ExpectedTensor,
    bounds: Bounds,
    claims: Capabilities,
) -> Finding:
    """Compare one tensor of one worker with the correct values."""
    want = expected.values[worker]
    if name == "lse":
        got = settle_empty_rows(got, want, claims)
    real = None if expected.real is None else expected.real[worker]
    finding = judge_tensor(
        name,
        got,
        want,
        expected.rounded[worker],
        expected.scale[worker],
        bounds.factors[name],
        None if real is None else ~real,
        floor=bounds.floors[name],
        worker=worker,
    )
    if not finding.ok:
        return finding
    bound = bounds.factors[name] * expected.scale[worker] + bounds.floors[name]
    return dataclasses.replace(finding, limit=limit_of(name, load(got), want, bound, real))


def limit_of(
    name: str, got: NDArray, want: NDArray, bound: NDArray, real: NDArray[np.bool_] | None
) -> float | None:
    """Return the smallest error that would be detected if every element had it; None if none would be.

    It is detected if it puts some element beyond its bound. The error is a fraction of each element; for lse it is an
    added constant. ``bound``: one for each element or each row. ``real`` [n]: True for rows that are compared.
    """
    if bound.ndim < want.ndim:
        bound = bound[..., None]
    bound = np.broadcast_to(bound, want.shape)
    size = np.ones(want.shape) if name == "lse" else np.abs(want)
    used = np.isfinite(want) & np.isfinite(got) & np.isfinite(bound) & (size > 0) & (bound > 0)
    if real is not None:
        used &= real.reshape((-1,) + (1,) * (want.ndim - 3))
    if not used.any():
        return None
    with np.errstate(over="ignore"):
        least = ((bound[used] + np.abs(got[used] - want[used])) / size[used]).min()
    return float(least) if np.isfinite(least) else None


def bounds_of(claims: Capabilities, call: Call, expected: Expected | None = None) -> Bounds:
    """Return the bounds of a call under its recipe.

    ``expected`` contains the correct lse, because the bounds depend on its size.
    """
    used = recipe_for(claims, call.formats)
    formats = {"outputs": call.formats["outputs"], "statistics": call.formats["statistics"]}
    if call.operation == "merge":
        parts, batch, heads, queries, width = call.worker("parts_o", 0).shape
        sizes = Sizes(workers=parts, keys=parts, head_dim=1, value_dim=width)
        largest = {"v": largest_of(call.tensors["parts_o"])}
        return Bounds(
            merge_factors(used, parts, **formats), bound_floors(used, sizes, largest, **formats)
        )
    sizes = sizes_of(call, expected or {})
    largest = {name: largest_of(call.tensors[name]) for name in MAGNITUDES if name in call.tensors}
    largest["scale"] = abs(call.terms["scale"])
    largest["dropout"] = 1.0 / (1.0 - call.terms.get("dropout_p", 0.0))
    return Bounds(
        bound_factors(used, sizes, **formats), bound_floors(used, sizes, largest, **formats)
    )


def sizes_of(call: Call, expected: Expected) -> Sizes:
    """Return the sizes of a ring or block call: how many terms its sums have, and how large its lse is."""
    q, k, v = (call.worker(name, 0) for name in ("q", "k", "v"))
    assert call.index_q is not None and call.index_k is not None
    heads, kv_heads = q.shape[1], k.shape[1]
    if call.heads_q is not None and call.heads_k is not None:
        heads, kv_heads = (int(x.max()) + 1 for x in (call.heads_q, call.heads_k))
    given_lse, condition, largest_lse = None, 0.0, 0.0
    if "lse" in expected:
        condition = largest_of(expected["lse"].scale)
        largest_lse = largest_of(expected["lse"].values)
    if call.operation == "block" and "lse" in call.tensors:
        given_lse = largest_lse = largest_of(call.tensors["lse"])
    return Sizes(
        workers=call.workers,
        keys=distinct(call.index_k),
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        queries=distinct(call.index_q) * (heads // kv_heads),
        batch=q.shape[0] * heads,
        softcap="softcap" in call.terms,
        given_lse=given_lse,
        condition=condition,
        largest_lse=largest_lse,
    )


def distinct(index: NDArray[np.int64]) -> int:
    """Return the number of tokens in a table, in which several ranks may have the same token."""
    return len(np.unique(index[index >= 0]))


def largest_of(arrays: PerWorker) -> float:
    """Return the largest finite magnitude in the arrays of all workers."""
    values = [np.abs(load(x)) for x in arrays]
    return float(max((x[np.isfinite(x)].max(initial=0.0) for x in values), default=0.0))
