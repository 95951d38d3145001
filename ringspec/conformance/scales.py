"""Row scales in float64, for cases that do not store the correctly rounded ones.

They agree with those to a few 1e-13, and a bound needs no more.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ringspec.compare.row_scale import absolute_sums, row_scale
from ringspec.conformance.calls import Tensors
from ringspec.errors import CaseTensorsError
from ringspec.formats import load
from ringspec.spec.attention import normalise, scores
from ringspec.spec.dropout import keep_factor
from ringspec.spec.masks import visible
from ringspec.vectors.case import Case
from ringspec.vectors.generate import spec_problem, tables_of
from ringspec.vectors.ringwise import OF_KEYS, OF_QUERIES, slots_of


def with_scales(case: Case, tensors: Tensors) -> dict[str, NDArray]:
    """Whole tensors of a ring case, with ``scale.*`` for o, lse, dq, dk, dv.

    dsinks has the scale of its total on each worker, in equal parts. Needs the inputs in
    ``tensors``. Raises :class:`~ringspec.errors.CaseTensorsError` for a case with a bias.
    """
    if "in.bias" in tensors:
        raise CaseTensorsError("a case without a bias", case.id, "store its row scales")
    inputs = {name[3:]: x for name, x in tensors.items() if name.startswith("in.")}
    problem = spec_problem(case, inputs)
    rows, columns, terms = problem.rows, problem.columns, problem.terms
    s, _ = scores(problem)
    lse, p = normalise(problem, s)
    seeds = {
        "dy": np.zeros((*problem.q.shape[:3], problem.v.shape[3])),
        "dlse": np.zeros(lse.shape),
    }
    seeds |= {name: load(inputs[name]) for name in seeds if name in inputs}
    sums = absolute_sums(
        problem.q,
        problem.k,
        problem.v,
        seeds["dy"],
        seeds["dlse"],
        p,
        lse,
        visible(rows, columns, terms),
        terms.scale,
        rows.bias,
        keep_factor(rows, columns, terms, problem.q.shape[0]),
        terms.sinks,
    )
    scale, tables = row_scale(sums), tables_of(case, problem)
    scales = {}
    for names, table in ((OF_QUERIES, tables.q), (OF_KEYS, tables.k)):
        for name in names:
            scales[f"scale.{name}"] = slots_of(getattr(scale, name), table, 2, 0.0)
    if scale.dsinks is not None:
        scales["scale.dsinks"] = np.stack([scale.dsinks / tables.workers] * tables.workers)
    return {**tensors, **scales}
