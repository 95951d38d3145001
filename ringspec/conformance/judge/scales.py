"""Compute row scales in float64, and the rows that a case with sampled rows does not store.

A row scale is the magnitude that a row's error is divided by. In float64 it agrees with its exact value to a few 1e-13,
which is enough for an error bound. Some cases store the exact values of sampled rows only. Results in these rows are
compared with them. All other rows are compared with the definition in float64, which must first agree with the sampled
rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.cases.calls import Tensors, whole_inputs
from ringspec.formats import store
from ringspec.truth.dense import Named, in_float64
from ringspec.truth.expected import check_agreement
from ringspec.truth.sharded import per_worker
from ringspec.vectors.format.case import Case
from ringspec.vectors.generate import arguments_of, layouts_of_case

SAMPLED_TRUTH = "exact (sampled rows) and float64 (all others)"
EXACT_TRUTH = "exact"


def truth_text(case: Case) -> str:
    """Describe what the results of a case are compared with, for the report."""
    return SAMPLED_TRUTH if case.storage == "sampled" else EXACT_TRUTH


def evaluated(case: Case, tensors: Tensors) -> tuple[Named, Named]:
    """Return the results of a ring case and their row scales, per worker, in float64."""
    problem, upstream, tables = arguments_of(case, whole_inputs(case, tensors))
    values, scale = in_float64(problem, upstream, tables)
    return per_worker(values, tables, -np.inf), per_worker(scale, tables, 0.0)


def with_scales(case: Case, tensors: Tensors) -> dict[str, NDArray]:
    """Add the row scales ``scale.*`` of all results to the tensors of a ring case that has all rows."""
    scale = evaluated(case, tensors)[1]
    return {**tensors, **{f"scale.{name}": x for name, x in scale.items()}}


def with_all_rows(case: Case, tensors: Tensors) -> Tensors:
    """Fill in ``out.*`` and ``scale.*`` of a ring case that stores sampled rows; return other cases unchanged.

    Raises :class:`~ringspec.errors.UndecidedError` if float64 differs from a sampled row.
    """
    sides = [side for side in "qk" if f"rows.{side}" in tensors]
    if not sides:
        return tensors
    values, scale = evaluated(case, tensors)
    whole = {**layouts_of_case(case), **tensors}
    for side in sides:
        rows = whole.pop(f"rows.{side}")
        for name in ("o", "lse", "dq") if side == "q" else ("dk", "dv"):
            if f"out.{name}.float64" in tensors:
                check_agreement(
                    name,
                    np.stack([x[tuple(at.T)] for x, at in zip(values[name], rows, strict=True)]),
                    tensors[f"out.{name}.float64"],
                    tensors[f"scale.{name}"],
                )
                whole |= filled(name, values[name], scale[name], rows, tensors)
    return whole


def filled(
    name: str, values: NDArray, scale: NDArray, rows: NDArray[np.int64], tensors: Tensors
) -> dict[str, NDArray]:
    """Return one result [W, B, H, n(, d)] in float64 and in the case's format, with exact values in sampled rows."""
    whole = {f"scale.{name}": scale}
    for key in [key for key in tensors if key.startswith(f"out.{name}.")]:
        x = values.copy() if key.endswith(".float64") else store(values, key.split(".")[2])
        for worker, at in enumerate(rows):
            x[worker][tuple(at.T)] = tensors[key][worker]
        whole[key] = x
    return whole
