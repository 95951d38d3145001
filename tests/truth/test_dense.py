"""Results and row scales in float64, part by part of the query rows."""

import numpy as np
import pytest
from oracle.cases import CASES, draw

from ringspec.problem.options import check
from ringspec.truth import dense
from ringspec.truth.dense import in_float64
from ringspec.truth.problem import Upstream, rows_of
from ringspec.truth.sharded import Tables

IN_PARTS = (
    "causal",
    "three sinks per head",
    "grouped heads",
    "dropout, batches and heads",
    "bias of every pair",
    "bias per head and key",
)
# In units of the row scale; the worst over OpenBLAS kernels is 1.0e-15, of a scale: a margin of ten.
BOUND = 1e-14
CHOSEN = [case for case in CASES if case.name in IN_PARTS]


def asked(case):
    data = draw(case)
    return check(data.q, data.k, data.v, data.options), Upstream(data.dy, data.dlse)


def agree(one, other):
    values, scale = one
    assert set(values) == set(other[0]) == set(scale) == set(other[1])
    for name, want in values.items():
        row = scale[name] if scale[name].ndim == want.ndim else scale[name][..., None]
        with np.errstate(invalid="ignore"):
            same = (want == other[0][name]) | (np.abs(want - other[0][name]) <= BOUND * row)
        assert same.all(), name
        assert np.all(np.abs(scale[name] - other[1][name]) <= BOUND * scale[name]), name


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
def test_parts_of_the_rows_join_to_what_all_rows_give(monkeypatch, case):
    whole, parts = in_float64(*asked(case)), []
    monkeypatch.setattr(dense, "PART", 1)  # one row at a time
    agree(whole, in_float64(*asked(case), tick=lambda: parts.append(1)))
    assert len(parts) == asked(case)[0].q.shape[2] > 1


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
def test_results_of_a_ring_come_back_in_the_order_of_the_tokens(case):
    problem, upstream = asked(case)
    rows = np.arange(problem.q.shape[2])
    table = np.full((2, rows.size), -1)
    table[0, : rows[1::2].size], table[1, : rows[::2].size] = rows[1::2], rows[::2]
    values, scale = in_float64(problem, upstream, Tables(table, table))
    for name in [name for name in values if name.endswith("_parts")]:
        whole = values[name.removesuffix("_parts")]
        assert np.allclose(values.pop(name).sum(axis=0), whole, rtol=0, atol=1e-12)
        scale.pop(name)
    agree(in_float64(problem, upstream), (values, scale))


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
def test_some_rows_are_those_of_the_whole_problem(case):
    problem, upstream = asked(case)
    rows = np.array([0, problem.q.shape[2] - 1])
    values, scale = in_float64(problem, upstream)
    some, sizes = in_float64(rows_of(problem, rows), upstream.take(rows))
    for name in ("o", "lse", "dq"):
        row = sizes[name] if name == "lse" else sizes[name][..., None]
        assert (np.abs(some[name] - values[name][:, :, rows]) <= BOUND * row).all(), name
        assert np.all(np.abs(scale[name][:, :, rows] - sizes[name]) <= BOUND * sizes[name]), name
